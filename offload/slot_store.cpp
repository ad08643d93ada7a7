// SPDX-License-Identifier: Apache-2.0
#include "offload/slot_store.h"

#include <fmt/core.h>

namespace torpor {
namespace {

void update(StreamingDigest& digest, const std::string& text) {
  const uint64_t length = text.size();
  digest.update(std::as_bytes(std::span(&length, 1)));
  digest.update(std::as_bytes(std::span(text)));
}

Status check(const RecordPart& part, const StoreTraits& traits) {
  if (slot_of(part) >= 0 && !part.bytes.empty() && part.bytes.size() <= traits.record_bytes) return ok();
  return Error{
      .code = Code::kInvalidArgument,
      .what = fmt::format("{} bytes for slot {} of the {} store", part.bytes.size(), slot_of(part), traits.kind),
      .next_step = fmt::format("use slots from 0 and 1 to {} bytes", traits.record_bytes)};
}

// Call `work` with the parts whose arguments are valid. If it throws, the parts that have no error yet fail with that.
template <class Work>
void each_ends(std::span<RecordPart> parts, const StoreTraits& traits, Work work) {
  const Status done = try_catch([&]() -> Status {
    for (RecordPart& part : parts) part.status = check(part, traits);
    work();
    return ok();
  });
  if (done) return;
  for (RecordPart& part : parts) {
    if (part.status) part.status = done.error();
  }
}

}  // namespace

Digest KeySpace::digest() const {
  StreamingDigest digest;
  for (const Digest* part : {&model, &weights, &adapters}) digest.update(std::as_bytes(std::span(part->bytes)));
  update(digest, layout);
  update(digest, hashing);
  digest.update(std::as_bytes(std::span(&ranks, 1)));
  return digest.finish();
}

const BlockKey& key_of(const RecordPart& part) {
  static constexpr BlockKey kUnknown;
  return part.key != nullptr ? *part.key : kUnknown;
}

void describe(RecordPart& part, const StoredRecord& record) {
  part.chunk->bytes = record.bytes;
  part.chunk->digest = record.digest;
  part.chunk->codec = record.codec;
  part.chunk->stored_bytes = record.stored;
}

void SlotStore::put(std::span<RecordPart> parts) {
  each_ends(parts, traits(), [&] { do_put(parts); });
}

void SlotStore::find(std::span<RecordPart> parts) {
  const Status done = try_catch([&]() -> Status { return do_find(parts), ok(); });
  if (done) return;
  for (RecordPart& part : parts) part.status = done.error();
}

void SlotStore::do_find(std::span<RecordPart> parts) {
  for (RecordPart& part : parts) part.status = unsupported("keys to be asked for");
}

void SlotStore::get(std::span<RecordPart> parts) {
  each_ends(parts, traits(), [&] { do_get(parts); });
}

Error no_content(std::string_view kind, StoreSlot slot) {
  return Error{.code = Code::kNotFound,
               .what = fmt::format("slot {} of the {} store has nothing in it", slot, kind),
               .next_step = "compute the block"};
}

Error SlotStore::wrong_size(const RecordPart& part, uint64_t bytes) const {
  return Error{.code = Code::kInvalidArgument,
               .what = fmt::format("slot {} of the {} store has {} bytes, {} were asked for", slot_of(part),
                                   traits().kind, bytes, part.bytes.size()),
               .next_step = "ask for as many as were put"};
}

Error SlotStore::unsupported(std::string_view verb) const {
  return Error{.code = Code::kUnsupported,
               .what = fmt::format("the {} store has no {}", traits().kind, verb),
               .next_step = "use another store"};
}

Result<std::span<std::byte>> SlotStore::place(SavedChunk&) { return unsupported("memory to place into"); }
Status SlotStore::placed(StoreSlot, const Digest&) { return unsupported("memory to place into"); }
std::span<std::byte> SlotStore::view(const SavedChunk&) { return {}; }
Result<std::vector<RecoveredSlot>> SlotStore::recover(uint32_t) { return unsupported("recovery"); }
Result<std::vector<LeasedRecord>> SlotStore::lease(std::span<const StoreSlot>, Directory&) {
  return unsupported("leases");
}

}  // namespace torpor
