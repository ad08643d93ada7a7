// SPDX-License-Identifier: Apache-2.0
// What an engine is in the middle of when something fails: a reference engine with two ranks that serves, sleeps, wakes
// or is checkpointed, what can be seen of it, and the run to which nothing happens.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "allocator/host_device.h"
#include "engine/reference/reference_engine.h"
#include "engine/sleep_controller.h"
#include "engine/tags.h"
#include "tests/proof/failing_calls.h"
#include "tests/proof/workloads.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::proof::engine_faults {

using reference::ReferenceEngine;
using reference::ReferenceOptions;
using reference::ReferenceOutput;
using reference::Sampling;
using Tokens = std::map<std::string, std::vector<int32_t>>;

inline constexpr size_t kRanks = 2;

// What a hook may throw.
enum class Thrown : uint8_t { kRuntimeError, kBadAlloc, kNumber };

class ThrowingHooks final : public EngineHooks {
 public:
  explicit ThrowingHooks(EngineHooks& inner) : inner_(inner) {}
  Fuse fuse;
  Thrown thrown = Thrown::kRuntimeError;
  bool after = false;  // it has done its work

  Result<std::vector<std::string>> unsupported() override {
    return run([&] { return inner_.unsupported(); });
  }
  Result<int64_t> unfinished_requests() override {
    return run([&] { return inner_.unfinished_requests(); });
  }
  Status quiesce(std::optional<double> timeout) override {
    return run([&] { return inner_.quiesce(timeout); });
  }
  Status resume() override {
    return run([&] { return inner_.resume(); });
  }
  Result<CapturedState> capture() override {
    return run([&] { return inner_.capture(); });
  }
  Result<Fingerprint> fingerprint() override {
    return run([&] { return inner_.fingerprint(); });
  }
  Status drop_requests(const std::string& mode) override {
    return run([&] { return inner_.drop_requests(mode); });
  }
  Status retire_prefix() override {
    return run([&] { return inner_.retire_prefix(); });
  }
  Status drop_prefix(const std::vector<int32_t>& blocks) override {
    return run([&] { return inner_.drop_prefix(blocks); });
  }
  Status release_derived() override {
    return run([&] { return inner_.release_derived(); });
  }
  Status rebuild_derived() override {
    return run([&] { return inner_.rebuild_derived(); });
  }
  Status reconnect(const std::vector<WorkerSnapshot>& workers) override {
    return run([&] { return inner_.reconnect(workers); });
  }
  Result<std::vector<FailedRequest>> restore(const EngineCheckpoint& checkpoint) override {
    return run([&] { return inner_.restore(checkpoint); });
  }
  Status forget_restored() override {
    return run([&] { return inner_.forget_restored(); });
  }
  Result<KvContents> kv_contents() override {
    return run([&] { return inner_.kv_contents(); });
  }
  HoldsBack holds_back() override { return inner_.holds_back(); }
  Status hold_blocks(const std::vector<int32_t>& blocks) override {
    return run([&] { return inner_.hold_blocks(blocks); });
  }
  Result<std::vector<std::string>> release_blocks(const ArrivedBlocks& blocks) override {
    return run([&] { return inner_.release_blocks(blocks); });
  }
  Result<std::vector<Bytes>> call_ranks(const Bytes& order) override {
    return run([&] { return inner_.call_ranks(order); });
  }

 private:
  template <class Work>
  auto run(const Work& work) -> decltype(work()) {
    const bool hit = fuse.fires();
    if (hit && !after) fail();
    auto result = work();
    if (hit && after) fail();
    return result;
  }
  [[noreturn]] void fail() const {
    switch (thrown) {
      case Thrown::kRuntimeError: throw std::runtime_error("injected, with more words than fit into a short string");
      case Thrown::kBadAlloc: throw std::bad_alloc();
      case Thrown::kNumber: break;
    }
    throw 7;
  }
  EngineHooks& inner_;
};

// How an engine's memory lies: 1 to 5 regions a tag (of the KV cache 2 to 4), three tags or all five of a GPU. Tokens
// do not depend on it.
struct Shape {
  size_t regions_per_tag = reference::kRegionsPerTag;
  size_t spare_kv_regions = 1;
  std::vector<std::string> step_tags{reference::kRuntimeTag};
  static Shape of(size_t number) {
    Shape shape{.regions_per_tag = 1 + number % 5, .spare_kv_regions = number % 3};
    if (number % 2 == 0) shape.step_tags = {reference::kRuntimeTag, reference::kGraphTag, kWorkspaceTag};
    return shape;
  }
};

struct Machine {
  // Without threads of its own all that is done behind the engine is done in one order, by who asks for it.
  explicit Machine(const std::string& directory, bool own_threads = true, uint64_t weights_seed = 1,
                   const Shape& shape = {})
      : engine(make(own_threads, weights_seed, shape)),
        hooks(*engine),
        controller(hooks, linux_file_system(), system_clock(), options(directory, own_threads)) {}
  static std::unique_ptr<ReferenceEngine> make(bool own_threads = true, uint64_t weights_seed = 1,
                                               const Shape& shape = {}) {
    std::vector<std::unique_ptr<DeviceMemory>> devices;
    for (size_t rank = 0; rank < kRanks; ++rank) devices.push_back(test::value_of(make_host_device()));
    return test::value_of(ReferenceEngine::create(std::move(devices), linux_file_system(), system_clock(),
                                                  ReferenceOptions{.weight_bytes = 8192,
                                                                   .weights_seed = weights_seed,
                                                                   .num_blocks = 24,
                                                                   .regions_per_tag = shape.regions_per_tag,
                                                                   .spare_kv_regions = shape.spare_kv_regions,
                                                                   .step_tags = shape.step_tags,
                                                                   .transfers_have_threads = own_threads,
                                                                   .deferred_job_bytes = 1,  // a block a job
                                                                   .deferred_thread = own_threads}));
  }
  static SleepControllerOptions options(const std::string& directory, bool own_threads) {
    // Of the cached blocks only two are kept: the hashes of others are dropped.
    return {.directory = directory, .kv_budget_bytes = 2 * 2 * 4 * 32, .own_threads = own_threads};
  }
  std::unique_ptr<ReferenceEngine> engine;
  ThrowingHooks hooks;
  SleepController controller;
};

inline void begin(ReferenceEngine& engine) {
  const std::vector<int32_t> shared{5, 6, 7, 8, 9, 10, 11, 12, 13};
  ASSERT_SUCCEEDS(engine.add({.id = "greedy", .prompt = shared, .max_tokens = 12}));
  ASSERT_SUCCEEDS(
      engine.add({.id = "seeded", .prompt = shared, .max_tokens = 9, .sampling = Sampling::kSeeded, .seed = 11}));
  ASSERT_SUCCEEDS(engine.add({.id = "free", .prompt = {1, 2}, .max_tokens = 14, .sampling = Sampling::kUnseeded}));
  ASSERT_SUCCEEDS(engine.add({.id = "short", .prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, .max_tokens = 1}));
}

inline void run(ReferenceEngine& engine, Tokens& tokens, int steps = 1000) {
  for (int step = 0; step < steps && !engine.idle(); ++step) {
    for (const ReferenceOutput& output : engine.step()) tokens[output.id].push_back(output.token);
    if (engine.frozen()) return;
  }
}

inline const Tokens& uninterrupted(uint64_t weights_seed = 1) {
  static std::map<uint64_t, Tokens> known;
  const auto [entry, fresh] = known.try_emplace(weights_seed);
  if (fresh) {
    const std::unique_ptr<ReferenceEngine> engine = Machine::make(/*own_threads=*/true, weights_seed);
    begin(*engine);
    run(*engine, entry->second);
  }
  return entry->second;
}

// One engine after the other on the same directory of checkpoints, and what came out of them.
struct World {
  explicit World(bool threads, uint64_t seed = 1, Shape shape_of_memory = {})
      : own_threads(threads), weights_seed(seed), shape(std::move(shape_of_memory)) {
    restart();
  }
  void restart() {
    machine.reset();
    machine = std::make_unique<Machine>(temporary / "store", own_threads, weights_seed, shape);
  }
  void serve() {
    begin(*machine->engine);
    run(*machine->engine, tokens, 5);
  }
  SleepController& controller() { return machine->controller; }
  std::string state() const { return machine->controller.state().engine; }
  // Names of the checkpoints that can be seen, those that were woken from with a mark.
  std::vector<std::string> checkpoints() const {
    std::vector<std::string> names;
    const auto manager = test::value_of(CheckpointManager::open(linux_file_system(), temporary / "store"));
    const auto infos = manager->list();
    if (!infos) return names;
    for (const CheckpointInfo& info : *infos) names.push_back(info.name + (info.woken ? " woken" : ""));
    return names;
  }
  const bool own_threads;
  const uint64_t weights_seed;
  const Shape shape;
  test::TemporaryDirectory temporary{test::in_memory()};
  std::unique_ptr<Machine> machine;
  Tokens tokens;
};

// What a caller can see of an engine: its requests, what they hold, their generators. Not what is only cached.
struct Seen {
  explicit Seen(World& world) : state(world.state()), checkpoints(world.checkpoints()) {
    CapturedState captured = test::value_of(world.machine->engine->capture());
    scheduler = std::move(captured.scheduler);
    groups = std::move(captured.kv.groups);
    workers = std::move(captured.workers);
  }
  std::string state;
  std::vector<std::string> checkpoints;
  SchedulerSnapshot scheduler;
  std::vector<KvGroup> groups;
  std::vector<WorkerSnapshot> workers;
  friend bool operator==(const Seen&, const Seen&) = default;
};

// From whatever state that is not lost: on to the end of all requests.
inline void expect_the_same_tokens(World& world) {
  if (world.state() == "waking") {
    ASSERT_SUCCEEDS(world.controller().end_hold(true));
  }
  if (world.state() == "asleep") {
    ASSERT_SUCCEEDS(world.controller().wake_up({}));
  }
  ASSERT_EQ(world.state(), "awake");
  ASSERT_SUCCEEDS(world.controller().continue_wake(DeferredWait::kAll));
  ASSERT_FALSE(world.machine->engine->frozen());
  run(*world.machine->engine, world.tokens);
  ASSERT_EQ(world.tokens, uninterrupted(world.weights_seed));
}

// What came of the faults.
struct Counts {
  uint64_t tried = 0;     // faults that fired
  uint64_t absorbed = 0;  // the call succeeded all the same
  uint64_t undone = 0;    // as if it had not been called
  uint64_t changed = 0;   // not lost, but said to have changed something
  uint64_t lost = 0;

  void add(const Counts& more) {
    tried += more.tried;
    absorbed += more.absorbed;
    undone += more.undone;
    changed += more.changed;
    lost += more.lost;
  }
};

inline void print(const char* what, const Counts& counts) {
  const auto number = [](uint64_t n) { return static_cast<unsigned long>(n); };
  std::printf("proof: %lu %s: %lu absorbed, %lu undone, %lu undone but for what they said, %lu lost and said so\n",
              number(counts.tried), what, number(counts.absorbed), number(counts.undone), number(counts.changed),
              number(counts.lost));
}

// Made before anything is made to fail.
struct Arguments {
  explicit Arguments(const std::string& directory) {
    from_checkpoint.from_checkpoint = on_hold.from_checkpoint = early_from_checkpoint.from_checkpoint = directory;
    on_hold.hold = true;
    early.early = early_from_checkpoint.early = true;
  }
  SleepOptions recompute{.in_flight = "recompute"};
  WakeOptions wake;
  WakeOptions from_checkpoint;
  WakeOptions on_hold;
  WakeOptions early;
  WakeOptions early_from_checkpoint;
  Value nothing;
};

struct Scenario {
  const char* name;
  void (*prepare)(World&);
  Status (*work)(SleepController&, const Arguments&);
  bool behind = false;  // it is done behind the engine
};

const SleepOptions kToHost{.preserve_state = true};
const SleepOptions kToDisk{.preserve_state = true, .to_disk = true};

inline Status status_of(Result<SleepReport> report) { return report ? ok() : Status(std::move(report).error()); }
inline void serve(World& world) { world.serve(); }
inline void sleep_to_host(World& world) {
  world.serve();
  ASSERT_SUCCEEDS(world.controller().sleep(kToHost));
}
inline void sleep_to_disk(World& world) {
  world.serve();
  ASSERT_SUCCEEDS(world.controller().sleep(kToDisk));
}
inline void leave_a_checkpoint(World& world) {
  sleep_to_disk(world);
  world.restart();
}
inline void hold(World& world) {
  leave_a_checkpoint(world);
  ASSERT_SUCCEEDS(world.controller().wake_up({.from_checkpoint = world.temporary / "store", .hold = true}));
}

inline void wake_early(World& world) {
  sleep_to_host(world);
  ASSERT_GT(test::value_of(world.controller().wake_up({.early = true})).deferred_blocks, 0);
  run(*world.machine->engine, world.tokens, 1);  // those that have their blocks
}

// As a front end does it.
inline Status checkpoint_behind(SleepController& controller, const Arguments& with) {
  const auto beyond = [&](CheckpointStage stage) -> Status {
    while (true) {
      TORPOR_ASSIGN_OR_RETURN(const CheckpointStage now, controller.continue_checkpoint());
      if (now != stage) return ok();
      std::this_thread::yield();
    }
  };
  const auto take = [&]() -> Status {
    TORPOR_RETURN_IF_ERROR(controller.begin_checkpoint());
    TORPOR_RETURN_IF_ERROR(beyond(CheckpointStage::kCopying));
    TORPOR_RETURN_IF_ERROR(controller.take_checkpoint(with.nothing));
    TORPOR_RETURN_IF_ERROR(beyond(CheckpointStage::kWriting));
    return status_of(controller.end_checkpoint());
  };
  Status taken = take();
  if (!taken) controller.cancel_checkpoint();
  return taken;
}

inline const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> all{
      {"sleep to host", serve,
       [](SleepController& controller, const Arguments&) { return status_of(controller.sleep(kToHost)); }},
      {"sleep to disk", serve,
       [](SleepController& controller, const Arguments&) { return status_of(controller.sleep(kToDisk)); }},
      {"sleep, requests computed again", serve,
       [](SleepController& controller, const Arguments& with) { return status_of(controller.sleep(with.recompute)); }},
      {"wake from host", sleep_to_host,
       [](SleepController& controller, const Arguments& with) { return status_of(controller.wake_up(with.wake)); }},
      {"wake from disk", sleep_to_disk,
       [](SleepController& controller, const Arguments& with) { return status_of(controller.wake_up(with.wake)); }},
      {"wake in a new process", leave_a_checkpoint,
       [](SleepController& controller, const Arguments& with) {
         return status_of(controller.wake_up(with.from_checkpoint));
       }},
      {"wake in a new process, on hold", leave_a_checkpoint,
       [](SleepController& controller, const Arguments& with) { return status_of(controller.wake_up(with.on_hold)); }},
      {"end of the hold", hold,
       [](SleepController& controller, const Arguments&) { return controller.end_hold(true); }},
      {"checkpoint while serving", serve,
       [](SleepController& controller, const Arguments& with) {
         return status_of(controller.checkpoint(with.nothing));
       }},
      {"checkpoint behind the engine", serve, checkpoint_behind, true},
      {"post-copy wake from host", sleep_to_host,
       [](SleepController& controller, const Arguments& with) { return status_of(controller.wake_up(with.early)); },
       true},
      {"post-copy wake from disk", sleep_to_disk,
       [](SleepController& controller, const Arguments& with) { return status_of(controller.wake_up(with.early)); },
       true},
      {"post-copy wake in a new process", leave_a_checkpoint,
       [](SleepController& controller, const Arguments& with) {
         return status_of(controller.wake_up(with.early_from_checkpoint));
       },
       true},
      {"what comes behind a post-copy wake", wake_early,
       [](SleepController& controller, const Arguments&) -> Status {
         TORPOR_RETURN_IF_ERROR(controller.continue_wake(DeferredWait::kAll));
         return ok();
       },
       true},
  };
  return all;
}

}  // namespace torpor::proof::engine_faults
