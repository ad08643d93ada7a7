// SPDX-License-Identifier: Apache-2.0
// All that a checkpoint has of a rank, by place: of RegionImages alone.
#pragma once

#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <vector>

#include "checkpoint/rank_writer.h"
#include "engine/region_images.h"

namespace torpor {

struct RegionImages::Storing {
  // Of KV blocks the key alone: there are many, most of them are linked, and where the rest lie is said by
  // RegionImages::plans_at().
  std::vector<ChunkPlan> plans;
  uint64_t block_bytes = 0;
  std::vector<SavedChunk> records;  // of these
  std::vector<size_t> linked;       // places of those that the base has
  std::vector<size_t> missing;      // and of those that it has not
  // Of `linked`: KV blocks that the base has under another number.
  std::unordered_map<size_t, uint64_t> other_numbers;

  void add(std::vector<ChunkPlan> more) {
    std::move(more.begin(), more.end(), std::back_inserter(plans));
    records.resize(plans.size());
  }
  uint64_t bytes_at(size_t place) const {
    const ChunkPlan& plan = plans[place];
    return plan.key.kind == ChunkKind::kKvBlock ? block_bytes : plan.bytes();
  }
  Status take_over_linked(RankWriter& writer) {
    for (const size_t place : linked) {
      ChunkKey there = plans[place].key;
      if (const auto other = other_numbers.find(place); other != other_numbers.end()) there.index = other->second;
      TORPOR_ASSIGN(records[place], writer.take_over(there));
      records[place].key = plans[place].key;
    }
    return ok();
  }
  // Return the places, of the first `own`, whose linked records are to be written again, because they lie in sparse
  // files (RankWriter::sparse()). If a sparse file has carried records, drop all that is carried: it is never read.
  std::vector<size_t> leave_sparse(RankWriter& writer, size_t own) {
    std::vector<size_t> sparse = writer.sparse(records);
    if (std::any_of(sparse.begin(), sparse.end(), [own](size_t place) { return place >= own; })) {
      shrink(own);
      std::erase_if(sparse, [own](size_t place) { return place >= own; });
    }
    return sparse;
  }
  void shrink(size_t size) {
    plans.erase(plans.begin() + static_cast<std::ptrdiff_t>(size), plans.end());
    records.resize(size);
    for (std::vector<size_t>* const places : {&linked, &missing})
      std::erase_if(*places, [size](size_t place) { return place >= size; });
  }
};

}  // namespace torpor
