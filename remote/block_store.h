// SPDX-License-Identifier: Apache-2.0
// BlockStore: the common part of stores of KV blocks on other machines (RespStore, MooncakeStore, ObjectBlockStore),
// which engines share.
//
// Each block has a key that names its namespace, rank, group and hash (remote/block_frame.h): engines with other
// weights, layouts or ranks never meet. Blocks are created and never changed; the server evicts blocks when it is full.
// A block that is read is compared with its key and its digest, whoever wrote it; a damaged one is removed from the
// server. (ObjectBlockStore has packs of many blocks: it removes old packs, and a process only forgets a damaged
// block.)
//
// Slots mean nothing to the server. The store knows the slots that were put in this process, for get() without a key
// and for drop(). get() with a key (whose space is not 0) reads the key's block. After a server was full, nothing is
// put for a second.
//
// Threads: all methods from any thread.
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
  std::shared_ptr<const Key> key;                         // null: digests detect accidents, not attackers
  bool encrypt = false;                                   // false: blocks with a key are authenticated only
  CompressionOptions compression{.codec = Codec::kNone};  // for put(); get() reads any codec
  std::string io;
  Status validate() const;

  // Return what the options of a store have in common with those of the other stores.
  template <class StoreOptions>
  static BlockStoreOptions of(const StoreOptions& options, std::string name, std::string io) {
    return {.name = std::move(name),
            .rank = options.rank,
            .slots = options.slots,
            .record_bytes = options.record_bytes,
            .key = options.key,
            .encrypt = options.encrypt,
            .compression = options.compression,
            .io = std::move(io)};
  }
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
    std::span<const std::byte> body{};  // kPut
    bool damaged = false;               // kRemove: a concurrent reader gets nothing
    std::string node{};                 // the node to ask next; empty: the one that has the key
    bool asking = false;                // the node answered ASK: valid for the next request only
    bool over = false;
    Status status{};
  };

  // `clock` outlives this object.
  BlockStore(BlockStoreOptions options, const Clock& clock, uint64_t bytes_per_put = 0);
  // Run `verb` for all items with the server. Set the status of each.
  virtual void exchange(std::span<Item> items, Verb verb) = 0;

  // Decode the frame `head` of a value that has `stored` bytes behind it, and compare the frame with `expected`.
  // kCorruption, kIncompatible.
  static Result<BlockFrame> frame_of(const FrameBytes& head, uint64_t stored, const BlockFrame& expected);
  // Open, decode and verify the bytes behind the frame into the item's part. `room` has these bytes; it may be the
  // part's memory.
  Status open_value(const Item& item, const BlockFrame& frame, const FrameBytes& head, std::span<std::byte> room) const;
  void no_room();                                        // the server takes none: puts nothing for a while
  std::optional<Digest> space_of(uint32_t space) const;  // with a key, salted

  static Error unavailable(std::string what);
  static Error missing();
  static Error damaged(std::string_view what);

  const Clock& clock_;

 private:
  using Encoded = std::vector<std::vector<std::byte>>;  // bytes that are sent in another form than the caller's
  struct Known {                                        // a slot's block
    BlockKey key;
    Digest space;
    StoredRecord record;
  };

  void do_put(std::span<RecordPart> parts) override;
  void do_get(std::span<RecordPart> parts) override;
  void do_find(std::span<RecordPart> parts) override;
  Status address(RecordPart& part, Item& item) const;
  void compress(Item& item, std::vector<std::byte>& scratch, Encoded& encoded) const;
  void seal(Item& item, Encoded& encoded);
  static Status verify(const BlockFrame& frame, const BlockFrame& expected);
  void remove_damaged(std::span<Item> items);
  void note(const Error& error, bool write);

  const BlockStoreOptions options_;
  const StoreTraits traits_;
  const SealId seal_id_;
  const Digest space_salt_;  // from the key: stores with another key use other namespaces
  std::atomic<uint64_t> sealed_ = 0;
  mutable Mutex mutex_;  // not held during a call to the server
  std::map<uint32_t, Digest> spaces_ TORPOR_GUARDED_BY(mutex_);
  std::unordered_map<StoreSlot, Known> known_ TORPOR_GUARDED_BY(mutex_);
  std::chrono::nanoseconds full_until_ TORPOR_GUARDED_BY(mutex_){};
  StoreHealth health_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace torpor::remote
