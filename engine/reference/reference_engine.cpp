// SPDX-License-Identifier: Apache-2.0
#include "engine/reference/reference_engine.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/units.h"

namespace torpor::reference {
namespace {

// Knuth's constants for a 64-bit linear congruential generator (MMIX).
uint64_t draw(uint64_t& generator) { return generator = generator * 6364136223846793005u + 1442695040888963407u; }

}  // namespace

ReferenceEngine::ReferenceEngine(FileSystem& file_system, const Clock& clock, ReferenceOptions options, EventPort port)
    : file_system_(file_system), clock_(clock), options_(std::move(options)), port_(port), slots_(port) {}

ReferenceEngine::~ReferenceEngine() {
  workers_.clear();  // no copy is under way any more
  for (const auto& [id, request] : requests_) release(*request);
  orphans_.clear();
  deferred_.clear();
  offload_.reset();
}

Result<std::unique_ptr<ReferenceEngine>> ReferenceEngine::create(std::unique_ptr<DeviceMemory> device,
                                                                 FileSystem& file_system, const Clock& clock,
                                                                 ReferenceOptions options, EventPort port) {
  std::vector<std::unique_ptr<DeviceMemory>> devices;
  devices.push_back(std::move(device));
  return create(std::move(devices), file_system, clock, std::move(options), port);
}

Result<std::unique_ptr<ReferenceEngine>> ReferenceEngine::create(std::vector<std::unique_ptr<DeviceMemory>> devices,
                                                                 FileSystem& file_system, const Clock& clock,
                                                                 ReferenceOptions options, EventPort port) {
  if (options.token_budget < 1 || options.max_running < 1 || options.model.token_bytes % 16 != 0 ||
      options.model.token_bytes == 0) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "token_budget, max_running or token_bytes is too small or odd",
                 .next_step = "use at least 1, 1 and 16"};
  }
  if (devices.empty()) {
    return Error{.code = Code::kInvalidArgument, .what = "no rank has a device", .next_step = "give one or more"};
  }
  std::unique_ptr<ReferenceEngine> engine(new ReferenceEngine(file_system, clock, std::move(options), port));
  TORPOR_RETURN_IF_ERROR(engine->build(std::move(devices)));
  TORPOR_RETURN_IF_ERROR(engine->build_offload());
  return engine;
}

Status ReferenceEngine::build(std::vector<std::unique_ptr<DeviceMemory>> devices) {
  TORPOR_ASSIGN_OR_RETURN(
      pool_, BlockPool::create({.num_blocks = options_.num_blocks, .block_tokens = block_tokens()}, port_));
  for (std::unique_ptr<DeviceMemory>& device : devices) {
    TORPOR_ASSIGN_OR_RETURN(Rank rank, make_rank(static_cast<int32_t>(ranks_.size()), std::move(device)));
    ranks_.push_back(std::move(rank));
  }
  return ok();
}

Result<ReferenceEngine::Rank> ReferenceEngine::make_rank(int32_t rank, std::unique_ptr<DeviceMemory> device) {
  Rank made;
  TORPOR_ASSIGN_OR_RETURN(made.memory, RankMemory::create(std::move(device), file_system_,
                                                          {.rank = rank,
                                                           .arena_slab_bytes = 64 * kKiB,
                                                           .threads = options_.transfer_threads,
                                                           .own_threads = options_.transfers_have_threads,
                                                           .retain_kv_bytes = options_.retain_kv_bytes,
                                                           .host_compression = options_.host_compression,
                                                           .events = port_,
                                                           .deferred_job_bytes = options_.deferred_job_bytes,
                                                           .deferred_thread = options_.deferred_thread}));
  const ByteModelShape& shape = options_.model;
  const auto seed = static_cast<uint64_t>(rank) + options_.weights_seed;  // of the order; sizes are the same in all
  TORPOR_ASSIGN_OR_RETURN(ScatteredBytes weights,
                          ScatteredBytes::allocate(*made.memory, "weights", options_.weight_bytes,
                                                   static_cast<uint64_t>(rank), seed, options_.regions_per_tag));
  ScatteredKv kv{.layers = shape.layers,
                 .blocks = options_.num_blocks,
                 .block_bytes = static_cast<uint64_t>(shape.block_tokens) * shape.token_bytes};
  kv.spare.assign(options_.spare_kv_regions, 1 + static_cast<uint64_t>(kv.blocks) * kv.block_bytes / 3);
  TORPOR_RETURN_IF_ERROR(allocate_kv(*made.memory, kv, seed));
  for (const std::string& tag : options_.step_tags) {
    TORPOR_ASSIGN_OR_RETURN(StepRegions beside,
                            StepRegions::allocate(*made.memory, tag, StepRegions::kBytes / options_.step_tags.size(),
                                                  seed, seed, options_.regions_per_tag));
    made.beside.push_back(std::move(beside));
  }
  made.model = std::make_unique<ByteModel>(shape, std::move(weights), made.memory->kv_layout());
  made.model->load_weights(options_.weights_seed + static_cast<uint64_t>(rank));
  made.memory->mark_dirty("weights");
  made.model->prepare();
  return made;
}

bool ReferenceEngine::prepared() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.model->prepared(); });
}

void ReferenceEngine::load_weights(uint64_t seed) {
  for (const Rank& rank : ranks_) {
    rank.model->load_weights(seed++);
    rank.memory->mark_dirty("weights");
    if (rank.model->prepared()) rank.model->prepare();
  }
}

// --- requests
// ------------------------------------------------------------------------------------------------------------

Status ReferenceEngine::add(const ReferenceRequest& request, int32_t samples) {
  const int64_t most = static_cast<int64_t>(options_.num_blocks) * block_tokens();
  if (request.prompt.empty() || request.max_tokens < 1 || samples < 1 ||
      static_cast<int64_t>(request.prompt.size()) + request.max_tokens > most) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("request {}: {} prompt tokens, {} to generate, {} samples", request.id,
                                     request.prompt.size(), request.max_tokens, samples),
                 .next_step = fmt::format("use 1 or more of each, and no more than {} tokens in all", most)};
  }
  const auto id_of = [&](int32_t sample) {
    return samples > 1 ? fmt::format("{}/{}", request.id, sample) : request.id;
  };
  for (int32_t sample = 0; sample < samples; ++sample) {
    if (!requests_.contains(id_of(sample))) continue;
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("request {} is there already", id_of(sample)),
                 .next_step = "use another id"};
  }
  for (Rank& rank : ranks_) {
    for (StepRegions& regions : rank.beside) TORPOR_RETURN_IF_ERROR(regions.exchange());
  }
  for (int32_t sample = 0; sample < samples; ++sample) {
    auto made = std::make_unique<Request>();
    made->asked = request;
    made->asked.id = id_of(sample);
    made->asked.seed += sample;
    made->tokens = request.prompt;
    made->generator = static_cast<uint64_t>(made->asked.seed);
    made->arrival = arrivals_++;
    if (offload_) made->offload = offload_->begin_request(made->asked.id, made->asked.priority);
    Request& added = *made;
    requests_.emplace(added.asked.id, std::move(made));
    TORPOR_ASSIGN_OR_RETURN(added.slot, slots_.create(added.asked.id, added.length()));
    queue(added);
  }
  return ok();
}

bool ReferenceEngine::abort(const std::string& id) {
  if (!requests_.contains(id)) return false;
  finish(id);
  return true;
}

void ReferenceEngine::finish(const std::string& id) {
  const auto found = requests_.find(id);
  Request* request = found->second.get();
  const bool busy = offload_ && !offload_->finished(request->offload);
  if (busy) {
    request->load.cancel();  // if it is not committed
    orphans_[request->offload] = {std::move(request->loading), request->slot};
  }
  (void)slots_.finish(request->slot, busy);
  release(*request);
  std::erase(running_, request);
  std::erase(waiting_, request);
  std::erase(loading_, request);
  requests_.erase(found);
}

bool ReferenceEngine::comes_before(const Request& a, const Request& b) const {
  if (options_.by_priority && a.asked.priority != b.asked.priority) return a.asked.priority < b.asked.priority;
  return a.arrival < b.arrival;
}

void ReferenceEngine::queue(Request& request) {
  const auto place = std::find_if(waiting_.begin(), waiting_.end(),
                                  [&](const Request* other) { return comes_before(request, *other); });
  waiting_.insert(place, &request);
}

// Release the last block first, so that the end of a chain is evicted before its beginning.
void ReferenceEngine::release(Request& request) {
  request.partial.reset();
  while (!request.full.empty()) request.full.pop_back();
  request.computed = 0;
}

std::vector<int32_t> ReferenceEngine::Request::table() const {
  std::vector<int32_t> ids;
  for (const BlockRef& block : full) ids.push_back(block.id());
  if (partial) ids.push_back(partial->id());
  return ids;
}

// Return the full blocks of its tokens, except the last token: that one is always computed, for its logits.
std::vector<BlockIdentity> ReferenceEngine::chain_of(const Request& request) const {
  std::vector<BlockIdentity> chain;
  Digest parent;
  for (int32_t at = 0; at + block_tokens() < request.length(); at += block_tokens()) {
    chain.push_back({.parent = parent,
                     .salt = request.asked.salt,
                     .tokens = {request.tokens.begin() + at, request.tokens.begin() + at + block_tokens()}});
    parent = chain.back().hash();
  }
  return chain;
}

// --- one step
// ------------------------------------------------------------------------------------------------------------

// Return true if the request now waits for a load.
bool ReferenceEngine::take_prefix(Request& request) {
  const std::vector<BlockIdentity> chain = chain_of(request);
  request.full = pool_->match(chain);
  if (offload_ && options_.tiers.loads && !request.computes && begin_load(request, chain)) return true;
  counts_.hit_tokens += static_cast<int64_t>(request.full.size()) * block_tokens() - request.loaded_tokens;
  request.loaded_tokens = 0;
  request.computed = static_cast<int32_t>(request.full.size()) * block_tokens();
  return false;
}

std::optional<std::vector<MutableBlock>> ReferenceEngine::allocate_for(const Request& request, int32_t tokens) {
  const int32_t blocks = (request.computed + tokens + block_tokens() - 1) / block_tokens();
  const int32_t held = static_cast<int32_t>(request.full.size()) + (request.partial ? 1 : 0);
  Result<std::vector<MutableBlock>> fresh = pool_->allocate(std::max(0, blocks - held));
  if (!fresh) return std::nullopt;
  return std::move(*fresh);
}

void ReferenceEngine::preempt(Request& request, std::vector<Scheduled>& scheduled, int32_t& budget) {
  std::erase_if(scheduled, [&](const Scheduled& entry) {
    if (entry.request != &request) return false;
    budget += entry.tokens;
    return true;
  });
  release(request);
  ++request.preemptions;
  ++counts_.preemptions;
  (void)slots_.preempt(request.slot);
  std::erase(running_, &request);
  queue(request);
}

std::vector<ReferenceEngine::Scheduled> ReferenceEngine::schedule() {
  std::vector<Scheduled> scheduled;
  int32_t budget = options_.token_budget;
  const int64_t preempted_before = counts_.preemptions;
  for (size_t row = 0; row < running_.size() && budget > 0; ++row) {
    Request& request = *running_[row];
    if (waits_for_blocks(request)) continue;
    const int32_t tokens = std::min(budget, request.length() - request.computed);
    std::optional<std::vector<MutableBlock>> fresh = allocate_for(request, tokens);
    if (!fresh && !deferred_.empty()) continue;  // blocks become free once the deferred ones have arrived
    while (!fresh) {                             // preempt the request that would be served last
      Request* last = *std::max_element(running_.begin(), running_.end(),
                                        [this](const Request* a, const Request* b) { return comes_before(*a, *b); });
      const auto last_row = static_cast<size_t>(std::find(running_.begin(), running_.end(), last) - running_.begin());
      preempt(*last, scheduled, budget);
      if (last_row <= row) --row;  // wraps at 0, and ++row wraps back
      if (last == &request) break;
      fresh = allocate_for(request, tokens);
    }
    if (!fresh) continue;
    scheduled.push_back({&request, tokens, std::move(*fresh)});
    budget -= tokens;
  }
  for (auto next = waiting_.begin(); next != waiting_.end() && budget > 0 &&
                                     running_.size() < static_cast<size_t>(options_.max_running) &&
                                     counts_.preemptions == preempted_before;) {
    Request& request = **next;
    if (!slots_.may_admit(request.slot) || finds_deferred_blocks(request)) {  // other requests may pass it
      ++next;
      continue;
    }
    if (take_prefix(request)) {
      next = waiting_.erase(next);
      loading_.push_back(&request);
      continue;
    }
    const int32_t tokens = std::min(budget, request.length() - request.computed);
    std::optional<std::vector<MutableBlock>> fresh = allocate_for(request, tokens);
    if (!fresh) {
      release(request);
      // The loaded blocks with which other requests wait would keep the engine full for ever.
      for (Request* other : waiting_) {
        if (running_.empty()) release(*other);
      }
      break;
    }
    next = waiting_.erase(next);
    running_.push_back(&request);
    scheduled.push_back({&request, tokens, std::move(*fresh)});
    budget -= tokens;
  }
  return scheduled;
}

// Compute one request's tokens, block by block, through the states of a block.
void ReferenceEngine::compute(Scheduled& scheduled) {
  Request& request = *scheduled.request;
  const size_t full = request.full.size();
  const int32_t end = request.computed + scheduled.tokens;
  auto fresh = scheduled.fresh.begin();
  while (request.computed < end) {
    if (!request.partial) {
      request.partial = std::move(*fresh++);
      (void)request.partial->initialize(request.full.empty() ? Digest{} : request.full.back().identity().hash(),
                                        request.asked.salt);
    }
    const int32_t count = std::min(end - request.computed, block_tokens() - request.computed % block_tokens());
    (void)request.partial->add_tokens(
        std::span(request.tokens).subspan(static_cast<size_t>(request.computed), static_cast<size_t>(count)));
    (void)request.partial->schedule_compute();
    const std::vector<int32_t> table = request.table();
    for (int32_t i = 0; i < count; ++i, ++request.computed)
      for (const Rank& rank : ranks_)
        rank.model->forward(table, request.computed, request.tokens[static_cast<size_t>(request.computed)],
                            options_.kv_of_step ? counts_.steps : 0);
    (void)request.partial->compute_done();
    if (request.computed % block_tokens() != 0) continue;
    Result<BlockRef> block = request.partial->register_block();
    request.full.push_back(std::move(*block));
    request.partial.reset();
  }
  counts_.computed_tokens += scheduled.tokens;
  if (offload_ && request.full.size() > full) offer(request, full);
}

int32_t ReferenceEngine::sample(Request& request) {
  uint64_t number = 0;
  if (request.asked.sampling == Sampling::kSeeded) number = draw(request.generator);
  if (request.asked.sampling == Sampling::kUnseeded) number = draw(generator_);
  // Each rank draws with the token of the rank before it, so that the last token depends on all ranks.
  int32_t token = 0;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    token = ranks_[rank].model->sample(request.table(), request.computed, number);
    number = number * 31 + static_cast<uint64_t>(token);
  }
  return token;
}

std::vector<ReferenceOutput> ReferenceEngine::step() {
  std::vector<ReferenceOutput> outputs;
  if (frozen_) {
    if (const Status well = exchange_asleep(); !well) return {{.id = well.error().what, .token = -1}};
  }
  if (frozen_ || requests_.empty() || !prepared() || !port_.may_step()) return outputs;
  for (Rank& rank : ranks_) {
    for (StepRegions& regions : rank.beside) {
      if (const Status well = regions.step(); !well) return {{.id = well.error().what, .token = -1}};
    }
  }
  if (!loading_.empty()) (void)step_offload();
  const int64_t began = port_.now();
  ++counts_.steps;
  std::vector<Scheduled> scheduled = schedule();
  for (const Scheduled& entry : scheduled) {
    const Request& request = *entry.request;
    const auto blocks = static_cast<int32_t>(request.table().size() + entry.fresh.size());
    (void)slots_.scheduled(request.slot, request.computed, entry.tokens, request.length(), blocks);
  }
  for (const Request* request : running_) {
    if (std::none_of(scheduled.begin(), scheduled.end(),
                     [&](const Scheduled& each) { return each.request == request; }))
      (void)slots_.skip(request->slot);
  }
  for (Scheduled& entry : scheduled) compute(entry);
  for (Scheduled& entry : scheduled) {  // row order: unseeded requests share a generator
    Request& request = *entry.request;
    if (request.computed < request.length()) continue;
    request.tokens.push_back(sample(request));
    outputs.push_back({request.asked.id, request.tokens.back(), request.output_tokens() >= request.asked.max_tokens});
  }
  for (const ReferenceOutput& output : outputs) {
    if (output.finished) finish(output.id);
  }
  if (port_.on()) publish_step(scheduled, began);
  return outputs;
}

// Free and allocate regions also while their tag sleeps, as a framework may.
Status ReferenceEngine::exchange_asleep() {
  for (Rank& rank : ranks_) {
    const std::map<std::string, RegionState> states = rank.memory->states();
    for (StepRegions& regions : rank.beside) {
      const auto state = states.find(regions.tag());
      if (state != states.end() && state->second == RegionState::kDetached) TORPOR_RETURN_IF_ERROR(regions.exchange());
    }
  }
  return ok();
}

void ReferenceEngine::publish_step(const std::vector<Scheduled>& scheduled, int64_t began) {
  int64_t tokens = 0;
  for (const Scheduled& entry : scheduled) tokens += entry.tokens;
  slots_.step(static_cast<int32_t>(running_.size()), static_cast<int32_t>(waiting_.size() + loading_.size()), tokens,
              port_.now() - began);
  const BlockPoolInfo blocks = pool_->info();
  if (std::exchange(published_blocks_, blocks) == blocks) return;
  (void)port_.record(
      {.type = EventType::kTier,
       .from = 0,
       .a = both(static_cast<uint64_t>(blocks.shared + blocks.owned + blocks.quarantined),
                 static_cast<uint64_t>(blocks.shared)),
       .b = both(static_cast<uint64_t>(blocks.cached), static_cast<uint64_t>(blocks.free - blocks.cached))});
}

}  // namespace torpor::reference
