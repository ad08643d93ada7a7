// SPDX-License-Identifier: Apache-2.0
// Store: one rank's bytes of one tier, in numbered slots, a block's share in each. Who may use which slot, and what
// goes first when it is full, the caller decides: a store does what it is told. Implementations: HostStore
// (host_store.h), SegmentStore (segment_store.h, on disk) and, on other machines, RespStore and MooncakeStore
// (remote/block_store.h); what every one must do: tests/contract/store_contract.h.
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

namespace torpor {

struct StoreTraits {
  std::string_view kind;          // "host", "disk", "remote"
  bool in_memory = false;         // of this machine
  bool addressable = false;       // the same, as it was put: place() and view() show it
  bool durable = false;           // recover() and lease()
  bool shared = false;            // on another machine, and others fill it, too: get() and find() by key
  uint64_t record_bytes = 0;      // most bytes of one record
  int32_t slots_per_segment = 0;  // slots n * this and the following ones go together, and are used once; 0: each slot
                                  // by itself, again and again
};

// What is stored in a slot.
struct StoredRecord {
  uint64_t bytes = 0;   // before encoding
  uint64_t stored = 0;  // after it
  Digest digest;        // of the bytes before encoding
  Codec codec = Codec::kNone;
  friend bool operator==(const StoredRecord&, const StoredRecord&) = default;
};

// One record on its way, and what became of it.
struct StorePart {
  StoreSlot slot = -1;
  BlockKey key;         // put; of a shared store also get and find
  StoredRecord record;  // put: the digest is the caller's, the store fills the rest; get: filled
  std::span<std::byte> bytes;
  Status status;
};

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

class Store {
 public:
  virtual ~Store() = default;
  virtual const StoreTraits& traits() const = 0;

  // Slots from here on were never used when the store was opened.
  virtual StoreSlot first_slot() const { return 0; }
  // Keys with this number belong to the key space with this digest from now on.
  virtual void open_space(uint32_t space, const Digest& digest) = 0;
  // False while it would be useless to put anything: a medium that fails is tried again after a while.
  virtual bool accepting() const { return true; }

  // Stores each part's bytes. The callers' memory is unchanged, and free when it returns.
  void put(std::span<StorePart> parts);
  // Reads each part's slot into its bytes (record.bytes many), decoded. Not verified: who copies the bytes on proves
  // them against record.digest, in the same pass. kNotFound: nothing is stored there (any more).
  void get(std::span<StorePart> parts);

  // Shared: ok where the key's block is there, else kNotFound. `bytes` are not needed.
  void find(std::span<StorePart> parts);

  // Addressable: memory for a record of this size. It is found from placed() on, when the copy into it is proven.
  virtual Result<std::span<std::byte>> place(StoreSlot slot, uint64_t bytes);
  virtual Status placed(StoreSlot slot, const BlockKey& key, const Digest& digest);
  // Addressable: the slot's memory as far as it was placed or put; empty: nothing is there.
  virtual std::span<std::byte> view(StoreSlot slot);

  // Nothing is found there any more. A segment whose slots all go gives its room back; of others the room is kept.
  virtual void drop(std::span<const SlotRange> ranges) = 0;
  // All that was put before is as safe as this store makes it. What cannot be made safe is dropped.
  virtual Status sync() = 0;

  // Durable: everything of this key space that can be believed, as put() had it. Bytes are proven when they are read,
  // so what was not synced may turn out damaged. What is of another key space is removed.
  virtual Result<std::vector<RecoveredSlot>> recover(uint32_t space);
  // Durable: keeps the records beyond drop() and beyond this process: the files that hold them appear in `into`.
  // kFailedPrecondition: one of them was not synced. The caller syncs `into`.
  virtual Result<std::vector<LeasedRecord>> lease(std::span<const StoreSlot> slots, Directory& into);

  virtual StoreHealth health() const = 0;

 protected:
  // Only parts whose status is good are to be touched.
  virtual void do_put(std::span<StorePart> parts) = 0;
  virtual void do_get(std::span<StorePart> parts) = 0;
  virtual void do_find(std::span<StorePart> parts);
  Error not_there(StoreSlot slot) const;
  Error wrong_size(const StorePart& part, uint64_t bytes) const;
  Error unsupported(std::string_view verb) const;
};

}  // namespace torpor
