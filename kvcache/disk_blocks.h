// DiskBlocks: KV blocks on disk: one file of fixed slots, each a header page and the block's bytes.
//
// A header says what is in its slot: the block's identity, the digest of its bytes, whose KV it is, and the digest of
// the header itself. So the index is rebuilt from the file after a restart, and what does not fit is a miss, never data
// (I8).
//
// A disk that fails does not stop the engine: puts and gets fail, the store says that it is degraded, and after
// `retry_interval` it is tried again. Nothing is synced: after a power cut some blocks are misses.
//
// Byte order and layout are the machine's; a file of another kind of machine is not recognized and its slots are empty.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/file_system.h"
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
  // Opens or makes the file "blocks" in `directory` and registers what it holds. kResourceExhausted when the disk has
  // no room for all slots, kUnavailable when another process uses them. `clock` and `sink` (may be null) outlive the
  // result.
  static Result<std::unique_ptr<DiskBlocks>> open(Directory& directory, DiskBlocksOptions options, const Clock& clock,
                                                  EventSink* sink = nullptr);

  std::string_view kind() const override { return "disk"; }
  bool addressable() const override { return false; }
  bool accepting() const override;
  void claim(int32_t slot, const BlockIdentity& identity) override;
  void put(std::span<TierPart> parts) override;
  void get(std::span<TierPart> parts) override;
  DiskBlocksHealth health() const;

 private:
  DiskBlocks(std::unique_ptr<BlockPool> pool, DiskBlocksOptions options, std::unique_ptr<File> lock,
             std::unique_ptr<File> file, const Clock& clock);
  Status recover();
  uint64_t stride() const;
  uint64_t offset(int32_t slot) const { return static_cast<uint64_t>(slot) * stride(); }
  void note(const Status& status, bool write);

  const DiskBlocksOptions options_;
  const std::unique_ptr<File> lock_;
  const std::unique_ptr<File> file_;
  const Clock& clock_;
  std::vector<BlockIdentity> claims_;  // by slot; its owner's
  mutable std::mutex mutex_;           // guards all below
  DiskBlocksHealth health_;
  std::chrono::nanoseconds failed_at_{};
};

}  // namespace torpor
