// SPDX-License-Identifier: Apache-2.0
#include "kvcache/block_pool.h"

#include <algorithm>

#include <fmt/core.h>

namespace torpor {

Digest BlockIdentity::hash() const {
  StreamingDigest digest;
  digest.update(std::as_bytes(std::span(parent.bytes)));
  digest.update(std::as_bytes(std::span(&salt, 1)));
  digest.update(std::as_bytes(std::span(&group, 1)));
  digest.update(std::as_bytes(std::span(tokens)));
  return digest.finish();
}

BlockKey key_of(const BlockIdentity& identity, uint32_t space) {
  std::vector<std::byte> fields;
  const auto add = [&fields](std::span<const std::byte> bytes) {
    fields.insert(fields.end(), bytes.begin(), bytes.end());
  };
  add(std::as_bytes(std::span(identity.parent.bytes)));
  add(std::as_bytes(std::span(&identity.salt, 1)));
  add(std::as_bytes(std::span(&identity.group, 1)));
  add(std::as_bytes(std::span(identity.tokens)));
  BlockKey key{.group = static_cast<uint32_t>(identity.group), .space = space};
  const Digest hash = identity.hash();
  const std::array<uint8_t, 32> strong = sha256_of(fields);
  std::copy(hash.bytes.begin(), hash.bytes.end(), key.hash.begin());
  std::copy_n(strong.begin(), key.hash.size() - hash.bytes.size(), key.hash.begin() + hash.bytes.size());
  return key;
}

BlockPool::BlockPool(BlockPoolOptions options, EventPort port)
    : options_(std::move(options)),
      port_(port),
      slots_(static_cast<size_t>(options_.num_blocks)),
      empty_(options_.num_blocks),
      cached_(make_eviction_order(options_.eviction, options_.num_blocks)),
      free_blocks_(options_.num_blocks) {
  for (int32_t id = 0; id < options_.num_blocks; ++id) {
    empty_.push_back(id);
    slot(id).is_free = true;
  }
}

Result<std::unique_ptr<BlockPool>> BlockPool::create(BlockPoolOptions options, EventPort port) {
  if (options.num_blocks < 1 || options.block_tokens < 1) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("num_blocks is {}, block_tokens is {}", options.num_blocks, options.block_tokens),
                 .next_step = "use 1 or more of both"};
  }
  if (!options.hash) options.hash = [](const BlockIdentity& identity) { return identity.hash(); };
  return std::unique_ptr<BlockPool>(new BlockPool(std::move(options), port));
}

Status BlockPool::move(int32_t id, BlockTrigger trigger) {
  Slot& slot = this->slot(id);
  const std::optional<BlockState> next = next_state(slot.state, trigger);
  if (!next) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("block {} is {}: it cannot {}", id, name(slot.state), name(trigger)),
                 .next_step = "this is a mistake in the calling code"};
  }
  const BlockState before = std::exchange(slot.state, *next);
  if (port_.blocks()) {
    (void)port_.record({.type = EventType::kBlock,
                        .from = static_cast<uint8_t>(before),
                        .to = static_cast<uint8_t>(*next),
                        .a = static_cast<uint64_t>(id),
                        .b = slot.generation});
  }
  return ok();
}

// Registered -> Empty: the block can no longer be found or upgraded.
void BlockPool::empty(int32_t id, DropReason reason) {
  Slot& slot = this->slot(id);
  if (!std::exchange(slot.discarded, false)) {
    publish_dropped(id, reason);
    take_out_of_index(id);
    ++slot.generation;
  }
  (void)move(id, BlockTrigger::kReset);
  slot.identity = {};
  --registered_;
  ++evictions_;
}

void BlockPool::publish_registered(int32_t id) const {
  const BlockIdentity& identity = slot(id).identity;
  uint64_t parent = 0;  // the first digits of its hash, as many as fit
  for (size_t i = 0; i < sizeof parent; ++i) parent = parent << 8 | identity.parent.bytes[i];
  (void)port_.record({.type = EventType::kRegistered,
                      .transfer = parent,
                      .key = slot(id).hash,
                      .a = both(identity.tokens.size(), static_cast<uint64_t>(id)),
                      .b = slot(id).age});
}

void BlockPool::publish_dropped(int32_t id, DropReason reason) const {
  (void)port_.record({.type = EventType::kDropped,
                      .to = static_cast<uint8_t>(reason),
                      .key = slot(id).hash,
                      .a = static_cast<uint64_t>(id),
                      .b = slot(id).age});
}

void BlockPool::take_out_of_index(int32_t id) {
  const auto entry = index_.find(slot(id).hash);
  std::erase(entry->second, id);
  if (entry->second.empty()) index_.erase(entry);
}

void BlockPool::add_to_free(int32_t id) {
  Slot& slot = this->slot(id);
  if (slot.state == BlockState::kEmpty) {
    empty_.push_front(id);
  } else {
    cached_->add(id, slot.hash, std::exchange(slot.fresh, false));
  }
  slot.is_free = true;
  ++free_blocks_;
}

// Return an empty block; evict one if needed. Precondition: a block is free.
int32_t BlockPool::take_free() {
  --free_blocks_;
  int32_t id = -1;
  if (empty_.empty()) {
    id = cached_->evict();
    empty(id, DropReason::kEvicted);
  } else {
    id = empty_.pop_front();
  }
  slot(id).is_free = false;
  return id;
}

// Register the block with one reference, the caller's. Precondition: its identity is set, its state is kRegistered.
void BlockPool::make_registered(int32_t id) {
  Slot& slot = this->slot(id);
  slot.owned = false;
  --owned_;
  slot.references = 1;
  ++registered_;
  ++shared_;
  slot.fresh = true;
  slot.age = ++registrations_;
  slot.hash = options_.hash(slot.identity);
  index_[slot.hash].push_back(id);
  publish_registered(id);
}

void BlockPool::keep(int32_t id) {
  if (slot(id).references++ > 0) return;
  cached_->hit(id);
  ++shared_;
  slot(id).is_free = false;
  --free_blocks_;
}

void BlockPool::drop_reference(int32_t id) {
  Slot& slot = this->slot(id);
  if (--slot.references > 0) return;
  --shared_;
  if (slot.discarded) empty(id, DropReason::kDiscarded);
  add_to_free(id);
}

void BlockPool::end_ownership(int32_t id) {
  Slot& slot = this->slot(id);
  slot.owned = false;
  --owned_;
  if (!move(id, BlockTrigger::kReset)) {  // Inflight: the device may still write to it
    slot.quarantined = true;
    ++quarantined_;
    return;
  }
  slot.identity = {};
  add_to_free(id);
}

Result<std::vector<MutableBlock>> BlockPool::allocate(int32_t count) {
  const MutexLock lock(mutex_);
  if (count < 0 || count > free_blocks_) {
    return Error{.code = Code::kResourceExhausted,
                 .what = fmt::format("{} blocks wanted, {} of {} are free", count, free_blocks_, options_.num_blocks),
                 .next_step = "free blocks, or preempt a request"};
  }
  std::vector<MutableBlock> blocks;
  blocks.reserve(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {
    const int32_t id = take_free();
    slot(id).owned = true;
    ++owned_;
    blocks.push_back(MutableBlock(*this, id));
  }
  return blocks;
}

std::optional<int32_t> BlockPool::find(const BlockIdentity& identity) const {
  const auto entry = index_.find(options_.hash(identity));
  if (entry == index_.end()) return std::nullopt;
  for (const int32_t id : entry->second) {
    if (slot(id).identity == identity) return id;
  }
  return std::nullopt;
}

std::vector<BlockRef> BlockPool::match(std::span<const BlockIdentity> chain) {
  std::vector<BlockRef> found;
  const MutexLock lock(mutex_);
  for (const BlockIdentity& identity : chain) {
    const std::optional<int32_t> id = find(identity);
    if (!id) break;
    keep(*id);
    found.push_back(BlockRef(*this, *id));
  }
  return found;
}

bool BlockPool::contains(const BlockIdentity& identity) const {
  const MutexLock lock(mutex_);
  return find(identity).has_value();
}

bool BlockPool::contains(const Digest& hash) const {
  const MutexLock lock(mutex_);
  return index_.contains(hash);
}

std::optional<BlockRef> BlockPool::ref(int32_t id) {
  const MutexLock lock(mutex_);
  if (id < 0 || id >= options_.num_blocks || version_of(id) == ContentVersion::kNone) return std::nullopt;
  keep(id);
  return BlockRef(*this, id);
}

void BlockPool::discard(const BlockRef& block) {
  const MutexLock lock(mutex_);
  Slot& slot = this->slot(block.id());
  if (std::exchange(slot.discarded, true)) return;
  publish_dropped(block.id(), DropReason::kDiscarded);
  take_out_of_index(block.id());
  ++slot.generation;
}

void BlockPool::rename(const BlockRef& block, BlockIdentity identity) {
  const MutexLock lock(mutex_);
  Slot& slot = this->slot(block.id());
  const Digest hash = options_.hash(identity);
  if (slot.discarded || (slot.hash == hash && slot.identity == identity)) return;
  publish_dropped(block.id(), DropReason::kRenamed);
  take_out_of_index(block.id());
  slot.identity = std::move(identity);
  slot.hash = hash;
  ++slot.generation;
  index_[slot.hash].push_back(block.id());
  publish_registered(block.id());
}

void BlockPool::evict(const std::vector<int32_t>& blocks) {
  const MutexLock lock(mutex_);
  for (const int32_t id : blocks) {
    if (id < 0 || id >= options_.num_blocks || !slot(id).is_free || slot(id).state != BlockState::kRegistered) continue;
    cached_->discard(id);
    empty(id, DropReason::kCleared);
    empty_.push_back(id);
  }
}

int32_t BlockPool::clear_cached() {
  const MutexLock lock(mutex_);
  int32_t cleared = 0;
  while (!cached_->empty()) {
    const int32_t id = cached_->evict();
    empty(id, DropReason::kCleared);
    empty_.push_back(id);
    ++cleared;
  }
  return cleared;
}

ContentVersion BlockPool::version_of(int32_t id) const {
  const Slot& slot = this->slot(id);
  return slot.state == BlockState::kRegistered && !slot.discarded ? static_cast<ContentVersion>(slot.age)
                                                                  : ContentVersion::kNone;
}

ContentVersion BlockPool::version(int32_t block) const {
  const MutexLock lock(mutex_);
  return version_of(block);
}

void BlockPool::hold(std::span<const int32_t> blocks, std::span<const ContentVersion> versions,
                     std::span<uint8_t> held) {
  const MutexLock lock(mutex_);
  for (size_t i = 0; i < blocks.size(); ++i) {
    held[i] = version_of(blocks[i]) == versions[i] ? 1 : 0;
    if (held[i] != 0) keep(blocks[i]);
  }
}

void BlockPool::release(std::span<const int32_t> blocks) {
  const MutexLock lock(mutex_);
  for (const int32_t block : blocks) drop_reference(block);
}

BlockPoolInfo BlockPool::info() const {
  const MutexLock lock(mutex_);
  return {.free = free_blocks_,
          .cached = registered_ - shared_,
          .shared = shared_,
          .owned = owned_,
          .quarantined = quarantined_,
          .evictions = evictions_};
}

std::vector<int32_t> BlockPool::free_order_locked() const {
  std::vector<int32_t> order = empty_.ids();
  const std::vector<int32_t> cached = cached_->order();
  order.insert(order.end(), cached.begin(), cached.end());
  return order;
}

std::vector<int32_t> BlockPool::free_order() const {
  const MutexLock lock(mutex_);
  return free_order_locked();
}

Status BlockPool::check() const {
  const MutexLock lock(mutex_);
  const auto wrong = [](int32_t id, std::string_view what) {
    return Error{.code = Code::kInternal, .what = fmt::format("block {}: {}", id, what)};
  };
  size_t free = 0;
  size_t registered = 0;
  BlockPoolInfo walked;
  for (int32_t id = 0; id < options_.num_blocks; ++id) {
    const Slot& slot = this->slot(id);
    const bool is_registered = slot.state == BlockState::kRegistered;
    free += slot.is_free ? 1 : 0;
    walked.owned += slot.owned ? 1 : 0;
    walked.quarantined += slot.quarantined ? 1 : 0;
    walked.shared += slot.references > 0 ? 1 : 0;
    walked.cached += is_registered && slot.references == 0 ? 1 : 0;
    registered += is_registered ? 1 : 0;
    if (slot.is_free != (!slot.owned && !slot.quarantined && slot.references == 0))
      return wrong(id, "it is free and in use, or neither");
    if (slot.references > 0 && !is_registered) return wrong(id, "it is shared but not registered");
    if (slot.owned && is_registered) return wrong(id, "it is registered but owned");
    if (slot.identity.tokens.size() > static_cast<size_t>(options_.block_tokens))
      return wrong(id, "it has too many tokens");
    registered -= slot.discarded ? 1 : 0;
    if (!is_registered || slot.discarded) continue;
    const auto entry = index_.find(slot.hash);
    if (entry == index_.end() || std::count(entry->second.begin(), entry->second.end(), id) != 1)
      return wrong(id, "it is registered but not in the index");
  }
  size_t indexed = 0;
  for (const auto& [hash, ids] : index_) indexed += ids.size();
  const std::vector<int32_t> order = free_order_locked();
  for (const int32_t id : order) {
    if (!slot(id).is_free) return wrong(id, "it stands in the free queue but is not free");
  }
  if (free != order.size() || free != static_cast<size_t>(free_blocks_))
    return wrong(-1, "the free queue and the free blocks differ in number");
  if (walked.owned != owned_ || walked.quarantined != quarantined_ || walked.shared != shared_ ||
      walked.cached != registered_ - shared_)
    return wrong(-1, "its counters are not what its slots say");
  if (indexed != registered) return wrong(-1, "the index has blocks that are not registered");
  return ok();
}

}  // namespace torpor
