#include "checkpoint/manifest.h"

namespace torpor {

const RankSummary* Manifest::find_rank(int32_t rank) const {
  for (const RankSummary& each : ranks) {
    if (each.rank == rank) return &each;
  }
  return nullptr;
}

uint64_t Manifest::total_bytes() const {
  uint64_t sum = 0;
  for (const SectionInfo& section : sections) sum += section.stored_bytes;
  for (const RankSummary& rank : ranks) sum += rank.refs_bytes + rank.own_bytes();
  return sum;
}

uint64_t Manifest::linked_bytes() const {
  uint64_t sum = 0;
  for (const RankSummary& rank : ranks) {
    for (size_t i = 1; i < rank.files.size(); ++i) sum += rank.files[i].bytes;
  }
  return sum;
}

}  // namespace torpor
