// SPDX-License-Identifier: Apache-2.0
#include "base/copy.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace torpor {
namespace {

// Bytes hashed before they are copied: small enough that the nearest cache still holds them. Explicit prefetching
// gained nothing over the hardware's own, and costs time with small pieces.
constexpr size_t kHashed = 4 * 1024;

#if defined(__SSE2__)
constexpr size_t kLine = 64;

void stream(std::span<std::byte> to, std::span<const std::byte> from) {
  const size_t head = std::min(to.size(), (kLine - reinterpret_cast<uintptr_t>(to.data()) % kLine) % kLine);
  std::memcpy(to.data(), from.data(), head);
  size_t at = head;
  for (; at + kLine <= to.size(); at += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from.data() + at);
    auto* target = reinterpret_cast<__m128i*>(to.data() + at);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to.data() + at, from.data() + at, to.size() - at);
}
void end_streaming() { _mm_sfence(); }
#else
void stream(std::span<std::byte> to, std::span<const std::byte> from) {
  std::memcpy(to.data(), from.data(), to.size());
}
void end_streaming() {}
#endif

}  // namespace

BulkCopy::~BulkCopy() { end_streaming(); }

void BulkCopy::copy(std::span<std::byte> to, std::span<const std::byte> from) {
  if (to.empty()) return;
  if (past_cache_) {
    stream(to, from);
  } else {
    std::memcpy(to.data(), from.data(), to.size());
  }
}

void BulkCopy::copy(std::span<std::byte> to, std::span<const std::byte> from, StreamingDigest& digest) {
  for (size_t at = 0; at < to.size(); at += kHashed) {
    const size_t bytes = std::min(kHashed, to.size() - at);
    digest.update(from.subspan(at, bytes));
    copy(to.subspan(at, bytes), from.subspan(at, bytes));
  }
}

}  // namespace torpor
