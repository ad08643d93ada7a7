// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/session_lives.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <random>

#include <fmt/core.h>
#include <fmt/ranges.h>

#include "checkpoint/image_store.h"
#include "checkpoint/store_names.h"
#include "tests/support/manual_clock.h"
#include "tests/support/model_file_system.h"
#include "tests/support/results.h"

namespace torpor::test {
namespace {

using Verb = SessionVerb;

constexpr const char* kDirectory = "/disk/store";
constexpr const char* kImageNames[] = {"a", "b", "c", "d"};  // few: names are used again
constexpr size_t kEngines = 3;
constexpr size_t kMostRequests = 8;  // that have not ended, at a time
constexpr int kCalls = 32;           // of a life, before its end
constexpr int kMostRounds = 300;     // at its end
constexpr uint64_t kWeights = 2;     // versions that engines change between

class Life {
 public:
  Life(uint64_t seed, SessionSteps& steps, Planted planted, bool print)
      : random_(seed), steps_(steps), planted_(planted), print_(print), ranks_(seed % 4 == 0 ? 2 : 1) {
    disk_.locks_work = seed % 3 != 0;
    for (size_t i = 0; i < kEngines; ++i) start(i, 0);
  }

  SessionResult run() {
    for (int i = 0; i < kCalls && !result_.failure; ++i) call();
    if (!result_.failure) end();
    return result_;
  }

 private:
  struct Request {
    std::vector<int32_t> prompt{};
    std::vector<int32_t> outputs{};
    std::optional<int64_t> seed{};
    std::string ended{};  // why it has; "": it has not
    // It was aborted while another engine had, or might have had, its image, or the note of it may have failed: it may
    // go on, and may be gone.
    bool may_go_on = false;
  };
  struct Stored {  // a committed image
    std::vector<std::string> requests{};
    uint64_t weights = 0;
    int node = 0;  // of its directory: no other image ever has it
    std::set<int32_t> ended{};
  };
  // Who has a request: "engine 1", "image a in memory of engine 1", "image a on disk".
  using Owners = std::map<std::string, std::vector<std::string>, std::less<>>;

  uint64_t below(uint64_t n) { return random_() % n; }
  bool one_in(uint64_t n) { return below(n) == 0; }
  template <class Set>
  auto one_of(const Set& set) {
    return *std::next(set.begin(), static_cast<std::ptrdiff_t>(below(set.size())));
  }
  void fail(const std::string& what) {
    if (!result_.failure) result_.failure = fmt::format("call {}, {}: {}", result_.calls, doing_, what);
  }

  SessionEngine& engine(size_t i) { return *engines_[i]; }
  void start(size_t i, uint64_t weights) {
    engines_[i].reset();  // its locks end before the next process begins
    engines_[i] = std::make_unique<SessionEngine>(++processes_, disk_, clock_, kDirectory, ranks_, weights, planted_);
  }

  // --- what there is ---

  static std::string directory_of(const std::string& image) {
    return fmt::format("{}/{}/{}/{}", kDirectory, kImagesDirectory, image, generation_name(1));
  }
  static std::string on_disk(const std::string& image) { return fmt::format("image {} on disk", image); }

  std::map<std::string, Stored> stored() {
    std::map<std::string, Stored> all;
    for (const ImageInfo& info : value_of(ImageStore(disk_, kDirectory, {.clock = &clock_}).list())) {
      const int node = disk_.find(directory_of(info.name));
      auto known = seen_.find(node);
      if (known == seen_.end()) {
        const Checkpoint checkpoint = value_of(open_checkpoint(disk_, directory_of(info.name)));
        const EngineCheckpoint state = value_of(checkpoint.read_state());
        Stored image{.weights = std::stoull(state.fingerprint.at("weights")), .node = node};
        for (const RequestState& request : state.state.scheduler.requests) image.requests.push_back(request.id);
        known = seen_.emplace(node, std::move(image)).first;
      }
      Stored& image = all[info.name] = known->second;
      image.ended = info.ended;
    }
    return all;
  }

  Owners owners() {
    Owners all;
    for (size_t i = 0; i < kEngines; ++i) {
      for (const auto& [id, outputs] : engine(i).served()) {
        all[id].push_back(fmt::format("engine {}", i));
        const auto known = requests_.find(id);
        if (known == requests_.end()) {
          fail(fmt::format("nobody made request {}", id));
        } else if (known->second.outputs != outputs) {
          fail(fmt::format("request {} has {} tokens in engine {}, {} were given", id, outputs.size(), i,
                           known->second.outputs.size()));
        }
      }
      for (const auto& [image, held] : engine(i).hibernated()) {
        if (!held.in_memory) continue;
        for (const std::string& id : held.requests)
          all[id].push_back(fmt::format("image {} in memory of engine {}", image, i));
      }
    }
    for (const auto& [name, image] : stored()) {
      for (size_t i = 0; i < image.requests.size(); ++i) {
        if (!image.ended.contains(static_cast<int32_t>(i))) all[image.requests[i]].push_back(on_disk(name));
      }
    }
    return all;
  }

  size_t leftovers() {
    const auto directory = disk_.open_directory(fmt::format("{}/{}", kDirectory, kImagesDirectory), false);
    return directory ? value_of((*directory)->list()).size() - stored().size() : 0;
  }

  // Compare what there is with what may be. `killed`: the engine that was killed since before_. `takes`: an image that
  // it may have taken from the disk.
  void check(std::optional<size_t> killed, const std::string& takes) {
    const Owners now = owners();
    if (print_) {
      fmt::print("call {}, {}\n", result_.calls, doing_);
      for (const auto& [id, of] : now) fmt::print("    {}: {}\n", id, fmt::join(of, ", "));
    }
    for (auto& [id, request] : requests_) {
      const auto found = now.find(id);
      const size_t count = found == now.end() ? 0 : found->second.size();
      if (count > 1) fail(fmt::format("request {} has {} owners: {}", id, count, fmt::join(found->second, ", ")));
      if (count > 0 && !request.ended.empty()) {
        if (!request.may_go_on)
          fail(fmt::format("request {} was {}, and {} has it", id, request.ended, found->second[0]));
        request.ended.clear();
      }
      if (count > 0 || !request.ended.empty()) continue;
      const auto owner = before_.find(id);
      const std::string had = owner == before_.end() ? "nobody" : owner->second[0];
      const bool may_be_lost = killed && (owner == before_.end() || had.ends_with(fmt::format("engine {}", *killed)) ||
                                          (!takes.empty() && had == on_disk(takes)));
      if (!may_be_lost && !request.may_go_on) fail(fmt::format("request {} is lost; before, {} had it", id, had));
      request.ended = may_be_lost ? "lost with a killed engine" : "aborted";
      result_.lost += static_cast<uint64_t>(may_be_lost);
    }
    for (size_t i = 0; i < kEngines; ++i) {
      if (const std::string leak = engine(i).leak(); !leak.empty()) fail(fmt::format("engine {}: {}", i, leak));
    }
    if (!may_have_leftovers_ && leftovers() != 0) fail("files are left of an image that is gone");
  }

  // --- calls ---

  // Make a call, perhaps with a step of `who` that fails, or at which it is killed. `takes`: an image on disk that it
  // may take.
  void make(Verb verb, size_t who, const std::string& takes, const std::function<void()>& work) {
    before_ = owners();
    ++result_.calls;
    const uint64_t fate = below(10);
    kills_ = fate < 5;
    const bool fails = fate == 5;
    verb_ = verb;
    who_ = who;
    killed_ = false;
    FaultPlan& plan = engine(who).plan();
    plan.clear();
    if (kills_ || fails)
      plan.set(one_in(4) ? Fault::kErrorTorn : Fault::kError, steps_.choose(verb, random_()), one_in(2) ? EIO : ENOSPC,
               kills_);
    doing_ = fmt::format("{} by engine {}", name(verb), who);
    if (kills_ || fails) doing_ += fmt::format(", step {} {}", plan.at.load(), kills_ ? "kills" : "fails");
    work();
    if (!dies()) {
      FaultPlan& now = engine(who).plan();
      if (fails && now.fired()) {
        ++result_.failed;
        may_have_leftovers_ = true;
      }
      if (!fails && !kills_) steps_.note_undisturbed(verb, now.calls);
      now.clear();
    }
    check(killed_ ? std::optional(who) : std::nullopt, takes);
  }

  // Return whether the engine was killed in the call under way. If it was just now, another process takes its place.
  bool dies() {
    if (!kills_ || killed_ || !engine(who_).plan().fired()) return killed_;
    steps_.note_killed(verb_, engine(who_).plan().at);
    ++result_.kills;
    start(who_, engine(who_).weights());
    may_have_leftovers_ = true;
    return killed_ = true;
  }
  bool disturbed() { return killed_ || engine(who_).plan().fired(); }

  void call() {
    const size_t who = below(kEngines);
    if (one_in(12)) return sweep_or_damage();
    if (!engine(who).holds().empty()) return one_in(2) ? finish(who) : serve((who + 1) % kEngines);
    switch (below(12)) {
      case 0: return add(who);
      case 1:
      case 2: return serve(who);
      case 3:
      case 4: return hibernate(who);
      case 5:
      case 6: return resume(who);
      case 7: return open(who);
      case 8: return fork(who);
      case 9: return move(who, (who + 1 + below(kEngines - 1)) % kEngines);
      case 10: return one_in(2) ? remove(who) : abort(who);
      default: return one_in(3) ? set_weights(who) : add(who);
    }
  }

  size_t alive() const {
    return static_cast<size_t>(
        std::count_if(requests_.begin(), requests_.end(), [](const auto& each) { return each.second.ended.empty(); }));
  }

  void add(size_t who) {
    if (alive() >= kMostRequests) return serve(who);
    doing_ = "a new request";
    const std::string id = fmt::format("r{}", ++result_.requests);
    Request& request = requests_[id];
    for (uint64_t i = 1 + below(9); i > 0; --i) request.prompt.push_back(static_cast<int32_t>(below(1000)));
    if (one_in(2)) request.seed = static_cast<int64_t>(below(1000));
    RequestState state{.id = id,
                       .status = RequestStatus::kRunning,
                       .prompt_token_ids = request.prompt,
                       .max_tokens = static_cast<int32_t>(2 + below(16))};
    state.sampling.seed = request.seed;
    engine(who).add(std::move(state));
  }

  void serve(size_t who) {
    if (!engine(who).holds().empty()) return;
    make(Verb::kServe, who, "", [&] {
      const std::vector<SessionEngine::Token> tokens = engine(who).step();
      if (!dies()) take_tokens(who, tokens);
    });
  }

  void take_tokens(size_t who, const std::vector<SessionEngine::Token>& tokens) {
    for (const SessionEngine::Token& each : tokens) {
      Request& request = requests_[each.request];
      std::vector<int32_t> all = request.prompt;
      all.insert(all.end(), request.outputs.begin(), request.outputs.end());
      if (each.index != request.outputs.size())
        fail(fmt::format("request {} gives token {}, it has given {}", each.request, each.index,
                         request.outputs.size()));
      if (each.token != expected_token(all, request.seed, engine(who).weights()))
        fail(fmt::format("token {} of request {} is not that of a run without pauses", each.index, each.request));
      request.outputs.push_back(each.token);
      if (each.last) request.ended = "complete";
      ++result_.tokens;
    }
  }

  std::vector<std::string> some(const std::set<std::string>& all) {
    std::vector<std::string> chosen;
    for (const std::string& id : all) {
      if (chosen.size() < 3 && (chosen.empty() || one_in(2))) chosen.push_back(id);
    }
    return chosen;
  }

  void hibernate(size_t who) {
    std::string image = one_of(std::span(kImageNames));
    std::vector<std::string> requests = some(engine(who).running());
    const auto held = engine(who).hibernated();
    const bool again = !held.empty() && one_in(3);  // to disk later, or the same call twice
    if (again) {
      const auto [name, of] = one_of(held);
      image = name;
      requests.assign(of.requests.begin(), of.requests.end());
    }
    if (requests.empty()) return add(who);
    const bool to_disk = one_in(2);
    make(Verb::kHibernate, who, "", [&] { (void)leave(who, image, requests, to_disk); });
  }

  // Hibernate, and note which image this engine wrote.
  Status leave(size_t who, const std::string& image, const std::vector<std::string>& requests, bool to_disk) {
    const Status done = engine(who).hibernate(image, requests, to_disk);
    if (dies() || !done) return done;
    const auto held = engine(who).hibernated();
    const auto found = held.find(image);
    if (found == held.end()) {
      fail(fmt::format("the image {} was made, and is not there", image));
    } else if (to_disk) {
      if (!wrote_.contains({processes_of(who), image}) || found->second.in_memory)
        wrote_[{processes_of(who), image}] = disk_.find(directory_of(image));
      if (found->second.in_memory) fail(fmt::format("the image {} was written, and is in memory", image));
    }
    return done;
  }
  uint64_t processes_of(size_t who) { return engine(who).number(); }

  void resume(size_t who) {
    const auto held = engine(who).hibernated();
    if (held.empty()) return hibernate(who);
    const auto [image, of] = one_of(held);
    make(Verb::kResume, who, image, [&, image = image, requests = of.requests] {
      (void)come_back(who, image, requests);
      if (!dies() && one_in(4)) (void)engine(who).resume_image(image);  // the same call again
    });
  }

  Status come_back(size_t who, const std::string& image, const std::set<std::string>& requests) {
    const Status done = engine(who).resume_image(image);
    if (dies()) return done;
    if (done) {
      ++result_.resumed;
      const auto served = engine(who).served();
      for (const std::string& id : requests) {
        if (!served.contains(id)) fail(fmt::format("request {} was resumed, and is not there", id));
      }
    } else {
      result_.too_late += static_cast<uint64_t>(done.error().code == Code::kNotFound);
      note_refused(image, done.error());
    }
    return done;
  }

  bool is_damaged(const std::string& image) { return damaged_.contains(disk_.find(directory_of(image))); }
  // A wrong bit in the header of a file is another version of it.
  static bool is_damage(Code code) { return code == Code::kCorruption || code == Code::kIncompatible; }

  void note_refused(const std::string& image, const Error& error) {
    refused_ = error.to_string();
    if (is_damaged(image)) {
      result_.damaged += static_cast<uint64_t>(is_damage(error.code));
    } else if (error.code == Code::kCorruption && !disturbed()) {
      fail(fmt::format("the image {} is not whole: {}", image, refused_));
    }
  }

  void open(size_t who) {
    const auto images = stored();
    if (images.empty()) return hibernate(who);
    const std::string image = one_of(images).first;
    make(Verb::kOpen, who, "", [&] { (void)read(who, image); });
    if (!killed_ && one_in(2)) finish(who);
  }

  Status read(size_t who, const std::string& image) {
    const Status done = engine(who).open(fmt::format("{}/{}/{}", kDirectory, kImagesDirectory, image));
    if (!dies() && !done) note_refused(image, done.error());
    return done;
  }

  void finish(size_t who) {
    const std::string image = engine(who).holds();
    if (image.empty()) return;
    make(Verb::kTake, who, image, [&] { (void)take(who, !one_in(5)); });
  }

  Status take(size_t who, bool keep) {
    const Status done = engine(who).finish(keep);
    if (dies()) return done;
    result_.taken += static_cast<uint64_t>(keep && done);
    result_.too_late += static_cast<uint64_t>(!done && done.error().code == Code::kNotFound);
    return done;
  }

  void fork(size_t who) {
    const std::set<std::string> running = engine(who).running();
    if (running.empty() || alive() >= kMostRequests) return serve(who);
    const std::string parent = one_of(running);
    const Request of = requests_[parent];
    std::vector<std::optional<int64_t>> seeds(1 + below(3));
    for (auto& seed : seeds) {
      if (one_in(2)) seed = static_cast<int64_t>(below(1000));
    }
    std::optional<int64_t> at;
    if (one_in(2)) at = static_cast<int64_t>(below(of.outputs.size() + 1));
    make(Verb::kFork, who, "", [&] {
      const Result<std::vector<std::string>> children = engine(who).fork(parent, at, seeds);
      if (dies() || !children) return;
      for (size_t i = 0; i < children->size(); ++i) {
        Request child = of;
        child.outputs.resize(static_cast<size_t>(at.value_or(static_cast<int64_t>(of.outputs.size()))));
        if (seeds[i]) child.seed = seeds[i];
        requests_.emplace((*children)[i], std::move(child));
        ++result_.forked;
      }
    });
  }

  // Hibernate to disk, have the other engine take the image, and hear what became of it. One of both may be killed.
  void move(size_t from, size_t to) {
    const std::vector<std::string> requests = some(engine(from).running());
    if (requests.empty() || !engine(to).holds().empty()) return serve(from);
    const std::string image = one_of(std::span(kImageNames));
    if (engine(from).hibernated().contains(image)) return;
    const bool disturbs_from = one_in(2);
    make(disturbs_from ? Verb::kMoveFrom : Verb::kMoveTo, disturbs_from ? from : to, image, [&] {
      const Status left = leave(from, image, requests, true);
      if (!left && !killed_) return;
      before_ = killed_ ? before_ : owners();
      const auto images = stored();
      const auto there = images.find(image);
      if (there == images.end() || there->second.requests != requests) return;  // killed before it was whole
      if (killed_) before_ = owners();
      if (read(to, image) && !(dies() && !disturbs_from)) {
        (void)take(to, true);
        if (!dies() || disturbs_from) before_ = owners();
      }
      if (killed_ && disturbs_from) return;
      (void)come_back(from, image, {requests.begin(), requests.end()});
    });
  }

  void remove(size_t who) {
    const auto held = engine(who).hibernated();
    if (held.empty()) return abort(who);
    const auto [image, of] = one_of(held);
    const std::string id = one_of(of.requests);
    const bool in_memory = of.in_memory;
    make(Verb::kDelete, who, "", [&, image = image] { end_request(who, id, in_memory ? "" : image); });
  }

  void abort(size_t who) {
    const auto served = engine(who).served();
    if (served.empty()) return serve(who);
    const std::string id = one_of(served).first;
    make(Verb::kAbort, who, "", [&] { end_request(who, id, ""); });
  }

  // `image`: on disk, that this engine has the request in; "": none.
  void end_request(size_t who, const std::string& id, const std::string& image) {
    bool certain = true;  // that no engine goes on with it
    if (!image.empty()) {
      certain = wrote_[{processes_of(who), image}] == disk_.find(directory_of(image));
      for (size_t i = 0; i < kEngines; ++i) certain = certain && (i == who || engine(i).holds() != image);
    }
    engine(who).end(id);
    Request& request = requests_[id];
    request.ended = "aborted";
    request.may_go_on = !certain || (!image.empty() && disturbed());
    if (dies() && !image.empty()) request.may_go_on = true;
  }

  void set_weights(size_t who) {
    doing_ = fmt::format("other weights in engine {}", who);
    engine(who).set_weights(below(kWeights));
  }

  void sweep_or_damage() {
    if (one_in(2)) {
      doing_ = "leftovers are removed";
      result_.swept += value_of(ImageStore(disk_, kDirectory, {.clock = &clock_}).remove_leftovers()).size();
      if (leftovers() != 0) fail("files are left of an image that is gone");
      may_have_leftovers_ = false;
      return;
    }
    doing_ = "a file is damaged";
    const auto images = stored();
    if (images.empty()) return;
    const auto [image, of] = one_of(images);
    const int node =
        disk_.find(fmt::format("{}/chunks-r{}", directory_of(image), below(static_cast<uint64_t>(ranks_))));
    if (node < 0) return;
    Bytes& bytes = disk_.disk()[static_cast<size_t>(node)].bytes;
    if (bytes.empty()) return;
    bytes[below(bytes.size())] ^= static_cast<uint8_t>(1u << below(8));
    damaged_.insert(of.node);
  }

  // --- its end: nothing fails any more, and all requests go on ---

  void end() {
    doing_ = "at the end";
    for (int round = 0; round < kMostRounds && alive() > 0 && !result_.failure; ++round) {
      before_ = owners();
      for (size_t i = 0; i < kEngines; ++i) {
        if (!engine(i).holds().empty()) (void)engine(i).finish(true);
        for (const auto& [image, of] : engine(i).hibernated()) {
          if (const Status done = come_back(i, image, {}); !done && is_damage(done.error().code)) drop_damaged(image);
        }
      }
      for (const auto& [image, of] : stored()) {
        const size_t heir = below(kEngines);
        if (engine(heir).weights() != of.weights) engine(heir).set_weights(of.weights);
        const Status read_it = read(heir, image);
        if (read_it) {
          (void)engine(heir).finish(true);
        } else if (is_damage(read_it.error().code)) {
          drop_damaged(image);
        } else if (of.ended.size() == of.requests.size()) {
          drop(image);
        } else if (read_it.error().code != Code::kFailedPrecondition && read_it.error().code != Code::kUnavailable) {
          fail(fmt::format("the image {} is not read: {}", image, refused_));
        }
      }
      for (size_t i = 0; i < kEngines; ++i) take_tokens(i, engine(i).step());
      check(std::nullopt, "");
      disk_.record.clear();
    }
    for (const auto& [id, request] : requests_) {
      if (!request.ended.empty()) continue;
      const Owners now = owners();
      const auto found = now.find(id);
      fail(fmt::format("request {} never ends, {} has it; {}", id, found == now.end() ? "nobody" : found->second[0],
                       refused_));
    }
    finally();
  }

  void finally() {
    if (result_.failure) return;
    for (size_t i = 0; i < kEngines; ++i) {
      for (const auto& [image, of] : engine(i).hibernated()) (void)engine(i).resume_image(image);
      (void)engine(i).step();
      if (!engine(i).served().empty() || !engine(i).hibernated().empty())
        fail(fmt::format("engine {} has requests or images", i));
    }
    for (const auto& [image, of] : stored()) {
      if (of.ended.size() == of.requests.size()) drop(image);
    }
    result_.swept += value_of(ImageStore(disk_, kDirectory, {.clock = &clock_}).remove_leftovers()).size();
    check(std::nullopt, "");
    if (leftovers() != 0 || !stored().empty()) fail("files of images are left");
  }

  void drop(const std::string& image) {
    const auto images = value_of(disk_.open_directory(fmt::format("{}/{}", kDirectory, kImagesDirectory), false));
    (void)images->remove_tree(image);
  }
  void drop_damaged(const std::string& image) {
    const auto images = stored();
    const auto found = images.find(image);
    if (found == images.end()) return;
    if (!is_damaged(image)) return fail(fmt::format("the image {} is not whole: {}", image, refused_));
    for (const std::string& id : found->second.requests) {
      if (requests_[id].ended.empty()) requests_[id].ended = "in a damaged image";
    }
    drop(image);
  }

  std::mt19937_64 random_;
  SessionSteps& steps_;
  const Planted planted_;
  const bool print_;
  const int32_t ranks_;
  ManualClock clock_;
  ModelFileSystem disk_;
  std::unique_ptr<SessionEngine> engines_[kEngines];
  uint64_t processes_ = 0;
  std::map<std::string, Request> requests_;
  std::map<int, Stored> seen_;                             // by node
  std::map<std::pair<uint64_t, std::string>, int> wrote_;  // process, image -> node
  std::set<int> damaged_;                                  // nodes
  bool may_have_leftovers_ = false;
  Owners before_;
  // of the call under way
  std::string doing_;
  std::string refused_;  // why an image was not read, the last time
  Verb verb_{};
  size_t who_ = 0;
  bool kills_ = false;
  bool killed_ = false;
  SessionResult result_;
};

}  // namespace

std::string_view name(SessionVerb verb) {
  static constexpr std::string_view kNames[] = {"hibernate", "resume",  "open",   "take",  "fork",
                                                "move from", "move to", "delete", "abort", "serve"};
  static_assert(std::size(kNames) == kSessionVerbs);
  return kNames[static_cast<size_t>(verb)];
}

void SessionResult::add(const SessionResult& other) {
  calls += other.calls, tokens += other.tokens, requests += other.requests, failed += other.failed;
  kills += other.kills, lost += other.lost, resumed += other.resumed, taken += other.taken;
  too_late += other.too_late, forked += other.forked, damaged += other.damaged, swept += other.swept;
}

// --- SessionSteps ---

uint64_t SessionSteps::choose(SessionVerb verb, uint64_t random) const {
  const auto& killed = killed_[static_cast<size_t>(verb)];
  const uint64_t steps = std::max<uint64_t>(most(verb), 1);
  if (random % 2 == 0) return 1 + random / 2 % steps;
  for (uint64_t i = 0; i < steps; ++i) {
    const uint64_t step = 1 + (random / 2 + i) % steps;
    if (!killed.contains(step)) return step;
  }
  return 1 + random / 2 % steps;
}

void SessionSteps::note_undisturbed(SessionVerb verb, uint64_t steps) {
  ++undisturbed_[static_cast<size_t>(verb)][steps];
}
void SessionSteps::note_killed(SessionVerb verb, uint64_t step) { ++killed_[static_cast<size_t>(verb)][step]; }

uint64_t SessionSteps::most(SessionVerb verb) const {
  const auto& calls = undisturbed_[static_cast<size_t>(verb)];
  return calls.empty() ? 0 : calls.rbegin()->first;
}

uint64_t SessionSteps::killed(SessionVerb verb) const {
  const auto& killed = killed_[static_cast<size_t>(verb)];
  return static_cast<uint64_t>(std::distance(killed.begin(), killed.upper_bound(most(verb))));
}

std::vector<uint64_t> SessionSteps::missed(SessionVerb verb) const {
  const auto& calls = undisturbed_[static_cast<size_t>(verb)];
  uint64_t reach = 0;
  for (const auto& [steps, count] : calls) reach += count;
  const uint64_t often = std::max<uint64_t>(reach / 1000, 1);
  std::vector<uint64_t> found;
  uint64_t step = 1;
  for (const auto& [steps, count] : calls) {
    for (; step <= steps && reach >= often; ++step)
      if (!killed_[static_cast<size_t>(verb)].contains(step)) found.push_back(step);
    reach -= count;
  }
  return found;
}

SessionResult simulate_sessions(uint64_t seed, SessionSteps& steps, Planted planted, bool print) {
  return Life(seed, steps, planted, print).run();
}

}  // namespace torpor::test
