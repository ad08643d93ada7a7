// SPDX-License-Identifier: Apache-2.0
#include "console/control.h"

#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <optional>

#include <fmt/core.h>

#include "base/process.h"
#include "console/event_files.h"
#include "kvcache/slot_table.h"
#include "tests/support/manual_clock.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::console {
namespace {

using nlohmann::json;
using test::value_of;

class ControlTest : public testing::Test {
 protected:
  explicit ControlTest(ControlRole role = ControlRole::kOperate) : control_(*ring_, clock_, role) {}
  std::vector<json> lines(ControlSession& session) {
    std::vector<json> found;
    std::string& output = session.output();
    for (size_t end = 0; (end = output.find('\n')) != std::string::npos; output.erase(0, end + 1))
      found.push_back(json::parse(output.substr(0, end)));
    return found;
  }
  json ask(ControlSession& session, const std::string& method, const json& params = json::object()) {
    EXPECT_TRUE(session.receive(json{{"id", 1}, {"method", method}, {"params", params}}.dump() + "\n"));
    const std::vector<json> answers = lines(session);
    EXPECT_EQ(answers.size(), 1u);
    return answers.empty() ? json() : answers[0];
  }
  test::ManualClock clock_;
  std::unique_ptr<EventRing> ring_ = value_of(EventRing::in_memory({.role = "core", .pid = 42}, 4096));
  EventPort port_{*ring_, clock_};
  Control control_;
};

class ReadOnlyControl : public ControlTest {
 protected:
  ReadOnlyControl() : ControlTest(ControlRole::kRead) {}
};

TEST_F(ControlTest, AnswersWhatIsThere) {
  SlotTable table(port_);
  (void)value_of(table.create("chat-1", 10));
  ControlSession session(control_, {.connection = 1});
  const json hello = ask(session, "hello")["result"];
  EXPECT_EQ(hello["pid"], 42);
  EXPECT_EQ(hello["role"], "control");
  EXPECT_EQ(hello["methods"].size(), control_methods().size());
  EXPECT_EQ(ask(session, "snapshot")["result"]["slots"][0]["request"], "chat-1");
  EXPECT_EQ(ask(session, "slots", {{"match", "chat"}})["result"]["slots"].size(), 1u);
  EXPECT_EQ(ask(session, "slots", {{"match", "nobody"}})["result"]["slots"].size(), 0u);
  const json events = ask(session, "events", {{"types", "slot"}})["result"];
  ASSERT_EQ(events["events"].size(), 1u);
  EXPECT_EQ(events["events"][0]["to"], "initialized");
  EXPECT_EQ(ask(session, "events", {{"after", events["next"]}})["result"]["events"].size(), 0u);
  EXPECT_EQ(ask(session, "events", {{"limit", 1}})["result"]["events"].size(), 1u);
}

TEST_F(ControlTest, SlotsAreSortedAndThenCut) {
  SlotTable table(port_);
  for (const std::string name : {"b", "c", "a"}) {
    const uint32_t slot = value_of(table.create(name, 100));
    clock_.advance(std::chrono::seconds(1));
    if (name == "c") {
      ASSERT_SUCCEEDS(table.scheduled(slot, 64, 10, 100, 5));
    }
  }
  table.step(1, 2, 10, 1000);
  ControlSession session(control_, {.connection = 1});
  const auto sorted = [&](const json& params) {
    std::string names;
    const json rows = ask(session, "slots", params)["result"]["slots"];
    for (const json& row : rows) names += row["request"].get<std::string>();
    return names;
  };
  EXPECT_EQ(sorted(json::object()), "bca");
  EXPECT_EQ(sorted({{"invert", true}}), "acb");
  EXPECT_EQ(sorted({{"sort", "request"}}), "abc");
  EXPECT_EQ(sorted({{"sort", "request"}, {"invert", true}, {"limit", 2}}), "cb");
  EXPECT_EQ(sorted({{"sort", "seconds_in_state"}}), "cab");
  EXPECT_EQ(sorted({{"sort", "computed_tokens"}}), "bac");  // equal ones as they came
  EXPECT_EQ(sorted({{"sort", "device_blocks"}, {"invert", true}, {"limit", 1}}), "c");
  EXPECT_EQ(sorted({{"sort", "state"}, {"match", "initialized"}}), "ba");
  const json error = ask(session, "slots", {{"sort", "age"}})["error"];
  EXPECT_EQ(error["code"], "invalid_argument");
  for (const std::string_view each : slot_orders()) {
    EXPECT_NE(error["next_step"].get<std::string>().find(each), std::string::npos);
    EXPECT_NE(find_control_method("slots")->parameters[1].help.find(each), std::string::npos) << each;
    EXPECT_EQ(sorted({{"sort", each}}).size(), 3u);
  }
}

// Only the beginning of a name is repeated, and of whole characters.
TEST_F(ControlTest, AnUnknownMethodIsNamedAsItWasWritten) {
  ControlSession session(control_, {.connection = 1});
  std::string name = "xx";
  for (int i = 0; i < 20; ++i) name += "€";  // 62 bytes
  EXPECT_EQ(ask(session, name + "€€")["error"]["what"], "there is no method \"" + name + "\"");
}

class QueueAndControl : public ControlTest {
 protected:
  TransferHandle add(size_t blocks) {
    return queue_.enqueue({}, std::vector<QueuedBlock>(blocks), blocks + 1, BlockOutcome::kFiltered, clock_.now());
  }
  // Ask without waiting for the answer.
  void ask_to_wait(ControlSession& session, const json& params, int id = 7) {
    EXPECT_TRUE(session.receive(json{{"id", id}, {"method", "transfer.wait"}, {"params", params}}.dump() + "\n"));
  }
  OffloadQueue queue_{{.min_batch_size = 1}, port_};
};

TEST_F(QueueAndControl, WaitsForATransferAndSaysWhatBecameOfIt) {
  ControlSession session(control_, {.connection = 1});
  const TransferHandle handle = add(3);
  ask_to_wait(session, {{"candidate", handle.number()}, {"timeout", 300}});
  EXPECT_TRUE(lines(session).empty());
  EXPECT_TRUE(session.waits());
  OffloadQueue::Batch batch;
  queue_.commit(Way::kOffload, queue_.next(Way::kOffload, clock_.now(), true), batch);
  queue_.publish_planned(batch.owners[0].ticket, 99, 3);
  queue_.end(batch.owners[0].ticket, Way::kOffload, BlockOutcome::kTransferred, 2);
  (void)session.pump();
  EXPECT_TRUE(lines(session).empty());
  queue_.end(batch.owners[0].ticket, Way::kOffload, BlockOutcome::kFailed, 1);
  (void)session.pump();
  const json wanted = {{"candidate", handle.number()},
                       {"way", "offload"},
                       {"done", true},
                       {"state", "completed"},
                       {"blocks", 4},
                       {"ended_blocks", {{"filtered", 1}, {"transferred", 2}, {"failed", 1}}},
                       {"jobs", {99}}};
  std::vector<json> answers = lines(session);
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_EQ(answers[0], json({{"id", 7}, {"result", wanted}}));
  EXPECT_FALSE(session.waits());
  EXPECT_EQ(ask(session, "transfer.wait", {{"candidate", handle.number()}})["result"], wanted);  // it has ended before
}

TEST_F(QueueAndControl, AWaitForATransferHasABound) {
  ControlSession session(control_, {.connection = 1});
  const TransferHandle handle = add(2);
  ask_to_wait(session, {{"candidate", handle.number()}, {"timeout", 2}});
  clock_.advance(std::chrono::milliseconds(1999));
  (void)session.pump();
  EXPECT_TRUE(lines(session).empty());
  clock_.advance(std::chrono::milliseconds(1));
  (void)session.pump();
  const std::vector<json> answers = lines(session);
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_EQ(answers[0]["result"]["done"], false);
  EXPECT_EQ(answers[0]["result"]["state"], "queued");
  EXPECT_EQ(answers[0]["result"]["ended_blocks"], json({{"filtered", 1}}));
  EXPECT_EQ(ask(session, "transfer.wait", {{"candidate", handle.number()}, {"timeout", 0}})["result"]["done"], false);
  EXPECT_EQ(ask(session, "transfer.wait", {{"candidate", 12345}})["error"]["code"], "not_found");
  EXPECT_EQ(ask(session, "transfer.wait")["error"]["code"], "invalid_argument");
  const json long_wait = {{"candidate", handle.number()}, {"timeout", 301}};
  EXPECT_EQ(ask(session, "transfer.wait", long_wait)["error"]["code"], "invalid_argument");
  for (size_t i = 0; i < ControlSession::kMostWaits; ++i)
    ask_to_wait(session, {{"candidate", handle.number()}, {"timeout", 300}}, static_cast<int>(i));
  EXPECT_TRUE(lines(session).empty());
  EXPECT_EQ(ask(session, "transfer.wait", {{"candidate", handle.number()}})["error"]["code"], "resource_exhausted");
}

// A process with a ring in `directory`: a child of this one, or an orphan, which is none of its workers. It lives until
// this object ends.
class OtherProcess {
 public:
  OtherProcess(const std::string& directory, bool orphan) {
    int ready[2];
    int end[2];
    EXPECT_EQ(::pipe(ready) | ::pipe(end), 0);
    child_ = ::fork();
    if (child_ == 0) {
      if (orphan && ::fork() != 0) ::_exit(0);
      (void)::close(end[1]);
      const auto ring = begin_events(directory, "rank", 0, system_clock(), 64);
      if (ring) (void)(*ring)->record({.type = EventType::kMemory, .a = 5}, system_clock().now().count());
      const pid_t self = ::getpid();
      (void)!::write(ready[1], &self, sizeof self);
      char none = 0;
      (void)!::read(end[0], &none, 1);
      ::_exit(0);
    }
    if (orphan) reap();
    EXPECT_EQ(::read(ready[0], &pid_, sizeof pid_), static_cast<ssize_t>(sizeof pid_));
    for (const int fd : {ready[0], ready[1], end[0]}) (void)::close(fd);
    end_ = end[1];
  }
  ~OtherProcess() {
    (void)::close(end_);
    if (child_ != 0) reap();
  }
  OtherProcess(const OtherProcess&) = delete;
  OtherProcess& operator=(const OtherProcess&) = delete;
  pid_t pid() const { return pid_; }

 private:
  void reap() {
    EXPECT_EQ(::waitpid(child_, nullptr, 0), child_);
    child_ = 0;
  }
  pid_t child_ = 0;
  pid_t pid_ = 0;
  int end_ = -1;
};

TEST(ControlOfWorkers, EventsOfOnesWorkersAreThereAndThoseOfOthersAreNot) {
  const test::TemporaryDirectory temporary{"/dev/shm"};
  const auto ring = value_of(begin_events(temporary / "events", "core", 0, system_clock(), 64));
  const OtherProcess orphan(temporary / "events", true);
  std::optional<OtherProcess> worker;
  worker.emplace(temporary / "events", false);
  const pid_t worker_pid = worker->pid();
  Control control(*ring, system_clock(), ControlRole::kRead);
  const auto events = [&](const json& params) {
    return control.call({.connection = 1}, *find_control_method("events"), params);
  };
  const json all = value_of(events(json::object()));
  EXPECT_EQ(all["workers"], json::parse(fmt::format(R"([{{"process": "rank0", "pid": {}}}])", worker_pid)));
  const json of_worker = value_of(events({{"pid", worker_pid}}));
  ASSERT_EQ(of_worker["events"].size(), 1u);
  EXPECT_EQ(of_worker["events"][0]["bytes"], 5);
  EXPECT_EQ(of_worker["events"][0]["pid"], worker_pid);
  EXPECT_FALSE(of_worker.contains("workers"));
  EXPECT_EQ(value_of(events({{"pid", worker_pid}, {"after", of_worker["next"]}}))["events"].size(), 0u);
  for (const pid_t other : {orphan.pid(), ::getpid(), 0})
    EXPECT_FAILS(events({{"pid", other}}), Code::kNotFound, "is no worker");
  worker.reset();  // it ends, and leaves its ring there
  EXPECT_EQ(value_of(events(json::object()))["workers"], json::array());
}

TEST(ControlOfWorkers, AProcessThatAWorkerHasStartedIsAWorker) {
  int ready[2];
  int end[2];
  ASSERT_EQ(::pipe(ready) | ::pipe(end), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    (void)::close(end[1]);
    const pid_t inner = ::fork();
    char none = 0;
    if (inner == 0) {
      (void)!::read(end[0], &none, 1);
      ::_exit(0);
    }
    (void)!::write(ready[1], &inner, sizeof inner);
    (void)::waitpid(inner, nullptr, 0);
    ::_exit(0);
  }
  pid_t inner = 0;
  ASSERT_EQ(::read(ready[0], &inner, sizeof inner), static_cast<ssize_t>(sizeof inner));
  const ProcessId id = value_of(find_process(inner));
  EXPECT_TRUE(is_descendant_of(id, child));
  EXPECT_TRUE(is_descendant_of(id, ::getpid()));
  EXPECT_FALSE(is_descendant_of(id, inner));  // it has not started itself
  EXPECT_FALSE(is_descendant_of(value_of(find_process(::getpid())), child));
  EXPECT_FALSE(is_descendant_of({.pid = inner, .started = id.started + 1}, child));  // another one of this number
  for (const int fd : {ready[0], ready[1], end[0], end[1]}) (void)::close(fd);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_FALSE(is_descendant_of(id, ::getpid()));
}

TEST_F(ControlTest, EventsEndWhereTheyAreAskedTo) {
  SlotTable table(port_);
  for (int i = 0; i < 10; ++i) table.step(1, 0, 1, 1000);
  ControlSession session(control_, {.connection = 1});
  const json part = ask(session, "events", {{"after", 3}, {"until", 7}})["result"];
  ASSERT_EQ(part["events"].size(), 4u);
  EXPECT_EQ(part["events"][0]["sequence"], 4);
  EXPECT_EQ(part["events"][3]["sequence"], 7);
  EXPECT_EQ(part["next"], 7);
  EXPECT_EQ(ask(session, "events", {{"after", part["next"]}, {"until", 10}})["result"]["events"].size(), 3u);
  EXPECT_EQ(ask(session, "events", {{"after", 3}, {"until", 7}, {"limit", 2}})["result"]["next"], 5);
  EXPECT_EQ(ask(session, "events", {{"until", 1000}})["result"]["next"], 10);
  EXPECT_EQ(ask(session, "events", {{"until", 0}})["result"]["events"].size(), 0u);
  EXPECT_EQ(ask(session, "events", {{"after", 7}, {"until", 3}})["error"]["code"], "invalid_argument");
  for (int i = 0; i < 50'000; ++i) table.step(1, 0, 1, 1000);  // rounds of the ring
  const json gone = ask(session, "events", {{"after", 3}, {"until", 7}})["result"];
  ASSERT_EQ(gone["events"].size(), 1u);
  EXPECT_EQ(gone["events"][0]["type"], "lost");
}

TEST_F(ControlTest, StopsTheEngineAndLetsItGo) {
  ControlSession session(control_, {.connection = 1, .uid = 1000, .pid = 7});
  const json stop = ask(session, "pause", {{"lease", 10}})["result"]["stop"];
  EXPECT_FALSE(port_.may_step());
  EXPECT_EQ(ask(session, "stops")["result"]["stops"][0]["left_seconds"], 10.0);
  EXPECT_EQ(ask(session, "stop.renew", {{"stop", stop}, {"lease", 20}})["result"]["left_seconds"], 20.0);
  EXPECT_EQ(ask(session, "step", {{"steps", 3}})["result"]["steps"], 3);
  EXPECT_EQ(ask(session, "resume", {{"stop", stop}})["result"]["resumed"], 1);
  EXPECT_TRUE(port_.may_step());
  EXPECT_EQ(ask(session, "resume", {{"stop", stop}})["error"]["code"], "not_found");
  // Who did it is told.
  const json published = ask(session, "events", {{"types", "control"}})["result"]["events"];
  ASSERT_EQ(published.size(), 5u);
  EXPECT_EQ(published[0]["from"], "pause");
  EXPECT_EQ(published[0]["to"], "ok");
  EXPECT_EQ(published[0]["uid"], 1000);
  EXPECT_EQ(published[4]["to"], "not_found");
}

TEST_F(ControlTest, SetsBreakpointsByTheWordsOfEvents) {
  SlotTable table(port_);
  const uint32_t old = value_of(table.create("chat-1", 10));
  ControlSession session(control_, {.connection = 1});
  const json made =
      ask(session, "breakpoint.add", {{"type", "slot"}, {"to", "prefilling"}, {"request", "chat-*"}, {"once", true}});
  ASSERT_TRUE(made.contains("result")) << made;
  ASSERT_SUCCEEDS(table.scheduled(old, 0, 10, 10));
  EXPECT_FALSE(port_.may_step());
  EXPECT_EQ(ask(session, "stops")["result"]["stops"][0]["request"], "chat-1");
  EXPECT_EQ(ask(session, "breakpoint.list")["result"]["breakpoints"][0]["matches"], 1);
  EXPECT_EQ(ask(session, "snapshot")["result"]["stops"].size(), 1u);
  EXPECT_TRUE(ask(session, "breakpoint.remove", {{"breakpoint", made["result"]["breakpoint"]}}).contains("result"));
  EXPECT_TRUE(port_.may_step());
  for (const auto& [params, named] : std::vector<std::pair<json, std::string>>{
           {{{"type", "slat"}}, "slot"},
           {{{"type", "operation"}}, "slot"},
           {{{"type", "slot"}, {"to", "asleep"}}, "preempted"},
           {{{"type", "candidate"}, {"way", "left"}}, "offload"},
           {{{"type", "step"}, {"from", "none"}}, "leave it out"},
           {{{"type", "slot"}, {"lease", 1e9}}, "300"},
           {{{"type", "slot"}, {"frm", "none"}}, "from"},
           {{{"type", "slot"}, {"every", -1}}, "every"},
       }) {
    const json error = ask(session, "breakpoint.add", params)["error"];
    EXPECT_EQ(error["code"], "invalid_argument") << params;
    EXPECT_NE((error["what"].get<std::string>() + error["next_step"].get<std::string>()).find(named), std::string::npos)
        << error;
  }
}

TEST_F(ControlTest, WhatAConnectionStoppedEndsWithItUnlessItStays) {
  {
    ControlSession session(control_, {.connection = 1});
    (void)ask(session, "pause");
    (void)ask(session, "breakpoint.add", {{"type", "step"}});
    EXPECT_FALSE(port_.may_step());
  }
  EXPECT_TRUE(port_.may_step());
  EXPECT_TRUE(control_.breakpoints().list().empty());
  {
    ControlSession session(control_, {.connection = 2});
    (void)ask(session, "pause", {{"stay", true}, {"lease", 5}});
  }
  EXPECT_FALSE(port_.may_step());
  clock_.advance(std::chrono::seconds(6));
  EXPECT_TRUE(port_.may_step());
}

TEST_F(ReadOnlyControl, NoMethodThatChangesAnythingIsCarriedOut) {
  ControlSession session(control_, {.connection = 1});
  for (const ControlMethod& method : control_methods()) {
    if (method.call == ControlCall::kPlan) continue;  // nobody is there who could make one
    const json answer = ask(session, std::string(method.name));
    EXPECT_EQ(method.operates, answer.contains("error") && answer["error"]["code"] == "failed_precondition")
        << method.name << answer;
  }
  EXPECT_TRUE(port_.may_step());
  EXPECT_TRUE(control_.breakpoints().list().empty());
}

TEST_F(ControlTest, ASubscriberHasEveryEventOrKnowsHowManyItMissed) {
  SlotTable table(port_);
  (void)value_of(table.create("before", 10));
  ControlSession session(control_, {.connection = 1});
  (void)ask(session, "subscribe", {{"types", "step,lost"}});
  session.pump();
  EXPECT_TRUE(lines(session).empty());  // of before it has nothing
  for (int i = 0; i < 100; ++i) table.step(1, 0, 1, 1000);
  session.pump();
  std::vector<json> got = lines(session);
  ASSERT_EQ(got.size(), 100u);
  EXPECT_EQ(got[0]["subscription"], 1);
  EXPECT_EQ(got[99]["event"]["type"], "step");
  const uint64_t last = got[99]["event"]["sequence"];
  for (int i = 0; i < 50'000; ++i) table.step(1, 0, 1, 1000);  // rounds of the ring
  EXPECT_TRUE(session.pump());
  got = lines(session);
  EXPECT_LE(got.size(), 300u);  // some, for the other peers wait
  while (session.pump()) {}
  for (json& line : lines(session)) got.push_back(std::move(line));
  uint64_t steps = 0;
  uint64_t lost = 0;
  for (const json& line : got) {
    steps += line["event"]["type"] == "step" ? 1 : 0;
    if (line["event"]["type"] == "lost") lost += line["event"]["count"].get<uint64_t>();
  }
  EXPECT_GT(lost, 40'000u);
  EXPECT_GE(steps + lost, ring_->last_sequence() - last - 200);  // but what is published again of requests
}

// What a snapshot holds and what is told after it are the whole, and nothing is in both.
TEST_F(ControlTest, ASnapshotAndTheEventsAfterItAreTheWhole) {
  SlotTable table(port_);
  for (int round = 0; round < 8; ++round) {
    ControlSession session(control_, {.connection = 1});
    const uint32_t slot = value_of(table.create(fmt::format("r{}", round), 10));
    const json before = ask(session, "snapshot")["result"];
    EXPECT_EQ(before["at"], ring_->last_sequence());
    EXPECT_EQ(before["slots"].back()["state"], "initialized");
    ASSERT_SUCCEEDS(table.scheduled(slot, 0, 10, 10));
    (void)ask(session, "subscribe", {{"after", before["at"]}});
    table.step(1, 0, 10, 1000);
    session.pump();
    uint64_t next = before["at"].get<uint64_t>();
    for (const json& line : lines(session)) EXPECT_EQ(line["event"]["sequence"], ++next);
    EXPECT_EQ(next, ring_->last_sequence());
    EXPECT_EQ(ask(session, "snapshot")["result"]["slots"].back()["state"], "prefilling");
  }
}

TEST_F(ControlTest, WhoDoesNotReadIsSentNoMore) {
  ControlSession session(control_, {.connection = 1});
  (void)ask(session, "subscribe");
  SlotTable table(port_);
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 4000; ++i) table.step(1, 0, 1, 1000);
    while (session.pump()) {}
  }
  EXPECT_FALSE(session.reads());
  EXPECT_LT(session.output().size(), ControlSession::kEnoughOutput + (2u << 20));
  const size_t before = session.output().size();
  EXPECT_TRUE(session.receive("{\"id\":2,\"method\":\"hello\"}\n"));
  EXPECT_EQ(session.output().size(), before);  // asked for, and answered when there is room
  session.output().clear();
  EXPECT_TRUE(session.receive({}));
  EXPECT_EQ(lines(session).at(0)["id"], 2);
}

TEST_F(ControlTest, WhatIsNoRequestIsSaidSo) {
  const auto cut = [&](const std::string& bytes) {
    ControlSession session(control_, {.connection = 1});
    const bool goes_on = session.receive(bytes);
    const std::vector<json> answers = lines(session);
    EXPECT_EQ(answers.size(), 1u) << bytes.substr(0, 80);
    EXPECT_TRUE(!answers.empty() && answers[0].contains("error")) << bytes.substr(0, 80);
    return !goes_on;
  };
  EXPECT_TRUE(cut("GET / HTTP/1.1\r\n"));
  EXPECT_TRUE(cut(std::string(17, '[') + std::string(17, ']') + "\n"));
  EXPECT_TRUE(cut(std::string(ControlSession::kMostLine + 2, 'x')));
  EXPECT_FALSE(cut("[]\n"));
  EXPECT_FALSE(cut("{\"method\":7}\n"));
  EXPECT_FALSE(cut("{\"method\":\"nothing\"}\n"));
  EXPECT_FALSE(cut("{\"method\":\"pause\",\"params\":[]}\n"));
  EXPECT_FALSE(cut("{\"method\":\"pause\",\"params\":{\"lease\":\"30\"}}\n"));
  EXPECT_FALSE(cut("{\"method\":\"pause\",\"params\":{\"lease\":1e300}}\n"));
  EXPECT_FALSE(cut("{\"method\":\"hello\",\"params\":{\"x\":1}}\n"));
  ControlSession session(control_, {.connection = 1});
  EXPECT_TRUE(session.receive("{\"id\":1,\"meth"));
  EXPECT_TRUE(session.receive("od\":\"hello\"}\n\n{\"id\":2,\"method\":\"stops\"}\n"));
  EXPECT_EQ(lines(session).size(), 2u);
}

TEST(ControlMethods, StandInTheDocsAsInTheTable) {
  std::ifstream file(TORPOR_SOURCE_DIR "/docs/console.md");
  const std::string docs(std::istreambuf_iterator<char>(file), {});
  EXPECT_NE(docs.find(control_methods_table()), std::string::npos) << control_methods_table();
}

}  // namespace
}  // namespace torpor::console
