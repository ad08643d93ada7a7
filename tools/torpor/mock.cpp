// SPDX-License-Identifier: Apache-2.0
// mock: a small engine that serves made-up chats, to look at, stop, record and replay without vLLM and without a GPU.
#include <unistd.h>

#include <chrono>
#include <functional>
#include <random>
#include <thread>

#include <fmt/core.h>

#include "base/mutex.h"
#include "console/control_server.h"
#include "console/event_files.h"
#include "console/reference_run.h"
#include "tools/torpor/text.h"
#include "tools/torpor/verb.h"

namespace torpor::cli {
namespace {

using namespace std::chrono_literals;

constexpr auto kTurn = 10ms;
constexpr int kSleepEvery = 300;  // turns
constexpr int kAsleep = 50;
constexpr size_t kChats = 8;  // at the same time

class Chats {
 public:
  // Turns of chats that share a beginning: their blocks are found again.
  reference::ReferenceRequest next() {
    const auto chat = static_cast<int32_t>(random_() % kChats);
    std::vector<int32_t> prompt(48, chat);
    for (uint64_t more = random_() % 96; more > 0; --more) prompt.push_back(static_cast<int32_t>(random_() % 1000));
    return {.id = fmt::format("chat-{}-{}", chat, ++count_),
            .prompt = std::move(prompt),
            .max_tokens = static_cast<int32_t>(20 + random_() % 120)};
  }
  bool comes() { return random_() % 12 == 0; }

 private:
  std::mt19937_64 random_{5};
  uint64_t count_ = 0;
};

// The engine goes before the server.
struct Served {
  explicit Served(console::ControlServer& server) : server(server) {}
  ~Served() {
    server.serve(static_cast<console::OffloadAccess*>(nullptr));
    server.serve(static_cast<console::FrontAccess*>(nullptr));
  }
  console::ControlServer& server;
};

// Of the made-up engine, between two of its turns.
class MockOffload final : public console::OffloadAccess {
 public:
  MockOffload(Mutex& mutex, console::ReferenceRun& run) : mutex_(mutex), run_(run) {}
  Status use(const std::function<Status(OffloadScheduler&)>& work) override {
    const MutexLock lock(mutex_);
    return work(*run_.engine().offload());
  }
  Result<std::vector<BlockKey>> keys_of(const std::string& request) override {
    return Error{.code = Code::kUnsupported,
                 .what = fmt::format("a made-up engine has no keys of {}", request),
                 .next_step = "give keys"};
  }

 private:
  Mutex& mutex_;
  console::ReferenceRun& run_;
};

// It is its own server: what is asked of that is done between two of its turns.
class MockFront final : public console::FrontAccess {
 public:
  MockFront(Mutex& mutex, console::ReferenceRun& run, console::RunClock& clock)
      : mutex_(mutex), run_(run), clock_(clock) {}
  void begin(const console::ControlMethod& method, const nlohmann::json& params,
             const std::shared_ptr<console::FrontCall>& call) override {
    call->end(try_catch([&] { return carry_out(method, params); }));
  }

 private:
  Result<Json> carry_out(const console::ControlMethod& method, const nlohmann::json& params) {
    const MutexLock lock(mutex_);
    clock_.set(system_clock().now());
    const SleepOptions options{.level = static_cast<int>(params.value("level", 1.0)),
                               .preserve_state = params.value("preserve_state", true),
                               .to_disk = params.value("to", "host") == "disk"};
    if (method.call == console::ControlCall::kPlan) {
      TORPOR_ASSIGN_OR_RETURN(const SleepPlan plan, run_.controller().plan_sleep(options));
      return Json{{"save_bytes", plan.save_bytes}, {"free_bytes", plan.free_bytes}, {"problems", plan.problems}};
    }
    if (method.call == console::ControlCall::kCheckpoint) {
      return Error{.code = Code::kUnsupported,
                   .what = "a made-up engine writes no checkpoint while it serves",
                   .next_step = "sleep to=disk"};
    }
    TORPOR_ASSIGN_OR_RETURN(const SleepReport report,
                            method.call == console::ControlCall::kSleep ? run_.sleep(options) : run_.wake({}));
    return Json{{"changed", report.changed}, {"seconds", report.seconds}, {"note", report.note}};
  }
  Mutex& mutex_;
  console::ReferenceRun& run_;
  console::RunClock& clock_;
};

Result<Exit> mock(const Context& context) {
  const Arguments& arguments = context.arguments;
  const std::string directory = arguments.path.empty() ? console::default_event_directory() : arguments.path;
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<EventRing> ring,
                          console::begin_events(directory, "mock", 0, system_clock()));
  TORPOR_ASSIGN_OR_RETURN(const auto server,
                          console::ControlServer::start(*ring, system_clock(), console::ControlRole::kOperate));
  console::RunClock clock;
  clock.set(system_clock().now());
  console::ReferenceRun run({.files = context.file_system, .directory = directory}, *ring, clock);
  console::RunOptions options;
  options.engine = {.num_blocks = 192, .token_budget = 64, .transfers_have_threads = false};
  options.engine.model.block_tokens = 8;
  options.engine.tiers = {.host_blocks = 512};
  options.blocks = arguments.blocks;
  TORPOR_RETURN_IF_ERROR(run.begin(options));
  context.write(fmt::format("a made-up engine publishes its events in {}; torpor console, torpor live\n", directory));
  const EventPort port(*ring, system_clock());
  Mutex mutex;
  MockOffload offload(mutex, run);
  server->serve(&offload);
  MockFront front(mutex, run, clock);
  server->serve(&front);
  const Served served(*server);
  Chats chats;
  const auto began = std::chrono::steady_clock::now();
  int wakes_at = 0;  // the turn, if it sleeps by itself
  for (int turn = 1; !context.interrupted(); ++turn) {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - began;
    if (arguments.for_seconds > 0 && passed.count() >= arguments.for_seconds) break;
    std::this_thread::sleep_for(kTurn);
    const MutexLock lock(mutex);
    clock.set(system_clock().now());
    if (chats.comes()) TORPOR_RETURN_IF_ERROR(run.add(chats.next()));
    (void)run.step_offload();
    if (port.may_step()) (void)run.step();
    if (!run.controller().is_sleeping()) wakes_at = 0;  // or somebody has woken it
    if (!port.may_step()) continue;                     // what it does by itself would end what somebody has stopped
    if (wakes_at != 0 && turn >= wakes_at) {
      TORPOR_RETURN_IF_ERROR(run.wake({}));
    } else if (turn % kSleepEvery == 0 && !run.controller().is_sleeping()) {
      TORPOR_RETURN_IF_ERROR(run.sleep({.level = 1, .preserve_state = true}));
      wakes_at = turn + kAsleep;
    }
  }
  return kFine;
}

}  // namespace

Verb mock_verb() {
  return {.name = "mock",
          .help = "a small engine that serves made-up chats, to look at, stop, record and replay without a GPU",
          .json = "none: it runs until it is interrupted",
          .declare =
              [](CLI::App& app, Arguments& a) {
                app.add_option("path", a.path,
                               "a directory on tmpfs for its events; default: $XDG_RUNTIME_DIR/torpor, else "
                               "/dev/shm/torpor-UID");
                app.add_flag("--blocks", a.blocks, "with an event for each state of each block");
                app.add_option("--for", a.for_seconds, "seconds, or 10m: and no longer")
                    ->transform(CLI::AsNumberWithUnit(std::map<std::string, double>{{"s", 1}, {"m", 60}, {"h", 3600}},
                                                      CLI::AsNumberWithUnit::CASE_SENSITIVE, "TIME"));
              },
          .stream = mock};
}

}  // namespace torpor::cli
