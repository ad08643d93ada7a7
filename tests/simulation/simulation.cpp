// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/simulation.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include <fmt/core.h>
#include <fmt/ranges.h>

#include "console/engine_view.h"
#include "console/reference_run.h"
#include "console/replay.h"
#include "engine/reference/reference_engine.h"
#include "engine/sleep_controller.h"
#include "tests/simulation/machine.h"
#include "tests/simulation/scenario.h"
#include "tests/simulation/served_checkpoint.h"
#include "tests/simulation/stops.h"
#include "tests/support/manual_clock.h"

namespace torpor::test {
namespace {

class Run {
 public:
  Run(uint64_t seed, Scenario scenario, ReferenceRun reference, Dice& dice, std::string directory, bool verbose,
      SourceEvents* recorded)
      : scenario_(std::move(scenario)),
        reference_(std::move(reference)),
        dice_(dice),
        directory_(std::move(directory)),
        verbose_(verbose),
        recorded_(recorded),
        early_dice_(seed * 40503u + 7),
        blocks_dice_(seed * 69069u + 3) {
    result_.exact = scenario_.exact;
    ++result_.regions.at(scenario_.options.regions_per_tag - 1);
    ++result_.tags.at(scenario_.options.step_tags.size() - 1);
    // A recording with stops could not be replayed.
    if (recorded == nullptr) stops_.emplace(*ring_, clock_, seed, !scenario_.exact);
  }

  SimulationResult run() {
    try {
      start_engine();
      for (step_ = 0; step_ < 10'000; ++step_) {
        bool more = !engine().idle();
        for (const Arrival& arrival : scenario_.arrivals) {
          more = more || arrival.step >= step_;
          if (arrival.step == step_) must(run_.add(arrival.request, arrival.samples), "add");
        }
        for (const auto& [id, at] : scenario_.aborts) {
          if (at == step_ && run_.abort(id)) say("abort {}", id);
        }
        if (!more) break;
        while (dice_.chance(scenario_.sleep_chance)) {
          sleep_and_wake();
          if (ended_) return result_;
        }
        continue_wake();
        if (stops_) {
          stops_->set();
          stops_->stand([&] { return run_.step(); });
        }
        one_step();
        serve_tiers();
        serve_checkpoint();
        if (ended_) return result_;
        check_events();
        clock_.set(clock_.now() + std::chrono::milliseconds(dice_.between(0, 8)));
      }
      if (stops_) stops_->end();
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
    if (verbose_) fmt::print("step {}: {}\n", step_, fmt::format(format, std::forward<Args>(args)...));
  }

  void start_engine(int32_t other_blocks = 0) {
    count_tiers();
    reference::ReferenceOptions options = scenario_.options;
    if (other_blocks > 0) options.num_blocks = other_blocks;
    must(run_.begin({.engine = options, .ranks = scenario_.ranks, .kv_budget_bytes = scenario_.kv_budget}), "engine");
    begun_ = true;
    asked_ = false;
    checkpoint_.gone();
    (void)published();  // the end of the engine before
    view_ = {};
  }
  ReferenceEngine& engine() { return run_.engine(); }
  SleepController& controller() { return run_.controller(); }

  std::vector<Event> published() {
    std::vector<Event> events;
    const uint64_t last = ring_->last_sequence();
    while (reader_.next() <= last) reader_.read(events);  // a copying thread may be writing one
    for (const Event& event : events) {
      if (event.type == EventType::kStop) ++result_.stops[event.to];
    }
    if (recorded_ != nullptr) recorded_->events.insert(recorded_->events.end(), events.begin(), events.end());
    return events;
  }

  // Check that the events alone give the state of each request, the outcome of each block and the engine's operation.
  void check_events() {
    for (const Event& event : published()) view_.apply(event);
    if (view_.lost() + view_.unknown() > 0) throw Failed{"events were lost, or make no sense"};
    const SlotTable& slots = engine().slots();
    if (view_.slots().size() != slots.size())
      throw Failed{fmt::format("by the events there are {} requests, not {}", view_.slots().size(), slots.size())};
    for (const auto& [number, row] : view_.slots()) {
      const SlotInfo& slot = slots.at(number - 1);
      if (row.state != slot.state || view_.name_of(number) != slot.id)
        throw Failed{fmt::format("by the events request {} is {}, not {} {}", view_.name_of(number), name(row.state),
                                 slot.id, name(slot.state))};
    }
    if (!view_.engine().empty() && view_.engine() != controller().state().engine)
      throw Failed{fmt::format("by the events the engine is {}", view_.engine())};
    if (engine().offload() == nullptr) return;
    const OffloadQueue& queue = engine().offload()->queue();
    uint64_t queued = 0;
    for (const auto& [number, row] : view_.candidates())
      queued += row.state == CandidateState::kPromoted ? 0 : row.blocks;
    if (queued != static_cast<uint64_t>(queue.queued_blocks()))
      throw Failed{fmt::format("by the events {} blocks are queued, not {}", queued, queue.queued_blocks())};
    for (const Way way : {Way::kOnboard, Way::kOffload, Way::kDemote}) {
      if (view_.ended(way) != queue.counts(way))
        throw Failed{fmt::format("by the events blocks {} ended otherwise", name(way))};
    }
  }

  // Wait for deferred blocks: for those that have arrived, or for all; sometimes not at all.
  void continue_wake() {
    if (!late_) return;
    const DeferredWait wait =
        early_dice_.one_of({DeferredWait::kNone, DeferredWait::kSome, DeferredWait::kSome, DeferredWait::kAll});
    if (!scenario_.exact && early_dice_.chance(0.4)) return;
    arm();
    if (scenario_.fault_chance > 0 && early_dice_.chance(0.1))
      run_.other(Machine::kDevice, static_cast<uint64_t>(early_dice_.between(1, 4)) << 1);
    const Result<WakeProgress> progress = run_.continue_wake(scenario_.exact ? DeferredWait::kAll : wait);
    disarm();
    if (!progress) throw Failed{"what came behind the engine: " + progress.error().to_string()};
    if (progress->lost > 0 && !faulted_ && !quarantined()) throw Failed{"blocks were lost without a fault"};
    if (!progress->recomputed.empty() && progress->lost == 0) throw Failed{"a request was computed again for nothing"};
    result_.late += progress->arrived;
    result_.deferred_lost += progress->lost;
    late_ = progress->left > 0;
    if (progress->left > 0)
      say("{} blocks arrived, {} lost, {} to come", progress->arrived, progress->lost, progress->left);
  }

  void one_step() {
    const int64_t before = engine().counts().steps;
    arm();
    std::vector<ReferenceOutput> outputs = run_.step();
    // A copying thread emitted an event after stand() had looked. If a breakpoint waited for it, the step was not
    // taken.
    while (stops_ && engine().counts().steps == before && stops_->stand([&] { return run_.step(); }))
      outputs = run_.step();
    disarm();
    must(engine().pool().check(), "pool");
    if (late_ && !outputs.empty()) ++result_.early_steps;
    if (scenario_.exact) {
      std::vector<std::pair<std::string, int32_t>> made;
      for (const ReferenceOutput& output : outputs) made.emplace_back(output.id, output.token);
      const std::vector<std::pair<std::string, int32_t>> none;
      const auto& expected =
          static_cast<size_t>(step_) < reference_.steps.size() ? reference_.steps[static_cast<size_t>(step_)] : none;
      if (made != expected)
        throw Failed{fmt::format("the step put out {}, that of the reference run {}", made, expected)};
    }
    for (const ReferenceOutput& output : outputs) {
      std::vector<int32_t>& stream = streams_[output.id];
      const std::vector<int32_t>& expected = reference_.streams[output.id];
      if (stream.size() >= expected.size()) throw Failed{fmt::format("request {} goes on after its end", output.id)};
      if (output.token != expected[stream.size()])
        throw Failed{fmt::format("request {}: token {} is {}, the reference run's is {}", output.id, stream.size(),
                                 output.token, expected[stream.size()])};
      stream.push_back(output.token);
      ++result_.tokens;
    }
  }

  void serve_tiers() {
    for (size_t i = 0; i < engine().offloads().size(); ++i) {
      if (dice_.chance(scenario_.cancel_chance)) run_.cancel(i);
    }
    arm();
    for (int64_t i = dice_.between(0, 3); i > 0; --i) run_.step_offload();
    disarm();
    if (engine().offload() != nullptr) must(engine().offload()->check(), "offload");
  }

  // Perhaps plan a fault of the device or of the disk within the next calls.
  void arm() {
    if (scenario_.unproven && dice_.chance(0.05)) {
      say("copies are never proven over from now on, for a while");
      run_.other(Machine::kUnproven, 0);
    } else if (dice_.chance(scenario_.fault_chance)) {
      const auto once_or_on = [&] { return dice_.chance(0.3) ? uint64_t{1} : uint64_t{0}; };
      if (dice_.chance(0.5)) {
        const auto at = static_cast<uint64_t>(dice_.between(1, 30));
        run_.other(Machine::kDevice, at << 1 | once_or_on());
      } else {
        const auto at = static_cast<uint64_t>(dice_.between(1, 40));
        const auto error = static_cast<uint64_t>(dice_.one_of({EIO, ENOSPC}));
        run_.other(Machine::kFile, at << 33 | error << 1 | once_or_on());
      }
    }
  }
  void disarm() {
    faulted_ = machine_.fired();
    if (faulted_) say("fault");
    checkpoint_.faulted = checkpoint_.faulted || faulted_;
    run_.other(Machine::kNone, 0);
  }

  void sleep_and_wake() {
    const bool to_disk = dice_.chance(0.5);
    // If weights are loaded again, a new request does not find earlier KV, so its prefill takes other steps than the
    // reference run: not if steps are compared.
    const bool reload = !scenario_.exact && dice_.between(1, 2) == 2;
    const SleepOptions options{.level = reload ? 1 : 2,
                               .preserve_state = true,
                               .to_disk = to_disk,
                               .weights = reload ? Weights::kReload : Weights::kByLevel};
    arm();
    const Result<SleepReport> slept = run_.sleep(options);
    disarm();
    late_ = false;  // the sleep has waited for deferred blocks
    if (!slept) {
      say("sleep: {}", slept.error().to_string());
      if (!faulted_ && !quarantined() && slept.error().code != Code::kUnsupported)
        throw Failed{"a sleep without a fault failed: " + slept.error().to_string()};
      if (engine_is_lost()) return lose();
      if (engine().frozen() || controller().is_sleeping()) throw Failed{"a sleep that failed left the engine asleep"};
      ++result_.refused;
      return;
    }
    if (stops_) stops_->check_operation();
    ++result_.sleeps;
    result_.reused += slept->reused_bytes;
    say("slept to {}", slept->to);
    if (to_disk) checkpoint_.newer_one();
    if (const auto made = run_.step(); !made.empty()) throw Failed{"asleep it made a token: " + made[0].id};
    if (to_disk && dice_.chance(0.5)) return wake_in_new_engine(slept->checkpoint);
    const bool may_be_asked = faulted_ || asked_;  // the weights may not have been read
    OldKv old_kv = OldKv::kUnsaid;
    bool loaded = false;
    while (true) {
      arm();
      const Result<SleepReport> woken = run_.wake({.old_kv = old_kv, .early = early_dice_.chance(0.5)});
      disarm();
      if (woken && woken->reload.empty()) return woke(*woken);
      if (woken) {
        const bool waits = !engine().idle();
        if (woken->fully_awake == waits || (waits && !engine().step().empty()))
          throw Failed{"a token was made without weights"};
        run_.load_weights(scenario_.options.weights_seed);  // the same weights
        loaded = true;
        if (woken->fully_awake) return woke(*woken);
        continue;
      }
      if (loaded && may_be_asked && woken.error().code == Code::kFailedPrecondition && old_kv == OldKv::kUnsaid) {
        old_kv = OldKv::kKeep;
        asked_ = true;
        continue;
      }
      say("wake: {}", woken.error().to_string());
      if (engine_is_lost()) return lose();
      if (quarantined()) return give_up();  // it reports that, and can do nothing more
      if (!faulted_) throw Failed{"a wake without a fault failed: " + woken.error().to_string()};
      if (!controller().is_sleeping()) throw Failed{"a wake that failed left the engine neither asleep nor lost"};
      ++result_.refused;
    }
  }

  void woke(const SleepReport& report) {
    late_ = report.deferred_blocks > 0;
    if (late_) ++result_.early;
    if (late_) say("{} blocks come behind the engine", report.deferred_blocks);
  }

  void serve_checkpoint() {
    // The order of threads is no input, nor are their faults.
    if (scenario_.options.transfers_have_threads && !scenario_.exact) return;
    arm();
    const Status well = checkpoint_.serve(streams_, step_);
    disarm();
    if (!well) say("checkpoint: {}", well.error().to_string());
    if (engine_is_lost()) return lose();
    if (engine().frozen()) throw Failed{"a checkpoint left the engine standing still"};
    if (!well && !checkpoint_.faulted && !quarantined()) throw Failed{"a checkpoint without a fault failed"};
    if (const auto from = checkpoint_.take_rewind()) {
      say("rewound to {}", from->checkpoint);
      wake_in_new_engine(from->checkpoint);
      streams_ = from->streams;
      step_ = from->step;
      // An abort before the next step would release blocks in another order.
      if (scenario_.exact) continue_wake();
    }
  }

  void wake_in_new_engine(const std::string& checkpoint) {
    const int32_t tokens = scenario_.options.model.block_tokens;
    const int64_t fewest = kFewestBlockedTokens / tokens;
    const int64_t most = kMostBlockedTokens / tokens;
    for (bool any = true;;) {
      const int64_t blocks = any ? blocks_dice_.between(fewest, most) : most;
      start_engine(scenario_.exact ? 0 : static_cast<int32_t>(blocks));  // the reference run preempts as this one does
      arm();
      const Result<SleepReport> woken = run_.wake({.from_checkpoint = checkpoint, .early = early_dice_.chance(0.5)});
      disarm();
      if (woken) {
        woke(*woken);
        ++result_.new_engines;
        say("woken by a new engine");
        return;
      }
      say("wake by a new engine: {}", woken.error().to_string());
      if (woken.error().what.find("its requests hold") != std::string::npos) {
        if (!std::exchange(any, false)) throw Failed{"an engine as large as any is too small: " + woken.error().what};
        continue;
      }
      if (!faulted_ && !quarantined())
        throw Failed{"a wake by a new engine without a fault failed: " + woken.error().to_string()};
      if (controller().state().engine != "lost" && !engine().idle())
        throw Failed{"a wake that failed left requests in the new engine"};
      ++result_.refused;
    }
  }

  bool engine_is_lost() { return controller().state().engine == "unrecoverable"; }
  // The engine reported no false success, and cannot go on.
  void lose() {
    ++result_.lost;
    give_up();
  }
  void give_up() {
    say("given up");
    ended_ = true;
  }

  void count_tiers() {
    if (!begun_) return;
    result_.onboarded += engine().counts().onboarded_tokens;
    result_.preemptions += engine().counts().preemptions;
    if (engine().offload() == nullptr) return;
    const OffloadQueue& queue = engine().offload()->queue();
    for (const Way way : {Way::kOffload, Way::kDemote})
      result_.offloaded += static_cast<int64_t>(queue.counts(way)[static_cast<size_t>(BlockOutcome::kTransferred)]);
  }

  void check_end() {
    for (const auto& [id, expected] : reference_.streams) {
      if (!scenario_.aborts.contains(id) && streams_[id] != expected)
        throw Failed{fmt::format("request {} ended after {} of {} tokens", id, streams_[id].size(), expected.size())};
    }
    must(run_.continue_wake(DeferredWait::kAll), "continue_wake");
    must(engine().quiesce({}), "quiesce");
    const BlockPool& pool = engine().pool();
    must(pool.check(), "pool");
    const BlockPoolInfo info = pool.info();
    if (quarantined()) return;
    if (info.owned != 0 || info.shared != 0 || info.quarantined != 0 || info.free != pool.num_blocks())
      throw Failed{
          fmt::format("blocks leaked: {} owned, {} shared, {} quarantined", info.owned, info.shared, info.quarantined)};
    if (engine().offload() == nullptr) return;
    for (const StoreId store : {StoreId::kHost, StoreId::kDisk}) {
      const StoreCounts counts = engine().offload()->index().counts(store);
      if (counts.reserved + counts.doomed + counts.quarantined != 0)
        throw Failed{fmt::format("slots of the store {} leaked", name(store))};
    }
  }
  bool quarantined() {
    for (size_t rank = 0; rank < engine().ranks(); ++rank) {
      if (engine().memory(rank).transfers().quarantined()) return true;
    }
    return false;
  }

  const Scenario scenario_;
  ReferenceRun reference_;
  Dice& dice_;
  const std::string directory_;
  const bool verbose_;
  SourceEvents* const recorded_;  // may be null
  Machine machine_{scenario_};
  console::RunClock clock_;
  std::unique_ptr<EventRing> ring_ = must(EventRing::in_memory({}, 1 << 14), "ring");
  std::optional<Stops> stops_;
  console::ReferenceRun run_{machine_.host(directory_), *ring_, clock_};
  EventReader reader_{*ring_};
  console::EngineView view_;
  Streams streams_;
  int step_ = 0;
  bool begun_ = false;  // an engine exists
  bool faulted_ = false;
  bool ended_ = false;
  bool late_ = false;   // blocks are deferred
  bool asked_ = false;  // a wake was told to keep or drop KV: the next sleep does not read the weights
  Dice early_dice_;     // dice of its own: post-copy wakes do not change what else happens in a seed
  Dice blocks_dice_;    // as early_dice_, for numbers of blocks
  SimulationResult result_;
  ServedCheckpoint checkpoint_{run_, dice_, scenario_.sleep_chance, result_.checkpoints, result_.rewound};
};

}  // namespace

void SimulationResult::add(const SimulationResult& other) {
  tokens += other.tokens;
  sleeps += other.sleeps;
  reused += other.reused;
  new_engines += other.new_engines;
  refused += other.refused;
  lost += other.lost;
  checkpoints += other.checkpoints;
  rewound += other.rewound;
  onboarded += other.onboarded;
  offloaded += other.offloaded;
  preemptions += other.preemptions;
  early += other.early;
  early_steps += other.early_steps;
  late += other.late;
  deferred_lost += other.deferred_lost;
  for (size_t edge = 0; edge < stops.size(); ++edge) stops[edge] += other.stops[edge];
  for (size_t i = 0; i < regions.size(); ++i) regions[i] += other.regions[i];
  for (size_t i = 0; i < tags.size(); ++i) tags[i] += other.tags[i];
}

SimulationResult simulate(uint64_t seed, const std::string& directory, bool verbose, SourceEvents* recorded) {
  Dice dice(seed * 2654435761u + 1);
  try {
    Scenario scenario = make_scenario(seed, dice, directory);
    if (recorded != nullptr) scenario.options.transfers_have_threads = false;  // their order could not be repeated
    ReferenceRun reference = run_reference(scenario);
    return Run(seed, std::move(scenario), std::move(reference), dice, directory, verbose, recorded).run();
  } catch (const Failed& failed) {
    return {.failure = failed.what};
  }
}

Result<console::ReplayResult> replay_simulation(uint64_t seed, const SourceEvents& recorded,
                                                const std::string& directory) {
  Dice dice(seed * 2654435761u + 1);
  const Scenario scenario = make_scenario(seed, dice, directory);
  Machine machine(scenario);
  return console::replay(recorded, machine.host(directory), 1 << 14);
}

}  // namespace torpor::test
