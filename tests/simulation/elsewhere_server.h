// SPDX-License-Identifier: Apache-2.0
// Server: a server of the simulation, as far as its store is concerned: the reference engine with its controller and
// response log, its ownership and pushes, and its link to the store, on which calls fail.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/delivery/delivery_log.h"
#include "engine/delivery/roll_forward.h"
#include "remote/answer_copies.h"
#include "remote/checkpoint_copies.h"
#include "remote/ownership.h"
#include "tests/simulation/scenario.h"

namespace torpor::test {

inline constexpr std::chrono::milliseconds kTerm{1000};
inline constexpr std::chrono::milliseconds kStep{10};  // of an engine's step

class WorldClock final : public Clock {
 public:
  std::chrono::nanoseconds now() const override { return std::chrono::nanoseconds(now_); }
  double unix_seconds() const override { return 1.8e9 + std::chrono::duration<double>(now()).count(); }
  void advance(std::chrono::nanoseconds by) { now_ += by.count(); }

 private:
  std::atomic<int64_t> now_ = 1;
};

// The store as one server reaches it. Calls fail at random; if the link is cut, all fail.
class Link final : public remote::ObjectStore {
 public:
  Link(remote::ObjectStore& store, Dice& dice, std::vector<std::function<void()>>& late)
      : store_(store), dice_(dice), late_(late) {}
  double failing = 0;
  bool cut = false;
  int dies_at = 0;  // number of the call in which the server is killed; 0: none

  Result<bool> put_new(std::string_view key, std::span<const std::byte> bytes) override {
    return call([&store = store_, name = std::string(key), kept = std::vector(bytes.begin(), bytes.end())] {
      return store.put_new(name, kept);
    });
  }
  Status remove(std::string_view key) override {
    return call([&store = store_, name = std::string(key)] { return store.remove(name); });
  }
  Result<uint64_t> get(std::string_view key, std::span<std::byte> room) override {
    if (!passes()) return failed();
    return store_.get(key, room);
  }
  Status get_range(std::string_view key, uint64_t offset, std::span<std::byte> room) override {
    if (!passes()) return failed();
    return store_.get_range(key, offset, room);
  }
  Result<std::optional<uint64_t>> size(std::string_view key) override {
    if (!passes()) return failed();
    return store_.size(key);
  }
  Status each_key(std::string_view prefix, const std::function<bool(std::string_view key)>& visit) override {
    if (!passes()) return failed();
    return store_.each_key(prefix, visit);
  }
  Status check_exists() override { return ok(); }
  const std::string& url() const override { return store_.url(); }

 private:
  static Error failed() { return {.code = Code::kUnavailable, .what = "injected"}; }
  bool passes() {
    if (dies_at > 0 && --dies_at == 0) cut = dying_ = true;
    return !cut && !dice_.chance(failing);
  }
  // Make a changing call. If it fails, it may have taken effect, or will later.
  template <class Call>
  auto call(Call call) -> decltype(call()) {
    const bool was_cut = cut;
    if (passes()) return call();
    if (was_cut || (cut && !dying_)) return failed();
    const int64_t how = dice_.between(0, 2);
    if (how == 1) (void)call();
    if (how == 2) late_.emplace_back([call] { (void)call(); });
    return failed();
  }
  remote::ObjectStore& store_;
  Dice& dice_;
  std::vector<std::function<void()>>& late_;
  bool dying_ = false;
};

inline ReferenceOptions engine_options(uint64_t seed) {
  ReferenceOptions options;
  options.model.layers = 1;
  options.model.token_bytes = 16;
  options.weight_bytes = 1000;
  options.weights_seed = seed;
  options.num_blocks = 200;
  options.token_budget = 48;
  options.max_running = 12;
  options.transfers_have_threads = false;
  options.deferred_thread = false;
  return options;
}

inline RequestState state_of(const ReferenceRequest& asked, int64_t arrival) {
  RequestState state{.id = asked.id, .prompt_token_ids = asked.prompt, .max_tokens = asked.max_tokens};
  state.sampling.temperature = asked.sampling == Sampling::kGreedy ? 0.0 : 1.0;
  state.sampling.max_tokens = asked.max_tokens;
  if (asked.sampling == Sampling::kSeeded) state.sampling.seed = asked.seed;
  state.engine = {Dict{{"arrival", {arrival}}, {"salt", {Bytes(sizeof(uint64_t))}}}};
  return state;
}

// The checkpoint that a server woke from, and the checkpoints in its directory then; newer ones may be those of a
// server that was overtaken. A server that is killed before it wrote another one wakes from the same again.
struct GoneOn {
  std::string from;  // empty: its own newest
  std::set<std::string> there;
};

// One process of a server, on a machine with files in `directory`.
class Server {
 public:
  Server(std::string directory, std::string holder, remote::ObjectStore& store, const WorldClock& clock, Dice& dice,
         std::vector<std::function<void()>>& late, uint64_t seed)
      : link(store, dice, late),
        own(link, clock, std::move(holder), kTerm),
        directory_(std::move(directory)),
        clock_(clock) {
    engine_ = must(
        ReferenceEngine::create(must(make_host_device(), "device"), linux_file_system(), clock, engine_options(seed)),
        "engine");
    controller_ = std::make_unique<SleepController>(
        *engine_, linux_file_system(), clock,
        SleepControllerOptions{.directory = directory_, .checkpoints = {.incremental = true}, .own_threads = false});
  }
  Link link;
  remote::Ownership own;
  const std::string& directory() const { return directory_; }
  DeliveryLog& log() { return *log_; }
  const GoneOn& gone_on() const { return gone_on_; }
  bool idle() const { return engine_->idle(); }

  // Wake as the owner: pull the newest checkpoint and log into the directory, unless this directory's server was the
  // last owner. `last`: what that server woke from.
  Result<RolledForward> arrive(const std::optional<GoneOn>& last) {
    const Fingerprint fingerprint = must(controller_->fingerprint(), "fingerprint");
    std::string from;  // empty: only the log
    if (last) {
      const std::set<std::string> there = checkpoints();
      const bool wrote_none = std::includes(last->there.begin(), last->there.end(), there.begin(), there.end());
      if (!last->from.empty() && wrote_none) gone_on_ = *last;
      if (!there.empty()) from = gone_on_.from.empty() ? directory_ : gone_on_.from;
    } else {
      const remote::OwnerRecord newest = own.newest();
      TORPOR_ASSIGN_OR_RETURN(const remote::CopyReport pulled,
                              remote::pull(linux_file_system(), link, newest.checkpoint, directory_, {.threads = 1}));
      TORPOR_RETURN_IF_ERROR(remote::pull_answers(linux_file_system(), link, newest.answers, directory_));
      from = pulled.path;
      gone_on_ = {.from = from, .there = checkpoints()};
    }
    begin(fingerprint);
    RolledForward rolled;
    const WakeOptions options{.from_checkpoint = from, .catch_up = [&](CapturedState& state, bool before) {
                                const Status caught_up = catch_up_with(log_->all(), rolled)(state, before);
                                draw_again(state, rolled);
                                return caught_up;
                              }};
    must(controller_->wake_up(options), "the wake elsewhere");
    return rolled;
  }
  void begin(const Fingerprint& fingerprint) {
    log_ =
        must(DeliveryLog::open(
                 linux_file_system(),
                 {.clock = &clock_, .directory = directory_ + "/answers", .engine = fingerprint, .own_thread = false}),
             "the response log");
    renewed_ = clock_.now();
  }
  void begin_first() { begin(must(controller_->fingerprint(), "fingerprint")); }

  void submit(const ReferenceRequest& asked, int64_t arrival) {
    must(log_->start({.request = state_of(asked, arrival), .response = asked.id}), "a new answer");
    must(engine_->add(asked), "a new request");
  }

  // Run a step. Return false if the server no longer owns, and ends.
  bool step(const std::function<void(const std::string& id, uint32_t at, int32_t token)>& made) {
    if (!own.owns()) return false;
    if (clock_.now() - renewed_ >= kTerm / 3) {
      const Status renewed = own.renew();
      if (renewed) renewed_ = clock_.now();
      if (!own.owns()) return false;
    }
    std::vector<AnswerStep> steps;
    for (const ReferenceOutput& output : engine_->step()) {
      const uint32_t at = must(log_->position(output.id), "a request without an answer").tokens_end;
      made(output.id, at, output.token);
      AnswerStep& step = steps.emplace_back(AnswerStep{.id = output.id, .at = at, .tokens = {output.token}});
      if (!output.finished) continue;
      step.state = AnswerState::kFinished;
      step.finish_reason = "length";
    }
    if (!steps.empty()) must(log_->step(std::move(steps)), "what was made is recorded");
    if (log_->rotation_due()) must(log_->rotate(), "the log begins anew");
    return true;
  }

  // A push that is complete but not published: no server wakes from it yet.
  struct Sent {
    std::string checkpoint;
    std::string answers;
  };
  Result<Sent> send(bool drains) {
    const Result<SleepReport> report = drains
                                           ? controller_->sleep({.level = 1, .preserve_state = true, .to_disk = true})
                                           : controller_->checkpoint({});
    const std::string path = must(report, "a checkpoint").checkpoint;
    const Checkpoint checkpoint = must(open_checkpoint(linux_file_system(), path), "a checkpoint");
    TORPOR_ASSIGN_OR_RETURN(const remote::CopyReport pushed,
                            remote::push(linux_file_system(), checkpoint, link,
                                         {.threads = 1, .clock = &clock_, .patience = std::chrono::seconds(0)}));
    TORPOR_ASSIGN_OR_RETURN(std::string answers,
                            remote::push_answers(linux_file_system(), directory_ + "/answers", link));
    return Sent{pushed.name, std::move(answers)};
  }
  Status publish(const Sent& sent) { return own.publish(sent.checkpoint, sent.answers); }

 private:
  std::set<std::string> checkpoints() const {
    std::set<std::string> names;
    const auto manager = must(CheckpointManager::open(linux_file_system(), directory_, {}), "its directory");
    for (const CheckpointInfo& info : must(manager->list(), "its checkpoints")) names.insert(info.name);
    return names;
  }
  // Advance the generators of seeded requests by one draw for each token that was added.
  static void draw_again(CapturedState& state, const RolledForward& rolled) {
    std::set<std::string> ids(rolled.extended.begin(), rolled.extended.end());
    ids.insert(rolled.added.begin(), rolled.added.end());
    for (const RequestState& request : state.scheduler.requests) {
      if (!request.sampling.seed || !ids.contains(request.id)) continue;
      auto generator = static_cast<uint64_t>(*request.sampling.seed);
      for (size_t i = 0; i < request.output_token_ids.size(); ++i)
        generator = generator * 6364136223846793005u + 1442695040888963407u;
      Bytes bytes(sizeof generator);
      std::memcpy(bytes.data(), &generator, sizeof generator);
      auto& generators = state.workers.at(0).generators;
      std::erase_if(generators, [&](const auto& each) { return each.first == request.id; });
      generators.emplace_back(request.id, std::move(bytes));
    }
  }

  const std::string directory_;
  const WorldClock& clock_;
  std::unique_ptr<ReferenceEngine> engine_;
  std::unique_ptr<SleepController> controller_;
  std::unique_ptr<DeliveryLog> log_;
  std::chrono::nanoseconds renewed_{};
  GoneOn gone_on_;
};

}  // namespace torpor::test
