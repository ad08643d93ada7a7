// SPDX-License-Identifier: Apache-2.0
// The rules of the index, by looking through everything at each question.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "kvcache/block_index.h"

namespace torpor::test {

using Name = std::pair<uint32_t, uint32_t>;  // space, number

class IndexModel {
 public:
  enum class State { kFree, kReserved, kVisible, kDoomed, kQuarantined, kSpent };
  struct Record {
    State state = State::kFree;
    std::optional<Name> name;
    int pins = 0;
    int kind = 0;        // 0 stale, 1 clean, 2 dirty
    uint64_t since = 0;  // when it came among those of its kind
    uint64_t born = 0;   // each content another
    Slot replaces = -1;
  };

  explicit IndexModel(const BlockIndexOptions& options) : options_(options) {
    stores_[0].resize(static_cast<size_t>(options.host_slots));
    stores_[1].resize(static_cast<size_t>(options.disk_segments * options.segment_slots));
    stores_[2].resize(static_cast<size_t>(options.remote_slots));
    for (const size_t store : {0, 2}) {
      for (size_t slot = stores_[store].size(); slot-- > 0;) free_[store].push_back(static_cast<Slot>(slot));
    }
    for (int32_t segment = options.disk_segments; segment-- > 0;) free_segments_.push_back(segment);
  }

  Record& at(StoreId store, Slot slot) { return stores_[static_cast<size_t>(store)][static_cast<size_t>(slot)]; }
  Slot holder(StoreId store, Name name) {  // visible, else one on its way
    Slot coming = -1;
    for (Slot slot = 0; slot < size(store); ++slot) {
      const Record& record = at(store, slot);
      if (record.name != name) continue;
      if (record.state == State::kVisible) return slot;
      if (record.state == State::kReserved) coming = slot;
    }
    return coming;
  }
  Slot visible(StoreId store, Name name) {
    const Slot slot = holder(store, name);
    return slot >= 0 && at(store, slot).state == State::kVisible ? slot : -1;
  }
  BlockLocations places(Name name) {
    if (retired_.contains(name.first)) return {};
    return {.host = visible(StoreId::kHost, name),
            .disk = visible(StoreId::kDisk, name),
            .remote = visible(StoreId::kRemote, name)};
  }
  // The slot, -1: no room, -2: refused.
  Slot reserve(StoreId store, std::optional<Name> name) {
    if (name && (retired_.contains(name->first) || holder(store, *name) >= 0)) return -2;
    const Slot slot = store == StoreId::kDisk ? position() : take(store);
    if (slot >= 0) at(store, slot) = {.state = State::kReserved, .name = name, .pins = 1};
    return slot;
  }
  void commit(StoreId store, Slot slot) {
    Record& record = at(store, slot);
    if (record.replaces >= 0) {
      lose(store, record.replaces);
      record.replaces = -1;
    }
    record.state = State::kVisible;
    record.born = ++time_;
    sort();
    sort_segments();
  }
  void abandon(StoreId store, Slot slot, bool unproven) {
    Record& record = at(store, slot);
    record.name.reset();
    record.replaces = -1;
    record.state = unproven ? State::kQuarantined : State::kDoomed;
    if (!unproven) unpin(store, slot);
  }
  void damaged(StoreId store, Slot slot) {
    if (store == StoreId::kDisk) not_replaced(slot);
    lose(store, slot);
    sort();
    sort_segments();
  }
  void pin(StoreId store, Slot slot) { ++at(store, slot).pins; }
  void unpin(StoreId store, Slot slot) {
    Record& record = at(store, slot);
    if (--record.pins > 0) return;
    if (record.state == State::kDoomed) return return_slot(store, slot);
    record.kind = kind(store, record);
    record.since = ++time_;
  }
  void retire(uint32_t space) {
    retired_.insert(space);
    sort();
    sort_segments();
  }
  Slot reinsert(Slot old) {
    const Slot slot = position();
    if (slot >= 0)
      at(StoreId::kDisk, slot) = {
          .state = State::kReserved, .name = at(StoreId::kDisk, old).name, .pins = 1, .replaces = old};
    return slot;
  }
  bool being_replaced(Slot slot) const {
    return std::any_of(stores_[1].begin(), stores_[1].end(), [&](const Record& each) { return each.replaces == slot; });
  }
  void close_segment() {
    if (open_ >= 0) closed_[open_] = {.stale = !useful(open_), .since = ++time_};
    open_ = -1;
  }
  Slot size(StoreId store) const { return static_cast<Slot>(stores_[static_cast<size_t>(store)].size()); }
  bool retired(uint32_t space) const { return retired_.contains(space); }
  std::set<std::pair<int, int32_t>> dropped;  // store, slot or segment

 private:
  int kind(StoreId store, const Record& record) {
    if (!record.name || retired_.contains(record.name->first)) return 0;
    return store == StoreId::kRemote || visible(StoreId::kDisk, *record.name) >= 0 ? 1 : 2;
  }
  // Those whose kind is another now come last of it; clean ones before dirty ones, the oldest first.
  void sort() {
    for (const StoreId store : {StoreId::kHost, StoreId::kRemote}) {
      std::vector<std::tuple<int, uint64_t, Slot>> moved;
      for (Slot slot = 0; slot < size(store); ++slot) {
        const Record& record = at(store, slot);
        if (record.state == State::kVisible && record.pins == 0 && kind(store, record) != record.kind)
          moved.emplace_back(record.kind, record.since, slot);
      }
      std::sort(moved.begin(), moved.end());
      for (const auto& [before, since, slot] : moved) {
        at(store, slot).kind = kind(store, at(store, slot));
        at(store, slot).since = ++time_;
      }
    }
  }
  void not_replaced(Slot slot) {  // what was to replace it is then a copy like any other
    for (Record& other : stores_[1]) {
      if (other.replaces == slot) other.replaces = -1;
    }
  }
  void lose(StoreId store, Slot slot) {
    Record& record = at(store, slot);
    record.name.reset();
    record.state = State::kDoomed;
    if (record.pins == 0) return_slot(store, slot);
  }
  void return_slot(StoreId store, Slot slot) {
    at(store, slot) = {.state = store == StoreId::kDisk ? State::kSpent : State::kFree};
    if (store != StoreId::kDisk) free_[static_cast<size_t>(store)].push_back(slot);
    if (store == StoreId::kHost) dropped.insert({0, slot});
  }
  Slot take(StoreId store) {
    auto& free = free_[static_cast<size_t>(store)];
    if (free.empty()) {
      Slot first = -1;
      for (Slot slot = 0; slot < size(store); ++slot) {
        const Record& record = at(store, slot);
        if (record.state != State::kVisible || record.pins > 0) continue;
        if (first < 0 ||
            std::pair(record.kind, record.since) < std::pair(at(store, first).kind, at(store, first).since))
          first = slot;
      }
      if (first < 0) return -1;
      lose(store, first);
    }
    const Slot slot = free.back();
    free.pop_back();
    return slot;
  }
  Slot position() {
    if (open_ >= 0 && written_[open_] == options_.segment_slots) close_segment();
    if (open_ < 0) {
      if (free_segments_.empty() && !evict()) return -1;
      open_ = free_segments_.back();
      free_segments_.pop_back();
      written_[open_] = 0;
    }
    return open_ * options_.segment_slots + written_[open_]++;
  }
  std::span<Record> records(int32_t segment) {
    return std::span(stores_[1])
        .subspan(static_cast<size_t>(segment * options_.segment_slots), static_cast<size_t>(options_.segment_slots));
  }
  bool useful(int32_t segment) {
    const auto all = records(segment);
    return std::any_of(all.begin(), all.end(), [&](const Record& record) {
      return record.state == State::kVisible && !retired_.contains(record.name->first);
    });
  }
  // Those that became useful, or useless, come last of their new kind.
  void sort_segments() {
    for (auto& [segment, closed] : closed_) {
      if (closed.stale == !useful(segment)) continue;
      closed = {.stale = !closed.stale, .since = ++time_};
    }
  }
  bool evict() {
    std::optional<int32_t> first;
    for (const auto& [segment, closed] : closed_) {
      const auto all = records(segment);
      if (std::any_of(all.begin(), all.end(), [](const Record& record) { return record.pins > 0; })) continue;
      if (!first || std::pair(!closed.stale, closed.since) < std::pair(!closed_[*first].stale, closed_[*first].since))
        first = segment;
    }
    if (!first) return false;
    const Slot begin = *first * options_.segment_slots;
    for (Slot slot = begin; slot < begin + options_.segment_slots; ++slot) {
      not_replaced(slot);
      at(StoreId::kDisk, slot) = {};
      sort();  // one after the other
    }
    closed_.erase(*first);
    free_segments_.push_back(*first);
    dropped.insert({1, *first});
    return true;
  }

 private:
  const BlockIndexOptions options_;
  std::array<std::vector<Record>, kStores> stores_;
  std::array<std::vector<Slot>, kStores> free_;
  std::vector<int32_t> free_segments_;  // the next one last
  struct Closed {
    bool stale = false;  // nothing useful in it
    uint64_t since = 0;
  };
  std::map<int32_t, Closed> closed_;
  std::map<int32_t, int32_t> written_;
  int32_t open_ = -1;
  std::set<uint32_t> retired_;
  uint64_t time_ = 0;
};

}  // namespace torpor::test
