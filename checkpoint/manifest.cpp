#include "checkpoint/manifest.h"

#include <set>

namespace torpor {

std::vector<uint64_t> Manifest::needs() const {
  std::set<uint64_t> generations;
  for (const RankChunks& rank : ranks) {
    for (const ChunkFile& file : rank.files) {
      if (file.generation != 0) generations.insert(file.generation);
    }
  }
  return {generations.begin(), generations.end()};
}

uint64_t Manifest::total_bytes() const {
  uint64_t sum = 0;
  for (const SectionInfo& section : sections) sum += section.stored_bytes;
  for (const RankChunks& rank : ranks) sum += rank.files.empty() ? 0 : rank.files[0].bytes;
  return sum;
}

}  // namespace torpor
