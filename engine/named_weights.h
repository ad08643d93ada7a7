// SPDX-License-Identifier: Apache-2.0
// NamedWeights: the pieces of device memory that the owner of a rank names as its engine's weights, and their digest.
// It covers the named bytes alone, wherever they lie in their regions: other bytes of the tag, and addresses, may
// differ between two processes of an engine.
//
// Owner: RankMemory. Threads: the caller holds RankMemory's lock.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/rank_orders.h"
#include "engine/rank_parts.h"
#include "offload/transfer_job.h"

namespace torpor {

class NamedWeights {
 public:
  explicit NamedWeights(const RankParts& parts) : parts_(parts) {}  // outlives it

  // Name these pieces, in this order. `label`: which weights, and of what kind. kInvalidArgument: a piece lies in no
  // region of the weights; then nothing changes.
  Status set(std::string label, std::vector<DevicePiece> pieces);
  bool any() const { return any_; }
  // Return the digest of the named bytes. `writes`: how often their tag was written so far. With `as_proven` an earlier
  // digest holds if nothing was written since. kFailedPrecondition: the weights are not on the device.
  Result<orders::DigestTags::Reply> digest(bool as_proven, uint64_t writes);
  // Return what to read for a digest in the background; empty: there is nothing to read, or an earlier one holds.
  // note_watched() takes it, unless weights were written or doubted since. Thread: that of the other calls.
  std::vector<ChunkPlan> watch(uint64_t writes);
  void note_watched(std::string digest);
  // Take the digest anew when it is needed next.
  void invalidate() { digest_.clear(), watched_.reset(); }
  // Forget the names if a named piece lies in this region.
  void on_freed(const RegionInfo& region);

 private:
  bool attached() const;
  std::vector<ChunkPlan> plans() const;

  const RankParts& parts_;
  bool any_ = false;
  std::string label_;
  std::vector<DevicePiece> pieces_;
  std::string digest_;               // empty: not known
  uint64_t writes_ = 0;              // of the tag, when the digest was taken
  std::optional<uint64_t> watched_;  // of the tag, at watch(); none: what is read since then does not count
};

}  // namespace torpor
