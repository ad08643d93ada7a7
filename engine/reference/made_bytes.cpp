// SPDX-License-Identifier: Apache-2.0
#include "engine/reference/made_bytes.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace torpor::reference {
namespace {

// A sanitizer checks each access in a loop, but a whole copy or comparison only once. So pieces are made on the stack,
// unchecked, and are copied or compared as a whole.
using Piece = std::array<std::byte, 512>;

__attribute__((no_sanitize("thread", "address"))) void make(Piece& piece, uint64_t first, uint64_t seed) {
  std::byte* const bytes = reinterpret_cast<std::byte*>(&piece);
  for (size_t i = 0; i < sizeof(Piece); ++i)
    bytes[i] = static_cast<std::byte>(((first + i) * 2654435761u + seed * 97) >> 7);
}

// Return the position of the first byte in which `bytes` and a piece differ. Precondition: they do.
size_t first_difference(std::span<const std::byte> bytes, const Piece& piece) {
  return static_cast<size_t>(std::mismatch(bytes.begin(), bytes.end(), piece.begin()).first - bytes.begin());
}

// `next` makes the piece that begins at a position.
template <class Next>
size_t first_other(std::span<const std::byte> bytes, Piece& piece, const Next& next) {
  for (size_t at = 0; at < bytes.size(); at += piece.size()) {
    const std::span<const std::byte> part = bytes.subspan(at, std::min(piece.size(), bytes.size() - at));
    next(at);
    if (std::memcmp(part.data(), piece.data(), part.size()) != 0) return at + first_difference(part, piece);
  }
  return bytes.size();
}

}  // namespace

void make_bytes(std::span<std::byte> bytes, uint64_t first, uint64_t seed) {
  Piece piece;
  for (size_t at = 0; at < bytes.size(); at += piece.size()) {
    make(piece, first + at, seed);
    std::memcpy(&bytes[at], piece.data(), std::min(piece.size(), bytes.size() - at));
  }
}

size_t first_not_made(std::span<const std::byte> bytes, uint64_t seed) {
  Piece piece;
  return first_other(bytes, piece, [&](size_t at) { make(piece, at, seed); });
}

size_t first_not_zero(std::span<const std::byte> bytes) {
  Piece zeros{};
  return first_other(bytes, zeros, [](size_t) {});
}

void make_like_bf16(std::span<std::byte> bytes, uint64_t first) {
  for (size_t i = first % 2 == 0 ? 1 : 0; i < bytes.size(); i += 2)
    bytes[i] = (bytes[i] & std::byte{0x81}) | std::byte{0x3c};
}

}  // namespace torpor::reference
