// Compression of stored bytes. Library: zstd. Bytes that do not get smaller are stored as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/status.h"
#include "base/value.h"
#include "offload/chunk.h"

namespace torpor {

std::string_view name(Codec codec);  // "none", "zstd"

// The compressed bytes if they are smaller than 7/8 of `bytes`, otherwise no value (store with Codec::kNone).
std::optional<Bytes> compress(std::span<const std::byte> bytes);

// Decodes into exactly `out.size()` bytes, the size that the describing record promised; allocates nothing of the
// input's choosing. kCorruption when the input is damaged or has another size.
Status decompress(Codec codec, std::span<const std::byte> stored, std::span<std::byte> out);

}  // namespace torpor
