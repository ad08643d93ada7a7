// RankMemory: the memory of one worker rank: its device, its regions by tag, its arena, its copies.
//
// It carries out the controller's orders (call()), each all or nothing. What is saved of a tag is its backup: chunks in
// the arena or in a checkpoint's chunk file. A KV layout makes one tag be saved block by block, only the blocks that
// the order names; every other tag is saved region by region, whole.
//
// Owner: the worker process, for as long as its engine lives. Threads: one order at a time (others wait).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "allocator/host_arena.h"
#include "allocator/sleep_allocator.h"
#include "base/file_system.h"
#include "base/mutex.h"
#include "engine/rank_protocol.h"
#include "kvcache/kv_layout.h"
#include "offload/disk_tier.h"
#include "offload/host_tier.h"
#include "offload/transfer_engine.h"

namespace torpor {

struct RankMemoryOptions {
  int32_t rank = 0;
  uint64_t arena_budget_bytes = 0;          // 0: no limit
  uint64_t arena_slab_bytes = 64ull << 20;  // host memory is taken from the system in pieces of this size
  uint64_t handle_bytes = 64ull << 20;      // physical memory of the device is made in pieces of this size
  uint64_t arena_prefault_bytes = 0;        // host memory that is brought up in the background from the start
  // Most host memory that stays held between operations, for the next sleep to find it ready; what backups need stays
  // in any case. None: any amount; but 0 on the device without a GPU, where it is taken from the same memory.
  std::optional<uint64_t> arena_keep_bytes;
  int threads = 0;          // for copies; 0: as many as the machine has cores, at most 8
  bool own_threads = true;  // off: copies are made by the thread that waits for them, in one order (TransferEngine)
  // A backup of weights that did not change since is kept after a wake and not copied again. None: off for the device
  // without a GPU, where both are the same memory.
  std::optional<bool> keep_backup;
  std::shared_ptr<const Key> key;  // for chunk files of sealed checkpoints; null: there is none
};

// What a sleep or wake of some tags moved, or would move.
struct TagMove {
  uint64_t copied_bytes = 0;    // between device memory and the arena
  uint64_t clean_bytes = 0;     // sleep: the backup from before still holds, not copied again
  uint64_t dropped_bytes = 0;   // sleep: freed without a copy; wake: comes back without content
  uint64_t physical_bytes = 0;  // device memory given back, or taken
  std::string obstacle{};       // of a plan: why it would fail, as far as can be known now; empty: it would not
  std::vector<std::pair<std::string, double>> seconds{};  // of each phase, in their order
};

// Whether a kept backup is believed to be that of the present content.
enum class CleanCheck : uint8_t {
  kTrust,
  kDigest
};  // what the owner marked dirty is not; or: digests are taken and compared

class RankMemory {
 public:
  static Result<std::unique_ptr<RankMemory>> create(std::unique_ptr<DeviceMemory> device, FileSystem& file_system,
                                                    RankMemoryOptions options = {});
  ~RankMemory();

  // A new zeroed region; its address is valid for the life of this object, its bytes while its tag is attached.
  Result<DeviceAddress> allocate(std::string_view tag, std::string_view name, uint64_t size_bytes);
  Status free(DeviceAddress address);
  // From now on `tag` holds KV blocks laid out like this.
  Status set_kv_layout(std::string tag, KvLayout layout);
  // The owner changed bytes of `tag`: a kept backup is no longer that of its content. On the device without a GPU most
  // changes are noticed without it, when the tag is described next: a sample of its bytes is compared.
  void mark_dirty(std::string_view tag);

  // The controller's messages. `method` is one of:
  //   describe        ledger, bytes_per_block, writes, without_content
  //   written         {tags}: as mark_dirty()
  //   save            {tags, blocks, directory, writing}: content -> backup; directory empty: in the arena
  //   cancel_save     {tags}: undoes save
  //   detach          {tags}: memory goes
  //   attach          {tags}: fresh memory is taken
  //   restore         {tags}: it comes under the same addresses, and backup -> content, verified
  //   cancel_restore  {tags}: undoes attach and restore; backups stay
  //   finish          {tags, keep_backup}: after a wake; may be repeated
  //   digest          {tags}: of the content, or of the backup of a detached tag
  //   load_blocks     {directory, chunks}: KV blocks of a committed checkpoint -> attached memory, verified
  //   moved           {directory}: a checkpoint under construction was committed to this path
  // Failures, exceptions too, are in the reply; no bytes at all: there was not even memory for it. An order that failed
  // may have been carried out all the same, when there was no memory to say so: send the one that undoes it.
  Bytes call(const std::string& method, const Bytes& order);

  // Sleep and wake of tags without a controller, for allocators below other programs. `tags` empty: all that are awake,
  // or asleep. What is in `keep` is saved, the rest is freed without a copy. All or nothing; a retry works.
  Result<TagMove> sleep(std::vector<std::string> tags, const std::vector<std::string>& keep,
                        CleanCheck clean = CleanCheck::kTrust);
  Result<TagMove> wake(std::vector<std::string> tags);
  Result<TagMove> plan_sleep(std::vector<std::string> tags, const std::vector<std::string>& keep) const;
  Result<TagMove> plan_wake(std::vector<std::string> tags) const;
  RankLedger ledger() const;
  // For an engine that moves KV blocks between tiers while it serves; both live as long as this object.
  TransferEngine& transfers() { return *transfers_; }
  HostArena& arena() { return *arena_; }
  // After set_kv_layout(), merged. No lock: it does not change while an engine serves.
  const KvLayout& kv_layout() const TORPOR_NO_THREAD_SAFETY_ANALYSIS { return kv_layout_; }
  std::map<std::string, RegionState> states() const { return allocator_->states(); }

 private:
  struct Backup {
    std::unique_ptr<HostTier> host;  // null: in a chunk file
    std::string directory;           // of the chunk file
    std::vector<SavedChunk> chunks;
    bool clean = false;  // still equal to the content of the attached tag
  };

  RankMemory(std::unique_ptr<DeviceMemory> device, FileSystem& file_system, RankMemoryOptions options);
  Result<RankReply> dispatch(const std::string& method, const RankOrder& order) TORPOR_REQUIRES(mutex_);
  // dispatch(); it throws nothing
  Result<RankReply> carry_out(const char* method, const RankOrder& order) TORPOR_REQUIRES(mutex_);
  Result<TagMove> sleep_tags(std::vector<std::string> tags, const std::vector<std::string>& keep, CleanCheck clean);
  Result<TagMove> wake_tags(std::vector<std::string> tags);
  Status save(const RankOrder& order, RankReply& reply) TORPOR_REQUIRES(mutex_);
  Status save_to_disk(const RankOrder& order, RankReply& reply) TORPOR_REQUIRES(mutex_);
  Status restore(const RankOrder& order, RankReply& reply) TORPOR_REQUIRES(mutex_);
  Status finish(const RankOrder& order) TORPOR_REQUIRES(mutex_);
  Status digest(const RankOrder& order, RankReply& reply) TORPOR_REQUIRES(mutex_);
  Status load_blocks(const RankOrder& order, RankReply& reply) TORPOR_REQUIRES(mutex_);
  Result<std::unique_ptr<DiskTier>> open_chunks(const std::string& directory) const;
  Result<std::vector<ChunkPlan>> plans_of(const std::string& tag, const std::vector<int32_t>& blocks) const
      TORPOR_REQUIRES(mutex_);
  Result<std::vector<ChunkPlan>> plans_for(const std::vector<SavedChunk>& chunks) const TORPOR_REQUIRES(mutex_);
  void fill(RankLedger& ledger) const TORPOR_REQUIRES(mutex_);
  void forget_clean(std::string_view tag) TORPOR_REQUIRES(mutex_);
  void note_write(std::string_view tag) TORPOR_REQUIRES(mutex_);
  void notice_writes() TORPOR_REQUIRES(mutex_);
  std::optional<Digest> sample(const std::string& tag) const;
  Status same_process() const;
  Result<std::vector<std::string>> select(std::vector<std::string> tags, RegionState wanted) const;
  Status drop_unclean(const std::vector<std::string>& tags) TORPOR_REQUIRES(mutex_);
  void give_back_unused() noexcept;

  const RankMemoryOptions options_;
  FileSystem& file_system_;
  const int64_t process_;  // that made it: a forked child has the addresses, but not the device
  mutable Mutex mutex_;    // one order at a time
  // Made by create(), and safe from any thread.
  std::unique_ptr<DeviceMemory> device_;
  std::unique_ptr<HostArena> arena_;
  std::unique_ptr<SleepAllocator> allocator_;
  std::unique_ptr<TransferEngine> transfers_;
  std::string kv_tag_ TORPOR_GUARDED_BY(mutex_);
  KvLayout kv_layout_ TORPOR_GUARDED_BY(mutex_);
  std::map<std::string, Backup, std::less<>> backups_ TORPOR_GUARDED_BY(mutex_);
  // Of each tag but that of the KV cache.
  struct Content {
    uint64_t writes = 0;           // how often it was seen to be another
    std::optional<Digest> sample;  // of its bytes, when they were looked at last; none: never
    bool missing = false;          // it came back from a sleep without any, and was not written since
  };
  std::map<std::string, Content, std::less<>> contents_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace torpor
