// SPDX-License-Identifier: Apache-2.0
// TestEngine: a small engine in which every token depends on every byte that a sleep must keep: on the weights, on the
// KV of all tokens before it on all ranks, on block tables and prefix hits, on batch order and on a shared generator.
//
// Each step schedules every request, first in first out. The next token of a request is a digest over its KV, mixed
// with a draw of the engine's generator if the request is unseeded. A lost, stale or misplaced byte changes tokens.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>

#include "engine/engine_hooks.h"
#include "engine/rank_service.h"
#include "engine/reference/made_bytes.h"
#include "engine/tags.h"
#include "tests/support/hashed_weights.h"
#include "tests/support/results.h"
#include "tests/support/test_engine_options.h"
#include "tests/support/test_rank.h"

namespace torpor::test {

class TestEngine final : public EngineHooks {
 public:
  using Options = TestEngineOptions;
  using Tokens = std::map<std::string, std::vector<int32_t>>;

  explicit TestEngine(FileSystem& file_system, Options options = {}) : options_(options) {
    for (int rank = 0; rank < options_.ranks; ++rank) ranks_.push_back(make_rank(options_, rank, file_system));
    load_weights(options_.weights_seed);
    for (int32_t block = 1; block < options_.num_blocks; ++block) free_.push_back(block);
    refs_.assign(static_cast<size_t>(options_.num_blocks), 0);
    hashes_.resize(static_cast<size_t>(options_.num_blocks));
    versions_.resize(static_cast<size_t>(options_.num_blocks));
  }

  // --- calls of a user
  void load_weights(uint64_t seed, bool marks = true) {
    for (Rank& rank : ranks_) {
      rank.weights.make(seed, options_.bf16);
      if (marks) rank.memory->mark_dirty("weights");
    }
    must(rebuild_derived());
  }
  // As an engine on a GPU does.
  void name_weights() {
    for (Rank& rank : ranks_) {
      std::vector<DevicePiece> pieces;
      for (const std::span<std::byte> part : rank.weights.parts())
        pieces.push_back({reinterpret_cast<DeviceAddress>(part.data()), part.size()});
      must(rank.memory->name_weights("all", std::move(pieces)));
    }
  }

  void add(const std::string& id, std::vector<int32_t> prompt, int32_t max_tokens, bool seeded = true) {
    Request request{.id = id, .prompt = std::move(prompt), .max_tokens = max_tokens, .seeded = seeded};
    take_cached_prefix(request);
    requests_.push_back(std::move(request));
  }
  // Run one step, unless frozen. Return whether it did anything.
  bool step() {
    if (frozen_ || requests_.empty() || !late_.empty()) return false;
    ++steps_;
    EXPECT_TRUE(derived_.has_value()) << "a step without what was derived from the weights";
    for (Rank& rank : ranks_) {
      EXPECT_SUCCEEDS(rank.runtime.step());
      if (steps_ % 5 == 0) (void)rank.exchange();
    }
    for (Request& request : requests_) {
      compute(request);
      request.output.push_back(next_token(request));
      tokens_[request.id].push_back(request.output.back());
    }
    for (const Request& request : requests_) {
      if (done(request)) release(request);
    }
    std::erase_if(requests_, done);
    return true;
  }
  void run() {
    while (step()) {}
  }
  const Tokens& tokens() const { return tokens_; }
  // Continue the front end and the steps of another engine.
  void go_on_after(const TestEngine& other) { go_on_from(other.tokens_, other.steps_); }
  void go_on_from(Tokens tokens, uint64_t steps) { tokens_ = std::move(tokens), steps_ = steps; }
  uint64_t steps() const { return steps_; }
  void set_tokens(Tokens tokens) { tokens_ = std::move(tokens); }  // tokens that the front end has already
  bool frozen() const { return frozen_; }
  int64_t recomputed() const { return recomputed_; }
  // Return the bytes of the runtime tag that were freed while the engine slept.
  uint64_t freed_asleep() const { return freed_asleep_; }
  uint64_t hashed_bytes() const { return hashed_bytes_; }  // bytes of weights, on all ranks
  FaultyDevice& device(int rank = 0) { return *ranks_[static_cast<size_t>(rank)].device; }
  RankMemory& memory(int rank = 0) { return *ranks_[static_cast<size_t>(rank)].memory; }
  // Make the named hook fail, once or always until cleared.
  void fail_hook(std::string name, bool always = false) { failing_ = std::move(name), failing_always_ = always; }
  std::vector<std::string> unsupported_features;
  bool can_hold = false;                                     // holds_back(); no request runs while a block is deferred
  std::string invalid_request;                               // restore() refuses this one
  std::function<void(const std::string& hook)> before_hook;  // called inside each hook

  // --- EngineHooks

  Result<std::vector<std::string>> unsupported() override {
    TORPOR_RETURN_IF_ERROR(enter("unsupported"));
    return unsupported_features;
  }
  Result<int64_t> unfinished_requests() override {
    TORPOR_RETURN_IF_ERROR(enter("unfinished_requests"));
    return static_cast<int64_t>(requests_.size());
  }
  Status quiesce(std::optional<double>) override {
    TORPOR_RETURN_IF_ERROR(enter("quiesce"));
    frozen_ = true;
    return ok();
  }
  Status resume() override {
    TORPOR_RETURN_IF_ERROR(enter("resume"));
    frozen_ = false;
    return ok();
  }
  Result<CapturedState> capture() override {
    TORPOR_RETURN_IF_ERROR(enter("capture"));
    CapturedState state;
    state.scheduler.policy = "fcfs";
    KvGroup group{.block_size = kBlockTokens};
    for (const Request& request : requests_) {
      const bool running = request.computed > 0;
      state.scheduler.requests.push_back({.id = request.id,
                                          .status = running ? RequestStatus::kRunning : RequestStatus::kWaiting,
                                          .prompt_token_ids = request.prompt,
                                          .output_token_ids = request.output,
                                          .num_computed_tokens = request.computed,
                                          .max_tokens = request.max_tokens,
                                          .engine = {request.seeded}});
      (running ? state.scheduler.running : state.scheduler.waiting).push_back(request.id);
      if (!request.table.empty())
        group.tables.push_back({.request = request.id, .blocks = request.table, .num_cached_blocks = -1});
    }
    state.kv.num_blocks = options_.num_blocks;
    state.kv.groups = {group};
    for (int32_t block = 1; block < options_.num_blocks; ++block) {
      if (refs(block) == 0 && hash(block).empty()) continue;
      const bool full = !hash(block).empty();
      state.kv.blocks.push_back({block, refs(block), hash(block), full ? kBlockTokens : 0, full ? version(block) : 0});
    }
    state.kv.steps = steps_;
    for (const auto& [key, block] : index_) state.kv.prefix_index.push_back({key, {block}});
    state.kv.free_order.assign(free_.begin(), free_.end());
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      state.workers.push_back({.rank = static_cast<int32_t>(rank), .default_generator = generator_bytes()});
    return state;
  }
  Result<Moment> capture_moment() override {
    TORPOR_ASSIGN_OR_RETURN(Moment moment, EngineHooks::capture_moment());
    moment.read = [this, read = std::move(moment.read)]() -> Result<CapturedState> {
      TORPOR_RETURN_IF_ERROR(enter("read moment"));
      return read();
    };
    return moment;
  }
  Result<KvContents> kv_contents() override {
    TORPOR_RETURN_IF_ERROR(enter("kv_contents"));
    KvContents contents{.steps = steps_};
    for (int32_t block = 1; block < options_.num_blocks; ++block) {
      if (refs(block) == 0 && hash(block).empty()) continue;
      contents.blocks.push_back(block);
      contents.versions.push_back(hash(block).empty() ? 0 : version(block));
    }
    return contents;
  }
  Result<Fingerprint> fingerprint() override {
    TORPOR_RETURN_IF_ERROR(enter("fingerprint"));
    return Fingerprint{{"engine", "test"},
                       {"blocks", "64"},  // for stored checkpoints of older versions
                       {std::string(kNumBlocksField), std::to_string(options_.num_blocks)}};
  }
  Status drop_requests(const std::string& mode) override {
    TORPOR_RETURN_IF_ERROR(enter("drop_requests"));
    for (Request& request : requests_) {
      release(request);
      request.table.clear();
      request.computed = 0;
    }
    if (mode == "abort") requests_.clear();
    for (Bytes& hash : hashes_) hash.clear();
    index_.clear();
    return ok();
  }
  Status drop_prefix(const std::vector<int32_t>& blocks) override {
    TORPOR_RETURN_IF_ERROR(enter("drop_prefix"));
    for (const int32_t block : blocks) forget_hash(block);
    return ok();
  }
  Status retire_prefix() override {
    TORPOR_RETURN_IF_ERROR(enter("retire_prefix"));
    for (Bytes& hash : hashes_) hash.clear();
    index_.clear();
    for (Request& request : requests_) ++request.salt;
    return ok();
  }
  Status release_derived() override {
    TORPOR_RETURN_IF_ERROR(enter("release_derived"));
    derived_.reset();
    return ok();
  }
  Status rebuild_derived() override {
    TORPOR_RETURN_IF_ERROR(enter("rebuild_derived"));
    derived_ = ranks_[0].weights.digest();
    return ok();
  }
  Status reconnect(const std::vector<WorkerSnapshot>& workers) override {
    TORPOR_RETURN_IF_ERROR(enter("reconnect"));
    EXPECT_EQ(workers.size(), ranks_.size());
    set_generator(workers[0].default_generator);
    return ok();
  }
  Result<std::vector<FailedRequest>> restore(const EngineCheckpoint& checkpoint) override {
    TORPOR_RETURN_IF_ERROR(enter("restore"));
    clear();
    const KvSnapshot& kv = checkpoint.state.kv;
    for (const KvBlock& block : kv.blocks)
      refs(block.id) = block.ref_count, hash(block.id) = block.hash, version(block.id) = ++last_version_;
    for (const PrefixEntry& entry : kv.prefix_index) index_[entry.hash] = entry.blocks[0];
    free_.assign(kv.free_order.begin(), kv.free_order.end());
    std::vector<FailedRequest> failed;
    for (const RequestState& state : checkpoint.state.scheduler.requests) {
      Request request{.id = state.id,
                      .prompt = state.prompt_token_ids,
                      .output = state.output_token_ids,
                      .computed = state.num_computed_tokens,
                      .max_tokens = state.max_tokens,
                      .seeded = std::get<bool>(state.engine.data)};
      for (const KvTable& table : kv.groups[0].tables) {
        if (table.request == state.id) request.table = table.blocks;
      }
      if (state.id == invalid_request) {
        failed.push_back({state.id, "it cannot be rebuilt"});
        release(request);
        continue;
      }
      requests_.push_back(std::move(request));
    }
    set_generator(checkpoint.state.workers[0].default_generator);
    return failed;
  }
  HoldsBack holds_back() override { return can_hold ? HoldsBack::kAll : HoldsBack::kNothing; }
  Status hold_blocks(const std::vector<int32_t>& blocks) override {
    TORPOR_RETURN_IF_ERROR(enter("hold_blocks"));
    late_ = {blocks.begin(), blocks.end()};
    return ok();
  }
  Result<std::vector<std::string>> release_blocks(const ArrivedBlocks& blocks) override {
    TORPOR_RETURN_IF_ERROR(enter("release_blocks"));
    for (const int32_t block : blocks.arrived) late_.erase(block);
    return std::vector<std::string>{};
  }
  Status forget_restored() override {
    TORPOR_RETURN_IF_ERROR(enter("forget_restored"));
    clear();
    generator_ = kFreshGenerator;
    for (int32_t block = 1; block < options_.num_blocks; ++block) free_.push_back(block);
    return ok();
  }
  Result<std::vector<Bytes>> call_ranks(const Bytes& order) override {
    TORPOR_RETURN_IF_ERROR(enter("rank " + std::string(order_name(order))));
    std::vector<Bytes> replies;
    for (Rank& rank : ranks_) replies.push_back(RankService(*rank.memory).call(order));
    for (const Bytes& reply : replies) hashed_bytes_ += hashed_weights(order, reply, kWeightBytes);
    if (order_name(order) == orders::Detach::kName) {
      freed_asleep_ = 0;
      for (Rank& rank : ranks_) {
        if (options_.exchange_asleep && rank.is_asleep()) freed_asleep_ += rank.exchange();
      }
    }
    return replies;
  }

 private:
  using Rank = TestRank;
  struct Request {
    std::string id;
    std::vector<int32_t> prompt;
    std::vector<int32_t> output;
    std::vector<int32_t> table;
    int32_t computed = 0;
    int32_t max_tokens = 0;
    bool seeded = true;
    int32_t reached = 0;  // highest `computed` so far
    int32_t salt = 0;     // rises each time its KV was kept over new weights
    int32_t token(int32_t at) const {
      return at < static_cast<int32_t>(prompt.size()) ? prompt[static_cast<size_t>(at)]
                                                      : output[static_cast<size_t>(at) - prompt.size()];
    }
    int32_t length() const { return static_cast<int32_t>(prompt.size() + output.size()); }
  };
  static void must(const Status& status) { ASSERT_SUCCEEDS(status); }
  static std::byte& byte_at(DeviceAddress address) {
    return *reinterpret_cast<std::byte*>(address);
  }  // NOLINT(performance-no-int-to-ptr)
  static bool done(const Request& request) { return static_cast<int32_t>(request.output.size()) >= request.max_tokens; }

  Status enter(const std::string& hook) {
    if (before_hook) before_hook(hook);
    if (failing_ != hook) return ok();
    if (!failing_always_) failing_.clear();
    return Error{.code = Code::kInternal, .what = "injected failure of " + hook, .origin = Origin::kEngine};
  }
  int32_t& refs(int32_t block) { return refs_[static_cast<size_t>(block)]; }
  Bytes& hash(int32_t block) { return hashes_[static_cast<size_t>(block)]; }
  uint64_t& version(int32_t block) { return versions_[static_cast<size_t>(block)]; }  // for a block with a hash
  void forget_hash(int32_t block) {
    index_.erase(hash(block));
    hash(block).clear();
  }
  void clear() {
    requests_.clear();
    free_.clear();
    index_.clear();
    std::fill(refs_.begin(), refs_.end(), 0);
    for (Bytes& hash : hashes_) hash.clear();
  }
  Bytes generator_bytes() const {
    Bytes bytes(sizeof generator_);
    std::memcpy(bytes.data(), &generator_, sizeof generator_);
    return bytes;
  }
  void set_generator(const Bytes& bytes) { std::memcpy(&generator_, bytes.data(), sizeof generator_); }
  // Return the key of the first `count` tokens.
  static Bytes key_of(const Request& request, int32_t count) {
    StreamingDigest digest;
    if (request.salt > 0) digest.update(std::as_bytes(std::span(&request.salt, 1)));
    for (int32_t at = 0; at < count; ++at) {
      const int32_t token = request.token(at);
      digest.update(std::as_bytes(std::span(&token, 1)));
    }
    const Digest finished = digest.finish();
    return {finished.bytes.begin(), finished.bytes.end()};
  }
  void take_cached_prefix(Request& request) {
    while (request.computed + kBlockTokens < request.length()) {
      const auto found = index_.find(key_of(request, request.computed + kBlockTokens));
      if (found == index_.end()) return;
      if (refs(found->second)++ == 0) free_.erase(std::find(free_.begin(), free_.end(), found->second));
      request.table.push_back(found->second);
      request.computed += kBlockTokens;
    }
    request.reached = request.computed;
  }
  void release(const Request& request) {
    for (auto block = request.table.rbegin(); block != request.table.rend(); ++block) {
      if (--refs(*block) == 0) free_.push_back(*block);
    }
  }
  // Return one layer's KV of token `at` on one rank.
  std::span<std::byte> kv(const Rank& rank, const Request& request, int32_t at, uint32_t layer) {
    const auto block = static_cast<uint64_t>(request.table[static_cast<size_t>(at / kBlockTokens)]);
    const uint64_t offset = block * kBlockBytes + static_cast<uint64_t>(at % kBlockTokens) * kKvTokenBytes;
    return {&byte_at(rank.kv[layer] + offset), kKvTokenBytes};
  }
  void compute(Request& request) {
    recomputed_ += std::max(0, std::min(request.length(), request.reached) - request.computed);
    for (; request.computed < request.length(); ++request.computed) {
      const int32_t at = request.computed;
      if (at % kBlockTokens == 0) {
        ASSERT_FALSE(free_.empty()) << "the test engine has no free block";
        const int32_t block = free_.front();
        free_.pop_front();
        if (!hash(block).empty()) forget_hash(block);
        refs(block) = 1;
        request.table.push_back(block);
      }
      for (size_t r = 0; r < ranks_.size(); ++r) {
        for (uint32_t layer = 0; layer < kKvLayers; ++layer) {
          StreamingDigest digest;
          digest.update(std::as_bytes(std::span(derived_->bytes)));
          ranks_[r].weights.add_first(digest, 64);
          const std::array<int32_t, 3> what{request.token(at), static_cast<int32_t>(r), static_cast<int32_t>(layer)};
          digest.update(std::as_bytes(std::span(what)));
          if (options_.mix_steps) digest.update(std::as_bytes(std::span(&steps_, 1)));
          if (at > 0) digest.update(kv(ranks_[r], request, at - 1, layer));
          const Digest finished = digest.finish();
          const std::span<std::byte> place = kv(ranks_[r], request, at, layer);
          for (size_t i = 0; i < place.size(); ++i) place[i] = static_cast<std::byte>(finished.bytes[i % 16]);
          if (options_.bf16) reference::make_like_bf16(place);
        }
      }
      if (at % kBlockTokens == kBlockTokens - 1) {
        Bytes key = key_of(request, at + 1);
        const int32_t block = request.table.back();
        if (index_.emplace(key, block).second) hash(block) = std::move(key), version(block) = ++last_version_;
      }
    }
    request.reached = std::max(request.reached, request.computed);
  }
  int32_t next_token(const Request& request) {
    StreamingDigest digest;
    for (const Rank& rank : ranks_) {
      for (int32_t at = 0; at < request.computed; ++at) {
        for (uint32_t layer = 0; layer < kKvLayers; ++layer) digest.update(kv(rank, request, at, layer));
      }
    }
    generator_ = generator_ * 6364136223846793005u + 1442695040888963407u;  // one draw for each row, as engines do
    if (!request.seeded) digest.update(std::as_bytes(std::span(&generator_, 1)));
    const Digest finished = digest.finish();
    int32_t token = 0;
    std::memcpy(&token, finished.bytes.data(), sizeof token);
    return token & 0x7fff;
  }

  const Options options_;
  std::vector<Rank> ranks_;
  std::optional<Digest> derived_;
  std::vector<Request> requests_;
  std::vector<int32_t> refs_;
  std::vector<Bytes> hashes_;
  std::vector<uint64_t> versions_;
  uint64_t last_version_ = 0;
  uint64_t steps_ = 1;
  std::map<Bytes, int32_t> index_;
  std::deque<int32_t> free_;
  uint64_t generator_ = kFreshGenerator;
  bool frozen_ = false;
  std::set<int32_t> late_;
  Tokens tokens_;
  int64_t recomputed_ = 0;
  uint64_t hashed_bytes_ = 0;
  uint64_t freed_asleep_ = 0;
  std::string failing_;
  bool failing_always_ = false;
};

}  // namespace torpor::test
