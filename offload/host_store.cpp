#include "offload/host_store.h"

#include <algorithm>
#include <cstring>

#include <fmt/core.h>

#include "base/units.h"

namespace torpor {

HostStore::HostStore(HostStoreOptions options, HostArena::Span memory)
    : options_(options),
      traits_{.kind = "host", .addressable = true, .record_bytes = options.slot_bytes},
      memory_(std::move(memory)),
      contents_(static_cast<size_t>(options.slots)) {
  health_.io = "memory";
  health_.held_bytes = memory_.bytes().size();
}

Result<std::unique_ptr<HostStore>> HostStore::create(HostArena& arena, HostStoreOptions options) {
  const std::optional<uint64_t> bytes =
      options.slots < 1 || options.slot_bytes == 0 || options.slot_bytes > kGiB
          ? std::nullopt
          : checked_mul(static_cast<uint64_t>(options.slots), align_up(options.slot_bytes, kPage));
  if (!bytes) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("{} slots of {} bytes in host memory", options.slots, options.slot_bytes),
                 .next_step = "use 1 or more, of 1 byte to 1 GiB"};
  }
  TORPOR_ASSIGN(HostArena::Span memory, arena.allocate(*bytes));
  return std::unique_ptr<HostStore>(new HostStore(options, std::move(memory)));
}

std::span<std::byte> HostStore::memory_of(Slot slot) const {
  return memory_.bytes().subspan(static_cast<uint64_t>(slot) * align_up(options_.slot_bytes, kPage),
                                 options_.slot_bytes);
}

Result<std::span<std::byte>> HostStore::place(Slot slot, uint64_t bytes) {
  if (!has(slot) || bytes == 0 || bytes > options_.slot_bytes) {
    return Error{
        .code = Code::kInvalidArgument,
        .what = fmt::format("{} bytes for slot {} of the host store", bytes, slot),
        .next_step = fmt::format("use slots 0 to {} and 1 to {} bytes", options_.slots - 1, options_.slot_bytes)};
  }
  const MutexLock lock(mutex_);
  contents_[static_cast<size_t>(slot)] = {.record = {.bytes = bytes, .stored = bytes}};
  return memory_of(slot).first(bytes);
}

Status HostStore::placed(Slot slot, const BlockKey&, const Digest& digest) {
  const MutexLock lock(mutex_);
  if (!has(slot) || contents_[static_cast<size_t>(slot)].record.bytes == 0) return not_there(slot);
  Content& content = contents_[static_cast<size_t>(slot)];
  content.record.digest = digest;
  content.found = true;
  health_.put_bytes += content.record.stored;
  return ok();
}

std::span<std::byte> HostStore::view(Slot slot) {
  if (!has(slot)) return {};
  const MutexLock lock(mutex_);
  return memory_of(slot).first(contents_[static_cast<size_t>(slot)].record.bytes);
}

void HostStore::do_put(std::span<StorePart> parts) {
  for (StorePart& part : parts) {
    if (!part.status) continue;
    const Result<std::span<std::byte>> to = place(part.slot, part.bytes.size());
    part.status = to ? ok() : Status(to.error());
    if (!to) continue;
    std::memcpy(to->data(), part.bytes.data(), part.bytes.size());
    part.record = {.bytes = part.bytes.size(), .stored = part.bytes.size(), .digest = part.record.digest};
    part.status = placed(part.slot, part.key, part.record.digest);
  }
}

void HostStore::do_get(std::span<StorePart> parts) {
  for (StorePart& part : parts) {
    if (!part.status) continue;
    Content content;
    if (has(part.slot)) {
      const MutexLock lock(mutex_);
      content = contents_[static_cast<size_t>(part.slot)];
    }
    if (!content.found || content.record.bytes != part.bytes.size()) {
      part.status = content.found ? wrong_size(part, content.record.bytes) : not_there(part.slot);
      continue;
    }
    std::memcpy(part.bytes.data(), memory_of(part.slot).data(), part.bytes.size());
    part.record = content.record;
    const MutexLock lock(mutex_);
    health_.got_bytes += content.record.stored;
  }
}

void HostStore::drop(std::span<const SlotRange> ranges) {
  const MutexLock lock(mutex_);
  for (const SlotRange& range : ranges) {
    const int64_t end = std::min<int64_t>(int64_t{range.first} + range.count, options_.slots);
    for (int64_t slot = std::max<int64_t>(range.first, 0); slot < end; ++slot) {
      Content& content = contents_[static_cast<size_t>(slot)];
      if (content.found) health_.dropped_bytes += content.record.stored;
      content = {};
    }
  }
}

std::optional<StoredRecord> HostStore::record(Slot slot) const {
  if (!has(slot)) return std::nullopt;
  const MutexLock lock(mutex_);
  const Content& content = contents_[static_cast<size_t>(slot)];
  return content.found ? std::optional(content.record) : std::nullopt;
}

StoreHealth HostStore::health() const {
  const MutexLock lock(mutex_);
  return health_;
}

}  // namespace torpor
