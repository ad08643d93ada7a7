// SPDX-License-Identifier: Apache-2.0
// RankMemory: the memory of one worker rank: its device, its regions by tag, its arena, what carries bytes between
// them, and the steps of a sleep and a wake. A step is an order (rank_orders.h); each is all or nothing.
//
// Who takes the steps: RankService for the controller of an engine, TagSleep for programs without one. They hold the
// lock over all that belongs together.
//
// Owner: the worker process, for as long as its engine lives. Threads: any; what says so needs the lock. A forked child
// has the addresses, but not the device: same_process().
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "allocator/background_prefault.h"
#include "allocator/host_arena.h"
#include "allocator/sleep_allocator.h"
#include "base/file_system.h"
#include "base/mutex.h"
#include "engine/rank_images.h"
#include "engine/rank_orders.h"
#include "engine/rank_parts.h"
#include "engine/rank_restorer.h"
#include "engine/rank_saver.h"
#include "engine/region_images.h"
#include "engine/tag_loader.h"
#include "kvcache/kv_layout.h"
#include "offload/transfer_engine.h"

namespace torpor {

struct RankMemoryOptions {
  int32_t rank = 0;
  uint64_t arena_budget_bytes = 0;          // 0: no limit
  uint64_t arena_slab_bytes = 64ull << 20;  // host memory is taken from the system in pieces of this size,
                                            // the first ones smaller
  uint64_t handle_bytes = 64ull << 20;      // physical memory of the device is made in pieces of this size
  // Host memory that is brought up in the background from the start. None: on a device with memory of its own, quietly
  // (allocator/background_prefault.h) what the first sleep will need: all regions, of KV blocks as much as of all else
  // at most, as long as the system has half of its memory free (base/free_memory.h). The first sleep ends it.
  std::optional<uint64_t> arena_prefault_bytes = 0;
  // None of that before start_prefault(): for an engine that captures CUDA graphs first, and loads, beside which pinned
  // memory is slow to come.
  bool prefault_waits = false;
  BackgroundPrefault::Room prefault_room{};  // that, in a test
  // Most host memory that stays held between operations, for the next sleep to find it ready; what backups need stays
  // in any case. None: any amount; but 0 on the device without a GPU, where it is taken from the same memory.
  std::optional<uint64_t> arena_keep_bytes;
  // For copies and digests, and as many for files; 0: as many as the machine has cores, at most 8.
  int threads = 0;
  bool own_threads =
      true;  // off: who waits makes the copies, in one order, and maps memory before them (TransferEngine)
  // Backups are kept after a wake. That of the weights is not copied again until somebody marks them dirty: the owner's
  // word that nobody else writes them. Those of other tags only serve TagSleep's CleanCheck::kDigest. None: off.
  std::optional<bool> keep_backup;
  // Most bytes of KV blocks whose backup is kept after a wake, for the next sleep to copy only what changed since. They
  // go where the arena needs room. None: any amount; but 0 on the device without a GPU.
  std::optional<uint64_t> retain_kv_bytes;
  // kBf16: what of a sleep lies in the arena is packed, chunk by chunk, where that makes it smaller. kNone: it is not.
  Codec host_compression = Codec::kNone;
  std::shared_ptr<const Key> key;  // for chunk files of sealed checkpoints; null: there is none
  // What has no room in the arena's budget at a sleep goes to a file there that nobody else sees, for as long as the
  // sleep lasts; with a key it is sealed, with `encrypt` also unreadable. Empty: such a sleep fails.
  std::string spill_dir;
  bool encrypt = false;
  // Of the budget, kept free meanwhile for bringing it back; at most a quarter of it.
  uint64_t spill_staging_bytes = 64ull << 20;
  EventPort events{};  // each batch of copies, and what memory there is after each operation
  // Deferred blocks of a wake come in jobs of this size. Off: they move when somebody asks for them, in one order.
  uint64_t deferred_job_bytes = 64ull << 20;
  bool deferred_thread = true;
};

class RankMemory {
 public:
  static Result<std::unique_ptr<RankMemory>> create(std::unique_ptr<DeviceMemory> device, FileSystem& file_system,
                                                    RankMemoryOptions options = {});
  ~RankMemory();

  // A new zeroed region; its address is valid for the life of this object, its bytes while its tag is attached.
  Result<DeviceAddress> allocate(std::string_view tag, std::string_view name, uint64_t size_bytes);
  Status free(DeviceAddress address);
  // Give the memory of a region of which nothing is in use back to the device. Its addresses stay taken until free();
  // no sleep, wake or ledger has it from then on. Return the bytes given back. A checkpoint that is
  // being written is given up, as by free(). Errors: SleepAllocator::trim().
  Result<uint64_t> trim(DeviceAddress address);
  // What is saved of these bytes of a region. kNotFound: they are in none, or nothing is.
  Status read_saved(DeviceAddress address, std::span<std::byte> out) const;
  // From now on `tag` holds KV blocks laid out like this.
  Status set_kv_layout(std::string tag, KvLayout layout);
  // A store of its blocks in the arena, from which a sleep need not copy what orders name there
  // (orders::Save::host_slots). For a packed one staging memory is kept for as long as the store is there.
  // kResourceExhausted: there is no room for both; nothing of them is held then.
  Result<std::shared_ptr<HostStore>> make_host_store(const HostStoreOptions& options);
  // The owner changed bytes of `tag`: a kept backup is no longer that of its content. On the device without a GPU most
  // changes are noticed without it, when the tag is described next: a sample of its bytes is compared.
  void mark_dirty(std::string_view tag);
  // The engine's weights are these bytes of regions of their tag, in this order; `label` says which and of what kind. A
  // fingerprint is of them alone: beside them, and in where they lie, two processes of an engine may differ.
  // kInvalidArgument: they lie elsewhere.
  Status name_weights(std::string label, std::vector<DevicePiece> pieces);
  // Return the digest of the named weights, or of their whole tag where none were named.
  Result<std::string> weights_digest();
  // Somebody may have: what was known of its content is not believed any more, and is read when it is wanted next.
  void invalidate_digest(std::string_view tag);
  // Fills the regions of a tag, which are there and attached, with what a committed checkpoint has of this rank's: each
  // piece is proved by its digest, and seal, before it is copied. kIncompatible: other regions, or nothing of the tag.
  Result<LoadedTag> load_tag(const StoredTag& stored);
  // Of what load_tag() filled: its digest, unless it was seen to be written since.
  std::optional<std::string> proven_digest(const std::string& tag);

  RankLedger ledger() const;
  const EventPort& events() const { return options_.events; }
  // Begin to bring up host memory, where options.prefault_waits holds it back; else it has begun.
  void start_prefault();
  // Bring up no more host memory from now on, and wait for what is being brought up. For the end of the process: no
  // thread may call the driver of a GPU once that shuts down.
  void end_prefault() noexcept;
  void wait_background_prefault() const noexcept {
    if (prefault_ != nullptr) prefault_->wait();
  }
  std::map<std::string, RegionState> states() const { return allocator_->states(); }
  // For an engine that moves KV blocks between tiers while it serves; both live as long as this object.
  TransferEngine& transfers() { return *transfers_; }
  HostArena& arena() { return *arena_; }
  // After set_kv_layout(), merged. No lock: it does not change while an engine serves.
  const KvLayout& kv_layout() const TORPOR_NO_THREAD_SAFETY_ANALYSIS { return images_->chunks().kv_layout(); }

  // --- for RankService and TagSleep ---
  // A reply has no ledger: fill() after it, so that nothing fails once the memory has gone.
  Result<orders::Describe::Reply> carry_out(const orders::Describe& order) TORPOR_REQUIRES(mutex_);
  Result<orders::Inform::Reply> carry_out(const orders::Inform& order) TORPOR_REQUIRES(mutex_);
  Result<orders::Save::Reply> carry_out(const orders::Save& order) TORPOR_REQUIRES(mutex_);
  Result<orders::PollSave::Reply> carry_out(const orders::PollSave& order) TORPOR_REQUIRES(mutex_);
  Result<orders::Undo::Reply> carry_out(const orders::Undo& order) TORPOR_REQUIRES(mutex_);
  Result<orders::Detach::Reply> carry_out(const orders::Detach& order) TORPOR_REQUIRES(mutex_);
  Result<orders::Restore::Reply> carry_out(const orders::Restore& order) TORPOR_REQUIRES(mutex_);
  Result<orders::PollRestore::Reply> carry_out(const orders::PollRestore& order) TORPOR_REQUIRES(mutex_);
  Result<orders::Finish::Reply> carry_out(const orders::Finish& order) TORPOR_REQUIRES(mutex_);
  Result<orders::DigestTags::Reply> carry_out(const orders::DigestTags& order) TORPOR_REQUIRES(mutex_);
  Result<orders::WriteTestFile::Reply> carry_out(const orders::WriteTestFile& order) TORPOR_REQUIRES(mutex_);
  Result<orders::Extract::Reply> carry_out(const orders::Extract& order) TORPOR_REQUIRES(mutex_);
  Result<orders::ReadImage::Reply> carry_out(const orders::ReadImage& order) TORPOR_REQUIRES(mutex_);
  Result<orders::SaveImage::Reply> carry_out(const orders::SaveImage& order) TORPOR_REQUIRES(mutex_);
  Result<orders::VerifyImage::Reply> carry_out(const orders::VerifyImage& order) TORPOR_REQUIRES(mutex_);
  Result<orders::Admit::Reply> carry_out(const orders::Admit& order) TORPOR_REQUIRES(mutex_);
  Result<orders::DropImage::Reply> carry_out(const orders::DropImage& order) TORPOR_REQUIRES(mutex_);
  Result<orders::CopyBlocks::Reply> carry_out(const orders::CopyBlocks& order) TORPOR_REQUIRES(mutex_);
  void fill(RankLedger& ledger) const TORPOR_REQUIRES(mutex_);
  RegionImages& images() TORPOR_REQUIRES(mutex_) { return *images_; }
  const RankSaver& saver() const TORPOR_REQUIRES(mutex_) { return *saver_; }
  const SleepAllocator& allocator() const { return *allocator_; }
  DeviceMemory& device() { return *device_; }
  int32_t rank() const { return options_.rank; }
  Status same_process() const;
  Mutex& mutex() const TORPOR_RETURN_CAPABILITY(mutex_) { return mutex_; }

 private:
  RankMemory(std::unique_ptr<DeviceMemory> device, RankMemoryOptions options);
  Result<orders::DigestTags::Reply> digest_named(bool as_proven) TORPOR_REQUIRES(mutex_);
  Status nothing_moves() TORPOR_REQUIRES(mutex_);
  void before_free(const RegionInfo& region) TORPOR_REQUIRES(mutex_);
  Status kv_is_attached() const TORPOR_REQUIRES(mutex_);
  void forget(const RegionInfo& region) TORPOR_REQUIRES(mutex_);  // it was freed, or trimmed
  Result<orders::Save::Reply> save_all(const orders::Save& order) TORPOR_REQUIRES(mutex_);
  Result<orders::Save::Reply> save_giving(const orders::Save& order) TORPOR_REQUIRES(mutex_);
  Result<orders::Save::Reply> stop_and_copy(const orders::Save& order) TORPOR_REQUIRES(mutex_);
  Result<orders::Restore::Reply> restore_tags(const orders::Restore& order) TORPOR_REQUIRES(mutex_);
  Status has_room_for(const std::vector<std::string>& tags) const;
  void give_back_unused() noexcept TORPOR_REQUIRES(mutex_);
  void tell(const RankLedger& ledger) const noexcept;

  struct NamedWeights {
    std::string label;
    std::vector<DevicePiece> pieces;
    std::string digest{};  // empty: it is not known
    uint64_t writes = 0;   // of the tag, when it was taken
  };

  const RankMemoryOptions options_;
  const int64_t process_;  // that made it
  mutable Mutex mutex_;    // one sleep, wake or order at a time
  // Made by create(). What needs the lock says so; all else is safe from any thread.
  std::unique_ptr<DeviceMemory> device_;
  std::unique_ptr<HostArena> arena_;
  std::unique_ptr<BackgroundPrefault> prefault_;  // null: there is none
  std::atomic<uint64_t> prefault_waiting_ = 0;    // bytes that start_prefault() brings up
  std::unique_ptr<SleepAllocator> allocator_;
  std::unique_ptr<TransferEngine> transfers_;
  std::unique_ptr<const RankParts> parts_;
  std::unique_ptr<RegionImages> images_ TORPOR_PT_GUARDED_BY(mutex_);
  std::unique_ptr<RankSaver> saver_ TORPOR_PT_GUARDED_BY(mutex_);
  std::unique_ptr<RankRestorer> restorer_ TORPOR_PT_GUARDED_BY(mutex_);
  std::unique_ptr<RankImages> request_images_ TORPOR_PT_GUARDED_BY(mutex_);
  std::optional<NamedWeights> named_weights_ TORPOR_GUARDED_BY(mutex_);
  uint64_t kv_bytes_ TORPOR_GUARDED_BY(mutex_) = 0;  // of regions
  uint64_t other_bytes_ TORPOR_GUARDED_BY(mutex_) = 0;
  std::weak_ptr<HostStore> packed_store_ TORPOR_GUARDED_BY(mutex_);
  uint64_t packed_store_batch_ TORPOR_GUARDED_BY(mutex_) = 0;  // bytes of staging that its blocks need
};

}  // namespace torpor
