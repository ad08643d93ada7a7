// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/refs_codec.h"

#include <array>
#include <cstring>
#include <set>

#include <fmt/core.h>

#include "checkpoint/archived_values.h"

namespace torpor {
namespace {

constexpr std::array<char, 8> kRefsMagic = {'T', 'O', 'R', 'P', 'R', 'E', 'F', 'S'};
constexpr uint32_t kRefsVersion = 1;
constexpr uint32_t kRefsEndianness = 0x01020304;

struct RefsHeader {
  std::array<char, 8> magic = kRefsMagic;
  uint32_t version = kRefsVersion;
  uint32_t endianness = kRefsEndianness;
  uint64_t body_bytes = 0;
  int32_t rank = 0;
  uint32_t zero = 0;
  SealId id{};
  SealTag body_seal{};  // of an encrypted body
};
static_assert(sizeof(RefsHeader) == 64);

// The body; the other fields are in the header.
struct RefsBody {
  std::vector<LinkedFile> files;
  std::vector<SavedChunk> records;
};
template <class Archive>
void serialize(Archive& archive, RefsBody& v) {
  archive(v.files, v.records);
}

Error damaged(std::string_view where, std::string_view what) {
  return Error{
      .code = Code::kCorruption, .what = fmt::format("{}: {}", where, what), .next_step = "use another checkpoint"};
}

SealPlace body_place(int32_t rank) { return {.kind = SealPlace::Kind::kRefs, .rank = rank, .what = "refs"}; }

ManifestMac mac_of(std::span<const std::byte> file, const Seal* seal) {
  const auto header = file.first(std::min(file.size(), sizeof(RefsHeader)));
  const auto body = file.subspan(header.size());
  return seal != nullptr ? seal->mac(header, body) : unkeyed_mac(header, body);
}

// Compare with the summary in the manifest.
Status check(const RankRefs& refs, const RankSummary& summary) {
  if (refs.files != summary.files) return damaged(summary.refs, "it lists other files than MANIFEST");
  if (summary_of(refs).tags != summary.tags) return damaged(summary.refs, "its records are not those of MANIFEST");
  return check_records(refs, summary.refs);
}

}  // namespace

std::string refs_file_name(int32_t rank) { return fmt::format("refs-r{}", rank); }
std::string chunk_file_name(int32_t rank) { return fmt::format("chunks-r{}", rank); }
std::string linked_file_name(int32_t rank, const SealId& of) {
  std::string name = chunk_file_name(rank) + '-';
  for (const uint8_t byte : of) name += fmt::format("{:02x}", byte);
  return name;
}

bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

RankSummary summary_of(const RankRefs& refs) {
  RankSummary summary{.rank = refs.rank, .files = refs.files};
  for (const SavedChunk& record : refs.records) {
    RecordSums& sums = summary.tags[record.key.tag];
    sums.records += 1;
    sums.bytes += record.bytes;
    sums.stored_bytes += record.stored_bytes;
    sums.linked_bytes += record.file == 0 ? 0 : record.stored_bytes;
  }
  return summary;
}

Status check_records(const RankRefs& refs, std::string_view where) {
  std::set<ChunkKey> keys;
  for (const SavedChunk& record : refs.records) {
    const auto wrong = [&](std::string_view what) {
      return damaged(where, fmt::format("{} {}", record.key.to_string(), what));
    };
    if (!keys.insert(record.key).second) return wrong("is listed twice");
    if (record.file >= refs.files.size()) return wrong("lies in a file that is not listed");
    const LinkedFile& file = refs.files[record.file];
    if (record.offset > file.bytes || record.stored_bytes > file.bytes - record.offset)
      return wrong(fmt::format("lies outside {}", file.name));
  }
  return ok();
}

EncodedRefs encode_refs(const RankRefs& refs, const SealId& id, const Seal* seal) {
  RefsHeader header{.rank = refs.rank, .id = id};
  EncodedRefs encoded{.file = to_bytes_after(sizeof header, refs.files, refs.records)};
  const auto body = std::as_writable_bytes(std::span(encoded.file)).subspan(sizeof header);
  header.body_bytes = body.size();
  if (seal != nullptr && seal->protection() == Protection::kEncrypted)
    header.body_seal = seal->seal(body, body, body_place(refs.rank));
  std::memcpy(encoded.file.data(), &header, sizeof header);
  encoded.mac = mac_of(std::as_bytes(std::span(encoded.file)), seal);
  return encoded;
}

Result<RankRefs> decode_refs(std::span<const std::byte> file, const RankSummary& summary, const SealId& id,
                             const Seal* seal) {
  const std::string& where = summary.refs;
  if (file.size() != summary.refs_bytes)
    return damaged(where, fmt::format("it has {} bytes, {} were written", file.size(), summary.refs_bytes));
  if (mac_of(file, seal) != summary.refs_mac) return damaged(where, "its digest does not match");
  RefsHeader header;
  if (file.size() < sizeof header) return damaged(where, "it is shorter than its header");
  std::memcpy(&header, file.data(), sizeof header);
  if (header.magic != kRefsMagic || header.endianness != kRefsEndianness || header.zero != 0)
    return damaged(where, "it does not begin as refs do");
  if (header.version != kRefsVersion) {
    return Error{.code = Code::kIncompatible,
                 .what = fmt::format("{} has version {}, this torpor reads {}", where, header.version, kRefsVersion),
                 .next_step = "use the version of torpor that wrote it"};
  }
  if (header.rank != summary.rank || header.id != id) return damaged(where, "it is of another rank or checkpoint");
  std::span<const std::byte> body = file.subspan(sizeof header);
  if (header.body_bytes != body.size()) return damaged(where, "its header has another length than it");
  Bytes decrypted;
  if (seal != nullptr && seal->protection() == Protection::kEncrypted) {
    decrypted.resize(body.size());
    std::memcpy(decrypted.data(), body.data(), body.size());
    TORPOR_RETURN_IF_ERROR(
        seal->open(std::as_writable_bytes(std::span(decrypted)), header.body_seal, body_place(header.rank)));
    body = std::as_bytes(std::span(decrypted));
  }
  TORPOR_ASSIGN_OR_RETURN(RefsBody decoded, from_bytes<RefsBody>(body, where));
  RankRefs refs{.rank = header.rank, .files = std::move(decoded.files), .records = std::move(decoded.records)};
  TORPOR_RETURN_IF_ERROR(check(refs, summary));
  return refs;
}

}  // namespace torpor
