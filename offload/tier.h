// Tier: a place below device memory where chunks are put and found again. Implementations: HostTier (the arena) and
// DiskTier (one chunk file). A remote tier fits behind the same four verbs.
//
// Threads: put() and get() may be called from several threads at once; the others from one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"
#include "offload/chunk.h"

namespace torpor {

class Tier {
 public:
  virtual ~Tier() = default;
  virtual std::string_view kind() const = 0;  // "host", "disk"
  // Makes room for `bytes` in chunks of at most `largest_chunk`. kResourceExhausted before anything is written.
  virtual Status prepare(uint64_t bytes, uint64_t chunks, uint64_t largest_chunk) = 0;
  // Stores the chunk's bytes; fills codec, offset and stored_bytes of `chunk`. The bytes are the tier's when it returns.
  virtual Status put(SavedChunk& chunk, std::span<const std::byte> bytes) = 0;
  // Memory of the tier's own where the chunk may be written directly, which saves put()'s copy; empty if there is none.
  virtual std::span<std::byte> direct(SavedChunk& chunk) = 0;
  // Reads the chunk's bytes into `bytes` (bytes.size() == chunk.bytes), decoded but not verified.
  virtual Status get(const SavedChunk& chunk, std::span<std::byte> bytes) = 0;
  // A view of the chunk inside the tier's memory; empty if there is none.
  virtual std::span<const std::byte> view(const SavedChunk& chunk) const = 0;
  // All that was put is as safe as this tier can make it (disk: written and synced).
  virtual Status finish() = 0;
};

}  // namespace torpor
