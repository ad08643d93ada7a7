// SPDX-License-Identifier: Apache-2.0
// SegmentStore: blocks on disk, in append-only segments: files PATH/rN/seg-000123 of rank N (SEGMENTS.md has the
// bytes).
//
// A slot is a segment and a position in it. put() writes a batch with one submission: a page that describes up to 40
// records, and the records. No byte of a file is ever written twice, so a place in it is nonce enough for the seal; a
// slot is used once, a segment that an earlier process wrote gets nothing more. Room comes back by the segment.
//
// A segment takes records until its slots are used, one of its batch pages could not be written, or others were begun
// after it (kOpenSegments); then it is cut to its length. Segments may be put to in any order, within that.
//
// Failure: a record that cannot be written fails alone. An fsync that failed ends its segment: its slots are dropped,
// the store goes on in the next. After a failed write nothing is put for `retry_interval` (accepting()).
//
// At most `open_files` files are open, beside those that still take records. One process has a directory: another one
// is refused, once `lock_wait` is over: one that was killed has its lock until the system has taken down its memory.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/file_system.h"
#include "base/mutex.h"
#include "base/seal.h"
#include "offload/scratch.h"
#include "offload/segment_format.h"
#include "offload/slot_store.h"

namespace torpor {

struct Segment;  // offload/segment.h

struct SegmentStoreOptions {
  int32_t rank = 0;
  uint64_t record_bytes = 0;      // most of one record
  int32_t slots_per_segment = 0;  // the same on every rank; 0: as many as make 64 MiB
  uint64_t budget_bytes = 0;      // most that all segments may take; 0: no limit
  CompressionOptions compression{.codec = Codec::kNone};
  std::shared_ptr<const Key> key;  // null: segments find accidents, they stop no attacker
  bool encrypt = false;            // else records with a key are authenticated
  FileIo io = FileIo::kFastest;
  size_t open_files = 64;
  std::chrono::milliseconds retry_interval{10'000};
  std::chrono::milliseconds lock_wait{0};  // for a process that is ending to let go of the directory
};

class SegmentStore final : public SlotStore {
 public:
  static constexpr uint32_t kOpenSegments = 32;

  // Opens or makes PATH/rN. kUnavailable: another process uses it. kResourceExhausted: the disk has no room for
  // budget_bytes. `file_system` and `clock` outlive the result.
  static Result<std::unique_ptr<SegmentStore>> open(FileSystem& file_system, const std::string& path,
                                                    SegmentStoreOptions options, const Clock& clock);
  ~SegmentStore() override;

  const StoreTraits& traits() const override { return traits_; }
  void open_space(uint32_t space, const Digest& digest) override;
  bool accepting() const override;
  // Whole segments are gone at once; their files with the next put() or sync(), on whose thread that is.
  void drop(std::span<const SlotRange> ranges) override;
  Status sync() override;
  // Segments of other namespaces, of other options and with unknown keys are removed: nobody could count or evict them.
  // What could not be read is left where it is, and not found.
  Result<std::vector<RecoveredSlot>> recover(uint32_t space) override;
  // Hard links; copies of the records where links are refused, which is said once in the log.
  Result<std::vector<LeasedRecord>> lease(std::span<const StoreSlot> slots, Directory& into) override;
  StoreHealth health() const override;

  // Behind all segments that were there at the start.
  StoreSlot first_slot() const override { return static_cast<StoreSlot>(first_number_) * traits_.slots_per_segment; }
  static uint64_t most_bytes_of_segment(const SegmentStoreOptions& options);

 private:
  struct Batch;
  struct Reading;
  class DirectoryTurn;
  class Writing;
  using SegmentPtr = std::shared_ptr<Segment>;

  SegmentStore(std::unique_ptr<Directory> directory, std::unique_ptr<File> lock, SegmentStoreOptions options,
               const Clock& clock);
  Status look_around();
  void do_put(std::span<RecordPart> parts) override;
  void do_get(std::span<RecordPart> parts) override;

  // segment_store.cpp
  uint64_t number_of(StoreSlot slot) const { return static_cast<uint64_t>(slot / traits_.slots_per_segment); }
  Result<SegmentPtr> writable(uint64_t number, uint32_t space);
  Error no_more_numbers() const;
  Result<SegmentPtr> begin_segment(uint64_t number, uint32_t space) TORPOR_REQUIRES(mutex_);
  Status make_file(Segment& segment);
  void end_older() TORPOR_REQUIRES(mutex_);
  void put_batch(std::span<RecordPart* const> parts);
  Status encode(std::span<RecordPart* const> parts, const RecordFile& file, PageBuffer& scratch, Batch& batch) const;
  Status reserve(Segment& segment, Batch& batch);
  void write(Segment& segment, Batch& batch);
  void finish_batch(Segment& segment, Batch& batch);
  void finish_ended();
  std::vector<Reading> look_up(std::span<RecordPart> parts);
  void read(std::span<Reading> readings, std::span<std::byte>& room);
  Result<std::shared_ptr<File>> file_of(Segment& segment);
  void close_oldest();
  void note(const Error& error, bool write);

  // segment_store_recovery.cpp
  Status make_safe(std::span<const SegmentPtr> segments);
  Result<uint64_t> sync_one(Segment& segment);
  void give_up(Segment& segment, const Error& error);
  std::shared_ptr<File> forget(Segment& segment) TORPOR_REQUIRES(mutex_);
  void remove_segment_file(uint64_t number);
  void remove_dropped() noexcept;
  Status recover_segment(uint64_t number, uint32_t space, std::vector<RecoveredSlot>& found);
  Result<SegmentPtr> read_segment(uint64_t number, uint32_t space, const File& file);
  Status link(Segment& segment, std::span<const SegmentRecord> records, Directory& into);
  Status copy(Segment& segment, std::span<const SegmentRecord> records, Directory& into, const std::string& name);

  const SegmentStoreOptions options_;
  const StoreTraits traits_;
  const uint64_t capacity_;
  const std::unique_ptr<Directory> directory_;  // by whoever has the turn
  const std::unique_ptr<File> lock_;
  const Clock& clock_;
  uint64_t first_number_ = 0;           // set by open()
  std::vector<uint64_t> at_the_start_;  // recover() takes them
  ScratchPool scratch_;

  mutable Mutex mutex_;  // never held over a read, a write or a sync; guards the segments' content too
  CondVar changed_;
  bool directory_busy_ TORPOR_GUARDED_BY(mutex_) = false;
  std::map<uint64_t, SegmentPtr> segments_ TORPOR_GUARDED_BY(mutex_);
  std::vector<SegmentPtr> unfinished_ TORPOR_GUARDED_BY(mutex_);  // may take records, or must be cut and synced
  uint64_t newest_ TORPOR_GUARDED_BY(mutex_) = 0;
  std::map<uint32_t, Digest> spaces_ TORPOR_GUARDED_BY(mutex_);
  uint64_t uses_ TORPOR_GUARDED_BY(mutex_) = 0;
  struct Dropped {
    uint64_t number = 0;
    std::shared_ptr<File> file;
  };
  std::vector<Dropped> dropped_ TORPOR_GUARDED_BY(mutex_);  // their files are still there
  std::set<std::string> copies_ TORPOR_GUARDED_BY(mutex_);  // files of leases that are not links
  StoreHealth health_ TORPOR_GUARDED_BY(mutex_);
  std::chrono::nanoseconds failed_at_ TORPOR_GUARDED_BY(mutex_){};
};

// The directory is used by one thread at a time; who waits for its turn holds no lock meanwhile.
class SegmentStore::DirectoryTurn {
 public:
  explicit DirectoryTurn(SegmentStore& store) : store_(store) {
    const MutexLock lock(store_.mutex_);
    while (store_.directory_busy_) store_.changed_.wait(store_.mutex_);
    store_.directory_busy_ = true;
  }
  ~DirectoryTurn() {
    const MutexLock lock(store_.mutex_);
    store_.directory_busy_ = false;
    store_.changed_.notify_all();
  }
  DirectoryTurn(const DirectoryTurn&) = delete;
  DirectoryTurn& operator=(const DirectoryTurn&) = delete;
  Directory* operator->() { return store_.directory_.get(); }

 private:
  SegmentStore& store_;
};

}  // namespace torpor
