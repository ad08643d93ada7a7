// The contract over both stores, and what only segments do.
#include <fcntl.h>
#include <sys/stat.h>

#include <fstream>
#include <set>

#include <fmt/format.h>

#include "allocator/host_arena.h"
#include "base/units.h"
#include "base/watched_file_system.h"
#include "offload/host_store.h"
#include "offload/segment_store.h"
#include "tests/contract/store_contract.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/manual_clock.h"
#include "tests/support/model_file_system.h"

namespace torpor {
namespace {

using namespace test;
using namespace std::chrono_literals;

class HostWorld final : public StoreWorld {
 public:
  Store& store() override { return *store_; }
  std::vector<Slot> fresh(int32_t count) override {
    std::vector<Slot> slots;
    for (int32_t i = 0; i < count; ++i) slots.push_back(next_++);
    return slots;
  }
  Slot beyond() override { return 100; }

 private:
  std::unique_ptr<HostArena> arena_ = value_of(HostArena::create({.slab_bytes = kMiB}));
  std::unique_ptr<HostStore> store_ =
      value_of(HostStore::create(*arena_, {.slots = 100, .slot_bytes = kContractRecord}));
  Slot next_ = 0;
};

std::shared_ptr<const Key> a_key(uint8_t fill) {
  std::array<uint8_t, kKeyBytes> secret{};
  secret.fill(fill);
  return std::make_shared<const Key>(secret);
}

constexpr int32_t kSlots = 16;
constexpr uint64_t kMostBytes = kPage + kSlots * (kPage + kContractRecord);  // of a segment

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
  std::vector<Slot> fresh(int32_t count) override {
    std::vector<Slot> slots;
    for (int32_t i = 0; i < count; ++i) slots.push_back(next_++);
    return slots;
  }
  Slot beyond() override {  // one record in each segment that the budget has room for
    for (; beyond_ < 0; next_ = (next_ / kSlots + 1) * kSlots) {
      if (!put_one(*store_, next_, 1)) beyond_ = next_;
    }
    return beyond_;
  }
  bool fail(bool on) override {
    if (&file_system_ != &files) return false;
    on ? files.plan.set(Fault::kError, 1, EIO, /*all_after=*/true) : files.plan.clear();
    clock.advance(10s);
    if (!on) next_ = (next_ / kSlots + 1) * kSlots;  // as callers do after a failure
    return true;
  }
  Store* reopen() override {
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
  Result<std::unique_ptr<SegmentStore>> another() { return SegmentStore::open(file_system_, path(), options_, clock); }
  std::string path() const { return temporary_ / "store"; }
  std::string file(uint32_t number) const { return path() + "/r3/" + segment_name(number); }
  SegmentStoreOptions& options() { return options_; }
  FaultyFileSystem files;
  ManualClock clock;

 private:
  FileSystem& file_system_;
  TemporaryDirectory temporary_;
  SegmentStoreOptions options_;
  std::unique_ptr<SegmentStore> store_;
  Slot next_ = 0;
  Slot beyond_ = -1;
};

template <class World>
StoreWay way(std::string name, SegmentStoreOptions options = {}) {
  return {std::move(name), [options]() -> std::unique_ptr<StoreWorld> {
            if constexpr (std::is_same_v<World, HostWorld>)
              return std::make_unique<HostWorld>();
            else
              return std::make_unique<World>(options);
          }};
}

// Direct, and through io_uring where the system has it.
class RealDiskWorld final : public DiskWorld {
 public:
  explicit RealDiskWorld(SegmentStoreOptions options) : DiskWorld(std::move(options), &linux_file_system()) {}
};

INSTANTIATE_TEST_SUITE_P(
    Stores, StoreContract,
    ::testing::Values(way<HostWorld>("Host"), way<DiskWorld>("Disk"), way<RealDiskWorld>("RealDisk"),
                      way<RealDiskWorld>("RealDiskEncrypted", {.key = a_key(7), .encrypt = true}),
                      way<RealDiskWorld>("Plain", {.io = FileIo::kPlain}),
                      way<DiskWorld>("Compressed", {.compression = {.level = 1}}),
                      way<DiskWorld>("Authenticated", {.key = a_key(7)}),
                      way<DiskWorld>("Encrypted", {.key = a_key(7), .encrypt = true}),
                      way<DiskWorld>("EncryptedAndCompressed",
                                     {.compression = {.level = 1}, .key = a_key(7), .encrypt = true}),
                      way<DiskWorld>("OneOpenFile", {.open_files = 1})),
    [](const auto& info) { return info.param.name; });

// ---- host memory

TEST(HostStore, ASlotIsUsedAgainAndAgain) {
  HostWorld world;
  for (uint64_t seed = 1; seed < 5; ++seed) {
    ASSERT_SUCCEEDS(put_one(world.store(), 7, seed));
    EXPECT_TRUE(value_of(has_one(world.store(), 7, seed)));
  }
}

TEST(HostStore, WithoutHostMemoryItIsNotMade) {
  const auto small = value_of(HostArena::create({.budget_bytes = kMiB, .slab_bytes = kMiB}));
  EXPECT_FAILS(HostStore::create(*small, {.slots = 1000, .slot_bytes = 8192}), Code::kResourceExhausted);
  EXPECT_FAILS(HostStore::create(*small, {.slots = 0, .slot_bytes = 8192}), Code::kInvalidArgument);
  EXPECT_FAILS(HostStore::create(*small, {.slots = 1, .slot_bytes = 0}), Code::kInvalidArgument);
  EXPECT_EQ(small->info().used_bytes, 0u);
}

// ---- segments

std::set<Slot> recovered_by(Store& store) {
  std::set<Slot> slots;
  for (const RecoveredSlot& each : value_of(store.recover(1))) slots.insert(each.slot);
  return slots;
}

// Puts so many records, from `first` on, in batches of `batch`.
void put_batches(Store& store, Slot first, int32_t count, int32_t batch) {
  for (Slot slot = first; slot < first + count; slot += batch) {
    std::vector<std::vector<std::byte>> bytes;
    for (Slot s = slot; s < std::min(slot + batch, first + count); ++s)
      bytes.push_back(some_bytes(static_cast<uint64_t>(s), kContractRecord));
    std::vector<StorePart> parts;
    for (size_t i = 0; i < bytes.size(); ++i)
      parts.push_back(part_of(slot + static_cast<Slot>(i), static_cast<uint64_t>(slot) + i, bytes[i]));
    store.put(parts);
    for (const StorePart& part : parts) ASSERT_SUCCEEDS(part.status);
  }
}

void flip(const std::string& path, uint64_t offset, int mask = 1) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(offset));
  const int byte = file.get();
  file.seekp(static_cast<std::streamoff>(offset));
  file.put(static_cast<char>(byte ^ mask));
}

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
  world.store().put({&part, 1});
  ASSERT_SUCCEEDS(part.status);
  part.slot = 5;  // the segment is the old space's
  world.store().put({&part, 1});
  EXPECT_FAILS(part.status, Code::kInvalidArgument, "key space");
  world.open(other.digest());
  EXPECT_EQ(recovered_by(world.store()), (std::set<Slot>{kSlots}));
  EXPECT_FALSE(boost::filesystem::exists(world.file(0)));  // nobody could evict it
  world.open(space.digest());
  EXPECT_EQ(recovered_by(world.store()), std::set<Slot>{});
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
  world.store().put({&part, 1});
  EXPECT_FAILS(part.status, Code::kFailedPrecondition, "key space 9");
  EXPECT_FAILS(world.store().recover(9), Code::kFailedPrecondition, "key space 9");
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
  EXPECT_EQ(recovered_by(world.store()), (std::set<Slot>{3, 4}));
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
  constexpr auto kOpen = static_cast<Slot>(SegmentStore::kOpenSegments);
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
  const Slot beyond = world.beyond();
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
  for (Slot slot = 0; slot < 4; ++slot) EXPECT_FAILS(has_one(world.store(), slot, 1), Code::kNotFound);
  EXPECT_FALSE(boost::filesystem::exists(world.file(0)));
  EXPECT_SUCCEEDS(world.store().sync());
  EXPECT_FALSE(world.store().accepting());
  world.clock.advance(10s);
  EXPECT_TRUE(world.store().accepting());
  EXPECT_FAILS(put_one(world.store(), 5, 1), Code::kFailedPrecondition);
  put_batches(world.store(), kSlots, 4, 2);
  EXPECT_SUCCEEDS(world.store().sync());
  world.open();
  EXPECT_EQ(recovered_by(world.store()), (std::set<Slot>{kSlots, kSlots + 1, kSlots + 2, kSlots + 3}));
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
  EXPECT_EQ(recovered_by(world.store()), (std::set<Slot>{0, 1, 2, 3}));
}

TEST(SegmentStore, ARecordThatCannotBeWrittenFailsAlone) {
  DiskWorld world;
  std::vector<StorePart> parts;
  std::vector<PageBuffer> buffers(3);
  for (size_t i = 0; i < buffers.size(); ++i) {  // aligned: each is a write of its own
    const std::span<std::byte> room = buffers[i].room(kContractRecord).first(kContractRecord);
    std::memcpy(room.data(), some_bytes(i, kContractRecord).data(), room.size());
    parts.push_back(part_of(static_cast<Slot>(i), i, room));
  }
  ASSERT_SUCCEEDS(put_one(world.store(), 9, 9));
  world.files.plan.set(Fault::kError, 3);  // page, first, second
  world.store().put(parts);
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
  EXPECT_EQ(recovered_by(world.store()), (std::set<Slot>{0, 1, 2, 9, 10}));
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

TEST(SegmentStore, I8WhateverByteOfADescriptionIsWrongItEndsThere) {
  for (const bool sealed : {false, true}) {
    const SegmentStoreOptions options = {.key = sealed ? a_key(1) : nullptr};
    DiskWorld probe(options);
    put_batches(probe.store(), 0, 4, 2);
    const uint64_t second = kPage + kPage + 2 * kContractRecord;  // the second batch page
    for (const uint64_t at :
         {uint64_t{0}, uint64_t{9}, uint64_t{17}, uint64_t{33}, uint64_t{50}, uint64_t{100}, uint64_t{4000}, second,
          second + 9, second + 25, second + 40, second + 120, second + 4000}) {
      DiskWorld world(options);
      put_batches(world.store(), 0, 4, 2);
      ASSERT_SUCCEEDS(world.store().sync());
      flip(world.file(0), at);
      world.open();
      EXPECT_EQ(recovered_by(world.store()), at < second ? std::set<Slot>{} : (std::set<Slot>{0, 1})) << at;
    }
  }
}

TEST(SegmentStore, I8AWrongByteOfARecordIsSeen) {
  for (const SegmentStoreOptions& options : {SegmentStoreOptions{}, SegmentStoreOptions{.key = a_key(1)},
                                             SegmentStoreOptions{.key = a_key(1), .encrypt = true}}) {
    DiskWorld world(options);
    put_batches(world.store(), 0, 2, 2);
    flip(world.file(0), 2 * kPage + 5000);
    const Result<bool> right = has_one(world.store(), 0, 0);
    if (options.key == nullptr) {
      EXPECT_FALSE(value_of(right));
    } else {
      EXPECT_FAILS(right, Code::kCorruption, "not what was sealed");
    }
    EXPECT_TRUE(value_of(has_one(world.store(), 1, 1)));
  }
}

TEST(SegmentStore, RecoveryEndsAtATornBatchWhateverLiesBehind) {
  DiskWorld world;
  put_batches(world.store(), 0, 6, 2);
  ASSERT_SUCCEEDS(world.store().sync());
  flip(world.file(0), kPage + kPage + 2 * kContractRecord + 30);
  world.open();
  EXPECT_EQ(recovered_by(world.store()), (std::set<Slot>{0, 1}));
}

TEST(SegmentStore, TruncatedAtAnyPageWhatLiesBeforeIsFound) {
  const uint64_t batch = kPage + 2 * kContractRecord;
  for (uint64_t pages = 0; pages <= 1 + 3 * 7; ++pages) {
    DiskWorld world;
    put_batches(world.store(), 0, 6, 2);
    ASSERT_SUCCEEDS(world.store().sync());
    boost::filesystem::resize_file(world.file(0), pages * kPage);
    world.open();
    const uint64_t whole = pages == 0 ? 0 : (pages - 1) * kPage / batch;
    EXPECT_EQ(recovered_by(world.store()).size(), 2 * whole) << pages;
    EXPECT_EQ(boost::filesystem::exists(world.file(0)), whole > 0);
  }
}

TEST(SegmentStore, SegmentsWithAnotherKeyOrOfAnotherKindAreNotBelieved) {
  const std::vector<SegmentStoreOptions> kinds = {
      {}, {.key = a_key(1)}, {.key = a_key(2)}, {.key = a_key(1), .encrypt = true}};
  for (size_t a = 0; a < kinds.size(); ++a) {
    for (size_t b = 0; b < kinds.size(); ++b) {
      DiskWorld world(kinds[a]);
      put_batches(world.store(), 0, 3, 3);
      world.options().key = kinds[b].key;
      world.options().encrypt = kinds[b].encrypt;
      world.open();
      EXPECT_EQ(recovered_by(world.store()).size(), a == b ? 3u : 0u) << a << b;
    }
  }
  for (const int changed : {0, 1}) {
    DiskWorld world;
    put_batches(world.store(), 0, 3, 3);
    if (changed == 0) world.options().slots_per_segment = kSlots + 1;
    if (changed == 1) {  // the segment of another rank
      world.options().rank = 6;
      boost::filesystem::rename(world.path() + "/r3", world.path() + "/r6");
    }
    world.open();
    EXPECT_EQ(recovered_by(world.store()).size(), 0u);
  }
}

TEST(SegmentStore, ASegmentUnderAnotherNameIsNotBelieved) {
  DiskWorld world;
  put_batches(world.store(), 0, 3, 3);
  world.open();
  boost::filesystem::rename(world.file(0), world.file(7));
  world.open();
  EXPECT_EQ(world.store().first_slot(), 8 * kSlots);
  EXPECT_EQ(recovered_by(world.store()).size(), 0u);
}

TEST(SegmentStore, WhatCannotBeReadAtTheStartIsLeftThere) {
  DiskWorld world;
  put_batches(world.store(), 0, 3, 3);
  world.open();
  world.files.plan.set(Fault::kError, 1);  // open
  EXPECT_EQ(recovered_by(world.store()).size(), 0u);
  world.files.plan.clear();
  EXPECT_EQ(world.store().health().read_errors, 1u);
  EXPECT_TRUE(boost::filesystem::exists(world.file(0)));
  world.open();
  EXPECT_EQ(recovered_by(world.store()).size(), 3u);
}

TEST(SegmentStore, ForeignFilesAreLeftAlone) {
  DiskWorld world;
  for (const char* name : {"seg-1", "seg-0000001", "seg-00000x", "notes", "seg-999999999999"})
    std::ofstream(world.path() + "/r3/" + name) << "x";
  world.open();
  EXPECT_EQ(world.store().first_slot(), 0);
  EXPECT_EQ(recovered_by(world.store()).size(), 0u);
  EXPECT_TRUE(boost::filesystem::exists(world.path() + "/r3/seg-1"));
  world.options().rank = 6;
  boost::filesystem::create_directory(world.path() + "/r6");
  std::ofstream(world.path() + "/r6/seg-999999999") << "x";
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
    for (Slot slot = 0; slot < 12 * kSlots; slot += 5)
      EXPECT_TRUE(value_of(has_one(world.store(), slot, static_cast<uint64_t>(slot)))) << slot;
    EXPECT_LE(open_segments(), 2);
  }
}

// ---- leases

std::vector<std::byte> bytes_at(const std::string& path, uint64_t offset, uint64_t size) {
  std::vector<std::byte> bytes(size);
  std::ifstream file(path, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(offset));
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
  EXPECT_TRUE(file.good());
  return bytes;
}

class Leases : public ::testing::TestWithParam<int> {
 protected:
  // An errno of link(), or 0: there are links.
  void refuse() {
    if (GetParam() != 0) world_.files.plan.set(Fault::kError, 1, GetParam());
  }
  std::unique_ptr<Directory> into(const std::string& name = "") {
    return value_of(world_.files.open_directory(target_.path() + name, true));
  }
  void expect_there(const LeasedRecord& leased, uint64_t seed) {
    EXPECT_EQ(bytes_at(target_ / leased.file, leased.offset, leased.record.stored), some_bytes(seed, kContractRecord));
  }
  DiskWorld world_;
  TemporaryDirectory target_;
};
INSTANTIATE_TEST_SUITE_P(Links, Leases, ::testing::Values(0, EPERM, EXDEV, EMLINK, EOPNOTSUPP), [](const auto& info) {
  return info.param == 0 ? std::string("Linked") : fmt::format("Copied{}", info.param);
});

TEST_P(Leases, WhatWasLeasedOutlivesTheSegmentAndTheStore) {
  put_batches(world_.store(), 0, 20, 5);
  ASSERT_SUCCEEDS(world_.store().sync());
  const auto directory = into();
  refuse();
  const Slot first[] = {0, 1, 6};
  const auto one = value_of(world_.store().lease(first, *directory));
  world_.files.plan.clear();
  const Slot second[] = {9, 2, 17};  // of the same segment, and of another one
  if (GetParam() != 0) world_.files.plan.set(Fault::kError, 1, EEXIST);
  const auto two = value_of(world_.store().lease(second, *directory));
  world_.files.plan.clear();
  EXPECT_EQ(one[0].file, "seg-r3-000000");
  EXPECT_EQ(two[2].file, "seg-r3-000001");
  EXPECT_EQ(one[0].id, two[0].id);
  const bool linked = GetParam() == 0;
  struct stat info {};
  ASSERT_EQ(::stat((target_ / one[0].file).c_str(), &info), 0);
  EXPECT_EQ(info.st_nlink, linked ? 2u : 1u);
  EXPECT_EQ(world_.store().health().copied_bytes > 0, !linked);
  const SlotRange all{.first = 0, .count = 2 * kSlots};
  world_.store().drop({&all, 1});
  world_.open();
  EXPECT_EQ(recovered_by(world_.store()), std::set<Slot>{});
  for (size_t i = 0; i < 3; ++i) {
    expect_there(one[i], static_cast<uint64_t>(first[i]));
    expect_there(two[i], static_cast<uint64_t>(second[i]));
  }
}

TEST_P(Leases, OnlyWhatIsDurableIsLeased) {
  put_batches(world_.store(), 0, 2, 2);
  const auto directory = into();
  const Slot both[] = {0, 2};
  EXPECT_FAILS(world_.store().lease({both, 1}, *directory), Code::kFailedPrecondition, "not synced");
  ASSERT_SUCCEEDS(world_.store().sync());
  put_batches(world_.store(), 2, 2, 2);
  EXPECT_FAILS(world_.store().lease(both, *directory), Code::kFailedPrecondition, "slot 2");
  refuse();
  EXPECT_SUCCEEDS(world_.store().lease({both, 1}, *directory));
  world_.files.plan.clear();
  const Slot missing[] = {12};
  EXPECT_FAILS(world_.store().lease(missing, *directory), Code::kNotFound);
  const Slot wrong[] = {-1};
  EXPECT_FAILS(world_.store().lease(wrong, *directory), Code::kNotFound);
  // What a restart found may be in no more than the system's memory.
  world_.open();
  EXPECT_EQ(recovered_by(world_.store()).size(), 4u);
  const auto fresh = into("/other");
  EXPECT_FAILS(world_.store().lease(both, *fresh), Code::kFailedPrecondition, "not synced");
  ASSERT_SUCCEEDS(world_.store().sync());
  EXPECT_SUCCEEDS(world_.store().lease(both, *fresh));
}

TEST(LeasesOfOthers, AFileThatSomebodyElsePutThereIsNotTakenForTheSegment) {
  DiskWorld world;
  put_batches(world.store(), 0, 2, 2);
  ASSERT_SUCCEEDS(world.store().sync());
  const TemporaryDirectory target;
  const auto into = value_of(world.files.open_directory(target.path(), false));
  const std::vector<std::byte> noise(2 * kPage, std::byte{5});
  ASSERT_SUCCEEDS(value_of(into->create_file("seg-r3-000000"))->pwrite(noise, 0));
  const Slot slot[] = {0};
  EXPECT_FALSE(world.store().lease(slot, *into).has_value());
  EXPECT_EQ(bytes_at(target / "seg-r3-000000", 0, 2 * kPage), noise);
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
  Slot next = 0;
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
