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
// Its parts: SegmentTable decides which segments take records and which have ended. SegmentDirectory has the files,
// SegmentBatch writes records, SegmentLeases keeps them for checkpoints. The store itself has the locks, the open files
// and the health.
//
// Threads: as SlotStore.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/file_system.h"
#include "base/mutex.h"
#include "base/seal.h"
#include "offload/scratch.h"
#include "offload/segment_directory.h"
#include "offload/segment_leases.h"
#include "offload/segment_table.h"
#include "offload/slot_store.h"

namespace torpor {

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
  static constexpr uint32_t kOpenSegments = SegmentTable::kOpenSegments;

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

  SegmentStore(std::unique_ptr<SegmentDirectory> directory, SegmentStoreOptions options, const Clock& clock,
               std::vector<uint64_t> at_the_start);
  void do_put(std::span<RecordPart> parts) override;
  void do_get(std::span<RecordPart> parts) override;

  // segment_store.cpp
  Result<SegmentPtr> writable(uint64_t number, uint32_t space);
  Status make_file(Segment& segment);
  void note(const Error& error, bool write);

  // segment_store_write.cpp, segment_store_read.cpp
  void put_batch(std::span<RecordPart* const> parts);
  std::vector<Reading> look_up(std::span<RecordPart> parts);
  void read(std::span<Reading> readings, std::span<std::byte>& room);
  Result<std::shared_ptr<File>> file_of(Segment& segment);
  void close_oldest();

  // segment_store_sync.cpp
  void finish_ended();
  Status make_safe(std::span<const SegmentPtr> segments);
  Result<uint64_t> sync_one(Segment& segment);
  void give_up(Segment& segment, const Error& error);

  // segment_store_recovery.cpp
  Status recover_segment(const SegmentHeader& wanted, uint32_t space, std::vector<RecoveredSlot>& found);

  const SegmentStoreOptions options_;
  const StoreTraits traits_;
  const uint64_t capacity_;  // bytes of the disk that a segment may need
  const std::unique_ptr<SegmentDirectory> directory_;
  const Clock& clock_;
  std::vector<uint64_t> at_the_start_;  // segment numbers; recover() takes them
  const uint64_t first_number_;
  ScratchPool scratch_;
  SegmentLeases leases_;

  mutable Mutex mutex_;  // not held during a read, write or sync; guards the segments' content too
  CondVar changed_;
  SegmentTable segments_ TORPOR_GUARDED_BY(mutex_);
  uint64_t uses_ TORPOR_GUARDED_BY(mutex_) = 0;
  StoreHealth health_ TORPOR_GUARDED_BY(mutex_);  // without what the parts count
  std::chrono::nanoseconds failed_at_ TORPOR_GUARDED_BY(mutex_){};
};

}  // namespace torpor
