// SPDX-License-Identifier: Apache-2.0
// RankSteps: the steps of a rank's sleeps, wakes and checkpoints, and of requests that leave and come while its engine
// serves. A step carries out one order (rank_orders.h, which says which are all or nothing).
//
// Owner: RankMemory. Threads: the caller holds RankMemory's lock. Failure: errors are values.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "allocator/background_prefault.h"
#include "engine/named_weights.h"
#include "engine/rank_images.h"
#include "engine/rank_orders.h"
#include "engine/rank_parts.h"
#include "engine/rank_restorer.h"
#include "engine/rank_saver.h"
#include "engine/region_images.h"
#include "offload/host_store.h"

namespace torpor {

class RankSteps {
 public:
  // All outlive it. `prefault` may be null; the first sleep ends it.
  RankSteps(const RankParts& parts, RegionImages& images, NamedWeights& named_weights, BackgroundPrefault* prefault)
      : parts_(parts),
        images_(images),
        named_weights_(named_weights),
        prefault_(prefault),
        saver_(parts, images),
        restorer_(parts, images),
        request_images_(parts) {}

  // Carry out an order. A reply has no ledger: call RankMemory::fill() afterwards, so that nothing can fail once the
  // memory has been released.
  Result<orders::Describe::Reply> carry_out(const orders::Describe& order);
  Result<orders::Inform::Reply> carry_out(const orders::Inform& order);
  Result<orders::Save::Reply> carry_out(const orders::Save& order);
  Result<orders::PollSave::Reply> carry_out(const orders::PollSave& order);
  Result<orders::Undo::Reply> carry_out(const orders::Undo& order);
  Result<orders::Detach::Reply> carry_out(const orders::Detach& order);
  Result<orders::Restore::Reply> carry_out(const orders::Restore& order);
  Result<orders::PollRestore::Reply> carry_out(const orders::PollRestore& order);
  Result<orders::Finish::Reply> carry_out(const orders::Finish& order);
  Result<orders::DigestTags::Reply> carry_out(const orders::DigestTags& order);
  Result<orders::WriteTestFile::Reply> carry_out(const orders::WriteTestFile& order);
  Result<orders::Extract::Reply> carry_out(const orders::Extract& order);
  Result<orders::ReadImage::Reply> carry_out(const orders::ReadImage& order);
  Result<orders::SaveImage::Reply> carry_out(const orders::SaveImage& order);
  Result<orders::VerifyImage::Reply> carry_out(const orders::VerifyImage& order);
  Result<orders::Admit::Reply> carry_out(const orders::Admit& order);
  Result<orders::DropImage::Reply> carry_out(const orders::DropImage& order);
  Result<orders::CopyBlocks::Reply> carry_out(const orders::CopyBlocks& order);

  // Note that `tag` is of a program that shares this memory with an engine, or not. Orders for such tags alone leave
  // what the engine does meanwhile alone.
  void set_foreign(const std::string& tag, bool foreign);
  const std::set<std::string>& foreign() const { return foreign_; }
  const RankSaver& saver() const { return saver_; }
  Status nothing_deferred() const { return restorer_.nothing_deferred(); }
  // Stop what reads or writes a region that is about to be freed or trimmed.
  void before_free(const RegionInfo& region);
  // Keep `bytes` of staging memory for the blocks of a packed store for as long as it exists.
  void on_packed_store(std::weak_ptr<HostStore> store, uint64_t bytes);
  // Give unused memory back. If a part cannot be given back now, the next operation tries it again.
  void give_back_unused() noexcept;
  // A copy may still run: when this object ends, what it reads or writes stays until the process ends.
  void abandon() { request_images_.abandon(); }

 private:
  Result<orders::DigestTags::Reply> digest_named(bool as_proven);
  uint64_t writes_of_weights();  // how often they were written so far
  bool concerns_engine(const std::vector<std::string>& tags) const;
  Status nothing_moves();
  Status kv_is_attached() const;
  Result<orders::Save::Reply> save_all(const orders::Save& asked);
  Result<orders::Save::Reply> save_tags(const orders::Save& order);
  Result<orders::Save::Reply> save_for_swap(const orders::Save& order);
  Status cancel_save(const std::vector<std::string>& tags);
  Result<orders::Save::Reply> stop_and_copy(const orders::Save& order);
  Result<orders::Restore::Reply> restore_tags(const orders::Restore& order);
  Status has_room_for(const std::vector<std::string>& tags) const;

  const RankParts& parts_;
  RegionImages& images_;
  NamedWeights& named_weights_;
  BackgroundPrefault* const prefault_;
  std::set<std::string> foreign_;
  std::weak_ptr<HostStore> packed_store_;
  uint64_t packed_store_staging_ = 0;  // bytes
  RankSaver saver_;
  RankRestorer restorer_;
  RankImages request_images_;
};

}  // namespace torpor
