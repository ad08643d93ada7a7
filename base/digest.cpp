// SPDX-License-Identifier: Apache-2.0
#include "base/digest.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>

#include <sodium.h>
#define XXH_STATIC_LINKING_ONLY  // for the state as a value: it needs no allocation, which could fail
#include <xxhash.h>

#include "base/xxh3.h"

namespace torpor {
namespace {

Digest canonical(XXH128_hash_t hash) {
  XXH128_canonical_t bytes;
  XXH128_canonicalFromHash(&bytes, hash);
  Digest digest;
  std::copy(std::begin(bytes.digest), std::end(bytes.digest), digest.bytes.begin());
  return digest;
}

Xxh3Hash hash_narrow(const void* bytes, size_t size) {
  const XXH128_hash_t hash = XXH3_128bits(bytes, size);
  return {hash.low64, hash.high64};
}

void update_narrow(void* state, const void* bytes, size_t size) {
  (void)XXH3_128bits_update(static_cast<XXH3_state_t*>(state), bytes, size);
}

// Return the functions for the widest vectors that the machine has.
const Xxh3& widest() {
  static const Xxh3 chosen = [] {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return kXxh3Avx512;
    if (__builtin_cpu_supports("avx2")) return kXxh3Avx2;
#endif
    return Xxh3{hash_narrow, update_narrow};
  }();
  return chosen;
}

}  // namespace

std::string hex(std::span<const uint8_t> bytes) {
  std::string text(bytes.size() * 2 + 1, '\0');  // one more for the terminating zero
  sodium_bin2hex(text.data(), text.size(), bytes.data(), bytes.size());
  text.pop_back();
  return text;
}

bool is_hex(std::string_view text, size_t bytes) {
  return text.size() == 2 * bytes && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

Digest digest_of(std::span<const std::byte> bytes) {
  const Xxh3Hash hash = widest().hash(bytes.data(), bytes.size());
  return canonical({hash.low, hash.high});
}

Digest digest_of_text(std::string_view text) { return digest_of(std::as_bytes(std::span(text.data(), text.size()))); }

size_t DigestHash::operator()(const Digest& digest) const {
  size_t value = 0;
  std::memcpy(&value, digest.bytes.data(), sizeof value);
  return value;
}

std::array<uint8_t, 32> sha256_of(std::span<const std::byte> bytes) {
  static_assert(crypto_hash_sha256_BYTES == 32);
  std::array<uint8_t, 32> hash;
  crypto_hash_sha256(hash.data(), reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
  return hash;
}

// Before update() only two fields of the state are set: see XXH3_INITSTATE. The library writes every other field before
// it reads it.
StreamingDigest::StreamingDigest() {  // NOLINT(cppcoreguidelines-pro-type-member-init): half of it stays unused mostly
  static_assert(sizeof(XXH3_state_t) == kStateBytes && alignof(XXH3_state_t) == 64);
  auto* const state = new (state_.data()) XXH3_state_t;
  XXH3_INITSTATE(state);
  XXH3_128bits_reset(state);
}

void StreamingDigest::update(std::span<const std::byte> bytes) {
  widest().update(state_.data(), bytes.data(), bytes.size());
}

Digest StreamingDigest::finish() const {
  return canonical(XXH3_128bits_digest(reinterpret_cast<const XXH3_state_t*>(state_.data())));
}

}  // namespace torpor
