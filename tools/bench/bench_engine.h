// SPDX-License-Identifier: Apache-2.0
// An engine of weights and twice as much KV, all of it of running requests. A token of a request is made by reading all
// of its KV and comparing it with what was there before a sleep.
#pragma once

#include <cstring>
#include <set>

#include <fmt/core.h>

#include "allocator/host_device.h"
#include "engine/rank_service.h"
#include "engine/reference/idle_hooks.h"
#include "engine/sleep_controller.h"
#include "tools/bench/bench.h"

namespace torpor::bench {

struct Shape {
  uint64_t kv_bytes = 0;
  uint64_t block_bytes = 0;
  int32_t requests = 0;
  uint64_t link_bytes_per_second = 0;
  uint32_t layers = 1;                // a block has an equal part in each
  uint64_t handle_bytes = 64 * kMiB;  // as in RankMemoryOptions
  int threads = 0;                    // the same
  int32_t blocks() const { return static_cast<int32_t>(kv_bytes / block_bytes); }
  int32_t blocks_each() const { return blocks() / requests; }
};

class Engine final : public IdleHooks {
 public:
  explicit Engine(const Shape& shape) : shape_(shape) {
    memory_ = must(RankMemory::create(
        must(make_host_device({.link_bytes_per_second = shape.link_bytes_per_second})), linux_file_system(),
        {.handle_bytes = shape.handle_bytes, .threads = shape.threads, .retain_kv_bytes = 0}));
    weights_ = must(memory_->allocate("weights", "all", shape.kv_bytes / 2));
    kv_ = must(memory_->allocate("kv_cache", "all", shape.kv_bytes));
    must(memory_->set_kv_layout("kv_cache", {.num_blocks = static_cast<uint32_t>(shape.blocks()),
                                             .tensors = {{.address = kv_,
                                                          .layers = shape.layers,
                                                          .layer_stride = shape.kv_bytes / shape.layers,
                                                          .block_stride = part(),
                                                          .block_bytes = part()}}}));
    fill(at(weights_), shape.kv_bytes / 2, 1);
    for (int32_t block = 0; block < shape.blocks(); ++block) {
      for (uint32_t layer = 0; layer < shape.layers; ++layer) fill(block_at(block, layer), part(), block);
    }
  }

  // Tokens of the requests whose blocks are there, in their order, of those that have none yet.
  void step() {
    for (int32_t request = 0; request < shape_.requests; ++request) {
      if (done_.contains(request)) continue;
      const int32_t first = request * shape_.blocks_each();
      const auto late = late_.lower_bound(first);
      if (late != late_.end() && *late < first + shape_.blocks_each()) continue;
      for (int32_t block = first; block < first + shape_.blocks_each(); ++block) compare(block);
      done_.insert(request);
    }
  }
  size_t done() const { return done_.size(); }
  void forget_tokens() { done_.clear(); }
  void write_all() {  // every byte is copied every time
    ++steps_;
    memory_->mark_dirty("weights");
  }

  Result<int64_t> unfinished_requests() override { return shape_.requests; }
  Result<CapturedState> capture() override {
    CapturedState state;
    state.scheduler.policy = "fcfs";
    KvGroup group{.block_size = 16};
    state.kv.num_blocks = shape_.blocks();
    state.kv.null_block = -1;
    state.kv.steps = steps_;
    for (int32_t request = 0; request < shape_.requests; ++request) {
      const std::string id = fmt::format("r{:04}", request);
      KvTable table{.request = id, .num_cached_blocks = -1};
      for (int32_t i = 0; i < shape_.blocks_each(); ++i) {
        const int32_t block = request * shape_.blocks_each() + i;
        table.blocks.push_back(block);
        const Digest digest = digest_of(std::as_bytes(std::span(&block, 1)));
        const Bytes hash(digest.bytes.begin(), digest.bytes.end());
        state.kv.blocks.push_back({.id = block, .ref_count = 1, .hash = hash, .hash_tokens = 16});
        state.kv.prefix_index.push_back({hash, {block}});
      }
      group.tables.push_back(std::move(table));
      const auto tokens = static_cast<int32_t>(shape_.blocks_each() * 16);
      state.scheduler.requests.push_back({.id = id,
                                          .status = RequestStatus::kRunning,
                                          .prompt_token_ids = std::vector<int32_t>(static_cast<size_t>(tokens), 1),
                                          .num_computed_tokens = tokens,
                                          .max_tokens = 1});
      state.scheduler.running.push_back(id);
    }
    state.kv.groups = {std::move(group)};
    state.workers = {{.rank = 0}};
    return state;
  }
  Result<Fingerprint> fingerprint() override { return Fingerprint{{"engine", "bench"}}; }
  HoldsBack holds_back() override { return HoldsBack::kAll; }
  Status hold_blocks(const std::vector<int32_t>& blocks) override {
    late_ = {blocks.begin(), blocks.end()};
    return ok();
  }
  Result<std::vector<std::string>> release_blocks(const ArrivedBlocks& blocks) override {
    if (!blocks.lost.empty() || !blocks.unproven.empty())
      return Error{.code = Code::kCorruption, .what = "blocks were lost"};
    for (const int32_t block : blocks.arrived) late_.erase(block);
    return std::vector<std::string>{};
  }
  Result<std::vector<Bytes>> call_ranks(const Bytes& order) override {
    return std::vector<Bytes>{RankService(*memory_).call(order)};
  }

 private:
  static std::byte* at(DeviceAddress address) {
    return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
  }
  uint64_t part() const { return shape_.block_bytes / shape_.layers; }
  std::byte* block_at(int32_t block, uint32_t layer) const {
    return at(kv_ + layer * (shape_.kv_bytes / shape_.layers) + static_cast<uint64_t>(block) * part());
  }
  static void fill(std::byte* place, uint64_t bytes, int32_t seed) { std::memset(place, seed & 0xff, bytes); }
  void compare(int32_t block) const {
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const std::byte* const place = block_at(block, layer);
      const bool same =
          place[0] == static_cast<std::byte>(block & 0xff) && std::memcmp(place, place + 1, part() - 1) == 0;
      if (!same) must(Status(Error{.code = Code::kCorruption, .what = fmt::format("block {} is another one", block)}));
    }
  }

  const Shape shape_;
  std::unique_ptr<RankMemory> memory_;
  DeviceAddress weights_ = 0;
  DeviceAddress kv_ = 0;
  std::set<int32_t> late_;
  std::set<int32_t> done_;
  uint64_t steps_ = 0;
};

}  // namespace torpor::bench
