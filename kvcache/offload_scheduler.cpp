// SPDX-License-Identifier: Apache-2.0
#include "kvcache/offload_scheduler.h"

#include <algorithm>
#include <limits>
#include <set>

#include <fmt/core.h>

namespace torpor {
namespace {

constexpr std::string_view kNoRequest = "(no request)";

}  // namespace

Status OffloadSchedulerOptions::validate() const {
  TORPOR_RETURN_IF_ERROR(index.validate());
  TORPOR_RETURN_IF_ERROR(queue.validate());
  const auto wrong = [](std::string what, std::string next) {
    return Error{.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next)};
  };
  if (ranks < 1 || ranks > 64) return wrong(fmt::format("ranks is {}", ranks), "use 1 to 64");
  if (block_tokens < 1) return wrong(fmt::format("block_tokens is {}", block_tokens), "use 1 or more");
  if (counted_keys < 0) return wrong(fmt::format("counted_keys is {}", counted_keys), "use 0 or more");
  if (index.host_slots == 0 && index.disk_segments == 0)
    return wrong("there is no store to offload to", "give host memory or disk slots");
  if (index.host_slots == 0 && index.remote_slots > 0)
    return wrong("there is a remote store and no host memory", "give host memory slots: blocks go out from there");
  return ok();
}

OffloadScheduler::OffloadScheduler(const OffloadSchedulerOptions& options, DeviceBlocks& device,
                                   const Placement& placement, const Clock& clock, EventPort port)
    : options_(options),
      device_(device),
      placement_(placement),
      clock_(clock),
      port_(port),
      queue_(options.queue, port),
      all_ranks_(options.ranks == 64 ? ~uint64_t{0} : (uint64_t{1} << options.ranks) - 1),
      stores_(static_cast<size_t>(options.ranks)) {}

OffloadScheduler::~OffloadScheduler() { queue_.end_all(BlockOutcome::kShutDown); }

Result<std::unique_ptr<OffloadScheduler>> OffloadScheduler::create(const OffloadSchedulerOptions& options,
                                                                   DeviceBlocks& device, const Placement& placement,
                                                                   const Clock& clock, EventPort port) {
  return try_catch([&]() -> Result<std::unique_ptr<OffloadScheduler>> {
    TORPOR_RETURN_IF_ERROR(options.validate());
    std::unique_ptr<OffloadScheduler> made(new OffloadScheduler(options, device, placement, clock, port));
    BlockIndexOptions index = options.index;
    index.remembered_removals = static_cast<int32_t>(std::min<size_t>(options.events, 1 << 20));
    index.block_tokens = options.block_tokens;
    TORPOR_ASSIGN_OR_RETURN(made->index_, BlockIndex::create(index, port));
    if (index.disk_segments > 0) made->host_.resize(static_cast<size_t>(index.host_slots));
    TORPOR_ASSIGN_OR_RETURN(made->uses_, UseCounts::create(static_cast<size_t>(options.counted_keys)));
    return made;
  });
}

// Adopt the newest segments that fit, of the blocks that every rank has. A segment of the index stands for a segment of
// rank 0, so that it is evicted as a whole.
std::vector<AdoptedBlock> OffloadScheduler::adopt(std::span<const std::vector<RecoveredBlock>> ranks) {
  std::vector<AdoptedBlock> adopted;
  if (ranks.size() != static_cast<size_t>(options_.ranks) || options_.index.disk_segments == 0) return adopted;
  std::vector<std::set<BlockKey, BlockKeyLess>> others;
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    std::set<BlockKey, BlockKeyLess>& keys = others.emplace_back();
    for (const RecoveredBlock& block : ranks[rank]) keys.insert(block.key);
  }
  std::vector<int64_t> segments;  // the oldest first
  for (const RecoveredBlock& block : ranks[0]) {
    if (segments.empty() || segments.back() != block.segment) segments.push_back(block.segment);
  }
  const size_t kept = std::min(segments.size(), static_cast<size_t>(options_.index.disk_segments) - 1);
  segments.erase(segments.begin(), segments.end() - static_cast<std::ptrdiff_t>(kept));
  int64_t open = -1;
  for (const RecoveredBlock& block : ranks[0]) {
    if (std::find(segments.begin(), segments.end(), block.segment) == segments.end()) continue;
    if (!std::all_of(others.begin(), others.end(), [&](const auto& keys) { return keys.contains(block.key); }))
      continue;
    if (open >= 0 && open != block.segment) index_->close_segment();
    open = block.segment;
    BlockKey key = block.key;
    key.space = space_;
    const Result<Slot> slot = index_->reserve(StoreId::kDisk, &key);
    if (!slot) continue;  // another record of the same key was adopted
    index_->commit(StoreId::kDisk, *slot, false);
    index_->unpin(StoreId::kDisk, *slot);
    adopted.push_back({block.key, *slot});
  }
  index_->close_segment();
  if (!adopted.empty()) {
    (void)port_.record({.type = EventType::kRegistered,
                        .from = tier_of(StoreId::kDisk),
                        .a = both(static_cast<uint64_t>(options_.block_tokens), adopted.size())});
  }
  return adopted;
}

// ---- requests

uint32_t OffloadScheduler::begin_request(std::string id, int32_t priority) {
  uint32_t number = static_cast<uint32_t>(requests_.size());
  if (free_requests_.empty()) {
    requests_.emplace_back();
    free_requests_.reserve(requests_.size());
  } else {
    number = free_requests_.back();
    free_requests_.pop_back();
  }
  Request& request = at(number);
  request.id = std::move(id);
  request.priority = priority;
  request.stage = RequestStage::kInitialized;
  request.used = true;
  request.counted = false;
  request.planned = false;
  request.lookup = 0;
  // What is loaded for no request is named, too: its number may have been a request's.
  port_.text(TextKind::kRequestName, event_request(number), 0, request.id.empty() ? kNoRequest : request.id);
  return number;
}

void OffloadScheduler::unpin(Request& request, size_t from) {
  for (size_t i = from; i < request.pinned.size(); ++i) {
    if (!request.pinned[i].kept) index_->unpin(request.pinned[i].store, request.pinned[i].slot);
  }
  request.pinned.resize(std::min(from, request.pinned.size()));
}

int32_t OffloadScheduler::match(uint32_t number, std::span<const BlockKey> chain, size_t have) {
  Request& request = at(number);
  if (request.stage == RequestStage::kOnboarding || request.stage == RequestStage::kFinishing) return 0;
  unpin(request, 0);
  request.stage = RequestStage::kInitialized;
  if (options_.counted_keys > 0 && !request.counted) {
    for (const BlockKey& key : chain) (void)uses_.add(key);
    request.counted = true;
  }
  if (have >= chain.size()) return 0;
  const std::span<const BlockKey> rest = chain.subspan(have);
  places_.resize(std::max(places_.size(), rest.size()));
  const size_t found = index_->run(rest, std::span(places_).first(rest.size()));
  const std::span<const BlockLocations> run = std::span(places_).first(found);
  const auto on_host = static_cast<uint64_t>(
      std::count_if(run.begin(), run.end(), [](const BlockLocations& places) { return places.host >= 0; }));
  (void)port_.record({.type = EventType::kHit,
                      .request = event_request(number),
                      .a = rest.size(),
                      .b = both(on_host, found - on_host)});
  if (found == 0 || !placement_.worth_loading(static_cast<int64_t>(found) * options_.block_tokens, run)) return 0;
  request.pinned.reserve(found);
  for (size_t i = 0; i < found; ++i) {
    const StoreId store = nearest(run[i]);
    const Slot slot = slot_in(run[i], store);
    index_->pin(store, slot);
    request.pinned.push_back({.store = store, .slot = slot, .key = rest[i]});
  }
  if (!request.pinned.empty()) request.stage = RequestStage::kOnboardStaged;
  return static_cast<int32_t>(request.pinned.size());
}

bool OffloadScheduler::can_load_within_step() const {
  return !port_.holds() && queue_.jobs_under_way(Way::kOnboard) + within_step_ < options_.queue.loading_batches;
}

TransferHandle OffloadScheduler::allocated(uint32_t number, std::span<const int32_t> blocks, bool within_step) {
  Request& request = at(number);
  if (request.stage != RequestStage::kOnboardStaged || blocks.empty()) {
    unpin(request, 0);
    request.stage = RequestStage::kRunning;
    return {};
  }
  unpin(request, std::min(blocks.size(), request.pinned.size()));
  queued_.clear();
  for (size_t i = 0; i < request.pinned.size(); ++i) {
    const Pinned& pinned = request.pinned[i];
    queued_.push_back({.key = pinned.key, .block = blocks[i], .slot = pinned.slot, .store = pinned.store});
  }
  request.stage = RequestStage::kOnboarding;
  request.load_cancelled = false;
  request.load_began = clock_.now();
  request.planned = false;
  within_step_ += within_step ? 1 : 0;
  constexpr int32_t kBeforeAll = std::numeric_limits<int32_t>::max();
  const int32_t priority = within_step ? kBeforeAll : std::min(request.priority, kBeforeAll - 1);
  return queue_.enqueue({.way = Way::kOnboard, .priority = priority, .owner = number, .within_step = within_step},
                        queued_, queued_.size(), BlockOutcome::kFiltered, clock_.now());
}

std::vector<EndedLoad> OffloadScheduler::take_loads() {
  loads_.reserve(loads_.size() + queue_.ended_owners().size());
  for (const uint32_t number : queue_.ended_owners()) {
    Request& request = at(number);
    const auto bad = std::find_if(request.pinned.begin(), request.pinned.end(),
                                  [this](const Pinned& pinned) { return !pinned.good || pinned.key.space != space_; });
    const bool finishing = request.stage == RequestStage::kFinishing;
    note_time(times_.loads, request.load_began);
    loads_.push_back({.request = number,
                      .good_blocks = static_cast<int32_t>(bad - request.pinned.begin()),
                      .unproven = std::any_of(request.pinned.begin(), request.pinned.end(),
                                              [](const Pinned& pinned) { return pinned.kept; }),
                      .cancelled = request.load_cancelled});
    if (finishing) {
      end_request(number);
    } else {
      request.stage = RequestStage::kRunning;
    }
  }
  queue_.ended_owners().clear();
  return std::exchange(loads_, {});
}

void OffloadScheduler::loaded(uint32_t number, std::span<const int32_t> blocks) {
  Request& request = at(number);
  for (size_t i = 0; i < std::min(blocks.size(), request.pinned.size()); ++i) {
    const Pinned& pinned = request.pinned[i];
    const ContentVersion version = device_.version(blocks[i]);
    BlockLocations places;
    if (!pinned.good || version == ContentVersion::kNone || index_->run({&pinned.key, 1}, {&places, 1}) == 0) continue;
    const Slot slot = slot_in(places, pinned.store);
    if (slot == pinned.slot) index_->back(blocks[i], version, pinned.store, slot);
  }
  unpin(request, 0);
}

void OffloadScheduler::end_request(uint32_t number) {
  Request& request = at(number);
  unpin(request, 0);
  request.used = false;
  request.id.clear();
  free_requests_.push_back(number);
}

void OffloadScheduler::count_cached(uint32_t number, const CachedTokens& tokens) {
  cached_.device += tokens.device;
  for (size_t i = 0; i < tokens.stores.size(); ++i) cached_.stores[i] += tokens.stores[i];
  cached_.other += tokens.other;
  const auto in = [&](StoreId store) { return static_cast<uint64_t>(tokens.stores[static_cast<size_t>(store)]); };
  (void)port_.record({.type = EventType::kCached,
                      .request = event_request(number),
                      .transfer = static_cast<uint64_t>(tokens.other),
                      .a = both(static_cast<uint64_t>(tokens.device), in(StoreId::kHost)),
                      .b = both(in(StoreId::kDisk), in(StoreId::kRemote))});
}

bool OffloadScheduler::finished(uint32_t number) {
  Request& request = at(number);
  if (request.stage == RequestStage::kOnboarding) {
    request.stage = RequestStage::kFinishing;
    return false;
  }
  end_request(number);
  return true;
}

// ---- blocks that became full

TransferHandle OffloadScheduler::offer(const OffloadOffer& offer) {
  const size_t size = std::min(offer.keys.size(), offer.blocks.size());
  const OffloadQueue::Time began = clock_.now();
  queued_.clear();
  size_t without_version = 0;
  BlockOutcome filtered = BlockOutcome::kFiltered;
  places_.resize(std::max(places_.size(), size));
  index_->find_each(offer.keys.first(size), places_);
  for (size_t i = 0; i < size; ++i) {
    const ContentVersion version = device_.version(offer.blocks[i]);
    if (version == ContentVersion::kNone) {
      ++without_version;
      continue;
    }
    Candidate candidate{.key = offer.keys[i], .places = places_[i]};
    if (options_.counted_keys > 0) candidate.uses = uses_.count(offer.keys[i]);
    const StoreMask wanted = placement_.wanted(candidate);
    if (wanted.empty()) continue;
    queued_.push_back({.key = offer.keys[i],
                       .parent = i > 0 && offer.consecutive ? offer.keys[i - 1].hash : offer.parent,
                       .version = version,
                       .block = offer.blocks[i],
                       .priority = offer.priority,
                       .store = wanted.has(StoreId::kHost) ? StoreId::kHost : StoreId::kDisk,
                       .to_disk = wanted.has(StoreId::kHost) && wanted.has(StoreId::kDisk),
                       .to_remote = wanted.has(StoreId::kHost) && wanted.has(StoreId::kRemote)});
  }
  const OffloadQueue::Time now = clock_.now();
  if (now - began > options_.queue.policy_timeout) {
    queued_.clear();
    filtered = BlockOutcome::kPolicyTimeout;
  }
  ask_policy(offer.request);
  return queue_.enqueue({.way = Way::kOffload, .after_step = offer.after_step, .priority = offer.priority}, queued_,
                        size - without_version, filtered, now);
}

void OffloadScheduler::ask_policy(std::string_view request) {
  if (policy_ == nullptr || queued_.empty()) return;
  keys_.clear();
  for (const QueuedBlock& block : queued_) keys_.push_back(block.key);
  held_.assign(keys_.size(), 1);
  if (!policy_->choose(PolicyQuestion::kStore, request, keys_, held_)) return;
  size_t kept = 0;
  for (size_t i = 0; i < queued_.size(); ++i) {
    if (held_[i] != 0) queued_[kept++] = queued_[i];
  }
  queued_.resize(kept);
}

// ---- a sleep

std::vector<Slot> OffloadScheduler::backing(std::span<const int32_t> blocks, bool keep) {
  std::vector<Slot> slots(blocks.size(), -1);
  if (keep) kept_.reserve(kept_.size() + blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    slots[i] = index_->backing(blocks[i], device_.version(blocks[i])).host;
    if (!keep || slots[i] < 0) continue;
    index_->pin(StoreId::kHost, slots[i]);
    kept_.push_back(slots[i]);
  }
  return slots;
}

void OffloadScheduler::release_backing() {
  for (const Slot slot : std::exchange(kept_, {})) index_->unpin(StoreId::kHost, slot);
}

// ---- all of it

Status OffloadScheduler::reset() {
  TORPOR_RETURN_IF_ERROR(index_->retire(space_));
  index_->close_segment();  // a segment has keys of one namespace
  ++space_;
  queue_.end_all(BlockOutcome::kCancelled, true);
  for (const Lookup& lookup : std::exchange(lookups_, {}))
    queue_.count(Way::kLookup, BlockOutcome::kCancelled, lookup.keys.size());
  for (Request& request : requests_) {
    request.lookup = 0;
    if (!request.used || request.stage != RequestStage::kOnboardStaged) continue;
    unpin(request, 0);
    request.stage = RequestStage::kInitialized;
  }
  uses_.clear();
  events_ = {.cleared = options_.events > 0};
  (void)index_->reports().take_removed();
  return ok();
}

BlockEvents OffloadScheduler::take_events() {
  note_removed();
  return std::exchange(events_, {});
}

Status OffloadScheduler::check() const {
  TORPOR_RETURN_IF_ERROR(queue_.check());
  return index_->check();
}

// Emit the counts of each store that changed since the last event.
void OffloadScheduler::publish_stores() {
  const BlockIndexOptions& of = options_.index;
  const auto publish = [&](StoreId store, int64_t slots) {
    if (slots == 0) return;
    const StoreCounts counts = index_->counts(store);
    const int64_t used = counts.reserved + counts.doomed + counts.quarantined;
    const std::pair now(both(static_cast<uint64_t>(used), static_cast<uint64_t>(counts.reserved)),
                        both(static_cast<uint64_t>(counts.visible),
                             static_cast<uint64_t>(std::max<int64_t>(slots - used - counts.visible, 0))));
    if (std::exchange(published_[static_cast<size_t>(store)], now) == now) return;
    (void)port_.record({.type = EventType::kTier, .from = tier_of(store), .a = now.first, .b = now.second});
  };
  publish(StoreId::kHost, of.host_slots);
  publish(StoreId::kDisk, int64_t{of.disk_segments} * of.segment_slots);
}

}  // namespace torpor
