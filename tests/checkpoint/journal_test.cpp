#include "checkpoint/journal.h"
#include "checkpoint/state_sections.h"

#include <random>

#include "tests/support/example_state.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::value_of;

// Changes a state as an engine might, at random: requests come, go on, are preempted and end; blocks are taken and
// freed.
class RandomEngine {
 public:
  explicit RandomEngine(uint64_t seed) : random_(seed), state_(test::example_of_two_groups().state) {
    state_.kv.num_blocks = 64;
    for (int32_t id = 8; id < 64; ++id) state_.kv.free_order.push_back(id);
  }
  const SchedulerCheckpoint& state() const { return state_; }

  void step() {
    for (RequestState& request : state_.scheduler.requests) {
      if (one_in(3)) continue;
      request.output_token_ids.push_back(static_cast<int32_t>(random_() % 1000));
      request.num_computed_tokens += 1;
      if (one_in(4)) request.block_hashes.insert(request.block_hashes.end(), 2, static_cast<uint8_t>(random_()));
      if (one_in(4)) take_block(request.id);
    }
    if (one_in(3)) add();
    if (one_in(4) && !state_.scheduler.requests.empty()) remove();
    if (one_in(5)) std::swap(state_.scheduler.running, state_.scheduler.waiting);
    if (one_in(6)) state_.scheduler.engine.data = static_cast<int64_t>(random_());
    if (one_in(6)) state_.workers[0].default_generator.push_back(7);
    if (one_in(6) && !state_.kv.prefix_index.empty()) state_.kv.prefix_index.erase(state_.kv.prefix_index.begin());
    if (one_in(6)) state_.kv.prefix_index.push_back({{9, ++keys_}, {1}});
    if (one_in(9)) std::shuffle(state_.kv.free_order.begin(), state_.kv.free_order.end(), random_);
    if (one_in(9)) state_.kv.extra_hashes.push_back({1, {{1, 2}}});
  }

 private:
  bool one_in(uint64_t n) { return random_() % n == 0; }
  void take_block(const std::string& id) {
    if (state_.kv.free_order.empty()) return;
    const int32_t block = state_.kv.free_order.front();
    state_.kv.free_order.erase(state_.kv.free_order.begin());
    std::vector<KvTable>& tables = state_.kv.groups[random_() % state_.kv.groups.size()].tables;
    const auto table =
        std::find_if(tables.begin(), tables.end(), [&](const KvTable& each) { return each.request == id; });
    (table == tables.end() ? tables.emplace_back(KvTable{.request = id}) : *table).blocks.push_back(block);
    std::erase_if(state_.kv.blocks, [&](const KvBlock& each) { return each.id == block; });
    state_.kv.blocks.push_back({block, 1, one_in(2) ? Bytes{static_cast<uint8_t>(block)} : Bytes{}, 4});
    std::sort(state_.kv.blocks.begin(), state_.kv.blocks.end(),
              [](const KvBlock& a, const KvBlock& b) { return a.id < b.id; });
  }
  void add() {
    const std::string id = "new" + std::to_string(random_() % 100000);
    state_.scheduler.requests.push_back(test::example_request(id, RequestStatus::kWaiting, 3, 0, 0));
    state_.scheduler.waiting.push_back(id);
  }
  void remove() {
    const std::string id = state_.scheduler.requests[random_() % state_.scheduler.requests.size()].id;
    std::erase_if(state_.scheduler.requests, [&](const RequestState& request) { return request.id == id; });
    for (auto* queue : {&state_.scheduler.running, &state_.scheduler.waiting, &state_.scheduler.held})
      std::erase(*queue, id);
    for (KvGroup& group : state_.kv.groups) {
      for (const KvTable& table : group.tables) {
        if (table.request == id)
          state_.kv.free_order.insert(state_.kv.free_order.end(), table.blocks.begin(), table.blocks.end());
      }
      std::erase_if(group.tables, [&](const KvTable& table) { return table.request == id; });
    }
  }
  std::mt19937_64 random_;
  SchedulerCheckpoint state_;
  uint8_t keys_ = 0;  // each key of the prefix index is there once
};

TEST(Journal, ReplayingTheDifferencesGivesTheStateItself) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    RandomEngine engine(seed);
    EngineCheckpoint base;
    base.state = engine.state();
    Journal journal;
    for (int step = 0; step < 20; ++step) {
      const SchedulerCheckpoint before = engine.state();
      engine.step();
      journal.append(value_of(step_between(before, engine.state())));
    }
    std::vector<Section> sections = encode(base);
    sections.push_back(journal.section());
    const SchedulerCheckpoint replayed = value_of(decode(sections)).state;
    ASSERT_EQ(replayed.scheduler, engine.state().scheduler) << "seed " << seed;
    ASSERT_EQ(replayed.kv.groups, engine.state().kv.groups) << "seed " << seed;
    ASSERT_EQ(replayed.kv.blocks, engine.state().kv.blocks) << "seed " << seed;
    ASSERT_EQ(replayed.kv.free_order, engine.state().kv.free_order) << "seed " << seed;
    ASSERT_EQ(replayed.kv.prefix_index, engine.state().kv.prefix_index) << "seed " << seed;
    ASSERT_EQ(replayed, engine.state()) << "seed " << seed;
  }
}

TEST(Journal, ALostRepeatedExchangedOrDamagedRecordIsFound) {
  RandomEngine engine(1);
  const SchedulerCheckpoint base = engine.state();
  Journal journal;
  std::vector<size_t> ends = {journal.section().bytes.size()};
  for (int step = 0; step < 3; ++step) {
    const SchedulerCheckpoint before = engine.state();
    engine.step();
    journal.append(value_of(step_between(before, engine.state())));
    ends.push_back(journal.section().bytes.size());
  }
  const Bytes whole = journal.section().bytes;
  const auto part = [&](size_t i) {
    return Bytes(whole.begin() + static_cast<std::ptrdiff_t>(i == 0 ? 0 : ends[i - 1]),
                 whole.begin() + static_cast<std::ptrdiff_t>(ends[i]));
  };
  const auto replay = [&](std::initializer_list<size_t> parts) {
    Bytes bytes;
    for (const size_t i : parts) {
      const Bytes piece = part(i);
      bytes.insert(bytes.end(), piece.begin(), piece.end());
    }
    SchedulerCheckpoint state = base;
    return replay_journal(std::as_bytes(std::span(bytes)), state);
  };
  EXPECT_SUCCEEDS(replay({0, 1, 2, 3}));
  EXPECT_FAILS(replay({0, 2, 3}), Code::kCorruption, "record 0");
  EXPECT_FAILS(replay({0, 1, 1, 2, 3}), Code::kCorruption, "record 1");
  EXPECT_FAILS(replay({0, 1, 3, 2}), Code::kCorruption, "record 1");
  for (size_t at = 4; at < whole.size(); ++at) {
    Bytes damaged = whole;
    damaged[at] ^= 0x20;
    SchedulerCheckpoint state = base;
    EXPECT_FALSE(replay_journal(std::as_bytes(std::span(damaged)), state).has_value()) << at;
  }
}

TEST(Journal, StatesOfAnotherEngineHaveNoDifference) {
  SchedulerCheckpoint other = test::example_checkpoint().state;
  other.kv.num_blocks = 9;
  EXPECT_FAILS(step_between(test::example_checkpoint().state, other), Code::kUnsupported);
}

}  // namespace
}  // namespace torpor
