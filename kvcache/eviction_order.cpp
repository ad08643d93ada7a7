// SPDX-License-Identifier: Apache-2.0
#include "kvcache/eviction_order.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <set>
#include <unordered_set>

#include "base/status.h"
#include "kvcache/block_list.h"

namespace torpor {

std::string_view name(EvictionPolicy policy) {
  switch (policy) {
    case EvictionPolicy::kLru: return "lru";
    case EvictionPolicy::kFifo: return "fifo";
    case EvictionPolicy::kLfu: return "lfu";
    case EvictionPolicy::kS3Fifo: return "s3-fifo";
  }
  return "lru";
}

namespace {

// LRU: searches nothing and allocates nothing.
class LruOrder final : public EvictionOrder {
 public:
  explicit LruOrder(int32_t num_blocks) : blocks_(num_blocks) {}
  void add(int32_t id, const Digest&, bool) override { blocks_.push_back(id); }
  void hit(int32_t id) override { blocks_.remove(id); }
  void discard(int32_t id) override { blocks_.remove(id); }
  bool empty() const override { return blocks_.empty(); }
  int32_t evict() override { return blocks_.pop_front(); }
  std::vector<int32_t> order() const override { return blocks_.ids(); }

 private:
  BlockList blocks_;
};

// A sorted set of blocks with space for all of them from the beginning, so that destructors can add and remove blocks
// without allocating.
template <class Rank>
class SortedBlocks {
 public:
  using Entry = std::pair<Rank, int32_t>;
  explicit SortedBlocks(int32_t num_blocks) {
    for (int32_t id = 0; id < num_blocks; ++id) sorted_.emplace(Rank{}, id);
    spare_.reserve(sorted_.size());
    while (!sorted_.empty()) spare_.push_back(sorted_.extract(sorted_.begin()));
  }
  bool empty() const { return sorted_.empty(); }
  auto begin() const { return sorted_.begin(); }
  auto end() const { return sorted_.end(); }
  auto first_from(const Rank& rank) const { return sorted_.lower_bound({rank, 0}); }
  void add(const Rank& rank, int32_t id) {
    auto node = std::move(spare_.back());
    spare_.pop_back();
    node.value() = {rank, id};
    sorted_.insert(std::move(node));
  }
  void remove(const Rank& rank, int32_t id) { spare_.push_back(sorted_.extract({rank, id})); }
  std::vector<int32_t> ids() const {
    std::vector<int32_t> ids;
    for (const auto& [rank, id] : sorted_) ids.push_back(id);
    return ids;
  }

 private:
  std::set<Entry> sorted_;
  std::vector<typename std::set<Entry>::node_type> spare_;
};

// FIFO and LFU: blocks sorted by a rank, which is fixed while a block is in the set.
class RankedOrder final : public EvictionOrder {
 public:
  RankedOrder(EvictionPolicy policy, int32_t num_blocks)
      : policy_(policy), blocks_(static_cast<size_t>(num_blocks)), order_(num_blocks) {}

  void add(int32_t id, const Digest&, bool fresh) override {
    Block& block = at(id);
    ++time_;
    if (fresh) block = {.born = time_};
    block.rank = policy_ == EvictionPolicy::kFifo ? Rank{0, block.born} : Rank{block.hits, time_};
    order_.add(block.rank, id);
  }
  void hit(int32_t id) override {
    ++at(id).hits;
    order_.remove(at(id).rank, id);
  }
  void discard(int32_t id) override { order_.remove(at(id).rank, id); }
  bool empty() const override { return order_.empty(); }
  int32_t evict() override {
    const int32_t id = order_.begin()->second;
    order_.remove(at(id).rank, id);
    return id;
  }
  std::vector<int32_t> order() const override { return order_.ids(); }

 private:
  using Rank = std::pair<uint64_t, uint64_t>;
  struct Block {
    uint64_t hits = 0;
    uint64_t born = 0;
    Rank rank;
  };
  Block& at(int32_t id) { return blocks_[static_cast<size_t>(id)]; }
  const EvictionPolicy policy_;
  uint64_t time_ = 0;
  std::vector<Block> blocks_;
  SortedBlocks<Rank> order_;
};

// S3-FIFO: a small queue (a tenth of the blocks) for new blocks, and a main queue for blocks that were hit more than
// once or came back soon after their eviction (ghosts). A kept block holds its position in its queue.
class S3FifoOrder final : public EvictionOrder {
 public:
  explicit S3FifoOrder(int32_t num_blocks)
      : small_share_(std::max<size_t>(1, static_cast<size_t>(num_blocks) / 10)),
        blocks_(static_cast<size_t>(num_blocks)),
        queues_(num_blocks) {}

  void add(int32_t id, const Digest& key, bool fresh) override {
    Block& block = at(id);
    if (fresh) block = {.place = ++time_, .key = key, .main = ghosts_.erase(hash(key)) > 0};
    enter(id);
  }
  void hit(int32_t id) override {
    Block& block = at(id);
    block.hits = std::min(block.hits + 1, 3);
    leave(id);
  }
  void discard(int32_t id) override { leave(id); }
  bool empty() const override { return queues_.empty(); }
  int32_t evict() override {
    while (true) {
      const auto main = queues_.first_from({true, 0});
      const bool from_small = small_blocks_ > 0 && (small_blocks_ > small_share_ || main == queues_.end());
      const int32_t id = (from_small ? queues_.begin() : main)->second;
      leave(id);
      Block& block = at(id);
      if (from_small ? block.hits > 1 : block.hits > 0) {  // another round, in the main queue
        block.hits = from_small ? 0 : block.hits - 1;
        block.main = true;
        block.place = ++time_;
        enter(id);
        continue;
      }
      if (from_small) remember(block.key);
      return id;
    }
  }
  std::vector<int32_t> order() const override { return queues_.ids(); }

 private:
  using Rank = std::pair<bool, uint64_t>;  // in the main queue, which is evicted last; position in the queue
  struct Block {
    uint64_t place = 0;
    Digest key;
    int hits = 0;
    bool main = false;
  };
  static uint64_t hash(const Digest& key) {
    uint64_t value = 0;
    std::memcpy(&value, key.bytes.data(), sizeof value);
    return value;
  }
  void enter(int32_t id) {
    queues_.add({at(id).main, at(id).place}, id);
    if (!at(id).main) ++small_blocks_;
  }
  void leave(int32_t id) {
    queues_.remove({at(id).main, at(id).place}, id);
    if (!at(id).main) --small_blocks_;
  }
  // If there is no memory, the ghost is forgotten.
  void remember(const Digest& key) {
    (void)try_catch([&] {
      const auto [ghost, fresh] = ghosts_.insert(hash(key));
      if (!fresh) return ok();
      const Status queued = try_catch([&] {
        ghost_order_.push_back(hash(key));
        return ok();
      });
      if (!queued) ghosts_.erase(ghost);
      return ok();
    });
    if (ghost_order_.size() <= blocks_.size()) return;
    ghosts_.erase(ghost_order_.front());
    ghost_order_.pop_front();
  }
  Block& at(int32_t id) { return blocks_[static_cast<size_t>(id)]; }
  const size_t small_share_;
  uint64_t time_ = 0;
  std::vector<Block> blocks_;
  SortedBlocks<Rank> queues_;
  size_t small_blocks_ = 0;
  std::unordered_set<uint64_t> ghosts_;
  std::deque<uint64_t> ghost_order_;
};

}  // namespace

std::unique_ptr<EvictionOrder> make_eviction_order(EvictionPolicy policy, int32_t num_blocks) {
  if (policy == EvictionPolicy::kLru) return std::make_unique<LruOrder>(num_blocks);
  if (policy == EvictionPolicy::kS3Fifo) return std::make_unique<S3FifoOrder>(num_blocks);
  return std::make_unique<RankedOrder>(policy, num_blocks);
}

}  // namespace torpor
