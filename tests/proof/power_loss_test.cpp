// SPDX-License-Identifier: Apache-2.0
// The power goes after any change that a workload made; what the disk may then hold, by all that POSIX allows, is
// tried. And planted mistakes in the order of syncs and renames are all found, so that the trials can be believed.
#include <fmt/core.h>

#include "tests/proof/workloads.h"
#include "tests/support/model_file_system.h"
#include "tests/support/results.h"

namespace torpor::proof {
namespace {

using test::ModelChange;
using test::ModelFileSystem;
using Kind = ModelChange::Kind;

constexpr const char* kStore = "/disk/store";

// The workload's record, with its words as notes in it.
std::vector<ModelChange> recorded(const Workload& workload, const Variant& variant,
                                  std::function<bool(const ModelChange&)> ignored = {}) {
  ModelFileSystem system;
  system.ignored = std::move(ignored);
  const World world{system, kStore, [&](Word word, uint64_t generation) {
                      system.note(std::string(1, static_cast<char>(word)), static_cast<int>(generation));
                    }};
  EXPECT_SUCCEEDS(workload.run(world, variant));
  return std::move(system.record);
}

// Tries `tries` states after every change; returns the first problem, and how many states were tried.
std::string cut_everywhere(const std::vector<ModelChange>& record, const Variant& variant, int tries, uint64_t seed,
                           uint64_t& states) {
  test::PowerCuts cuts(record, test::ModelDisk(1, {.is_directory = true}));
  Promise promise;
  std::mt19937_64 random(seed);
  for (;;) {
    for (int choice = 0; choice < tries; ++choice) {
      ModelFileSystem system(cuts.state(choice, random));
      ++states;
      if (std::string problem = broken_promise(system, kStore, variant, promise); !problem.empty())
        return fmt::format("after change {}, choice {}: {}", cuts.position(), choice, problem);
    }
    if (cuts.done()) return "";
    const ModelChange& next = record[cuts.position()];
    if (next.kind == Kind::kNote) promise.hear(static_cast<Word>(next.name[0]), static_cast<uint64_t>(next.target));
    cuts.step();
  }
}

TEST(PowerLoss, WhateverTheDiskHoldsAcknowledgedIsThereAndPartialIsInvisible) {
  uint64_t states = 0;
  const uint64_t wanted = long_run() ? 1'000'000 : 20'000;
  for (uint64_t round = 0; states < wanted; ++round) {
    for (const Workload& workload : workloads()) {
      for (const Variant& variant : variants()) {
        const std::vector<ModelChange> record = recorded(workload, variant);
        const std::string problem = cut_everywhere(record, variant, 8, round, states);
        ASSERT_EQ(problem, "") << workload.name << ", " << variant.name;
      }
    }
  }
  std::printf("proof: %lu states after a power cut, 0 broken promises\n", static_cast<unsigned long>(states));
  EXPECT_GE(states, wanted);
}

// ---- planted mistakes

struct Mistake {
  const char* name;
  std::function<bool(const ModelChange&)> ignored;  // the change that is left out
};

bool is_sync_of(const ModelChange& change, Kind kind, std::string_view end) {
  return change.kind == kind && change.name.ends_with(end);
}

// Left out at its n-th occurrence only.
std::function<bool(const ModelChange&)> nth(int number, std::function<bool(const ModelChange&)> which) {
  return [number, seen = 0, which = std::move(which)](const ModelChange& change) mutable {
    return which(change) && ++seen == number;
  };
}

std::vector<Mistake> mistakes() {
  std::vector<Mistake> all;
  const auto file_sync = [](std::string_view name) {
    return [name](const ModelChange& c) { return is_sync_of(c, Kind::kSyncFile, name); };
  };
  const auto directory_sync = [](std::string_view name) {
    return [name](const ModelChange& c) { return is_sync_of(c, Kind::kSyncDirectory, name); };
  };
  all.push_back({"no file is synced", [](const ModelChange& c) { return c.kind == Kind::kSyncFile; }});
  all.push_back({"no directory is synced", [](const ModelChange& c) { return c.kind == Kind::kSyncDirectory; }});
  all.push_back({"STATE is not synced", file_sync("STATE")});
  all.push_back({"MANIFEST is not synced", file_sync("MANIFEST")});
  all.push_back({"chunk files are not synced", file_sync("chunks-r0")});
  all.push_back({"the second rank's chunk file is not synced", file_sync("chunks-r1")});
  all.push_back({"refs are not synced", file_sync("refs-r0")});
  all.push_back({"the second rank's refs are not synced", file_sync("refs-r1")});
  all.push_back({"the directory under construction is not synced", [](const ModelChange& c) {
                   return c.kind == Kind::kSyncDirectory && c.name.find("/s-") != std::string::npos;
                 }});
  all.push_back({"the directory of checkpoints is not synced", directory_sync("/store")});
  all.push_back({"the new directory of checkpoints is not made durable", directory_sync("/disk")});
  for (int n = 1; n <= 4; ++n) {
    static constexpr const char* kStates[] = {"STATE of the 1st is not synced", "STATE of the 2nd is not synced",
                                              "STATE of the 3rd is not synced", "STATE of the 4th is not synced"};
    static constexpr const char* kManifests[] = {
        "MANIFEST of the 1st is not synced", "MANIFEST of the 2nd is not synced", "MANIFEST of the 3rd is not synced",
        "MANIFEST of the 4th is not synced"};
    static constexpr const char* kChunks[] = {"chunks of the 1st are not synced", "chunks of the 2nd are not synced",
                                              "chunks of the 3rd are not synced", "chunks of the 4th are not synced"};
    static constexpr const char* kRefs[] = {"refs of the 1st are not synced", "refs of the 2nd are not synced",
                                            "refs of the 3rd are not synced"};
    static constexpr const char* kStore1[] = {
        "the 1st sync of the directory is left out", "the 2nd sync of the directory is left out",
        "the 3rd sync of the directory is left out", "the 4th sync of the directory is left out"};
    if (n <= 3) {
      all.push_back({kStates[n - 1], nth(n, file_sync("STATE"))});
      all.push_back({kManifests[n - 1], nth(n, file_sync("MANIFEST"))});
      all.push_back({kChunks[n - 1], nth(n, file_sync("chunks-r0"))});
      all.push_back({kRefs[n - 1], nth(n, file_sync("refs-r0"))});
    }
    all.push_back({kStore1[n - 1], nth(n, directory_sync("/store"))});
  }
  return all;
}

// The same record with things in another order: what a hasty writer would do.
std::vector<ModelChange> reordered(std::vector<ModelChange> record,
                                   const std::function<bool(const ModelChange&)>& early,
                                   const std::function<bool(const ModelChange&)>& before) {
  // Each change that is `early` goes before the nearest earlier change that is `before`.
  for (size_t i = 0; i < record.size(); ++i) {
    if (!early(record[i])) continue;
    for (size_t j = i; j-- > 0;) {
      if (!before(record[j])) continue;
      std::rotate(record.begin() + static_cast<std::ptrdiff_t>(j), record.begin() + static_cast<std::ptrdiff_t>(i),
                  record.begin() + static_cast<std::ptrdiff_t>(i) + 1);
      break;
    }
  }
  return record;
}

bool found_somewhere(const std::function<std::vector<ModelChange>(const Workload&, const Variant&)>& make) {
  uint64_t states = 0;
  for (uint64_t seed = 0; seed < 3; ++seed) {
    for (const Workload& workload : workloads()) {
      for (const Variant& variant : {variants()[0], variants()[4]}) {
        if (!cut_everywhere(make(workload, variant), variant, 8, seed, states).empty()) return true;
      }
    }
  }
  return false;
}

TEST(PowerLoss, EveryPlantedMistakeIsFound) {
  int planted = 0;
  for (const Mistake& mistake : mistakes()) {
    EXPECT_TRUE(found_somewhere([&](const Workload& workload, const Variant& variant) {
      return recorded(workload, variant, mistake.ignored);
    })) << mistake.name
        << " was not found";
    ++planted;
  }
  const auto is_rename = [](const ModelChange& c) { return c.kind == Kind::kRename; };
  const auto is_commit = [](const ModelChange& c) { return c.kind == Kind::kRename && c.to.starts_with("g-"); };
  const auto is_removal = [](const ModelChange& c) { return c.kind == Kind::kRename && c.to.starts_with("t-"); };
  const auto is_ack = [](const ModelChange& c) { return c.kind == Kind::kNote && c.name == "m"; };
  const auto is_unlink = [](const ModelChange& c) { return c.kind == Kind::kUnlink; };
  const auto syncs = [](Kind kind, std::string part) {
    return [kind, part = std::move(part)](const ModelChange& c) {
      return c.kind == kind && c.name.find(part) != std::string::npos;
    };
  };
  const auto writes = [](const ModelChange& c) { return c.kind == Kind::kWrite; };
  const auto is_link = [](const ModelChange& c) { return c.kind == Kind::kLink && c.name.starts_with("chunks-r0-"); };
  struct Order {
    const char* name;
    std::function<bool(const ModelChange&)> early;
    std::function<bool(const ModelChange&)> before;
  };
  const Order orders[] = {
      {"renamed before the directory under construction is synced", is_commit, syncs(Kind::kSyncDirectory, "/s-")},
      {"renamed before MANIFEST is synced", is_commit, syncs(Kind::kSyncFile, "MANIFEST")},
      {"renamed before MANIFEST is written", is_commit, writes},
      {"renamed before the chunks are synced", is_commit, syncs(Kind::kSyncFile, "chunks")},
      {"renamed before the refs are synced", is_commit, syncs(Kind::kSyncFile, "refs")},
      {"renamed before the files of the one before are linked", is_commit, is_link},
      {"the directory under construction synced before files are linked into it", syncs(Kind::kSyncDirectory, "/s-"),
       is_link},
      {"refs synced before they are written", syncs(Kind::kSyncFile, "refs"), writes},
      {"renamed before STATE is synced", is_commit, syncs(Kind::kSyncFile, "STATE")},
      {"acknowledged before the directory of checkpoints is synced", is_ack, syncs(Kind::kSyncDirectory, "/store")},
      {"acknowledged before the rename", is_ack, is_rename},
      {"files removed before the sync of their directory's new name", is_unlink, syncs(Kind::kSyncDirectory, "/store")},
      {"files removed before their directory's new name", is_unlink, is_removal},
      {"MANIFEST synced before it is written", syncs(Kind::kSyncFile, "MANIFEST"), writes},
      {"STATE synced before it is written", syncs(Kind::kSyncFile, "STATE"), writes},
      {"chunks synced before they are written", syncs(Kind::kSyncFile, "chunks"), writes},
  };
  for (const Order& order : orders) {
    EXPECT_TRUE(found_somewhere([&](const Workload& workload, const Variant& variant) {
      return reordered(recorded(workload, variant), order.early, order.before);
    })) << order.name
        << " was not found";
    ++planted;
  }
  std::printf("proof: %d mistakes planted in the protocol, each found\n", planted);
  EXPECT_GE(planted, 40);
}

}  // namespace
}  // namespace torpor::proof
