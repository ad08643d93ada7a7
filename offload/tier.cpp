// SPDX-License-Identifier: Apache-2.0
#include "offload/tier.h"

#include <cstring>

#include <fmt/core.h>

namespace torpor {
namespace {

Error not_there(const Tier& tier, const SavedChunk& chunk) {
  return Error{.code = Code::kInternal,
               .what = fmt::format("{} is not in the {} tier", chunk.key.to_string(), tier.kind())};
}

}  // namespace

Result<std::span<std::byte>> Tier::place(SavedChunk& chunk) { return not_there(*this, chunk); }

std::span<std::byte> Tier::view(const SavedChunk&) { return {}; }

void Tier::put(std::span<TierPart> parts) {
  for (TierPart& part : parts) {
    const Result<std::span<std::byte>> to = place(*part.chunk);
    part.status = to ? ok() : Status(to.error());
    if (to) std::memcpy(to->data(), part.bytes.data(), part.bytes.size());
  }
}

void Tier::get(std::span<TierPart> parts) {
  for (TierPart& part : parts) {
    const std::span<std::byte> from = view(*part.chunk);
    part.status = from.size() == part.bytes.size() ? ok() : Status(not_there(*this, *part.chunk));
    if (part.status) std::memcpy(part.bytes.data(), from.data(), from.size());
  }
}

void Tier::find(std::span<TierPart> parts) {
  for (TierPart& part : parts) {
    part.status = Error{.code = Code::kUnsupported,
                        .what = fmt::format("the {} tier cannot be asked what it has", kind()),
                        .next_step = "this is a mistake in the calling code"};
  }
}

Status Tier::get_one(SavedChunk chunk, std::span<std::byte> bytes) {
  TierPart part{&chunk, bytes, ok()};
  get({&part, 1});
  return std::move(part.status);
}

}  // namespace torpor
