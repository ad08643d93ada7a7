// SPDX-License-Identifier: Apache-2.0
#include "offload/record_store.h"

#include <cstring>

#include <fmt/core.h>

namespace torpor {
namespace {

Error is_not_in(const RecordStore& store, const SavedChunk& chunk) {
  return Error{.code = Code::kInternal,
               .what = fmt::format("{} is not in the {} tier", chunk.key.to_string(), store.traits().kind)};
}

}  // namespace

Status RecordStore::prepare(uint64_t, uint64_t) { return ok(); }

Result<std::span<std::byte>> RecordStore::place(SavedChunk& chunk) { return is_not_in(*this, chunk); }

std::span<std::byte> RecordStore::view(const SavedChunk&) { return {}; }

void RecordStore::put(std::span<RecordPart> parts) {
  for (RecordPart& part : parts) {
    const Result<std::span<std::byte>> to = place(*part.chunk);
    part.status = to ? ok() : Status(to.error());
    if (to) std::memcpy(to->data(), part.bytes.data(), part.bytes.size());
  }
}

void RecordStore::get(std::span<RecordPart> parts) {
  for (RecordPart& part : parts) {
    const std::span<std::byte> from = view(*part.chunk);
    part.status = from.size() == part.bytes.size() ? ok() : Status(is_not_in(*this, *part.chunk));
    if (part.status) std::memcpy(part.bytes.data(), from.data(), from.size());
  }
}

void RecordStore::find(std::span<RecordPart> parts) {
  for (RecordPart& part : parts) {
    part.status = Error{.code = Code::kUnsupported,
                        .what = fmt::format("the {} tier cannot be asked what it has", traits().kind),
                        .next_step = "this is a mistake in the calling code"};
  }
}

Status RecordStore::get_one(SavedChunk chunk, std::span<std::byte> bytes) {
  RecordPart part{&chunk, bytes, ok()};
  get({&part, 1});
  return std::move(part.status);
}

Status RecordStore::finish() { return ok(); }

}  // namespace torpor
