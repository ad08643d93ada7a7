// SPDX-License-Identifier: Apache-2.0
#include "offload/host_store.h"

#include <algorithm>
#include <cstring>

#include <fmt/core.h>

#include "base/log.h"
#include "base/units.h"

namespace torpor {
namespace {

constexpr uint64_t kSlotsOfWhole = 384;
constexpr uint64_t kPackedAlignment = 64;  // a cache line

// bf16 KV compresses to 0.759 of its size (codec_bench; docs/measurements.md, "Disk"); this is 0.766.
uint64_t bytes_of_slot(uint64_t slot_bytes, Codec codec) {
  return codec == Codec::kNone ? align_up(slot_bytes, kPage)
                               : align_up(slot_bytes - slot_bytes / 64 * 15, kPackedAlignment);
}

uint64_t overflow_slots(uint64_t slots, Codec codec) { return codec == Codec::kNone ? 0 : slots / kSlotsOfWhole + 1; }

}  // namespace

uint64_t HostStoreOptions::bytes() const {
  if (slots < 1 || slot_bytes == 0 || slot_bytes > kGiB || (codec != Codec::kNone && codec != Codec::kBf16)) return 0;
  const auto many = static_cast<uint64_t>(slots);
  const bool given = whole && codec != Codec::kNone;
  const uint64_t places = given ? static_cast<uint64_t>(std::max(*whole, 0)) : overflow_slots(many, codec);
  return many * bytes_of_slot(slot_bytes, codec) + places * align_up(slot_bytes, kPage);
}

HostStore::HostStore(HostStoreOptions options, HostArena::Span memory)
    : options_(options),
      traits_{.kind = "host", .in_memory = true, .addressable = !packs(), .record_bytes = options.slot_bytes},
      memory_(std::move(memory)),
      contents_(static_cast<size_t>(options.slots)) {
  health_.io = "memory";
  health_.held_bytes = memory_.bytes().size();
  const uint64_t slots = static_cast<uint64_t>(options.slots) * bytes_of_slot(options.slot_bytes, options.codec);
  whole_uses_.resize((memory_.bytes().size() - slots) / align_up(options.slot_bytes, kPage));
  for (size_t i = whole_uses_.size(); i-- > 0;) whole_free_.push_back(static_cast<int32_t>(i));
}

Result<std::unique_ptr<HostStore>> HostStore::create(HostArena& arena, HostStoreOptions options) {
  const uint64_t bytes = options.bytes();
  if (bytes == 0) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("{} slots of {} bytes in host memory, compression {}", options.slots,
                                     options.slot_bytes, name(options.codec)),
                 .next_step = "use 1 or more, of 1 byte to 1 GiB, and none or bf16"};
  }
  TORPOR_ASSIGN_OR_RETURN(HostArena::Span memory, arena.allocate(bytes));
  return std::unique_ptr<HostStore>(new HostStore(options, std::move(memory)));
}

uint64_t HostStore::slots_in(uint64_t bytes, uint64_t slot_bytes, Codec codec) {
  const uint64_t each = bytes_of_slot(slot_bytes, codec);
  const uint64_t whole = align_up(slot_bytes, kPage);
  uint64_t slots = bytes / each;
  while (slots > 0 && slots * each + overflow_slots(slots, codec) * whole > bytes)
    slots -= std::max<uint64_t>(1, (slots * each + overflow_slots(slots, codec) * whole - bytes) / (2 * each));
  return slots;
}

std::span<std::byte> HostStore::memory_of(StoreSlot slot, const Content& content) const {
  const uint64_t each = bytes_of_slot(options_.slot_bytes, options_.codec);
  uint64_t at = static_cast<uint64_t>(slot) * each;
  if (content.whole >= 0)
    at = static_cast<uint64_t>(options_.slots) * each +
         static_cast<uint64_t>(content.whole) * align_up(options_.slot_bytes, kPage);
  return memory_.bytes().subspan(at, content.record.stored);
}

Error HostStore::wrong_part(StoreSlot slot, uint64_t bytes) const {
  return Error{
      .code = Code::kInvalidArgument,
      .what = fmt::format("{} bytes for slot {} of the host store", bytes, slot),
      .next_step = fmt::format("use slots 0 to {} and 1 to {} bytes", options_.slots - 1, options_.slot_bytes)};
}

void HostStore::end_use(int32_t whole) {
  // push_back() allocates nothing: the vector has capacity for all overflow slots.
  if (whole >= 0 && --whole_uses_[static_cast<size_t>(whole)] == 0) whole_free_.push_back(whole);
}

void HostStore::forget(Content& content) {
  end_use(content.whole);
  content = {};
}

// ---- addressable

Result<std::span<std::byte>> HostStore::place(SavedChunk& chunk) {
  if (packs()) return SlotStore::place(chunk);
  const auto slot = static_cast<StoreSlot>(chunk.offset);
  if (!has(slot) || chunk.bytes == 0 || chunk.bytes > options_.slot_bytes) return wrong_part(slot, chunk.bytes);
  chunk.codec = Codec::kNone;
  chunk.stored_bytes = chunk.bytes;
  const MutexLock lock(mutex_);
  Content& content = contents_[static_cast<size_t>(slot)];
  content = {.record = {.bytes = chunk.bytes, .stored = chunk.bytes}};
  return memory_of(slot, content);
}

Status HostStore::placed(StoreSlot slot, const Digest& digest) {
  if (packs()) return SlotStore::placed(slot, digest);
  const MutexLock lock(mutex_);
  if (!has(slot) || contents_[static_cast<size_t>(slot)].record.bytes == 0) return not_there(slot);
  Content& content = contents_[static_cast<size_t>(slot)];
  content.record.digest = digest;
  content.found = true;
  health_.put_bytes += content.record.stored;
  return ok();
}

std::span<std::byte> HostStore::view(const SavedChunk& chunk) {
  const auto slot = static_cast<StoreSlot>(chunk.offset);
  if (packs() || !has(slot)) return {};
  const MutexLock lock(mutex_);
  return memory_of(slot, contents_[static_cast<size_t>(slot)]);
}

// ---- all

void HostStore::do_put(std::span<RecordPart> parts) {
  uint64_t most = 0;
  for (const RecordPart& part : parts) most = std::max(most, compressed_bound(part.bytes.size()));
  ScratchPool::Lease scratch(scratch_);
  const std::span<std::byte> room = packs() ? scratch->room(most) : std::span<std::byte>();
  for (RecordPart& part : parts) {
    if (!part.status) continue;
    part.status = try_catch([&] { return put_one(part, room); });
    if (!part.status) count_failed(part.status.error());
  }
}

void HostStore::count_failed(const Error& error) {
  if (error.code == Code::kInvalidArgument) return;
  uint64_t before = 0;
  {
    const MutexLock lock(mutex_);
    before = health_.write_errors++;
    health_.reason = error.what;
  }
  if (before == 0) log().warn("KV in host memory: {}; it is not kept there", error.what);  // later ones are counted
}

// Encode into `room` first: only then is the size known, and whether the block needs an overflow slot.
Status HostStore::put_one(RecordPart& part, std::span<std::byte> room) {
  const StoreSlot slot = slot_of(part);
  if (!has(slot) || part.bytes.empty() || part.bytes.size() > options_.slot_bytes)
    return wrong_part(slot, part.bytes.size());
  const auto [bytes, codec] = encode(part.bytes, room, {.codec = options_.codec});
  const StoredRecord record{
      .bytes = part.bytes.size(), .stored = bytes.size(), .digest = part.chunk->digest, .codec = codec};
  Content now{.record = record, .found = true};
  {
    const MutexLock lock(mutex_);
    forget(contents_[static_cast<size_t>(slot)]);
    if (bytes.size() > bytes_of_slot(options_.slot_bytes, options_.codec)) {
      if (whole_free_.empty()) {
        return Error{.code = Code::kResourceExhausted,
                     .what = fmt::format("a block of {} bytes takes {}, and all places for such ones are in use",
                                         part.bytes.size(), bytes.size()),
                     .next_step = "leave host_compression out if that happens to many"};
      }
      now.whole = whole_free_.back();
      whole_free_.pop_back();
      whole_uses_[static_cast<size_t>(now.whole)] = 1;
    }
  }
  std::memcpy(memory_of(slot, now).data(), bytes.data(), bytes.size());
  describe(part, record);
  const MutexLock lock(mutex_);
  forget(contents_[static_cast<size_t>(slot)]);
  contents_[static_cast<size_t>(slot)] = now;
  health_.put_bytes += record.stored;
  return ok();
}

// The content of a slot while its bytes are read. Meanwhile its overflow slot is not given to another block.
class HostStore::Reading {
 public:
  Reading(HostStore& store, StoreSlot slot) : store_(store) {
    if (!store.has(slot)) return;
    const MutexLock lock(store.mutex_);
    content_ = store.contents_[static_cast<size_t>(slot)];
    if (content_.whole >= 0) ++store.whole_uses_[static_cast<size_t>(content_.whole)];
  }
  ~Reading() {
    const MutexLock lock(store_.mutex_);
    store_.end_use(content_.whole);
  }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;
  const Content& content() const { return content_; }

 private:
  HostStore& store_;
  Content content_;
};

void HostStore::do_get(std::span<RecordPart> parts) {
  for (RecordPart& part : parts) {
    if (part.status) part.status = get_one(part);
  }
}

Status HostStore::get_one(RecordPart& part) {
  const Reading reading(*this, slot_of(part));
  const Content& content = reading.content();
  if (!content.found) return not_there(slot_of(part));
  if (content.record.bytes != part.bytes.size()) return wrong_size(part, content.record.bytes);
  TORPOR_RETURN_IF_ERROR(decompress(content.record.codec, memory_of(slot_of(part), content), part.bytes));
  describe(part, content.record);
  const MutexLock lock(mutex_);
  health_.got_bytes += content.record.stored;
  return ok();
}

void HostStore::drop(std::span<const SlotRange> ranges) {
  const MutexLock lock(mutex_);
  for (const SlotRange& range : ranges) {
    const int64_t end = std::min<int64_t>(int64_t{range.first} + range.count, options_.slots);
    for (int64_t slot = std::max<int64_t>(range.first, 0); slot < end; ++slot) {
      Content& content = contents_[static_cast<size_t>(slot)];
      if (content.found) health_.dropped_bytes += content.record.stored;
      forget(content);
    }
  }
}

std::optional<HostStore::Stored> HostStore::stored(StoreSlot slot) const {
  if (!has(slot)) return std::nullopt;
  const MutexLock lock(mutex_);
  const Content& content = contents_[static_cast<size_t>(slot)];
  if (!content.found) return std::nullopt;
  return Stored{content.record, memory_of(slot, content)};
}

StoreHealth HostStore::health() const {
  const MutexLock lock(mutex_);
  return health_;
}

}  // namespace torpor
