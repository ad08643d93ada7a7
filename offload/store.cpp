// SPDX-License-Identifier: Apache-2.0
#include "offload/store.h"

#include <fmt/core.h>

namespace torpor {
namespace {

void update(StreamingDigest& digest, const std::string& text) {
  const uint64_t length = text.size();
  digest.update(std::as_bytes(std::span(&length, 1)));
  digest.update(std::as_bytes(std::span(text)));
}

Status check(const StorePart& part, const StoreTraits& traits) {
  if (part.slot >= 0 && !part.bytes.empty() && part.bytes.size() <= traits.record_bytes) return ok();
  return Error{.code = Code::kInvalidArgument,
               .what = fmt::format("{} bytes for slot {} of the {} store", part.bytes.size(), part.slot, traits.kind),
               .next_step = fmt::format("use slots from 0 and 1 to {} bytes", traits.record_bytes)};
}

// Calls `work` with the parts as they are; if it throws, those that are not over fail with it.
template <class Work>
void each_ends(std::span<StorePart> parts, const StoreTraits& traits, Work work) {
  const Status done = catching([&]() -> Status {
    for (StorePart& part : parts) part.status = check(part, traits);
    work();
    return ok();
  });
  if (done) return;
  for (StorePart& part : parts) {
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

void Store::put(std::span<StorePart> parts) {
  each_ends(parts, traits(), [&] { do_put(parts); });
}

void Store::find(std::span<StorePart> parts) {
  const Status done = catching([&]() -> Status { return do_find(parts), ok(); });
  if (done) return;
  for (StorePart& part : parts) part.status = done.error();
}

void Store::do_find(std::span<StorePart> parts) {
  for (StorePart& part : parts) part.status = unsupported("keys to be asked for");
}

void Store::get(std::span<StorePart> parts) {
  each_ends(parts, traits(), [&] { do_get(parts); });
}

Error Store::not_there(StoreSlot slot) const {
  return Error{.code = Code::kNotFound,
               .what = fmt::format("slot {} of the {} store has nothing in it", slot, traits().kind),
               .next_step = "compute the block"};
}

Error Store::wrong_size(const StorePart& part, uint64_t bytes) const {
  return Error{.code = Code::kInvalidArgument,
               .what = fmt::format("slot {} of the {} store has {} bytes, {} were asked for", part.slot, traits().kind,
                                   bytes, part.bytes.size()),
               .next_step = "ask for as many as were put"};
}

Error Store::unsupported(std::string_view verb) const {
  return Error{.code = Code::kUnsupported,
               .what = fmt::format("the {} store has no {}", traits().kind, verb),
               .next_step = "use another store"};
}

Result<std::span<std::byte>> Store::place(StoreSlot, uint64_t) { return unsupported("memory to place into"); }
Status Store::placed(StoreSlot, const BlockKey&, const Digest&) { return unsupported("memory to place into"); }
std::span<std::byte> Store::view(StoreSlot) { return {}; }
Result<std::vector<RecoveredSlot>> Store::recover(uint32_t) { return unsupported("recovery"); }
Result<std::vector<LeasedRecord>> Store::lease(std::span<const StoreSlot>, Directory&) { return unsupported("leases"); }

}  // namespace torpor
