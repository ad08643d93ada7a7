// SPDX-License-Identifier: Apache-2.0
// KV blocks in an object store: packs, objects of many blocks, and indexes, objects that say what is in many packs
// (remote/FORMAT.md). Values and pure functions: what comes from a store is checked here before anything is believed.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/digest.h"
#include "base/status.h"
#include "base/value.h"

namespace torpor::remote {

inline constexpr size_t kMostPackBlocks = 255;

struct PackEntry {  // a block: its frame, then its bytes
  std::array<uint8_t, 32> hash{};
  uint32_t group = 0;
  uint64_t offset = 0;  // in the object
  uint64_t bytes = 0;   // the frame's and the block's
  friend bool operator==(const PackEntry&, const PackEntry&) = default;
};

// "20261127T210512Z-ID-0040": when it was written, 32 hexadecimal digits, and a number: of a pack, its blocks; of an
// index, its bytes.
struct PackName {
  int64_t unix_seconds = 0;
  std::string id;
  uint64_t number = 0;
  std::string text() const;
  static std::optional<PackName> of(std::string_view text);
};

// "kv1/SPACE/rRANK/": the packs and indexes of a namespace and rank have keys "packs/NAME" and "index/NAME" behind it.
std::string pack_folder(const Digest& space, int32_t rank);
inline constexpr std::string_view kPacks = "packs/";
inline constexpr std::string_view kIndexes = "index/";
std::string key_of_pack(const std::string& folder, std::string_view name);
std::string key_of_index(const std::string& folder, std::string_view name);
inline constexpr std::string_view kAllPacks = "kv1/";

uint64_t pack_head_bytes(size_t blocks);
// Return the head of a pack whose blocks lie one after the other behind it. Reads `bytes` of each entry, and sets its
// `offset`.
std::vector<std::byte> encode_pack_head(std::span<PackEntry> entries);
// kCorruption: it is damaged, or has the size of another number of blocks. kIncompatible: it has another version.
Result<std::vector<PackEntry>> decode_pack_head(std::span<const std::byte> head);

struct IndexedPack {
  std::string name;             // PackName
  std::vector<std::byte> head;  // of pack_head_bytes()
};
std::vector<std::byte> encode_pack_index(std::span<const IndexedPack> packs);
Result<std::vector<IndexedPack>> decode_pack_index(std::span<const std::byte> bytes);

}  // namespace torpor::remote
