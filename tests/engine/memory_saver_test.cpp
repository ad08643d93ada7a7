// SPDX-License-Identifier: Apache-2.0
#include "engine/memory_saver.h"

#include <cstring>
#include <functional>
#include <future>

#include <sys/wait.h>
#include <unistd.h>

#include "allocator/host_device.h"
#include "base/units.h"
#include "tests/support/faulty_device.h"
#include "tests/support/process_bytes.h"
#include "tests/support/rank_call.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using test::value_of;

class MemorySaverTest : public ::testing::Test {
 protected:
  static std::byte* at(DeviceAddress address) {
    return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
  }
  test::FaultyDevice* device_ = nullptr;  // the newest
  MemorySaver memory_{[this](int ordinal) -> Result<std::unique_ptr<RankMemory>> {
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<DeviceMemory> host, make_host_device({.capacity_bytes = 64 * kMiB}));
    auto device = std::make_unique<test::FaultyDevice>(std::move(host));
    device_ = device.get();
    return RankMemory::create(std::move(device), linux_file_system(), {.rank = ordinal, .handle_bytes = 2 * kMiB});
  }};
};

TEST_F(MemorySaverTest, AnAllocationThatWouldLeaveLessThanTheMarginFails) {
  memory_.set_margin(32 * kMiB);
  EXPECT_TRUE(memory_.allocate(0, 32 * kMiB));
  const auto refused = memory_.allocate(0, 1 * kMiB);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kResourceExhausted);
  memory_.set_margin(31 * kMiB);
  EXPECT_FALSE(memory_.allocate(0, 2 * kMiB));
  memory_.set_margin(0);
  EXPECT_TRUE(memory_.allocate(0, 2 * kMiB));
}

TEST_F(MemorySaverTest, WhatIsSavedCanBeReadFromAnyPlaceOfItsRegionWhileItSleeps) {
  constexpr uint64_t kSize = 9 * kMiB;  // three pieces
  const DeviceAddress other = value_of(memory_.allocate(0, 5000));
  const DeviceAddress address = value_of(memory_.allocate(0, kSize));
  for (uint64_t i = 0; i < kSize; ++i) at(address)[i] = static_cast<std::byte>(i / 4096 + i % 251);
  std::memset(at(other), 9, 5000);
  const std::vector<std::byte> expected(at(address), at(address) + kSize);
  std::vector<std::byte> read(kSize);
  EXPECT_EQ(memory_.read_saved(address, read).error().code, Code::kNotFound);  // it is awake
  ASSERT_TRUE(memory_.sleep({}));
  ASSERT_TRUE(memory_.read_saved(address, read));
  EXPECT_EQ(read, expected);
  std::vector<std::byte> part(5 * kMiB);
  ASSERT_TRUE(memory_.read_saved(address + 4 * kMiB - 1, part));
  EXPECT_TRUE(std::equal(part.begin(), part.end(), expected.begin() + 4 * kMiB - 1));
  EXPECT_FALSE(memory_.read_saved(address + 4 * kMiB + 1, part));  // beyond its end
  EXPECT_FALSE(memory_.read_saved(UINT64_MAX - 4, part));
  ASSERT_TRUE(memory_.wake({}));
  EXPECT_FALSE(memory_.read_saved(address, read));
}

TEST_F(MemorySaverTest, WhatIsTrimmedIsNeitherCountedNorCopiedAndTheRestKeepsItsContent) {
  const DeviceAddress used = value_of(memory_.allocate(0, 2 * kMiB));
  const DeviceAddress unused = value_of(memory_.allocate(0, 6 * kMiB));
  std::memset(at(used), 5, 2 * kMiB);
  const std::vector<DeviceAddress> trimmed{unused, 4096};  // one that torpor does not know
  EXPECT_EQ(memory_.trim(1, trimmed), 0u);                 // on another device
  EXPECT_EQ(memory_.trim(0, trimmed), 6 * kMiB);
  EXPECT_EQ(memory_.trim(0, trimmed), 0u);
  const RankLedger ledger = value_of(memory_.ledgers()).at(0);
  EXPECT_EQ(ledger.tags.at("default").region_bytes, 2 * kMiB);
  EXPECT_EQ(ledger.tags.at("default").physical_bytes, 2 * kMiB);
  EXPECT_EQ(ledger.device_physical_bytes, 2 * kMiB);
  const TagMove slept = value_of(memory_.sleep({}));
  EXPECT_EQ(slept.copied_bytes, 2 * kMiB);
  EXPECT_EQ(value_of(memory_.wake({})).physical_bytes, 2 * kMiB);
  EXPECT_EQ(at(used)[2 * kMiB - 1], std::byte{5});
  EXPECT_TRUE(memory_.free(0, unused));
  EXPECT_FALSE(memory_.free(0, unused));
  EXPECT_TRUE(memory_.sleep({}));
}

TEST_F(MemorySaverTest, WhatWasSavedOfTrimmedMemoryIsForgotten) {
  const DeviceAddress used = value_of(memory_.allocate(0, 2 * kMiB));
  const DeviceAddress unused = value_of(memory_.allocate(0, 6 * kMiB));
  std::memset(at(used), 5, 2 * kMiB);
  ASSERT_TRUE(memory_.sleep({}));
  EXPECT_EQ(memory_.trim(0, std::vector{unused}), 0u);
  EXPECT_EQ(value_of(memory_.plan_wake({})).physical_bytes, 2 * kMiB);
  ASSERT_TRUE(memory_.wake({}));
  EXPECT_EQ(value_of(memory_.ledgers()).at(0).device_physical_bytes, 2 * kMiB);
  EXPECT_EQ(at(used)[0], std::byte{5});
}

TEST_F(MemorySaverTest, WeightsOfWhichAPartWasTrimmedAreNotTakenForTheNamedOnes) {
  MemorySaver::scopes().push_back({.tag = "weights"});
  const DeviceAddress used = value_of(memory_.allocate(0, 2 * kMiB));
  const DeviceAddress replaced = value_of(memory_.allocate(0, 2 * kMiB));
  MemorySaver::scopes().pop_back();
  RankMemory& rank = *value_of(memory_.memory_of(0));
  ASSERT_SUCCEEDS(rank.name_weights("w", {{used, 4096}, {replaced + 4096, 4096}}));
  const std::string named = value_of(rank.weights_digest());
  ASSERT_EQ(memory_.trim(0, std::vector{replaced}), 2 * kMiB);
  EXPECT_NE(value_of(rank.weights_digest()), named);  // and does not read what is not there
}

TEST_F(MemorySaverTest, WhatASleepOrTheDeviceRefusesToFreeIsFreedLater) {
  const auto allocate = [&] { return value_of(memory_.allocate(0, 2 * kMiB)); };
  const std::vector<std::string> tags{"default"};
  const DeviceAddress used = allocate();
  const DeviceAddress first = allocate();
  RankMemory& rank = *value_of(memory_.memory_of(0));
  const auto held = [&] { return rank.ledger().tags.at("default").region_bytes; };
  value_of(test::call_rank(rank, orders::Save{.tags = tags}));
  EXPECT_FAILS(memory_.free(0, first), Code::kFailedPrecondition, "is saving");  // who can try again hears of it
  ASSERT_SUCCEEDS(memory_.free_soon(0, first));
  EXPECT_EQ(held(), 4 * kMiB);
  value_of(test::call_rank(rank, orders::Detach{.tags = tags}));
  EXPECT_EQ(held(), 2 * kMiB);
  EXPECT_EQ(value_of(memory_.wake({})).physical_bytes, 2 * kMiB);

  const std::vector<std::function<void()>> later{
      [&] { ASSERT_SUCCEEDS(memory_.free(0, allocate())); },
      [&] { ASSERT_SUCCEEDS(memory_.sleep({})); },
      [&] { ASSERT_SUCCEEDS(memory_.wake({})); },
  };
  DeviceAddress left = allocate();
  for (const auto& call : later) {
    device_->fail_at(1);  // a capture, say
    ASSERT_SUCCEEDS(memory_.free_soon(0, left));
    EXPECT_EQ(held(), 4 * kMiB);
    device_->fail_at(0);
    call();
    EXPECT_EQ(held(), 2 * kMiB);
    left = allocate();
  }
  ASSERT_SUCCEEDS(memory_.free(0, left));
  EXPECT_FAILS(memory_.free_soon(0, first), Code::kNotFound, "no region");
  EXPECT_EQ(value_of(memory_.sleep({})).copied_bytes, 2 * kMiB);
  ASSERT_SUCCEEDS(memory_.wake({}));
  ASSERT_SUCCEEDS(memory_.free_soon(0, used));
}

TEST_F(MemorySaverTest, MemoryThatAProgramMadeTakesTheOptionsOfItsEngine) {
  const test::TemporaryDirectory directory;
  const DeviceAddress address = value_of(memory_.allocate(0, 48 * kMiB));
  std::memset(at(address), 7, 48 * kMiB);
  RankMemory& rank = *value_of(memory_.memory_of(0));
  const auto budget = [&] { return rank.ledger().arena_budget_bytes; };
  ASSERT_SUCCEEDS(rank.apply({.rank = 3, .arena_budget_bytes = 20 * kMiB}));
  EXPECT_EQ(rank.rank(), 3);  // which need not be the device's number
  EXPECT_EQ(budget(), 20 * kMiB);
  EXPECT_FAILS(memory_.sleep({}), Code::kResourceExhausted, "of the budget of 20971520");
  ASSERT_SUCCEEDS(rank.apply({.spill_dir = directory.path()}));
  EXPECT_EQ(budget(), 20 * kMiB);  // as these options give none
  ASSERT_SUCCEEDS(memory_.sleep({}));
  EXPECT_FAILS(rank.apply({.host_compression = Codec::kZstd}), Code::kInvalidArgument, "compressed with zstd");
  ASSERT_SUCCEEDS(rank.apply({}));  // what sleeps is in a file all the same
  ASSERT_SUCCEEDS(memory_.wake({}));
  EXPECT_EQ(at(address)[48 * kMiB - 1], std::byte{7});
  EXPECT_FALSE(memory_.sleep({}));  // without the file
}

TEST_F(MemorySaverTest, AnEngineAndItsProgramLeaveTheTagsOfTheOtherAlone) {
  const auto allocate = [&](const MemorySaver::Scope& scope) {
    MemorySaver::scopes().push_back(scope);
    Result<DeviceAddress> address = memory_.allocate(0, 2 * kMiB);
    MemorySaver::scopes().pop_back();
    return address;
  };
  const DeviceAddress weights = value_of(allocate({.tag = "weights", .engine = true}));
  const DeviceAddress optimizer = value_of(allocate({.tag = "optimizer", .keep = false}));
  RankMemory& rank = *value_of(memory_.memory_of(0));
  const auto described = [&] { return value_of(test::call_rank(rank, orders::Describe{})); };
  const auto tags = [&] {
    std::vector<std::string> names;
    for (const auto& [name, tag] : described().ledger.tags) names.push_back(name);
    return names;
  };
  const uint64_t writes = described().writes["weights"];

  memory_.mark_dirty({});
  ASSERT_SUCCEEDS(memory_.sleep({}));
  EXPECT_EQ(rank.states().at("weights"), RegionState::kAttached);
  ASSERT_SUCCEEDS(memory_.wake({}));
  EXPECT_EQ(described().writes["weights"], writes);
  EXPECT_TRUE(described().without_content.empty());  // the program's came back so
  EXPECT_EQ(tags(), std::vector<std::string>{"weights"});
  ASSERT_SUCCEEDS(memory_.sleep({"weights"}));  // by its name
  ASSERT_SUCCEEDS(memory_.wake({"weights"}));

  EXPECT_FAILS(allocate({.tag = "weights", .keep = false}), Code::kFailedPrecondition, "has memory of an engine");
  EXPECT_FAILS(allocate({.tag = "optimizer", .engine = true}), Code::kFailedPrecondition, "a region of this program");
  EXPECT_EQ(tags(), std::vector<std::string>{"weights"});
  ASSERT_SUCCEEDS(memory_.free(0, optimizer));
  ASSERT_TRUE(allocate({.tag = "optimizer", .engine = true}));  // the name is free
  EXPECT_EQ(tags(), (std::vector<std::string>{"optimizer", "weights"}));
  ASSERT_SUCCEEDS(memory_.free(0, weights));
  ASSERT_TRUE(allocate({.tag = "weights"}));
  EXPECT_EQ(tags(), std::vector<std::string>{"optimizer"});
}

// An engine with KV blocks, and a region of its program.
class MemorySaverBesideAnEngine : public MemorySaverTest {
 protected:
  static constexpr uint64_t kBlock = 8 * kKiB;

  MemorySaverBesideAnEngine() {
    const auto with_late_blocks = [](int) {
      return RankMemory::create(value_of(make_host_device({.capacity_bytes = 64 * kMiB})), linux_file_system(),
                                {.handle_bytes = 2 * kMiB, .deferred_job_bytes = 1, .deferred_thread = false});
    };
    rank_ = value_of(memory_.memory_of(0, with_late_blocks));
    const DeviceAddress kv = allocate({.tag = "kv_cache", .engine = true});
    const KvTensor tensor{.address = kv, .layers = 1, .layer_stride = 1, .block_stride = kBlock, .block_bytes = kBlock};
    EXPECT_SUCCEEDS(rank_->set_kv_layout("kv_cache", {.num_blocks = 4, .tensors = {tensor}}));
    optimizer_ = allocate({.tag = "optimizer"});
    std::memset(at(optimizer_), 7, kSize);
  }
  void expect_program_sleeps_and_wakes() {
    ASSERT_SUCCEEDS(memory_.sleep({"optimizer"}));
    ASSERT_SUCCEEDS(memory_.wake({"optimizer"}));
    EXPECT_EQ(at(optimizer_)[kSize - 1], std::byte{7});
  }
  template <class Order>
  typename Order::Reply call(const Order& order) {
    SCOPED_TRACE(Order::kName);
    return value_of(test::call_rank(*rank_, order));
  }

  RankMemory* rank_ = nullptr;

 private:
  static constexpr uint64_t kSize = 2 * kMiB;
  DeviceAddress allocate(const MemorySaver::Scope& scope) {
    MemorySaver::scopes().push_back(scope);
    const DeviceAddress address = value_of(memory_.allocate(0, kSize));
    MemorySaver::scopes().pop_back();
    return address;
  }
  DeviceAddress optimizer_ = 0;
};

TEST_F(MemorySaverBesideAnEngine, ItsProgramsSleepEndsNoCheckpoint) {
  const test::TemporaryDirectory directory;
  call(orders::Save{.stage = orders::Save::Stage::kOpen, .directory = directory.path()});
  expect_program_sleeps_and_wakes();
  EXPECT_TRUE(call(orders::PollSave{.wait = true}).ended);
  ASSERT_SUCCEEDS(memory_.sleep({"optimizer", "kv_cache"}));
  EXPECT_FAILS(test::call_rank(*rank_, orders::PollSave{.wait = true}), Code::kFailedPrecondition, "begin it again");
}

TEST_F(MemorySaverBesideAnEngine, ItsProgramSleepsWhileBlocksOfAPostCopyWakeAreOnTheirWay) {
  call(orders::Save{.tags = {"kv_cache"}, .blocks = {1, 2}, .versions = {1, 1}, .steps = 1});
  call(orders::Detach{.tags = {"kv_cache"}});
  EXPECT_EQ(call(orders::Restore{.tags = {"kv_cache"}, .deferred = {2}}).deferred_bytes, kBlock);
  call(orders::Finish{.tags = {"kv_cache"}});
  expect_program_sleeps_and_wakes();
  EXPECT_FAILS(memory_.sleep({"optimizer", "kv_cache"}), Code::kFailedPrecondition, "on their way");
  // A wake of the program that is undone leaves them alone, too.
  call(orders::Save{.tags = {"optimizer"}});
  call(orders::Detach{.tags = {"optimizer"}});
  call(orders::Restore{.tags = {"optimizer"}});
  call(orders::Undo{.what = orders::Undo::What::kRestore, .tags = {"optimizer"}});
  ASSERT_SUCCEEDS(memory_.wake({"optimizer"}));
  const orders::PollRestore::Reply came = call(orders::PollRestore{.seen = {0}, .wait = DeferredWait::kAll});
  ASSERT_EQ(came.arrivals.size(), 1u) << came.why;
  EXPECT_EQ(came.arrivals[0].how, BlockArrival::kArrived);
}

// The child lacks the thread that sleeps and holds the lock.
TEST_F(MemorySaverTest, AChildThatIsForkedDuringASleepIsRefusedAtOnce) {
  const DeviceAddress address = value_of(memory_.allocate(0, 2 * kMiB));
  std::promise<void> copies;
  std::promise<void> go_on;
  device_->on_copy([&, copied = false]() mutable {
    if (std::exchange(copied, true)) return;
    copies.set_value();
    go_on.get_future().wait();
  });
  auto sleeping = std::async(std::launch::async, [&] { return memory_.sleep({}); });
  copies.get_future().wait();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    const auto refused = [](const auto& result) {
      return !result && result.error().what.find("forked") != std::string::npos;
    };
    memory_.mark_dirty({});
    const bool all = refused(memory_.free(0, address)) && refused(memory_.free_soon(0, address)) &&
                     refused(memory_.sleep({})) && refused(memory_.wake({})) && refused(memory_.allocate(0, 5000)) &&
                     refused(memory_.plan_sleep({})) && refused(memory_.ledgers()) && memory_.engine_tags().empty() &&
                     memory_.trim(0, std::vector<DeviceAddress>{address}) == 0;
    ::_exit(all ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);  // not that of SIGALRM
  go_on.set_value();
  EXPECT_SUCCEEDS(sleeping.get());
}

TEST_F(MemorySaverTest, DamageInHostMemorySaysThatTheContentIsLost) {
  const DeviceAddress address = value_of(memory_.allocate(0, 5000));
  const std::string text = "a text that is nowhere else in this process";
  std::memcpy(at(address), text.data(), text.size());
  ASSERT_SUCCEEDS(memory_.sleep({}));
  for (const uint64_t found : test::addresses_of(std::as_bytes(std::span(text))))
    test::overwrite_at(found, std::byte{});
  const Result<TagMove> woken = memory_.wake({});
  EXPECT_FAILS(woken, Code::kCorruption, "do not match their digest");
  EXPECT_NE(woken.error().next_step.find("load it again"), std::string::npos) << woken.error().next_step;
}

TEST_F(MemorySaverTest, ABackupOnDiskIsRefusedByName) {
  MemorySaver::scopes().push_back({.tag = "t", .on_disk = true});
  const auto refused = memory_.allocate(0, 5000);
  MemorySaver::scopes().pop_back();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kUnsupported);
}

}  // namespace
}  // namespace torpor
