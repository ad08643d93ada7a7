// SPDX-License-Identifier: Apache-2.0
#include "offload/disk_tier.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include <fmt/core.h>

#include "base/units.h"

namespace torpor {
namespace {

constexpr std::array<char, 8> kMagic = {'T', 'O', 'R', 'P', 'C', 'H', 'N', 'K'};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kEndianness = 0x01020304;

// Reads that straddle these boundaries cost twice the time on disks behind a hypervisor, so what is as large keeps to
// them.
constexpr uint64_t kLargeAlignment = kMiB;

struct Header {
  std::array<char, 8> magic = kMagic;
  uint32_t version = kVersion;
  uint32_t endianness = kEndianness;
  int32_t rank = 0;
};

struct alignas(kPage) Page {
  std::array<std::byte, kPage> bytes{};
};

bool fits_direct_io(std::span<const std::byte> bytes) {
  return is_aligned(reinterpret_cast<uintptr_t>(bytes.data()), kPage) && is_aligned(bytes.size(), kPage);
}

SealPlace place_of(int32_t rank, const SavedChunk& chunk, const std::string& what) {
  return {SealPlace::Kind::kChunk, rank, chunk.offset, what};
}

// What the seal binds: the chunk's name and how its bytes are to be read.
std::string sealed_name(const SavedChunk& chunk) {
  return fmt::format("{} of {} bytes, {}", chunk.key.to_string(), chunk.bytes, name(chunk.codec));
}

}  // namespace

DiskTier::DiskTier(ChunkFileOptions options) : options_(std::move(options)) {}

Result<std::unique_ptr<DiskTier>> DiskTier::create(Directory& directory, std::string_view name,
                                                   ChunkFileOptions options) {
  TORPOR_TRY(options.compression.validate());
  TORPOR_ASSIGN(std::unique_ptr<File> file, directory.create_file(name, options.io));
  Page page;
  const Header header{.rank = options.rank};
  std::memcpy(page.bytes.data(), &header, sizeof header);
  TORPOR_TRY(file->pwrite(page.bytes, 0));
  std::unique_ptr<DiskTier> tier(new DiskTier(std::move(options)));
  tier->sources_.push_back({{std::move(file), tier->options_.seal}, 0});
  tier->end_ = kPage;
  return tier;
}

Result<std::unique_ptr<DiskTier>> DiskTier::open(std::vector<OpenChunkFile> files, int32_t rank,
                                                 std::shared_ptr<ProgressMeter> progress) {
  std::unique_ptr<DiskTier> tier(new DiskTier({.rank = rank, .progress = std::move(progress)}));
  for (OpenChunkFile& opened : files) {
    TORPOR_ASSIGN(const uint64_t size, opened.file->size());
    Page page;
    TORPOR_TRY(opened.file->pread(page.bytes, 0));
    Header header;
    std::memcpy(&header, page.bytes.data(), sizeof header);
    const bool rest_is_zero = std::all_of(page.bytes.begin() + sizeof header, page.bytes.end(),
                                          [](std::byte byte) { return byte == std::byte{0}; });
    if (header.magic != kMagic || header.endianness != kEndianness || !rest_is_zero) {
      return Error{.code = Code::kCorruption,
                   .what = fmt::format("{} is not a chunk file", opened.file->name()),
                   .next_step = "use another checkpoint"};
    }
    if (header.version != kVersion || header.rank != rank) {
      return Error{.code = Code::kIncompatible,
                   .what = fmt::format("{} has version {} and rank {}, expected {} and {}", opened.file->name(),
                                       header.version, header.rank, kVersion, rank),
                   .next_step = "wake it with the version and the ranks that wrote it"};
    }
    tier->sources_.push_back({std::move(opened), size});
  }
  return tier;
}

Status DiskTier::count(uint64_t bytes) { return options_.progress == nullptr ? ok() : options_.progress->add(bytes); }

Status DiskTier::prepare(uint64_t bytes, uint64_t chunks) {
  if (options_.compression.codec != Codec::kNone) return ok();  // far less may be written
  return sources_[0].opened.file->preallocate(end_ + bytes + chunks * kPage + kLargeAlignment);
}

uint64_t DiskTier::take_place(uint64_t padded_bytes) {
  const uint64_t alignment = is_aligned(padded_bytes, kLargeAlignment) ? kLargeAlignment : kPage;
  uint64_t end = end_;
  while (!end_.compare_exchange_weak(end, align_up(end, alignment) + padded_bytes)) {}
  return align_up(end, alignment);
}

// The stored form of a part, up to a multiple of a page: its own bytes, or in `room`. Fills codec and stored_bytes.
std::span<std::byte> DiskTier::encode(TierPart& part, std::span<std::byte> room) const {
  SavedChunk& chunk = *part.chunk;
  const std::optional<uint64_t> packed = compress_into(part.bytes, room, options_.compression);
  chunk.codec = packed ? options_.compression.codec : Codec::kNone;
  chunk.stored_bytes = packed.value_or(part.bytes.size());
  const uint64_t padded = align_up(chunk.stored_bytes, kPage);
  const bool encrypts = options_.seal != nullptr && options_.seal->protection() == Protection::kEncrypted;
  if (!packed && !encrypts && fits_direct_io(part.bytes)) return part.bytes;
  if (!packed) std::memcpy(room.data(), part.bytes.data(), part.bytes.size());
  std::memset(room.data() + chunk.stored_bytes, 0, padded - chunk.stored_bytes);
  return room.first(padded);
}

void DiskTier::put(std::span<TierPart> parts) {
  ScratchPool::Lease scratch(scratch_);
  uint64_t most = 0;
  for (const TierPart& part : parts)
    most += align_up(std::max<uint64_t>(compressed_bound(part.bytes.size()), part.bytes.size()), kPage);
  std::span<std::byte> room = scratch->room(most);
  File& file = *sources_[0].opened.file;
  std::vector<FilePart> writes;
  std::vector<size_t> owner;  // of each write
  for (size_t i = 0; i < parts.size(); ++i) {
    TierPart& part = parts[i];
    SavedChunk& chunk = *part.chunk;
    part.status = room.empty() ? Status(Error{.code = Code::kResourceExhausted,
                                              .what = fmt::format("no memory for {} bytes", most),
                                              .next_step = "free some and try again"})
                               : count(part.bytes.size());
    if (!part.status) continue;
    std::span<std::byte> stored = encode(part, room);
    if (stored.data() == room.data()) room = room.subspan(stored.size());
    chunk.file = 0;
    chunk.offset = take_place(stored.size());
    if (options_.seal != nullptr) {
      const std::span<std::byte> sealed = stored.first(chunk.stored_bytes);
      const std::string what = sealed_name(chunk);
      chunk.seal = options_.seal->seal(sealed, sealed, place_of(options_.rank, chunk, what));
    }
    writes.push_back({chunk.offset, stored, ok()});
    owner.push_back(i);
  }
  file.pwrite_all(writes);
  for (size_t w = 0; w < writes.size(); ++w) {
    parts[owner[w]].status = std::move(writes[w].status);
  }
}

// Whether the record can be true at all; `bytes` is what the reader expects.
Status DiskTier::check(const SavedChunk& chunk, uint64_t bytes) const {
  if (chunk.file >= sources_.size()) {
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("{} lies in file {} of {}", chunk.key.to_string(), chunk.file, sources_.size()),
                 .next_step = "use another checkpoint"};
  }
  const Source& source = sources_[chunk.file];
  const uint64_t file_bytes = source.bytes != 0 ? source.bytes : end_.load();
  const std::optional<uint64_t> end = checked_add(chunk.offset, chunk.stored_bytes);
  const bool sizes_fit =
      chunk.codec == Codec::kNone ? chunk.stored_bytes == bytes : chunk.stored_bytes <= compressed_bound(bytes);
  if (end && *end <= file_bytes && is_aligned(chunk.offset, kPage) && sizes_fit) return ok();
  return Error{.code = Code::kCorruption,
               .what = fmt::format("{}: {} lies outside the file or has another size", source.opened.file->name(),
                                   chunk.key.to_string()),
               .next_step = "use another checkpoint"};
}

Status DiskTier::decode(const SavedChunk& chunk, std::span<std::byte> stored, std::span<std::byte> out) const {
  if (const auto& seal = sources_[chunk.file].opened.seal; seal != nullptr) {
    const std::string what = sealed_name(chunk);
    TORPOR_TRY(seal->open(stored, chunk.seal, place_of(options_.rank, chunk, what)));
  }
  return stored.data() == out.data() ? ok() : decompress(chunk.codec, stored, out);
}

void DiskTier::get(std::span<TierPart> parts) {
  ScratchPool::Lease scratch(scratch_);
  const auto in_place = [](const TierPart& part) {
    return part.chunk->codec == Codec::kNone && fits_direct_io(part.bytes);
  };
  uint64_t most = 0;
  for (TierPart& part : parts) {
    part.status = check(*part.chunk, part.bytes.size());
    if (part.status) part.status = count(part.bytes.size());
    if (part.status && !in_place(part)) most += align_up(part.chunk->stored_bytes, kPage);
  }
  std::span<std::byte> room = scratch->room(most);
  std::vector<std::vector<FilePart>> reads(sources_.size());
  std::vector<std::span<std::byte>> stored(parts.size());
  std::vector<std::pair<size_t, size_t>> origin(
      parts.size());  // of each part: its file and its place in that file's reads
  for (size_t i = 0; i < parts.size(); ++i) {
    TierPart& part = parts[i];
    if (!part.status) continue;
    const SavedChunk& chunk = *part.chunk;
    const uint64_t padded = align_up(chunk.stored_bytes, kPage);
    if (!in_place(part) && room.size() < padded) {
      part.status = Error{.code = Code::kResourceExhausted,
                          .what = fmt::format("no memory for {} bytes", most),
                          .next_step = "free some and try again"};
      continue;
    }
    std::span<std::byte> whole = in_place(part) ? part.bytes : room.first(padded);
    if (!in_place(part)) room = room.subspan(padded);
    stored[i] = whole.first(chunk.stored_bytes);
    origin[i] = {chunk.file, reads[chunk.file].size()};
    reads[chunk.file].push_back({chunk.offset, whole, ok()});
  }
  for (size_t f = 0; f < sources_.size(); ++f) {
    if (!reads[f].empty()) sources_[f].opened.file->pread_all(reads[f]);
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].status) continue;
    parts[i].status = std::move(reads[origin[i].first][origin[i].second].status);
    if (parts[i].status) parts[i].status = decode(*parts[i].chunk, stored[i], parts[i].bytes);
  }
}

Status DiskTier::finish() {
  File& file = *sources_[0].opened.file;
  TORPOR_TRY(file.truncate(end_));  // what prepare() reserved too much goes; the last page is filled up
  return file.sync();
}

}  // namespace torpor
