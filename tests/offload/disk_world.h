// SPDX-License-Identifier: Apache-2.0
// Segments on a disk whose file operations can fail, for the tests of the store.
#pragma once

#include <fstream>
#include <set>

#include "base/units.h"
#include "offload/segment_store.h"
#include "tests/contract/store_world.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/manual_clock.h"
#include "tests/support/temporary_directory.h"

namespace torpor::test {

inline constexpr int32_t kSlots = 16;
inline constexpr uint64_t kMostBytes = kPage + kSlots * (kPage + kContractRecord);  // of a segment

class DiskWorld : public StoreWorld {
 public:
  explicit DiskWorld(SegmentStoreOptions options = {}, FileSystem* without_faults = nullptr)
      : file_system_(without_faults != nullptr ? *without_faults : files), options_(std::move(options)) {
    options_.rank = 3;
    options_.record_bytes = kContractRecord;
    options_.slots_per_segment = kSlots;
    if (options_.budget_bytes == 0) options_.budget_bytes = 4 * kMostBytes;
    open();
  }
  SegmentStore& store() override { return *store_; }
  StoreSlot beyond() override {  // one record in each segment that the budget has room for
    for (; beyond_ < 0; next_ = (next_ / kSlots + 1) * kSlots) {
      if (!put_one(*store_, next_, 1)) beyond_ = next_;
    }
    return beyond_;
  }
  bool fail(bool on) override {
    if (&file_system_ != &files) return false;
    on ? files.plan.set(Fault::kError, 1, EIO, /*all_after=*/true) : files.plan.clear();
    clock.advance(std::chrono::seconds(10));
    if (!on) next_ = (next_ / kSlots + 1) * kSlots;  // as callers do after a failure
    return true;
  }
  SlotStore* reopen() override {
    store_.reset();
    open();
    return store_.get();
  }
  void open(const Digest& space = digest_of({})) {
    store_.reset();
    store_ = value_of(SegmentStore::open(file_system_, path(), options_, clock));
    store_->open_space(1, space);
    next_ = store_->first_slot();
  }
  void end() { store_.reset(); }
  Result<std::unique_ptr<SegmentStore>> another() { return SegmentStore::open(file_system_, path(), options_, clock); }
  std::string path() const { return temporary_ / "store"; }
  std::string file(uint64_t number) const { return path() + "/r3/" + segment_name(number); }
  SegmentStoreOptions& options() { return options_; }
  FaultyFileSystem files;
  ManualClock clock;

 private:
  FileSystem& file_system_;
  TemporaryDirectory temporary_;
  SegmentStoreOptions options_;
  std::unique_ptr<SegmentStore> store_;
  StoreSlot beyond_ = -1;
};

inline std::set<StoreSlot> recovered_by(SlotStore& store) {
  std::set<StoreSlot> slots;
  for (const RecoveredSlot& each : value_of(store.recover(1))) slots.insert(each.slot);
  return slots;
}

// Puts so many records, from `first` on, in batches of `batch`.
inline void put_batches(SlotStore& store, StoreSlot first, int32_t count, int32_t batch) {
  for (StoreSlot slot = first; slot < first + count; slot += batch) {
    std::vector<std::vector<std::byte>> bytes;
    for (StoreSlot s = slot; s < std::min(slot + batch, first + count); ++s)
      bytes.push_back(some_bytes(static_cast<uint64_t>(s), kContractRecord));
    std::vector<StorePart> parts;
    for (size_t i = 0; i < bytes.size(); ++i)
      parts.push_back(part_of(slot + static_cast<StoreSlot>(i), static_cast<uint64_t>(slot) + i, bytes[i]));
    put(store, parts);
    for (const StorePart& part : parts) ASSERT_SUCCEEDS(part.status);
  }
}

inline void flip(const std::string& path, uint64_t offset, int mask = 1) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(offset));
  const int byte = file.get();
  file.seekp(static_cast<std::streamoff>(offset));
  file.put(static_cast<char>(byte ^ mask));
}

}  // namespace torpor::test
