// SPDX-License-Identifier: Apache-2.0
// A sleep to disk or a checkpoint after another one: what has not changed is neither read nor written. S1, S8, I8, I10.
#include <filesystem>
#include <fstream>

#include "checkpoint/verify.h"
#include "tests/engine/sleep_failure.h"
#include "tests/support/sanitizers.h"

namespace torpor {
namespace {

using namespace test;
namespace fs = std::filesystem;

class SecondCheckpoint : public SleepFailure {
 protected:
  using Variant = TestEngineOptions;
  static Variant variant(int ranks = 1) {
    return {.ranks = ranks, .num_blocks = 24, .mix_steps = true, .incremental = true};
  }
  static std::shared_ptr<const Key> a_key() {
    return std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{1, 2, 3});
  }
  static uint64_t kv_bytes(int64_t blocks, int ranks) {
    return static_cast<uint64_t>(blocks * ranks) * kBlockBytes * kKvLayers;
  }
  // Chunks that went through the transfer engines since the start: whatever of the device was read is among them.
  static uint64_t chunks_read(SleepingEngine& slept, int ranks) {
    uint64_t chunks = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      for (const auto& [outcome, count] : slept.engine.memory(rank).ledger().chunks_by_outcome) chunks += count;
    }
    return chunks;
  }
  struct Cost {  // without the runtime, which is copied each time
    SleepReport report;
    uint64_t chunks = 0;   // read
    uint64_t written = 0;  // bytes in chunk files of its own, without their headers
  };
  Cost cost_of(SleepingEngine& slept, const Variant& options, bool serving = false) {
    const uint64_t before = chunks_read(slept, options.ranks);
    Cost cost{.report = value_of(serving ? slept.controller.checkpoint({}) : slept.controller.sleep(to_disk()))};
    cost.chunks = chunks_read(slept, options.ranks) - before;
    const Checkpoint written = open(cost.report.checkpoint, options);
    for (const RankSummary& rank : written.manifest().ranks) {
      cost.written += rank.own_bytes() - kPage;
      for (const SavedChunk& chunk : value_of(written.refs(rank)).records) {
        if (chunk.key.tag != "runtime") continue;
        --cost.chunks;
        if (chunk.file == 0) cost.written -= align_up(chunk.stored_bytes, kPage);
      }
    }
    const uint64_t runtime = static_cast<uint64_t>(options.ranks) * kRuntimeBytes;
    cost.report.saved_bytes -= runtime;
    cost.report.disk_bytes -= runtime;
    return cost;
  }
  static Checkpoint open(const std::string& path, const Variant& options) {
    return value_of(open_checkpoint(linux_file_system(), path, options.key));
  }
  static void expect_whole(const std::string& path, const Variant& options) {
    const Verification found = value_of(verify(open(path, options)));
    EXPECT_TRUE(found.problems.empty()) << path << ": " << found.problems[0].to_string();
  }
  static void expect_nothing_moved(const Cost& cost, const SleepReport& first) {
    EXPECT_EQ(cost.report.saved_bytes, 0u);
    EXPECT_EQ(cost.report.reused_bytes, first.saved_bytes + first.reused_bytes);
    EXPECT_EQ(cost.report.disk_bytes, cost.report.reused_bytes);
    EXPECT_EQ(cost.report.host_bytes, 0u);
    EXPECT_EQ(cost.chunks, 0u);
    EXPECT_EQ(cost.written, 0u);
  }
  // Of four requests each has one block that is being filled, and those that it filled meanwhile. A block takes a page.
  static void expect_only_the_tail(const Cost& cost, int steps, int ranks) {
    const int64_t most = 4 * (1 + (steps + 3) / 4);
    EXPECT_GT(cost.report.saved_bytes, 0u);
    EXPECT_LE(cost.report.saved_bytes, kv_bytes(most, ranks));
    EXPECT_EQ(cost.report.saved_bytes + cost.report.reused_bytes,
              kWeightBytes * static_cast<uint64_t>(ranks) + kv_bytes(cost.report.kept_blocks, ranks));
    EXPECT_EQ(cost.chunks, cost.report.saved_bytes / kv_bytes(1, 1));
    EXPECT_LE(cost.written, cost.chunks * kPage);
  }
  // The checkpoint that this engine has just written, in a new one, goes on with the very tokens.
  void expect_to_wake(const std::string& path, const TestEngine& writer, const Variant& options,
                      const TestEngine::Tokens& expected) {
    SleepingEngine woken(linux_file_system(), temporary_ / "another", options);
    woken.engine.go_on_after(writer);
    ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path}));
    EXPECT_EQ(finish(woken.engine), expected);
  }
};

TEST_F(SecondCheckpoint, WithoutAStepItReadsAndWritesNothingAndAfterSomeOnlyTheTail) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    fs::remove_all(temporary_.path());
    Variant options = variant(ranks);
    if (ranks == 2) options.key = a_key();  // encrypted
    SleepingEngine slept = make(options);
    begin(slept.engine);
    const Cost first = cost_of(slept, options);
    EXPECT_EQ(first.report.reused_bytes, 0u);
    EXPECT_GT(first.written, first.report.saved_bytes);
    for (int again = 0; again < 2; ++again) {
      ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      expect_nothing_moved(cost_of(slept, options), first.report);
    }
    std::string path;
    for (const int between : {1, 3, 6}) {
      ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      for (int i = 0; i < between; ++i) slept.engine.step();
      const Cost later = cost_of(slept, options);
      expect_only_the_tail(later, between, ranks);
      expect_whole(path = later.report.checkpoint, options);
    }
    expect_to_wake(path, slept.engine, options, uninterrupted(options));
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    EXPECT_EQ(finish(slept.engine), uninterrupted(options));
  }
}

TEST_F(SecondCheckpoint, WhileServingToo) {
  const Variant options = variant(2);
  SleepingEngine slept = make(options);
  begin(slept.engine);
  const Cost first = cost_of(slept, options, /*serving=*/true);
  expect_nothing_moved(cost_of(slept, options, true), first.report);
  slept.engine.step();
  const Cost later = cost_of(slept, options, true);
  EXPECT_GT(later.report.reused_bytes, 0u);
  EXPECT_LE(later.report.saved_bytes, kv_bytes(8, 2));
  EXPECT_EQ(later.chunks, later.report.saved_bytes / kv_bytes(1, 1));
  // No checkpoint has the weights yet: they are written, and no KV is.
  const Cost asleep = cost_of(slept, options);
  EXPECT_EQ(asleep.report.saved_bytes, 2 * kWeightBytes);
  EXPECT_EQ(asleep.report.reused_bytes, kv_bytes(asleep.report.kept_blocks, 2));
}

// Once one has the weights, those after it link them, whether they are to have them or not.
TEST_F(SecondCheckpoint, OnesWhileServingHandTheWeightsOnToTheNextSleep) {
  const Variant options = variant(2);
  SleepingEngine slept = make(options);
  begin(slept.engine);
  (void)cost_of(slept, options);
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  for (int i = 0; i < 2; ++i) {
    slept.engine.step();
    const Cost serving = cost_of(slept, options, /*serving=*/true);
    EXPECT_LE(serving.report.saved_bytes, kv_bytes(8, 2));
    EXPECT_EQ(serving.chunks, serving.report.saved_bytes / kv_bytes(1, 1));
    expect_whole(serving.report.checkpoint, options);
  }
  slept.engine.step();
  const Cost asleep = cost_of(slept, options);
  expect_only_the_tail(asleep, 1, 2);
  expect_to_wake(asleep.report.checkpoint, slept.engine, options, uninterrupted(options));
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  EXPECT_EQ(finish(slept.engine), uninterrupted(options));
}

// Weights that were written since are another matter: the checkpoint has none then, and the next sleep writes them.
TEST_F(SecondCheckpoint, OtherWeightsAreNotHandedOn) {
  const Variant options = variant();
  SleepingEngine slept = make(options);
  begin(slept.engine);
  (void)cost_of(slept, options);
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  slept.engine.load_weights(2);
  const Cost serving = cost_of(slept, options, /*serving=*/true);
  EXPECT_EQ(open(serving.report.checkpoint, options).manifest().ranks[0].tags.count("weights"), 0u);
  EXPECT_GE(cost_of(slept, options).report.saved_bytes, kWeightBytes);
}

// What a sleep to disk would write, said before it.
TEST_F(SecondCheckpoint, ThePlanNamesOnlyWhatWillBeWritten) {
  const Variant options = variant(2);
  SleepingEngine slept = make(options);
  begin(slept.engine);
  for (int i = 0; i < 3; ++i) {
    SCOPED_TRACE(i);
    const SleepPlan plan = value_of(slept.controller.plan_sleep(to_disk()));
    const SleepReport report = cost_of(slept, options).report;
    uint64_t saved = 0;
    for (const auto& [tag, bytes] : plan.save_bytes) saved += bytes;
    EXPECT_EQ(saved, report.saved_bytes + 2 * kRuntimeBytes);
    EXPECT_EQ(plan.reused_bytes, report.reused_bytes);
    EXPECT_EQ(plan.disk_bytes, report.disk_bytes + 2 * kRuntimeBytes);
    EXPECT_EQ(plan.host_bytes, 0u);
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    if (i == 1) slept.engine.step();
  }
}

TEST_F(SecondCheckpoint, ASleepToHostBetweenThemChangesNothing) {
  Variant options = variant();
  SleepingEngine slept = make(options);
  begin(slept.engine);
  const Cost first = cost_of(slept, options);
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  expect_nothing_moved(cost_of(slept, options), first.report);
}

TEST_F(SecondCheckpoint, OfANewProcessLinksWhatItHasWokenFrom) {
  const Variant options = variant(2);
  SleepReport before;
  {
    SleepingEngine slept = make(options);
    begin(slept.engine);
    before = value_of(slept.controller.sleep(to_disk()));
    before.saved_bytes -= 2 * kRuntimeBytes;
  }
  for (const int steps : {0, 3}) {
    SCOPED_TRACE(steps);
    SleepingEngine woken = make(options);
    ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = before.checkpoint}));
    for (int i = 0; i < steps; ++i) woken.engine.step();
    const Cost cost = cost_of(woken, options);
    if (steps == 0) {
      expect_nothing_moved(cost, before);
      expect_whole(cost.report.checkpoint, options);
      fs::remove_all(before.checkpoint);  // it was the base, and is not needed
      before = cost.report;
    } else {
      expect_only_the_tail(cost, steps, 2);
      ASSERT_SUCCEEDS(woken.controller.wake_up({}));
      woken.engine.run();
      EXPECT_EQ(woken.engine.tokens().size(), 3u);
    }
  }
  // What did not say its contents is read, and linked for its digest.
  SleepingEngine silent = make(options);
  silent.engine.fail_hook("kv_contents");
  ASSERT_SUCCEEDS(silent.controller.wake_up({.from_checkpoint = temporary_.path()}));
  const Cost cost = cost_of(silent, options);
  EXPECT_EQ(cost.report.saved_bytes, kv_bytes(cost.report.kept_blocks, 2));
  EXPECT_EQ(cost.written, 0u);
}

TEST_F(SecondCheckpoint, AfterOneThatFailedNothingIsBelievedThatIsNotThere) {
  const Variant options = variant(2);
  const TestEngine::Tokens expected = uninterrupted(options);
  for (const char* hook : {"rank save", "rank inform", "release_derived", "rank detach"}) {
    SCOPED_TRACE(hook);
    fs::remove_all(temporary_.path());
    SleepingEngine slept = make(options);
    begin(slept.engine);
    ASSERT_SUCCEEDS(slept.controller.sleep(to_disk()));
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    slept.engine.step();
    slept.engine.fail_hook(hook);
    EXPECT_FAILS(slept.controller.sleep(to_disk()), Code::kInternal, hook);
    const Cost third = cost_of(slept, options);
    EXPECT_GT(third.report.reused_bytes, 0u);
    expect_whole(third.report.checkpoint, options);
    EXPECT_GT(third.written, 0u);  // what the failed one wrote is gone
    expect_to_wake(third.report.checkpoint, slept.engine, options, expected);
  }
}

TEST_F(SecondCheckpoint, I7WhereverAFileFailsTheNextOneIsWhole) {
  const Variant options = variant(2);
  const TestEngine::Tokens expected = uninterrupted(options);
  SleepingEngine slept = make(options);
  begin(slept.engine, 3);
  ASSERT_SUCCEEDS(slept.controller.sleep(to_disk()));
  int failures = 0;
  for (uint64_t n = 1; n < 400; n += 7 * test::next_case()) {
    SCOPED_TRACE(n);
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    if (n % 4 == 1) slept.engine.step();
    file_system_.plan.set(Fault::kError, n);
    const Result<SleepReport> second = slept.controller.sleep(to_disk());
    const bool fired = file_system_.plan.fired();
    file_system_.plan.clear();
    failures += second ? 0 : 1;
    if (second) {
      ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    }
    const SleepReport third = value_of(slept.controller.sleep(to_disk()));
    expect_whole(third.checkpoint, options);
    if (n % 4 == 1) expect_to_wake(third.checkpoint, slept.engine, options, expected);
    if (!fired) break;
  }
  EXPECT_GT(failures * test::next_case(), 10);
}

TEST_F(SecondCheckpoint, WhatBecameOfTheOneBeforeIsNoticed) {
  const Variant options = variant();
  const auto chunks = [](const std::string& path) { return path + "/chunks-r0"; };
  using Damage = std::function<void(const std::string&)>;
  const std::vector<std::pair<const char*, Damage>> damages{
      {"gone", [](const std::string& path) { fs::remove_all(path); }},
      {"its chunks are gone", [&](const std::string& path) { fs::remove(chunks(path)); }},
      {"its chunks were cut", [&](const std::string& path) { fs::resize_file(chunks(path), kPage); }},
      {"its refs are gone", [](const std::string& path) { fs::remove(path + "/refs-r0"); }},
      {"its manifest was cut", [](const std::string& path) { fs::resize_file(path + "/MANIFEST", 100); }}};
  for (const auto& [what, damage] : damages) {
    SCOPED_TRACE(what);
    fs::remove_all(temporary_.path());
    SleepingEngine slept = make(options);
    begin(slept.engine);
    const SleepReport first = value_of(slept.controller.checkpoint({}));
    damage(first.checkpoint);
    const Cost second = cost_of(slept, options);
    EXPECT_EQ(second.report.reused_bytes, 0u);
    expect_whole(second.report.checkpoint, options);
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    expect_nothing_moved(cost_of(slept, options), second.report);
  }
}

// A bit that a disk lost is found by who reads it, in each checkpoint that links the file.
TEST_F(SecondCheckpoint, WhatIsLinkedIsProvenByVerifyAndByTheWake) {
  const Variant options = variant();
  SleepingEngine slept = make(options);
  begin(slept.engine);
  const SleepReport first = value_of(slept.controller.checkpoint({}));
  {
    const Checkpoint written = open(first.checkpoint, options);
    const std::vector<SavedChunk> chunks = value_of(written.refs(written.manifest().ranks[0])).records;
    const auto block = std::find_if(chunks.begin(), chunks.end(),
                                    [](const SavedChunk& chunk) { return chunk.key.kind == ChunkKind::kKvBlock; });
    ASSERT_NE(block, chunks.end());
    std::fstream file(first.checkpoint + "/chunks-r0", std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(block->offset + 5));
    file.put('\x7f').flush();
    ASSERT_TRUE(file.good());
  }
  const SleepReport second = value_of(slept.controller.sleep(to_disk()));
  EXPECT_FALSE(value_of(verify(open(second.checkpoint, options))).problems.empty());
  EXPECT_FAILS(slept.controller.wake_up({}), Code::kCorruption, "kv_cache block");
}

// And a file that has hardly anything but the old ones is not kept for some KV.
TEST_F(SecondCheckpoint, WrittenWeightsAreReadAgain) {
  const Variant options = variant();
  for (const bool marks : {true, false}) {
    SCOPED_TRACE(marks);
    fs::remove_all(temporary_.path());
    SleepingEngine slept = make(options);
    begin(slept.engine);
    ASSERT_SUCCEEDS(slept.controller.sleep(to_disk()));
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    slept.engine.load_weights(2, marks);
    const Cost second = cost_of(slept, options);
    EXPECT_EQ(second.report.saved_bytes, kWeightBytes + kv_bytes(second.report.kept_blocks, 1));
    EXPECT_GT(second.written, kWeightBytes);
    EXPECT_EQ(open(second.report.checkpoint, options).manifest().ranks[0].files.size(), 1u);
    expect_whole(second.report.checkpoint, options);
  }
}

TEST_F(SecondCheckpoint, WhoWishesItHasThemReadEachTimeAndStillNotWritten) {
  Variant options = variant();
  options.always_read_weights = true;
  SleepingEngine slept = make(options);
  begin(slept.engine);
  ASSERT_SUCCEEDS(slept.controller.sleep(to_disk()));
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  const Cost second = cost_of(slept, options);
  EXPECT_EQ(second.report.saved_bytes, kWeightBytes);
  EXPECT_EQ(second.written, 0u);
}

// Blocks are freed, evicted and computed again meanwhile, under equal hashes with other bytes.
TEST_F(SecondCheckpoint, I10HoweverOftenItIsWrittenEachOneWakesWithEveryToken) {
  const Variant options = variant();
  const TestEngine::Tokens expected = uninterrupted(options);
  for (int every = 1; every <= 3; ++every) {
    SCOPED_TRACE(every);
    fs::remove_all(temporary_.path());
    SleepingEngine slept = make(options);
    add_example_requests(slept.engine);
    uint64_t reused = 0, compacted = 0;
    int turn = 0;
    const auto run = [&] {
      for (int i = 0; slept.engine.step(); ++i) {
        if (i % every != 0) continue;
        ++turn;
        if (turn % 5 == 1) slept.engine.fail_hook(turn % 2 == 0 ? "release_derived" : "rank detach");
        const bool serving = turn % 3 == 1;
        const Result<SleepReport> report = serving         ? slept.controller.checkpoint({})
                                           : turn % 4 == 3 ? slept.controller.sleep(to_host())
                                                           : slept.controller.sleep(to_disk());
        slept.engine.fail_hook("");
        if (!report) continue;
        reused += report->reused_bytes;
        compacted += report->compacted_bytes;
        EXPECT_LE(report->compacted_bytes, report->saved_bytes);
        if (!report->checkpoint.empty() && slept.engine.tokens().size() == 4 && turn % 2 == 0)
          expect_to_wake(report->checkpoint, slept.engine, options, expected);
        if (!serving) {
          ASSERT_SUCCEEDS(slept.controller.wake_up({}));
        }
      }
    };
    run();
    add_late_request(slept.engine);
    run();
    EXPECT_EQ(slept.engine.tokens(), expected);
    EXPECT_GT(reused, 0u);
    EXPECT_GT(compacted, 0u);
  }
}

// Two engines of one kind share a directory: the checkpoints of one count as the other's.
TEST_F(SecondCheckpoint, WhatAnEngineSleepsOnIsNotRemovedByAnotherOne) {
  const Variant options = variant();
  SleepingEngine asleep(linux_file_system(), temporary_.path(), options);
  add_example_requests(asleep.engine);
  for (int i = 0; i < 4; ++i) asleep.engine.step();
  ASSERT_SUCCEEDS(asleep.controller.sleep(to_disk()));
  SleepingEngine other(linux_file_system(), temporary_.path(), options);
  add_example_requests(other.engine);
  for (int i = 0; i < 4; ++i) {
    other.engine.step();
    ASSERT_SUCCEEDS(other.controller.sleep(to_disk()));
    ASSERT_SUCCEEDS(other.controller.wake_up({}));
  }
  const auto manager = value_of(CheckpointManager::open(linux_file_system(), temporary_.path(), {}));
  EXPECT_FAILS(manager->remove(1), Code::kUnavailable, "an engine sleeps on");
  ASSERT_SUCCEEDS(asleep.controller.wake_up({}));
  EXPECT_EQ(finish(asleep.engine), uninterrupted(options));
  EXPECT_EQ(value_of(manager->collect()), std::vector<std::string>{"g-000001"});
}

TEST_F(SecondCheckpoint, NewWeightsLeaveNoKvToLink) {
  const Variant options = variant();
  SleepingEngine slept = make(options);
  begin(slept.engine);
  ASSERT_SUCCEEDS(slept.controller.sleep(to_disk()));
  ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"weights"}}));
  slept.engine.load_weights(7);
  ASSERT_SUCCEEDS(slept.controller.wake_up({.old_kv = OldKv::kRecompute}));
  slept.engine.step();
  const Cost computed_again = cost_of(slept, options);
  EXPECT_EQ(computed_again.report.reused_bytes, 0u);
  expect_whole(computed_again.report.checkpoint, options);
}

}  // namespace
}  // namespace torpor
