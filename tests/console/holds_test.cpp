// SPDX-License-Identifier: Apache-2.0
// Breakpoints that hold one request or transfer, and calls that change what an engine's stores have.
#include <fmt/core.h>

#include "console/control.h"
#include "console/reference_run.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::console {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using test::value_of;

// A reference engine with stores below it, looked at by a console.
class HoldsTest : public testing::Test, public OffloadAccess {
 protected:
  HoldsTest() {
    options_.engine.num_blocks = 64;
    options_.engine.transfers_have_threads = false;
    options_.engine.tiers = {.host_blocks = 64};
    EXPECT_SUCCEEDS(run_.begin(options_));
    control_.serve(this);
  }
  Status use(const std::function<Status(OffloadScheduler&)>& work) override { return work(*run_.engine().offload()); }
  Result<std::vector<BlockKey>> keys_of(const std::string& request) override {
    return Error{.code = Code::kNotFound, .what = request};
  }
  void add(const std::string& id, int32_t words) {
    EXPECT_SUCCEEDS(run_.add({.id = id, .prompt = std::vector<int32_t>(41, words), .max_tokens = 12}));
  }
  // The answers, by request.
  std::map<std::string, std::vector<int32_t>> go(int steps) {
    for (int i = 0; i < steps; ++i) {
      clock_.set(clock_.now() + 20ms);
      for (const reference::ReferenceOutput& output : run_.step()) answers_[output.id].push_back(output.token);
      (void)run_.step_offload();
    }
    return answers_;
  }
  json ask(const std::string& method, const json& params = json::object()) {
    const auto result = control_.call({.connection = 1}, *find_control_method(method), params);
    return result ? json(*result) : json{{"code", name(result.error().code)}, {"what", result.error().what}};
  }
  uint64_t counted(Way way, BlockOutcome outcome) {
    return run_.engine().offload()->queue().counts(way)[static_cast<size_t>(outcome)];
  }
  // Of what is on its way down and not committed.
  json candidates() { return ask("events", {{"types", "candidate"}})["events"]; }

  const test::TemporaryDirectory temporary_{test::in_memory()};
  const std::unique_ptr<EventRing> ring_ = value_of(EventRing::in_memory({.role = "core"}, 1 << 14));
  RunClock clock_;
  ReferenceRun run_{{.files = linux_file_system(), .directory = temporary_ / "run"}, *ring_, clock_};
  RunOptions options_;
  Control control_{*ring_, clock_, ControlRole::kOperate};
  std::map<std::string, std::vector<int32_t>> answers_;
};

TEST_F(HoldsTest, OneRequestIsNotAdmittedAndOthersAreServed) {
  const json hold = ask("breakpoint.add", {{"type", "request"}, {"request", "held*"}, {"alone", true}, {"lease", 60}});
  ASSERT_TRUE(hold.contains("breakpoint")) << hold;
  add("held-1", 1);
  add("other", 2);
  auto answers = go(40);
  EXPECT_EQ(answers["other"].size(), 12u);
  EXPECT_TRUE(answers["held-1"].empty());
  const json stops = ask("stops")["stops"];
  ASSERT_EQ(stops.size(), 1u);
  EXPECT_EQ(stops[0]["cause"], "hold");
  EXPECT_EQ(stops[0]["request"], "held-1");
  EXPECT_EQ(stops[0]["held"], 1);
  EXPECT_EQ(ask("step")["code"], "failed_precondition");  // the engine itself does not stand
  (void)ask("resume");
  answers = go(40);
  EXPECT_EQ(answers["held-1"].size(), 12u);
  add("held-2", 3);  // it is there still, for the next one: which may have the first one's number
  EXPECT_TRUE(go(10)["held-2"].empty());
  ask("breakpoint.remove", {{"breakpoint", hold["breakpoint"]}});
  EXPECT_EQ(go(40)["held-2"].size(), 12u);
}

TEST_F(HoldsTest, TheTokensAreThoseOfARunWithoutIt) {
  add("a", 1);
  add("b", 2);
  const auto expected = go(60);
  answers_.clear();
  ASSERT_SUCCEEDS(run_.begin(options_));
  (void)ask("breakpoint.add", {{"type", "request"}, {"request", "a"}, {"alone", true}, {"once", true}});
  (void)ask("breakpoint.add", {{"type", "candidate"}, {"way", "offload"}, {"alone", true}});
  add("a", 1);
  add("b", 2);
  (void)go(30);
  (void)ask("resume");
  EXPECT_EQ(go(60), expected);
}

TEST_F(HoldsTest, ACandidateIsNotPromotedUntilItsStopEnds) {
  (void)ask("breakpoint.add", {{"type", "candidate"}, {"to", "promoted"}, {"way", "offload"}, {"alone", true}});
  add("a", 1);
  (void)go(20);
  EXPECT_EQ(counted(Way::kOffload, BlockOutcome::kTransferred), 0u);
  EXPECT_GT(run_.engine().offload()->queue().queued_blocks(), 0);
  ASSERT_SUCCEEDS(run_.engine().offload()->queue().check());
  (void)ask("resume");
  (void)go(20);
  EXPECT_GT(counted(Way::kOffload, BlockOutcome::kTransferred), 0u);
  ASSERT_SUCCEEDS(run_.engine().offload()->queue().check());
}

// Numbers of requests are used again. A hold for one request asks for no further one, but what it matches while it
// stands waits with it.
TEST_F(HoldsTest, UnderTheNumberOfAnEarlierMatchAnotherRequestIsNotHeld) {
  add("a-1", 1);
  add("a-2", 2);
  (void)go(40);
  (void)ask("breakpoint.add", {{"type", "request"}, {"request", "a-*"}, {"alone", true}, {"once", true}});
  add("a-3", 3);
  (void)go(2);
  ASSERT_EQ(ask("stops")["stops"].size(), 1u);
  add("b", 4);
  EXPECT_EQ(go(40)["b"].size(), 12u);
  EXPECT_TRUE(answers_["a-3"].empty());
  add("a-4", 5);
  EXPECT_TRUE(go(4)["a-4"].empty());
  EXPECT_EQ(ask("stops")["stops"][0]["held"], 2);
  (void)ask("resume");
  EXPECT_EQ(go(60)["a-3"].size(), 12u);
  EXPECT_EQ(answers_["a-4"].size(), 12u);
}

TEST_F(HoldsTest, WithTheLeaseItGoesOnByItself) {
  (void)ask("breakpoint.add", {{"type", "request"}, {"alone", true}, {"once", true}, {"lease", 1}});
  add("a", 1);
  EXPECT_TRUE(go(20)["a"].empty());
  EXPECT_EQ(go(80)["a"].size(), 12u);  // and nobody looked at the stop
  const json published = ask("events", {{"types", "stop"}})["events"];
  ASSERT_EQ(published.size(), 2u);
  EXPECT_EQ(published[1]["to"], "expired");
}

TEST_F(HoldsTest, ASleepEndsItAndIsNotHeldUp) {
  (void)ask("breakpoint.add", {{"type", "request"}, {"request", "a"}, {"alone", true}, {"lease", 60}});
  (void)ask("breakpoint.add", {{"type", "candidate"}, {"way", "offload"}, {"alone", true}, {"lease", 60}});
  add("a", 1);
  add("b", 2);
  (void)go(8);
  ASSERT_EQ(ask("stops")["stops"].size(), 2u);
  ASSERT_SUCCEEDS(run_.sleep({.level = 1, .preserve_state = true}));
  EXPECT_EQ(ask("stops")["stops"].size(), 0u);
  ASSERT_SUCCEEDS(run_.wake({}));
  EXPECT_EQ(go(60)["a"].size(), 12u);  // it waited once
}

TEST_F(HoldsTest, WhatCannotBeHeldIsRefused) {
  for (const json& params : std::vector<json>{{{"type", "slot"}, {"alone", true}},
                                              {{"type", "candidate"}, {"to", "completed"}, {"alone", true}},
                                              {{"type", "request"}, {"alone", true}, {"after", 2}}})
    EXPECT_EQ(ask("breakpoint.add", params)["code"], "invalid_argument") << params;
}

TEST_F(HoldsTest, AHeldCandidateCanBeCancelledAndACommittedOneCannot) {
  const json hold = ask("breakpoint.add", {{"type", "candidate"}, {"way", "offload"}, {"alone", true}});
  add("a", 1);
  (void)go(6);
  const json first = candidates()[0];
  const json done = ask("transfer.cancel", {{"candidate", first["candidate"]}});
  EXPECT_EQ(done["blocks"], first["blocks"]) << done;
  EXPECT_EQ(counted(Way::kOffload, BlockOutcome::kCancelled), first["blocks"].get<uint64_t>());
  ASSERT_SUCCEEDS(run_.engine().offload()->queue().check());
  EXPECT_EQ(ask("transfer.cancel", {{"candidate", first["candidate"]}})["code"], "not_found");
  EXPECT_EQ(ask("transfer.cancel", {{"candidate", 1}})["code"], "not_found");  // a load that never was
  EXPECT_EQ(ask("transfer.cancel")["code"], "invalid_argument");
  (void)go(40);
  for (const json& each : candidates()) (void)ask("transfer.cancel", {{"candidate", each["candidate"]}});
  EXPECT_EQ(run_.engine().offload()->queue().queued_blocks(), 0);
  (void)ask("breakpoint.remove", {{"breakpoint", hold["breakpoint"]}});
  (void)go(2);
  add("b", 2);
  (void)go(60);  // what takes the place of a cancelled one is not held with it
  EXPECT_EQ(run_.engine().offload()->queue().queued_blocks(), 0);
  EXPECT_GT(counted(Way::kOffload, BlockOutcome::kTransferred), 0u);
}

TEST_F(HoldsTest, DroppedBlocksAreFoundNoMore) {
  add("a", 1);
  (void)go(60);
  OffloadScheduler& offload = *run_.engine().offload();
  const int64_t before = offload.index().counts(StoreId::kHost).visible;
  ASSERT_GT(before, 0);
  const auto tokens = static_cast<size_t>(options_.engine.model.block_tokens);
  const BlockKey first = key_of(BlockIdentity{.tokens = std::vector<int32_t>(tokens, 1)}, offload.space());
  std::string key;
  for (const uint8_t byte : first.hash) key += fmt::format("{:02x}", byte);
  EXPECT_EQ(ask("block.drop", {{"keys", key}, {"tier", "host"}}), (json{{"dropped", 1}, {"pinned", 0}, {"absent", 0}}));
  EXPECT_EQ(offload.index().counts(StoreId::kHost).visible, before - 1);
  EXPECT_EQ(ask("block.drop", {{"keys", key}, {"tier", "host"}})["absent"], 1);
  EXPECT_EQ(ask("block.demote", {{"keys", key}})["code"], "failed_precondition");  // there is no disk
  EXPECT_EQ(ask("block.drop", {{"keys", key}, {"tier", "device"}})["code"], "invalid_argument");
  EXPECT_EQ(ask("block.drop", {{"keys", "xy"}, {"tier", "host"}})["code"], "invalid_argument");
  EXPECT_EQ(ask("block.drop", {{"tier", "host"}})["code"], "invalid_argument");
  EXPECT_EQ(ask("block.drop", {{"request", "b"}, {"tier", "host"}})["code"], "not_found");
  ASSERT_SUCCEEDS(offload.check());
}

TEST_F(HoldsTest, APinnedBlockStays) {
  add("a", 1);
  (void)go(60);
  BlockIndex& index = run_.engine().offload()->index();
  const auto tokens = static_cast<size_t>(options_.engine.model.block_tokens);
  const BlockKey key = key_of(BlockIdentity{.tokens = std::vector<int32_t>(tokens, 1)}, 1);
  BlockLocations places;
  ASSERT_EQ(index.run({&key, 1}, {&places, 1}), 1u);
  index.pin(StoreId::kHost, places.host);
  EXPECT_EQ(run_.engine().offload()->drop({&key, 1}, StoreId::kHost).pinned, 1u);
  index.unpin(StoreId::kHost, places.host);
  EXPECT_EQ(run_.engine().offload()->drop({&key, 1}, StoreId::kHost).dropped, 1u);
}

// Each has what is its own, and has it after its end, too.
TEST_F(HoldsTest, ARequestsStoryHasItsStatesAndItsStop) {
  (void)ask("breakpoint.add", {{"type", "request"}, {"request", "a"}, {"alone", true}, {"lease", 60}});
  add("a", 1);
  add("ab", 2);
  (void)go(6);
  const json held = ask("request", {{"request", "a"}});
  ASSERT_TRUE(held.contains("slot")) << held;
  EXPECT_EQ(held["slot"]["state"], "initialized");
  EXPECT_EQ(held["prompt_tokens"], 41);
  ASSERT_EQ(held["stops"].size(), 1u);
  EXPECT_EQ(held["stops"][0]["cause"], "hold");
  const json other = ask("request", {{"request", "ab"}});
  EXPECT_EQ(other["slot"]["state"], "decoding");
  EXPECT_TRUE(other["stops"].empty());
  (void)ask("resume");
  (void)go(60);
  for (const std::string name : {"a", "ab"}) {
    const json story = ask("request", {{"request", name}});
    EXPECT_TRUE(story["slot"].is_null());
    std::vector<std::string> states;
    for (const json& each : story["states"]) states.push_back(each["state"]);
    EXPECT_EQ(states, (std::vector<std::string>{"initialized", "prefilling", "decoding", "finished"}));
    EXPECT_TRUE(story["transfers"].empty());
    for (const json& event : story["events"]) EXPECT_EQ(event["request"], name) << event;
    const json end = ask("request", {{"request", name}, {"limit", 2}});
    ASSERT_EQ(end["events"].size(), 2u);
    EXPECT_EQ(end["events"][1], story["events"].back());
  }
  EXPECT_EQ(ask("request", {{"request", "b"}})["code"], "not_found");
  EXPECT_EQ(ask("request")["code"], "invalid_argument");
}

// The device has lost its prompt's blocks, and host memory has them.
TEST_F(HoldsTest, ARequestsStoryHasWhatIsLoadedForIt) {
  options_.engine.tiers.host_blocks = 512;
  ASSERT_SUCCEEDS(run_.begin(options_));
  add("a", 1);
  (void)go(60);
  for (int i = 2; i < 12; ++i) {
    add(fmt::format("other-{}", i), i);
    (void)go(20);
  }
  add("again", 1);
  (void)go(40);
  const json story = ask("request", {{"request", "again"}});
  ASSERT_EQ(story["hits"].size(), 1u) << story;
  ASSERT_EQ(story["transfers"].size(), 1u) << story;
  const json& load = story["transfers"][0];
  EXPECT_EQ(load["way"], "onboard");
  EXPECT_EQ(load["state"], "completed");
  EXPECT_EQ(load["jobs"].size(), 1u);
  EXPECT_GT(load["blocks"], 0);
  EXPECT_EQ(load["ended_blocks"], (json{{"transferred", load["blocks"]}}));
  EXPECT_EQ(story["hits"][0]["host_blocks"], load["blocks"]);
  EXPECT_LE(load["began"], load["time"]);
  const json first = ask("request", {{"request", "a"}});  // whose numbers others have had since
  EXPECT_TRUE(first["transfers"].empty());
  EXPECT_EQ(first["events"].back()["to"], "finished");
}

TEST_F(HoldsTest, AProcessWithoutStoresSaysSo) {
  control_.serve(static_cast<OffloadAccess*>(nullptr));
  EXPECT_EQ(ask("transfer.cancel", {{"candidate", 1}})["code"], "unsupported");
  EXPECT_EQ(ask("breakpoint.add", {{"type", "candidate"}, {"alone", true}})["what"], "this process offloads no blocks");
  EXPECT_TRUE(ask("breakpoint.add", {{"type", "request"}, {"alone", true}}).contains("breakpoint"));
}

}  // namespace
}  // namespace torpor::console
