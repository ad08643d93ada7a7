// SPDX-License-Identifier: Apache-2.0
// BlockStore: what all stores of KV blocks on other machines have in common, whatever they speak with them (RespStore,
// MooncakeStore): what one engine computed, another finds.
//
// A block is a value of its own, under a key that names its namespace, rank, group and hash (remote/block_frame.h):
// engines with other weights, layouts or ranks never meet. Blocks are created, never changed; the server forgets what
// it has no room for. What comes back is compared with what it should be, and with its digest, whoever wrote it; what
// is damaged is removed there.
//
// Slots mean nothing to it: it knows those that were put here, for get() without a key and for drop(). get() with a key
// (of a space that is not 0) asks for the key's block. A server without room gets nothing for a second.
//
// Threads: all methods from any.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/seal.h"
#include "offload/slot_store.h"
#include "remote/block_frame.h"

namespace torpor::remote {

struct BlockStoreOptions {
  std::string name;  // begins every key
  int32_t rank = 0;
  int32_t slots = 0;
  uint64_t record_bytes = 0;
  std::shared_ptr<const Key> key;                         // null: digests find accidents, they stop no attacker
  bool encrypt = false;                                   // else blocks with a key are authenticated
  CompressionOptions compression{.codec = Codec::kNone};  // of what is put; what is there is read whatever it has
  std::string io;
  Status validate() const;
};

class BlockStore : public SlotStore {
 public:
  const StoreTraits& traits() const override { return traits_; }
  void open_space(uint32_t space, const Digest& digest) override;
  void drop(std::span<const SlotRange> ranges) override;
  Status sync() override { return ok(); }
  StoreHealth health() const override;

 protected:
  enum class Verb : uint8_t { kPut, kGet, kFind, kRemove };
  struct Item {
    RecordPart* part = nullptr;
    std::string key;
    BlockFrame expected{};
    FrameBytes head{};                  // kPut
    std::span<const std::byte> body{};  // the same
    bool damaged = false;               // kRemove: whoever reads it now gets nothing
    std::string node{};                 // that is asked next; empty: whoever has it
    bool asking = false;                // it was said to be there, for this once
    bool over = false;
    Status status{};
  };

  // `clock` outlives it.
  BlockStore(BlockStoreOptions options, const Clock& clock);
  // Does it with the server; each item ends with a status.
  virtual void exchange(std::span<Item> items, Verb verb) = 0;

  // What a value says of itself, where it is what was asked for. kCorruption, kIncompatible.
  static Result<BlockFrame> frame_of(const FrameBytes& head, uint64_t stored, const BlockFrame& expected);
  // What is behind it, opened and decoded into the item's part, and compared with its digest. `room` may be the part's.
  Status open_value(const Item& item, const BlockFrame& frame, const FrameBytes& head, std::span<std::byte> room) const;
  void no_room();  // nothing is put there for a while

  static Error unavailable(std::string what);
  static Error missing();
  static Error damaged(std::string_view what);

  const Clock& clock_;

 private:
  using Encoded = std::vector<std::vector<std::byte>>;  // what is sent in another form than it was given in
  struct Known {                                        // of a slot
    BlockKey key;
    Digest space;
    StoredRecord record;
  };

  void do_put(std::span<RecordPart> parts) override;
  void do_get(std::span<RecordPart> parts) override;
  void do_find(std::span<RecordPart> parts) override;
  std::optional<Digest> space_of(uint32_t space) const;
  Status address(RecordPart& part, Item& item) const;
  void compress(Item& item, std::vector<std::byte>& scratch, Encoded& encoded) const;
  void seal(Item& item, Encoded& encoded);
  static Status verify(const BlockFrame& frame, const BlockFrame& expected);
  void remove_damaged(std::span<Item> items);
  void note(const Error& error, bool write);

  const BlockStoreOptions options_;
  const StoreTraits traits_;
  const SealId seal_id_;
  const Digest space_salt_;  // of the key: who has another one has other namespaces
  std::atomic<uint64_t> sealed_ = 0;
  mutable Mutex mutex_;  // never held over a call of the server
  std::map<uint32_t, Digest> spaces_ TORPOR_GUARDED_BY(mutex_);
  std::unordered_map<StoreSlot, Known> known_ TORPOR_GUARDED_BY(mutex_);
  std::chrono::nanoseconds full_until_ TORPOR_GUARDED_BY(mutex_){};
  StoreHealth health_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace torpor::remote
