// SPDX-License-Identifier: Apache-2.0
#include "remote/block_frame.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include <fmt/core.h>

namespace torpor::remote {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are written as they lie in memory");

constexpr uint64_t kMagic = 0x766b726f70726f74;  // "torporkv"
constexpr uint32_t kVersion = 1;
constexpr size_t kMostName = 64;

struct Layout {
  uint64_t magic = kMagic;
  uint32_t version = kVersion;
  uint32_t codec = 0;
  uint64_t bytes = 0;
  uint64_t stored = 0;
  std::array<uint8_t, 16> digest{};
  std::array<uint8_t, 32> hash{};
  std::array<uint8_t, 16> space{};
  uint32_t group = 0;
  int32_t rank = 0;
  uint32_t protection = 0;
  uint32_t zero = 0;
  SealId seal_id{};
  uint64_t seal_number = 0;
  SealTag seal{};
  std::array<uint8_t, 8> check{};  // digest of all bytes before it
};
static_assert(sizeof(Layout) == kFrameBytes && std::has_unique_object_representations_v<Layout>);

constexpr size_t kChecked = offsetof(Layout, check);

std::array<uint8_t, 8> check_of(const Layout& layout) {
  const Digest digest = digest_of(std::as_bytes(std::span(&layout, 1)).first(kChecked));
  std::array<uint8_t, 8> check;
  std::copy_n(digest.bytes.begin(), check.size(), check.begin());
  return check;
}

}  // namespace

FrameBytes encode_frame(const BlockFrame& frame) {
  Layout layout{.codec = static_cast<uint32_t>(frame.codec),
                .bytes = frame.bytes,
                .stored = frame.stored,
                .digest = frame.digest.bytes,
                .hash = frame.hash,
                .space = frame.space.bytes,
                .group = frame.group,
                .rank = frame.rank,
                .protection = static_cast<uint32_t>(frame.protection),
                .seal_id = frame.seal_id,
                .seal_number = frame.seal_number,
                .seal = frame.seal};
  layout.check = check_of(layout);
  return std::bit_cast<FrameBytes>(layout);
}

Result<BlockFrame> decode_frame(std::span<const std::byte, kFrameBytes> bytes) {
  Layout layout;
  std::memcpy(&layout, bytes.data(), sizeof layout);
  const auto wrong = [](Code code, std::string what) {
    return Error{.code = code, .what = std::move(what), .next_step = "it is computed instead"};
  };
  if (layout.magic != kMagic || layout.check != check_of(layout))
    return wrong(Code::kCorruption, "a value of the remote store is no KV block, or damaged");
  if (layout.version != kVersion)
    return wrong(Code::kIncompatible, fmt::format("a KV block has the format {}, not {}", layout.version, kVersion));
  if (layout.codec > static_cast<uint32_t>(Codec::kBf16) ||
      layout.protection > static_cast<uint32_t>(Protection::kEncrypted) || layout.zero != 0)
    return wrong(Code::kCorruption, "a KV block of the remote store is encoded in no known way");
  return BlockFrame{.hash = layout.hash,
                    .group = layout.group,
                    .rank = layout.rank,
                    .space = {layout.space},
                    .bytes = layout.bytes,
                    .stored = layout.stored,
                    .digest = {layout.digest},
                    .codec = static_cast<Codec>(layout.codec),
                    .protection = static_cast<Protection>(layout.protection),
                    .seal_id = layout.seal_id,
                    .seal_number = layout.seal_number,
                    .seal = layout.seal};
}

std::string_view sealed_part(const FrameBytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), offsetof(Layout, seal_id)};
}

std::string block_key_text(std::string_view name, const Digest& space, int32_t rank, const BlockKey& key) {
  return fmt::format("{}{}kv1:{}:r{}:g{}:{}", name, name.empty() ? "" : ":", space.hex(), rank, key.group,
                     hex(key.hash));
}

bool may_begin_keys(std::string_view name) {
  return name.size() <= kMostName && std::all_of(name.begin(), name.end(), [](unsigned char letter) {
           return std::isalnum(letter) != 0 || letter == '.' || letter == '_' || letter == '-';
         });
}

}  // namespace torpor::remote
