// SPDX-License-Identifier: Apache-2.0
// What a console asks of a server: plan, sleep, wake, checkpoint; and recordings that a process makes of itself.
#include <thread>

#include <fmt/core.h>

#include "console/control.h"
#include "console/event_files.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/manual_clock.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::console {
namespace {

using nlohmann::json;
using test::value_of;

// A server: what it was asked for waits until the test ends it.
class Front final : public FrontAccess {
 public:
  void begin(const ControlMethod& method, const json& params, const std::shared_ptr<FrontCall>& call) override {
    asked.emplace_back(fmt::format("{} {}", method.name, params.dump()));
    calls.push_back(call);
  }
  std::vector<std::string> asked;
  std::vector<std::shared_ptr<FrontCall>> calls;
};

class OperationsTest : public testing::Test {
 protected:
  explicit OperationsTest(ControlRole role = ControlRole::kOperate) : control_(*ring_, clock_, role) {}
  // The lines that there are for a peer.
  std::vector<json> lines(ControlSession& session) {
    session.pump();
    std::vector<json> found;
    std::string& output = session.output();
    for (size_t end = 0; (end = output.find('\n')) != std::string::npos; output.erase(0, end + 1))
      found.push_back(json::parse(output.substr(0, end)));
    return found;
  }
  void send(ControlSession& session, int id, const std::string& method, const json& params = json::object()) {
    EXPECT_TRUE(session.receive(json{{"id", id}, {"method", method}, {"params", params}}.dump() + "\n"));
  }
  json ask(ControlSession& session, const std::string& method, const json& params = json::object()) {
    send(session, 1, method, params);
    const std::vector<json> answers = lines(session);
    EXPECT_EQ(answers.size(), 1u);
    return answers.empty() ? json() : answers[0];
  }
  // Who asked for what, and what came of it.
  std::vector<std::string> published() {
    ControlSession session(control_, {.connection = 99});
    std::vector<std::string> all;
    const json answer = ask(session, "events", {{"types", "control"}});
    for (const json& event : answer["result"]["events"])
      all.push_back(fmt::format("{} {} {}", event["uid"].get<uint64_t>(), event["from"].get<std::string>(),
                                event["to"].get<std::string>()));
    return all;
  }

  const test::TemporaryDirectory temporary_{"/dev/shm"};
  const std::string events_ = temporary_ / "events";
  const std::string records_ = temporary_ / "records";
  test::ManualClock clock_;
  std::unique_ptr<EventRing> ring_ = value_of(begin_events(events_, "core", 0, clock_, 4096));
  EventPort port_{*ring_, clock_};
  Front front_;
  Control control_;
};

class ReadOnlyOperations : public OperationsTest {
 protected:
  ReadOnlyOperations() : OperationsTest(ControlRole::kRead) {}
};

TEST_F(OperationsTest, ASleepIsAnsweredWhenItHasEndedAndOthersMeanwhile) {
  control_.serve(&front_);
  ControlSession session(control_, {.connection = 1, .uid = 1000});
  send(session, 7, "sleep", {{"level", 1}, {"to", "disk"}});
  send(session, 8, "stops");
  const std::vector<json> meanwhile = lines(session);
  ASSERT_EQ(meanwhile.size(), 1u);
  EXPECT_EQ(meanwhile[0]["id"], 8);
  EXPECT_TRUE(session.waits() && control_.look_at_front());
  EXPECT_TRUE(published().empty());
  ASSERT_EQ(front_.asked, std::vector<std::string>{R"(sleep {"level":1,"to":"disk"})"});
  std::thread([&] { front_.calls[0]->end(json{{"freed_bytes", 42}}); }).join();
  const std::vector<json> answers = lines(session);
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_EQ(answers[0]["id"], 7);
  EXPECT_EQ(answers[0]["result"]["freed_bytes"], 42);
  EXPECT_FALSE(session.waits() || control_.look_at_front());
  EXPECT_EQ(published(), std::vector<std::string>{"1000 sleep ok"});
}

TEST_F(OperationsTest, WhatFailsIsAnErrorAndWhoHasGoneIsToldOfStill) {
  control_.serve(&front_);
  {
    ControlSession session(control_, {.connection = 1, .uid = 5});
    send(session, 1, "wake");
    send(session, 2, "checkpoint");
    front_.calls[0]->end(Error{.code = Code::kFailedPrecondition, .what = "it is awake", .next_step = "sleep"});
    const std::vector<json> answers = lines(session);
    ASSERT_EQ(answers.size(), 1u);
    EXPECT_EQ(answers[0]["error"]["code"], "failed_precondition");
    EXPECT_EQ(answers[0]["error"]["next_step"], "sleep");
  }
  EXPECT_TRUE(control_.look_at_front());
  front_.calls[1]->end(json::object());
  EXPECT_FALSE(control_.look_at_front());
  EXPECT_EQ(published(), (std::vector<std::string>{"5 wake failed_precondition", "5 checkpoint ok"}));
}

TEST_F(OperationsTest, AnEngineWithoutAServerSaysWhoDoesIt) {
  ControlSession session(control_, {.connection = 1});
  for (const std::string method : {"plan", "sleep", "wake", "checkpoint"}) {
    const json error = ask(session, method)["error"];
    EXPECT_EQ(error["code"], "failed_precondition");
    EXPECT_NE(error["next_step"].get<std::string>().find("/torpor/console/" + method), std::string::npos) << error;
  }
}

TEST_F(OperationsTest, ParametersOfNoSenseReachNoServer) {
  control_.serve(&front_);
  ControlSession session(control_, {.connection = 1});
  EXPECT_EQ(ask(session, "sleep", {{"level", "1"}})["error"]["code"], "invalid_argument");
  EXPECT_EQ(ask(session, "plan", {{"where", "disk"}})["error"]["code"], "invalid_argument");
  EXPECT_TRUE(front_.asked.empty());
}

TEST_F(ReadOnlyOperations, OnlyAPlanIsMade) {
  control_.serve(&front_);
  ControlSession session(control_, {.connection = 1});
  send(session, 1, "plan");
  for (const std::string method : {"sleep", "wake", "checkpoint", "record.start", "record.stop"})
    EXPECT_EQ(ask(session, method)["error"]["code"], "failed_precondition") << method;
  EXPECT_EQ(front_.asked, std::vector<std::string>{"plan {}"});
}

TEST_F(OperationsTest, ARecordingHasAllThatWasTold) {
  control_.record_below(records_);
  ControlSession session(control_, {.connection = 1});
  (void)port_.record({.type = EventType::kTier, .a = 7});  // before it began
  const json began = ask(session, "record.start", {{"directory", "run-1"}});
  ASSERT_TRUE(began.contains("result")) << began;
  EXPECT_EQ(began["result"]["directory"], records_ + "/run-1");
  EXPECT_EQ(ask(session, "record.start", {{"directory", "run-2"}})["error"]["code"], "failed_precondition");
  EXPECT_EQ(ask(session, "snapshot")["result"]["recording"]["runs"], true);
  for (uint64_t i = 0; i < 500; ++i) (void)port_.record({.type = EventType::kTier, .a = i});
  const uint64_t last = ring_->last_sequence();
  const json ended = ask(session, "record.stop")["result"];
  EXPECT_EQ(ended["lost"], 0);
  EXPECT_EQ(ended["error"], nullptr);
  EXPECT_EQ(ask(session, "record.stop")["error"]["code"], "not_found");
  EXPECT_EQ(ask(session, "snapshot")["result"]["recording"], nullptr);
  const std::vector<SourceEvents> read = value_of(read_events(linux_file_system(), records_ + "/run-1"));
  ASSERT_EQ(read.size(), 1u);
  ASSERT_GE(read[0].events.size(), last);
  EXPECT_EQ(read[0].events.size(), ended["events"]);
  for (uint64_t i = 0; i < last; ++i) ASSERT_EQ(read[0].events[i].sequence, i + 1);
  EXPECT_EQ(ask(session, "record.start", {{"directory", "run-1"}})["error"]["code"], "io");  // it is there
}

TEST_F(OperationsTest, ARecordingLiesOnlyBelowWhatWasConfigured) {
  ControlSession session(control_, {.connection = 1});
  EXPECT_EQ(ask(session, "record.start", {{"directory", "run"}})["error"]["code"], "failed_precondition");
  control_.record_below(records_);
  for (const std::string& name :
       std::vector<std::string>{"", ".", "..", "../run", "/tmp/run", "a/b", ".run", "run\n", std::string(65, 'a')})
    EXPECT_EQ(ask(session, "record.start", {{"directory", name}})["error"]["code"], "invalid_argument") << name;
  EXPECT_EQ(ask(session, "record.start")["error"]["code"], "invalid_argument");
}

TEST_F(OperationsTest, ARecordingEndsAtItsBytes) {
  control_.record_below(records_);
  ControlSession session(control_, {.connection = 1});
  (void)port_.record({.type = EventType::kTier, .a = 7});
  ASSERT_TRUE(ask(session, "record.start", {{"directory", "run"}, {"bytes", 1}}).contains("result"));
  json recording;
  do {
    recording = ask(session, "snapshot")["result"]["recording"];
  } while (recording["runs"] == true);
  EXPECT_GT(recording["bytes"], 4096);
  EXPECT_TRUE(ask(session, "record.start", {{"directory", "next"}}).contains("result"));  // in its place
}

// The disk is full, now and from now on: what was written is whole, that it has ended is said, and nobody waits.
TEST_F(OperationsTest, ADiskThatIsFullEndsARecordingAndNothingElse) {
  for (uint64_t call = 1; call < 30; ++call) {
    SCOPED_TRACE(call);
    test::FaultyFileSystem files;
    const std::string to = fmt::format("{}/{}", temporary_.path(), call);
    files.plan.set(test::Fault::kError, call, ENOSPC, true);
    auto recorder = Recorder::create(files, events_, to);
    if (!recorder) continue;
    RecorderThread thread(std::move(*recorder), std::chrono::seconds(0), UINT64_MAX);
    for (uint64_t i = 0; i < 100; ++i) EXPECT_GT(port_.record({.type = EventType::kTier, .a = i}), 0u);
    const auto written = [&thread] { return thread.now().first.events >= 100; };
    for (int looks = 0; looks < 10'000 && thread.runs() && !written(); ++looks)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_TRUE(written() || !thread.runs()) << "it goes on, and writes nothing";
    const auto [counts, status] = thread.stop();
    EXPECT_EQ(static_cast<bool>(status), !files.plan.fired());
    files.plan.clear();
    const auto read = read_events(linux_file_system(), to);
    if (!read) continue;  // not even a head
    uint64_t next = 1;
    for (const Event& event : read->at(0).events) ASSERT_EQ(event.sequence, next++);
  }
}

}  // namespace
}  // namespace torpor::console
