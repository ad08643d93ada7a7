// SPDX-License-Identifier: Apache-2.0
// RecordStore: a place below device memory where records are put and found again: pieces of regions, or KV blocks. The
// transfer engine moves their bytes there and back.
//
// Two kinds. One finds a place for each record itself, which the caller keeps (SavedChunk::offset, file): HostTier in
// the arena, DiskTier (a checkpoint's chunk file), RankWriter (a checkpoint that is being written). The other,
// SlotStore (offload/slot_store.h), has numbered slots: the caller says which, and the store knows what is in it.
//
// Each part of a batch has its own status: the failure of one never marks another.
//
// Threads: all methods but prepare() and finish() may be called from several threads at once, for different records.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"
#include "offload/block_key.h"
#include "offload/chunk.h"

namespace torpor {

struct StoreTraits {
  std::string_view kind;          // "host", "disk", "remote"
  bool in_memory = false;         // of this machine
  bool addressable = false;       // the same, as it was put: place() and view() show it
  bool durable = false;           // SlotStore: recover() and lease()
  bool shared = false;            // on another machine, and others fill it, too: get() and find() by key
  uint64_t record_bytes = 0;      // SlotStore: most bytes of one record
  int32_t slots_per_segment = 0;  // SlotStore: slots n * this and the following ones go together, and are used once;
                                  // 0: each slot by itself, again and again
};

// One record on its way into a store or out of it, with its bytes outside of the store, and what became of it.
struct RecordPart {
  SavedChunk* chunk = nullptr;
  std::span<std::byte> bytes{};  // chunk->bytes many; find() needs none
  Status status{};
  const BlockKey* key = nullptr;  // SlotStore: what a block was computed from; null: not known
};

class RecordStore {
 public:
  virtual ~RecordStore() = default;
  virtual const StoreTraits& traits() const = 0;

  // Make room for `chunks` chunks of `bytes` in all. kResourceExhausted before anything is written. Default: nothing.
  virtual Status prepare(uint64_t bytes, uint64_t chunks);
  // Addressable: return memory into which the chunk's bytes may be written, which then counts as put(); fill codec,
  // offset and stored_bytes.
  virtual Result<std::span<std::byte>> place(SavedChunk& chunk);
  // Addressable: return the chunk's bytes inside the store's memory; empty if it is not there.
  virtual std::span<std::byte> view(const SavedChunk& chunk);
  // Store the parts' bytes; fill codec, offset and stored_bytes of each chunk, whose other fields are final already.
  // The callers' memory is free when it returns. Default: copies through place().
  virtual void put(std::span<RecordPart> parts);
  // Read the parts' chunks into their bytes, decoded but not verified. Default: copies through view().
  virtual void get(std::span<RecordPart> parts);
  // Say which of the parts' chunks are there: ok or kNotFound. Default: kUnsupported.
  virtual void find(std::span<RecordPart> parts);
  Status get_one(SavedChunk chunk, std::span<std::byte> bytes);
  // End what prepare() began, when all was put: a file is whole and synced then. Default: nothing.
  virtual Status finish();
};

}  // namespace torpor
