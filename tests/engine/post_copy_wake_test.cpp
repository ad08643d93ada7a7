// SPDX-License-Identifier: Apache-2.0
// A wake whose engine runs while KV blocks still come back. I3, I5, I7, I10.
#include <fstream>
#include <set>

#include <boost/filesystem.hpp>

#include "allocator/host_device.h"
#include "engine/reference/reference_engine.h"
#include "engine/sleep_controller.h"
#include "tests/support/faulty_device.h"
#include "tests/support/rank_call.h"
#include "tests/support/results.h"
#include "tests/support/sleeping_engine.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using namespace test;
using namespace reference;

struct WakeVariant {
  int ranks;
  bool to_disk;
  friend void PrintTo(const WakeVariant& variant, std::ostream* out) {
    *out << variant.ranks << " ranks, to " << (variant.to_disk ? "disk" : "host");
  }
};

class PostCopyWake : public ::testing::TestWithParam<WakeVariant> {
 protected:
  std::unique_ptr<SleepingEngine> make_asleep() const {
    auto made = std::make_unique<SleepingEngine>(linux_file_system(), directory_.path(),
                                                 TestEngineOptions{.ranks = GetParam().ranks});
    made->engine.can_hold = true;
    add_example_requests(made->engine);
    for (int i = 0; i < 5; ++i) made->engine.step();
    EXPECT_SUCCEEDS(made->controller.sleep({.preserve_state = true, .to_disk = GetParam().to_disk}));
    return made;
  }
  using Ids = std::set<std::string>;
  struct Engine {
    std::vector<FaultyDevice*> devices;
    std::unique_ptr<ReferenceEngine> engine;
    std::unique_ptr<SleepController> controller;
    std::map<std::string, std::vector<int32_t>> tokens;

    Ids step(int steps = 1) {
      Ids ids;
      for (int i = 0; i < steps; ++i) {
        for (const ReferenceOutput& output : engine->step()) {
          tokens[output.id].push_back(output.token);
          ids.insert(output.id);
        }
      }
      EXPECT_SUCCEEDS(engine->pool().check());
      return ids;
    }
    void run() {
      for (int i = 0; i < 1000 && !engine->idle(); ++i) step();
      EXPECT_TRUE(engine->idle());
    }
    WakeProgress go_on(DeferredWait wait = DeferredWait::kSome) { return value_of(controller->continue_wake(wait)); }
  };
  static ReferenceOptions options() {
    return {.token_budget = 200, .deferred_job_bytes = 1, .deferred_thread = false};  // a block a job
  }
  Engine make(ReferenceOptions options) const {
    Engine made;
    std::vector<std::unique_ptr<DeviceMemory>> devices;
    for (int rank = 0; rank < GetParam().ranks; ++rank) {
      auto device = std::make_unique<FaultyDevice>(value_of(make_host_device()));
      made.devices.push_back(device.get());
      devices.push_back(std::move(device));
    }
    made.engine = value_of(ReferenceEngine::create(std::move(devices), linux_file_system(), system_clock(), options));
    made.controller = std::make_unique<SleepController>(*made.engine, linux_file_system(), system_clock(),
                                                        SleepControllerOptions{.directory = directory_.path()});
    return made;
  }
  Engine make() const { return make(options()); }
  static void add(Engine& engine, const std::string& id, int32_t first, int32_t prompt = 14, int32_t tokens = 20) {
    ReferenceRequest request{.id = id, .max_tokens = tokens};
    for (int32_t i = 0; i < prompt; ++i) request.prompt.push_back(first + i);
    ASSERT_SUCCEEDS(engine.engine->add(request));
  }
  // Four requests, of which nobody shares anything, in the middle.
  static void begin(Engine& engine) {
    add(engine, "a", 100), add(engine, "b", 200), add(engine, "c", 300), add(engine, "d", 400);
    engine.step(6);
  }
  static std::map<std::string, std::vector<int32_t>> expected(Engine reference) {
    begin(reference);
    reference.run();
    return reference.tokens;
  }
  SleepReport sleep(Engine& engine) const {
    return value_of(engine.controller->sleep({.preserve_state = true, .to_disk = GetParam().to_disk}));
  }
  static SleepReport wake_early(Engine& engine) {
    SleepReport report = value_of(engine.controller->wake_up({.early = true}));
    EXPECT_TRUE(report.fully_awake);
    return report;
  }

  TemporaryDirectory directory_;
};
INSTANTIATE_TEST_SUITE_P(Ways, PostCopyWake,
                         ::testing::Values(WakeVariant{1, false}, WakeVariant{1, true}, WakeVariant{2, false},
                                           WakeVariant{2, true}));

TEST_P(PostCopyWake, I10RequestsRunOneAfterTheOtherAsTheirBlocksArrive) {
  Engine engine = make();
  begin(engine);
  const SleepReport slept = sleep(engine);
  const SleepReport woken = wake_early(engine);
  EXPECT_EQ(woken.deferred_blocks, 3 * 4);  // the full ones of b, c and d
  const uint64_t block = engine.engine->memory().kv_layout().bytes_per_block();
  EXPECT_EQ(woken.deferred_bytes, 3 * 4 * block * static_cast<uint64_t>(GetParam().ranks));
  EXPECT_EQ(woken.restored_bytes + woken.deferred_bytes, slept.saved_bytes);
  EXPECT_EQ(engine.step(2), Ids{"a"});
  Ids running{"a"};
  for (const char* next : {"b", "c", "d"}) {
    for (int i = 1; i < 4; ++i) {
      EXPECT_EQ(engine.go_on().arrived, 1);
      EXPECT_EQ(engine.step(), running) << next;
    }
    EXPECT_EQ(engine.go_on().arrived, 1);
    running.insert(next);
    EXPECT_EQ(engine.step(), running);
  }
  EXPECT_EQ(engine.go_on().left, 0);
  engine.run();
  EXPECT_EQ(engine.tokens, expected(make()));
  EXPECT_EQ(engine.engine->counts().preemptions, 0);
  EXPECT_EQ(engine.engine->pool().info().shared, 0);
}

TEST_P(PostCopyWake, I10ASecondSleepInTheMiddleWaitsForTheRest) {
  const auto tokens = expected(make());
  for (const int arrived : {0, 1, 5}) {
    SCOPED_TRACE(arrived);
    Engine engine = make();
    begin(engine);
    (void)sleep(engine);
    wake_early(engine);
    engine.step();
    for (int i = 0; i < arrived; ++i) engine.go_on();
    if (arrived == 1) {
      EXPECT_SUCCEEDS(engine.controller->plan_sleep({.preserve_state = true}));  // which waits, too
    }
    engine.step();
    const SleepReport again = sleep(engine);
    EXPECT_EQ(engine.go_on().left, 0);
    if (GetParam().to_disk) {
      Engine other = make();
      other.tokens = engine.tokens;
      EXPECT_GT(
          value_of(other.controller->wake_up({.from_checkpoint = again.checkpoint, .early = true})).deferred_blocks, 0);
      EXPECT_EQ(other.step(), Ids{"a"});
      EXPECT_SUCCEEDS(other.controller->checkpoint({}));  // which waits, too
      other.run();
      EXPECT_EQ(other.tokens, tokens);
    }
    wake_early(engine);
    engine.step();
    (void)engine.go_on(DeferredWait::kAll);
    engine.run();
    EXPECT_EQ(engine.tokens, tokens);
  }
}

TEST_P(PostCopyWake, I5WhatDoesNotArriveIsComputedAgainAndNothingElse) {
  const auto tokens = expected(make());
  Ids computed_again;
  for (int arrived = 0; arrived < 12; ++arrived) {
    SCOPED_TRACE(arrived);
    Engine engine = make();
    begin(engine);
    (void)sleep(engine);
    wake_early(engine);
    engine.step();
    for (int i = 0; i < arrived; ++i) engine.go_on();
    engine.devices.back()->fail_at(1, /*sticky=*/true);
    const WakeProgress lost = engine.go_on();
    engine.devices.back()->fail_at(0);
    EXPECT_EQ(lost.lost, 1);
    EXPECT_EQ(lost.arrived, 0);
    ASSERT_EQ(lost.recomputed.size(), 1u);
    computed_again.insert(lost.recomputed[0]);
    const int64_t computed = engine.engine->counts().computed_tokens;
    while (engine.go_on().left > 0) engine.step();
    engine.run();
    EXPECT_EQ(engine.tokens, tokens);
    EXPECT_EQ(engine.engine->counts().preemptions, 1);
    // What lies before the lost block is found in the cache where it has arrived.
    const int64_t left = 4 * 20 - 6 * 4 - 2;
    EXPECT_LE(engine.engine->counts().computed_tokens - computed, left + 14 + 6);
  }
  EXPECT_EQ(computed_again, (Ids{"b", "c", "d"}));
}

TEST_P(PostCopyWake, I8ADamagedBlockOnDiskIsSeenWhenItComes) {
  if (!GetParam().to_disk) return;
  Engine engine = make();
  begin(engine);
  const SleepReport slept = sleep(engine);
  // The last chunk is the one that is needed last, and into which may still be written; before it lies a full one.
  std::string path;
  for (const auto& entry : boost::filesystem::directory_iterator(slept.checkpoint)) {
    const std::string name = entry.path().filename().string();
    if (name.find("r0") != std::string::npos && name.find("refs") == std::string::npos) path = entry.path().string();
  }
  ASSERT_FALSE(path.empty());
  const auto size = static_cast<std::streamoff>(boost::filesystem::file_size(path));
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  const std::streamoff at = (size - 1) / 4096 * 4096 - 4096 + 5;
  file.seekg(at);
  const char was = static_cast<char>(file.get());
  file.seekp(at);
  file.put(static_cast<char>(was ^ 1));
  file.close();
  wake_early(engine);
  WakeProgress sum;
  do {
    engine.step();
    const WakeProgress progress = engine.go_on();
    sum.lost += progress.lost;
    sum.left = progress.left;
    sum.recomputed.insert(sum.recomputed.end(), progress.recomputed.begin(), progress.recomputed.end());
  } while (sum.left > 0);
  EXPECT_EQ(sum.lost, 1);
  EXPECT_EQ(sum.recomputed, std::vector<std::string>{"d"});
  engine.run();
  EXPECT_EQ(engine.tokens, expected(make()));
}

TEST_P(PostCopyWake, I3AnUnprovenCopyKeepsItsBlockForEver) {
  Engine engine = make();
  begin(engine);
  (void)sleep(engine);
  wake_early(engine);
  engine.go_on();
  engine.devices.back()->drain_as(Drain::kUnproven);
  WakeProgress lost = engine.go_on();
  engine.devices.back()->drain_as(Drain::kCompleted);
  EXPECT_EQ(lost.lost, 1);
  while (lost.left > 0) lost = engine.go_on();  // nothing more is copied: they are lost
  engine.run();
  EXPECT_EQ(engine.tokens, expected(make()));
  EXPECT_EQ(engine.engine->pool().info().shared, 1);
  EXPECT_FAILS(engine.controller->sleep({.preserve_state = true}), Code::kUnsupported, "never proven");
  // A rank keeps what such a copy may use until the process ends; here somebody can still name it.
  static auto* const kept = new std::vector<Engine>;
  kept->push_back(std::move(engine));
}

TEST_P(PostCopyWake, S9DeferredBlocksAreNeitherReadNorEvicted) {
  ReferenceOptions small = options();
  small.num_blocks = 14;
  Engine engine = make(small);
  Engine reference = make(small);
  for (Engine* const each : {&engine, &reference}) {
    add(*each, "a", 100, 6, 26);  // eight blocks in the end
    add(*each, "old", 500, 17, 1);
    each->step(4);
  }
  const uint64_t evictions = engine.engine->pool().info().evictions;
  (void)sleep(engine);
  const SleepReport woken = wake_early(engine);
  EXPECT_EQ(woken.deferred_blocks, 4);  // of "old", which is over
  for (Engine* const each : {&engine, &reference}) {
    add(*each, "new", 500, 17, 2);    // finds what "old" has computed
    add(*each, "large", 900, 30, 1);  // wants the room of all that is cached
  }
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(engine.step(), Ids{"a"});
    EXPECT_EQ(engine.engine->pool().info().evictions, evictions);
  }
  EXPECT_EQ(engine.engine->counts().hit_tokens, 0);
  (void)engine.go_on(DeferredWait::kAll);
  engine.step();
  EXPECT_EQ(engine.engine->counts().hit_tokens, 16);
  engine.run();
  reference.run();
  EXPECT_EQ(engine.tokens, reference.tokens);
}

TEST_P(PostCopyWake, I7WhereverTheDeviceFailsTheWakeIsUndoneOrWhatCameLateIsComputedAgain) {
  const auto tokens = expected(make());
  int undone = 0;
  for (uint64_t n = 1;; ++n) {
    SCOPED_TRACE(n);
    Engine engine = make();
    begin(engine);
    (void)sleep(engine);
    engine.devices.back()->fail_at(n);
    const Result<SleepReport> woken = engine.controller->wake_up({.early = true});
    if (woken) (void)engine.go_on(DeferredWait::kAll);
    const bool fired = engine.devices.back()->fired();
    engine.devices.back()->fail_at(0);
    if (!woken) {
      ++undone;
      EXPECT_TRUE(engine.controller->is_sleeping());
      EXPECT_EQ(engine.engine->memory().ledger().device_physical_bytes, 0u);
      wake_early(engine);
    }
    (void)engine.go_on(DeferredWait::kAll);
    engine.run();
    EXPECT_EQ(engine.tokens, tokens);
    if (!fired) break;
  }
  EXPECT_GT(undone, 3);
}

TEST_P(PostCopyWake, WhereWeightsAreToBeLoadedOrKvIsDroppedAllIsBackFirst) {
  for (const Weights weights : {Weights::kReload, Weights::kStore}) {
    Engine engine = make();
    begin(engine);
    ASSERT_SUCCEEDS(
        engine.controller->sleep({.preserve_state = true, .to_disk = GetParam().to_disk, .weights = weights}));
    const OldKv old_kv = weights == Weights::kStore ? OldKv::kRecompute : OldKv::kUnsaid;
    const SleepReport woken = value_of(engine.controller->wake_up({.old_kv = old_kv, .early = true}));
    EXPECT_EQ(woken.deferred_blocks, 0);
    EXPECT_EQ(woken.deferred_bytes, 0u);
    if (weights == Weights::kReload) {
      EXPECT_FALSE(woken.fully_awake);
      engine.engine->load_weights(1);
      ASSERT_SUCCEEDS(engine.controller->wake_up({.old_kv = OldKv::kKeep, .early = true}));
    }
    engine.run();
    EXPECT_EQ(engine.tokens, expected(make()));
    (void)sleep(engine);  // the ranks have nothing on its way any more
    ASSERT_SUCCEEDS(engine.controller->wake_up({}));
  }
}

TEST_P(PostCopyWake, AnEngineThatCannotHoldBlocksBackWakesWhole) {
  SleepingEngine slept(linux_file_system(), directory_.path(), {.ranks = GetParam().ranks});
  add_example_requests(slept.engine);
  slept.engine.step();
  ASSERT_SUCCEEDS(slept.controller.sleep({.preserve_state = true}));
  EXPECT_EQ(value_of(slept.controller.wake_up({.early = true})).deferred_blocks, 0);
  EXPECT_EQ(finish(slept.engine), uninterrupted({.ranks = GetParam().ranks}));
}

TEST_P(PostCopyWake, AfterOneThatDroppedTheKvAndFailedNothingIsDeferred) {
  const auto slept = make_asleep();
  slept->engine.fail_hook("rank finish");
  EXPECT_FAILS(slept->controller.wake_up({.old_kv = OldKv::kRecompute}), Code::kInternal, "rank finish");
  EXPECT_TRUE(slept->controller.is_sleeping());
  EXPECT_EQ(value_of(slept->controller.wake_up({.early = true})).deferred_blocks, 0);
  EXPECT_EQ(finish(slept->engine), uninterrupted({.ranks = GetParam().ranks}));
}

TEST_P(PostCopyWake, I7WhateverHookOrOrderFailsItIsUndoneOrCanBeRepeated) {
  const TestEngine::Tokens tokens = uninterrupted({.ranks = GetParam().ranks});
  for (const char* hook : {"rank restore", "reconnect", "hold_blocks", "rank finish"}) {
    SCOPED_TRACE(hook);
    const auto slept = make_asleep();
    const uint64_t asleep = slept->engine.device().info().physical_bytes;
    slept->engine.fail_hook(hook);
    EXPECT_FAILS(slept->controller.wake_up({.early = true}), Code::kInternal, hook);
    EXPECT_TRUE(slept->controller.is_sleeping());
    EXPECT_EQ(slept->engine.device().info().physical_bytes, asleep);
    EXPECT_GT(value_of(slept->controller.wake_up({.early = true})).deferred_blocks, 0);
    EXPECT_FALSE(slept->engine.step());
    EXPECT_EQ(value_of(slept->controller.continue_wake(DeferredWait::kAll)).left, 0);
    EXPECT_EQ(finish(slept->engine), tokens);
  }
  for (const char* hook : {"rank poll_restore", "release_blocks"}) {
    SCOPED_TRACE(hook);
    const auto slept = make_asleep();
    const int64_t late = value_of(slept->controller.wake_up({.early = true})).deferred_blocks;
    for (const bool sleep : {false, true}) {
      slept->engine.fail_hook(hook);
      if (sleep) {
        EXPECT_FAILS(slept->controller.sleep({.preserve_state = true}), Code::kInternal, hook);
      } else {
        EXPECT_FAILS(slept->controller.continue_wake(DeferredWait::kAll), Code::kInternal, hook);
      }
      EXPECT_FALSE(slept->controller.is_sleeping());
      EXPECT_FALSE(slept->engine.step());
    }
    EXPECT_EQ(value_of(slept->controller.continue_wake(DeferredWait::kAll)).arrived, late);
    EXPECT_EQ(finish(slept->engine), tokens);
  }
  if (!GetParam().to_disk) return;
  const auto slept = make_asleep();
  const std::string checkpoint = slept->controller.state().checkpoint;
  for (const char* hook : {"rank restore", "restore", "hold_blocks", "resume"}) {
    SCOPED_TRACE(hook);
    SleepingEngine woken(linux_file_system(), directory_.path(), {.ranks = GetParam().ranks});
    woken.engine.can_hold = true;
    woken.engine.set_tokens(slept->engine.tokens());
    woken.engine.fail_hook(hook);
    EXPECT_FAILS(woken.controller.wake_up({.from_checkpoint = checkpoint, .early = true}), Code::kInternal, hook);
    EXPECT_FALSE(woken.engine.frozen());
    EXPECT_EQ(value_of(woken.engine.unfinished_requests()), 0);
    EXPECT_GT(value_of(woken.controller.wake_up({.from_checkpoint = checkpoint, .early = true})).deferred_blocks, 0);
    EXPECT_EQ(value_of(woken.controller.continue_wake(DeferredWait::kAll)).left, 0);
    EXPECT_EQ(finish(woken.engine), tokens);
  }
  for (const bool keep : {false, true}) {  // blocks come while a wake is held
    SCOPED_TRACE(keep);
    SleepingEngine woken(linux_file_system(), directory_.path(), {.ranks = GetParam().ranks});
    woken.engine.can_hold = true;
    woken.engine.set_tokens(slept->engine.tokens());
    const WakeOptions held{.from_checkpoint = checkpoint, .hold = true, .early = true};
    const int64_t deferred = value_of(woken.controller.wake_up(held)).deferred_blocks;
    EXPECT_GT(deferred, 0);
    ASSERT_SUCCEEDS(woken.controller.end_hold(keep));
    const WakeProgress after = value_of(woken.controller.continue_wake(DeferredWait::kAll));
    EXPECT_EQ(after.arrived, keep ? deferred : 0);  // none comes into blocks that are given out anew
    EXPECT_EQ(after.left, 0);
    EXPECT_EQ(value_of(woken.engine.unfinished_requests()) == 0, !keep);
    if (keep) {
      EXPECT_EQ(finish(woken.engine), tokens);
    }
  }
}

// On a thread of their own, in whatever order that takes.
TEST_P(PostCopyWake, BlocksComeBehindAnEngineThatDoesNotAskOrIsGone) {
  ReferenceOptions threads = options();
  threads.deferred_thread = true;
  const auto tokens = expected(make());
  for (const bool stays : {true, false}) {
    Engine engine = make(threads);
    begin(engine);
    (void)sleep(engine);
    wake_early(engine);
    engine.step();
    if (!stays) continue;  // the engine ends with blocks on their way
    EXPECT_EQ(engine.go_on(DeferredWait::kAll).left, 0);
    engine.run();
    EXPECT_EQ(engine.tokens, tokens);
  }
}

TEST_P(PostCopyWake, NothingElseIsDoneWithMemoryThatIsWrittenInto) {
  Engine engine = make();
  begin(engine);
  (void)sleep(engine);
  wake_early(engine);
  RankMemory& memory = engine.engine->memory();
  EXPECT_FAILS(call_rank(memory, orders::Save{.tags = {"kv_cache"}}), Code::kFailedPrecondition, "on their way");
  EXPECT_FAILS(call_rank(memory, orders::Detach{.tags = {"kv_cache"}}), Code::kFailedPrecondition, "on their way");
  EXPECT_FAILS(call_rank(memory, orders::Restore{.checkpoint = orders::CheckpointSource{}}), Code::kFailedPrecondition,
               "on their way");
  // What a rank has told once it tells again to who has not heard it.
  (void)value_of(call_rank(memory, orders::PollRestore{.seen = {0, 0}, .wait = DeferredWait::kSome}));
  EXPECT_EQ(engine.go_on().arrived, 1);
  (void)engine.go_on(DeferredWait::kAll);
  EXPECT_TRUE(value_of(call_rank(memory, orders::PollRestore{})).ended);
  EXPECT_GT(memory.ledger().tags.at("kv_cache").physical_bytes, 0u);
}

TEST_P(PostCopyWake, WhatIsWantedComesNextAndWhatIsForgoneNotAtAll) {
  std::vector<int32_t> ids;  // in their order
  for (const bool learns : {true, false}) {
    Engine engine = make();
    begin(engine), (void)sleep(engine), wake_early(engine);
    orders::PollRestore order{.seen = {0, 0}, .wait = DeferredWait::kAll};
    if (!learns) order.wait = DeferredWait::kSome, order.wanted = {ids.back()};
    for (const DeferredArrival& each : value_of(call_rank(engine.engine->memory(), order)).arrivals) {
      EXPECT_TRUE(learns || each.block == ids.back());
      if (learns) ids.push_back(each.block);
    }
    if (learns) continue;
    const WakeProgress rest = value_of(engine.controller->continue_wake(DeferredWait::kNone, {.skipped = ids}));
    EXPECT_EQ(rest.skipped, static_cast<int64_t>(ids.size()) - (GetParam().ranks == 1 ? 1 : 0));
  }
}

}  // namespace
}  // namespace torpor
