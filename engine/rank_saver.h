// SPDX-License-Identifier: Apache-2.0
// RankSaver: saves the tags of a rank: into the arena, with a file for what does not fit there, or into a checkpoint
// (engine/checkpoint_saver.h). A sleep to host memory releases the device memory afterwards; a swap-out releases it
// page by page while the rest is copied.
//
// Owner: RankMemory. Threads: the caller holds RankMemory's lock.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/swap_channel.h"
#include "engine/arena_plan.h"
#include "engine/checkpoint_saver.h"
#include "engine/packed_shares.h"
#include "engine/rank_orders.h"
#include "engine/rank_parts.h"
#include "engine/region_images.h"
#include "engine/release_gate.h"

namespace torpor {

class RankSaver {
 public:
  RankSaver(const RankParts& parts, RegionImages& images)  // both outlive it
      : parts_(parts), images_(images), shares_(parts), checkpoint_(parts, images) {}

  // Copy the tags' content into images. Clean images in the arena are kept as they are. After an error call
  // RegionImages::forget_saved().
  Result<orders::Save::Reply> save(const orders::Save& order);
  // The same, into the arena, but release each page to another engine as soon as its content is saved. After an error
  // the images are as far as they came: call reacquire_pages(), then RegionImages::forget_saved().
  Result<orders::Save::Reply> save_for_swap(const orders::Save& order, SwapChannel& channel);
  // Acquire again the memory that save_for_swap() released. Its saved bytes are copied back from the images; the rest
  // is zeroed. (A page with bytes that were not saved was never released.) kDevice: a copy may still run, so the
  // content is unknown. May be repeated.
  Status reacquire_pages(const std::vector<std::string>& tags);
  void on_detached() noexcept { pages_released_ = false; }  // from now on nothing is acquired again
  // Return the reply that save() would give. Nothing changes.
  Result<orders::Save::Reply> plan(const orders::Save& order) const;

  CheckpointSaver& checkpoint() { return checkpoint_; }
  bool spills() const { return !parts_.spill_dir.empty(); }  // whether a file takes what does not fit into the arena
  // Return how many bytes of the arena `bytes` of a tag will need; an estimate if chunks are packed.
  uint64_t held_for(std::string_view tag, uint64_t bytes) const { return shares_.held_for(tag, bytes); }

 private:
  Result<orders::Save::Reply> save_to_arena(const orders::Save& order, uint64_t unused);
  Result<ArenaPlan> prepare_for_swap(const orders::Save& order);
  Status begin_images(ArenaPlan& plan);
  Status spill(const ArenaPlan& plan, ArenaPlan::Tag& tag);
  Status copy_to_host(ArenaPlan& plan, ReleaseGate* gate);
  enum class Memory : uint8_t { kThere, kGone };
  orders::Save::Reply complete_images(ArenaPlan& plan, Memory memory);
  void forget(ArenaPlan& plan, const std::vector<std::string>& tags) noexcept;
  void abandon_quarantined(const std::vector<std::string>& tags) noexcept;

  const RankParts& parts_;
  RegionImages& images_;
  PackedShares shares_;
  CheckpointSaver checkpoint_;
  bool pages_released_ = false;  // for another engine, and not acquired again yet
};

}  // namespace torpor
