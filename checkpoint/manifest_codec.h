// SPDX-License-Identifier: Apache-2.0
// The file MANIFEST: a Manifest as bytes, and back. The bytes: checkpoint/FORMAT.md.
//
// The file describes itself: magic, format version, byte order, length, id, and a BLAKE2b-256 over header and body,
// keyed if the checkpoint is sealed. It is written last; a checkpoint without a whole manifest does not exist.
#pragma once

#include <memory>
#include <span>

#include "base/seal.h"
#include "base/status.h"
#include "base/value.h"
#include "checkpoint/manifest.h"

namespace torpor {

inline constexpr uint64_t kMaxManifestBytes = uint64_t{1} << 30;

// `seal`: null, or of manifest.protection and manifest.id.
Bytes encode_manifest(const Manifest& manifest, const Seal* seal = nullptr);

// With a key, nothing but the header of fixed size is looked at before the whole is authenticated. kCorruption:
// damaged. kIncompatible: another format version or byte order. kUnauthenticated: sealed and there is no key or another
// one, or a key is given and it is not sealed.
// Also checks that nothing contradicts itself (names unique, sizes add up).
Result<OpenedManifest> decode_manifest(std::span<const std::byte> file, const Key* key = nullptr);

}  // namespace torpor
