// SPDX-License-Identifier: Apache-2.0
// The file MANIFEST: a Manifest as bytes, and back. checkpoint/FORMAT.md has the bytes.
//
// The file describes itself: magic, format version, byte order, length, id, and a BLAKE2b-256 over header and body,
// which is keyed if the checkpoint is sealed. It is written last; without a whole manifest there is no checkpoint.
#pragma once

#include <memory>
#include <span>

#include "base/seal.h"
#include "base/status.h"
#include "base/value.h"
#include "checkpoint/manifest.h"

namespace torpor {

inline constexpr uint64_t kMaxManifestBytes = uint64_t{1} << 30;

// `seal`: null, or made for manifest.protection and manifest.id.
Bytes encode_manifest(const Manifest& manifest, const Seal* seal = nullptr);

// Decode and check a manifest: names are unique, sizes add up. With a key, only the header of fixed size is read before
// the whole file is authenticated. kCorruption: it is damaged. kIncompatible: another format version or byte order.
// kUnauthenticated: it is sealed and the key is missing or another one, or a key is given and it is not sealed.
Result<OpenedManifest> decode_manifest(std::span<const std::byte> file, const Key* key = nullptr);

}  // namespace torpor
