// SPDX-License-Identifier: Apache-2.0
// Tier: a place below device memory where chunks are put and found again. Implementations: HostTier in the arena,
// DiskTier (a checkpoint's chunk file), and a job of blocks' slots of a Store (offload/store.h).
//
// Threads: all methods but prepare() and finish() may be called from several threads at once, for different chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"
#include "offload/chunk.h"

namespace torpor {

// One chunk on its way into a tier or out of it, with its bytes outside of the tier, and what became of it.
struct TierPart {
  SavedChunk* chunk = nullptr;
  std::span<std::byte> bytes;  // chunk->bytes many
  Status status;
};

class Tier {
 public:
  virtual ~Tier() = default;
  virtual std::string_view kind() const = 0;  // "host", "disk"
  // Chunks lie in memory of the tier's own, as they are, where place() and view() show them.
  virtual bool addressable() const = 0;
  virtual bool in_memory() const { return addressable(); }  // of this machine, as they are or not
  virtual bool remote() const { return false; }             // on another machine
  // Makes room for `chunks` chunks of `bytes` in all. kResourceExhausted before anything is written.
  virtual Status prepare(uint64_t bytes, uint64_t chunks) = 0;
  // Addressable: memory into which the chunk's bytes may be written, which then counts as put(); fills codec, offset
  // and stored_bytes.
  virtual Result<std::span<std::byte>> place(SavedChunk& chunk);
  // Addressable: the chunk's bytes inside the tier's memory; empty if it is not there.
  virtual std::span<std::byte> view(const SavedChunk& chunk);
  // Stores the parts' bytes; fills codec, offset and stored_bytes of each chunk, whose other fields are final already.
  // The callers' memory is free when it returns. Each part has its own status. Default: copies through place().
  virtual void put(std::span<TierPart> parts);
  // Reads the parts' chunks into their bytes, decoded but not verified. Default: copies through view().
  virtual void get(std::span<TierPart> parts);
  // Which of the parts' chunks are there: ok or kNotFound. Default: kUnsupported.
  virtual void find(std::span<TierPart> parts);
  Status get_one(SavedChunk chunk, std::span<std::byte> bytes);
  // All that was put is as safe as this tier makes it (disk: written and synced).
  virtual Status finish() = 0;
};

}  // namespace torpor
