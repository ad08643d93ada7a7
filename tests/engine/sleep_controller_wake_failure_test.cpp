// SPDX-License-Identifier: Apache-2.0
// When a wake fails (docs/semantics.md, "When something fails"), in the same process or in a new one.
#include <fstream>

#include "engine/sleep_controller.h"
#include "offload/codec.h"
#include "tests/engine/sleep_failure.h"
#include "tests/support/rank_call.h"
#include "tests/support/sanitizers.h"

namespace torpor {
namespace {

using namespace test;

TEST_F(SleepFailure, AnEngineWithAFeatureThatCannotBePreservedDoesNotGoOnWithWhatAnotherOneWasGiven) {
  std::string path;
  {
    SleepingEngine slept = make();
    begin(slept.engine);
    path = value_of(slept.controller.sleep(to_disk())).checkpoint;
  }
  SleepingEngine woken = make();
  woken.engine.unsupported_features = {"LoRA"};
  woken.engine.before_hook = [](const std::string& hook) {
    EXPECT_TRUE(hook == "unsupported" || hook == "unfinished_requests") << hook;
  };
  EXPECT_FAILS(woken.controller.wake_up({.from_checkpoint = path}), Code::kUnsupported, "LoRA");
  const auto nothing = [](CapturedState&, bool) { return ok(); };
  EXPECT_FAILS(woken.controller.wake_up({.catch_up = nothing}), Code::kUnsupported, "LoRA");
  woken.engine.before_hook = nullptr;
  woken.engine.unsupported_features.clear();
  EXPECT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path}));
}

TEST_F(SleepFailure, I7WhereverAWakeFailsItStaysAsleepAndARetryWorks) {
  for (const bool disk : {false, true}) {
    for (const char* hook : {"rank restore", "rebuild_derived", "reconnect", "rank finish"}) {
      SCOPED_TRACE(testing::Message() << hook << (disk ? " to disk" : " to host"));
      SleepingEngine slept = make();
      begin(slept.engine);
      ASSERT_SUCCEEDS(slept.controller.sleep(disk ? to_disk() : to_host()));
      const uint64_t asleep = slept.engine.device().info().physical_bytes;  // what was allocated since
      slept.engine.fail_hook(hook);
      const Result<SleepReport> woken = slept.controller.wake_up({});
      EXPECT_FAILS(woken, Code::kInternal, hook);
      EXPECT_FALSE(woken.error().state_changed);
      EXPECT_TRUE(slept.controller.is_sleeping());
      EXPECT_EQ(slept.engine.device().info().physical_bytes, asleep);
      ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      expect_untouched(slept);
    }
  }
}

TEST_F(SleepFailure, I7WhereverTheDeviceFailsAWakeStaysAsleepAndARetryWorks) {
  struct How {
    int ranks;
    Codec codec;
  };
  for (const auto& [ranks, codec] : {How{1, Codec::kNone}, How{2, Codec::kNone}, How{2, Codec::kBf16}}) {
    const TestEngineOptions options{.ranks = ranks, .host_compression = codec, .bf16 = codec == Codec::kBf16};
    const TestEngine::Tokens expected = uninterrupted(options);
    for (uint64_t n = 1;; n += test::next_failure()) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, " << name(codec) << ", call " << n);
      SleepingEngine slept = make(options);
      begin(slept.engine);
      ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
      slept.engine.device(ranks - 1).fail_at(n);
      const Result<SleepReport> woken = slept.controller.wake_up({});
      const bool fired = slept.engine.device(ranks - 1).fired();
      slept.engine.device(ranks - 1).fail_at(0);
      if (!woken) {
        EXPECT_FALSE(woken.error().state_changed);
        EXPECT_TRUE(slept.controller.is_sleeping());
        ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      }
      EXPECT_EQ(finish(slept.engine), expected);
      if (!fired) break;
    }
  }
}

TEST_F(SleepFailure, I7WhereverAFileOperationFailsAWakeFromDiskStaysAsleepAndARetryWorks) {
  const TestEngine::Tokens expected = uninterrupted();
  for (uint64_t n = 1;; n += test::next_failure()) {
    SCOPED_TRACE(n);
    SleepingEngine slept = make();
    begin(slept.engine);
    ASSERT_SUCCEEDS(slept.controller.sleep(to_disk()));
    file_system_.plan.set(Fault::kError, n);
    const Result<SleepReport> woken = slept.controller.wake_up({});
    const bool fired = file_system_.plan.fired();
    file_system_.plan.clear();
    if (!woken) {
      EXPECT_TRUE(slept.controller.is_sleeping());
      ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    }
    EXPECT_EQ(finish(slept.engine), expected);
    if (!fired) break;
    ASSERT_LT(n, 300u);
  }
}

TEST_F(SleepFailure, IfOldPrefixesCannotBeForgottenTheWakeFailsAndARetryWorks) {
  SleepingEngine slept = make();
  begin(slept.engine);
  ASSERT_SUCCEEDS(slept.controller.sleep({.preserve_state = true, .weights = Weights::kReload}));
  ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"weights"}}));
  slept.engine.load_weights(1);
  slept.engine.fail_hook("retire_prefix");
  EXPECT_FAILS(slept.controller.wake_up({.old_kv = OldKv::kKeep}), Code::kInternal, "retire_prefix");
  EXPECT_TRUE(slept.controller.is_sleeping());
  bool retired = false;
  slept.engine.before_hook = [&](const std::string& hook) { retired |= hook == "retire_prefix"; };
  ASSERT_SUCCEEDS(slept.controller.wake_up({.old_kv = OldKv::kKeep}));
  EXPECT_TRUE(retired);
  slept.engine.before_hook = nullptr;
  expect_untouched(slept);
}

TEST_F(SleepFailure, WithoutDeviceMemoryAWakeStaysAsleepUntilThereIsSome) {
  SleepingEngine slept = make({.device_capacity_bytes = 1 * kMiB});
  begin(slept.engine);
  ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
  const uint64_t left = kMiB - slept.engine.device().info().physical_bytes;
  const PhysicalId other = value_of(slept.engine.device().create(left));
  EXPECT_FAILS(slept.controller.wake_up({}), Code::kResourceExhausted, "needed");
  EXPECT_TRUE(slept.controller.is_sleeping());
  ASSERT_SUCCEEDS(slept.engine.device().release(other));
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  expect_untouched(slept);
}

TEST_F(SleepFailure, ACheckpointOfAnotherEngineIsRefusedFieldByField) {
  const std::string path = written_checkpoint();
  SleepingEngine other = make({.num_blocks = 32, .weights_seed = 9});
  const Result<SleepReport> woken = other.controller.wake_up({.from_checkpoint = path});
  EXPECT_FAILS(woken, Code::kIncompatible, "weights_digest_rank0");
  EXPECT_EQ(woken.error().what.find(kNumBlocksField), std::string::npos);  // it need not be equal
  EXPECT_FALSE(other.controller.is_sleeping());
  other.engine.add("x", {1}, 3);
  other.engine.run();
  EXPECT_EQ(other.engine.tokens().at("x").size(), 3u);  // it serves

  SleepingEngine more_ranks = make({.ranks = 2});
  EXPECT_FAILS(more_ranks.controller.wake_up({.from_checkpoint = path}), Code::kIncompatible, "ranks");
}

TEST_F(SleepFailure, ADamagedCheckpointIsRefusedAndOnRequestWokenWithoutItsState) {
  const std::string path = written_checkpoint();
  {
    const Checkpoint checkpoint = value_of(open_checkpoint(linux_file_system(), path));
    const auto chunks = value_of(checkpoint.refs(checkpoint.manifest().ranks[0])).records;
    const auto block = std::find_if(chunks.begin(), chunks.end(),
                                    [](const SavedChunk& chunk) { return chunk.key.kind == ChunkKind::kKvBlock; });
    std::fstream file(path + "/chunks-r0", std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(block->offset) + 10);
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(static_cast<std::streamoff>(block->offset) + 10);
    file.put(byte);
  }
  SleepingEngine woken = make();
  EXPECT_FAILS(woken.controller.wake_up({.from_checkpoint = path}), Code::kCorruption, "kv_cache block");
  EXPECT_FALSE(woken.controller.is_sleeping());
  const SleepReport report =
      value_of(woken.controller.wake_up({.from_checkpoint = path, .discard_on_restore_error = true}));
  EXPECT_NE(report.note.find("discarded"), std::string::npos);
  begin(woken.engine);
  expect_untouched(woken);
}

TEST_F(SleepFailure, ARankThatFindsAnotherCheckpointThanTheControllerRefusesItsBlocks) {
  const std::string path = written_checkpoint();
  const Manifest manifest = value_of(open_checkpoint(file_system_, path)).manifest();
  SleepingEngine woken = make();
  orders::Restore load;
  load.checkpoint = {.directory = path, .generation = manifest.generation, .id = manifest.id};
  orders::Restore later = load;
  ++later.checkpoint->generation;
  orders::Restore other = load;
  other.checkpoint->id[3] ^= 1;
  EXPECT_FAILS(call_rank(woken.engine.memory(), later), Code::kIncompatible, "not the checkpoint");
  EXPECT_FAILS(call_rank(woken.engine.memory(), other), Code::kIncompatible, "not the checkpoint");
  EXPECT_GT(value_of(call_rank(woken.engine.memory(), load)).bytes, 0u);
}

TEST_F(SleepFailure, NoCheckpointIsNotFound) {
  SleepingEngine woken = make();
  EXPECT_FAILS(woken.controller.wake_up({.from_checkpoint = temporary_.path()}), Code::kNotFound);
  EXPECT_FALSE(woken.controller.is_sleeping());
}

TEST_F(SleepFailure, AnEngineWithRequestsTakesNoCheckpoint) {
  const std::string path = written_checkpoint();
  SleepingEngine busy = make();
  begin(busy.engine);
  EXPECT_FAILS(busy.controller.wake_up({.from_checkpoint = path}), Code::kFailedPrecondition, "requests of its own");
  expect_untouched(busy);
}

TEST_F(SleepFailure, I7WhereverARestoreFailsTheNewEngineStaysEmptyAndUsable) {
  const std::string path = written_checkpoint();
  for (const char* hook : {"quiesce", "fingerprint", "drop_requests", "rank restore", "restore", "resume"}) {
    SCOPED_TRACE(hook);
    SleepingEngine woken = make();
    woken.engine.fail_hook(hook);
    EXPECT_FAILS(woken.controller.wake_up({.from_checkpoint = path}), Code::kInternal, hook);
    EXPECT_FALSE(woken.controller.is_sleeping());
    EXPECT_EQ(value_of(woken.engine.unfinished_requests()), 0);
    ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path}));
    EXPECT_EQ(value_of(woken.engine.unfinished_requests()), 3);
  }
}

TEST_F(SleepFailure, ARequestThatCannotBeRestoredFailsAlone) {
  const std::string path = written_checkpoint();
  SleepingEngine woken = make();
  woken.engine.invalid_request = "a";
  const SleepReport report = value_of(woken.controller.wake_up({.from_checkpoint = path}));
  ASSERT_EQ(report.failed_requests.size(), 1u);
  EXPECT_EQ(report.failed_requests[0].id, "a");
  EXPECT_EQ(report.requests, 2);
  woken.engine.run();
  const auto expected = uninterrupted();
  const auto& c = expected.at("c");
  EXPECT_EQ(woken.engine.tokens().at("c"), std::vector<int32_t>(c.begin() + 6, c.end()));
  EXPECT_FALSE(woken.engine.tokens().contains("a"));
}

TEST_F(SleepFailure, WhatTheFrontEndCannotTakeIsThrownAway) {
  const std::string path = written_checkpoint();
  SleepingEngine woken = make();
  ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path, .hold = true}));
  EXPECT_FALSE(woken.engine.step());
  EXPECT_FAILS(woken.controller.sleep(to_host()), Code::kFailedPrecondition, "front end");
  ASSERT_SUCCEEDS(woken.controller.end_hold(false));
  EXPECT_FALSE(woken.controller.is_sleeping());
  EXPECT_EQ(value_of(woken.engine.unfinished_requests()), 0);
  EXPECT_FAILS(woken.controller.end_hold(true), Code::kFailedPrecondition);
  begin(woken.engine);
  expect_untouched(woken);
}

// What was restored is in the engine and cannot be taken out again: whatever the caller allowed, it is not awake.
TEST_F(SleepFailure, WhatCannotBeTakenOutAgainLosesTheEngine) {
  const std::string path = written_checkpoint();
  for (const bool discard : {false, true}) {
    SCOPED_TRACE(discard);
    SleepingEngine woken = make();
    woken.engine.fail_hook("restore");
    woken.engine.before_hook = [&](const std::string& hook) {
      if (hook == "forget_restored") woken.engine.fail_hook(hook);
    };
    const Result<SleepReport> report =
        woken.controller.wake_up({.from_checkpoint = path, .discard_on_restore_error = discard});
    EXPECT_FAILS(report, Code::kInternal, "restore");
    EXPECT_TRUE(report.error().state_changed);
    EXPECT_EQ(woken.controller.state().engine, "unrecoverable");
  }
}

TEST_F(SleepFailure, AHoldThatCannotBeEndedLosesTheEngine) {
  const std::string path = written_checkpoint();
  for (const bool keep : {false, true}) {
    SCOPED_TRACE(keep);
    SleepingEngine woken = make();
    ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path, .hold = true}));
    woken.engine.fail_hook(keep ? "resume" : "forget_restored");
    EXPECT_FAILS(woken.controller.end_hold(keep), Code::kInternal);
    EXPECT_EQ(woken.controller.state().engine, "unrecoverable");
  }
}

TEST_F(SleepFailure, NothingThatFailsAfterTheEngineRunsAgainLeavesItRecordedAsAsleep) {
  SleepingEngine slept = make();
  begin(slept.engine);
  ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
  slept.engine.before_hook = [&](const std::string& hook) {
    if (hook == "resume") slept.engine.fail_hook("unfinished_requests", true);
  };
  const Result<SleepReport> woken = slept.controller.wake_up({});
  EXPECT_EQ(slept.controller.is_sleeping(), slept.engine.frozen());
  slept.engine.before_hook = nullptr;
  slept.engine.fail_hook("");
  ASSERT_SUCCEEDS(woken);
  expect_untouched(slept);
}

TEST_F(SleepFailure, AWakeFromADamagedCheckpointKeepsNoHostMemory) {
  const std::string path = written_checkpoint();
  const auto damage = [](const std::string& file) {
    std::fstream out(file, std::ios::binary | std::ios::in | std::ios::out);
    out.seekg(0, std::ios::end);
    const auto size = static_cast<uint64_t>(out.tellg());
    for (uint64_t at = kPage; at < size; at += 64) out.seekp(static_cast<std::streamoff>(at)).put('x');
  };
  damage(path + "/chunks-r0");
  SleepingEngine woken = make();
  const auto held = [&] { return value_of(woken.controller.ledgers())[0].arena_held_bytes; };
  const uint64_t before = held();
  EXPECT_FAILS(woken.controller.wake_up({.from_checkpoint = path}), Code::kCorruption);
  EXPECT_EQ(held(), before);
}

TEST_F(SleepFailure, ACheckpointIsMarkedAsWokenWhileAnotherProcessHoldsItsDirectory) {
  const std::string path = written_checkpoint();
  const auto directory = value_of(linux_file_system().open_directory(temporary_.path(), false));
  SleepingEngine woken = make();
  const auto lock = value_of(directory->lock("LOCK"));
  ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path}));
  EXPECT_TRUE(std::ifstream(path + "/WOKEN").good());
}

// What is on hold has not gone on: a crash now must find the checkpoint as it was.
TEST_F(SleepFailure, ACheckpointIsMarkedAsWokenFromOnlyWhenItsEngineRuns) {
  const std::string path = written_checkpoint();
  const auto marked = [&] { return std::ifstream(path + "/WOKEN").good(); };
  {
    SleepingEngine thrown_away = make();
    ASSERT_SUCCEEDS(thrown_away.controller.wake_up({.from_checkpoint = path, .hold = true}));
    EXPECT_FALSE(marked());
    ASSERT_SUCCEEDS(thrown_away.controller.end_hold(false));
    EXPECT_FALSE(marked());
  }
  SleepingEngine woken = make();
  woken.engine.fail_hook("resume");
  EXPECT_FAILS(woken.controller.wake_up({.from_checkpoint = path}), Code::kInternal, "resume");
  EXPECT_FALSE(marked());
  EXPECT_EQ(value_of(woken.controller.checkpoint_to_wake()), temporary_.path());  // a front end may ask for it again
  ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path, .hold = true}));
  EXPECT_FALSE(marked());
  EXPECT_FAILS(woken.controller.wake_up({.from_checkpoint = path}), Code::kFailedPrecondition, "front end");
  ASSERT_SUCCEEDS(woken.controller.end_hold(true));
  EXPECT_TRUE(marked());
}

}  // namespace
}  // namespace torpor
