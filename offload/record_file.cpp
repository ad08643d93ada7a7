// SPDX-License-Identifier: Apache-2.0
#include "offload/record_file.h"

#include <cstring>
#include <vector>

#include <fmt/core.h>

namespace torpor {
namespace {

// Return what the seal binds in addition to the position: the record's key, its size and its codec.
std::string sealed_name(const FileRecord& record) {
  return fmt::format("{} of {} bytes, {}", record.key, record.bytes.size(), name(record.codec));
}

}  // namespace

uint64_t record_offset(uint64_t end, uint64_t stored) {
  return align_up(end, stored >= kMiB && is_aligned(stored, kMiB) ? kMiB : kPage);
}

Error no_memory_for(uint64_t bytes) {
  return {.code = Code::kResourceExhausted,
          .what = fmt::format("no memory for {} bytes", bytes),
          .next_step = "free some and try again"};
}

uint64_t RecordFile::scratch_to_encode(std::span<const std::byte> bytes, const CompressionOptions& compression) const {
  if (compression.codec != Codec::kNone) return align_up(compressed_bound(bytes.size()), kPage);
  return encrypts() || !fits_pages(bytes) ? align_up(bytes.size(), kPage) : 0;
}

void RecordFile::encode(FileRecord& record, std::span<std::byte>& scratch,
                        const CompressionOptions& compression) const {
  const Encoded encoded = torpor::encode(record.bytes, scratch, compression);
  record.codec = encoded.codec;
  record.stored = encoded.bytes.size();
  record.pages = record.bytes;
  if (record.codec == Codec::kNone && !encrypts() && fits_pages(record.bytes)) return;
  record.pages = scratch.first(align_up(record.stored, kPage));
  scratch = scratch.subspan(record.pages.size());
  if (record.codec == Codec::kNone) std::memcpy(record.pages.data(), record.bytes.data(), record.stored);
  std::memset(record.pages.data() + record.stored, 0, record.pages.size() - record.stored);
}

void RecordFile::seal(FileRecord& record) const {
  if (seal_ == nullptr) return;
  const std::span<std::byte> stored = record.pages.first(record.stored);
  const std::string what = sealed_name(record);
  record.seal = seal_->seal(stored, stored, {SealPlace::Kind::kChunk, rank_, record.offset, what});
}

uint64_t RecordFile::scratch_to_read(const FileRecord& record) {
  return record.codec == Codec::kNone && fits_pages(record.bytes) ? 0 : align_up(record.stored, kPage);
}

void RecordFile::read(const File& file, std::span<FileRecord> records, std::span<std::byte>& scratch) const {
  std::vector<FilePart> reads;
  reads.reserve(records.size());
  for (FileRecord& record : records) {
    if (!record.status) continue;
    const uint64_t taken = scratch_to_read(record);
    record.pages = taken == 0 ? record.bytes : scratch.first(taken);
    scratch = scratch.subspan(taken);
    reads.push_back({record.offset, record.pages, ok()});
  }
  if (!reads.empty()) file.pread_all(reads);
  size_t read = 0;
  for (FileRecord& record : records) {
    if (!record.status) continue;
    record.status = std::move(reads[read++].status);
    if (record.status) record.status = decode(record);
  }
}

Status RecordFile::decode(const FileRecord& record) const {
  const std::span<std::byte> stored = record.pages.first(record.stored);
  if (seal_ != nullptr) {
    const std::string what = sealed_name(record);
    TORPOR_RETURN_IF_ERROR(seal_->open(stored, record.seal, {SealPlace::Kind::kChunk, rank_, record.offset, what}));
  }
  return stored.data() == record.bytes.data() ? ok() : decompress(record.codec, stored, record.bytes);
}

}  // namespace torpor
