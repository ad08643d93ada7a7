// DiskTier: chunks in one file: a header page, then the chunks, each at a multiple of 4096 bytes. What is where stands in
// the records of the one who keeps them (a checkpoint's manifest); docs/checkpoint-format.md has the bytes.
#pragma once

#include <atomic>
#include <memory>

#include "base/file_system.h"
#include "offload/tier.h"

namespace torpor {

class DiskTier final : public Tier {
 public:
  // A new file in `directory`, for writing (and reading back).
  static Result<std::unique_ptr<DiskTier>> create(Directory& directory, std::string_view name, int32_t rank);
  // An existing one, for reading. kCorruption when its header is not that of a chunk file of this rank.
  static Result<std::unique_ptr<DiskTier>> open(std::unique_ptr<File> file, int32_t rank);

  std::string_view kind() const override { return "disk"; }
  bool addressable() const override { return false; }
  Status prepare(uint64_t bytes, uint64_t chunks) override;
  void put(std::span<TierPart> parts) override;
  void get(std::span<TierPart> parts) override;
  Status finish() override;

  uint64_t file_bytes() const { return end_; }  // exact after finish()

 private:
  DiskTier(std::unique_ptr<File> file, uint64_t end) : file_(std::move(file)), end_(end) {}
  Status write(SavedChunk& chunk, std::span<const std::byte> bytes);
  Status read(const SavedChunk& chunk, std::span<std::byte> bytes);
  std::unique_ptr<File> file_;
  std::atomic<uint64_t> end_;  // where the next chunk goes; when reading, the file's length
};

}  // namespace torpor
