// SPDX-License-Identifier: Apache-2.0
#include "offload/segment_format.h"

#include <algorithm>
#include <array>
#include <cstring>

#include <fmt/core.h>

namespace torpor {
namespace {

constexpr std::array<char, 8> kHeaderMagic = {'T', 'O', 'R', 'P', 'S', 'E', 'G', 'M'};
constexpr std::array<char, 8> kBatchMagic = {'T', 'O', 'R', 'P', 'B', 'A', 'T', 'C'};
constexpr uint32_t kSegmentVersion = 1;
constexpr uint32_t kLargeNumberVersion = 2;  // if the number takes more than 32 bits
constexpr uint32_t kByteOrder = 0x01020304;

struct HeaderPage {
  std::array<char, 8> magic = kHeaderMagic;
  uint32_t version = kSegmentVersion;
  uint32_t endianness = kByteOrder;
  uint32_t number = 0;  // lower 32 bits
  int32_t rank = 0;
  int32_t slots = 0;
  uint32_t protection = 0;
  Digest space;
  SealId id{};
  KeyName key_name{};
  ManifestMac mac{};          // over the page with zeros here
  uint32_t upper_number = 0;  // version 2
  uint32_t zero = 0;
};
static_assert(std::is_trivially_copyable_v<HeaderPage> && sizeof(HeaderPage) == 112);

struct RecordEntry {
  std::array<uint8_t, 32> hash{};
  uint32_t group = 0;
  uint32_t position = 0;
  uint32_t page = 0;  // offset in the file, in pages
  uint32_t stored = 0;
  uint32_t bytes = 0;
  uint32_t codec = 0;
  Digest digest;
  SealTag seal{};
};
static_assert(std::is_trivially_copyable_v<RecordEntry> && sizeof(RecordEntry) == 88);

struct BatchBody {  // the bytes that the tag covers
  uint32_t count = 0;
  uint32_t zero = 0;
  std::array<RecordEntry, kBatchRecords> records{};
  std::array<std::byte, kPage - 24 - 8 - sizeof(RecordEntry) * kBatchRecords> unused{};
};
struct BatchPage {
  std::array<char, 8> magic = kBatchMagic;
  SealTag tag{};
  BatchBody body;
};
static_assert(std::is_trivially_copyable_v<BatchPage> && sizeof(BatchPage) == kPage);

Error bad_segment(std::string what) {
  return {.code = Code::kCorruption, .what = std::move(what), .next_step = "compute the blocks again"};
}

template <class T>
bool is_zero(const T& bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](auto byte) { return byte == typename T::value_type{}; });
}

ManifestMac mac_of(const HeaderPage& header, std::span<const std::byte> rest, const Seal* seal) {
  HeaderPage blank = header;
  blank.mac = {};
  const auto bytes = std::as_bytes(std::span(&blank, 1));
  return seal != nullptr ? seal->mac(bytes, rest) : unkeyed_mac(bytes, rest);
}

constexpr std::string_view kBatchName = "batch";

SealPlace batch_place(const SegmentHeader& header, uint64_t offset) {
  return {SealPlace::Kind::kSection, header.rank, offset, kBatchName};
}

// Return the tag of a batch page without a key: a digest that binds the segment and the offset.
SealTag digest_tag(std::span<const std::byte> body, const SegmentHeader& header, uint64_t offset) {
  StreamingDigest digest;
  digest.update(std::as_bytes(std::span(header.id)));
  digest.update(std::as_bytes(std::span(&offset, 1)));
  digest.update(body);
  return digest.finish().bytes;
}

}  // namespace

std::string segment_name(uint64_t number) { return fmt::format("seg-{:06}", number); }

Error segment_closed(uint64_t number) {
  return {.code = Code::kFailedPrecondition,
          .what = fmt::format("{} takes no more records", segment_name(number)),
          .next_step = "use slots of a newer segment"};
}

std::optional<uint64_t> segment_number(std::string_view name) {
  constexpr std::string_view kPrefix = "seg-";
  if (!name.starts_with(kPrefix) || name.size() > kPrefix.size() + 15) return std::nullopt;
  uint64_t number = 0;
  for (const char digit : name.substr(kPrefix.size())) {
    if (digit < '0' || digit > '9') return std::nullopt;
    number = number * 10 + static_cast<uint64_t>(digit - '0');
  }
  return number <= kMostSegmentNumber && segment_name(number) == name ? std::optional(number) : std::nullopt;
}

std::string leased_name(const SegmentHeader& header) {
  return fmt::format("seg-r{}-{:06}", header.rank, header.number);
}

FileRecord file_record(const SegmentRecord& record, std::span<std::byte> bytes, const RecordFile& file) {
  return {.bytes = bytes,
          .key = file.sealed() ? fmt::format("{} in group {}", hex(record.hash), record.group) : std::string(),
          .codec = record.codec,
          .offset = record.offset,
          .stored = record.stored,
          .seal = record.seal};
}

void write_header(std::span<std::byte> page, const SegmentHeader& header, const Seal* seal) {
  std::memset(page.data(), 0, kPage);
  const auto upper = static_cast<uint32_t>(header.number >> 32);
  HeaderPage out{.version = upper == 0 ? kSegmentVersion : kLargeNumberVersion,
                 .number = static_cast<uint32_t>(header.number),
                 .rank = header.rank,
                 .slots = header.slots,
                 .protection = static_cast<uint32_t>(header.protection),
                 .space = header.space,
                 .id = header.id,
                 .key_name = header.key_name,
                 .upper_number = upper};
  out.mac = mac_of(out, page.subspan(sizeof out), seal);
  std::memcpy(page.data(), &out, sizeof out);
}

Result<OpenedHeader> read_header(std::span<const std::byte> page, const Key* key) {
  HeaderPage in;
  if (page.size() < kPage) return bad_segment("the segment is shorter than its header");
  std::memcpy(&in, page.data(), sizeof in);
  if (in.magic != kHeaderMagic) return bad_segment("this is not a segment");
  if (in.version < kSegmentVersion || in.version > kLargeNumberVersion || in.endianness != kByteOrder) {
    return Error{.code = Code::kIncompatible,
                 .what = fmt::format("the segment has version {}, this torpor reads {} and {}", in.version,
                                     kSegmentVersion, kLargeNumberVersion),
                 .next_step = "use it with the version that wrote it"};
  }
  if (in.protection > static_cast<uint32_t>(Protection::kEncrypted)) return bad_segment("the protection is unknown");
  OpenedHeader opened{.header = {.number = uint64_t{in.upper_number} << 32 | in.number,
                                 .rank = in.rank,
                                 .slots = in.slots,
                                 .space = in.space,
                                 .id = in.id,
                                 .protection = static_cast<Protection>(in.protection),
                                 .key_name = in.key_name}};
  const bool is_protected = opened.header.protection != Protection::kNone;
  if (is_protected && key != nullptr) opened.seal = std::make_shared<Seal>(*key, in.id, opened.header.protection);
  if (is_protected != (key != nullptr) || (opened.seal != nullptr && opened.seal->key_name() != in.key_name)) {
    return Error{.code = Code::kUnauthenticated,
                 .what = is_protected ? "the segment was sealed with a key that was not given"
                                      : "the segment is not sealed, and a key was given",
                 .next_step = "give the right key"};
  }
  if (in.mac != mac_of(in, page.subspan(sizeof in, kPage - sizeof in), opened.seal.get()))
    return bad_segment("the segment's header is damaged");
  if (in.rank < 0 || in.slots < 1 || in.zero != 0 || (in.upper_number != 0) != (in.version == kLargeNumberVersion) ||
      (!is_protected && !is_zero(in.key_name)) || !is_zero(page.subspan(sizeof in, kPage - sizeof in)))
    return bad_segment("the segment's header contradicts itself");
  return opened;
}

void write_batch(std::span<std::byte> page, const SegmentHeader& header, uint64_t offset,
                 std::span<const SegmentRecord> records, const Seal* seal) {
  BatchPage out;
  out.body.count = static_cast<uint32_t>(records.size());
  for (size_t i = 0; i < records.size(); ++i) {
    const SegmentRecord& record = records[i];
    out.body.records[i] = {.hash = record.hash,
                           .group = record.group,
                           .position = record.position,
                           .page = static_cast<uint32_t>(record.offset / kPage),
                           .stored = static_cast<uint32_t>(record.stored),
                           .bytes = static_cast<uint32_t>(record.bytes),
                           .codec = static_cast<uint32_t>(record.codec),
                           .digest = record.digest,
                           .seal = record.seal};
  }
  const std::span<std::byte> body = std::as_writable_bytes(std::span(&out.body, 1));
  out.tag = seal != nullptr ? seal->seal(body, body, batch_place(header, offset)) : digest_tag(body, header, offset);
  std::memcpy(page.data(), &out, sizeof out);
}

Result<std::vector<SegmentRecord>> read_batch(std::span<std::byte> page, const SegmentHeader& header, uint64_t offset,
                                              uint64_t file_bytes, const Seal* seal) {
  BatchPage in;
  if (page.size() < kPage) return bad_segment("the batch page is cut off");
  std::memcpy(&in, page.data(), sizeof in);
  if (in.magic != kBatchMagic) return bad_segment("there is no batch here");
  const std::span<std::byte> body = std::as_writable_bytes(std::span(&in.body, 1));
  if (seal != nullptr) {
    TORPOR_RETURN_IF_ERROR(seal->open(body, in.tag, batch_place(header, offset)));
  } else if (digest_tag(body, header, offset) != in.tag) {
    return bad_segment("the batch page is damaged");
  }
  if (in.body.count == 0 || in.body.count > kBatchRecords || in.body.zero != 0 || !is_zero(in.body.unused))
    return bad_segment("the batch page contradicts itself");
  std::vector<SegmentRecord> records;
  records.reserve(in.body.count);
  uint64_t end = offset + kPage;
  for (uint32_t i = 0; i < in.body.count; ++i) {
    const RecordEntry& entry = in.body.records[i];
    const SegmentRecord record{.hash = entry.hash,
                               .group = entry.group,
                               .position = entry.position,
                               .offset = entry.page * kPage,
                               .stored = entry.stored,
                               .bytes = entry.bytes,
                               .digest = entry.digest,
                               .codec = static_cast<Codec>(entry.codec),
                               .seal = entry.seal};
    const bool sizes_fit = entry.codec == static_cast<uint32_t>(Codec::kNone)
                               ? entry.stored == entry.bytes
                               : entry.codec <= static_cast<uint32_t>(Codec::kBf16) && entry.stored < entry.bytes;
    if (!sizes_fit || entry.stored == 0 || entry.position >= static_cast<uint32_t>(header.slots) ||
        record.offset != record_offset(end, record.stored) || record_end(record) > file_bytes)
      return bad_segment(fmt::format("record {} of the batch page has no place in the segment", i));
    end = record_end(record);
    records.push_back(record);
  }
  return records;
}

}  // namespace torpor
