// All that a checkpoint has of a rank, by place: of RegionImages alone.
#pragma once

#include <algorithm>
#include <iterator>
#include <span>
#include <vector>

#include "engine/region_images.h"

namespace torpor {

struct RegionImages::Storing {
  std::vector<ChunkPlan> plans;
  std::vector<SavedChunk> records;  // of these
  std::vector<size_t> linked;       // places of those that the base has
  std::vector<size_t> missing;      // and of those that it has not

  void add(std::vector<ChunkPlan> more) {
    std::move(more.begin(), more.end(), std::back_inserter(plans));
    records.resize(plans.size());
  }
  std::vector<ChunkPlan> plans_at(std::span<const size_t> places) const {
    std::vector<ChunkPlan> found;
    found.reserve(places.size());
    for (const size_t place : places) found.push_back(plans[place]);
    return found;
  }
  void shrink(size_t size) {
    plans.erase(plans.begin() + static_cast<std::ptrdiff_t>(size), plans.end());
    records.resize(size);
    for (std::vector<size_t>* const places : {&linked, &missing})
      std::erase_if(*places, [size](size_t place) { return place >= size; });
  }
};

}  // namespace torpor
