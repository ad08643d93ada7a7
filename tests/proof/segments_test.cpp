// SPDX-License-Identifier: Apache-2.0
// Segments of blocks through kills and power cuts: what was acknowledged is there, and nothing is believed that was not
// written. And planted mistakes in the order of writes, syncs and links are all found.

#include <fmt/core.h>

#include "tests/proof/killed_child.h"
#include "tests/proof/segment_workloads.h"
#include "tests/proof/workloads.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/model_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::proof {
namespace {

using test::Fault;
using test::ModelChange;
using test::ModelFileSystem;
using Kind = ModelChange::Kind;

constexpr const char* kStore = "/disk/store";

struct Recorded {
  std::vector<ModelChange> changes;
  std::vector<LeasedRecord> leases;
};

Recorded recorded(const SegmentWorkload& workload, const SegmentVariant& variant,
                  std::function<bool(const ModelChange&)> ignored = {}) {
  ModelFileSystem system;
  system.ignored = std::move(ignored);
  Recorded all;
  const SegmentWorld world{
      system, kStore,
      [&](SegmentWord word, int number) { system.note(std::string(1, static_cast<char>(word)), number); },
      [&](const LeasedRecord& leased) { all.leases.push_back(leased); }};
  EXPECT_SUCCEEDS(workload.run(world, variant)) << workload.name;
  all.changes = std::move(system.record);
  return all;
}

// The first byte that is written twice, S5.
std::string written_twice(const std::vector<ModelChange>& changes) {
  std::map<int, std::set<uint64_t>> written;
  for (const ModelChange& change : changes) {
    if (change.kind != Kind::kWrite) continue;
    for (uint64_t at = change.offset; at < change.offset + change.bytes.size(); at += kPage) {
      if (!written[change.node].insert(at / kPage).second) return fmt::format("byte {} is written twice", at);
    }
  }
  return "";
}

std::string cut_everywhere(const Recorded& recorded, const SegmentVariant& variant, int tries, uint64_t seed,
                           uint64_t& states) {
  const std::vector<ModelChange>& record = recorded.changes;
  test::PowerCuts cuts(record, test::ModelDisk(1, {.is_directory = true}));
  SegmentPromise promise;
  std::mt19937_64 random(seed);
  for (;;) {
    for (int choice = 0; choice < tries; ++choice) {
      ModelFileSystem system(cuts.state(choice, random));
      ++states;
      std::string problem = broken_segment_promise(system, kStore, variant, promise, promise.safe, recorded.leases);
      if (problem.empty()) problem = written_twice(system.record);
      if (!problem.empty()) return fmt::format("after change {}, choice {}: {}", cuts.position(), choice, problem);
    }
    if (cuts.done()) return "";
    const ModelChange& next = record[cuts.position()];
    if (next.kind == Kind::kNote) promise.hear(static_cast<SegmentWord>(next.name[0]), next.target);
    cuts.step();
  }
}

TEST(SegmentPowerLoss, WhateverTheDiskHoldsDurableIsThereAndNothingFalseIsBelieved) {
  uint64_t states = 0;
  const uint64_t wanted = long_run() ? 500'000 : 10'000;
  for (uint64_t round = 0; states < wanted; ++round) {
    for (const SegmentWorkload& workload : segment_workloads()) {
      for (const SegmentVariant& variant : segment_variants()) {
        const Recorded record = recorded(workload, variant);
        if (std::string_view(workload.name) != "lease by copy") {  // that writes the header again, with the same bytes
          ASSERT_EQ(written_twice(record.changes), "") << workload.name;
        }
        ASSERT_EQ(cut_everywhere(record, variant, 8, round, states), "") << workload.name << ", " << variant.name;
      }
    }
  }
  std::printf("proof: segments: %lu states after a power cut, 0 broken promises\n", static_cast<unsigned long>(states));
  EXPECT_GE(states, wanted);
}

// ---- planted mistakes

bool found_somewhere(const std::function<Recorded(const SegmentWorkload&, const SegmentVariant&)>& make) {
  uint64_t states = 0;
  for (uint64_t seed = 0; seed < 3; ++seed) {
    for (const SegmentWorkload& workload : segment_workloads()) {
      const SegmentVariant& variant = segment_variants()[0];
      if (!cut_everywhere(make(workload, variant), variant, 8, seed, states).empty()) return true;
    }
  }
  return false;
}

std::function<bool(const ModelChange&)> is(Kind kind, std::string part) {
  return [kind, part = std::move(part)](const ModelChange& change) {
    return change.kind == kind && change.name.find(part) != std::string::npos;
  };
}

std::function<bool(const ModelChange&)> nth(int number, std::function<bool(const ModelChange&)> which) {
  return [number, seen = 0, which = std::move(which)](const ModelChange& change) mutable {
    return which(change) && ++seen == number;
  };
}

TEST(SegmentPowerLoss, EveryPlantedMistakeIsFound) {
  int planted = 0;
  const auto left_out = [&](const char* name, const std::function<bool(const ModelChange&)>& ignored) {
    EXPECT_TRUE(found_somewhere([&](const SegmentWorkload& workload, const SegmentVariant& variant) {
      return recorded(workload, variant, ignored);
    })) << name
        << " was not found";
    ++planted;
  };
  left_out("no file is synced", is(Kind::kSyncFile, ""));
  left_out("no directory is synced", is(Kind::kSyncDirectory, ""));
  left_out("segments are not synced", is(Kind::kSyncFile, "/r0/seg-"));
  left_out("the first segment is not synced", is(Kind::kSyncFile, "seg-000000"));
  left_out("the second segment is not synced", is(Kind::kSyncFile, "seg-000001"));
  left_out("the first sync of the first segment is left out", nth(1, is(Kind::kSyncFile, "seg-000000")));
  left_out("names of segments are not synced", is(Kind::kSyncDirectory, "/r0"));
  left_out("names of later segments are not synced", [seen = 0](const ModelChange& change) mutable {
    return change.kind == Kind::kSyncDirectory && change.name.ends_with("/r0") && ++seen > 1;
  });
  left_out("the new directory of the store is not made durable", is(Kind::kSyncDirectory, "/disk"));
  left_out("names of leases are not synced", is(Kind::kSyncDirectory, "-kept"));
  left_out("copies of leases are not synced", is(Kind::kSyncFile, "-kept/seg-"));
  left_out("batch pages are not written",
           [](const ModelChange& change) { return change.kind == Kind::kWrite && change.offset == kPage; });
  left_out("headers are not written",
           [](const ModelChange& change) { return change.kind == Kind::kWrite && change.offset == 0; });

  // Each change that is `early` goes before the nearest earlier change that is `before`.
  const auto hasty = [&](const char* name, const std::function<bool(const ModelChange&)>& early,
                         const std::function<bool(const ModelChange&)>& before) {
    EXPECT_TRUE(found_somewhere([&](const SegmentWorkload& workload, const SegmentVariant& variant) {
      Recorded all = recorded(workload, variant);
      for (size_t i = 0; i < all.changes.size(); ++i) {
        if (!early(all.changes[i])) continue;
        for (size_t j = i; j-- > 0;) {
          if (!before(all.changes[j])) continue;
          const auto begin = all.changes.begin();
          std::rotate(begin + static_cast<std::ptrdiff_t>(j), begin + static_cast<std::ptrdiff_t>(i),
                      begin + static_cast<std::ptrdiff_t>(i) + 1);
          break;
        }
      }
      return all;
    })) << name
        << " was not found";
    ++planted;
  };
  const auto safe = is(Kind::kNote, "s");
  const auto lease = is(Kind::kNote, "l");
  const auto writes = [](const ModelChange& change) { return change.kind == Kind::kWrite; };
  hasty("records count as durable before their segment is synced", safe, is(Kind::kSyncFile, "/r0/seg-"));
  hasty("records count as durable before the name of their segment is", safe, is(Kind::kSyncDirectory, "/r0"));
  hasty("records count as durable before they are written", safe, writes);
  hasty("segments are synced before their last batch is written", is(Kind::kSyncFile, "/r0/seg-"), writes);
  hasty("names are synced before the segment is made", is(Kind::kSyncDirectory, "/r0"), is(Kind::kLink, "seg-"));
  hasty("a lease counts before its name is durable", lease, is(Kind::kSyncDirectory, "-kept"));
  hasty("a lease counts before it is linked", lease, is(Kind::kLink, "seg-r0"));
  hasty("a segment goes before what is kept of it is linked", is(Kind::kUnlink, "seg-"),
        is(Kind::kSyncDirectory, "-kept"));
  std::printf("proof: segments: %d mistakes planted in the protocol, each found\n", planted);
  EXPECT_GE(planted, 20);
}

// ---- kills

// A killed process loses nothing that it wrote: all that was put is found.
TEST(SegmentCrash, WhatWasPutIsThereAndNothingFalseIsBelieved) {
  const char* const memory = test::in_memory();
  int points = 0;
  for (const SegmentWorkload& workload : segment_workloads()) {
    for (const SegmentVariant& variant : segment_variants()) {
      std::vector<LeasedRecord> leases;
      test::FaultyFileSystem whole;
      std::set<uint64_t> writes;
      whole.plan.writes = &writes;
      {
        const test::TemporaryDirectory temporary(memory);
        EXPECT_SUCCEEDS(workload.run({whole, temporary / "store", [](SegmentWord, int) {},
                                      [&](const LeasedRecord& leased) { leases.push_back(leased); }},
                                     variant));
      }
      for (const Fault fault : {Fault::kKillBefore, Fault::kKillAfter, Fault::kKillTorn}) {
        for (uint64_t n = 1; n <= whole.plan.calls; ++n) {
          if (fault == Fault::kKillTorn && !writes.contains(n)) continue;
          const test::TemporaryDirectory temporary(memory);
          const std::string directory = temporary / "store";
          SegmentPromise promise;
          const Ending ending = run_killed(
              fault, n,
              [&](FileSystem& file_system, const Say& say) {
                return workload.run(
                    {file_system, directory,
                     [&](SegmentWord word, int number) { say(static_cast<char>(word), static_cast<char>(number)); }},
                    variant);
              },
              [&](char word, char number) { promise.hear(static_cast<SegmentWord>(word), number); });
          ASSERT_FALSE(ending.failed) << workload.name << ", " << variant.name << ", call " << n;
          const std::string problem =
              broken_segment_promise(linux_file_system(), directory, variant, promise, promise.put, leases);
          ASSERT_EQ(problem, "") << workload.name << ", " << variant.name << ", killed at call " << n << ", mode "
                                 << static_cast<int>(fault);
          if (ending.killed) ++points;
        }
      }
    }
  }
  std::printf("proof: segments: killed at %d points, 0 broken promises\n", points);
  EXPECT_GE(points, 1700);
}

}  // namespace
}  // namespace torpor::proof
