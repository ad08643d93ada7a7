// Tier: a place below device memory where chunks are put and found again. Implementations: HostTier (the arena) and
// DiskTier (one chunk file). A remote tier fits behind the same verbs.
//
// Threads: place(), put() and get() may be called from several threads at once, for different chunks.
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
  // Makes room for `chunks` chunks of `bytes` in all. kResourceExhausted before anything is written.
  virtual Status prepare(uint64_t bytes, uint64_t chunks) = 0;
  // Memory of the tier's own into which the chunk's bytes may be written, which then counts as put(); fills `offset` and
  // `stored_bytes`. Empty if this tier has none: use put().
  virtual Result<std::span<std::byte>> place(SavedChunk& chunk) = 0;
  // Stores the chunk's bytes; fills codec, offset and stored_bytes. The caller's memory is free when it returns.
  virtual Status put(SavedChunk& chunk, std::span<const std::byte> bytes) = 0;
  // A view of the chunk's bytes inside the tier's memory; empty if there is none: use get().
  virtual std::span<std::byte> view(const SavedChunk& chunk) = 0;
  // Reads the chunk into `bytes` (of size chunk.bytes), decoded but not verified.
  virtual Status get(const SavedChunk& chunk, std::span<std::byte> bytes) = 0;
  // All that was put is as safe as this tier makes it (disk: written and synced).
  virtual Status finish() = 0;
};

}  // namespace torpor
