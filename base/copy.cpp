#include "base/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace torpor {
namespace {

// Measured on AVX2 machines: hashing waits for memory, copying for the write buffers; small pieces, and asking for the
// bytes after the next while one is copied, let the two overlap.
constexpr size_t kPiece = 4 * 1024;
constexpr size_t kAhead = 8 * 1024;
constexpr size_t kWorthIt = 256 * 1024;  // less may well be read from the cache soon

#if defined(__SSE2__)
constexpr size_t kLine = 64;

void stream(std::span<std::byte> to, std::span<const std::byte> from) {
  const size_t head = std::min(to.size(), (kLine - reinterpret_cast<uintptr_t>(to.data()) % kLine) % kLine);
  std::memcpy(to.data(), from.data(), head);
  size_t at = head;
  for (; at + kLine <= to.size(); at += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from.data() + at);
    auto* target = reinterpret_cast<__m128i*>(to.data() + at);
    _mm_prefetch(reinterpret_cast<const char*>(from.data()) + at + kAhead,
                 _MM_HINT_T0);  // behind the end it does nothing
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

void copy_past_cache(std::span<std::byte> to, std::span<const std::byte> from) {
  if (to.size() < kWorthIt) {
    if (!to.empty()) std::memcpy(to.data(), from.data(), to.size());
    return;
  }
  stream(to, from);
  end_streaming();
}

void copy_with_digest(std::span<std::byte> to, std::span<const std::byte> from, StreamingDigest& digest) {
  for (size_t at = 0; at < to.size(); at += kPiece) {
    const size_t bytes = std::min(kPiece, to.size() - at);
    digest.update(from.subspan(at, bytes));
    stream(to.subspan(at, bytes), from.subspan(at, bytes));
  }
  end_streaming();
}

}  // namespace torpor
