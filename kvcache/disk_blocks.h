// DiskBlocks: KV blocks on disk: one file of fixed slots, each a header page and the block's bytes.
//
// A header says what is in its slot: the block's identity, the digest of its bytes, whose KV it is, and the digest of
// the header itself. So the index is rebuilt from the file after a restart, and what does not fit is a miss, never data
// (I8).
//
// Whose KV it is: the owner that the caller names, and the epoch, a random number in the file "blocks.epoch". A new
// epoch makes all that was written before a miss, for ever: forget_all(), when the weights change.
//
// A disk that fails does not stop the engine: puts and gets fail, the store says that it is degraded, and after
// `retry_interval` it is tried again. Nothing is synced: after a power cut some blocks are misses.
//
// Byte order and layout are the machine's; a file of another kind of machine is not recognized and its slots are empty.
#pragma once

#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/file_system.h"
#include "base/mutex.h"
#include "kvcache/block_store.h"

namespace torpor {

struct DiskBlocksOptions {
  BlockPoolOptions pool;
  uint64_t bytes_per_block = 0;
  Digest owner;  // of all that a block's bytes depend on beside its tokens: model, weights, layout, dtype, rank
  FileIo io = FileIo::kFastest;
  std::chrono::milliseconds retry_interval{10'000};
};

struct DiskBlocksHealth {
  std::string io;  // how bytes go: File::io()
  bool degraded = false;
  std::string reason;  // the last failure
  uint64_t write_errors = 0;
  uint64_t read_errors = 0;
  int32_t recovered = 0;  // blocks that were found in the file at the start
};

class DiskBlocks final : public BlockStore {
 public:
  // Opens or makes the files "blocks" and "blocks.epoch" in `directory` and registers what it holds. kResourceExhausted
  // when the disk has no room for all slots, kUnavailable when another process uses them. `clock` and `sink` (may be
  // null) outlive the result.
  static Result<std::unique_ptr<DiskBlocks>> open(Directory& directory, DiskBlocksOptions options, const Clock& clock,
                                                  EventSink* sink = nullptr);

  std::string_view kind() const override { return "disk"; }
  bool addressable() const override { return false; }
  bool accepting() const override;
  void claim(int32_t slot, const BlockIdentity& identity) override;
  void put(std::span<TierPart> parts) override;
  void get(std::span<TierPart> parts) override;
  DiskBlocksHealth health() const;

  // Something changed that blocks depend on: those in the slots are never found again, after a restart neither. Blocks
  // from now on belong to `owner`; none: nobody can say of which weights they are, so a restart finds none of them.
  // Durable when it returns. After an error nothing is found either, and nothing is put until the new epoch is durable
  // (tried again as after other failures; for good where its fsync failed). Precondition: no block is on its way here.
  Status forget_all(std::optional<Digest> owner = {});

 private:
  using Epoch = std::array<std::byte, 16>;
  DiskBlocks(std::unique_ptr<BlockPool> pool, DiskBlocksOptions options, std::unique_ptr<File> lock,
             std::unique_ptr<File> file, std::unique_ptr<File> epoch, const Clock& clock);
  Status read_epoch();
  Status make_epoch_durable();
  Status recover();
  uint64_t stride() const;
  uint64_t offset(int32_t slot) const { return static_cast<uint64_t>(slot) * stride(); }
  void note(const Status& status, bool write);

  const DiskBlocksOptions options_;
  const std::unique_ptr<File> lock_;
  const std::unique_ptr<File> file_;
  const std::unique_ptr<File> epoch_file_;
  const Clock& clock_;
  std::vector<BlockIdentity> claims_;  // by slot; its owner's
  mutable Mutex mutex_;                // never held over a read, a write or a sync
  Epoch epoch_ TORPOR_GUARDED_BY(mutex_){};
  Digest owner_ TORPOR_GUARDED_BY(mutex_);  // the caller's, and the epoch
  bool epoch_is_durable_ TORPOR_GUARDED_BY(mutex_) = false;
  bool epoch_is_lost_ TORPOR_GUARDED_BY(mutex_) = false;  // an fsync of it failed
  DiskBlocksHealth health_ TORPOR_GUARDED_BY(mutex_);
  std::chrono::nanoseconds failed_at_ TORPOR_GUARDED_BY(mutex_){};
};

}  // namespace torpor
