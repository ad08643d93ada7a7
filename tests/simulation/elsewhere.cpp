// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/elsewhere.h"

#include <map>

#include <fmt/core.h>
#include <boost/filesystem.hpp>

#include "remote/store_removal.h"
#include "tests/remote/store_in_memory.h"
#include "tests/simulation/elsewhere_server.h"

namespace torpor::test {
namespace {

constexpr int kMachines = 3;

struct Client {
  ReferenceRequest asked;
  std::vector<int32_t> expected;
  std::vector<int32_t> received;
  bool finished = false;
};

class World {
 public:
  World(uint64_t seed, int requests, int cycles, std::string directory)
      : seed_(seed),
        dice_(seed * 2654435761u + 1),
        requests_(requests),
        cycles_(cycles),
        directory_(std::move(directory)) {}

  ElsewhereResult run() {
    try {
      make_clients();
      start_first();
      for (int cycle = 0; cycle < cycles_; ++cycle) {
        serve_until((cycle + 1) * requests_ / cycles_);
        end_one();
        ++result_.cycles;
      }
      for (int step = 0; !all_answered(); ++step) {
        if (step > 10'000) throw Failed{"requests do not come to their ends"};
        serve();
      }
      check_zombie();
    } catch (const Failed& failed) {
      result_.failure = failed.what;
    }
    return result_;
  }

 private:
  // --- clients

  void make_clients() {
    ReferenceOptions roomy = engine_options(seed_);
    roomy.num_blocks = 4000, roomy.token_budget = 1000, roomy.max_running = 100;
    const auto reference =
        must(ReferenceEngine::create(must(make_host_device(), "device"), linux_file_system(), clock_, roomy),
             "the reference engine");
    for (int number = 0; number < requests_; ++number) {
      Client client;
      client.asked.id = fmt::format("r{}", number);
      for (int64_t i = dice_.between(1, 12); i > 0; --i)
        client.asked.prompt.push_back(static_cast<int32_t>(dice_.between(0, 3)));  // many share a prefix
      client.asked.max_tokens = static_cast<int32_t>(dice_.between(1, 12));
      client.asked.sampling = dice_.one_of({Sampling::kGreedy, Sampling::kSeeded});
      client.asked.seed = dice_.between(0, 1000);
      must(reference->add(client.asked), "a request of the reference engine");
      clients_.emplace(client.asked.id, std::move(client));
      order_.push_back(fmt::format("r{}", number));
    }
    while (!reference->idle()) {
      for (const ReferenceOutput& output : reference->step()) clients_.at(output.id).expected.push_back(output.token);
    }
  }

  bool all_answered() const { return result_.requests == requests_; }

  // Deliver each token once, in order, and as in the reference run.
  void deliver() {
    const uint64_t term = server_->own.newest().term;
    if (term < last_term_) throw Failed{"a server delivers although another one took over"};
    last_term_ = term;
    for (auto id = waiting_.begin(); id != waiting_.end();) {
      Client& client = clients_.at(*id);
      const auto from = static_cast<uint32_t>(client.received.size());
      const AnswerPart end = must(server_->log().position(*id), "an answer that its client waits for");
      if (end.tokens_end < from) {  // it is being computed again
        ++id;
        continue;
      }
      const AnswerPart part = must(server_->log().part(*id, from), "a part of an answer");
      client.received.insert(client.received.end(), part.tokens.begin(), part.tokens.end());
      result_.tokens += static_cast<int64_t>(part.tokens.size());
      const bool begins = client.received.size() <= client.expected.size() &&
                          std::equal(client.received.begin(), client.received.end(), client.expected.begin());
      if (!begins) throw Failed{fmt::format("{} was given other tokens than the reference run", *id)};
      if (part.state == AnswerState::kRunning) {
        ++id;
        continue;
      }
      if (part.state != AnswerState::kFinished || client.received != client.expected)
        throw Failed{
            fmt::format("{} ended after {} of {} tokens", *id, client.received.size(), client.expected.size())};
      if (std::exchange(client.finished, true)) throw Failed{fmt::format("{} was answered twice", *id)};
      ++result_.requests;
      id = waiting_.erase(id);
    }
  }

  void made(const std::string& id, uint32_t at, int32_t token) {
    const std::vector<int32_t>& expected = clients_.at(id).expected;
    if (at >= expected.size() || expected[at] != token)
      throw Failed{fmt::format("token {} of {} is {}, not the reference run's", at, id, token)};
  }

  void submit(const std::string& id) { server_->submit(clients_.at(id).asked, arrivals_++); }

  // --- a server that runs

  bool step(Server& server) {
    return server.step([this](const std::string& id, uint32_t at, int32_t token) { made(id, at, token); });
  }

  void serve() {
    clock_.advance(kStep);
    if (!step(*server_)) {  // its store did not answer for a term
      ended_by_itself_ = true;
      return;
    }
    deliver();
    if (dice_.chance(0.04)) push(false);
    if (dice_.chance(0.02)) remove_old();
  }

  void serve_until(int arrived) {
    ended_by_itself_ = false;
    while (next_ < arrived && !ended_by_itself_) {
      for (int64_t i = dice_.between(0, 5); i > 0 && next_ < arrived; --i) {
        const std::string& id = order_[static_cast<size_t>(next_++)];
        submit(id);
        waiting_.insert(id);
      }
      serve();
    }
  }

  // Note how many tokens of each request the acknowledged push contains.
  void remember(Server& server) {
    known_.clear();
    for (const Answer& answer : server.log().all()) known_[answer.request.id] = answer.request.output_token_ids.size();
  }

  bool push(bool drains) {
    const Result<Server::Sent> sent = server_->send(drains);
    const Status published = sent ? server_->publish(*sent) : Status(sent.error());
    ++(published ? result_.pushes : result_.failed);
    if (published) remember(*server_);
    return published.has_value();
  }

  void remove_old() {
    const auto report = remote::remove_unnamed(store_, clock_, {.keep = 1});
    if (report) {
      result_.removed += static_cast<int>(report->checkpoints.size() + report->parts + report->answers);
    } else if (report.error().code == Code::kUnavailable) {
      ++result_.kept_out;
    } else {
      throw Failed{"a removal: " + report.error().to_string()};
    }
  }

  // --- a server that ends

  void end_one() {
    Fate fate = static_cast<Fate>(dice_.between(0, kFates - 1));
    if (ended_by_itself_) fate = Fate::kCutOff;
    ++result_.fates[static_cast<size_t>(fate)];
    bool again = false;
    switch (fate) {
      case Fate::kDrained:
        drained_ = push(true);
        (void)server_->own.release();
        break;
      case Fate::kKilled: break;
      case Fate::kKilledInPush: {
        server_->link.dies_at = static_cast<int>(dice_.between(1, 30));
        const Result<Server::Sent> sent = server_->send(dice_.chance(0.5));
        if (sent && server_->publish(*sent)) remember(*server_);
        break;
      }
      case Fate::kPausedInPush: {
        Result<Server::Sent> sent = server_->send(false);
        check_zombie();
        if (!sent) break;  // then it is killed
        zombie_sent_ = std::move(*sent);
        zombie_ = std::move(server_);
        break;
      }
      case Fate::kCutOff: server_->link.cut = true; break;
      case Fate::kStartedAgain: again = true; break;
    }
    const std::string machine = server_ ? server_->directory() : zombie_->directory();
    if (fate == Fate::kCutOff && !ended_by_itself_) {
      old_ = std::move(server_);
    } else {
      server_.reset();
    }
    if (old_ == nullptr && zombie_ == nullptr && dice_.chance(0.1)) {  // a long pause
      clock_.advance(std::chrono::minutes(16));
      late_.clear();  // no call takes that long
      remove_old();
    }
    take_over(again ? machine : another_machine(machine));
  }

  std::string another_machine(const std::string& machine) {
    std::string chosen;
    do {
      chosen = fmt::format("{}/machine-{}", directory_, dice_.between(0, kMachines - 1));
    } while (chosen == machine || (zombie_ && zombie_->directory() == chosen));
    if (dice_.chance(0.5)) {
      boost::filesystem::remove_all(chosen);
      holders_.erase(chosen);
    }
    return chosen;
  }

  std::string new_holder() { return fmt::format("{:032x}", ++holder_); }
  std::unique_ptr<Server> start(const std::string& machine) {
    auto server = std::make_unique<Server>(machine, new_holder(), store_, clock_, dice_, late_, seed_);
    server->link.failing = dice_.one_of({0.0, 0.0, 0.01, 0.05});
    return server;
  }

  void start_first() {
    server_ = start(another_machine(""));
    while (!server_->own.owns()) (void)server_->own.take();
    server_->begin_first();
    holders_[server_->directory()] = {fmt::format("{:032x}", holder_), server_->gone_on()};
  }

  void take_over(const std::string& machine) {
    for (int attempt = 0; attempt < 50; ++attempt) {
      server_ = start(machine);
      own();
      std::optional<GoneOn> mine;
      if (const auto last = holders_.find(machine);
          last != holders_.end() && last->second.first == server_->own.before())
        mine = last->second.second;
      if (!mine && server_->own.newest().checkpoint.empty()) {  // no push was published: start from nothing
        boost::filesystem::remove_all(machine);
        server_->begin_first();
        return take_up({});
      }
      const Result<RolledForward> rolled = server_->arrive(mine);
      if (rolled) return take_up(*rolled);
      if (rolled.error().code != Code::kUnavailable) throw Failed{"waking elsewhere: " + rolled.error().to_string()};
      server_.reset();  // its store failed: start it again
    }
    throw Failed{"nobody can go on"};
  }

  void own() {
    for (int look = 0; look < 200; ++look) {
      const auto taken = server_->own.take();
      if (taken && *taken) return;
      clock_.advance(kTerm / 20);
      if (old_ == nullptr) continue;
      // The server that is cut off serves as long as it owns.
      std::swap(old_, server_);
      if (step(*server_)) {
        deliver();
        std::swap(old_, server_);
      } else {
        std::swap(old_, server_);
        old_.reset();
      }
    }
    throw Failed{"nobody takes over"};
  }

  void take_up(const RolledForward& rolled) {
    if (drained_ && !(rolled.extended.empty() && rolled.added.empty()))
      throw Failed{"after a drain something is computed again"};
    old_.reset();
    holders_[server_->directory()] = {fmt::format("{:032x}", holder_), server_->gone_on()};
    result_.extended += static_cast<int>(rolled.extended.size());
    result_.begun_again += static_cast<int>(rolled.added.size());
    for (const std::string& id : waiting_) {
      const auto there = server_->log().position(id);
      const auto known = known_.find(id);
      if (known != known_.end() && (!there || there->tokens_end < known->second))
        throw Failed{fmt::format("{} was made known with {} tokens, and is not there", id, known->second)};
      if (there) continue;
      if (drained_) throw Failed{fmt::format("{} was lost by a drain", id)};
      submit(id);
      ++result_.sent_again;
    }
    drained_ = false;
    result_.late_calls += static_cast<int>(late_.size());
    for (const auto& call : std::exchange(late_, {})) call();
    for (int64_t i = dice_.between(0, 5); i > 0; --i) serve();
    check_zombie();
  }

  // Continue the paused server: its push must be refused.
  void check_zombie() {
    if (zombie_ == nullptr || server_ == nullptr) return;
    if (zombie_->publish(zombie_sent_)) throw Failed{"the push of a server that was paused counts"};
    ++result_.too_late;
    if (step(*zombie_)) throw Failed{"a server that was paused serves on"};
    zombie_.reset();
  }

  const uint64_t seed_;
  Dice dice_;
  const int requests_;
  const int cycles_;
  const std::string directory_;
  WorldClock clock_;
  StoreInMemory store_;
  std::vector<std::function<void()>> late_;  // calls of the store that take effect later
  std::map<std::string, Client> clients_;
  std::vector<std::string> order_;
  std::set<std::string> waiting_;                                  // clients that wait for their answers
  std::map<std::string, size_t> known_;                            // tokens in the last acknowledged push
  std::map<std::string, std::pair<std::string, GoneOn>> holders_;  // the last holder on each machine
  int next_ = 0;
  int64_t arrivals_ = 0;
  uint64_t holder_ = 0;
  uint64_t last_term_ = 0;
  bool ended_by_itself_ = false;
  bool drained_ = false;  // and everything was pushed
  std::unique_ptr<Server> server_;
  std::unique_ptr<Server> old_;     // cut off
  std::unique_ptr<Server> zombie_;  // paused in a push
  Server::Sent zombie_sent_;
  ElsewhereResult result_;
};

}  // namespace

void ElsewhereResult::add(const ElsewhereResult& other) {
  requests += other.requests;
  cycles += other.cycles;
  for (size_t fate = 0; fate < fates.size(); ++fate) fates[fate] += other.fates[fate];
  tokens += other.tokens;
  pushes += other.pushes;
  failed += other.failed;
  sent_again += other.sent_again;
  extended += other.extended;
  begun_again += other.begun_again;
  too_late += other.too_late;
  late_calls += other.late_calls;
  removed += other.removed;
  kept_out += other.kept_out;
}

ElsewhereResult simulate_elsewhere(uint64_t seed, int requests, int cycles, const std::string& directory) {
  return World(seed, requests, cycles, directory).run();
}

}  // namespace torpor::test
