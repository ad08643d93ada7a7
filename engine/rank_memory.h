// SPDX-License-Identifier: Apache-2.0
// RankMemory: the memory of one worker rank: its device, its regions by tag, its arena, and the transfers between them.
//
// RankService takes the steps of sleeps and wakes (RankSteps) for the controller of an engine, TagSleep for programs
// without a controller. They hold the lock over all steps that belong together.
//
// Owner: the worker process, for as long as its engine lives. Threads: any; methods marked with TORPOR_REQUIRES need
// the lock. Failure: errors are values. A forked child has the addresses, but not the device: same_process().
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>

#include "allocator/background_prefault.h"
#include "allocator/host_arena.h"
#include "allocator/sleep_allocator.h"
#include "base/file_system.h"
#include "base/mutex.h"
#include "engine/named_weights.h"
#include "engine/rank_parts.h"
#include "engine/rank_steps.h"
#include "engine/region_images.h"
#include "engine/tag_loader.h"
#include "kvcache/kv_layout.h"
#include "offload/blocking_transfers.h"
#include "offload/transfer_engine.h"

namespace torpor {

struct RankMemoryOptions {
  int32_t rank = 0;
  uint64_t arena_budget_bytes = 0;  // 0: no limit
  // The size of the pieces in which host memory is taken from the system; the first ones are smaller.
  uint64_t arena_slab_bytes = 64ull << 20;
  // How much host memory the system can give (HostArenaOptions::free_memory), in a test. Null: memory_before_kill().
  std::function<std::optional<uint64_t>()> free_memory{};
  uint64_t handle_bytes = 64ull << 20;  // size of the pieces of the device's physical memory
  // Host memory to prefault from the start. None: a background prefault, on a device with memory of its own
  // (allocator/background_prefault.h), of what the first sleep will need: the bytes of all regions, of which the KV
  // cache counts at most as much as all others together. It stops when the system has less than half of its memory free
  // (base/free_memory.h). The first sleep ends it.
  std::optional<uint64_t> arena_prefault_bytes = 0;
  // Do not begin the background prefault before start_prefault(). For an engine that loads weights and captures CUDA
  // graphs first: memory is pinned slowly beside that.
  bool prefault_waits = false;
  BackgroundPrefault::Headroom prefault_headroom{};  // how much the background prefault may take, in a test
  // The most host memory that stays held between operations, ready for the next sleep. Memory of backups stays in any
  // case. None: no limit; but 0 on the device without a GPU, unless backups are kept, as its memory comes from the same
  // system.
  std::optional<uint64_t> arena_keep_bytes;
  HugePages huge_pages;  // of host memory
  // Number of threads for copies and digests, and again for files. 0: one for each core of the machine, at most 8.
  int threads = 0;
  bool own_threads =
      true;  // off: the thread that waits makes the copies, in one order, and maps memory before them (TransferEngine)
  // Keep backups after a wake. The backup of the weights is not copied again until the owner marks them dirty; so the
  // owner promises that nothing else writes them. Backups of other tags serve only CleanCheck::kDigest of TagSleep.
  // None: off.
  std::optional<bool> keep_backup;
  // The most bytes of KV blocks whose backup is retained after a wake, so that the next sleep copies only what has
  // changed since. The arena evicts them if it needs the memory. None: no limit; but 0 on the device without a GPU.
  std::optional<uint64_t> retain_kv_bytes;
  // Codec of saved chunks in the arena. kBf16: each chunk is packed if that makes it smaller.
  Codec host_compression = Codec::kNone;
  std::shared_ptr<const Key> key;  // for the chunk files of sealed checkpoints; null: there is no key
  // Directory of a file for what does not fit into the arena's budget at a sleep. No other process sees the file, and
  // it lasts as long as the sleep. With a key it is sealed, with `encrypt` also encrypted. Empty: such a sleep fails.
  std::string spill_dir;
  bool encrypt = false;
  // Bytes of the budget that a sleep with such a file keeps free, to bring its chunks back; at most a quarter of the
  // budget.
  uint64_t spill_staging_bytes = 64ull << 20;
  EventPort events{};  // receives each batch of copies, and the memory after each operation
  // The size of the jobs that bring deferred blocks of a wake. Without `deferred_thread` they are copied only while a
  // caller waits for them, in one order.
  uint64_t deferred_job_bytes = 64ull << 20;
  bool deferred_thread = true;
};

Error of_another_process(int64_t process);  // that memory belongs to the process with this id, which forked

class RankMemory {
 public:
  // Make the memory of a rank. kInvalidArgument: host_compression is a codec for files. Other errors: those of the
  // arena, the allocator and the transfers.
  static Result<std::unique_ptr<RankMemory>> create(std::unique_ptr<DeviceMemory> device, FileSystem& file_system,
                                                    RankMemoryOptions options = {});
  ~RankMemory();

  // Apply the options of an engine that comes into this memory, which allocations of its program may have made before.
  // The rank, key, encryption, prefault and directory of the spill file are as the options say; of the others, those
  // they give. Handles, slabs, threads and the sizes of deferred jobs stay as they are. A prefault begins with
  // start_prefault(). kInvalidArgument: as create().
  Status apply(const RankMemoryOptions& options);
  // Allocate a zeroed region. Its address is valid for the life of this object, its bytes while its tag is attached.
  Result<DeviceAddress> allocate(std::string_view tag, std::string_view name, uint64_t size_bytes);
  // Note that `tag` is of a program that shares this memory with an engine, or not: replies to orders leave it out.
  void set_foreign(const std::string& tag, bool foreign);
  // Free a region. If it has weights or KV blocks, a checkpoint that is being written ends. Errors: those of
  // SleepAllocator::free().
  Status free(DeviceAddress address);
  // The same for a caller that cannot try again. What cannot be freed now is freed later: at the end of a move of
  // tags, or when something is freed, falls asleep or wakes.
  Status free_soon(DeviceAddress address);
  // Give the memory of a region that is not in use back to the device. Its addresses stay reserved until free();
  // sleeps, wakes and ledgers ignore it from then on. Return the bytes given back. A checkpoint that is being written
  // ends, as by free(). Errors: those of SleepAllocator::trim().
  Result<uint64_t> trim(DeviceAddress address);
  // Read saved bytes of a region. kNotFound: they lie in no region, or nothing is saved of them.
  Status read_saved(DeviceAddress address, std::span<std::byte> out) const;
  // Make `tag` the one that holds KV blocks with this layout.
  Status set_kv_layout(std::string tag, KvLayout layout);
  // Make a store of KV blocks in the arena. A sleep need not copy blocks that an order names in it
  // (orders::Save::host_slots). With a packed store, staging memory is reserved for as long as the store exists.
  // kResourceExhausted: the arena has no memory for both; then nothing is held.
  Result<std::shared_ptr<HostStore>> make_host_store(const HostStoreOptions& options);
  // Note that the owner has changed bytes of `tag`, so that a kept backup is not its content any more. On the device
  // without a GPU most writes are also noticed without this call, when the tag is described next, by a sample of its
  // bytes.
  void mark_dirty(std::string_view tag);
  // Name the engine's weights: these pieces of regions of the weights' tag, in this order. `label`: which weights, and
  // of what kind. A fingerprint then covers these bytes alone; other bytes of the tag, and addresses, may differ
  // between two processes of an engine. kInvalidArgument: a piece lies elsewhere.
  Status name_weights(std::string label, std::vector<DevicePiece> pieces);
  // Return the digest of the named weights; if none are named, of the whole tag.
  Result<std::string> weights_digest();
  // Note that the owner may have changed bytes of `tag`: its digest is taken anew when it is needed next.
  void invalidate_digest(std::string_view tag);
  // Fill the attached regions of a tag with what a committed checkpoint has of this rank. Each piece is verified by its
  // digest, and its seal, before it is copied. kIncompatible: the checkpoint has other regions, or nothing of the tag.
  Result<LoadedTag> load_tag(const StoredTag& stored);
  // Return the digest of the content that load_tag() filled in; none if a write was seen since.
  std::optional<std::string> proven_digest(const std::string& tag);

  RankLedger ledger() const;
  const EventPort& events() const { return options_.events; }
  // Begin the background prefault that options.prefault_waits holds back. It does nothing if it has begun.
  void start_prefault();
  // Prefault nothing more, and wait for the current piece. Call it before the process ends: no thread may call the
  // driver of a GPU while that shuts down.
  void end_prefault() noexcept;
  void wait_background_prefault() const noexcept {
    if (prefault_ != nullptr) prefault_->wait();
  }
  std::map<std::string, RegionState> states() const { return allocator_->states(); }
  // For an engine that offloads KV blocks while it serves. Both live as long as this object.
  TransferEngine& transfers() { return *transfers_; }
  HostArena& arena() { return *arena_; }
  // Return the merged layout, after set_kv_layout(). It needs no lock, as the layout does not change while an engine
  // serves.
  const KvLayout& kv_layout() const TORPOR_NO_THREAD_SAFETY_ANALYSIS { return images_->chunks().kv_layout(); }

  // --- for RankService and TagSleep ---
  RankSteps& steps() TORPOR_REQUIRES(mutex_) { return *steps_; }
  void free_left() noexcept TORPOR_REQUIRES(mutex_);  // what free_soon() left
  void fill(RankLedger& ledger) const TORPOR_REQUIRES(mutex_);
  const std::set<std::string>& foreign() const TORPOR_REQUIRES(mutex_) { return steps_->foreign(); }
  RegionImages& images() TORPOR_REQUIRES(mutex_) { return *images_; }
  const SleepAllocator& allocator() const { return *allocator_; }
  DeviceMemory& device() { return *device_; }
  int32_t rank() const { return parts_->rank; }
  Status same_process() const;  // asked before a lock: in a forked child it may be held for ever
  Mutex& mutex() const TORPOR_RETURN_CAPABILITY(mutex_) { return mutex_; }

 private:
  RankMemory(std::unique_ptr<DeviceMemory> device, RankMemoryOptions options);
  Status free_now(DeviceAddress address) TORPOR_REQUIRES(mutex_);
  void forget(const RegionInfo& region) TORPOR_REQUIRES(mutex_);  // after the region was freed or trimmed
  void publish(const RankLedger& ledger) const noexcept;

  const RankMemoryOptions options_;
  const int64_t process_;  // process id of the maker
  mutable Mutex mutex_;    // held for one sleep, wake or order
  // Made by create(). Members without a guard are safe from any thread.
  std::unique_ptr<DeviceMemory> device_;
  std::unique_ptr<HostArena> arena_;
  std::unique_ptr<BackgroundPrefault> prefault_;  // null: the device has no memory of its own
  std::atomic<bool> prefault_wanted_ = false;     // by the options
  std::atomic<uint64_t> prefault_waiting_ = 0;    // bytes that start_prefault() will ask for
  std::unique_ptr<SleepAllocator> allocator_;
  std::unique_ptr<TransferEngine> transfers_;
  std::unique_ptr<BlockingTransfers> blocking_transfers_;
  std::unique_ptr<RankParts> parts_;
  std::unique_ptr<RegionImages> images_ TORPOR_PT_GUARDED_BY(mutex_);
  std::unique_ptr<NamedWeights> named_weights_ TORPOR_PT_GUARDED_BY(mutex_);
  std::unique_ptr<RankSteps> steps_ TORPOR_PT_GUARDED_BY(mutex_);
  uint64_t kv_bytes_ TORPOR_GUARDED_BY(mutex_) = 0;  // of the regions
  uint64_t other_bytes_ TORPOR_GUARDED_BY(mutex_) = 0;
  std::vector<DeviceAddress> left_ TORPOR_GUARDED_BY(mutex_);  // by free_soon()
};

}  // namespace torpor
