// SPDX-License-Identifier: Apache-2.0
// The EngineHooks of the reference engine for a sleep: they stop it, return its state as values, and restore it.
#include <algorithm>
#include <cstring>
#include <set>

#include <fmt/core.h>

#include "engine/rank_service.h"
#include "engine/reference/reference_engine.h"

namespace torpor::reference {
namespace {

constexpr int64_t kMostSteps = int64_t{1} << 62;

Bytes to_bytes(uint64_t number) {
  Bytes bytes(sizeof number);
  std::memcpy(bytes.data(), &number, sizeof number);
  return bytes;
}

uint64_t to_number(const Bytes& bytes) {
  uint64_t number = 0;
  std::memcpy(&number, bytes.data(), std::min(bytes.size(), sizeof number));
  return number;
}

Bytes to_bytes(const Digest& digest) { return {digest.bytes.begin(), digest.bytes.end()}; }

Error damaged(std::string what) {
  return {.code = Code::kCorruption, .what = std::move(what), .next_step = "use another checkpoint"};
}

// Return the identity of a registered block, which a snapshot holds as a value of the engine's own.
Value to_value(const BlockPoolSnapshot::Block& block) {
  return {Dict{{"id", {int64_t{block.id}}},
               {"parent", {to_bytes(block.identity.parent)}},
               {"salt", {to_bytes(block.identity.salt)}},
               {"tokens", {IntArray(block.identity.tokens.begin(), block.identity.tokens.end())}}}};
}

Result<BlockPoolSnapshot::Block> to_block(const Value& value) {
  const auto* id = value.find("id") != nullptr ? std::get_if<int64_t>(&value.find("id")->data) : nullptr;
  const auto* parent = value.find("parent") != nullptr ? std::get_if<Bytes>(&value.find("parent")->data) : nullptr;
  const auto* salt = value.find("salt") != nullptr ? std::get_if<Bytes>(&value.find("salt")->data) : nullptr;
  const auto* tokens = value.find("tokens") != nullptr ? std::get_if<IntArray>(&value.find("tokens")->data) : nullptr;
  if (id == nullptr || parent == nullptr || salt == nullptr || tokens == nullptr || parent->size() != 16)
    return damaged("a block's identity is incomplete");
  BlockPoolSnapshot::Block block{.id = static_cast<int32_t>(*id),
                                 .identity = {.salt = to_number(*salt), .tokens = {tokens->begin(), tokens->end()}}};
  std::copy(parent->begin(), parent->end(), block.identity.parent.bytes.begin());
  return block;
}

}  // namespace

Result<std::vector<std::string>> ReferenceEngine::unsupported() {
  std::vector<std::string> features;
  if (const int64_t blocks = pool_->info().quarantined + unproven_deferred_ + (offload_ ? offload_->quarantined() : 0);
      blocks > 0)
    features.push_back(fmt::format("{} KV blocks whose copies were never proven over", blocks));
  return features;
}

Status ReferenceEngine::quiesce(std::optional<double>) {
  frozen_ = true;
  return offload_ ? drain_offload() : ok();
}

Status ReferenceEngine::resume() {
  frozen_ = false;
  return ok();
}

Result<Fingerprint> ReferenceEngine::fingerprint() {
  const ByteModelShape& shape = options_.model;
  return Fingerprint{{"engine", "reference"},
                     {"kv", fmt::format("blocks of {} tokens, {} layers of {} bytes a token", shape.block_tokens,
                                        shape.layers, shape.token_bytes)},
                     {std::string(kNumBlocksField), std::to_string(options_.num_blocks)},
                     {"vocabulary", std::to_string(shape.vocabulary)},
                     {"scheduler", fmt::format("{} tokens, {} requests, {}", options_.token_budget,
                                               options_.max_running, options_.by_priority ? "priority" : "fcfs")}};
}

Result<CapturedState> ReferenceEngine::capture() {
  CapturedState state;
  SchedulerSnapshot& scheduler = state.scheduler;
  scheduler.policy = options_.by_priority ? "priority" : "fcfs";
  scheduler.engine = {Dict{{"steps", {counts_.steps}}}};
  KvGroup group{.block_size = block_tokens()};
  WorkerSnapshot worker{.default_generator = to_bytes(generator_)};  // the same on each rank
  std::map<int32_t, int32_t> references;
  for (const Request* request : running_) scheduler.running.push_back(request->asked.id);
  for (const Request* request : waiting_) scheduler.waiting.push_back(request->asked.id);
  worker.rows = scheduler.running;
  for (const auto& [id, request] : requests_) {
    const bool running = std::find(running_.begin(), running_.end(), request.get()) != running_.end();
    const ReferenceRequest& asked = request->asked;
    scheduler.requests.push_back(
        {.id = id,
         .priority = asked.priority,
         .status = running                    ? RequestStatus::kRunning
                   : request->preemptions > 0 ? RequestStatus::kPreempted
                                              : RequestStatus::kWaiting,
         .prompt_token_ids = asked.prompt,
         .output_token_ids = {request->tokens.begin() + static_cast<std::ptrdiff_t>(asked.prompt.size()),
                              request->tokens.end()},
         .num_computed_tokens = request->computed,
         .num_preemptions = request->preemptions,
         .max_tokens = asked.max_tokens,
         .sampling = {.temperature = asked.sampling == Sampling::kGreedy ? 0.0 : 1.0, .max_tokens = asked.max_tokens},
         .engine = {Dict{{"arrival", {static_cast<int64_t>(request->arrival)}}, {"salt", {to_bytes(asked.salt)}}}}});
    if (asked.sampling == Sampling::kSeeded) {
      scheduler.requests.back().sampling.seed = asked.seed;
      worker.generators.emplace_back(id, to_bytes(request->generator));
    }
    const std::vector<int32_t> table = request->table();
    for (const int32_t block : table) ++references[block];
    if (!table.empty()) group.tables.push_back({.request = id, .blocks = table, .num_cached_blocks = -1});
  }

  const BlockPoolSnapshot pool = pool_->snapshot();
  KvSnapshot& kv = state.kv;
  kv.num_blocks = options_.num_blocks;
  kv.null_block = -1;
  kv.groups = {std::move(group)};
  kv.free_order = pool.free_order;
  kv.steps = steps();
  std::map<int32_t, KvBlock> blocks;
  for (const auto& [id, count] : references) blocks[id] = {.id = id, .ref_count = count};
  List identities;
  for (const BlockPoolSnapshot::Block& block : pool.registered) {
    const Bytes hash = to_bytes(block.identity.hash());
    KvBlock& entry = blocks[block.id];
    entry.id = block.id;
    entry.hash = hash;
    entry.hash_tokens = block_tokens();
    entry.version = block.registration;
    const auto same = std::find_if(kv.prefix_index.begin(), kv.prefix_index.end(),
                                   [&](const PrefixEntry& known) { return known.hash == hash; });
    if (same == kv.prefix_index.end()) {
      kv.prefix_index.push_back({hash, {block.id}});
    } else {
      same->blocks.push_back(block.id);
    }
    identities.push_back(to_value(block));
  }
  for (auto& [id, block] : blocks) kv.blocks.push_back(std::move(block));
  kv.engine = {std::move(identities)};
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    worker.rank = static_cast<int32_t>(rank);
    state.workers.push_back(worker);
  }
  return state;
}

// All blocks without a version: those that a request has and that are in no index.
Result<KvContents> ReferenceEngine::kv_contents() {
  std::map<int32_t, uint64_t> versions;
  for (const auto& [id, request] : requests_) {
    for (const int32_t block : request->table()) versions[block] = 0;
  }
  for (const BlockPoolSnapshot::Block& block : pool_->snapshot().registered) versions[block.id] = block.registration;
  KvContents contents{.steps = steps()};
  for (const auto& [block, version] : versions) {
    contents.blocks.push_back(block);
    contents.versions.push_back(version);
  }
  return contents;
}

Result<std::vector<int32_t>> ReferenceEngine::host_slots(const std::vector<int32_t>& blocks, bool keep) {
  return offload_ ? offload_->backing(blocks, keep) : std::vector<int32_t>{};
}

Status ReferenceEngine::release_host_slots() {
  if (offload_) offload_->release_backing();
  return ok();
}

Status ReferenceEngine::drop_requests(const std::string& mode) {
  const bool abort = mode == "abort";
  if (!abort) {  // first, as the rest allocates nothing
    std::deque<Request*> again = waiting_;
    again.insert(again.end(), running_.begin(), running_.end());
    std::sort(again.begin(), again.end(), [this](const Request* a, const Request* b) { return comes_before(*a, *b); });
    waiting_.swap(again);
  }
  for (const auto& [id, request] : requests_) {
    release(*request);
    if (abort && offload_) (void)offload_->finished(request->offload);  // the engine is stopped: there is no load
    (void)(abort ? slots_.finish(request->slot) : slots_.preempt(request->slot));
  }
  running_.clear();
  if (abort) {
    waiting_.clear();
    requests_.clear();
  }
  // The weights may change from now on, so all computed KV is useless.
  pool_->clear_cached();
  return forget_stored();
}

Status ReferenceEngine::drop_prefix(const std::vector<int32_t>& blocks) {
  pool_->evict(blocks);
  return ok();
}

// Rename the KV that running requests hold, so that only they can make the name: their salt is hashed once more, the
// same for requests that share blocks.
Status ReferenceEngine::retire_prefix() {
  pool_->clear_cached();
  TORPOR_RETURN_IF_ERROR(forget_stored());
  for (const auto& [id, request] : requests_) {
    if (request->full.empty() && !request->partial) continue;
    const Digest salted = digest_of(std::as_bytes(std::span(&request->asked.salt, 1)));
    std::memcpy(&request->asked.salt, salted.bytes.data(), sizeof request->asked.salt);
    Digest parent;
    for (const BlockRef& block : request->full) {
      BlockIdentity identity = block.identity();
      identity.parent = parent;
      identity.salt = request->asked.salt;
      parent = identity.hash();
      pool_->rename(block, std::move(identity));
    }
    if (!request->partial) continue;
    const auto held =
        static_cast<size_t>(request->computed) - request->full.size() * static_cast<size_t>(block_tokens());
    const std::span<const int32_t> tokens =
        std::span(request->tokens).subspan(static_cast<size_t>(request->computed) - held, held);
    TORPOR_RETURN_IF_ERROR(request->partial->reset());
    TORPOR_RETURN_IF_ERROR(request->partial->initialize(parent, request->asked.salt));
    TORPOR_RETURN_IF_ERROR(request->partial->add_tokens(tokens));
    TORPOR_RETURN_IF_ERROR(request->partial->schedule_compute());
    TORPOR_RETURN_IF_ERROR(request->partial->compute_done());
  }
  return ok();
}

Status ReferenceEngine::release_derived() {
  for (const Rank& rank : ranks_) rank.model->forget();
  return ok();
}

Status ReferenceEngine::rebuild_derived() {
  for (const Rank& rank : ranks_) rank.model->prepare();
  return ok();
}

Status ReferenceEngine::reconnect(const std::vector<WorkerSnapshot>& workers) {
  generator_ = to_number(workers.at(0).default_generator);
  return ok();
}

Result<std::vector<FailedRequest>> ReferenceEngine::restore(const EngineCheckpoint& checkpoint) {
  steps_before_restore_ = counts_.steps;
  const CapturedState& state = checkpoint.state;
  if (state.workers.size() != ranks_.size() || state.kv.groups.size() != 1)
    return damaged("this is not the checkpoint of a reference engine");
  const WorkerSnapshot& worker = state.workers[0];

  BlockPoolSnapshot pool;
  std::set<int32_t> hashed;  // blocks whose bytes were not saved have lost their hash
  for (const KvBlock& block : state.kv.blocks) {
    if (!block.hash.empty()) hashed.insert(block.id);
  }
  if (const auto* identities = std::get_if<List>(&state.kv.engine.data)) {
    for (const Value& value : *identities) {
      TORPOR_ASSIGN_OR_RETURN(BlockPoolSnapshot::Block block, to_block(value));
      if (const std::vector<int32_t>& now = state.kv.block_numbers; !now.empty()) {
        if (block.id < 0 || static_cast<size_t>(block.id) >= now.size()) return damaged("a block has no number");
        block.id = now[static_cast<size_t>(block.id)];
      }
      if (hashed.erase(block.id) > 0) pool.registered.push_back(std::move(block));
    }
  }
  if (!hashed.empty()) return damaged(fmt::format("block {} has a hash and no identity", *hashed.begin()));
  pool.free_order = state.kv.free_order;
  std::stable_partition(pool.free_order.begin(), pool.free_order.end(), [&](int32_t id) {
    return std::none_of(pool.registered.begin(), pool.registered.end(),
                        [id](const BlockPoolSnapshot::Block& block) { return block.id == id; });
  });
  TORPOR_ASSIGN_OR_RETURN(BlockPool::Handles handles, pool_->restore(pool));

  std::map<std::string, std::vector<int32_t>> tables;
  for (const KvTable& table : state.kv.groups[0].tables) tables[table.request] = table.blocks;
  for (const RequestState& saved : state.scheduler.requests) {
    auto request = std::make_unique<Request>();
    request->asked = {
        .id = saved.id, .prompt = saved.prompt_token_ids, .max_tokens = saved.max_tokens, .priority = saved.priority};
    request->asked.sampling = saved.sampling.temperature == 0 ? Sampling::kGreedy
                              : saved.sampling.seed           ? Sampling::kSeeded
                                                              : Sampling::kUnseeded;
    request->asked.seed = saved.sampling.seed.value_or(0);
    request->tokens = saved.prompt_token_ids;
    request->tokens.insert(request->tokens.end(), saved.output_token_ids.begin(), saved.output_token_ids.end());
    request->preemptions = saved.num_preemptions;
    const Value* arrival = saved.engine.find("arrival");
    const Value* salt = saved.engine.find("salt");
    if (arrival == nullptr || salt == nullptr || !std::holds_alternative<int64_t>(arrival->data) ||
        !std::holds_alternative<Bytes>(salt->data)) {
      return damaged(fmt::format("request {} has no arrival or no salt", saved.id));
    }
    request->arrival = static_cast<uint64_t>(std::get<int64_t>(arrival->data));
    request->asked.salt = to_number(std::get<Bytes>(salt->data));
    arrivals_ = std::max(arrivals_, request->arrival + 1);
    for (const auto& [id, generator] : worker.generators) {
      if (id == saved.id) request->generator = to_number(generator);
    }
    const auto table = tables.find(saved.id);
    if (table != tables.end()) {
      for (const int32_t id : table->second) {
        if (const auto shared = handles.shared.find(id); shared != handles.shared.end() && !request->partial) {
          request->full.push_back(shared->second);
        } else if (const auto owned = handles.owned.find(id); owned != handles.owned.end() && !request->partial) {
          request->partial = std::move(owned->second);
          handles.owned.erase(owned);
        } else {
          return damaged(fmt::format("block {} of request {} belongs to nobody", id, saved.id));
        }
      }
    }
    request->computed = saved.num_computed_tokens;
    const auto in_partial =
        static_cast<size_t>(request->computed) - request->full.size() * static_cast<size_t>(block_tokens());
    if (request->computed > request->length() ||
        (request->partial ? in_partial == 0 || in_partial >= static_cast<size_t>(block_tokens()) : in_partial != 0)) {
      return damaged(fmt::format("request {} has {} computed tokens in {} blocks", saved.id, request->computed,
                                 request->table().size()));
    }
    if (request->partial) {
      const std::span<const int32_t> held =
          std::span(request->tokens).subspan(static_cast<size_t>(request->computed) - in_partial, in_partial);
      TORPOR_RETURN_IF_ERROR(request->partial->initialize(
          request->full.empty() ? Digest{} : request->full.back().identity().hash(), request->asked.salt));
      TORPOR_RETURN_IF_ERROR(request->partial->add_tokens(held));
      TORPOR_RETURN_IF_ERROR(request->partial->schedule_compute());
      TORPOR_RETURN_IF_ERROR(request->partial->compute_done());
    }
    if (offload_) request->offload = offload_->begin_request(saved.id, saved.priority);
    Request& restored = *requests_.emplace(saved.id, std::move(request)).first->second;
    TORPOR_ASSIGN_OR_RETURN(restored.slot, slots_.create(saved.id, restored.length()));
  }
  for (const std::string& id : state.scheduler.running) {
    const Request& request = *running_.emplace_back(requests_.at(id).get());
    (void)slots_.scheduled(request.slot, request.computed, 0, request.length());
  }
  for (const std::string& id : state.scheduler.waiting) waiting_.push_back(requests_.at(id).get());
  generator_ = to_number(worker.default_generator);
  if (const Value* steps = state.scheduler.engine.find("steps")) {
    const auto* count = std::get_if<int64_t>(&steps->data);
    if (count == nullptr || *count < 0 || *count > kMostSteps) return damaged("its steps are not a number of steps");
    counts_.steps = std::max(counts_.steps, *count);
  }
  return std::vector<FailedRequest>{};
}

Status ReferenceEngine::forget_restored() {
  TORPOR_RETURN_IF_ERROR(drop_requests("abort"));
  generator_ = kFreshGenerator;
  counts_.steps = std::exchange(steps_before_restore_, std::nullopt).value_or(counts_.steps);
  return ok();
}

Result<std::vector<Bytes>> ReferenceEngine::call_ranks(const Bytes& order) {
  std::vector<Bytes> replies;
  replies.reserve(ranks_.size());
  for (const Rank& rank : ranks_) replies.push_back(RankService(*rank.memory).call(order));
  return replies;
}

}  // namespace torpor::reference
