// Copies of much memory, past the cache: with ordinary stores the machine reads every line of the target before it
// writes it.
#pragma once

#include <cstddef>
#include <span>

#include "base/digest.h"

namespace torpor {

// memcpy for bytes that nobody reads soon. Equal sizes, no overlap.
void copy_past_cache(std::span<std::byte> to, std::span<const std::byte> from);

// The same, and adds the bytes to `digest` in the same pass: each piece is hashed, and is still in the cache when it is
// copied.
void copy_with_digest(std::span<std::byte> to, std::span<const std::byte> from, StreamingDigest& digest);

}  // namespace torpor
