// Whatever is thrown, wherever, in a sleep, a wake or a checkpoint: every allocation fails in turn, once and for as
// long as the call lasts; every start of a thread fails in turn; every hook throws in turn, before it has done its work
// and after. The engine (two ranks, to host and to disk) is then awake and unchanged, or asleep, or lost and says so;
// `state_changed` is what happened; a retry works, and every token is that of a run to which nothing happened.
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include "allocator/host_device.h"
#include "engine/reference/reference_engine.h"
#include "engine/sleep_controller.h"
#include "engine/tag_sleep.h"
#include "tests/proof/workloads.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace {

// Fails the n-th time, or from then on.
struct Fuse {
  std::atomic<bool> armed = false;
  std::atomic<uint64_t> count = 0;
  uint64_t at = 0;
  bool for_ever = false;

  void arm(uint64_t n, bool from_then_on) {
    at = n;
    for_ever = from_then_on;
    count = 0;
    armed = true;
  }
  bool disarm() {  // whether it has fired
    armed = false;
    return count >= at;
  }
  bool fires() {
    if (!armed) return false;
    const uint64_t now = ++count;
    return now == at || (for_ever && now > at);
  }
} allocations, thread_starts;

void* allocate(std::size_t size, std::size_t alignment = 0) {
  if (allocations.fires()) throw std::bad_alloc();
  void* memory = alignment == 0 ? std::malloc(size == 0 ? 1 : size)
                                : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// Not inlined: the compiler would see malloc()'s memory freed by what is no match for operator new.
[[gnu::noinline]] void give_back(void* memory) noexcept { std::free(memory); }

}  // namespace

void* operator new(std::size_t size) { return allocate(size); }
void* operator new[](std::size_t size) { return allocate(size); }
void* operator new(std::size_t size, std::align_val_t at) { return allocate(size, static_cast<std::size_t>(at)); }
void* operator new[](std::size_t size, std::align_val_t at) { return allocate(size, static_cast<std::size_t>(at)); }
void operator delete(void* memory) noexcept { give_back(memory); }
void operator delete[](void* memory) noexcept { give_back(memory); }
void operator delete(void* memory, std::size_t) noexcept { give_back(memory); }
void operator delete[](void* memory, std::size_t) noexcept { give_back(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { give_back(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { give_back(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { give_back(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { give_back(memory); }

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*work)(void*),
                              void* argument) {
  static const auto real = reinterpret_cast<decltype(&pthread_create)>(::dlsym(RTLD_NEXT, "pthread_create"));
  if (thread_starts.fires()) return EAGAIN;
  return real(thread, attributes, work, argument);
}

namespace torpor::proof {
namespace {

using reference::ReferenceEngine;
using reference::ReferenceOptions;
using reference::ReferenceOutput;
using reference::Sampling;
using Tokens = std::map<std::string, std::vector<int32_t>>;

constexpr size_t kRanks = 2;

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
  Result<SchedulerCheckpoint> capture() override {
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

struct Machine {
  explicit Machine(const std::string& directory)
      : hooks(*engine), controller(hooks, linux_file_system(), system_clock(), options(directory)) {}
  static std::unique_ptr<ReferenceEngine> make() {
    std::vector<std::unique_ptr<DeviceMemory>> devices;
    for (size_t rank = 0; rank < kRanks; ++rank) devices.push_back(test::value_of(make_host_device()));
    return test::value_of(ReferenceEngine::create(std::move(devices), linux_file_system(), system_clock(),
                                                  ReferenceOptions{.weight_bytes = 8192, .num_blocks = 24}));
  }
  static SleepControllerOptions options(const std::string& directory) {
    // Of the cached blocks only two are kept: the hashes of others are dropped.
    return {.directory = directory, .kv_budget_bytes = 2 * 2 * 4 * 32};
  }
  std::unique_ptr<ReferenceEngine> engine = make();
  ThrowingHooks hooks;
  SleepController controller;
};

void begin(ReferenceEngine& engine) {
  const std::vector<int32_t> shared{5, 6, 7, 8, 9, 10, 11, 12, 13};
  ASSERT_SUCCEEDS(engine.add({.id = "greedy", .prompt = shared, .max_tokens = 12}));
  ASSERT_SUCCEEDS(
      engine.add({.id = "seeded", .prompt = shared, .max_tokens = 9, .sampling = Sampling::kSeeded, .seed = 11}));
  ASSERT_SUCCEEDS(engine.add({.id = "free", .prompt = {1, 2}, .max_tokens = 14, .sampling = Sampling::kUnseeded}));
  ASSERT_SUCCEEDS(engine.add({.id = "short", .prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, .max_tokens = 1}));
}

void run(ReferenceEngine& engine, Tokens& tokens, int steps = 1000) {
  for (int step = 0; step < steps && !engine.idle(); ++step) {
    for (const ReferenceOutput& output : engine.step()) tokens[output.id].push_back(output.token);
    if (engine.frozen()) return;
  }
}

const Tokens& uninterrupted() {
  static const Tokens tokens = [] {
    Tokens made;
    const std::unique_ptr<ReferenceEngine> engine = Machine::make();
    begin(*engine);
    run(*engine, made);
    return made;
  }();
  return tokens;
}

// One engine after the other on the same directory of checkpoints, and what came out of them.
struct World {
  World() { restart(); }
  void restart() {
    machine.reset();
    machine = std::make_unique<Machine>(temporary / "store");
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
  test::TemporaryDirectory temporary{test::in_memory()};
  std::unique_ptr<Machine> machine;
  Tokens tokens;
};

// What a caller can see of an engine: its requests, what they hold, their generators. Not what is only cached.
struct Seen {
  explicit Seen(World& world) : state(world.state()), checkpoints(world.checkpoints()) {
    SchedulerCheckpoint captured = test::value_of(world.machine->engine->capture());
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

// Made before anything is made to fail.
struct Arguments {
  explicit Arguments(const std::string& directory) {
    from_checkpoint.from_checkpoint = on_hold.from_checkpoint = directory;
    on_hold.hold = true;
  }
  SleepOptions recompute{.in_flight = "recompute"};
  WakeOptions wake;
  WakeOptions from_checkpoint;
  WakeOptions on_hold;
  Value nothing;
};

struct Scenario {
  const char* name;
  void (*prepare)(World&);
  Status (*work)(SleepController&, const Arguments&);
};

const SleepOptions kToHost{.preserve_state = true};
const SleepOptions kToDisk{.preserve_state = true, .to_disk = true};

Status status_of(Result<SleepReport> report) { return report ? ok() : Status(std::move(report).error()); }
void serve(World& world) { world.serve(); }
void sleep_to_host(World& world) {
  world.serve();
  ASSERT_SUCCEEDS(world.controller().sleep(kToHost));
}
void sleep_to_disk(World& world) {
  world.serve();
  ASSERT_SUCCEEDS(world.controller().sleep(kToDisk));
}
void leave_a_checkpoint(World& world) {
  sleep_to_disk(world);
  world.restart();
}
void hold(World& world) {
  leave_a_checkpoint(world);
  ASSERT_SUCCEEDS(world.controller().wake_up({.from_checkpoint = world.temporary / "store", .hold = true}));
}

const std::vector<Scenario>& scenarios() {
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
  };
  return all;
}

struct Counts {
  uint64_t tried = 0;     // faults that fired
  uint64_t absorbed = 0;  // the call succeeded all the same
  uint64_t undone = 0;    // as if it had not been called
  uint64_t changed = 0;   // not lost, but said to have changed something
  uint64_t lost = 0;
};

// From whatever state that is not lost: on to the end of all requests.
void expect_the_same_tokens(World& world) {
  if (world.state() == "waking") {
    ASSERT_SUCCEEDS(world.controller().end_hold(true));
  }
  if (world.state() == "asleep") {
    ASSERT_SUCCEEDS(world.controller().wake_up({}));
  }
  ASSERT_EQ(world.state(), "awake");
  ASSERT_FALSE(world.machine->engine->frozen());
  run(*world.machine->engine, world.tokens);
  ASSERT_EQ(world.tokens, uninterrupted());
}

// One trial; false: there was nothing left to fail.
template <class Arm, class Disarm>
void attempt(const Scenario& scenario, Counts& counts, bool& fired, const Arm& arm, const Disarm& disarm) {
  World world;
  scenario.prepare(world);
  if (testing::Test::HasFatalFailure()) return;
  const std::string directory = world.temporary / "store";
  const Arguments with(directory);
  const Seen before(world);
  arm(world);
  const Status done = scenario.work(world.controller(), with);
  fired = disarm(world);
  if (fired) ++counts.tried;
  const Seen after(world);
  if (done) {
    if (fired) ++counts.absorbed;
    ASSERT_NE(after.state, "lost");
    return expect_the_same_tokens(world);
  }
  SCOPED_TRACE(done.error().to_string());
  ASSERT_TRUE(fired);
  if (after.state == "lost") {
    ++counts.lost;
    ASSERT_TRUE(done.error().state_changed);
    EXPECT_FAILS(world.controller().wake_up({}), Code::kFailedPrecondition, "lost");
    EXPECT_FAILS(world.controller().sleep(kToHost), Code::kFailedPrecondition, "lost");
    if (after.checkpoints.empty()) return;
    // What is on disk goes on in a new engine. It was not gone on with, so it is not marked.
    ASSERT_EQ(after.checkpoints.back().find("woken"), std::string::npos);
    world.restart();
    ASSERT_SUCCEEDS(world.controller().wake_up({.from_checkpoint = directory}));
    return expect_the_same_tokens(world);
  }
  ASSERT_EQ(after.state, before.state);
  ++(done.error().state_changed ? counts.changed : counts.undone);
  const bool changed = !(after == before);
  // Where a hook that cannot be undone failed, only it knows how far it came.
  const bool perhaps = done.error().what.find("; its requests may be ") != std::string::npos;
  ASSERT_TRUE(done.error().state_changed == changed || (perhaps && done.error().state_changed))
      << "changed: " << changed << ", checkpoints " << testing::PrintToString(after.checkpoints);
  ASSERT_EQ(world.machine->engine->frozen(), after.state != "awake");
  ASSERT_SUCCEEDS(scenario.work(world.controller(), with));
  expect_the_same_tokens(world);
}

// Every n-th occasion of every scenario, until none is left.
template <class Arm, class Disarm>
Counts fail_each(uint64_t stride, const Arm& arm, const Disarm& disarm) {
  Counts counts;
  for (const Scenario& scenario : scenarios()) {
    SCOPED_TRACE(scenario.name);
    for (uint64_t n = 1;; n += stride) {
      SCOPED_TRACE(testing::Message() << "occasion " << n);
      bool fired = false;
      attempt(
          scenario, counts, fired, [&](World& world) { arm(world, n); }, disarm);
      if (testing::Test::HasFatalFailure()) return counts;
      if (!fired) break;
    }
  }
  return counts;
}

void print(const char* what, const Counts& counts) {
  const auto number = [](uint64_t n) { return static_cast<unsigned long>(n); };
  std::printf("proof: %lu %s: %lu absorbed, %lu undone, %lu undone but for what they said, %lu lost and said so\n",
              number(counts.tried), what, number(counts.absorbed), number(counts.undone), number(counts.changed),
              number(counts.lost));
}

class EngineFaults : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    ::setenv("TORPOR_LOG", "off", 0);
    (void)uninterrupted();
  }
};

TEST_F(EngineFaults, EveryAllocationFails) {
  for (const bool for_ever : {false, true}) {
    const Counts counts = fail_each(
        long_run() ? 1
        : for_ever ? 31
                   : 5,
        [&](World&, uint64_t n) { allocations.arm(n, for_ever); }, [](World&) { return allocations.disarm(); });
    print(for_ever ? "allocations failed from then on" : "allocations failed once", counts);
    if (!for_ever) {
      EXPECT_EQ(counts.lost, 0u);
      EXPECT_GT(counts.tried, 1000u);
    }
  }
}

TEST_F(EngineFaults, EveryStartOfAThreadFails) {
  for (const bool for_ever : {false, true}) {
    const Counts counts = fail_each(
        1, [&](World&, uint64_t n) { thread_starts.arm(n, for_ever); }, [](World&) { return thread_starts.disarm(); });
    print(for_ever ? "thread starts failed from then on" : "thread starts failed once", counts);
    EXPECT_EQ(counts.lost, 0u);
    EXPECT_GE(counts.tried, 4u);  // few are started in an operation
  }
}

// Those of an engine's lanes and streams.
TEST_F(EngineFaults, EveryStartOfAThreadFailsWhenAnEngineIsMade) {
  uint64_t tried = 0;
  for (const bool for_ever : {false, true}) {
    for (uint64_t n = 1;; ++n) {
      SCOPED_TRACE(testing::Message() << "start " << n << (for_ever ? " and all after" : ""));
      std::vector<std::unique_ptr<DeviceMemory>> devices;
      for (size_t rank = 0; rank < kRanks; ++rank) devices.push_back(test::value_of(make_host_device()));
      thread_starts.arm(n, for_ever);
      auto engine = ReferenceEngine::create(std::move(devices), linux_file_system(), system_clock(), {});
      if (!thread_starts.disarm()) {
        ASSERT_SUCCEEDS(engine);
        break;
      }
      ++tried;
      EXPECT_FAILS(engine, Code::kResourceExhausted, "thread");
    }
  }
  std::printf("proof: %lu thread starts failed while an engine was made: an error each\n",
              static_cast<unsigned long>(tried));
  EXPECT_GE(tried, 2 * kRanks * 2);
}

TEST_F(EngineFaults, EveryHookThrows) {
  for (const bool for_ever : {false, true}) {
    Counts all;
    for (const bool after : {false, true}) {
      for (const Thrown thrown : {Thrown::kRuntimeError, Thrown::kBadAlloc, Thrown::kNumber}) {
        const Counts counts = fail_each(
            1,
            [&](World& world, uint64_t n) {
              ThrowingHooks& hooks = world.machine->hooks;
              hooks.thrown = thrown;
              hooks.after = after;
              hooks.fuse.arm(n, for_ever);
            },
            [](World& world) { return world.machine->hooks.fuse.disarm(); });
        if (HasFatalFailure()) return;
        all.tried += counts.tried;
        all.absorbed += counts.absorbed;
        all.undone += counts.undone;
        all.changed += counts.changed;
        all.lost += counts.lost;
      }
    }
    print(for_ever ? "hooks threw from then on" : "hooks threw once", all);
    EXPECT_GT(all.tried, 300u);
  }
}

// The same of tags without a controller (tag_sleep.h).
TEST_F(EngineFaults, EveryAllocationFailsInTheMemoryOfTags) {
  constexpr uint64_t kSize = 64 * 1024;
  Counts counts;
  for (const bool waking : {false, true}) {
    for (const bool for_ever : {false, true}) {
      for (uint64_t n = 1;; ++n) {
        SCOPED_TRACE(testing::Message() << (waking ? "wake" : "sleep") << ", allocation " << n
                                        << (for_ever ? " and all after" : ""));
        const auto memory = test::value_of(RankMemory::create(test::value_of(make_host_device()), linux_file_system(),
                                                              {.arena_slab_bytes = 64 << 10, .threads = 1}));
        const std::vector<std::string> kept{"kept"};
        const DeviceAddress address = test::value_of(memory->allocate("kept", "x", kSize));
        for (const char* tag : {"kept", "other"}) test::value_of(memory->allocate(tag, "y", kSize));
        auto* const bytes = reinterpret_cast<unsigned char*>(address);  // NOLINT(performance-no-int-to-ptr)
        for (uint64_t i = 0; i < kSize; ++i) bytes[i] = static_cast<unsigned char>(i * 7);
        if (waking) {
          ASSERT_SUCCEEDS(TagSleep(*memory).sleep({}, kept));
        }
        allocations.arm(n, for_ever);
        Result<TagMove> moved = waking ? TagSleep(*memory).wake({}) : TagSleep(*memory).sleep({}, kept);
        const bool fired = allocations.disarm();
        for (const auto& [tag, state] : memory->states()) {
          ASSERT_EQ(is_asleep(state), waking == !moved) << tag << " is " << name(state);
          ASSERT_TRUE(is_asleep(state) || state == RegionState::kAttached) << tag << " is " << name(state);
        }
        if (!moved) {
          ASSERT_TRUE(fired);
          ASSERT_FALSE(moved.error().state_changed);
          ++counts.undone;
          moved = waking ? TagSleep(*memory).wake({}) : TagSleep(*memory).sleep({}, kept);
          ASSERT_SUCCEEDS(moved);
        } else if (fired) {
          ++counts.absorbed;
        }
        if (!waking) {
          ASSERT_SUCCEEDS(TagSleep(*memory).wake({}));
        }
        for (uint64_t i = 0; i < kSize; ++i) ASSERT_EQ(bytes[i], static_cast<unsigned char>(i * 7)) << i;
        if (!fired) break;
        ++counts.tried;
      }
    }
  }
  print("allocations failed in the memory of tags", counts);
  EXPECT_GT(counts.undone, 100u);
}

}  // namespace
}  // namespace torpor::proof
