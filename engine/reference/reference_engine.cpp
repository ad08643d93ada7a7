#include "engine/reference/reference_engine.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/units.h"
#include "offload/host_store.h"

namespace torpor::reference {
namespace {

constexpr const char* kOnlyRegion = "all";

// Knuth's constants for a 64-bit linear congruential generator (MMIX).
uint64_t draw(uint64_t& generator) { return generator = generator * 6364136223846793005u + 1442695040888963407u; }

}  // namespace

ReferenceEngine::ReferenceEngine(FileSystem& file_system, const Clock& clock, ReferenceOptions options, EventSink* sink)
    : file_system_(file_system), clock_(clock), options_(std::move(options)), sink_(sink) {}

ReferenceEngine::~ReferenceEngine() {
  pipelines_.clear();
  for (const auto& [id, request] : requests_) release(*request);
}

Result<std::unique_ptr<ReferenceEngine>> ReferenceEngine::create(std::unique_ptr<DeviceMemory> device,
                                                                 FileSystem& file_system, const Clock& clock,
                                                                 ReferenceOptions options, EventSink* sink) {
  std::vector<std::unique_ptr<DeviceMemory>> devices;
  devices.push_back(std::move(device));
  return create(std::move(devices), file_system, clock, std::move(options), sink);
}

Result<std::unique_ptr<ReferenceEngine>> ReferenceEngine::create(std::vector<std::unique_ptr<DeviceMemory>> devices,
                                                                 FileSystem& file_system, const Clock& clock,
                                                                 ReferenceOptions options, EventSink* sink) {
  if (options.token_budget < 1 || options.max_running < 1 || options.model.token_bytes % 16 != 0 ||
      options.model.token_bytes == 0) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "token_budget, max_running or token_bytes is too small or odd",
                 .next_step = "use at least 1, 1 and 16"};
  }
  if (devices.empty() || (devices.size() > 1 && (options.tiers.host_blocks > 0 || options.tiers.disk_blocks > 0))) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("{} ranks, with tiers for {} and {} blocks", devices.size(),
                                     options.tiers.host_blocks, options.tiers.disk_blocks),
                 .next_step = "use one device, or several without tiers"};
  }
  std::unique_ptr<ReferenceEngine> engine(new ReferenceEngine(file_system, clock, std::move(options), sink));
  TORPOR_TRY(engine->build(std::move(devices)));
  TORPOR_TRY(engine->build_tiers());
  return engine;
}

Status ReferenceEngine::build(std::vector<std::unique_ptr<DeviceMemory>> devices) {
  TORPOR_ASSIGN(pool_, BlockPool::create({.num_blocks = options_.num_blocks, .block_tokens = block_tokens()}, sink_));
  for (std::unique_ptr<DeviceMemory>& device : devices) {
    TORPOR_ASSIGN(Rank rank, make_rank(static_cast<int32_t>(ranks_.size()), std::move(device)));
    ranks_.push_back(std::move(rank));
  }
  return ok();
}

Result<ReferenceEngine::Rank> ReferenceEngine::make_rank(int32_t rank, std::unique_ptr<DeviceMemory> device) {
  Rank made;
  TORPOR_ASSIGN(made.memory, RankMemory::create(std::move(device), file_system_,
                                                {.rank = rank,
                                                 .arena_slab_bytes = 1 * kMiB,
                                                 .threads = options_.transfer_threads,
                                                 .own_threads = options_.transfers_have_threads,
                                                 .retain_kv_bytes = options_.retain_kv_bytes}));
  const ByteModelShape& shape = options_.model;
  const uint64_t block_bytes = static_cast<uint64_t>(shape.block_tokens) * shape.token_bytes;
  const uint64_t layer_bytes = static_cast<uint64_t>(options_.num_blocks) * block_bytes;
  TORPOR_ASSIGN(const DeviceAddress weights, made.memory->allocate("weights", kOnlyRegion, options_.weight_bytes));
  TORPOR_ASSIGN(const DeviceAddress kv, made.memory->allocate("kv_cache", kOnlyRegion, shape.layers * layer_bytes));
  TORPOR_TRY(made.memory->set_kv_layout("kv_cache", {.num_blocks = static_cast<uint32_t>(options_.num_blocks),
                                                     .tensors = {{.address = kv,
                                                                  .layers = shape.layers,
                                                                  .layer_stride = layer_bytes,
                                                                  .block_stride = block_bytes,
                                                                  .block_bytes = block_bytes}}}));
  made.model =
      std::make_unique<ByteModel>(shape, std::span(reinterpret_cast<std::byte*>(weights), options_.weight_bytes),
                                  made.memory->kv_layout());  // NOLINT(performance-no-int-to-ptr)
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

// device -> host -> disk, or the part of it that there is; what arrives in the host goes on to the disk.
Status ReferenceEngine::build_tiers() {
  const TierOptions& tiers = options_.tiers;
  RankMemory& memory = *ranks_[0].memory;
  const uint64_t bytes = memory.kv_layout().bytes_per_block();
  std::vector<BlockTier*> stores;
  const auto pool_of = [&](int32_t blocks) {
    return BlockPoolOptions{.num_blocks = blocks, .block_tokens = block_tokens(), .eviction = tiers.eviction};
  };
  if (tiers.host_blocks > 0) {
    TORPOR_ASSIGN(std::unique_ptr<Store> store,
                  HostStore::create(memory.arena(), {.slots = tiers.host_blocks, .slot_bytes = bytes}));
    TORPOR_ASSIGN(host_, BlockTier::create(std::move(store), {pool_of(tiers.host_blocks), bytes, {}}));
    stores.push_back(host_.get());
  }
  if (tiers.disk_blocks > 0) {
    TORPOR_ASSIGN(const KeySpace space, key_space());
    TORPOR_ASSIGN(std::unique_ptr<Store> store, SegmentStore::open(file_system_, tiers.disk_directory + "/store",
                                                                   segments_for(tiers.disk_blocks, bytes), clock_));
    TORPOR_ASSIGN(disk_, BlockTier::create(std::move(store), {pool_of(tiers.disk_blocks), bytes, space.digest()}));
    stores.push_back(disk_.get());
  }
  if (stores.empty()) return ok();
  routes_.push_back(std::make_unique<DeviceRoute>(*pool_, memory.kv_layout(), *stores[0], memory.transfers()));
  if (host_ && disk_) {
    routes_.push_back(std::make_unique<HostRoute>(*host_, *disk_));
    routes_[0]->on_registered([this](std::vector<BlockName> blocks) { pipelines_[1]->enqueue(std::move(blocks)); });
  }
  for (const auto& route : routes_) {
    std::vector<std::unique_ptr<OffloadPolicy>> policies;
    policies.push_back(make_presence_policy(*route));
    TORPOR_ASSIGN(std::unique_ptr<OffloadPipeline> pipeline,
                  OffloadPipeline::create(*route, clock_, tiers.offload, std::move(policies), sink_));
    pipelines_.push_back(std::move(pipeline));
  }
  onboarding_ = std::make_unique<Onboarding>(*pool_, memory.kv_layout(), memory.transfers(), stores,
                                             host_ && disk_ ? tiers.disk_onboarding : DiskOnboarding::kDirect);
  return ok();
}

// With the weights as they were loaded; what they are after a change nobody can name (BlockTier::forget_all).
Result<KeySpace> ReferenceEngine::key_space() {
  TORPOR_ASSIGN(const Fingerprint fields, fingerprint());
  KeySpace space{.weights = digest_of(std::as_bytes(std::span(&options_.weights_seed, 1))),
                 .hashing = "BlockIdentity, XXH3-128 and SHA-256"};
  for (const auto& [name, value] : fields) space.layout += fmt::format("{}: {}\n", name, value);
  return space;
}

bool ReferenceEngine::step_offload() {
  bool more = false;
  for (const auto& pipeline : pipelines_) more = pipeline->step() || more;
  std::erase_if(offloads_, [](const OffloadHandle& handle) { return handle.status() == OffloadStatus::kDone; });
  return more;
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
  for (int32_t sample = 0; sample < samples; ++sample) {
    auto made = std::make_unique<Request>();
    made->asked = request;
    made->asked.id = id_of(sample);
    made->asked.seed += sample;
    made->tokens = request.prompt;
    made->generator = static_cast<uint64_t>(made->asked.seed);
    made->arrival = arrivals_++;
    Request& added = *made;
    requests_.emplace(added.asked.id, std::move(made));
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
  release(*request);
  std::erase(running_, request);
  std::erase(waiting_, request);
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

// The last block first, so that of a chain the end is evicted before the beginning.
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

// The full blocks of its tokens, without the last token: that one must be computed in any case, for its logits.
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

void ReferenceEngine::take_prefix(Request& request) {
  const std::vector<BlockIdentity> chain = chain_of(request);
  request.full = pool_->match(chain);
  counts_.hit_tokens += static_cast<int64_t>(request.full.size()) * block_tokens();
  if (onboarding_ && request.full.size() < chain.size()) {
    Result<std::vector<BlockRef>> up = onboarding_->onboard(std::span(chain).subspan(request.full.size()));
    if (up) {  // no room in the device: it is computed instead, or waits
      counts_.onboarded_tokens += static_cast<int64_t>(up->size()) * block_tokens();
      for (BlockRef& block : *up) request.full.push_back(std::move(block));
    }
  }
  request.computed = static_cast<int32_t>(request.full.size()) * block_tokens();
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
  std::erase(running_, &request);
  queue(request);
}

std::vector<ReferenceEngine::Scheduled> ReferenceEngine::schedule() {
  std::vector<Scheduled> scheduled;
  int32_t budget = options_.token_budget;
  const int64_t preempted_before = counts_.preemptions;
  for (size_t row = 0; row < running_.size() && budget > 0; ++row) {
    Request& request = *running_[row];
    const int32_t tokens = std::min(budget, request.length() - request.computed);
    std::optional<std::vector<MutableBlock>> fresh = allocate_for(request, tokens);
    while (!fresh) {  // the one that would be served last makes room
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
  while (!waiting_.empty() && budget > 0 && running_.size() < static_cast<size_t>(options_.max_running) &&
         counts_.preemptions == preempted_before) {
    Request& request = *waiting_.front();
    take_prefix(request);
    const int32_t tokens = std::min(budget, request.length() - request.computed);
    std::optional<std::vector<MutableBlock>> fresh = allocate_for(request, tokens);
    if (!fresh) {
      release(request);
      break;
    }
    waiting_.pop_front();
    running_.push_back(&request);
    scheduled.push_back({&request, tokens, std::move(*fresh)});
    budget -= tokens;
  }
  return scheduled;
}

// The forward pass of one request's tokens, block by block through the states of a block.
void ReferenceEngine::compute(Scheduled& scheduled) {
  Request& request = *scheduled.request;
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
        rank.model->forward(table, request.computed, request.tokens[static_cast<size_t>(request.computed)]);
    (void)request.partial->compute_done();
    if (request.computed % block_tokens() != 0) continue;
    Result<BlockRef> block = request.partial->register_block();
    registered_.push_back(name_of(*block));
    request.full.push_back(std::move(*block));
    request.partial.reset();
  }
  counts_.computed_tokens += scheduled.tokens;
}

int32_t ReferenceEngine::sample(Request& request) {
  uint64_t number = 0;
  if (request.asked.sampling == Sampling::kSeeded) number = draw(request.generator);
  if (request.asked.sampling == Sampling::kUnseeded) number = draw(generator_);
  // Each rank draws with what the one before it said, so that the last one's answer depends on all.
  int32_t token = 0;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    token = ranks_[rank].model->sample(request.table(), request.computed, number);
    number = number * 31 + static_cast<uint64_t>(token);
  }
  return token;
}

std::vector<ReferenceOutput> ReferenceEngine::step() {
  std::vector<ReferenceOutput> outputs;
  if (frozen_ || requests_.empty() || !prepared()) return outputs;
  ++counts_.steps;
  std::vector<Scheduled> scheduled = schedule();
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
  if (!pipelines_.empty() && !registered_.empty()) offloads_.push_back(pipelines_[0]->enqueue(std::move(registered_)));
  registered_.clear();
  return outputs;
}

}  // namespace torpor::reference
