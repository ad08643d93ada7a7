// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/session_engine.h"

#include <algorithm>

#include <fmt/core.h>

#include "allocator/host_device.h"
#include "base/units.h"
#include "checkpoint/engine_checkpoint.h"
#include "engine/rank_service.h"
#include "tests/support/results.h"

namespace torpor::test {
namespace {

constexpr uint64_t kTokenBytes = sizeof(uint64_t);  // KV of a token
constexpr uint64_t kBlockBytes = kTokenBytes * SessionEngine::kBlockTokens;
constexpr uint64_t kVocabulary = 50'000;

uint64_t mix(uint64_t a, uint64_t b) {  // splitmix64 over both
  uint64_t z = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// KV of a token on rank 0, after the KV of the token before it.
uint64_t kv_of(uint64_t before, int32_t token, uint64_t weights) {
  return mix(mix(before, static_cast<uint64_t>(token)), weights);
}

// Takes KV, token after token, and draws the next one.
class Sampler {
 public:
  explicit Sampler(std::optional<int64_t> seed) : sum_(seed ? static_cast<uint64_t>(*seed) + 1 : 0) {}
  void take(uint64_t kv) { sum_ = mix(sum_, kv); }
  int32_t token() const { return static_cast<int32_t>(sum_ % kVocabulary); }

 private:
  uint64_t sum_;
};

std::vector<int32_t> tokens_of(const RequestState& request) {
  std::vector<int32_t> tokens = request.prompt_token_ids;
  tokens.insert(tokens.end(), request.output_token_ids.begin(), request.output_token_ids.end());
  return tokens;
}

size_t blocks_for(size_t tokens) {
  return (tokens + SessionEngine::kBlockTokens - 1) / static_cast<size_t>(SessionEngine::kBlockTokens);
}

Error another_call() { return {.code = Code::kFailedPrecondition, .what = "the engine is stopped for another call"}; }

Error not_here(const std::string& request) {
  return {.code = Code::kNotFound, .what = fmt::format("request {} does not run here", request)};
}

}  // namespace

int32_t expected_token(const std::vector<int32_t>& tokens, std::optional<int64_t> seed, uint64_t weights) {
  Sampler sampler(seed);
  uint64_t kv = 0;
  for (const int32_t token : tokens) sampler.take(kv = kv_of(kv, token, weights));
  return sampler.token();
}

SessionEngine::SessionEngine(uint64_t number, FileSystem& disk, const Clock& clock, const std::string& directory,
                             int32_t ranks, uint64_t weights, Planted planted)
    : number_(number),
      files_(disk),
      planted_(planted),
      weights_(weights),
      images_(*this),
      stored_(*this, images_, files_, directory, {.clock = &clock}) {
  for (int32_t rank = 0; rank < ranks; ++rank) {
    Rank& made = ranks_.emplace_back();
    made.memory = value_of(RankMemory::create(
        value_of(make_host_device()), files_,
        {.rank = rank, .arena_slab_bytes = 64 * kKiB, .threads = 1, .own_threads = false, .deferred_thread = false}));
    made.kv = value_of(made.memory->allocate("kv_cache", "kv", kBlocks * kBlockBytes));
    const KvTensor tensor{
        .address = made.kv, .layers = 1, .layer_stride = 1, .block_stride = kBlockBytes, .block_bytes = kBlockBytes};
    EXPECT_SUCCEEDS(made.memory->set_kv_layout("kv_cache", {.num_blocks = kBlocks, .tensors = {tensor}}));
  }
}

// The locks on images end with the process, and nothing else of it happens.
SessionEngine::~SessionEngine() {
  files_.plan.set(Fault::kError, 1, EIO, true);
  stored_.close();
}

Result<std::vector<Bytes>> SessionEngine::call_ranks(const Bytes& order) {
  return files_.plan.run([&]() -> Result<std::vector<Bytes>> {
    std::vector<Bytes> replies;
    for (const Rank& rank : ranks_) replies.push_back(RankService(*rank.memory).call(order));
    return replies;
  });
}

Result<Fingerprint> SessionEngine::fingerprint() {
  return Fingerprint{{"model", "m"}, {"weights", fmt::format("{}", weights_)}};
}

// --- the scheduler ---

uint64_t& SessionEngine::kv(int32_t rank, const std::vector<int32_t>& blocks, size_t position) {
  const auto block = static_cast<uint64_t>(blocks.at(position / kBlockTokens));
  const uint64_t at = block * kBlockBytes + position % kBlockTokens * kTokenBytes;
  return *reinterpret_cast<uint64_t*>(ranks_[static_cast<size_t>(rank)].kv + at);  // NOLINT
}

size_t SessionEngine::free_blocks() const {
  return static_cast<size_t>(std::count(references_.begin(), references_.end(), 0));
}

// Add new blocks until there are `count`. Return false, with no change, if so many are not free.
bool SessionEngine::reserve(std::vector<int32_t>& blocks, size_t count) {
  if (count > blocks.size() && count - blocks.size() > free_blocks()) return false;
  for (int32_t block = 0; block < kBlocks && blocks.size() < count; ++block) {
    if (references_[static_cast<size_t>(block)] != 0) continue;
    references_[static_cast<size_t>(block)] = 1;
    blocks.push_back(block);
  }
  return true;
}

// The next owner of a block that nobody uses any more writes into it.
void SessionEngine::free(std::vector<int32_t>& blocks) {
  for (const int32_t block : blocks) {
    if (--references_[static_cast<size_t>(block)] > 0) continue;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      for (size_t token = 0; token < kBlockTokens; ++token) kv(static_cast<int32_t>(rank), {block}, token) = 0xdeadu;
    }
  }
  blocks.clear();
}

void SessionEngine::add(RequestState request) {
  const std::string id = request.id;
  running_.insert_or_assign(id, Running{.state = std::move(request)});
}

std::vector<SessionEngine::Token> SessionEngine::step() {
  if (pending_) return {};
  send_drops();
  std::erase_if(waiting_, [&](const Waiting& each) { return admit(each); });
  std::vector<Token> tokens;
  for (auto at = running_.begin(); at != running_.end();) {
    const bool ended = compute(at->second, tokens);
    if (ended) free(at->second.blocks);
    at = ended ? running_.erase(at) : std::next(at);
  }
  return tokens;
}

// Bring a resumed request's KV into blocks. What does not arrive is computed again. Return false if it waits on.
bool SessionEngine::admit(const Waiting& waiting) {
  const bool is_void = waiting.epoch != epoch_ && planted_ != Planted::kNoEpochCheck;
  const auto computed = static_cast<size_t>(is_void ? 0 : waiting.computed);
  Running running{.state = waiting.state};
  if (!reserve(running.blocks, blocks_for(computed))) return false;
  running.state.num_computed_tokens = static_cast<int32_t>(computed);
  if (computed > 0) {
    const bool brought = [&] {
      const Result<Bytes> order = images_.admit_order(waiting.state.id, running.blocks);
      if (!order) return false;
      const Result<std::vector<Bytes>> replies = call_ranks(*order);
      return replies && std::all_of(replies->begin(), replies->end(),
                                    [](const Bytes& reply) { return decode_reply<orders::Admit>(reply).has_value(); });
    }();
    if (!brought) {
      free(running.blocks);
      running.state.num_computed_tokens = 0;
    }
  }
  release(waiting.state.id);
  running_.insert_or_assign(waiting.state.id, std::move(running));
  return true;
}

// Compute KV of all tokens that have none, and draw a token. Return whether the request has ended.
bool SessionEngine::compute(Running& running, std::vector<Token>& tokens) {
  RequestState& state = running.state;
  const std::vector<int32_t> all = tokens_of(state);
  if (!reserve(running.blocks, blocks_for(all.size()))) {  // preempted
    free(running.blocks);
    state.num_computed_tokens = 0;
    return false;
  }
  for (auto i = static_cast<size_t>(state.num_computed_tokens); i < all.size(); ++i) {
    const uint64_t before = i == 0 ? 0 : kv(0, running.blocks, i - 1);
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      kv(static_cast<int32_t>(rank), running.blocks, i) = kv_of(before, all[i], weights_) + rank;
  }
  Sampler sampler(state.sampling.seed);
  for (size_t i = 0; i < all.size(); ++i) {
    bool same = true;  // ranks have parts of one KV
    for (size_t rank = 1; rank < ranks_.size(); ++rank)
      same &= kv(static_cast<int32_t>(rank), running.blocks, i) == kv(0, running.blocks, i) + rank;
    sampler.take(same ? kv(0, running.blocks, i) : ~kv(0, running.blocks, i));
  }
  state.num_computed_tokens = static_cast<int32_t>(all.size());
  state.output_token_ids.push_back(sampler.token());
  const bool last = static_cast<int32_t>(state.output_token_ids.size()) >= state.max_tokens;
  tokens.push_back({state.id, state.output_token_ids.size() - 1, sampler.token(), last});
  return last;
}

void SessionEngine::set_weights(uint64_t weights) {
  weights_ = weights;
  ++epoch_;
  for (auto& [id, running] : running_) {
    free(running.blocks);
    running.state.num_computed_tokens = 0;
  }
}

// --- calls, after bindings/python/torpor/vllm/sessions.py ---

void SessionEngine::release(const std::string& request) {
  if (std::optional<Bytes> drop = images_.release(request)) drops_.push_back(std::move(*drop));
  send_drops();
}

// The ranks free images that are gone. What fails is sent again with the next call.
void SessionEngine::send_drops() {
  while (!drops_.empty() && call_ranks(drops_.front())) drops_.erase(drops_.begin());
}

void SessionEngine::wait(RequestState request, bool recompute) {
  const int32_t computed = recompute ? 0 : request.num_computed_tokens;
  waiting_.push_back({.state = std::move(request), .computed = computed, .epoch = epoch_});
}

Status SessionEngine::hibernate(const std::string& image, const std::vector<std::string>& requests, bool to_disk) {
  if (pending_) return another_call();
  send_drops();
  if (!drops_.empty()) return Error{.code = Code::kDevice, .what = "a rank keeps an image"};
  const auto known = images_.get(image);
  if (known) {
    std::set<std::string> has;
    for (const RequestImages::Request& each : (*known)->requests) has.insert(each.state.id);
    if (has != std::set<std::string>(requests.begin(), requests.end()))
      return Error{.code = Code::kInvalidArgument, .what = "the image has other requests"};
    if ((*known)->resuming) return Error{.code = Code::kFailedPrecondition, .what = "the image is being resumed"};
  } else {
    std::vector<RequestState> states;
    std::vector<std::vector<int32_t>> tables;
    for (const std::string& id : requests) {
      const auto found = running_.find(id);
      if (found == running_.end()) return not_here(id);
      states.push_back(found->second.state);
      const auto computed = static_cast<size_t>(found->second.state.num_computed_tokens);
      const auto& blocks = found->second.blocks;
      tables.emplace_back(blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(blocks_for(computed)));
    }
    const auto forget_requests = [&] {
      for (const std::string& id : requests) {
        free(running_.at(id).blocks);
        running_.erase(id);
      }
    };
    if (planted_ == Planted::kFreeBeforeVerify) forget_requests();
    TORPOR_RETURN_IF_ERROR(images_.extract(image, std::move(states), tables, kBlockTokens));
    if (planted_ != Planted::kFreeBeforeVerify) forget_requests();
    epochs_[image] = epoch_;
  }
  if (!to_disk) return ok();
  const Status written = [&]() -> Status {
    if (!stored_.path_of(image).empty()) return ok();
    if (epochs_[image] != epoch_) return Error{.code = Code::kFailedPrecondition, .what = "the weights have changed"};
    TORPOR_ASSIGN_OR_RETURN(Fingerprint fields, fingerprint());
    TORPOR_RETURN_IF_ERROR(stored_.store(image, std::move(fields), Value{}));
    return ok();
  }();
  if (!written && !known) (void)resume_image(image);  // undone; an image from before stays
  return written;
}

// Another engine has taken the image: its requests are no more here.
Status SessionEngine::moved(const std::string& image, Error error) {
  stored_.put_back(image);
  (void)stored_.forget(image);
  return error;
}

Status SessionEngine::resume_image(const std::string& image) {
  if (pending_) return another_call();
  TORPOR_ASSIGN_OR_RETURN(const RequestImages::Image* const known, images_.get(image));
  if (known->resuming) return ok();
  const bool was_stored = !known->in_memory;
  const Result<const RequestImages::Image*> read = stored_.read_back(image);
  const bool recompute = epochs_[image] != epoch_ && planted_ != Planted::kNoEpochCheck;
  Status taken = read ? stored_.take(image) : Status(read.error());
  if (read && planted_ == Planted::kAdmitTwice) taken = ok();
  if (!taken) {
    if (was_stored && taken.error().code == Code::kNotFound) return moved(image, taken.error());
    stored_.put_back(image);
    return taken;
  }
  TORPOR_RETURN_IF_ERROR(images_.begin(image));
  for (const RequestImages::Request& each : (*read)->requests) wait(each.state, recompute);
  return ok();
}

Status SessionEngine::open(const std::string& path) {
  if (pending_) return another_call();
  send_drops();
  if (!drops_.empty()) return Error{.code = Code::kDevice, .what = "a rank keeps an image"};
  TORPOR_ASSIGN_OR_RETURN(const StoredImages::Opened opened, stored_.open(path));
  const std::string id = opened.image->name();
  Pending pending{.image = id};
  const Status read = [&]() -> Status {
    TORPOR_ASSIGN_OR_RETURN(const Fingerprint own, fingerprint());
    if (planted_ != Planted::kNoEpochCheck) TORPOR_RETURN_IF_ERROR(compare_portable(opened.state.fingerprint, own));
    const CapturedState& state = opened.state.state;
    std::vector<std::vector<int32_t>> tables;
    for (size_t i = 0; i < state.scheduler.requests.size(); ++i) {
      if (opened.image->ended().contains(static_cast<int32_t>(i))) continue;
      const RequestState& request = state.scheduler.requests[i];
      const auto waits = [&](const Waiting& each) { return each.state.id == request.id; };
      if (running_.contains(request.id) || images_.find(request.id) != nullptr ||
          std::any_of(waiting_.begin(), waiting_.end(), waits))
        return Error{.code = Code::kFailedPrecondition, .what = "this engine has a request of its name"};
      pending.requests.push_back(request);
      tables.push_back(state.kv.groups.at(0).tables.at(i).blocks);
    }
    if (pending.requests.empty()) return Error{.code = Code::kNotFound, .what = "all of its requests have ended"};
    const Checkpoint& checkpoint = opened.image->checkpoint();
    const Manifest& manifest = checkpoint.manifest();
    auto made = images_.read(id, pending.requests, std::move(tables), kBlockTokens,
                             {.directory = checkpoint.path(), .generation = manifest.generation, .id = manifest.id});
    return made ? images_.begin(id) : Status(stored_.meaning_of(id, std::move(made).error()));
  }();
  if (!read) {
    stored_.put_back(id);
    return read;
  }
  pending_ = std::move(pending);
  return ok();
}

Status SessionEngine::finish(bool keep) {
  if (!pending_) return Error{.code = Code::kNotFound, .what = "no image is held"};
  const Pending pending = *std::exchange(pending_, std::nullopt);
  const Status taken = keep ? stored_.take(pending.image) : ok();
  if (keep && (taken || planted_ == Planted::kAdmitTwice)) {
    epochs_[pending.image] = epoch_;
    for (const RequestState& request : pending.requests) wait(request, false);
  } else {
    for (const RequestState& request : pending.requests) release(request.id);
  }
  stored_.put_back(pending.image);
  return taken;
}

Result<std::vector<std::string>> SessionEngine::fork(const std::string& request, std::optional<int64_t> at,
                                                     const std::vector<std::optional<int64_t>>& seeds) {
  if (pending_) return another_call();
  const auto found = running_.find(request);
  if (found == running_.end()) return not_here(request);
  const Running& parent = found->second;
  TORPOR_ASSIGN_OR_RETURN(const ForkPlan plan,
                          plan_fork({.prompt_tokens = static_cast<int64_t>(parent.state.prompt_token_ids.size()),
                                     .output_tokens = static_cast<int64_t>(parent.state.output_token_ids.size()),
                                     .computed_tokens = parent.state.num_computed_tokens,
                                     .blocks = parent.blocks,
                                     .block_tokens = kBlockTokens},
                                    at, static_cast<int64_t>(seeds.size()), static_cast<int64_t>(free_blocks())));
  std::vector<Running> children;
  std::vector<int32_t> targets;
  const auto shared = static_cast<size_t>(plan.shared_blocks);
  ++forks_;
  for (size_t i = 0; i < seeds.size(); ++i) {
    Running child{.state = parent.state};
    child.state.id = fmt::format("{}-{}.{}-{}", request, number_, forks_, i);
    child.state.output_token_ids.resize(static_cast<size_t>(plan.output_tokens));
    child.state.num_computed_tokens = static_cast<int32_t>(plan.computed_tokens);
    if (seeds[i]) child.state.sampling.seed = seeds[i];
    if (plan.computed_tokens > 0) {
      child.blocks.assign(parent.blocks.begin(), parent.blocks.begin() + static_cast<std::ptrdiff_t>(shared));
      for (const int32_t block : child.blocks) ++references_[static_cast<size_t>(block)];
      EXPECT_TRUE(reserve(child.blocks, shared + static_cast<size_t>(plan.own_blocks)));
      targets.push_back(child.blocks.at(shared));
    }
    children.push_back(std::move(child));
  }
  if (plan.copied_block && plan.computed_tokens > 0) {
    if (const auto copied = copy_blocks(*this, *plan.copied_block, targets); !copied) {
      for (Running& child : children) free(child.blocks);
      return copied.error();
    }
  }
  std::vector<std::string> names;
  for (Running& child : children) {
    names.push_back(child.state.id);
    running_.insert_or_assign(child.state.id, std::move(child));
  }
  return names;
}

void SessionEngine::end(const std::string& request) {
  if (pending_) return;
  if (const auto found = running_.find(request); found != running_.end()) {
    free(found->second.blocks);
    running_.erase(found);
    return;
  }
  if (std::erase_if(waiting_, [&](const Waiting& each) { return each.state.id == request; }) > 0) {
    release(request);
    return;
  }
  if (std::optional<Bytes> drop = stored_.release(request)) drops_.push_back(std::move(*drop));
  send_drops();
}

// --- what it has ---

std::map<std::string, std::vector<int32_t>> SessionEngine::served() const {
  std::map<std::string, std::vector<int32_t>> all;
  for (const auto& [id, running] : running_) all.emplace(id, running.state.output_token_ids);
  for (const Waiting& each : waiting_) all.emplace(each.state.id, each.state.output_token_ids);
  return all;
}

std::set<std::string> SessionEngine::running() const {
  std::set<std::string> all;
  for (const auto& [id, running] : running_) all.insert(id);
  return all;
}

std::map<std::string, SessionEngine::Held> SessionEngine::hibernated() const {
  std::map<std::string, Held> all;
  for (const auto& [id, image] : images_.images()) {
    if (image.resuming) continue;
    Held& held = all[id];
    held.in_memory = image.in_memory;
    for (const RequestImages::Request& each : image.requests) held.requests.insert(each.state.id);
  }
  return all;
}

std::string SessionEngine::leak() const {
  std::vector<int> counted(kBlocks, 0);
  for (const auto& [id, running] : running_) {
    for (const int32_t block : running.blocks) ++counted[static_cast<size_t>(block)];
  }
  if (counted != references_) return "references to blocks are not those of its requests";
  bool in_memory = false;
  for (const auto& [id, image] : images_.images()) {
    in_memory |= image.in_memory && image.count > 0;
    size_t waiting = 0;
    for (const RequestImages::Request& each : image.requests) {
      waiting += static_cast<size_t>(std::count_if(
          waiting_.begin(), waiting_.end(), [&](const Waiting& other) { return other.state.id == each.state.id; }));
    }
    const bool is_pending = pending_ && pending_->image == id;
    if (image.resuming && !is_pending && waiting != image.requests.size())
      return fmt::format("the image {} waits for nobody", id);
  }
  uint64_t used = 0;
  for (const Rank& rank : ranks_) used += rank.memory->ledger().arena_used_bytes;
  if (drops_.empty() && (used > 0) != in_memory)
    return fmt::format("{} bytes of host memory are used, {} an image", used, in_memory ? "by" : "without");
  return "";
}

}  // namespace torpor::test
