// SPDX-License-Identifier: Apache-2.0
// RecordStore: stores records below device memory: pieces of regions, or KV blocks. The transfer engine moves their
// bytes.
//
// There are two kinds. One allocates space for each record itself, and the caller keeps where (SavedChunk::offset,
// file): HostTier in the arena, DiskTier in a checkpoint's chunk file, RankWriter in a checkpoint that is being
// written. The other, SlotStore (offload/slot_store.h), has numbered slots: the caller names the slot, and the store
// knows its content.
//
// Each part of a batch has its own status: a failed part marks no other.
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
  std::string_view kind;      // "host", "disk", "remote"
  bool in_memory = false;     // in memory of this machine
  bool addressable = false;   // in memory, unencoded: place() and view() return it
  bool temporary = false;     // a file that ends with this process
  bool durable = false;       // SlotStore: has recover() and lease()
  bool shared = false;        // on another machine, filled by others too: get() and find() use the key
  uint64_t record_bytes = 0;  // SlotStore: largest size of one record
  // SlotStore: slots [n * this, (n + 1) * this) form a segment; they are dropped together and used once. 0: each slot
  // stands alone and is reused.
  int32_t slots_per_segment = 0;
  uint64_t bytes_per_put = 0;  // each put() costs as much as so many bytes, so it gets as many at once. 0: it is cheap
};

// The next step after damage of a store that ends with this process.
inline constexpr const char* kLoadAgain = "its content is lost: load it again, or wake a checkpoint";

// One record that enters or leaves a store, with its bytes outside of the store, and its status.
struct RecordPart {
  SavedChunk* chunk = nullptr;
  std::span<std::byte> bytes{};  // chunk->bytes bytes; not used by find()
  Status status{};
  const BlockKey* key = nullptr;  // SlotStore: the block's key; null: unknown
};

class RecordStore {
 public:
  virtual ~RecordStore() = default;
  virtual const StoreTraits& traits() const = 0;

  // Reserve space for `chunks` chunks of `bytes` bytes in all. kResourceExhausted before anything is written. Default:
  // nothing.
  virtual Status prepare(uint64_t bytes, uint64_t chunks);
  // Addressable: allocate memory for the chunk and return it; bytes written there count as put(). Set codec, offset and
  // stored_bytes.
  virtual Result<std::span<std::byte>> place(SavedChunk& chunk);
  // Addressable: return the chunk's bytes in the store's memory; empty if the store does not have it.
  virtual std::span<std::byte> view(const SavedChunk& chunk);
  // Store the parts' bytes; set codec, offset and stored_bytes of each chunk. The caller has set the other fields. The
  // caller may reuse its memory on return. Default: copies through place().
  virtual void put(std::span<RecordPart> parts);
  // Read the parts' chunks into their bytes; decoded, not verified. Default: copies through view().
  virtual void get(std::span<RecordPart> parts);
  // Set each part's status: ok if the store has the chunk, else kNotFound. Default: kUnsupported.
  virtual void find(std::span<RecordPart> parts);
  Status get_one(SavedChunk chunk, std::span<std::byte> bytes);
  // End what prepare() began, after the last put(): a file is then complete and synced. Default: nothing.
  virtual Status finish();
};

}  // namespace torpor
