// SPDX-License-Identifier: Apache-2.0
#include "kvcache/transfer_plan.h"

#include <random>

#include "tests/kvcache/offload_rank.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::key_number;
using test::value_of;

TransferPlan example_plan() {
  TransferPlan plan{.number = 7, .dropped = {{StoreId::kHost, 3}, {StoreId::kDisk, 1}}};
  plan.add(10, PlanKind::kPut, StoreId::kHost, TransferPriority::kOffload).count = 2;
  plan.from = {4, 5};
  plan.to = {0, 1};
  PlannedJob& move = plan.add(11, PlanKind::kMove, StoreId::kHost, TransferPriority::kOffload);
  move.other = StoreId::kDisk;
  move.count = 1;
  plan.from.push_back(1);
  plan.to.push_back(6);
  plan.keys.push_back(key_number(1));
  plan.add(12, PlanKind::kGet, StoreId::kDisk, TransferPriority::kLoad).count = 1;
  plan.from.push_back(6);
  plan.to.push_back(9);
  plan.loading = {{"request-1", 12}};
  return plan;
}

TransferReport example_report() {
  return {.rank = 1,
          .jobs = {{.id = 10}, {.id = 11, .count = 2, .code = Code::kIo, .cause = "rank 1: the disk is full"}},
          .outcomes = {BlockOutcome::kTransferred, BlockOutcome::kFailed},
          .stores = {{StoreId::kDisk, false, 1, 2, 3, 4}}};
}

TEST(TransferPlan, APlanAndAReportAreTheSameOnTheOtherSide) {
  EXPECT_EQ(value_of(TransferPlan::decode(example_plan().encode())), example_plan());
  EXPECT_EQ(value_of(TransferReport::decode(example_report().encode())), example_report());
  TransferPlan plan = example_plan();
  plan.clear();
  EXPECT_TRUE(plan.empty());
  EXPECT_EQ(plan, TransferPlan());
}

TEST(TransferPlan, ALongCauseIsCutAndTheReportStaysWhole) {
  TransferReport report = example_report();
  report.jobs[1].cause.assign(10'000, 'x');
  EXPECT_EQ(value_of(TransferReport::decode(report.encode())).jobs[1].cause.size(), kMostCauseBytes);
}

TEST(TransferPlan, WhatNoSchedulerWritesIsRefused) {
  const auto refused = [](auto change) {
    TransferPlan plan = example_plan();
    change(plan);
    return test::failed_with(TransferPlan::decode(plan.encode()), Code::kCorruption);
  };
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.jobs[0].id = 0; }));
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.jobs[0].count = 0; }));
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.jobs[0].count = 3; }));
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.jobs[0].kind = static_cast<PlanKind>(3); }));
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.jobs[0].kind = static_cast<PlanKind>(5); }));
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.jobs[0].store = static_cast<StoreId>(3); }));
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.jobs[0].other = StoreId::kDisk; }));
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.jobs[1].other = StoreId::kHost; }));
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.jobs[0].priority = static_cast<TransferPriority>(9); }));
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.from[0] = -1; }));
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.to[2] = -1; }));
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.keys.clear(); }));
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.keys.push_back({}); }));
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.keys[0].group = 256; }));
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.keys[0].space = 1u << 24; }));
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.dropped[0].store = StoreId::kRemote; }));
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.dropped[0].number = -1; }));
  EXPECT_TRUE(refused([](TransferPlan& plan) { plan.loading[0].job = 10; }));
  const auto bad_report = [](auto change) {
    TransferReport report = example_report();
    change(report);
    return test::failed_with(TransferReport::decode(report.encode()), Code::kCorruption);
  };
  EXPECT_TRUE(bad_report([](TransferReport& report) { report.rank = -1; }));
  EXPECT_TRUE(bad_report([](TransferReport& report) { report.jobs[0].id = 0; }));
  EXPECT_TRUE(bad_report([](TransferReport& report) { report.jobs[1].count = 3; }));
  EXPECT_TRUE(bad_report([](TransferReport& report) { report.jobs[1].count = 1; }));
  EXPECT_TRUE(bad_report([](TransferReport& report) { report.jobs[0].code = static_cast<Code>(99); }));
  EXPECT_TRUE(bad_report([](TransferReport& report) { report.outcomes[0] = static_cast<BlockOutcome>(99); }));
  EXPECT_TRUE(bad_report([](TransferReport& report) { report.stores[0].store = static_cast<StoreId>(7); }));
}

// Every prefix, everything with one byte more, and every byte changed: refused, or the same bytes again.
TEST(TransferPlan, HostileBytesAreRefusedOrMeanThemselves) {
  const auto decodes = [](const Bytes& bytes) {
    if (const auto plan = TransferPlan::decode(bytes)) {
      EXPECT_EQ(plan->encode(), bytes);
    }
    if (const auto report = TransferReport::decode(bytes)) {
      EXPECT_EQ(report->encode(), bytes);
    }
    return TransferPlan::decode(bytes).has_value() || TransferReport::decode(bytes).has_value();
  };
  for (const Bytes& good : {example_plan().encode(), example_report().encode()}) {
    EXPECT_TRUE(decodes(good));
    for (size_t size = 0; size < good.size(); ++size)
      EXPECT_FALSE(decodes(Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size))));
    Bytes longer = good;
    longer.push_back(0);
    EXPECT_FALSE(decodes(longer));
    for (size_t at = 0; at < good.size(); ++at) {
      for (int bit = 0; bit < 8; ++bit) {
        Bytes changed = good;
        changed[at] = static_cast<uint8_t>(changed[at] ^ (1 << bit));
        decodes(changed);
      }
    }
  }
}

}  // namespace
}  // namespace torpor
