#include "offload/disk_tier.h"

#include <array>
#include <cstring>

#include <fmt/format.h>

#include "base/units.h"
#include "offload/codec.h"

namespace torpor {
namespace {

constexpr std::array<char, 8> kMagic = {'T', 'O', 'R', 'P', 'C', 'H', 'N', 'K'};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kEndianness = 0x01020304;

struct Header {
  std::array<char, 8> magic = kMagic;
  uint32_t version = kVersion;
  uint32_t endianness = kEndianness;
  int32_t rank = 0;
};

}  // namespace

Result<std::unique_ptr<DiskTier>> DiskTier::create(Directory& directory, std::string_view name, int32_t rank) {
  TORPOR_ASSIGN(std::unique_ptr<File> file, directory.create_file(name));
  std::array<std::byte, kPage> page{};
  const Header header{.rank = rank};
  std::memcpy(page.data(), &header, sizeof header);
  TORPOR_TRY(file->pwrite(page, 0));
  return std::unique_ptr<DiskTier>(new DiskTier(std::move(file), kPage));
}

Result<std::unique_ptr<DiskTier>> DiskTier::open(std::unique_ptr<File> file, int32_t rank) {
  TORPOR_ASSIGN(const uint64_t size, file->size());
  std::array<std::byte, kPage> page{};
  TORPOR_TRY(file->pread(page, 0));
  Header header;
  std::memcpy(&header, page.data(), sizeof header);
  if (header.magic != kMagic || header.endianness != kEndianness) {
    return Error{.code = Code::kCorruption, .what = fmt::format("{} is not a chunk file", file->name()), .next_step = "use another checkpoint"};
  }
  if (header.version != kVersion || header.rank != rank) {
    return Error{.code = Code::kIncompatible,
                 .what = fmt::format("{} has version {} and rank {}, expected {} and {}", file->name(), header.version, header.rank, kVersion, rank),
                 .next_step = "wake it with the version and the ranks that wrote it"};
  }
  return std::unique_ptr<DiskTier>(new DiskTier(std::move(file), size));
}

Status DiskTier::prepare(uint64_t bytes, uint64_t chunks) { return file_->preallocate(end_ + bytes + chunks * kPage); }

void DiskTier::put(std::span<TierPart> parts) {
  for (TierPart& part : parts) part.status = write(*part.chunk, part.bytes);
}

void DiskTier::get(std::span<TierPart> parts) {
  for (TierPart& part : parts) part.status = read(*part.chunk, part.bytes);
}

Status DiskTier::write(SavedChunk& chunk, std::span<const std::byte> bytes) {
  chunk.codec = Codec::kNone;
  chunk.stored_bytes = bytes.size();
  chunk.offset = end_.fetch_add(align_up(bytes.size(), kPage));
  return file_->pwrite(bytes, chunk.offset);
}

Status DiskTier::read(const SavedChunk& chunk, std::span<std::byte> bytes) {
  const std::optional<uint64_t> end = checked_add(chunk.offset, chunk.stored_bytes);
  if (!end || *end > end_ || (chunk.codec == Codec::kNone && chunk.stored_bytes != bytes.size())) {
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("{}: {} lies outside the file or has another size", file_->name(), chunk.key.to_string()),
                 .next_step = "use another checkpoint"};
  }
  if (chunk.codec == Codec::kNone) return file_->pread(bytes, chunk.offset);
  Bytes stored(chunk.stored_bytes);
  TORPOR_TRY(file_->pread(std::as_writable_bytes(std::span(stored)), chunk.offset));
  return decompress(chunk.codec, std::as_bytes(std::span(stored)), bytes);
}

Status DiskTier::finish() {
  TORPOR_TRY(file_->truncate(end_));  // what prepare() reserved too much goes; the last page is filled up
  return file_->sync();
}

}  // namespace torpor
