// SPDX-License-Identifier: Apache-2.0
// XXH3-128 digests. They detect accidents (bit rot, torn writes, wrong copies); they do not stop an attacker;
// base/seal.h does. Library: xxHash. The 16 bytes are in XXH128's canonical (big-endian) order, so every machine reads
// the same bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace torpor {

std::string hex(std::span<const uint8_t> bytes);   // lower case
bool is_hex(std::string_view text, size_t bytes);  // whether hex() of so many bytes can be this

struct Digest {
  std::array<uint8_t, 16> bytes{};
  std::string hex() const { return torpor::hex(bytes); }
  friend bool operator==(const Digest&, const Digest&) = default;
};

Digest digest_of(std::span<const std::byte> bytes);
Digest digest_of_text(std::string_view text);

// For unordered containers: the first bytes of a digest.
struct DigestHash {
  size_t operator()(const Digest& digest) const;
};

std::array<uint8_t, 32> sha256_of(std::span<const std::byte> bytes);  // library: libsodium

// Digest of bytes that arrive in pieces; equal to digest_of() their concatenation. A value: it allocates no memory. Not
// thread-safe.
class StreamingDigest {
 public:
  StreamingDigest();
  void update(std::span<const std::byte> bytes);
  Digest finish() const;

 private:
  static constexpr size_t kStateBytes = 576;  // size of the library's XXH3_state_t; digest.cpp checks it
  alignas(64) std::array<std::byte, kStateBytes> state_;
};

}  // namespace torpor
