// SPDX-License-Identifier: Apache-2.0
// Plans on ranks with real stores; every byte is compared.
#include "kvcache/offload_worker.h"

#include <atomic>
#include <fstream>
#include <future>

#include "tests/kvcache/offload_rank.h"
#include "tests/support/bf16_bytes.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using test::key_number;
using test::OffloadRank;
using test::OffloadRankOptions;
using test::value_of;

using Numbers = std::vector<int32_t>;

// One job; blocks and slots go by pairs. Keys of what goes to disk: the number of the target.
TransferPlan plan_of(uint64_t id, PlanKind kind, StoreId store, const Numbers& from, const Numbers& to,
                     uint32_t space = 1) {
  TransferPlan plan{.number = id};
  PlannedJob& job =
      plan.add(id, kind, store, kind == PlanKind::kGet ? TransferPriority::kLoad : TransferPriority::kOffload);
  if (kind == PlanKind::kMove) job.other = StoreId::kDisk;
  job.count = static_cast<uint32_t>(from.size());
  plan.from = from;
  plan.to = to;
  for (size_t i = 0; job.keyed() && i < to.size(); ++i)
    plan.keys.push_back(key_number(static_cast<uint32_t>(to[i]), space));
  return plan;
}

class OffloadWorkerTest : public ::testing::TestWithParam<bool> {
 protected:
  OffloadRank make_rank(OffloadRankOptions options = {}) {
    options.late_copies = GetParam();
    if (options.disk_segments == 0) options.disk_segments = 4, options.segment_slots = 4;
    options.directory = temporary_ / "store";
    return OffloadRank(std::move(options));
  }
  static void expect_good(const TransferReport& report, uint64_t id) {
    ASSERT_EQ(report.jobs.size(), 1u);
    EXPECT_EQ(report.jobs[0].id, id);
    EXPECT_EQ(report.jobs[0].count, 0u) << report.jobs[0].cause;
  }
  test::TemporaryDirectory temporary_;
};
INSTANTIATE_TEST_SUITE_P(Device, OffloadWorkerTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "LateCopies" : "EarlyCopies"; });

TEST_P(OffloadWorkerTest, BlocksGoIntoEachStoreAndOnToTheNextAndComeBackByteForByte) {
  OffloadRank rank = make_rank();
  rank.worker().open_space(1, {});
  for (int32_t block = 0; block < 4; ++block) rank.fill(block, static_cast<uint32_t>(block + 1));
  expect_good(rank.run(plan_of(1, PlanKind::kPut, StoreId::kHost, {0, 1, 2}, {5, 0, 3})), 1);
  expect_good(rank.run(plan_of(2, PlanKind::kPut, StoreId::kDisk, {3}, {0})), 2);
  expect_good(rank.run(plan_of(3, PlanKind::kMove, StoreId::kHost, {0, 3}, {1, 2})), 3);
  for (int32_t block = 0; block < 16; ++block) rank.fill(block, 200);
  expect_good(rank.run(plan_of(4, PlanKind::kGet, StoreId::kHost, {5, 0}, {8, 9})), 4);
  expect_good(rank.run(plan_of(5, PlanKind::kGet, StoreId::kDisk, {2, 1, 0}, {10, 11, 12})), 5);
  EXPECT_TRUE(rank.has(8, 1) && rank.has(9, 2) && rank.has(10, 3) && rank.has(11, 2) && rank.has(12, 4));
  EXPECT_TRUE(rank.has(0, 200) && rank.has(13, 200));
  EXPECT_TRUE(rank.worker().idle());
  EXPECT_TRUE(rank.worker().poll().empty());
}

// A block that does not get smaller has a place as long as there are such; the next one is not kept.
TEST_P(OffloadWorkerTest, APackedStoreGivesBackWhatItGotAndSaysWhatItDidNotKeep) {
  OffloadRank rank = make_rank({.host_codec = Codec::kBf16});
  rank.worker().open_space(1, {});
  std::vector<std::vector<std::byte>> bytes;
  for (int32_t block = 0; block < 6; ++block) {
    const auto seed = static_cast<uint64_t>(block);
    bytes.push_back(block < 3 ? test::bf16_values(seed, OffloadRank::kBlockBytes)
                              : test::noise(seed, OffloadRank::kBlockBytes));
    rank.fill_with(block, bytes.back());
  }
  expect_good(rank.run(plan_of(1, PlanKind::kPut, StoreId::kHost, {0, 1, 2, 3, 4}, {5, 0, 3, 1, 2})), 1);
  const TransferReport refused = rank.run(plan_of(2, PlanKind::kPut, StoreId::kHost, {5}, {4}));
  ASSERT_EQ(refused.outcomes, std::vector{BlockOutcome::kFailed});
  EXPECT_EQ(refused.jobs[0].code, Code::kResourceExhausted);
  expect_good(rank.run(plan_of(3, PlanKind::kMove, StoreId::kHost, {0, 2}, {1, 2})), 3);
  expect_good(rank.run(plan_of(4, PlanKind::kGet, StoreId::kHost, {5, 3, 1}, {8, 9, 10})), 4);
  expect_good(rank.run(plan_of(5, PlanKind::kGet, StoreId::kDisk, {2, 1}, {11, 12})), 5);
  const std::pair<int32_t, size_t> back[] = {{8, 0}, {9, 2}, {10, 3}, {11, 4}, {12, 1}};
  for (const auto& [block, was] : back) EXPECT_EQ(rank.bytes_of(block), bytes[was]) << was;
}

TEST_P(OffloadWorkerTest, S10APlanThatIsSentAgainIsNotRunAgain) {
  OffloadRank rank = make_rank();
  rank.fill(0, 1);
  const TransferPlan plan = plan_of(1, PlanKind::kPut, StoreId::kHost, {0}, {0});
  expect_good(rank.run(plan), 1);
  EXPECT_TRUE(rank.run(plan).empty());
}

TEST_P(OffloadWorkerTest, S4APlanForAnotherRankThanThisIsRefusedWhole) {
  OffloadRank rank = make_rank();
  const auto refused = [&](TransferPlan plan, std::string_view part) {
    return test::failed_with(rank.worker().run(plan), Code::kInvalidArgument, part);
  };
  EXPECT_TRUE(refused(plan_of(1, PlanKind::kPut, StoreId::kHost, {0, 16}, {0, 1}), "put"));
  EXPECT_TRUE(refused(plan_of(1, PlanKind::kPut, StoreId::kHost, {0}, {8}), "put"));
  EXPECT_TRUE(refused(plan_of(1, PlanKind::kGet, StoreId::kDisk, {16}, {0}), "get"));
  EXPECT_TRUE(refused(plan_of(1, PlanKind::kPut, StoreId::kRemote, {0}, {0}), "put"));
  EXPECT_TRUE(refused({.number = 1, .dropped = {{StoreId::kDisk, 4}}}, "drops"));
  TransferPlan within = plan_of(1, PlanKind::kMove, StoreId::kHost, {0}, {1});
  within.jobs[0].other = StoreId::kHost;
  within.keys.clear();
  EXPECT_TRUE(refused(within, "moves blocks within host memory"));
  EXPECT_TRUE(rank.worker().idle());
  rank.fill(0, 1);
  expect_good(rank.run(plan_of(1, PlanKind::kPut, StoreId::kHost, {0}, {0})), 1);
}

// One plan for two ranks, of which one has segments of a life before: equal slots, other files.
TEST_P(OffloadWorkerTest, S4WhereASlotLiesIsEachRanksOwn) {
  OffloadRank first = make_rank({.rank = 0});
  OffloadRank second = make_rank({.rank = 1});
  second.worker().open_space(1, {});
  second.fill(0, 9);
  expect_good(second.run(plan_of(1, PlanKind::kPut, StoreId::kDisk, {0, 0}, {0, 4})), 1);
  second.open();
  for (OffloadRank* rank : {&first, &second}) {
    rank->worker().open_space(1, {});
    (void)value_of(rank->worker().recover(1));
    rank->worker().adopt({});
    rank->fill(0, 1);
    rank->fill(1, 2);
    expect_good(rank->run(plan_of(1, PlanKind::kPut, StoreId::kDisk, {0, 1}, {4, 0})), 1);
    expect_good(rank->run(plan_of(2, PlanKind::kGet, StoreId::kDisk, {0, 4}, {5, 6})), 2);
    EXPECT_TRUE(rank->has(5, 2) && rank->has(6, 1));
  }
  const auto exists = [&](const char* rank, uint32_t number) {
    return std::ifstream(temporary_ / (std::string("store/") + rank + "/" + segment_name(number))).good();
  };
  EXPECT_TRUE(exists("r0", 0) && exists("r0", 1) && !exists("r0", 2));
  EXPECT_TRUE(!exists("r1", 0) && !exists("r1", 1) && exists("r1", 2) && exists("r1", 3));
}

TEST_P(OffloadWorkerTest, I5TheFailureOfOneBlockMarksNoOtherAndItsCauseIsReported) {
  OffloadRank rank = make_rank();
  rank.device().fail_at(2, false);  // the batch, and then its first block alone
  rank.fill(0, 1);
  rank.fill(1, 2);
  rank.device().fail_at(1);
  TransferReport report = rank.run(plan_of(1, PlanKind::kPut, StoreId::kHost, {0, 1}, {0, 1}));
  expect_good(report, 1);  // tried alone, both went
  rank.device().fail_at(1, true);
  report = rank.run(plan_of(2, PlanKind::kPut, StoreId::kHost, {0, 1}, {2, 3}));
  rank.device().fail_at(0);
  ASSERT_EQ(report.outcomes.size(), 2u);
  EXPECT_EQ(report.outcomes[0], BlockOutcome::kFailed);
  EXPECT_EQ(report.jobs[0].code, Code::kDevice);
  EXPECT_NE(report.jobs[0].cause.find("rank 0"), std::string::npos);
  EXPECT_NE(report.jobs[0].cause.find("injected"), std::string::npos) << report.jobs[0].cause;
  // What failed is found nowhere, what went before still is.
  report = rank.run(plan_of(3, PlanKind::kGet, StoreId::kHost, {2, 1}, {5, 6}));
  EXPECT_EQ(report.outcomes, (std::vector{BlockOutcome::kDamaged, BlockOutcome::kTransferred}));
  EXPECT_TRUE(rank.has(6, 2));
}

TEST_P(OffloadWorkerTest, S2WhereOneRankFailsTheOthersReportSaysSoForItselfAlone) {
  OffloadRank first = make_rank({.rank = 0});
  OffloadRank second = make_rank({.rank = 1});
  const TransferPlan plan = plan_of(1, PlanKind::kPut, StoreId::kHost, {0, 1}, {0, 1});
  for (OffloadRank* rank : {&first, &second}) rank->fill(0, 1), rank->fill(1, 2);
  second.device().fail_at(1, true);
  expect_good(first.run(plan), 1);
  const TransferReport report = second.run(plan);
  EXPECT_EQ(report.rank, 1);
  EXPECT_EQ(report.outcomes, (std::vector{BlockOutcome::kFailed, BlockOutcome::kFailed}));
}

TEST_P(OffloadWorkerTest, S3AnUnprovenCopyIsReportedAndNothingIsCopiedAnyMore) {
  OffloadRank rank = make_rank();
  rank.fill(0, 1);
  rank.device().drain_as(Drain::kUnproven);
  TransferReport report = rank.run(plan_of(1, PlanKind::kPut, StoreId::kHost, {0}, {0}));
  EXPECT_EQ(report.outcomes, std::vector{BlockOutcome::kUnproven});
  rank.device().drain_as(Drain::kCompleted);
  report = rank.run(plan_of(2, PlanKind::kGet, StoreId::kHost, {0}, {3}));
  ASSERT_EQ(report.outcomes.size(), 1u);
  EXPECT_EQ(report.outcomes[0], BlockOutcome::kFailed);  // the engine's fault, not the block's
  EXPECT_EQ(report.jobs[0].code, Code::kDevice);
}

// The step before still writes into the block, whose request was preempted: what is loaded into it comes after.
TEST_P(OffloadWorkerTest, S11ALoadBeginsWhenWhatTheDeviceWasGivenBeforeIsOver) {
  OffloadRank rank = make_rank();
  rank.worker().open_space(1, {});
  rank.fill(0, 1);
  rank.fill(5, 50);
  int waits = 0;
  rank.device().on_synchronize([&] {
    ++waits;
    EXPECT_TRUE(rank.has(5, 50));
    rank.fill(5, 51);
  });
  expect_good(rank.run(plan_of(1, PlanKind::kPut, StoreId::kHost, {0}, {0})), 1);
  expect_good(rank.run(plan_of(2, PlanKind::kPut, StoreId::kDisk, {0}, {0})), 2);
  EXPECT_EQ(waits, 0);  // the steps that wrote what is stored are over
  expect_good(rank.run(plan_of(3, PlanKind::kGet, StoreId::kHost, {0}, {5})), 3);
  EXPECT_EQ(waits, 1);
  EXPECT_TRUE(rank.has(5, 1));
  rank.fill(5, 50);
  expect_good(rank.run(plan_of(4, PlanKind::kGet, StoreId::kDisk, {0}, {5})), 4);
  EXPECT_EQ(waits, 2);
  EXPECT_TRUE(rank.has(5, 1));
}

// The engine gives the device its next step meanwhile.
TEST_P(OffloadWorkerTest, S11WhoRunsAPlanDoesNotWaitForTheDevice) {
  OffloadRank rank = make_rank({.host_slots = 16});
  rank.worker().open_space(1, {});
  for (const int32_t block : {0, 1, 5, 6}) rank.fill(block, static_cast<uint32_t>(block) + 1);
  expect_good(rank.run(plan_of(1, PlanKind::kPut, StoreId::kHost, {0, 1}, {0, 1})), 1);
  expect_good(rank.run(plan_of(2, PlanKind::kPut, StoreId::kDisk, {1}, {0})), 2);
  std::promise<void> over;
  std::atomic<int> waits = 0;
  rank.device().on_synchronize([&, busy = over.get_future().share()] {
    ++waits;
    busy.wait();
  });
  TransferPlan plan = plan_of(3, PlanKind::kGet, StoreId::kHost, {0}, {5});
  plan.add(4, PlanKind::kGet, StoreId::kDisk, TransferPriority::kLoad).count = 1;
  plan.from.push_back(0);
  plan.to.push_back(6);
  plan.loading = {{.request = "a", .job = 3}, {.request = "a", .job = 4}};
  std::future<Status> run = std::async(std::launch::async, [&] { return rank.worker().run(plan); });
  const bool returned = run.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  EXPECT_TRUE(returned);
  EXPECT_FALSE(rank.worker().wait_for_report(std::chrono::milliseconds(50)));
  EXPECT_TRUE(rank.has(5, 6) && rank.has(6, 7));  // no byte was loaded
  over.set_value();
  ASSERT_SUCCEEDS(run.get());
  const std::string requests[] = {"a"};
  ASSERT_SUCCEEDS(rank.worker().finish_loads(requests));
  EXPECT_EQ(rank.worker().poll().jobs.size(), 2u);
  EXPECT_TRUE(rank.has(5, 1) && rank.has(6, 2));
  EXPECT_EQ(waits, 1);  // for both
}

TEST_P(OffloadWorkerTest, S11WhereThatCannotBeProvenNothingIsLoaded) {
  OffloadRank rank = make_rank();
  rank.fill(0, 1);
  rank.fill(5, 50);
  expect_good(rank.run(plan_of(1, PlanKind::kPut, StoreId::kHost, {0}, {0})), 1);
  rank.device().fail_synchronize(true);
  TransferPlan plan = plan_of(2, PlanKind::kGet, StoreId::kHost, {0}, {5});
  plan.add(3, PlanKind::kPut, StoreId::kHost, TransferPriority::kOffload).count = 1;
  plan.from.push_back(0);
  plan.to.push_back(1);
  const TransferReport report = rank.run(plan);
  ASSERT_EQ(report.jobs.size(), 2u);
  for (const JobReport& job : report.jobs) EXPECT_EQ(job.count, job.id == 2 ? 1u : 0u) << job.cause;
  EXPECT_EQ(report.outcomes, std::vector{BlockOutcome::kFailed});
  EXPECT_TRUE(rank.has(5, 50));
}

TEST_P(OffloadWorkerTest, AWrongByteIsDamageOnTheWayUpAndOnTheWayOn) {
  OffloadRank rank = make_rank();
  rank.worker().open_space(1, {});
  for (int32_t block = 0; block < 3; ++block) rank.fill(block, static_cast<uint32_t>(block + 1));
  expect_good(rank.run(plan_of(1, PlanKind::kPut, StoreId::kHost, {0, 1}, {0, 1})), 1);
  expect_good(rank.run(plan_of(2, PlanKind::kPut, StoreId::kDisk, {2}, {0})), 2);
  rank.worker().store(StoreId::kHost)->view({.offset = 0})[100] ^= std::byte{1};
  std::fstream file(temporary_ / ("store/r0/" + segment_name(0)), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(2 * kPage + 5));
  file.put(99);
  file.close();
  rank.fill(8, 8);
  TransferReport report = rank.run(plan_of(3, PlanKind::kGet, StoreId::kHost, {0, 1}, {8, 9}));
  EXPECT_EQ(report.outcomes, (std::vector{BlockOutcome::kDamaged, BlockOutcome::kTransferred}));
  EXPECT_EQ(report.jobs[0].code, Code::kCorruption);
  EXPECT_TRUE(rank.has(9, 2));
  rank.fill(8, 8);
  report = rank.run(plan_of(4, PlanKind::kGet, StoreId::kDisk, {0}, {8}));
  EXPECT_EQ(report.outcomes, std::vector{BlockOutcome::kDamaged});
  EXPECT_TRUE(rank.has(8, 8));  // no byte of it went up
  report = rank.run(plan_of(5, PlanKind::kMove, StoreId::kHost, {0, 1}, {1, 2}));
  EXPECT_EQ(report.outcomes, (std::vector{BlockOutcome::kDamaged, BlockOutcome::kTransferred}));
}

TEST_P(OffloadWorkerTest, S5APositionThatIsUsedAgainLiesInAnotherFile) {
  OffloadRank rank = make_rank();
  rank.worker().open_space(1, {});
  const auto exists = [&](uint32_t number) {
    return std::ifstream(temporary_ / ("store/r0/" + segment_name(number))).good();
  };
  rank.fill(0, 1);
  expect_good(rank.run(plan_of(1, PlanKind::kPut, StoreId::kDisk, {0}, {4})), 1);
  rank.fill(0, 2);
  TransferPlan again = plan_of(2, PlanKind::kPut, StoreId::kDisk, {0}, {4});
  again.dropped = {{StoreId::kDisk, 1}};
  expect_good(rank.run(again), 2);
  EXPECT_FALSE(exists(0));
  EXPECT_TRUE(exists(1));
  expect_good(rank.run(plan_of(3, PlanKind::kGet, StoreId::kDisk, {4}, {1})), 3);
  EXPECT_TRUE(rank.has(1, 2));
}

TEST_P(OffloadWorkerTest, WhatARestartFindsIsAdoptedUnderOtherSlotsAndItsSegmentGoesWithThem) {
  const auto exists = [&](uint32_t number) {
    return std::ifstream(temporary_ / ("store/r0/" + segment_name(number))).good();
  };
  OffloadRank rank = make_rank();
  rank.worker().open_space(1, {});
  for (int32_t block = 0; block < 6; ++block) rank.fill(block, static_cast<uint32_t>(block + 1));
  expect_good(rank.run(plan_of(1, PlanKind::kPut, StoreId::kDisk, {0, 1, 2, 3}, {0, 1, 2, 3})), 1);
  expect_good(rank.run(plan_of(2, PlanKind::kPut, StoreId::kDisk, {4, 5}, {4, 5})), 2);
  rank.open();
  rank.worker().open_space(1, {});
  const std::vector<RecoveredBlock> found = value_of(rank.worker().recover(1));
  ASSERT_EQ(found.size(), 6u);
  EXPECT_EQ(found[0].segment, 0);
  EXPECT_EQ(found[5].segment, 1);
  // Another rank does not have the blocks of the second segment: nobody adopts them, and their file goes
  // with the next put.
  rank.worker().adopt(std::vector<AdoptedBlock>{{key_number(3), 8}, {key_number(1), 9}, {key_number(99), 10}});
  expect_good(rank.run(plan_of(3, PlanKind::kGet, StoreId::kDisk, {8, 9}, {10, 11})), 3);
  EXPECT_TRUE(rank.has(10, 4) && rank.has(11, 2));
  rank.fill(0, 50);
  TransferPlan next = plan_of(4, PlanKind::kPut, StoreId::kDisk, {0}, {8});
  next.dropped = {{StoreId::kDisk, 2}};
  expect_good(rank.run(next), 4);
  EXPECT_FALSE(exists(1));
  EXPECT_FALSE(exists(0));
  expect_good(rank.run(plan_of(5, PlanKind::kGet, StoreId::kDisk, {8}, {12})), 5);
  EXPECT_TRUE(rank.has(12, 50));
}

TEST_P(OffloadWorkerTest, ALoadIsOverWhenAllItsJobsAreAndNamesItsBadBlocks) {
  OffloadRank rank = make_rank();
  rank.worker().open_space(1, {});
  rank.fill(0, 1);
  rank.fill(1, 2);
  expect_good(rank.run(plan_of(1, PlanKind::kPut, StoreId::kHost, {0}, {0})), 1);
  expect_good(rank.run(plan_of(2, PlanKind::kPut, StoreId::kDisk, {1}, {0})), 2);
  TransferPlan plan{.number = 3};
  plan.add(10, PlanKind::kGet, StoreId::kHost, TransferPriority::kLoad).count = 2;
  plan.from = {0, 7};  // nothing is in slot 7
  plan.to = {4, 5};
  plan.add(11, PlanKind::kGet, StoreId::kDisk, TransferPriority::kLoad).count = 1;
  plan.from.push_back(0);
  plan.to.push_back(6);
  plan.loading = {{"both", 10}, {"both", 11}, {"disk", 11}};
  const TransferReport report = rank.run(plan);
  EXPECT_EQ(report.jobs.size(), 2u);
  std::vector<LoadedRequest> loaded = rank.worker().take_loaded();
  ASSERT_EQ(loaded.size(), 2u);
  std::sort(loaded.begin(), loaded.end(), [](const auto& a, const auto& b) { return a.request < b.request; });
  EXPECT_EQ(loaded[0].request, "both");
  EXPECT_EQ(loaded[0].bad_blocks, Numbers{5});
  EXPECT_EQ(loaded[1].request, "disk");
  EXPECT_TRUE(loaded[1].bad_blocks.empty());
  EXPECT_TRUE(rank.has(4, 1) && rank.has(6, 2));
}

TEST_P(OffloadWorkerTest, ADiskThatFailsIsReportedAsTakingNothing) {
  test::FaultyFileSystem files;
  OffloadRank rank = make_rank({.files = &files});
  rank.worker().open_space(1, {});
  files.plan.set(test::Fault::kError, 1, ENOSPC, true);
  const TransferReport report = rank.run(plan_of(1, PlanKind::kPut, StoreId::kDisk, {0}, {0}));
  EXPECT_EQ(report.outcomes, std::vector{BlockOutcome::kFailed});
  files.plan.set(test::Fault::kError, 0, 0, false);
  const auto disk = std::find_if(report.stores.begin(), report.stores.end(),
                                 [](const StoreReport& store) { return store.store == StoreId::kDisk; });
  ASSERT_NE(disk, report.stores.end());
  EXPECT_FALSE(disk->accepting);
  EXPECT_EQ(disk->write_errors, 1u);
  rank.clock().advance(std::chrono::seconds(11));  // said again when it is tried again
  const TransferReport later = rank.worker().poll();
  ASSERT_EQ(later.stores.size(), 1u);
  EXPECT_TRUE(later.stores[0].accepting);
}

TEST_P(OffloadWorkerTest, StoresOfOtherSizesAreRefused) {
  OffloadRank rank = make_rank();
  const KvLayout layout{.num_blocks = 1, .tensors = {{.address = 4096, .layers = 1, .block_bytes = 64}}};
  EXPECT_FAILS(OffloadWorker::create({.host_slots = 1}, layout, rank.transfers(), nullptr, nullptr),
               Code::kInvalidArgument, "rank 0");
}

TEST(OffloadWorkerOnManyThreads, PlansOfTwoRanksRunSideBySide) {
  const test::TemporaryDirectory temporary;
  std::vector<std::unique_ptr<OffloadRank>> ranks;
  for (int32_t rank = 0; rank < 2; ++rank) {
    ranks.push_back(std::make_unique<OffloadRank>(OffloadRankOptions{.rank = rank,
                                                                     .blocks = 64,
                                                                     .host_slots = 64,
                                                                     .disk_segments = 4,
                                                                     .segment_slots = 16,
                                                                     .directory = temporary / "store"}));
    ranks.back()->worker().open_space(1, {});
  }
  uint64_t number = 0;
  for (int32_t round = 0; round < 6; ++round) {
    Numbers blocks;
    Numbers slots;
    for (int32_t i = 0; i < 16; ++i) blocks.push_back(i), slots.push_back((round % 4) * 16 + i);
    const auto all = [&](TransferPlan plan) {
      plan.number = ++number;
      plan.jobs[0].id = number;
      for (const auto& rank : ranks) ASSERT_SUCCEEDS(rank->worker().run(plan));
    };
    for (const auto& rank : ranks) {
      for (const int32_t block : blocks) rank->fill(block, static_cast<uint32_t>(round * 16 + block));
    }
    TransferPlan put = plan_of(1, PlanKind::kPut, StoreId::kHost, blocks, slots);
    if (round >= 4) put.dropped = {{StoreId::kDisk, round % 4}};
    all(put);
    for (const auto& rank : ranks) rank->worker().wait(), (void)rank->worker().poll();
    all(plan_of(1, PlanKind::kMove, StoreId::kHost, slots, slots));
    Numbers up;
    for (const int32_t block : blocks) up.push_back(block + 32);
    all(plan_of(1, PlanKind::kGet, StoreId::kHost, slots, up));
    for (const auto& rank : ranks) rank->worker().wait(), (void)rank->worker().poll();
    for (const int32_t block : up) block < 40 ? ranks[0]->fill(block, 0) : ranks[1]->fill(block, 0);
    all(plan_of(1, PlanKind::kGet, StoreId::kDisk, slots, up));
    for (const auto& rank : ranks) {
      rank->worker().wait();
      const TransferReport report = rank->worker().poll();
      ASSERT_EQ(report.jobs.size(), 1u);
      ASSERT_EQ(report.jobs[0].count, 0u) << report.jobs[0].cause;
      for (const int32_t block : blocks) ASSERT_TRUE(rank->has(block + 32, static_cast<uint32_t>(round * 16 + block)));
    }
  }
}

}  // namespace
}  // namespace torpor
