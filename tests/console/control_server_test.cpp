// SPDX-License-Identifier: Apache-2.0
// The socket, a reference engine that is stopped through it, and consoles that are killed, stopped, slow or hostile.
#include "console/control_server.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/core.h>

#include "allocator/host_device.h"
#include "console/event_files.h"
#include "engine/reference/reference_engine.h"
#include "engine/sleep_controller.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::console {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using reference::ReferenceEngine;
using reference::ReferenceOutput;
using std::chrono::steady_clock;
using test::value_of;

json ask(ControlClient& client, const std::string& method, const json& params = json::object()) {
  EXPECT_SUCCEEDS(client.send(json{{"id", 1}, {"method", method}, {"params", params}}.dump()));
  const auto line = value_of(client.receive(60s));
  EXPECT_TRUE(line.has_value()) << method;
  return json::parse(line.value_or("{}"));
}

class ControlServerTest : public testing::Test {
 protected:
  ControlServerTest() {
    engine_ = value_of(ReferenceEngine::create(value_of(make_host_device()), linux_file_system(), system_clock(),
                                               {.num_blocks = 64, .transfers_have_threads = false},
                                               EventPort(*ring_, system_clock())));
    server_ = value_of(ControlServer::start(*ring_, system_clock(), ControlRole::kOperate));
  }
  void add_requests() {
    for (int i = 0; i < 4; ++i)
      ASSERT_SUCCEEDS(
          engine_->add({.id = fmt::format("r{}", i),
                        .prompt = std::vector<int32_t>(static_cast<size_t>(5 + 7 * i), i),
                        .max_tokens = 12,
                        .sampling = i % 2 == 0 ? reference::Sampling::kUnseeded : reference::Sampling::kGreedy}));
  }
  using Streams = std::map<std::string, std::vector<int32_t>>;
  static void take(Streams& streams, const std::vector<ReferenceOutput>& outputs) {
    for (const ReferenceOutput& output : outputs) streams[output.id].push_back(output.token);
  }
  Streams expected() {
    auto reference = value_of(ReferenceEngine::create(value_of(make_host_device()), linux_file_system(), system_clock(),
                                                      {.num_blocks = 64, .transfers_have_threads = false}));
    std::swap(reference, engine_);
    add_requests();
    std::swap(reference, engine_);
    Streams streams;
    while (!reference->idle()) take(streams, reference->step());
    return streams;
  }
  bool waits_for_end_of_stop(std::chrono::seconds most) const {
    const auto until = steady_clock::now() + most;
    while (!port_.may_step()) {
      if (steady_clock::now() > until) return false;
      std::this_thread::sleep_for(1ms);
    }
    return true;
  }
  // A console in a process of its own that stops the engine and then does nothing.
  pid_t stopping_console(double lease) const {
    const pid_t child = ::fork();
    if (child == 0) {
      auto client = ControlClient::connect(server_->path());
      if (client && client->send(json{{"id", 1}, {"method", "pause"}, {"params", {{"lease", lease}}}}.dump()))
        (void)client->receive(60s);
      while (true) ::pause();
    }
    const auto until = steady_clock::now() + 60s;
    while (port_.may_step() && steady_clock::now() < until) std::this_thread::sleep_for(1ms);
    EXPECT_FALSE(port_.may_step());
    return child;
  }
  static void reap(pid_t child) {
    (void)::kill(child, SIGKILL);
    (void)::waitpid(child, nullptr, 0);
  }

  const test::TemporaryDirectory temporary_{"/dev/shm"};
  const std::string directory_ = temporary_ / "events";
  std::unique_ptr<EventRing> ring_ = value_of(begin_events(directory_, "core", 0, system_clock(), 4096));
  EventPort port_{*ring_, system_clock()};
  std::unique_ptr<ReferenceEngine> engine_;
  std::unique_ptr<ControlServer> server_;
};

TEST_F(ControlServerTest, ItsSocketIsTheUsersAlone) {
  struct stat status {};
  ASSERT_EQ(::stat(server_->path().c_str(), &status), 0);
  EXPECT_TRUE(S_ISSOCK(status.st_mode));
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  auto client = value_of(ControlClient::connect(directory_));
  EXPECT_EQ(client.path(), server_->path());
  EXPECT_EQ(ask(client, "hello")["result"]["pid"], ::getpid());
  const std::string path = server_->path();
  server_.reset();
  EXPECT_NE(::stat(path.c_str(), &status), 0);
  EXPECT_FAILS(client.receive(60s), Code::kUnavailable);
  EXPECT_FAILS(ControlClient::connect(directory_), Code::kNotFound, "console=");
}

TEST_F(ControlServerTest, NoUmaskOpensItToOthers) {
  const mode_t before = ::umask(0);
  for (mode_t mask = 0; mask < 01000; ++mask) {
    server_.reset();
    ::umask(mask);
    server_ = value_of(ControlServer::start(*ring_, system_clock(), ControlRole::kRead));
    struct stat status {};
    EXPECT_EQ(::stat(server_->path().c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600u) << mask;
  }
  ::umask(before);
}

// Another user who gets as far as the socket all the same, because its modes were changed.
TEST_F(ControlServerTest, AnotherUserIsCutOffAndThatIsTold) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  for (const std::string& path : {temporary_.path(), directory_, server_->path()})
    ASSERT_EQ(::chmod(path.c_str(), 0777), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setuid(65534) != 0) ::_exit(9);
    auto client = ControlClient::connect(server_->path());
    if (!client) ::_exit(8);
    (void)client->send(R"({"id":1,"method":"pause"})");
    const auto answer = client->receive(60s);
    ::_exit(answer ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0) << "8: not even connected";
  EXPECT_TRUE(port_.may_step());
  auto client = value_of(ControlClient::connect(server_->path()));
  const json published = ask(client, "events", {{"types", "control"}})["result"]["events"];
  ASSERT_EQ(published.size(), 1u);
  EXPECT_EQ(published[0]["uid"], 65534);
  EXPECT_EQ(published[0]["to"], "unauthenticated");
}

TEST_F(ControlServerTest, AStopAtABreakpointAndStepsChangeNoToken) {
  const Streams wanted = expected();
  auto client = value_of(ControlClient::connect(server_->path()));
  ASSERT_TRUE(ask(client, "breakpoint.add", {{"type", "slot"}, {"to", "decoding"}}).contains("result"));
  add_requests();
  Streams streams;
  int stood = 0;
  while (!engine_->idle()) {
    const std::vector<ReferenceOutput> outputs = engine_->step();
    take(streams, outputs);
    if (!outputs.empty() || port_.may_step()) continue;
    ++stood;
    EXPECT_EQ(ask(client, "stops")["result"]["stops"].size(), 1u);
    EXPECT_EQ(ask(client, "step", {{"steps", 1}})["result"]["steps"], 1);
    take(streams, engine_->step());
    EXPECT_TRUE(engine_->idle() || !port_.may_step());
    (void)ask(client, "resume");
  }
  EXPECT_GT(stood, 2);
  EXPECT_EQ(streams, wanted);
}

TEST_F(ControlServerTest, WhereItsConsoleIsKilledTheEngineGoesOnAtOnce) {
  const pid_t child = stopping_console(300);
  reap(child);
  EXPECT_TRUE(waits_for_end_of_stop(60s));
}

TEST_F(ControlServerTest, WhereItsConsoleStandsStillTheEngineGoesOnWithTheLease) {
  const pid_t child = stopping_console(2);
  ASSERT_EQ(::kill(child, SIGSTOP), 0);
  EXPECT_TRUE(waits_for_end_of_stop(60s));
  reap(child);
}

TEST_F(ControlServerTest, ASleepAndAWakeAreNotHeldUpByAStop) {
  const Streams wanted = expected();
  SleepController controller(*engine_, linux_file_system(), system_clock(), {}, port_);
  add_requests();
  Streams streams;
  for (int i = 0; i < 3; ++i) take(streams, engine_->step());
  auto client = value_of(ControlClient::connect(server_->path()));
  (void)ask(client, "pause", {{"lease", 60}});
  (void)ask(client, "breakpoint.add", {{"type", "dropped"}});
  EXPECT_TRUE(engine_->step().empty());
  ASSERT_SUCCEEDS(controller.sleep({.level = 1, .preserve_state = true}));
  EXPECT_EQ(ask(client, "snapshot")["result"]["engine"], "asleep");  // it answers asleep as well
  EXPECT_TRUE(ask(client, "stops")["result"]["stops"].empty());
  ASSERT_SUCCEEDS(controller.wake_up({}));
  while (!engine_->idle()) {
    take(streams, engine_->step());
    (void)ask(client, "resume");
  }
  EXPECT_EQ(streams, wanted);
}

TEST_F(ControlServerTest, PeersThatDoNotReadAndPeersThatTalkNonsenseHoldUpNobody) {
  std::vector<ControlClient> deaf;
  for (size_t i = 0; i < kMostPeers - 2; ++i) {
    deaf.push_back(value_of(ControlClient::connect(server_->path())));
    ASSERT_SUCCEEDS(deaf.back().send(R"({"id":1,"method":"subscribe","params":{"after":0}})"));
  }
  auto hostile = value_of(ControlClient::connect(server_->path()));
  ASSERT_SUCCEEDS(hostile.send(std::string(4096, '{')));
  EXPECT_TRUE(value_of(hostile.receive(60s)).has_value());  // why
  EXPECT_FAILS(hostile.receive(60s), Code::kUnavailable);
  for (int i = 0; i < 20'000; ++i) (void)port_.record({.type = EventType::kStep});
  auto client = value_of(ControlClient::connect(server_->path()));
  EXPECT_EQ(ask(client, "hello")["result"]["role"], "control");
  add_requests();
  Streams streams;
  while (!engine_->idle()) take(streams, engine_->step());
  EXPECT_EQ(streams.size(), 4u);
}

TEST_F(ControlServerTest, MoreThanItsPeersAreNotTaken) {
  std::vector<ControlClient> peers;
  for (size_t i = 0; i < kMostPeers; ++i) {
    peers.push_back(value_of(ControlClient::connect(server_->path())));
    (void)ask(peers.back(), "stops");
  }
  auto more = value_of(ControlClient::connect(server_->path()));
  EXPECT_FAILS(more.receive(60s), Code::kUnavailable);
  peers.clear();
  const auto until = steady_clock::now() + 60s;  // the server notices at its own time that they are gone
  bool taken = false;
  while (!taken && steady_clock::now() < until) {
    auto again = value_of(ControlClient::connect(server_->path()));
    if (!again.send(json{{"id", 1}, {"method", "stops"}}.dump())) continue;
    const auto line = again.receive(60s);
    taken = line && *line && json::parse(**line).contains("result");
  }
  EXPECT_TRUE(taken);
}

}  // namespace
}  // namespace torpor::console
