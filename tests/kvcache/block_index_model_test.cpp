// SPDX-License-Identifier: Apache-2.0
// The index beside a naive model of its rules, step by step over random calls: every answer is the same, every key is
// found in the same places, and the index agrees with itself after each step. What it tells is what is found.
#include <map>
#include <optional>
#include <random>
#include <set>

#include "base/event_ring.h"
#include "kvcache/block_index.h"
#include "tests/kvcache/block_index_model.h"
#include "tests/support/long_run.h"
#include "tests/support/manual_clock.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::Name;
using test::value_of;
using Model = test::IndexModel;

BlockKey key_of(Name name) {
  BlockKey key{.group = name.second % 3, .space = name.first};
  key.hash[name.second % 16] = static_cast<uint8_t>(name.second + 1);
  return key;
}

class RandomUse {
 public:
  RandomUse(const BlockIndexOptions& options, uint32_t seed)
      : options_(options),
        model_(options),
        index_(value_of(BlockIndex::create(options, EventPort(*ring_, clock_)))),
        random_(seed) {}

  void step() {
    const StoreId store = std::array{StoreId::kHost, StoreId::kHost, StoreId::kDisk, StoreId::kRemote}[below(4)];
    switch (below(24)) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4:
      case 5:
      case 6:
      case 7: return reserve(store);
      case 8:
      case 9:
      case 10:
      case 11:
      case 12:
      case 13: return end(store);
      case 14:
      case 15:
      case 16: return pin(store);
      case 17:
      case 18:
      case 19: return unpin();
      case 20: return damage(store);
      case 21: return reinsert();
      case 22: return back(store);
      default: return rarely();
    }
  }
  void compare() {
    ASSERT_SUCCEEDS(index_->check());
    for (uint32_t space = 0; space <= space_; ++space) {
      for (uint32_t number = 0; number < kNumbers; ++number) {
        const BlockKey key = key_of({space, number});
        BlockLocations found;
        index_->run({&key, 1}, {&found, 1});
        ASSERT_EQ(found, model_.places({space, number})) << space << ", " << number;
      }
    }
    for (int32_t block = 0; block < options_.device_blocks; ++block) {
      const Backing& backing = backings_[block];
      std::array<Slot, kStores> expected = {-1, -1, -1};
      for (const auto& [store, named] : backing.slots) {
        const Model::Record& record = model_.at(store, named.first);
        if (record.state == Model::State::kVisible && record.born == named.second)
          expected[static_cast<size_t>(store)] = named.first;
      }
      ASSERT_EQ(index_->backing(block, backing.version),
                (BlockLocations{.host = expected[0], .disk = expected[1], .remote = expected[2]}));
      ASSERT_FALSE(index_->backing(block, ContentVersion{version_ + 1}).anywhere());
    }
  }
  // Folded, the events are what is found in host memory and on disk.
  void compare_published() {
    std::vector<Event> events;
    reader_.read(events, true);
    ASSERT_EQ(reader_.lost(), 0u);
    for (const Event& event : events) {
      std::set<Published>& in = published_[event.from - 1u];
      const Published key(event.key.bytes, event.b);
      if (event.type == EventType::kRegistered) {
        ASSERT_TRUE(in.insert(key).second);
        ASSERT_EQ(high_of(event.a), options_.block_tokens);
        continue;
      }
      const auto reason = static_cast<DropReason>(event.to);
      done[std::string(name(reason))] += 1;
      if (reason == DropReason::kCleared) {
        ASSERT_EQ(event.a, in.size());
        in.clear();
      } else {
        ASSERT_EQ(in.erase(key), 1u);
      }
    }
    std::array<std::set<Published>, 2> truth;
    for (uint32_t number = 0; number < kNumbers; ++number) {
      const BlockKey key = key_of({space_, number});
      Published as{{}, key.group};
      std::copy_n(key.hash.begin(), as.first.size(), as.first.begin());
      const BlockLocations places = model_.places({space_, number});
      if (places.host >= 0) truth[0].insert(as);
      if (places.disk >= 0) truth[1].insert(as);
    }
    ASSERT_EQ(published_, truth);
  }
  std::map<std::string, int> done;

 private:
  using Published = std::pair<std::array<uint8_t, 16>, uint64_t>;  // key, group
  static constexpr uint32_t kNumbers = 40;
  struct Backing {
    ContentVersion version = ContentVersion::kNone;
    std::map<StoreId, std::pair<Slot, uint64_t>> slots;
  };
  using Place = std::pair<StoreId, Slot>;

  uint32_t below(size_t limit) { return static_cast<uint32_t>(random_() % limit); }
  std::optional<Slot> any(StoreId store, Model::State state) {
    std::vector<Slot> slots;
    for (Slot slot = 0; slot < model_.size(store); ++slot) {
      if (model_.at(store, slot).state == state) slots.push_back(slot);
    }
    return slots.empty() ? std::nullopt : std::optional(slots[below(slots.size())]);
  }
  void reserve(StoreId store) {
    std::optional<Name> name = Name{below(8) == 0 && space_ > 0 ? space_ - 1 : space_, below(kNumbers)};
    if (store == StoreId::kHost && below(10) == 0) name.reset();
    const BlockKey key = name ? key_of(*name) : BlockKey{};
    const Result<Slot> slot = index_->reserve(store, name ? &key : nullptr);
    const Slot expected = model_.reserve(store, name);
    if (expected >= 0) {
      ASSERT_TRUE(test::succeeded(slot));
      ASSERT_EQ(*slot, expected);
    } else {
      ASSERT_FALSE(slot);
      ASSERT_EQ(slot.error().code, expected == -1 ? Code::kResourceExhausted : Code::kFailedPrecondition);
    }
    ++done[expected >= 0 ? "reserved" : expected == -1 ? "no room" : "refused"];
  }
  void end(StoreId store) {
    const std::optional<Slot> slot = any(store, Model::State::kReserved);
    if (!slot) return;
    if (below(8) > 0) {
      index_->commit(store, *slot);
      model_.commit(store, *slot);
      ++pins_[{store, *slot}];
      if (below(3) > 0) unpin_at({store, *slot});
      return;
    }
    const bool unproven = below(30) == 0;
    index_->abandon(store, *slot, unproven);
    model_.abandon(store, *slot, unproven);
    ++done[unproven ? "unproven" : "abandoned"];
  }
  void pin(StoreId store) {
    const std::optional<Slot> slot = any(store, below(4) == 0 ? Model::State::kReserved : Model::State::kVisible);
    if (!slot) return;
    index_->pin(store, *slot);
    model_.pin(store, *slot);
    ++pins_[{store, *slot}];
  }
  void unpin() {
    if (pins_.empty()) return;
    unpin_at(std::next(pins_.begin(), below(pins_.size()))->first);
  }
  void unpin_at(Place place) {
    index_->unpin(place.first, place.second);
    model_.unpin(place.first, place.second);
    if (--pins_[place] == 0) pins_.erase(place);
  }
  void damage(StoreId store) {
    const std::optional<Slot> slot = any(store, Model::State::kVisible);
    if (!slot) return;
    index_->damaged(store, *slot);
    model_.damaged(store, *slot);
    ++done["damaged"];
  }
  void reinsert() {
    const std::vector<LeavingBlock> leaving = index_->leaving();
    for (const LeavingBlock& block : leaving) {
      ASSERT_EQ(model_.at(StoreId::kDisk, block.slot).state, Model::State::kVisible);
      ASSERT_EQ(key_of(*model_.at(StoreId::kDisk, block.slot).name), block.key);
    }
    std::optional<Slot> old = any(StoreId::kDisk, Model::State::kVisible);
    if (!leaving.empty() && below(2) == 0) old = leaving[below(leaving.size())].slot;
    if (!old || model_.being_replaced(*old) || model_.retired(model_.at(StoreId::kDisk, *old).name->first)) return;
    index_->pin(StoreId::kDisk, *old);
    model_.pin(StoreId::kDisk, *old);
    ++pins_[{StoreId::kDisk, *old}];
    const Result<Slot> slot = index_->reinsert(*old);
    const Slot expected = model_.reinsert(*old);
    ASSERT_EQ(slot ? *slot : -1, expected);
    ++done[expected >= 0 ? "appended again" : "no room to append"];
  }
  void back(StoreId store) {
    const std::optional<Slot> slot = any(store, Model::State::kVisible);
    if (!slot || options_.device_blocks == 0) return;
    const auto block = static_cast<int32_t>(below(static_cast<size_t>(options_.device_blocks)));
    Backing& backing = backings_[block];
    if (backing.version == ContentVersion::kNone || below(2) == 0)
      backing = {.version = ContentVersion{++version_}, .slots = {}};
    index_->back(block, backing.version, store, *slot);
    backing.slots[store] = {*slot, model_.at(store, *slot).born};
  }
  void rarely() {
    switch (below(6)) {
      case 0:
        if (below(4) > 0 || space_ > 8) return;
        ASSERT_SUCCEEDS(index_->retire(space_));
        model_.retire(space_++);
        ++done["retired"];
        return;
      case 1:
        index_->close_segment();
        model_.close_segment();
        return;
      default: {
        std::set<std::pair<int, int32_t>> dropped;
        for (const Dropped& each : index_->reports().take_dropped())
          ASSERT_TRUE(dropped.emplace(static_cast<int>(each.store), each.number).second);
        ASSERT_EQ(dropped, model_.dropped);
        model_.dropped.clear();
        ++done["dropped taken"];
      }
    }
  }

  const BlockIndexOptions options_;
  Model model_;
  const test::ManualClock clock_;
  const std::unique_ptr<EventRing> ring_ = value_of(EventRing::in_memory({}, 256));
  EventReader reader_{*ring_};
  std::array<std::set<Published>, 2> published_;
  std::unique_ptr<BlockIndex> index_;
  std::mt19937 random_;
  std::map<Place, int> pins_;  // but for those of reservations
  std::map<int32_t, Backing> backings_;
  uint64_t version_ = 0;
  uint32_t space_ = 0;
};

TEST(BlockIndex, UnderRandomUseItIsWhatItsRulesSay) {
  std::map<std::string, int> done;
  const uint32_t seeds = test::long_run() ? 400 : 20;
  for (uint32_t seed = 0; seed < seeds; ++seed) {
    RandomUse use({.host_slots = static_cast<int32_t>(4 + seed % 17),
                   .disk_segments = static_cast<int32_t>(2 + seed % 5),
                   .segment_slots = static_cast<int32_t>(1 + seed % 4),
                   .remote_slots = static_cast<int32_t>(seed % 9),
                   .device_blocks = 6,
                   .block_tokens = 16},
                  seed);
    for (int step = 0; step < 1000; ++step) {
      use.step();
      if (!::testing::Test::HasFatalFailure()) use.compare();
      if (!::testing::Test::HasFatalFailure()) use.compare_published();
      ASSERT_FALSE(::testing::Test::HasFatalFailure()) << "seed " << seed << ", step " << step;
    }
    for (const auto& [what, times] : use.done) done[what] += times;
  }
  for (const char* what : {"reserved", "no room", "refused", "abandoned", "unproven", "damaged", "appended again",
                           "no room to append", "retired", "dropped taken", "evicted", "discarded", "cleared"})
    EXPECT_GT(done[what], static_cast<int>(seeds / 4)) << what;
}

}  // namespace
}  // namespace torpor
