// XXH3-128 digests: they find accidents (bit rot, torn writes, wrong copies), they do not stop an attacker; base/seal.h
// does. Library: xxHash. The 16 bytes are in XXH128's canonical (big-endian) order, so they read the same everywhere.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace torpor {

std::string hex(std::span<const uint8_t> bytes);  // lower case

struct Digest {
  std::array<uint8_t, 16> bytes{};
  std::string hex() const { return torpor::hex(bytes); }
  friend bool operator==(const Digest&, const Digest&) = default;
};

Digest digest_of(std::span<const std::byte> bytes);

std::array<uint8_t, 32> sha256_of(std::span<const std::byte> bytes);  // library: libsodium

// Digest of bytes that arrive in pieces; equal to digest_of their concatenation. Not thread-safe.
class StreamingDigest {
 public:
  StreamingDigest();
  ~StreamingDigest();
  StreamingDigest(StreamingDigest&&) noexcept;
  StreamingDigest& operator=(StreamingDigest&&) noexcept;
  void update(std::span<const std::byte> bytes);
  Digest finish() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace torpor
