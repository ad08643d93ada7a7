#include "base/digest.h"

#include <algorithm>
#include <iterator>

#include <sodium.h>
#define XXH_STATIC_LINKING_ONLY  // the state by value: memory for it that is not there is std::bad_alloc, as elsewhere
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

// With the widest vectors that the machine has.
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
  std::string text(bytes.size() * 2 + 1, '\0');  // and its end
  sodium_bin2hex(text.data(), text.size(), bytes.data(), bytes.size());
  text.pop_back();
  return text;
}

Digest digest_of(std::span<const std::byte> bytes) {
  const Xxh3Hash hash = widest().hash(bytes.data(), bytes.size());
  return canonical({hash.low, hash.high});
}

std::array<uint8_t, 32> sha256_of(std::span<const std::byte> bytes) {
  static_assert(crypto_hash_sha256_BYTES == 32);
  std::array<uint8_t, 32> hash;
  crypto_hash_sha256(hash.data(), reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
  return hash;
}

struct StreamingDigest::State {
  XXH3_state_t xxh;
  State() {
    XXH3_INITSTATE(&xxh);
    XXH3_128bits_reset(&xxh);
  }
};

StreamingDigest::StreamingDigest() : state_(std::make_unique<State>()) {}
StreamingDigest::~StreamingDigest() = default;
StreamingDigest::StreamingDigest(StreamingDigest&&) noexcept = default;
StreamingDigest& StreamingDigest::operator=(StreamingDigest&&) noexcept = default;

void StreamingDigest::update(std::span<const std::byte> bytes) {
  widest().update(&state_->xxh, bytes.data(), bytes.size());
}

Digest StreamingDigest::finish() const { return canonical(XXH3_128bits_digest(&state_->xxh)); }

}  // namespace torpor
