// SPDX-License-Identifier: Apache-2.0
// SlotStore: a RecordStore of numbered slots: one rank's share of a KV block in each. Who may use which slot, and what
// goes first when it is full, the caller decides: a store does what it is told, and knows what it has. A record's slot
// stands in SavedChunk::offset. Implementations: HostStore (host_store.h), SegmentStore (segment_store.h, on disk) and,
// on other machines, RespStore and MooncakeStore (remote/block_store.h); what every one must do:
// tests/contract/store_contract.h.
//
// put(), get() and sync() return when their batch is over. A transfer lane calls them, and the lane is what makes them
// asynchronous: it bounds what is under way, orders it and knows when it is over. Callbacks would give each store a
// queue and threads of its own for the same.
//
// A batch's parts end one by one: the failure of one never marks another. Nothing throws.
//
// Threads: all methods from any, several at once for different slots; recover() before the others. What is dropped
// while somebody reads it is read whole or not found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/digest.h"
#include "base/file_system.h"
#include "base/seal.h"
#include "base/status.h"
#include "offload/block_key.h"
#include "offload/codec.h"
#include "offload/record_store.h"

namespace torpor {

// What is stored in a slot.
struct StoredRecord {
  uint64_t bytes = 0;   // before encoding
  uint64_t stored = 0;  // after it
  Digest digest;        // of the bytes before encoding
  Codec codec = Codec::kNone;
  friend bool operator==(const StoredRecord&, const StoredRecord&) = default;
};

inline StoreSlot slot_of(const RecordPart& part) { return static_cast<StoreSlot>(part.chunk->offset); }
// Return what the part's block was computed from; of space 0: that is not known.
const BlockKey& key_of(const RecordPart& part);
// Say in the part's chunk what is stored in its slot.
void describe(RecordPart& part, const StoredRecord& record);

struct SlotRange {
  StoreSlot first = 0;
  int32_t count = 1;
};

struct RecoveredSlot {
  StoreSlot slot = -1;
  BlockKey key;
  StoredRecord record;
};

// Where a leased record lies.
struct LeasedRecord {
  StoreSlot slot = -1;
  std::string file;  // name in the directory that it was leased into
  SealId id{};       // of that file
  uint64_t offset = 0;
  StoredRecord record;
  SealTag seal{};
};

struct StoreHealth {
  std::string io;                // how bytes go: File::io(); "memory"
  bool degraded = false;         // the last write failed
  std::string reason;            // the last failure
  uint64_t held_bytes = 0;       // of the medium, reserved or in use
  uint64_t put_bytes = 0;        // as stored
  uint64_t got_bytes = 0;        // as stored
  uint64_t recovered_bytes = 0;  // found at the start and believed, as stored
  uint64_t dropped_bytes = 0;    // as stored
  uint64_t copied_bytes = 0;     // by leases where links are refused
  uint64_t write_errors = 0;     // parts
  uint64_t read_errors = 0;      // parts
  uint64_t sync_errors = 0;
};

class SlotStore : public RecordStore {
 public:
  // Slots from here on were never used when the store was opened.
  virtual StoreSlot first_slot() const { return 0; }
  // Keys with this number belong to the namespace with this digest from now on.
  virtual void open_space(uint32_t space, const Digest& digest) = 0;
  // False while it would be useless to put anything: a medium that fails is tried again after a while.
  virtual bool accepting() const { return true; }

  // Store each part's bytes in its slot, under its key. The digest is the caller's; the rest of the chunk is filled.
  // The callers' memory is unchanged, and free when it returns.
  void put(std::span<RecordPart> parts) final;
  // Read each part's slot into its bytes (as many as were put), decoded; fill the chunk. Not verified: who copies the
  // bytes on proves them against the digest, in the same pass. kNotFound: nothing is stored there (any more).
  void get(std::span<RecordPart> parts) final;
  // Shared: ok where the key's block is there, else kNotFound. `bytes` are not needed.
  void find(std::span<RecordPart> parts) final;

  // Addressable: memory for a record of chunk.bytes. It is found from placed() on, when the copy into it is proven.
  Result<std::span<std::byte>> place(SavedChunk& chunk) override;
  virtual Status placed(StoreSlot slot, const Digest& digest);
  // Addressable: the slot's memory as far as it was placed or put; empty: nothing is there.
  std::span<std::byte> view(const SavedChunk& chunk) override;

  // Nothing is found there any more. A segment whose slots all go gives its room back; of others the room is kept.
  virtual void drop(std::span<const SlotRange> ranges) = 0;
  // All that was put before is as safe as this store makes it. What cannot be made safe is dropped.
  virtual Status sync() = 0;

  // Durable: everything of this namespace that can be believed, as put() had it. Bytes are proven when they are read,
  // so what was not synced may turn out damaged. What is of another namespace is removed.
  virtual Result<std::vector<RecoveredSlot>> recover(uint32_t space);
  // Durable: keeps the records beyond drop() and beyond this process: the files that hold them appear in `into`.
  // kFailedPrecondition: one of them was not synced. The caller syncs `into`.
  virtual Result<std::vector<LeasedRecord>> lease(std::span<const StoreSlot> slots, Directory& into);

  virtual StoreHealth health() const = 0;

 protected:
  // Only parts whose status is good are to be touched.
  virtual void do_put(std::span<RecordPart> parts) = 0;
  virtual void do_get(std::span<RecordPart> parts) = 0;
  virtual void do_find(std::span<RecordPart> parts);
  Error not_there(StoreSlot slot) const;
  Error wrong_size(const RecordPart& part, uint64_t bytes) const;
  Error unsupported(std::string_view verb) const;
};

}  // namespace torpor
