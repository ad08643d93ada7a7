// SPDX-License-Identifier: Apache-2.0
#include "remote/pack_format.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <ctime>
#include <type_traits>

#include <fmt/core.h>

#include "remote/block_frame.h"

namespace torpor::remote {
namespace {

static_assert(std::endian::native == std::endian::little, "heads are written as they lie in memory");

constexpr uint64_t kPackMagic = 0x6b636170726f7074;   // "tporpack"
constexpr uint64_t kIndexMagic = 0x7865646e726f7074;  // "tporndex"
constexpr uint32_t kVersion = 1;
constexpr size_t kTimeBytes = 16;
constexpr size_t kIdBytes = 32;
constexpr size_t kNumberBytes = 8;
constexpr size_t kNumberAt = kTimeBytes + 1 + kIdBytes + 1;
constexpr size_t kNameBytes = kNumberAt + kNumberBytes;
constexpr size_t kCheckBytes = 8;

struct Start {
  uint64_t magic = 0;
  uint32_t version = kVersion;
  uint32_t count = 0;
};
struct Entry {
  std::array<uint8_t, 32> hash{};
  uint32_t group = 0;
  uint32_t zero = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};
static_assert(sizeof(Start) == 16 && sizeof(Entry) == 56 && std::has_unique_object_representations_v<Entry>);

template <class T>
void append(std::vector<std::byte>& out, const T& value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  out.insert(out.end(), bytes.begin(), bytes.end());
}
void append_check(std::vector<std::byte>& out) {
  const Digest digest = digest_of(out);
  const auto bytes = std::as_bytes(std::span(digest.bytes)).first(kCheckBytes);
  out.insert(out.end(), bytes.begin(), bytes.end());
}

Error wrong(Code code, std::string what) {
  return {.code = code, .what = std::move(what), .next_step = "its blocks are computed instead"};
}

// Return the first bytes of an object whose magic number, checksum and version are right.
Result<Start> start_of(std::span<const std::byte> bytes, uint64_t magic, std::string_view kind) {
  Start start;
  if (bytes.size() < sizeof start + kCheckBytes)
    return wrong(Code::kCorruption, fmt::format("a {} of KV blocks is too short", kind));
  std::memcpy(&start, bytes.data(), sizeof start);
  const Digest digest = digest_of(bytes.first(bytes.size() - kCheckBytes));
  if (start.magic != magic || std::memcmp(bytes.last(kCheckBytes).data(), digest.bytes.data(), kCheckBytes) != 0)
    return wrong(Code::kCorruption, fmt::format("an object is no {} of KV blocks, or damaged", kind));
  if (start.version != kVersion)
    return wrong(Code::kIncompatible,
                 fmt::format("a {} of KV blocks has the format {}, not {}", kind, start.version, kVersion));
  return start;
}

}  // namespace

std::string PackName::text() const {
  const auto seconds = static_cast<std::time_t>(unix_seconds);
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  return fmt::format("{:04}{:02}{:02}T{:02}{:02}{:02}Z-{}-{:08}", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday,
                     parts.tm_hour, parts.tm_min, parts.tm_sec, id, number);
}

std::optional<PackName> PackName::of(std::string_view text) {
  if (text.size() != kNameBytes || text[kTimeBytes] != '-' || text[kNumberAt - 1] != '-' || text[8] != 'T' ||
      text[kTimeBytes - 1] != 'Z')
    return std::nullopt;
  const auto digits = [&](size_t at, size_t count) -> int64_t {
    int64_t value = -1;
    const char* const end = text.data() + at + count;
    return std::from_chars(text.data() + at, end, value).ptr == end ? value : -1;
  };
  std::tm parts{};
  const std::array<int64_t, 6> numbers = {digits(0, 4), digits(4, 2),  digits(6, 2),
                                          digits(9, 2), digits(11, 2), digits(13, 2)};
  const int64_t number = digits(kNumberAt, kNumberBytes);
  if (number < 0 || std::any_of(numbers.begin(), numbers.end(), [](int64_t each) { return each < 0; }))
    return std::nullopt;
  parts.tm_year = static_cast<int>(numbers[0]) - 1900;
  parts.tm_mon = static_cast<int>(numbers[1]) - 1;
  parts.tm_mday = static_cast<int>(numbers[2]);
  parts.tm_hour = static_cast<int>(numbers[3]);
  parts.tm_min = static_cast<int>(numbers[4]);
  parts.tm_sec = static_cast<int>(numbers[5]);
  PackName name{.unix_seconds = timegm(&parts),
                .id = std::string(text.substr(kTimeBytes + 1, kIdBytes)),
                .number = static_cast<uint64_t>(number)};
  return name.text() == text ? std::optional(std::move(name)) : std::nullopt;
}

std::string pack_folder(const Digest& space, int32_t rank) {
  return fmt::format("{}{}/r{}/", kAllPacks, space.hex(), rank);
}

std::string key_of_pack(const std::string& folder, std::string_view name) {
  return fmt::format("{}{}{}", folder, kPacks, name);
}

std::string key_of_index(const std::string& folder, std::string_view name) {
  return fmt::format("{}{}{}", folder, kIndexes, name);
}

uint64_t pack_head_bytes(size_t blocks) { return sizeof(Start) + blocks * sizeof(Entry) + kCheckBytes; }

std::vector<std::byte> encode_pack_head(std::span<PackEntry> entries) {
  std::vector<std::byte> out;
  out.reserve(pack_head_bytes(entries.size()));
  append(out, Start{.magic = kPackMagic, .count = static_cast<uint32_t>(entries.size())});
  uint64_t end = pack_head_bytes(entries.size());
  for (PackEntry& entry : entries) {
    entry.offset = end;
    end += entry.bytes;
    append(out, Entry{.hash = entry.hash, .group = entry.group, .offset = entry.offset, .bytes = entry.bytes});
  }
  append_check(out);
  return out;
}

Result<std::vector<PackEntry>> decode_pack_head(std::span<const std::byte> head) {
  TORPOR_ASSIGN_OR_RETURN(const Start start, start_of(head, kPackMagic, "pack"));
  if (start.count > kMostPackBlocks || head.size() != pack_head_bytes(start.count))
    return wrong(Code::kCorruption, "a pack of KV blocks has another number of blocks than its head");
  std::vector<PackEntry> entries;
  uint64_t end = head.size();
  for (size_t i = 0; i < start.count; ++i) {
    Entry entry;
    std::memcpy(&entry, head.data() + sizeof start + i * sizeof entry, sizeof entry);
    if (entry.offset != end || entry.bytes < kFrameBytes || entry.bytes > UINT32_MAX || entry.zero != 0)
      return wrong(Code::kCorruption, "a pack of KV blocks has them at places that cannot be");
    end += entry.bytes;
    entries.push_back({.hash = entry.hash, .group = entry.group, .offset = entry.offset, .bytes = entry.bytes});
  }
  return entries;
}

std::vector<std::byte> encode_pack_index(std::span<const IndexedPack> packs) {
  std::vector<std::byte> out;
  append(out, Start{.magic = kIndexMagic, .count = static_cast<uint32_t>(packs.size())});
  for (const IndexedPack& pack : packs) {
    const auto name = std::as_bytes(std::span(pack.name));
    out.insert(out.end(), name.begin(), name.end());
    out.insert(out.end(), pack.head.begin(), pack.head.end());
  }
  append_check(out);
  return out;
}

Result<std::vector<IndexedPack>> decode_pack_index(std::span<const std::byte> bytes) {
  TORPOR_ASSIGN_OR_RETURN(const Start start, start_of(bytes, kIndexMagic, "index"));
  std::span<const std::byte> left = bytes.subspan(sizeof start).first(bytes.size() - sizeof start - kCheckBytes);
  std::vector<IndexedPack> packs;
  for (uint32_t i = 0; i < start.count; ++i) {
    if (left.size() < kNameBytes) return wrong(Code::kCorruption, "an index of KV blocks ends too early");
    IndexedPack pack{.name = std::string(reinterpret_cast<const char*>(left.data()), kNameBytes), .head = {}};
    left = left.subspan(kNameBytes);
    const std::optional<PackName> name = PackName::of(pack.name);
    const bool fits = name && name->number <= kMostPackBlocks && left.size() >= pack_head_bytes(name->number);
    if (!fits) return wrong(Code::kCorruption, "an index of KV blocks names a pack that cannot be");
    const auto head = left.first(pack_head_bytes(name->number));
    pack.head.assign(head.begin(), head.end());
    left = left.subspan(head.size());
    packs.push_back(std::move(pack));
  }
  if (!left.empty()) return wrong(Code::kCorruption, "an index of KV blocks is longer than it says");
  return packs;
}

}  // namespace torpor::remote
