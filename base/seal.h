// SPDX-License-Identifier: Apache-2.0
// Seal: what makes the bytes of one checkpoint unforgeable, and, if wished, unreadable. Library: libsodium.
//
// A user's Key (32 bytes, from a file) and the checkpoint's random id give the checkpoint's own keys (BLAKE2b, keyed),
// so that places within one checkpoint are enough of a nonce. The manifest carries a keyed BLAKE2b-256; every section
// and chunk a Poly1305 tag of XChaCha20-Poly1305, over its bytes (kAuthenticated) or with its bytes encrypted
// (kEncrypted). What the bytes are and where they lie is bound into the tag: nothing can be moved, exchanged or carried
// over.
//
// Threads: all methods from any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace torpor {

inline constexpr size_t kKeyBytes = 32;

using SealId = std::array<uint8_t, 16>;       // of a checkpoint, random
using SealTag = std::array<uint8_t, 16>;      // of sealed bytes
using ManifestMac = std::array<uint8_t, 32>;  // BLAKE2b-256, keyed or not
using KeyName = std::array<uint8_t, 8>;       // tells a wrong key from damage; says nothing about the key

enum class Protection : uint8_t { kNone, kAuthenticated, kEncrypted };
std::string_view name(Protection protection);  // "none", "authenticated", "encrypted"

// A secret; its memory is wiped.
class Key {
 public:
  // 32 bytes as they are, or 64 hexadecimal digits. kInvalidArgument for another length, or when others than its owner
  // may read the file.
  static Result<Key> read_file(const std::string& path);
  explicit Key(const std::array<uint8_t, kKeyBytes>& bytes) : bytes_(bytes) {}
  Key(const Key&) = default;
  Key& operator=(const Key&) = default;
  ~Key();
  std::span<const uint8_t, kKeyBytes> bytes() const { return bytes_; }

 private:
  std::array<uint8_t, kKeyBytes> bytes_{};
};

// Where sealed bytes belong; no two places of a checkpoint are equal.
struct SealPlace {
  enum class Kind : uint32_t { kManifest, kSection, kChunk, kRefs };
  Kind kind = Kind::kChunk;
  int32_t rank = 0;
  uint64_t offset = 0;      // in its file
  std::string_view what{};  // the section's name, the chunk's key
};

class Seal {
 public:
  Seal(const Key& key, const SealId& id, Protection protection);  // kAuthenticated or kEncrypted
  ~Seal();
  Seal(const Seal&) = delete;
  Seal& operator=(const Seal&) = delete;

  Protection protection() const { return protection_; }
  const SealId& id() const { return id_; }
  const KeyName& key_name() const { return key_name_; }
  ManifestMac mac(std::span<const std::byte> header, std::span<const std::byte> body) const;
  // `out` has the size of `in` and may be the same memory; unused when only authenticating.
  SealTag seal(std::span<const std::byte> in, std::span<std::byte> out, const SealPlace& place) const;
  // Checks and, if encrypted, decrypts in place. kCorruption: not the bytes that were sealed for this place.
  Status open(std::span<std::byte> bytes, const SealTag& tag, const SealPlace& place) const;

 private:
  const Protection protection_;
  const SealId id_;
  KeyName key_name_{};
  std::array<uint8_t, kKeyBytes> mac_key_{};
  std::array<uint8_t, kKeyBytes> chunk_key_{};
};

// Without a key: finds accidents and gives the manifest a name; stops no attacker.
ManifestMac unkeyed_mac(std::span<const std::byte> header, std::span<const std::byte> body);

SealId random_seal_id();

}  // namespace torpor
