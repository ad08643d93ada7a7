// SPDX-License-Identifier: Apache-2.0
// The life of segments: what is refused, what goes and comes, what fails. S5, S6.
#include <fcntl.h>
#include <sys/stat.h>

#include <chrono>
#include <functional>
#include <thread>

#include <fmt/core.h>

#include "base/watched_file_system.h"
#include "tests/offload/disk_world.h"
#include "tests/support/model_file_system.h"

namespace torpor {
namespace {

using namespace test;
using namespace std::chrono_literals;

TEST(SegmentStore, AnotherProcessIsRefusedByName) {
  DiskWorld world;
  EXPECT_FAILS(world.another(), Code::kUnavailable, "/store/r3");
  world.options().rank = 4;
  EXPECT_SUCCEEDS(world.another());
}

TEST(SegmentStore, OptionsAreChecked) {
  DiskWorld world;
  const auto refused = [&](const std::function<void(SegmentStoreOptions&)>& change, std::string_view word) {
    const SegmentStoreOptions before = world.options();
    change(world.options());
    EXPECT_FAILS(world.another(), Code::kInvalidArgument, word);
    world.options() = before;
  };
  refused([](auto& options) { options.record_bytes = 0; }, "records of 0 bytes");
  refused([](auto& options) { options.record_bytes = 2 * kGiB; }, "record");
  refused([](auto& options) { options.slots_per_segment = -1; }, "-1");
  refused([](auto& options) { options.rank = -1; }, "rank -1");
  refused([](auto& options) { options.encrypt = true; }, "key");
  refused([](auto& options) { options.compression.level = 40; }, "40");
}

TEST(SegmentStore, BlocksOfOtherWeightsAreNeverFoundAgain) {
  DiskWorld world;
  KeySpace space{.model = digest_of({}), .layout = "2 layers", .hashing = "sha256"};
  world.open(space.digest());
  put_batches(world.store(), 0, 4, 4);
  KeySpace other = space;
  other.weights = digest_of(some_bytes(1, 10));
  world.store().open_space(2, other.digest());
  std::vector<std::byte> bytes = some_bytes(1, 100);
  StorePart part = part_of(kSlots, 1, bytes);
  part.key.space = 2;
  put(world.store(), {&part, 1});
  ASSERT_SUCCEEDS(part.status);
  part.slot = 5;  // the segment is the old space's
  put(world.store(), {&part, 1});
  EXPECT_FAILS(part.status, Code::kInvalidArgument, "namespace");
  world.open(other.digest());
  EXPECT_EQ(recovered_by(world.store()), (std::set<StoreSlot>{kSlots}));
  EXPECT_FALSE(boost::filesystem::exists(world.file(0)));  // nobody could evict it
  world.open(space.digest());
  EXPECT_EQ(recovered_by(world.store()), std::set<StoreSlot>{});
}

TEST(SegmentStore, EveryPartOfAKeySpaceCounts) {
  const KeySpace space{.layout = "a", .hashing = "b"};
  std::set<std::string> all = {space.digest().hex()};
  const auto differs = [&](const std::function<void(KeySpace&)>& change) {
    KeySpace other = space;
    change(other);
    EXPECT_TRUE(all.insert(other.digest().hex()).second);
  };
  differs([](KeySpace& other) { other.model.bytes[0] = 1; });
  differs([](KeySpace& other) { other.weights.bytes[0] = 1; });
  differs([](KeySpace& other) { other.adapters.bytes[0] = 1; });
  differs([](KeySpace& other) { other.layout = "ab", other.hashing = ""; });
  differs([](KeySpace& other) { other.hashing = "c"; });
  differs([](KeySpace& other) { other.ranks = 2; });
}

TEST(SegmentStore, WithoutAnOpenKeySpaceNothingIsPutOrRecovered) {
  DiskWorld world;
  std::vector<std::byte> bytes = some_bytes(1, 100);
  StorePart part = part_of(0, 1, bytes);
  part.key.space = 9;
  put(world.store(), {&part, 1});
  EXPECT_FAILS(part.status, Code::kFailedPrecondition, "namespace 9");
  EXPECT_FAILS(world.store().recover(9), Code::kFailedPrecondition, "namespace 9");
}

TEST(SegmentStore, ASlotIsUsedOnceAndARecoveredSegmentGetsNothingMore) {
  DiskWorld world;
  ASSERT_SUCCEEDS(put_one(world.store(), 3, 1));
  EXPECT_FAILS(put_one(world.store(), 3, 2), Code::kFailedPrecondition, "slot 3");
  const SlotRange range{.first = 3, .count = 1};
  world.store().drop({&range, 1});
  EXPECT_FAILS(put_one(world.store(), 3, 2), Code::kFailedPrecondition, "slot 3");
  ASSERT_SUCCEEDS(put_one(world.store(), 4, 2));
  world.open();
  EXPECT_EQ(world.store().first_slot(), kSlots);
  EXPECT_FAILS(put_one(world.store(), 5, 3), Code::kFailedPrecondition, "seg-000000");
  EXPECT_EQ(recovered_by(world.store()), (std::set<StoreSlot>{3, 4}));
  EXPECT_FAILS(put_one(world.store(), 5, 3), Code::kFailedPrecondition, "seg-000000");
}

TEST(SegmentStore, ADroppedSegmentGivesItsRoomBack) {
  DiskWorld world;
  put_batches(world.store(), 0, 2 * kSlots, 5);
  const uint64_t held = world.store().health().held_bytes;
  EXPECT_LT(held, 2 * kMostBytes);  // they are full, and were cut to their length
  EXPECT_EQ(boost::filesystem::file_size(world.file(0)) + boost::filesystem::file_size(world.file(1)), held);
  const SlotRange range{.first = 0, .count = kSlots};
  world.store().drop({&range, 1});
  EXPECT_LT(world.store().health().held_bytes, held);
  EXPECT_TRUE(boost::filesystem::exists(world.file(0)));  // who drops does not wait for the disk
  EXPECT_FAILS(put_one(world.store(), 0, 1), Code::kFailedPrecondition);
  EXPECT_FALSE(boost::filesystem::exists(world.file(0)));
  EXPECT_TRUE(value_of(has_one(world.store(), kSlots, kSlots)));
}

TEST(SegmentStore, SegmentsFarBehindTheNewestTakeNoMore) {
  DiskWorld world({.budget_bytes = kGiB});
  constexpr auto kOpen = static_cast<StoreSlot>(SegmentStore::kOpenSegments);
  ASSERT_SUCCEEDS(put_one(world.store(), 2 * kSlots, 1));
  ASSERT_SUCCEEDS(put_one(world.store(), kSlots, 2));  // in any order, within a few
  ASSERT_SUCCEEDS(put_one(world.store(), (kOpen + 1) * kSlots, 3));
  EXPECT_FAILS(put_one(world.store(), kSlots + 1, 4), Code::kFailedPrecondition, "seg-000001");
  EXPECT_FAILS(put_one(world.store(), 1, 4), Code::kFailedPrecondition, "seg-000000");
  ASSERT_SUCCEEDS(put_one(world.store(), 2 * kSlots + 1, 5));
  EXPECT_TRUE(value_of(has_one(world.store(), kSlots, 2)));
}

TEST(SegmentStore, BeyondTheBudgetNoSegmentIsBegunUntilOneIsDropped) {
  DiskWorld world;
  const StoreSlot beyond = world.beyond();
  EXPECT_FAILS(put_one(world.store(), beyond, 1), Code::kResourceExhausted, "budget");
  const SlotRange range{.first = 0, .count = kSlots};
  world.store().drop({&range, 1});
  EXPECT_SUCCEEDS(put_one(world.store(), beyond, 1));
  world.options().rank = 5;
  world.options().budget_bytes = uint64_t{1} << 60;
  EXPECT_FAILS(world.another(), Code::kResourceExhausted, "has room for");
}

TEST(SegmentStore, AFailedFsyncEndsItsSegmentAndNotTheStore) {
  DiskWorld world;
  put_batches(world.store(), 0, 4, 2);
  world.files.plan.set(Fault::kError, 1);  // the file's
  EXPECT_FAILS(world.store().sync(), Code::kIo);
  world.files.plan.clear();
  EXPECT_EQ(world.store().health().sync_errors, 1u);
  for (StoreSlot slot = 0; slot < 4; ++slot) EXPECT_FAILS(has_one(world.store(), slot, 1), Code::kNotFound);
  EXPECT_FALSE(boost::filesystem::exists(world.file(0)));
  EXPECT_SUCCEEDS(world.store().sync());
  EXPECT_FALSE(world.store().accepting());
  world.clock.advance(10s);
  EXPECT_TRUE(world.store().accepting());
  EXPECT_FAILS(put_one(world.store(), 5, 1), Code::kFailedPrecondition);
  put_batches(world.store(), kSlots, 4, 2);
  EXPECT_SUCCEEDS(world.store().sync());
  world.open();
  EXPECT_EQ(recovered_by(world.store()), (std::set<StoreSlot>{kSlots, kSlots + 1, kSlots + 2, kSlots + 3}));
}

TEST(SegmentStore, WhatAnEarlierProcessLeftStaysIfItCannotBeOpenedForASyncOrItsNameNotBeSynced) {
  for (const uint64_t call : {1, 3}) {  // the file's opening; after that and its fsync the directory's fsync
    SCOPED_TRACE(call);
    DiskWorld world;
    put_batches(world.store(), 0, 4, 2);
    ASSERT_SUCCEEDS(world.store().sync());
    world.open();
    ASSERT_EQ(recovered_by(world.store()).size(), 4u);
    world.files.plan.set(Fault::kError, call, EMFILE);
    EXPECT_FALSE(world.store().sync());
    EXPECT_TRUE(world.files.plan.fired());
    world.files.plan.clear();
    EXPECT_EQ(world.store().health().sync_errors, 0u);
    EXPECT_TRUE(value_of(has_one(world.store(), 3, 3)));
    EXPECT_TRUE(boost::filesystem::exists(world.file(0)));
    EXPECT_SUCCEEDS(world.store().sync());
  }
}

TEST(SegmentStore, WithoutADurableNameNothingIsDurable) {
  DiskWorld world;
  put_batches(world.store(), 0, 2, 2);
  world.files.plan.set(Fault::kError, 2);  // the directory's
  EXPECT_FAILS(world.store().sync(), Code::kIo);
  world.files.plan.clear();
  EXPECT_FAILS(has_one(world.store(), 0, 0), Code::kNotFound);
}

TEST(SegmentStore, ABatchPageThatCannotBeWrittenEndsItsSegment) {
  DiskWorld world;
  put_batches(world.store(), 0, 4, 2);
  world.files.plan.set(Fault::kError, 1, ENOSPC);
  EXPECT_FAILS(put_one(world.store(), 4, 4), Code::kResourceExhausted);
  world.files.plan.clear();
  EXPECT_FAILS(put_one(world.store(), 5, 5), Code::kFailedPrecondition);
  EXPECT_TRUE(value_of(has_one(world.store(), 3, 3)));
  EXPECT_SUCCEEDS(world.store().sync());
  world.open();
  EXPECT_EQ(recovered_by(world.store()), (std::set<StoreSlot>{0, 1, 2, 3}));
}

TEST(SegmentStore, ARecordThatCannotBeWrittenFailsAlone) {
  DiskWorld world;
  std::vector<StorePart> parts;
  std::vector<PageBuffer> buffers(3);
  for (size_t i = 0; i < buffers.size(); ++i) {  // aligned: each is a write of its own
    const std::span<std::byte> room = buffers[i].room(kContractRecord).first(kContractRecord);
    std::memcpy(room.data(), some_bytes(i, kContractRecord).data(), room.size());
    parts.push_back(part_of(static_cast<StoreSlot>(i), i, room));
  }
  ASSERT_SUCCEEDS(put_one(world.store(), 9, 9));
  world.files.plan.set(Fault::kError, 3);  // page, first, second
  put(world.store(), parts);
  world.files.plan.clear();
  EXPECT_SUCCEEDS(parts[0].status);
  EXPECT_FAILS(parts[1].status, Code::kIo);
  EXPECT_SUCCEEDS(parts[2].status);
  EXPECT_TRUE(value_of(has_one(world.store(), 2, 2)));
  EXPECT_FAILS(has_one(world.store(), 1, 1), Code::kNotFound);
  EXPECT_EQ(world.store().health().write_errors, 1u);
  ASSERT_SUCCEEDS(put_one(world.store(), 10, 10));
  ASSERT_SUCCEEDS(world.store().sync());
  world.open();
  EXPECT_EQ(recovered_by(world.store()), (std::set<StoreSlot>{0, 1, 2, 9, 10}));
  EXPECT_FALSE(value_of(has_one(world.store(), 1, 1)));  // its digest says so
}

TEST(SegmentStore, WhatCannotBeMadeLeavesNothingBehind) {
  for (uint64_t n = 1; n <= 3; ++n) {  // create, preallocate, header
    DiskWorld world;
    world.files.plan.set(Fault::kError, n, ENOSPC);
    EXPECT_FAILS(put_one(world.store(), 0, 1), Code::kResourceExhausted) << n;
    world.files.plan.clear();
    EXPECT_FALSE(boost::filesystem::exists(world.file(0)));
    EXPECT_EQ(world.store().health().held_bytes, 0u);
    EXPECT_SUCCEEDS(put_one(world.store(), 0, 1));
  }
}

// Slots are never used again: a directory may see any number of them, in one process or over restarts.
TEST(SegmentStore, SlotsGoBeyondThirtyTwoBits) {
  constexpr uint64_t kSlotsEnd = uint64_t{1} << 31;    // of 32 bits with a sign
  constexpr uint64_t kNumbersEnd = uint64_t{1} << 32;  // of what the first version of a segment can say
  for (const uint64_t end : {kSlotsEnd / kSlots, kNumbersEnd}) {
    DiskWorld world;
    std::ofstream(world.file(end - 3)) << "x";  // an earlier process was here
    world.open();
    const auto first = static_cast<StoreSlot>(end - 2) * kSlots;
    ASSERT_EQ(world.store().first_slot(), first);
    std::set<StoreSlot> put;
    for (StoreSlot slot = first; slot < first + 3 * kSlots; slot += kSlots - 1) {
      ASSERT_SUCCEEDS(put_one(world.store(), slot, static_cast<uint64_t>(slot)));
      put.insert(slot);
    }
    EXPECT_FALSE(world.store().health().degraded);
    ASSERT_SUCCEEDS(world.store().sync());
    world.open();
    EXPECT_EQ(recovered_by(world.store()), put);
    for (const StoreSlot slot : put)
      EXPECT_TRUE(value_of(has_one(world.store(), slot, static_cast<uint64_t>(slot)))) << slot;
    const SlotRange range{.first = first, .count = kSlots};
    world.store().drop({&range, 1});
    EXPECT_FAILS(has_one(world.store(), first, static_cast<uint64_t>(first)), Code::kNotFound);
    const StoreSlot next = world.store().first_slot();
    EXPECT_EQ(next, static_cast<StoreSlot>(end + 1) * kSlots);
    EXPECT_SUCCEEDS(put_one(world.store(), next, 1));
  }
}

// It is the disk's end, not a mistake of the caller: nothing is put for a while, and that is said.
TEST(SegmentStore, BehindTheLastNumberTheStoreIsDegraded) {
  DiskWorld world;
  std::ofstream(world.file(kMostSegmentNumber - 1)) << "x";
  world.open();
  ASSERT_SUCCEEDS(put_one(world.store(), world.store().first_slot(), 1));
  EXPECT_FAILS(put_one(world.store(), world.store().first_slot() + kSlots, 2), Code::kResourceExhausted, "numbers");
  EXPECT_TRUE(world.store().health().degraded);
}

TEST(SegmentStore, ASegmentHoldsItsNumberUntilTheFileThatFailedIsGone) {
  SegmentStore* store = nullptr;
  bool fail = true;
  uint64_t held = 0;
  const auto files =
      make_watched_file_system(linux_file_system(), [&](std::string_view call, const std::string& name) -> Status {
        if (name.find("seg-") == std::string::npos) return ok();
        if (call == "preallocate" && std::exchange(fail, false)) return system_error(EMFILE, "planted");
        // From when its room is given back on, another thread may begin it anew, whose file this would be.
        if (call == "remove_file") held = store->health().held_bytes;
        return ok();
      });
  const TemporaryDirectory temporary;
  const auto opened = value_of(SegmentStore::open(
      *files, temporary / "store", {.record_bytes = kContractRecord, .slots_per_segment = kSlots}, system_clock()));
  store = opened.get();
  store->open_space(1, {});
  EXPECT_FAILS(put_one(*store, 0, 0), Code::kResourceExhausted, "planted");
  EXPECT_EQ(held, SegmentStore::most_bytes_of_segment({.record_bytes = kContractRecord, .slots_per_segment = kSlots}));
  EXPECT_EQ(store->health().held_bytes, 0U);
  EXPECT_SUCCEEDS(put_one(*store, 0, 0));
  EXPECT_TRUE(boost::filesystem::exists(temporary / ("store/r0/" + segment_name(0))));
}

TEST(SegmentStore, ASegmentThatIsDroppedWhileItIsMadeIsNotBegunAnew) {
  SegmentStore* store = nullptr;
  bool drop = true;
  const auto files =
      make_watched_file_system(linux_file_system(), [&](std::string_view call, const std::string& name) -> Status {
        const SlotRange range{.first = 0, .count = kSlots};
        if (call == "preallocate" && name.find("seg-") != std::string::npos && std::exchange(drop, false))
          store->drop({&range, 1});
        return ok();
      });
  const TemporaryDirectory temporary;
  const auto opened = value_of(SegmentStore::open(
      *files, temporary / "store", {.record_bytes = kContractRecord, .slots_per_segment = kSlots}, system_clock()));
  store = opened.get();
  store->open_space(1, {});
  EXPECT_FAILS(put_one(*store, 0, 0), Code::kFailedPrecondition, "seg-000000");
  EXPECT_FAILS(put_one(*store, 1, 1), Code::kFailedPrecondition, "seg-000000");
  EXPECT_FALSE(boost::filesystem::exists(temporary / ("store/r0/" + segment_name(0))));
  EXPECT_EQ(store->health().held_bytes, 0U);
  EXPECT_SUCCEEDS(put_one(*store, kSlots, 2));
}

// Two parts of one batch may name one slot; the first has it.
TEST(SegmentStore, ASlotThatABatchNamesTwiceIsUsedOnce) {
  DiskWorld world;
  std::vector<std::byte> first = some_bytes(1, kContractRecord), second = some_bytes(2, kContractRecord);
  std::vector<StorePart> parts = {part_of(3, 1, first), part_of(3, 2, second)};
  put(world.store(), parts);
  EXPECT_SUCCEEDS(parts[0].status);
  EXPECT_FAILS(parts[1].status, Code::kFailedPrecondition, "slot 3");
  EXPECT_SUCCEEDS(world.store().sync());
  EXPECT_TRUE(value_of(has_one(world.store(), 3, 1)));
}

TEST(SegmentStore, ForeignFilesAreLeftAlone) {
  DiskWorld world;
  for (const char* name : {"seg-1", "seg-0000001", "seg-00000x", "notes", "seg-9999999999999999"})
    std::ofstream(world.path() + "/r3/" + name) << "x";
  world.open();
  EXPECT_EQ(world.store().first_slot(), 0);
  EXPECT_EQ(recovered_by(world.store()).size(), 0u);
  EXPECT_TRUE(boost::filesystem::exists(world.path() + "/r3/seg-1"));
  world.options().rank = 6;
  boost::filesystem::create_directory(world.path() + "/r6");
  std::ofstream(world.path() + "/r6/" + segment_name(kMostSegmentNumber)) << "x";
  EXPECT_FAILS(world.another(), Code::kResourceExhausted, "numbers");
}

// Through the open file, another one, and after a restart.
TEST(SegmentStore, NotMoreFilesAreOpenThanWasSaid) {
  DiskWorld world({.budget_bytes = kGiB, .open_files = 2});
  put_batches(world.store(), 0, 12 * kSlots, 8);
  const auto open_segments = [&] {
    int count = 0;
    for (const auto& entry : boost::filesystem::directory_iterator("/proc/self/fd")) {
      boost::system::error_code gone;
      const boost::filesystem::path target = boost::filesystem::read_symlink(entry.path(), gone);
      if (!gone && target.string().starts_with(world.path() + "/r3/seg-")) ++count;
    }
    return count;
  };
  for (const bool again : {false, true}) {
    if (again) {
      world.open();
      EXPECT_EQ(recovered_by(world.store()).size(), 12u * kSlots);
    }
    for (StoreSlot slot = 0; slot < 12 * kSlots; slot += 5)
      EXPECT_TRUE(value_of(has_one(world.store(), slot, static_cast<uint64_t>(slot)))) << slot;
    EXPECT_LE(open_segments(), 2);
  }
}

// Recovery ends at the first batch page that is not there: what lies behind is durable only with it.
TEST(SegmentStore, S6ASyncWaitsForBatchesThatAreBeingWrittenBefore) {
  Mutex mutex;
  CondVar changed;
  bool holding = false;
  bool released = false;
  bool synced = false;
  const auto files = make_watched_file_system(
      linux_file_system(), [&](const char* call, const std::string& name) TORPOR_NO_THREAD_SAFETY_ANALYSIS -> Status {
        if (name.find("/seg-") == std::string::npos) return ok();
        const MutexLock lock(mutex);
        if (std::string_view(call) == "sync") {
          synced = true;
          changed.notify_all();
        } else if (std::string_view(call) == "pwrite_all" && !holding) {  // the first batch
          holding = true;
          changed.notify_all();
          while (!released) changed.wait(mutex);
        }
        return ok();
      });
  const TemporaryDirectory temporary;
  const auto store = value_of(SegmentStore::open(
      *files, temporary / "store", {.record_bytes = kContractRecord, .slots_per_segment = kSlots}, system_clock()));
  store->open_space(1, {});
  std::thread first([&] { EXPECT_SUCCEEDS(put_one(*store, 0, 0)); });
  {
    const MutexLock lock(mutex);
    while (!holding) changed.wait(mutex);
  }
  ASSERT_SUCCEEDS(put_one(*store, 1, 1));
  std::thread second([&] { EXPECT_SUCCEEDS(store->sync()); });
  {
    const MutexLock lock(mutex);
    if (!synced) changed.wait_for(mutex, 300ms);  // it may never come to that
    EXPECT_FALSE(synced);
    released = true;
    changed.notify_all();
  }
  first.join();
  second.join();
  EXPECT_TRUE(synced);
}

// S5, whatever happens: over puts, failures, restarts and leases no byte is written twice.
TEST(SegmentStore, S5NoByteIsWrittenTwice) {
  ModelFileSystem system;
  const ManualClock clock;
  const SegmentStoreOptions options{.record_bytes = kContractRecord, .slots_per_segment = 4};
  StoreSlot next = 0;
  for (int life = 0; life < 4; ++life) {
    const auto store = value_of(SegmentStore::open(system, "/disk/store", options, clock));
    store->open_space(1, digest_of({}));
    ASSERT_SUCCEEDS(store->recover(1));
    EXPECT_GE(store->first_slot(), next / 4 * 4);
    next = store->first_slot();
    for (int i = 0; i < 11; ++i) ASSERT_SUCCEEDS(put_one(*store, next++, static_cast<uint64_t>(i), 5000));
    ASSERT_SUCCEEDS(store->sync());
  }
  std::map<int, std::set<uint64_t>> written;
  for (const ModelChange& change : system.record) {
    if (change.kind != ModelChange::Kind::kWrite) continue;
    for (uint64_t at = change.offset; at < change.offset + change.bytes.size(); at += kPage)
      EXPECT_TRUE(written[change.node].insert(at / kPage).second) << change.offset;
  }
  EXPECT_EQ(written.size(), 12u);
}

}  // namespace
}  // namespace torpor
