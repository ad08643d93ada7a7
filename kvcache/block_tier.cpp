#include "kvcache/block_tier.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "base/units.h"

namespace torpor {
namespace {

constexpr int32_t kSegments = 8;
constexpr uint64_t kMostSegmentBytes = 64 * kMiB;

Digest first_half(const BlockKey& key) {
  Digest digest;
  std::copy_n(key.hash.begin(), digest.bytes.size(), digest.bytes.begin());
  return digest;
}

size_t most_segments(int32_t blocks, int32_t slots) {
  return slots == 0 ? 0 : static_cast<size_t>((blocks + slots - 1) / slots) + 1;  // one more, that is being filled
}

SlotRange range_of(int32_t segment, int32_t slots) { return {.first = segment * slots, .count = slots}; }

}  // namespace

Status begin_filling(MutableBlock& block, const BlockIdentity& identity) {
  TORPOR_TRY(block.initialize(identity.parent, identity.salt, identity.group));
  TORPOR_TRY(block.add_tokens(identity.tokens));
  return block.schedule_compute();
}

SegmentStoreOptions segments_for(int32_t num_blocks, uint64_t bytes_per_block) {
  SegmentStoreOptions options{.record_bytes = bytes_per_block};
  const auto most = static_cast<int32_t>(kMostSegmentBytes / align_up(std::max<uint64_t>(bytes_per_block, 1), kPage));
  options.slots_per_segment = std::clamp(num_blocks / kSegments, 1, std::max(most, 1));
  options.budget_bytes =
      most_segments(num_blocks, options.slots_per_segment) * SegmentStore::most_bytes_of_segment(options);
  return options;
}

size_t BlockTier::HashOfDigest::operator()(const Digest& digest) const {
  size_t hash = 0;
  std::memcpy(&hash, digest.bytes.data(), sizeof hash);
  return hash;
}

BlockTier::BlockTier(std::unique_ptr<Store> store, std::unique_ptr<BlockPool> pool, BlockTierOptions options)
    : store_(std::move(store)),
      pool_(std::move(pool)),
      options_(std::move(options)),
      slots_per_segment_(store_->traits().slots_per_segment),
      most_segments_(most_segments(options_.pool.num_blocks, slots_per_segment_)),
      blocks_(static_cast<size_t>(options_.pool.num_blocks)) {}

Result<std::unique_ptr<BlockTier>> BlockTier::create(std::unique_ptr<Store> store, BlockTierOptions options,
                                                     EventSink* sink) {
  if (options.bytes_per_block == 0 || options.bytes_per_block > store->traits().record_bytes) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("bytes_per_block is {}, the {} store has room for {}", options.bytes_per_block,
                                     store->traits().kind, store->traits().record_bytes),
                 .next_step = "give the size of a block over all layers"};
  }
  TORPOR_ASSIGN(std::unique_ptr<BlockPool> pool, BlockPool::create(options.pool, sink));
  std::unique_ptr<BlockTier> tier(new BlockTier(std::move(store), std::move(pool), std::move(options)));
  TORPOR_TRY(tier->recover());
  return tier;
}

Status BlockTier::recover() {
  store_->open_space(1, options_.space);
  if (!store_->traits().durable) return ok();
  TORPOR_ASSIGN(const std::vector<RecoveredSlot> found, store_->recover(1));
  const MutexLock lock(mutex_);
  next_ = store_->first_slot();
  for (const RecoveredSlot& each : found) {  // in the order in which they were put: the newest of a key counts
    const int32_t segment = each.slot / slots_per_segment_;
    if (segments_.empty() || segments_.back().number != segment) segments_.push_back({segment});
    ++segments_.back().blocks;
    if (each.record.bytes == options_.bytes_per_block) recovered_.insert_or_assign(first_half(each.key), each);
  }
  return ok();
}

size_t BlockTier::recovered() const {
  const MutexLock lock(mutex_);
  return recovered_.size();
}

bool BlockTier::contains(const BlockIdentity& identity) const {
  if (pool_->contains(identity)) return true;
  const MutexLock lock(mutex_);
  const auto found = recovered_.find(identity.hash());
  return found != recovered_.end() && found->second.key == key_of(identity, space_);
}

bool BlockTier::contains(const Digest& hash) const {
  if (pool_->contains(hash)) return true;
  const MutexLock lock(mutex_);
  return recovered_.contains(hash);
}

BlockRef BlockTier::find(const BlockIdentity& identity) {
  if (std::vector<BlockRef> found = pool_->match({&identity, 1}); !found.empty()) return std::move(found[0]);
  RecoveredSlot known;
  {
    const MutexLock lock(mutex_);
    const auto found = recovered_.find(identity.hash());
    if (found == recovered_.end() || found->second.key != key_of(identity, space_)) return {};
    known = found->second;
    recovered_.erase(found);
  }
  const Result<BlockRef> block = [&]() -> Result<BlockRef> {
    TORPOR_ASSIGN(std::vector<MutableBlock> slot, pool_->allocate(1));
    TORPOR_TRY(begin_filling(slot[0], identity));
    TORPOR_TRY(slot[0].compute_done());
    {
      const MutexLock lock(mutex_);
      at(slot[0].id()) = {known.slot, known.key, known.record.digest};
    }
    return slot[0].register_block();
  }();
  if (block) return *block;
  const MutexLock lock(mutex_);  // every block is kept by somebody
  recovered_.emplace(first_half(known.key), known);
  return {};
}

void BlockTier::claim(int32_t block, const BlockIdentity& identity) {
  const MutexLock lock(mutex_);
  at(block) = {.slot = slots_per_segment_ == 0 ? block : -1, .key = key_of(identity, space_)};
}

void BlockTier::remember(int32_t block, const Digest& digest) {
  Block known;
  {
    const MutexLock lock(mutex_);
    at(block).digest = digest;
    known = at(block);
  }
  if (addressable()) (void)store_->placed(known.slot, known.key, digest);
}

SavedChunk BlockTier::chunk(int32_t block) const {
  const MutexLock lock(mutex_);
  return {.key = {.kind = ChunkKind::kKvBlock, .tag = "kv_cache", .index = static_cast<uint64_t>(block)},
          .bytes = options_.bytes_per_block,
          .digest = at(block).digest,
          .stored_bytes = options_.bytes_per_block};
}

void BlockTier::drop_damaged(const BlockRef& block) {
  pool_->discard(block);
  SlotRange range{.count = 1};
  {
    const MutexLock lock(mutex_);
    range.first = at(block.id()).slot;
  }
  if (slots_per_segment_ > 0 && range.first >= 0) store_->drop({&range, 1});
}

void BlockTier::forget_all(std::optional<Digest> space) {
  pool_->clear_cached();
  std::vector<SlotRange> gone;
  uint32_t number = 0;
  {
    const MutexLock lock(mutex_);
    recovered_.clear();
    for (const LiveSegment& segment : segments_) gone.push_back(range_of(segment.number, slots_per_segment_));
    if (!segments_.empty()) next_ = (segments_.back().number + 1) * slots_per_segment_;
    segments_.clear();
    number = ++space_;
  }
  store_->drop(gone);
  store_->open_space(number, space ? *space : Digest{random_seal_id()});
}

// ---- bytes

Result<std::span<std::byte>> BlockTier::place(SavedChunk& chunk) {
  chunk.codec = Codec::kNone;
  chunk.stored_bytes = chunk.bytes;
  return store_->place(static_cast<Slot>(chunk.key.index), chunk.bytes);
}

std::span<std::byte> BlockTier::view(const SavedChunk& chunk) {
  const std::span<std::byte> bytes = store_->view(static_cast<Slot>(chunk.key.index));
  return bytes.size() == chunk.bytes ? bytes : std::span<std::byte>{};
}

// Slots for blocks that are about to be put. Before a segment too many is begun, the oldest goes.
std::vector<Slot> BlockTier::take_slots(size_t count) {
  std::vector<Slot> slots;
  std::vector<int32_t> oldest;
  {
    const MutexLock lock(mutex_);
    for (size_t i = 0; i < count; ++i) {
      const int32_t segment = next_ / slots_per_segment_;
      if (segments_.empty() || segments_.back().number != segment) {
        for (; segments_.size() >= most_segments_; segments_.pop_front()) oldest.push_back(segments_.front().number);
        segments_.push_back({segment});
      }
      slots.push_back(next_++);
    }
  }
  for (const int32_t segment : oldest) drop_segment(segment);
  return slots;
}

void BlockTier::drop_segment(int32_t number) {
  const SlotRange range = range_of(number, slots_per_segment_);
  const auto inside = [&](Slot slot) { return slot >= range.first && slot < range.first + range.count; };
  std::vector<int32_t> blocks;
  {
    const MutexLock lock(mutex_);
    for (size_t block = 0; block < blocks_.size(); ++block) {
      if (inside(blocks_[block].slot)) blocks.push_back(static_cast<int32_t>(block));
    }
    std::erase_if(recovered_, [&](const auto& entry) { return inside(entry.second.slot); });
  }
  pool_->evict(blocks);
  store_->drop({&range, 1});
}

void BlockTier::put(std::span<TierPart> parts) {
  std::vector<Slot> slots;
  if (slots_per_segment_ > 0) slots = take_slots(parts.size());
  std::vector<StorePart> records;
  {
    const MutexLock lock(mutex_);
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto block = static_cast<int32_t>(parts[i].chunk->key.index);
      records.push_back({.slot = slots.empty() ? block : slots[i],
                         .key = at(block).key,
                         .record = {.digest = parts[i].chunk->digest},
                         .bytes = parts[i].bytes});
    }
  }
  store_->put(records);
  std::vector<SlotRange> unused;
  settle(parts, records, unused);
  store_->drop(unused);
}

// A segment in which something failed may take no more. If it never took anything, it counts for nothing.
void BlockTier::settle(std::span<TierPart> parts, std::span<StorePart> records, std::vector<SlotRange>& unused) {
  const MutexLock lock(mutex_);
  for (size_t i = 0; i < parts.size(); ++i) {
    SavedChunk& chunk = *parts[i].chunk;
    chunk.codec = Codec::kNone;  // what comes back is decoded
    chunk.stored_bytes = chunk.bytes;
    parts[i].status = std::move(records[i].status);
    Block& block = at(static_cast<int32_t>(chunk.key.index));
    const int32_t number = slots_per_segment_ == 0 ? 0 : records[i].slot / slots_per_segment_;
    if (parts[i].status) {
      block.slot = records[i].slot;
      block.digest = chunk.digest;
      for (LiveSegment& segment : segments_) segment.blocks += segment.number == number ? 1 : 0;
    } else if (!segments_.empty() && segments_.back().number == number) {
      next_ = std::max(next_, (number + 1) * slots_per_segment_);
      if (segments_.back().blocks > 0) continue;
      unused.push_back(range_of(number, slots_per_segment_));
      segments_.pop_back();
    }
  }
}

void BlockTier::get(std::span<TierPart> parts) {
  std::vector<StorePart> records;
  {
    const MutexLock lock(mutex_);
    for (const TierPart& part : parts)
      records.push_back({.slot = at(static_cast<int32_t>(part.chunk->key.index)).slot, .bytes = part.bytes});
  }
  store_->get(records);
  for (size_t i = 0; i < parts.size(); ++i) parts[i].status = std::move(records[i].status);
}

}  // namespace torpor
