// SPDX-License-Identifier: Apache-2.0
// RankSaver: saves the tags of a rank: into the arena, with a file for what has no room there, or into a checkpoint
// (engine/checkpoint_saver.h). A sleep to host memory and a swap differ in when the memory goes: after the sleep, or
// page by page while the rest is copied.
//
// Owner: RankMemory; its lock is held at every call.
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
      : parts_(parts), images_(images), shares_(parts.host_codec), checkpoint_(parts, images) {}

  // Content -> images. Clean ones in the arena stand as they are. After an error call RegionImages::forget_saved().
  Result<orders::Save::Reply> save(const orders::Save& order);
  // The same, into the arena; the memory of what is safe there goes page by page, for another engine. After an error
  // the images are as far as they came, for take_back(), then forget_saved().
  Result<orders::Save::Reply> save_giving(const orders::Save& order, SwapChannel& channel);
  // Take back the memory that save_giving() gave: what was saved of it comes from the images, the rest is zeroed. A
  // page with bytes that were still to be copied never went. kDevice: a copy is not proven over, so nobody knows. May
  // be repeated.
  Status take_back(const std::vector<std::string>& tags);
  void on_detached() noexcept { pages_gone_ = false; }  // nothing can be taken back any more
  // Return what save() would do.
  Result<orders::Save::Reply> plan(const orders::Save& order) const;

  CheckpointSaver& checkpoint() { return checkpoint_; }
  bool spills() const { return !parts_.spill_dir.empty(); }  // what has no room in the arena
  // Return how much of the arena so many bytes of a tag will take: where they are packed, about so much.
  uint64_t held_for(std::string_view tag, uint64_t bytes) const { return shares_.held_for(tag, bytes); }

 private:
  Result<orders::Save::Reply> save_to_arena(const orders::Save& order, uint64_t unused);
  Result<ArenaPlan> prepare_giving(const orders::Save& order);
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
  bool pages_gone_ = false;  // for another engine, and not taken back with their content
};

}  // namespace torpor
