// SPDX-License-Identifier: Apache-2.0
// What has no room in host memory goes to disk in the same sleep.
#include <fstream>
#include <iterator>

#include <boost/filesystem.hpp>

#include "allocator/host_device.h"
#include "base/units.h"
#include "base/watched_file_system.h"
#include "engine/tag_sleep.h"
#include "tests/engine/sleep_failure.h"
#include "tests/support/rank_call.h"

namespace torpor {
namespace {

using namespace test;

class Spill : public SleepFailure {
 protected:
  static constexpr uint64_t kBlock = kBlockBytes * kKvLayers;
  TestEngineOptions options(uint64_t budget = 0, int ranks = 1) const {
    return {.ranks = ranks,
            .arena_budget_bytes = budget,
            .retain_kv_bytes = kMiB,
            .spill_dir = spill_dir(),
            .mix_steps = true};
  }
  std::string spill_dir() const { return temporary_.path() + "/spill"; }
  size_t files_left() const {
    if (!boost::filesystem::exists(spill_dir())) return 0;
    return static_cast<size_t>(
        std::distance(boost::filesystem::directory_iterator(spill_dir()), boost::filesystem::directory_iterator()));
  }
  static std::vector<HostArena::Span> all_that_is_free(HostArena& arena) {
    std::vector<HostArena::Span> taken;
    while (auto span = arena.allocate(kPage)) taken.push_back(std::move(*span));
    return taken;
  }
  static constexpr uint64_t kTight = 256 * kKiB;  // weights and runtime, some blocks, and two to bring the others back
};

TEST_F(Spill, WhatFitsStaysInHostMemoryAndTheRestGoesToDiskAndComesBack) {
  SleepingEngine whole = make(options());
  begin(whole.engine);
  const SleepReport unbounded = value_of(whole.controller.sleep(to_host()));
  EXPECT_EQ(unbounded.disk_bytes, 0u);
  EXPECT_EQ(unbounded.host_bytes, unbounded.saved_bytes);
  const uint64_t all = unbounded.saved_bytes;
  const TestEngine::Tokens expected = uninterrupted(options());
  bool both = false;
  for (uint64_t budget = 320 * kKiB; budget >= 208 * kKiB; budget -= 4 * kKiB) {
    SCOPED_TRACE(budget);
    SleepingEngine slept = make(options(budget));
    begin(slept.engine);
    const SleepPlan plan = value_of(slept.controller.plan_sleep(to_host()));
    const SleepReport report = value_of(slept.controller.sleep(to_host()));
    EXPECT_EQ(report.saved_bytes, all);
    EXPECT_EQ(report.host_bytes + report.disk_bytes, all);
    EXPECT_EQ(plan.host_bytes + plan.disk_bytes, all);
    EXPECT_LE(plan.disk_bytes, report.disk_bytes);  // it counts bytes: pieces can be too small for them
    both |= report.host_bytes > 0 && report.disk_bytes > 0 && plan.disk_bytes == report.disk_bytes;
    uint64_t host = 0;
    uint64_t disk = 0;
    for (const auto& [tag, entry] : report.ledgers[0].tags)
      host += entry.backup_host_bytes, disk += entry.backup_disk_bytes;
    EXPECT_EQ(host, report.host_bytes);
    EXPECT_EQ(disk, report.disk_bytes);
    EXPECT_LE(report.ledgers[0].arena_held_bytes, budget);
    EXPECT_EQ(files_left(), 0u) << "it has no name";
    EXPECT_EQ(value_of(slept.controller.wake_up({})).restored_bytes, all - slept.engine.freed_asleep());
    slept.engine.step();
    ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));  // with what was retained, if anything
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    EXPECT_EQ(finish(slept.engine), expected);
    EXPECT_EQ(slept.engine.recomputed(), 0);
  }
  EXPECT_TRUE(both);
}

TEST_F(Spill, OnlyFilesThatTorporLeftAreRemoved) {
  const std::string id(2 * sizeof(SealId), 'a');
  const std::vector<std::string> foreign = {"spill-notes.txt", "spill-r0",        "spill-r0-" + id + "a",
                                            "spill-r-" + id,   "spill-r0x-" + id, "spill-" + id};
  value_of(linux_file_system().open_directory(spill_dir(), /*create=*/true));
  for (const std::string& name : foreign) std::ofstream(spill_dir() + "/" + name) << "mine";
  boost::filesystem::create_directory(spill_dir() + "/spill-old");
  boost::filesystem::create_directory(spill_dir() + "/spill-r1-" + id);
  std::ofstream(spill_dir() + "/spill-r0-" + id) << "left";
  SleepingEngine slept = make(options(kTight));
  begin(slept.engine);
  EXPECT_GT(value_of(slept.controller.sleep(to_host())).disk_bytes, 0u);
  for (const std::string& name : foreign) EXPECT_TRUE(boost::filesystem::exists(spill_dir() + "/" + name)) << name;
  EXPECT_EQ(files_left(), foreign.size() + 2);
}

// The file ends with this process.
TEST_F(Spill, NothingIsSynced) {
  int syncs = 0;
  bool direct = false;
  const std::unique_ptr<FileSystem> watched = make_watched_file_system(
      linux_file_system(),
      [&](const char* call, const std::string&) { return syncs += call == std::string("sync"), ok(); });
  {
    const auto directory = value_of(watched->open_directory(spill_dir(), /*create=*/true));
    direct = value_of(directory->create_file("some", FileIo::kFastest))->io().ends_with("direct");
  }
  SleepingEngine slept(*watched, temporary_.path(), options(kTight));
  begin(slept.engine);
  EXPECT_GT(value_of(slept.controller.sleep(to_host())).disk_bytes, 0u);
  if (direct) {
    EXPECT_EQ(syncs, 0);
  } else {
    EXPECT_GT(syncs, 0);  // the only call that reports a write that was lost
  }
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  EXPECT_EQ(finish(slept.engine), uninterrupted(options(kTight)));
}

TEST_F(Spill, WithoutADirectoryASleepThatDoesNotFitFails) {
  TestEngineOptions without = options(kTight);
  without.spill_dir.clear();
  SleepingEngine slept = make(without);
  begin(slept.engine);
  EXPECT_FAILS(slept.controller.sleep(to_host()), Code::kResourceExhausted, "budget");
  ASSERT_EQ(finish(slept.engine), uninterrupted(without));
}

// The blocks of the first row come first, those of a cached prefix that was used long ago last.
TEST_F(Spill, TheMostNeededStayInHostMemory) {
  SleepingEngine slept = make(options());
  begin(slept.engine, 10);
  const CapturedState state = value_of(slept.engine.capture());
  const LiveBlocks live = select_live_blocks(state.kv, kBlock, {});
  const std::vector<int32_t> order = by_need(state.kv, {"c", "a"}, live.kept);
  std::vector<int32_t> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(sorted, live.kept);
  const auto table = [&](const std::string& request) {
    for (const KvTable& each : state.kv.groups[0].tables) {
      if (each.request == request) return each.blocks;
    }
    return std::vector<int32_t>();
  };
  std::vector<int32_t> first = table("c");
  const std::vector<int32_t> second = table("a");
  ASSERT_FALSE(first.empty() || second.empty());
  EXPECT_TRUE(std::equal(first.begin(), first.end(), order.begin()));
  EXPECT_TRUE(std::equal(second.begin(), second.end(), order.begin() + static_cast<std::ptrdiff_t>(first.size())));
  // "d" has ended: what it left in the cache is needed least.
  const std::vector<int32_t>& free = state.kv.free_order;
  const auto rank_of = [&](int32_t block) { return std::find(free.begin(), free.end(), block) - free.begin(); };
  for (size_t i = 1; i < order.size(); ++i) {
    const bool was_free = rank_of(order[i - 1]) < std::ssize(free);
    if (was_free) {
      EXPECT_GT(rank_of(order[i - 1]), rank_of(order[i]));
    }
  }
}

TEST_F(Spill, I7WhereverAFileOperationFailsItIsAllOrNothing) {
  const TestEngineOptions tight = options(kTight);
  const TestEngine::Tokens expected = uninterrupted(tight);
  for (const int native : {EIO, ENOSPC}) {
    int failed = 0;
    for (uint64_t n = 1;; ++n) {
      SCOPED_TRACE(testing::Message() << "call " << n << ", errno " << native);
      SleepingEngine slept = make(tight);
      begin(slept.engine);
      file_system_.plan.set(Fault::kError, n, native, /*all_after=*/native == ENOSPC);
      const Result<SleepReport> report = slept.controller.sleep(to_host());
      const bool fired = file_system_.plan.fired();
      file_system_.plan.clear();
      if (report) {
        EXPECT_GT(report->disk_bytes, 0u);
        ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      } else {
        ++failed;
        EXPECT_FALSE(report.error().state_changed);
        EXPECT_FALSE(slept.engine.frozen());
      }
      EXPECT_EQ(finish(slept.engine), expected);
      if (!fired) break;
      ASSERT_LT(n, 100u);
    }
    EXPECT_GE(failed, 5);
  }
  EXPECT_LE(files_left(),
            2u);  // of a failed removal of its name, for each of the two errors; the next spill removes it
  SleepingEngine slept = make(tight);
  begin(slept.engine);
  ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
  EXPECT_EQ(files_left(), 0u);
}

TEST_F(Spill, I7WhereverReadingItBackFailsTheEngineStaysAsleepAndARetryWorks) {
  const TestEngineOptions tight = options(kTight);
  const TestEngine::Tokens expected = uninterrupted(tight);
  for (uint64_t n = 1;; ++n) {
    SCOPED_TRACE(n);
    SleepingEngine slept = make(tight);
    begin(slept.engine);
    ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
    file_system_.plan.set(Fault::kError, n, EIO);
    const Result<SleepReport> woken = slept.controller.wake_up({});
    const bool fired = file_system_.plan.fired();
    file_system_.plan.clear();
    if (!woken) {
      EXPECT_TRUE(slept.controller.is_sleeping());
      const std::vector<HostArena::Span> others = all_that_is_free(slept.engine.memory().arena());
      ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    }
    EXPECT_EQ(finish(slept.engine), expected);
    if (!fired) break;
    ASSERT_LT(n, 100u);
  }
}

// Others take the host memory that it had counted on, at whatever moment: more goes to disk; and where no room is left
// for a chunk on its way there, it is undone, and what it wrote is gone.
TEST_F(Spill, WhereOthersTakeHostMemoryInTheMiddleMoreGoesToDiskOrAllIsUndone) {
  const TestEngineOptions tight = options(kTight);
  const TestEngine::Tokens expected = uninterrupted(tight);
  for (const bool nearly_all : {false, true}) {
    SCOPED_TRACE(nearly_all);
    SleepingEngine slept = make(tight);
    begin(slept.engine);
    const SleepPlan plan = value_of(slept.controller.plan_sleep(to_host()));
    std::optional<HostArena::Span> taken;
    slept.engine.before_hook = [&](const std::string& hook) {
      if (hook != "rank save" || taken) return;
      taken = value_of(slept.engine.memory().arena().allocate(nearly_all ? 180 * kKiB : 60 * kKiB));
    };
    if (nearly_all) {
      EXPECT_FAILS(slept.controller.sleep(to_host()), Code::kResourceExhausted, "budget");
      EXPECT_FALSE(slept.engine.frozen());
    } else {
      EXPECT_GT(value_of(slept.controller.sleep(to_host())).disk_bytes, plan.disk_bytes);
      ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    }
    slept.engine.before_hook = nullptr;
    taken.reset();
    EXPECT_EQ(files_left(), 0u);
    ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    EXPECT_EQ(finish(slept.engine), expected);
  }
}

// With a key nothing of the content can be read in the file, and nothing in it can be changed unseen.
TEST_F(Spill, WithAKeyTheFileIsSealed) {
  for (const bool with_key : {false, true}) {
    auto memory = value_of(RankMemory::create(
        value_of(make_host_device()), linux_file_system(),
        {.arena_budget_bytes = 200 * kKiB,
         .arena_slab_bytes = 64 * kKiB,
         .threads = 1,
         .key = with_key ? std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{1, 2, 3}) : nullptr,
         .spill_dir = spill_dir(),
         .encrypt = true}));
    constexpr uint64_t kBytes = 20 * kPage;
    constexpr uint32_t kBlocks = 8;
    const DeviceAddress kv = value_of(memory->allocate("kv_cache", "kv", kBlocks * kBytes));
    auto* const content = reinterpret_cast<char*>(kv);  // NOLINT(performance-no-int-to-ptr)
    const std::string secret = "a secret of somebody";
    for (uint64_t at = 0; at + secret.size() < kBlocks * kBytes; at += 512) secret.copy(content + at, secret.size());
    ASSERT_SUCCEEDS(memory->set_kv_layout(
        "kv_cache",
        {.num_blocks = kBlocks,
         .tensors = {{.address = kv, .layers = 1, .layer_stride = 1, .block_stride = kBytes, .block_bytes = kBytes}}}));
    const std::vector<std::string> tags{"kv_cache"};
    const auto saved = value_of(call_rank(*memory, orders::Save{.tags = tags, .blocks = {0, 1, 2, 3, 4, 5, 6, 7}}));
    ASSERT_GT(saved.spilled_bytes, 0u);
    ASSERT_SUCCEEDS(call_rank(*memory, orders::Detach{.tags = tags}));
    // The file without a name, by this process's own descriptors.
    std::string path;
    for (const auto& entry : boost::filesystem::directory_iterator("/proc/self/fd")) {
      boost::system::error_code gone;
      const std::string target = boost::filesystem::read_symlink(entry.path(), gone).string();
      if (target.find("/spill/spill-") != std::string::npos) path = entry.path().string();
    }
    ASSERT_FALSE(path.empty());
    std::string bytes;
    {
      std::ifstream in(path, std::ios::binary);
      bytes.assign(std::istreambuf_iterator<char>(in), {});
    }
    ASSERT_GE(bytes.size(), saved.spilled_bytes);
    EXPECT_EQ(bytes.find(secret) == std::string::npos, with_key);
    {
      std::fstream out(path, std::ios::binary | std::ios::in | std::ios::out);
      out.seekp(static_cast<std::streamoff>(bytes.size() - kBytes / 2));
      out.put(static_cast<char>(~bytes[bytes.size() - kBytes / 2]));
    }
    const auto woken = call_rank(*memory, orders::Restore{.tags = tags});
    EXPECT_FAILS(woken, Code::kCorruption, "kv_cache block");
    EXPECT_NE(woken.error().next_step.find("load it again"), std::string::npos) << woken.error().next_step;
  }
}

// Also where nobody but the tags' owner sleeps them.
TEST_F(Spill, TheBudgetIsInTheWayOfAPlanOnlyWhereThereIsNoFileForTheRest) {
  constexpr uint64_t kRegion = 4 * kPage;
  for (const bool spills : {false, true}) {
    SCOPED_TRACE(spills);
    const auto memory = value_of(RankMemory::create(value_of(make_host_device()), linux_file_system(),
                                                    {.arena_budget_bytes = 64 * kPage,
                                                     .arena_slab_bytes = kMiB,
                                                     .threads = 1,
                                                     .spill_dir = spills ? spill_dir() : ""}));
    for (int i = 0; i < 20; ++i) {
      const DeviceAddress address =
          value_of(memory->allocate(i % 2 == 0 ? "a" : "b", "region " + std::to_string(i), kRegion));
      std::memset(reinterpret_cast<void*>(address), i + 1, kRegion);
    }
    TagSleep tags(*memory);
    const TagMove plan = value_of(tags.plan_sleep({}, {"a", "b"}));
    EXPECT_EQ(plan.copied_bytes, 20 * kRegion);
    EXPECT_EQ(plan.obstacle.empty(), spills) << plan.obstacle;
    EXPECT_EQ(tags.sleep({}, {"a", "b"}).has_value(), spills);
    if (!spills) continue;
    ASSERT_SUCCEEDS(tags.wake({}));
    for (const RegionInfo& region : memory->allocator().regions())
      EXPECT_EQ(*reinterpret_cast<const char*>(region.address + kRegion - 1), std::stoi(region.name.substr(7)) + 1);
  }
}

}  // namespace
}  // namespace torpor
