// SPDX-License-Identifier: Apache-2.0
// SlotStore: a RecordStore of numbered slots; each holds one rank's share of a KV block. The caller decides which slot
// is used for what, and which blocks to drop when the store is full; the store knows its content. SavedChunk::offset is
// the slot. Implementations: HostStore (host_store.h), SegmentStore (segment_store.h, on disk), and on other machines
// RespStore, MooncakeStore and ObjectBlockStore (remote/block_store.h). tests/contract/store_contract.h has the
// contract of all.
//
// put(), get() and sync() block until their batch is done. A transfer lane calls them, bounds and orders what is under
// way, and so makes them asynchronous: callbacks would give each store a queue and threads of its own for the same
// purpose.
//
// Failure: each part of a batch has its own status: a failed part marks no other. Nothing throws.
//
// Threads: all methods from any thread, several at once for different slots; recover() before the others. A record that
// is dropped during a read is read whole, or not found.
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

// The content of a slot.
struct StoredRecord {
  uint64_t bytes = 0;   // before encoding
  uint64_t stored = 0;  // after it
  Digest digest;        // of the bytes before encoding
  Codec codec = Codec::kNone;
  friend bool operator==(const StoredRecord&, const StoredRecord&) = default;
};

inline StoreSlot slot_of(const RecordPart& part) { return static_cast<StoreSlot>(part.chunk->offset); }
// Return the part's key; a key with space 0 if the part has none.
const BlockKey& key_of(const RecordPart& part);
// Copy `record` into the part's chunk: size, digest, codec, stored size.
void describe(RecordPart& part, const StoredRecord& record);
// Return the error of a slot without content; `kind`: of its store (StoreTraits).
Error no_content(std::string_view kind, StoreSlot slot);

struct SlotRange {
  StoreSlot first = 0;
  int32_t count = 1;
};

struct RecoveredSlot {
  StoreSlot slot = -1;
  BlockKey key;
  StoredRecord record;
};

// The location of a leased record.
struct LeasedRecord {
  StoreSlot slot = -1;
  std::string file;  // name in the directory of the lease
  SealId id{};       // of that file
  uint64_t offset = 0;
  StoredRecord record;
  SealTag seal{};
};

struct StoreHealth {
  std::string io;                // File::io(), or "memory"
  bool degraded = false;         // the last write failed
  std::string reason;            // of the last failure
  uint64_t held_bytes = 0;       // of the medium, reserved or in use
  uint64_t put_bytes = 0;        // as stored
  uint64_t got_bytes = 0;        // as stored
  uint64_t recovered_bytes = 0;  // found and accepted at the start, as stored
  uint64_t dropped_bytes = 0;    // as stored
  uint64_t copied_bytes = 0;     // by leases, if links are refused
  uint64_t write_errors = 0;     // failed parts
  uint64_t read_errors = 0;      // failed parts
  uint64_t sync_errors = 0;
};

class SlotStore : public RecordStore {
 public:
  // Return a slot; neither it nor any later slot had been used when the store was opened.
  virtual StoreSlot first_slot() const { return 0; }
  // Open the namespace with this digest: from now on, keys whose `space` is this number belong to it.
  virtual void open_space(uint32_t space, const Digest& digest) = 0;
  // Return false while puts would fail: after a failure the medium is tried again after a while.
  virtual bool accepting() const { return true; }

  // Store each part's bytes in its slot, under its key. The caller sets the chunk's digest; this sets its other fields.
  // The caller's memory is unchanged and may be reused on return. kInvalidArgument: a negative slot, or a wrong size.
  void put(std::span<RecordPart> parts) final;
  // Read each part's slot into its bytes, decoded; set the chunk. The size must be that of put(). The bytes are not
  // verified: the thread that copies them on checks the digest in the same pass. kNotFound if the slot has no content.
  void get(std::span<RecordPart> parts) final;
  // Shared stores: set each part's status: ok if the store has the key's block, else kNotFound. Ignores `bytes`.
  void find(std::span<RecordPart> parts) final;

  // Addressable: return the slot's memory for a record of chunk.bytes. get() finds the record after placed(), which the
  // caller calls once the copy into the memory is proven.
  Result<std::span<std::byte>> place(SavedChunk& chunk) override;
  virtual Status placed(StoreSlot slot, const Digest& digest);
  // Addressable: return the slot's memory, as many bytes as were placed or put; empty if there is no content.
  std::span<std::byte> view(const SavedChunk& chunk) override;

  // Remove the content of the slots. A segment frees its disk space once all its slots are dropped.
  virtual void drop(std::span<const SlotRange> ranges) = 0;
  // Make everything that was put before as durable as this store can. Drop what cannot be made durable.
  virtual Status sync() = 0;

  // Durable: return all records of the namespace that can be accepted, as they were put. Bytes are verified when they
  // are read, so a record that was not synced may turn out damaged. Remove records of other namespaces.
  virtual Result<std::vector<RecoveredSlot>> recover(uint32_t space);
  // Durable: keep the records beyond drop() and beyond this process: their files appear in `into`, which the caller
  // syncs. kFailedPrecondition if a record was not synced; kNotFound if a slot has no content.
  virtual Result<std::vector<LeasedRecord>> lease(std::span<const StoreSlot> slots, Directory& into);

  virtual StoreHealth health() const = 0;

 protected:
  // Implementations leave out parts whose status is an error.
  virtual void do_put(std::span<RecordPart> parts) = 0;
  virtual void do_get(std::span<RecordPart> parts) = 0;
  virtual void do_find(std::span<RecordPart> parts);
  Error not_there(StoreSlot slot) const { return no_content(traits().kind, slot); }
  Error wrong_size(const RecordPart& part, uint64_t bytes) const;
  Error unsupported(std::string_view verb) const;
};

}  // namespace torpor
