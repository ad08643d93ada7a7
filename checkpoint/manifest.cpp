#include "checkpoint/manifest.h"

#include <array>
#include <set>

#include "checkpoint/archived_values.h"

namespace torpor {
namespace {

constexpr std::array<char, 8> kMagic = {'T', 'O', 'R', 'P', 'O', 'R', 'C', 'K'};
constexpr uint32_t kEndianness = 0x01020304;
constexpr uint64_t kMaxBodyBytes = uint64_t{1} << 30;

struct Header {
  std::array<char, 8> magic = kMagic;
  uint32_t format_version = kFormatVersion;
  uint32_t endianness = kEndianness;
  uint64_t body_bytes = 0;
  Digest body_digest;
  std::array<uint8_t, 24> reserved{};
};
static_assert(sizeof(Header) == 64);

Error damaged(std::string what) {
  return Error{.code = Code::kCorruption, .what = fmt::format("MANIFEST: {}", what), .next_step = "use another checkpoint"};
}

Status check(const Manifest& manifest) {
  std::set<std::string> names;
  uint64_t offset = 0;
  for (const SectionInfo& section : manifest.sections) {
    if (!names.insert(section.name).second) return damaged(fmt::format("the section {} is listed twice", section.name));
    if (section.offset != offset || section.stored_bytes > kMaxBodyBytes * 64) return damaged(fmt::format("the section {} is misplaced", section.name));
    offset += section.stored_bytes;
  }
  std::set<int32_t> ranks;
  for (const RankChunks& rank : manifest.ranks) {
    if (rank.rank < 0 || !ranks.insert(rank.rank).second) return damaged(fmt::format("the rank {} is listed twice", rank.rank));
    if (rank.file.find('/') != std::string::npos) return damaged("the name of a chunk file is not a plain name");
    std::set<ChunkKey> keys;
    for (const SavedChunk& chunk : rank.chunks) {
      if (!keys.insert(chunk.key).second) return damaged(fmt::format("{} is listed twice", chunk.key.to_string()));
      if (chunk.offset > rank.file_bytes || chunk.stored_bytes > rank.file_bytes - chunk.offset) {
        return damaged(fmt::format("{} lies outside {}", chunk.key.to_string(), rank.file));
      }
    }
  }
  return ok();
}

}  // namespace

uint64_t Manifest::total_bytes() const {
  uint64_t sum = 0;
  for (const SectionInfo& section : sections) sum += section.stored_bytes;
  for (const RankChunks& rank : ranks) sum += rank.file_bytes;
  return sum;
}

Bytes encode_manifest(const Manifest& manifest) {
  const Bytes body = to_bytes(manifest);
  Header header{.format_version = manifest.format_version, .body_bytes = body.size(), .body_digest = digest_of(std::as_bytes(std::span(body)))};
  Bytes file(sizeof header + body.size());
  std::memcpy(file.data(), &header, sizeof header);
  std::memcpy(file.data() + sizeof header, body.data(), body.size());
  return file;
}

Result<Manifest> decode_manifest(std::span<const std::byte> file) {
  Header header;
  if (file.size() < sizeof header) return damaged(fmt::format("it has {} bytes, fewer than its header", file.size()));
  std::memcpy(&header, file.data(), sizeof header);
  if (header.magic != kMagic) return damaged("it does not begin as a manifest does");
  if (header.endianness != kEndianness) {
    return Error{.code = Code::kIncompatible, .what = "MANIFEST: the checkpoint was written with another byte order", .next_step = "wake it on the kind of machine that wrote it"};
  }
  if (header.format_version != kFormatVersion) {
    return Error{.code = Code::kIncompatible,
                 .what = fmt::format("MANIFEST: format_version is {}, this torpor reads {}", header.format_version, kFormatVersion),
                 .next_step = "use the version of torpor that wrote it"};
  }
  if (header.reserved != std::array<uint8_t, 24>{}) return damaged("its header is not whole");
  const std::span<const std::byte> body = file.subspan(sizeof header);
  if (body.size() != header.body_bytes) return damaged(fmt::format("it has {} bytes after the header, {} were written", body.size(), header.body_bytes));
  if (digest_of(body) != header.body_digest) return damaged("its digest does not match");
  TORPOR_ASSIGN(Manifest manifest, from_bytes<Manifest>(body, "MANIFEST"));
  TORPOR_TRY(check(manifest));
  return manifest;
}

}  // namespace torpor
