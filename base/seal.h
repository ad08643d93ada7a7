// SPDX-License-Identifier: Apache-2.0
// Seal: makes the bytes of one checkpoint unforgeable and, if the user wants it, unreadable. Library: libsodium.
//
// A user's Key (32 bytes, from a file) and the checkpoint's random id give the checkpoint its own keys (keyed BLAKE2b).
// So a place within the checkpoint is nonce enough. The manifest carries a keyed BLAKE2b-256. Every section and chunk
// carries a Poly1305 tag of XChaCha20-Poly1305, over its bytes (kAuthenticated) or with its bytes encrypted
// (kEncrypted). The tag covers what the bytes are and where they lie: nobody can move or exchange them, or carry them
// over from another checkpoint.
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

using SealId = std::array<uint8_t, 16>;       // random, one per checkpoint
using SealTag = std::array<uint8_t, 16>;      // tag of sealed bytes
using ManifestMac = std::array<uint8_t, 32>;  // BLAKE2b-256, keyed or not
using KeyName = std::array<uint8_t, 8>;       // shows whether a key is the wrong one; reveals nothing about the key

enum class Protection : uint8_t { kNone, kAuthenticated, kEncrypted };
std::string_view name(Protection protection);  // "none", "authenticated", "encrypted"

// A secret. The destructor wipes its memory.
class Key {
 public:
  // Read 32 raw bytes or 64 hexadecimal digits. kInvalidArgument: the file has another length, or others than its owner
  // may read it.
  static Result<Key> read_file(const std::string& path);
  explicit Key(const std::array<uint8_t, kKeyBytes>& bytes) : bytes_(bytes) {}
  Key(const Key&) = default;
  Key& operator=(const Key&) = default;
  ~Key();
  std::span<const uint8_t, kKeyBytes> bytes() const { return bytes_; }

 private:
  std::array<uint8_t, kKeyBytes> bytes_{};
};

// Identifies sealed bytes within a checkpoint; no two places of a checkpoint are equal.
struct SealPlace {
  enum class Kind : uint32_t { kManifest, kSection, kChunk, kRefs };
  Kind kind = Kind::kChunk;
  int32_t rank = 0;
  uint64_t offset = 0;      // in the file
  std::string_view what{};  // the name of the section, or the key of the chunk
};

class Seal {
 public:
  Seal(const Key& key, const SealId& id, Protection protection);  // `protection`: kAuthenticated or kEncrypted
  ~Seal();
  Seal(const Seal&) = delete;
  Seal& operator=(const Seal&) = delete;

  Protection protection() const { return protection_; }
  const SealId& id() const { return id_; }
  const KeyName& key_name() const { return key_name_; }
  ManifestMac mac(std::span<const std::byte> header, std::span<const std::byte> body) const;
  // Seal `in`. kEncrypted: write the encrypted bytes to `out`, which has the size of `in` and may be the same memory.
  // kAuthenticated: `out` is not used.
  SealTag seal(std::span<const std::byte> in, std::span<std::byte> out, const SealPlace& place) const;
  // Check bytes and, if they are encrypted, decrypt them in place. kCorruption: they were not sealed for this place
  // with this key.
  Status open(std::span<std::byte> bytes, const SealTag& tag, const SealPlace& place) const;

 private:
  const Protection protection_;
  const SealId id_;
  KeyName key_name_{};
  std::array<uint8_t, kKeyBytes> mac_key_{};
  std::array<uint8_t, kKeyBytes> chunk_key_{};
};

// Return the manifest's checksum without a key. It detects accidents and identifies the manifest; it stops no attacker.
ManifestMac unkeyed_mac(std::span<const std::byte> header, std::span<const std::byte> body);

SealId random_seal_id();

}  // namespace torpor
