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

struct Header {
  std::array<char, 8> magic = kMagic;
  uint32_t version = kVersion;
  uint32_t endianness = kEndianness;
  int32_t rank = 0;
};

struct alignas(kPage) Page {
  std::array<std::byte, kPage> bytes{};
};

// Return the chunk as a record of its file. The seal binds it to its key.
FileRecord record_of(const SavedChunk& chunk, std::span<std::byte> bytes, const RecordFile& file) {
  return {.bytes = bytes,
          .key = file.sealed() ? chunk.key.to_string() : std::string(),
          .codec = chunk.codec,
          .offset = chunk.offset,
          .stored = chunk.stored_bytes,
          .seal = chunk.seal};
}

}  // namespace

DiskTier::DiskTier(ChunkFileOptions options)
    : traits_{.kind = "disk", .temporary = !options.durable}, options_(std::move(options)) {}

Result<std::unique_ptr<DiskTier>> DiskTier::create(Directory& directory, std::string_view name,
                                                   ChunkFileOptions options) {
  TORPOR_RETURN_IF_ERROR(options.compression.validate());
  TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<File> file, directory.create_file(name, options.io));
  Page page;
  const Header header{.rank = options.rank};
  std::memcpy(page.bytes.data(), &header, sizeof header);
  TORPOR_RETURN_IF_ERROR(file->pwrite(page.bytes, 0));
  std::unique_ptr<DiskTier> tier(new DiskTier(std::move(options)));
  tier->sources_.push_back({{std::move(file), tier->options_.seal}, 0});
  tier->end_ = kPage;
  return tier;
}

Result<std::unique_ptr<DiskTier>> DiskTier::open(std::vector<OpenChunkFile> files, int32_t rank,
                                                 std::shared_ptr<ProgressMeter> progress) {
  std::unique_ptr<DiskTier> tier(new DiskTier({.rank = rank, .progress = std::move(progress)}));
  for (OpenChunkFile& opened : files) {
    TORPOR_ASSIGN_OR_RETURN(const uint64_t size, opened.file->size());
    Page page;
    TORPOR_RETURN_IF_ERROR(opened.file->pread(page.bytes, 0));
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
  return sources_[0].opened.file->preallocate(end_ + bytes + chunks * kPage + kMiB);
}

// Reserve the next offset in the file for a record of so many bytes, a multiple of the page size.
uint64_t DiskTier::take_place(uint64_t padded_bytes) {
  uint64_t end = end_;
  while (!end_.compare_exchange_weak(end, record_offset(end, padded_bytes) + padded_bytes)) {}
  return record_offset(end, padded_bytes);
}

void DiskTier::put(std::span<RecordPart> parts) {
  const RecordFile file = records_of(0);
  uint64_t most = 0;
  for (const RecordPart& part : parts) most += file.scratch_to_encode(part.bytes, options_.compression);
  ScratchPool::Lease scratch(scratch_);
  std::span<std::byte> room = scratch->room(most);
  const bool enough = room.size() >= most;
  std::vector<FilePart> writes;
  std::vector<size_t> owner;  // the part of each write
  for (size_t i = 0; i < parts.size(); ++i) {
    RecordPart& part = parts[i];
    SavedChunk& chunk = *part.chunk;
    part.status = enough ? count(part.bytes.size()) : Status(no_memory_for(most));
    if (!part.status) continue;
    FileRecord record = record_of(chunk, part.bytes, file);
    file.encode(record, room, options_.compression);
    record.offset = take_place(record.pages.size());
    file.seal(record);
    chunk.file = 0;
    chunk.codec = record.codec;
    chunk.offset = record.offset;
    chunk.stored_bytes = record.stored;
    chunk.seal = record.seal;
    writes.push_back({record.offset, record.pages, ok()});
    owner.push_back(i);
  }
  sources_[0].opened.file->pwrite_all(writes);
  for (size_t w = 0; w < writes.size(); ++w) parts[owner[w]].status = std::move(writes[w].status);
}

// Check that the record can be true; `bytes` is the size that the reader expects.
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

void DiskTier::get(std::span<RecordPart> parts) {
  std::vector<std::vector<FileRecord>> records(sources_.size());  // for each file
  std::vector<size_t> place(parts.size());                        // for each part, its index among its file's records
  uint64_t most = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    RecordPart& part = parts[i];
    part.status = check(*part.chunk, part.bytes.size());
    if (part.status) part.status = count(part.bytes.size());
    if (!part.status) continue;
    std::vector<FileRecord>& of_file = records[part.chunk->file];
    place[i] = of_file.size();
    of_file.push_back(record_of(*part.chunk, part.bytes, records_of(part.chunk->file)));
    most += RecordFile::scratch_to_read(of_file.back());
  }
  ScratchPool::Lease scratch(scratch_);
  std::span<std::byte> room = scratch->room(most);
  const bool enough = room.size() >= most;
  for (size_t f = 0; f < sources_.size() && enough; ++f) records_of(f).read(*sources_[f].opened.file, records[f], room);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].status) continue;
    parts[i].status = enough ? std::move(records[parts[i].chunk->file][place[i]].status) : Status(no_memory_for(most));
  }
}

Status DiskTier::finish() {
  File& file = *sources_[0].opened.file;
  TORPOR_RETURN_IF_ERROR(file.truncate(end_));  // give back what prepare() reserved too much; fill up the last page
  // A write with direct I/O has reported its failure itself; one into cached pages may fail later, which sync()
  // reports.
  const bool reported = file.io().ends_with("direct");
  return options_.durable || !reported ? file.sync() : ok();
}

}  // namespace torpor
