// SPDX-License-Identifier: Apache-2.0
// SegmentStore: KV blocks on disk, in append-only segments: files PATH/rN/seg-000123 of rank N (SEGMENTS.md describes
// the bytes).
//
// A slot is a position in a segment. put() writes a batch in one submission: a page that describes up to 40 records,
// and the records. No byte of a file is written twice, so the seal can use the offset as nonce. A slot is used once,
// and nothing is added to a segment of an earlier process. Disk space is freed by whole segments.
//
// A segment takes records until all its slots are used, one of its batch pages could not be written, or kOpenSegments
// newer segments were begun; then its file is cut to its length. Puts may go to any segment that takes records.
//
// Failure: if a record cannot be written, only that record fails. If an fsync fails, its segment is dropped, and the
// store goes on in the next one. After a failed write, accepting() is false for `retry_interval`.
//
// Besides the segments that take records, at most `open_files` files are open. One process uses a directory: another
// one fails after `lock_wait`. (The lock of a killed process stays until the system has freed that process's memory.)
//
// Threads: as SlotStore.
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
#include "offload/segment_directory.h"
#include "offload/segment_format.h"
#include "offload/slot_store.h"

namespace torpor {

struct Segment;  // offload/segment.h

struct SegmentStoreOptions {
  int32_t rank = 0;
  uint64_t record_bytes = 0;      // largest size of one record
  int32_t slots_per_segment = 0;  // the same on every rank; 0: as many as fill 64 MiB
  uint64_t budget_bytes = 0;      // most that all segments take; 0: no limit
  CompressionOptions compression{.codec = Codec::kNone};
  std::shared_ptr<const Key> key;  // null: segments detect accidents, not attackers
  bool encrypt = false;            // false: records with a key are authenticated only
  FileIo io = FileIo::kFastest;
  size_t open_files = 64;
  std::chrono::milliseconds retry_interval{10'000};
  std::chrono::milliseconds lock_wait{0};  // how long open() waits for another process to unlock
};

class SegmentStore final : public SlotStore {
 public:
  static constexpr uint32_t kOpenSegments = 32;

  // Open or create PATH/rN. kInvalidArgument: invalid options. kUnavailable: another process uses the directory.
  // kResourceExhausted: the disk has no space for budget_bytes, or the directory has used up its segment numbers.
  // `file_system` and `clock` outlive the result.
  static Result<std::unique_ptr<SegmentStore>> open(FileSystem& file_system, const std::string& path,
                                                    SegmentStoreOptions options, const Clock& clock);
  ~SegmentStore() override;

  const StoreTraits& traits() const override { return traits_; }
  void open_space(uint32_t space, const Digest& digest) override;
  bool accepting() const override;
  // A whole segment is gone at once; the next put() or sync() removes its file, on its caller's thread.
  void drop(std::span<const SlotRange> ranges) override;
  Status sync() override;
  // Segments of other namespaces, with other options or with unknown keys are removed, because nobody could count or
  // evict them. A segment that cannot be read is left in place, and not found.
  Result<std::vector<RecoveredSlot>> recover(uint32_t space) override;
  // Makes hard links. If the file system refuses links, copies the records, and logs that once.
  Result<std::vector<LeasedRecord>> lease(std::span<const StoreSlot> slots, Directory& into) override;
  StoreHealth health() const override;

  // The first slot behind all segments that existed at the start.
  StoreSlot first_slot() const override { return static_cast<StoreSlot>(first_number_) * traits_.slots_per_segment; }
  static uint64_t most_bytes_of_segment(const SegmentStoreOptions& options);

 private:
  struct Reading;
  class Writing;
  using SegmentPtr = std::shared_ptr<Segment>;

  SegmentStore(std::unique_ptr<SegmentDirectory> directory, SegmentStoreOptions options, const Clock& clock);
  Status look_around();
  void do_put(std::span<RecordPart> parts) override;
  void do_get(std::span<RecordPart> parts) override;

  // segment_store.cpp
  uint64_t number_of(StoreSlot slot) const { return static_cast<uint64_t>(slot / traits_.slots_per_segment); }
  Result<SegmentPtr> writable(uint64_t number, uint32_t space);
  Error no_more_numbers() const;
  Result<SegmentPtr> begin_segment(uint64_t number, uint32_t space) TORPOR_REQUIRES(mutex_);
  SegmentHeader header_of(uint64_t number, const Digest& space) const;  // without id and key
  Status make_file(Segment& segment);
  void end_older() TORPOR_REQUIRES(mutex_);
  void put_batch(std::span<RecordPart* const> parts);
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
  Status recover_segment(uint64_t number, uint32_t space, std::vector<RecoveredSlot>& found);
  Status link(Segment& segment, std::span<const SegmentRecord> records, Directory& into);
  Status copy(Segment& segment, std::span<const SegmentRecord> records, Directory& into, const std::string& name);

  const SegmentStoreOptions options_;
  const StoreTraits traits_;
  const uint64_t capacity_;
  const std::unique_ptr<SegmentDirectory> directory_;
  const Clock& clock_;
  uint64_t first_number_ = 0;           // set by open()
  std::vector<uint64_t> at_the_start_;  // segment numbers; recover() takes them
  ScratchPool scratch_;

  mutable Mutex mutex_;  // not held during a read, write or sync; guards the segments' content too
  CondVar changed_;
  std::map<uint64_t, SegmentPtr> segments_ TORPOR_GUARDED_BY(mutex_);
  std::vector<SegmentPtr> unfinished_ TORPOR_GUARDED_BY(mutex_);  // take records, or must be cut
  uint64_t newest_ TORPOR_GUARDED_BY(mutex_) = 0;
  std::map<uint32_t, Digest> spaces_ TORPOR_GUARDED_BY(mutex_);
  uint64_t uses_ TORPOR_GUARDED_BY(mutex_) = 0;
  std::set<std::string> copies_ TORPOR_GUARDED_BY(mutex_);  // leased files that are not links
  StoreHealth health_ TORPOR_GUARDED_BY(mutex_);
  std::chrono::nanoseconds failed_at_ TORPOR_GUARDED_BY(mutex_){};
};

}  // namespace torpor
