#include "tests/simulation/simulation.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include <fmt/format.h>

#include "allocator/host_device.h"
#include "console/engine_view.h"
#include "engine/reference/reference_engine.h"
#include "engine/sleep_controller.h"
#include "tests/support/faulty_device.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/manual_clock.h"

namespace torpor::test {
namespace {

using namespace std::chrono_literals;
using reference::ReferenceEngine;
using reference::ReferenceOptions;
using reference::ReferenceOutput;
using reference::ReferenceRequest;
using reference::Sampling;

struct Failed {  // ends a simulation
  std::string what;
};

struct Arrival {
  int step = 0;
  ReferenceRequest request;
  int32_t samples = 1;
};

struct Scenario {
  bool exact = false;
  ReferenceOptions options;
  bool late_copies = false;
  uint64_t shuffle_seed = 0;
  int ranks = 1;
  std::vector<Arrival> arrivals;
  std::map<std::string, int> aborts;  // id -> step
  std::optional<uint64_t> kv_budget;
  double sleep_chance = 0;
  double fault_chance = 0;  // of a step, a sleep or a wake
  double cancel_chance = 0;
  bool unproven = false;  // one copy is never proven over
};

class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }
  bool chance(double share) { return static_cast<double>(random_() >> 11) * 0x1.0p-53 < share; }
  template <class T>
  T one_of(std::initializer_list<T> items) {
    return *(items.begin() + between(0, static_cast<int64_t>(items.size()) - 1));
  }

 private:
  std::mt19937_64 random_;
};

Scenario make_scenario(uint64_t seed, Dice& dice, const std::string& directory) {
  Scenario scenario;
  scenario.exact = seed % 2 == 0;
  ReferenceOptions& options = scenario.options;
  options.model.block_tokens = static_cast<int32_t>(dice.one_of({2, 4, 8}));
  options.model.layers = static_cast<uint32_t>(dice.between(1, 3));
  options.model.token_bytes = dice.one_of({16u, 32u});
  options.weight_bytes = static_cast<uint64_t>(dice.between(100, 9000));
  options.weights_seed = seed;
  options.token_budget = static_cast<int32_t>(dice.between(3, 24));
  options.max_running = static_cast<int32_t>(dice.between(1, 6));
  options.by_priority = dice.chance(0.3);
  options.kv_of_step = scenario.exact;  // S1: a copy of another computation, if under the right key, changes tokens
  options.transfers_have_threads = seed % 4 < 2;
  options.retain_kv_bytes = seed % 3 * 20'000;  // nothing, some blocks, most
  options.num_blocks = static_cast<int32_t>(dice.between(64, scenario.exact ? 140 : 90) /
                                            options.model.block_tokens);  // a request fits, all do not
  scenario.late_copies = dice.chance(0.5);
  scenario.shuffle_seed = dice.chance(0.5) ? seed + 1 : 0;
  scenario.sleep_chance = dice.one_of({0.03, 0.1, 0.3});
  if (!scenario.exact) {
    scenario.fault_chance = dice.one_of({0.0, 0.02, 0.1});
    scenario.cancel_chance = dice.one_of({0.0, 0.1});
    scenario.unproven = dice.chance(0.03);
    if (dice.chance(0.3)) scenario.kv_budget = static_cast<uint64_t>(dice.between(0, 3000));
  }
  scenario.ranks = dice.one_of({1, 1, 2});
  reference::TierOptions& tiers = options.tiers;
  // Exactly: stores only, and nothing held, so that every step is the twin's.
  tiers.mode = scenario.exact ? OffloadMode::kLazy : dice.one_of({OffloadMode::kEager, OffloadMode::kLazy});
  tiers.loads = !scenario.exact;
  tiers.disk_directory = directory + "/tier";
  if (dice.chance(0.8)) tiers.host_blocks = static_cast<int32_t>(dice.between(4, 60));
  if (dice.chance(0.5)) tiers.disk_blocks = static_cast<int32_t>(dice.between(4, 60));
  tiers.placement.presence = dice.chance(0.7);
  if (dice.chance(0.2)) tiers.counted_keys = 1000, tiers.placement.min_uses = 2;
  tiers.offload = {.max_batch_size = static_cast<int32_t>(dice.between(1, 16)),
                   .min_batch_size = 1,
                   .flush_interval = std::chrono::milliseconds(dice.between(0, 20)),
                   .sweep_interval = std::chrono::milliseconds(dice.between(1, 20)),
                   .on_deck_batches = static_cast<int32_t>(dice.between(1, 3)),
                   .queue_blocks = dice.one_of<int64_t>({8, 1000})};

  std::vector<std::vector<int32_t>> stems(3);
  for (auto& stem : stems) {
    for (int64_t i = dice.between(1, 24); i > 0; --i) stem.push_back(static_cast<int32_t>(dice.between(0, 99)));
  }
  const int64_t requests = scenario.exact ? dice.between(3, 9) : dice.between(5, 14);
  for (int64_t number = 0; number < requests; ++number) {
    Arrival arrival{.step = static_cast<int>(dice.between(0, scenario.exact ? 25 : 60))};
    ReferenceRequest& request = arrival.request;
    request.id = fmt::format("r{}", number);
    request.prompt = stems[static_cast<size_t>(dice.between(0, 2))];
    for (int64_t i = dice.between(0, 12); i > 0; --i)
      request.prompt.push_back(static_cast<int32_t>(dice.between(0, 99)));
    request.max_tokens = static_cast<int32_t>(dice.between(1, 20));
    request.priority = static_cast<int32_t>(dice.between(0, 2));
    request.sampling = scenario.exact ? dice.one_of({Sampling::kGreedy, Sampling::kSeeded, Sampling::kUnseeded})
                                      : dice.one_of({Sampling::kGreedy, Sampling::kSeeded});
    request.seed = dice.between(0, 1000);
    request.salt = dice.chance(0.2) ? 7 : 0;
    if (dice.chance(0.2)) arrival.samples = 2;
    if (dice.chance(0.1) && arrival.samples == 1)
      scenario.aborts[request.id] = static_cast<int>(dice.between(arrival.step, arrival.step + 25));
    scenario.arrivals.push_back(std::move(arrival));
  }
  return scenario;
}

template <class T>
T must(Result<T> result, std::string_view doing) {
  if (!result) throw Failed{fmt::format("{}: {}", doing, result.error().to_string())};
  return std::move(*result);
}
void must(const Status& status, std::string_view doing) {
  if (!status) throw Failed{fmt::format("{}: {}", doing, status.error().to_string())};
}

using Streams = std::map<std::string, std::vector<int32_t>>;

// The run to which nothing happens. For exact scenarios also what each step put out.
struct Twin {
  Streams streams;
  std::vector<std::vector<std::pair<std::string, int32_t>>> steps;
};

Twin run_twin(const Scenario& scenario) {
  ManualClock clock;
  ReferenceOptions options = scenario.options;
  options.tiers = {};
  if (!scenario.exact) options.num_blocks = 1000;  // roomy and simple
  std::vector<std::unique_ptr<DeviceMemory>> devices;
  for (int rank = 0; rank < scenario.ranks; ++rank) devices.push_back(must(make_host_device(), "device"));
  const auto engine = must(ReferenceEngine::create(std::move(devices), linux_file_system(), clock, options), "twin");
  Twin twin;
  for (int step = 0; step < 10'000; ++step) {
    bool more = !engine->idle();
    for (const Arrival& arrival : scenario.arrivals) {
      more = more || arrival.step >= step;
      if (arrival.step == step) must(engine->add(arrival.request, arrival.samples), "add");
    }
    if (scenario.exact) {  // in the others an aborted stream is a beginning of the twin's
      for (const auto& [id, at] : scenario.aborts) {
        if (at == step) engine->abort(id);
      }
    }
    if (!more) return twin;
    auto& outputs = twin.steps.emplace_back();
    for (const ReferenceOutput& output : engine->step()) {
      twin.streams[output.id].push_back(output.token);
      outputs.emplace_back(output.id, output.token);
    }
  }
  throw Failed{"the twin does not come to an end"};
}

class Run {
 public:
  Run(Scenario scenario, Twin twin, Dice& dice, std::string directory, bool tell)
      : scenario_(std::move(scenario)),
        twin_(std::move(twin)),
        dice_(dice),
        directory_(std::move(directory)),
        tell_(tell) {
    result_.exact = scenario_.exact;
  }

  SimulationResult run() {
    try {
      start_engine();
      for (step_ = 0; step_ < 10'000; ++step_) {
        bool more = !engine_->idle();
        for (const Arrival& arrival : scenario_.arrivals) {
          more = more || arrival.step >= step_;
          if (arrival.step == step_) must(engine_->add(arrival.request, arrival.samples), "add");
        }
        for (const auto& [id, at] : scenario_.aborts) {
          if (at == step_ && engine_->abort(id)) say("abort {}", id);
        }
        if (!more) break;
        while (dice_.chance(scenario_.sleep_chance)) {
          sleep_and_wake();
          if (ended_) return result_;
        }
        one_step();
        serve_tiers();
        check_events();
        clock_.advance(std::chrono::milliseconds(dice_.between(0, 8)));
      }
      check_end();
    } catch (const Failed& failed) {
      result_.failure = fmt::format("step {}: {}", step_, failed.what);
    }
    count_tiers();
    return result_;
  }

 private:
  template <class... Args>
  void say(fmt::format_string<Args...> format, Args&&... args) {
    if (tell_) fmt::print("step {}: {}\n", step_, fmt::format(format, std::forward<Args>(args)...));
  }

  void start_engine() {
    count_tiers();
    controller_.reset();
    engine_.reset();
    std::vector<std::unique_ptr<DeviceMemory>> devices;
    for (int rank = 0; rank < scenario_.ranks; ++rank) {
      auto device = std::make_unique<FaultyDevice>(must(
          make_host_device({.defer_copies = scenario_.late_copies, .shuffle_seed = scenario_.shuffle_seed}), "device"));
      device_ = device.get();  // the last rank's fails
      devices.push_back(std::move(device));
    }
    const EventPort port(*ring_, clock_);
    (void)told();  // the end of the engine before
    view_ = {};
    engine_ = must(ReferenceEngine::create(std::move(devices), files_, clock_, scenario_.options, port), "engine");
    controller_ = std::make_unique<SleepController>(
        *engine_, files_, clock_,
        SleepControllerOptions{.directory = directory_ + "/checkpoints", .kv_budget_bytes = scenario_.kv_budget}, port);
  }

  std::vector<Event> told() {
    std::vector<Event> events;
    reader_.read(events, true);
    return events;
  }

  // What was told, and nothing else, says how each request stands, how each block on its way ended, and what the engine
  // does.
  void check_events() {
    for (const Event& event : told()) view_.apply(event);
    if (view_.lost() + view_.unknown() > 0) throw Failed{"events were lost, or make no sense"};
    const SlotTable& slots = engine_->slots();
    if (view_.slots().size() != slots.size())
      throw Failed{fmt::format("by the events there are {} requests, not {}", view_.slots().size(), slots.size())};
    for (const auto& [number, row] : view_.slots()) {
      const SlotInfo& slot = slots.at(number - 1);
      if (row.state != slot.state || view_.name_of(number) != slot.id)
        throw Failed{fmt::format("by the events request {} is {}, not {} {}", view_.name_of(number), name(row.state),
                                 slot.id, name(slot.state))};
    }
    if (!view_.engine().empty() && view_.engine() != controller_->state().engine)
      throw Failed{fmt::format("by the events the engine is {}", view_.engine())};
    if (engine_->offload() == nullptr) return;
    const OffloadQueue& queue = engine_->offload()->queue();
    uint64_t queued = 0;
    for (const auto& [number, row] : view_.candidates())
      queued += row.state == CandidateState::kPromoted ? 0 : row.blocks;
    if (queued != static_cast<uint64_t>(queue.queued_blocks()))
      throw Failed{fmt::format("by the events {} blocks are queued, not {}", queued, queue.queued_blocks())};
    for (const Way way : {Way::kUp, Way::kDown, Way::kOn}) {
      if (view_.ended(way) != queue.counts(way))
        throw Failed{fmt::format("by the events blocks {} ended otherwise", name(way))};
    }
  }

  void one_step() {
    arm();
    const std::vector<ReferenceOutput> outputs = engine_->step();
    disarm();
    if (scenario_.exact) {
      std::vector<std::pair<std::string, int32_t>> made;
      for (const ReferenceOutput& output : outputs) made.emplace_back(output.id, output.token);
      if (static_cast<size_t>(step_) >= twin_.steps.size() || made != twin_.steps[static_cast<size_t>(step_)])
        throw Failed{"the step put out other tokens than the twin's, or for other requests"};
    }
    for (const ReferenceOutput& output : outputs) {
      std::vector<int32_t>& stream = streams_[output.id];
      const std::vector<int32_t>& expected = twin_.streams[output.id];
      if (stream.size() >= expected.size()) throw Failed{fmt::format("request {} goes on after its end", output.id)};
      if (output.token != expected[stream.size()])
        throw Failed{fmt::format("request {}: token {} is {}, the twin's is {}", output.id, stream.size(), output.token,
                                 expected[stream.size()])};
      stream.push_back(output.token);
      ++result_.tokens;
    }
  }

  void serve_tiers() {
    for (TransferHandle& handle : engine_->offloads()) {
      if (dice_.chance(scenario_.cancel_chance)) handle.cancel();
    }
    arm();
    for (int64_t i = dice_.between(0, 3); i > 0; --i) engine_->step_offload();
    disarm();
    if (engine_->offload() != nullptr) must(engine_->offload()->check(), "offload");
  }

  // A fault of the device or of the disk within the next calls, perhaps.
  void arm() {
    if (scenario_.unproven && dice_.chance(0.05)) {
      say("copies are never proven over from now on, for a while");
      device_->drain_as(Drain::kUnproven);
    } else if (dice_.chance(scenario_.fault_chance)) {
      if (dice_.chance(0.5)) {
        device_->fail_at(static_cast<uint64_t>(dice_.between(1, 30)), dice_.chance(0.3));
      } else {
        files_.plan.set(Fault::kError, static_cast<uint64_t>(dice_.between(1, 40)), dice_.one_of({EIO, ENOSPC}),
                        dice_.chance(0.3));
      }
    }
  }
  void disarm() {
    faulted_ = device_->fired() || files_.plan.fired();
    if (faulted_) say("fault");
    device_->fail_at(0);
    device_->drain_as(Drain::kCompleted);
    files_.plan.clear();
  }

  void sleep_and_wake() {
    const bool to_disk = dice_.chance(0.5);
    // At level 2 weights are loaded again, and no new request finds KV from before: its prefill then takes other steps
    // than the twin's, so not where steps are compared.
    const int level = scenario_.exact ? 1 : static_cast<int>(dice_.between(1, 2));
    const SleepOptions options{.level = level, .preserve_state = true, .to_disk = to_disk};
    arm();
    const Result<SleepReport> slept = controller_->sleep(options);
    disarm();
    if (!slept) {
      say("sleep: {}", slept.error().to_string());
      if (!faulted_ && !quarantined() && slept.error().code != Code::kUnsupported)
        throw Failed{"a sleep without a fault failed: " + slept.error().to_string()};
      if (engine_is_lost()) return lose();
      if (engine_->frozen() || controller_->is_sleeping()) throw Failed{"a sleep that failed left the engine asleep"};
      ++result_.refused;
      return;
    }
    ++result_.sleeps;
    result_.reused += slept->reused_bytes;
    say("slept to {}", slept->to);
    if (!engine_->step().empty()) throw Failed{"a token was made asleep"};
    if (to_disk && dice_.chance(0.5)) return wake_in_new_engine(slept->checkpoint);
    while (true) {
      arm();
      const Result<SleepReport> woken = controller_->wake_up({});
      disarm();
      if (woken && woken->reload.empty()) return;
      if (woken) {
        if (woken->fully_awake || !engine_->step().empty()) throw Failed{"a token was made without weights"};
        engine_->load_weights(scenario_.options.weights_seed);
        continue;
      }
      say("wake: {}", woken.error().to_string());
      if (engine_is_lost()) return lose();
      if (quarantined()) return give_up();  // it says so, and can do no more
      if (!faulted_) throw Failed{"a wake without a fault failed: " + woken.error().to_string()};
      if (!controller_->is_sleeping()) throw Failed{"a wake that failed left the engine neither asleep nor lost"};
      ++result_.refused;
    }
  }

  void wake_in_new_engine(const std::string& checkpoint) {
    while (true) {
      start_engine();
      arm();
      const Result<SleepReport> woken = controller_->wake_up({.from_checkpoint = checkpoint});
      disarm();
      if (woken) {
        ++result_.new_engines;
        say("woken by a new engine");
        return;
      }
      say("wake by a new engine: {}", woken.error().to_string());
      if (!faulted_ && !quarantined())
        throw Failed{"a wake by a new engine without a fault failed: " + woken.error().to_string()};
      if (controller_->state().engine != "lost" && !engine_->idle())
        throw Failed{"a wake that failed left requests in the new engine"};
      ++result_.refused;
    }
  }

  bool engine_is_lost() const { return controller_->state().engine == "lost"; }
  // Nothing false was said so far; this engine cannot go on.
  void lose() {
    ++result_.lost;
    give_up();
  }
  void give_up() {
    say("given up");
    ended_ = true;
  }

  void count_tiers() {
    if (!engine_) return;
    result_.onboarded += engine_->counts().onboarded_tokens;
    result_.preemptions += engine_->counts().preemptions;
    if (engine_->offload() == nullptr) return;
    const OffloadQueue& queue = engine_->offload()->queue();
    for (const Way way : {Way::kDown, Way::kOn})
      result_.offloaded += static_cast<int64_t>(queue.counts(way)[static_cast<size_t>(BlockOutcome::kTransferred)]);
  }

  void check_end() {
    for (const auto& [id, expected] : twin_.streams) {
      if (!scenario_.aborts.contains(id) && streams_[id] != expected)
        throw Failed{fmt::format("request {} ended after {} of {} tokens", id, streams_[id].size(), expected.size())};
    }
    must(engine_->quiesce({}), "quiesce");
    const BlockPool& pool = engine_->pool();
    must(pool.check(), "pool");
    const BlockPoolInfo info = pool.info();
    if (quarantined()) return;
    if (info.owned != 0 || info.shared != 0 || info.quarantined != 0 || info.free != pool.num_blocks())
      throw Failed{
          fmt::format("blocks leaked: {} owned, {} shared, {} quarantined", info.owned, info.shared, info.quarantined)};
    if (engine_->offload() == nullptr) return;
    for (const StoreId store : {StoreId::kHost, StoreId::kDisk}) {
      const StoreCounts counts = engine_->offload()->index().counts(store);
      if (counts.reserved + counts.doomed + counts.quarantined != 0)
        throw Failed{fmt::format("slots of the store {} leaked", name(store))};
    }
  }
  bool quarantined() {
    for (size_t rank = 0; rank < engine_->ranks(); ++rank) {
      if (engine_->memory(rank).transfers().quarantined()) return true;
    }
    return false;
  }

  const Scenario scenario_;
  Twin twin_;
  Dice& dice_;
  const std::string directory_;
  const bool tell_;
  FaultyFileSystem files_;
  ManualClock clock_;
  std::unique_ptr<EventRing> ring_ = must(EventRing::in_memory({}, 1 << 14), "ring");
  EventReader reader_{*ring_};
  console::EngineView view_;
  FaultyDevice* device_ = nullptr;
  std::unique_ptr<ReferenceEngine> engine_;
  std::unique_ptr<SleepController> controller_;
  Streams streams_;
  int step_ = 0;
  bool faulted_ = false;
  bool ended_ = false;
  SimulationResult result_;
};

}  // namespace

void SimulationResult::add(const SimulationResult& other) {
  tokens += other.tokens;
  sleeps += other.sleeps;
  reused += other.reused;
  new_engines += other.new_engines;
  refused += other.refused;
  lost += other.lost;
  onboarded += other.onboarded;
  offloaded += other.offloaded;
  preemptions += other.preemptions;
}

SimulationResult simulate(uint64_t seed, const std::string& directory, bool tell) {
  Dice dice(seed * 2654435761u + 1);
  try {
    Scenario scenario = make_scenario(seed, dice, directory);
    Twin twin = run_twin(scenario);
    return Run(std::move(scenario), std::move(twin), dice, directory, tell).run();
  } catch (const Failed& failed) {
    return {.failure = failed.what};
  }
}

}  // namespace torpor::test
