// SPDX-License-Identifier: Apache-2.0
// MooncakeStore: KV blocks in a Mooncake store that engines share (remote/block_store.h). It is asked through a
// MooncakeClient.
//
// What Mooncake answers is believed as far as it proves something. A 0 from put does not: a writer that died before its
// end leaves a key that others put "successfully" for half a minute, and nobody can read. So each block is asked for
// when it was put, and what is not there was not stored. A master that is gone has lost all keys: misses, no errors.
//
// Calls hang for seconds where a node or the master is gone: remote/mooncake_calls.h. Nothing is repeated; after a few
// calls in a row that came to nothing, the store is not asked for a while (remote/breaker.h).
//
// Threads: all methods from any.
#pragma once

#include "remote/block_store.h"
#include "remote/breaker.h"
#include "remote/mooncake_calls.h"

namespace torpor::remote {

struct MooncakeStoreOptions {
  std::string name;  // begins every key
  std::string io = "tcp";
  int32_t rank = 0;
  int32_t slots = 0;
  uint64_t record_bytes = 0;
  std::shared_ptr<const Key> key;  // and the two below: see BlockStoreOptions
  bool encrypt = false;
  CompressionOptions compression{.codec = Codec::kNone};
  std::chrono::milliseconds timeout{2000};  // of a call
  int threads = 4;
  BreakerOptions breaker{};
};

class MooncakeStore final : public BlockStore {
 public:
  // Asks nothing yet: the first call connects. kInvalidArgument. `clock` outlives it.
  static Result<std::unique_ptr<MooncakeStore>> open(const MooncakeStoreOptions& options, MooncakeConnect connect,
                                                     const Clock& clock);
  bool accepting() const override { return breaker_.closed_or_due(); }

 private:
  MooncakeStore(const MooncakeStoreOptions& options, MooncakeConnect connect, const Clock& clock);
  void exchange(std::span<Item> items, Verb verb) override;
  size_t as_many_as_fit(std::span<const Item> items, Verb verb) const;
  Status ask(std::span<Item> items, Verb verb, Deadline until, bool& answered);
  void end(Item& item, Verb verb, int64_t answer, std::span<std::byte> room, bool& answered);
  void end_value(Item& item, int64_t length, std::span<std::byte> room) const;

  const std::chrono::milliseconds timeout_;
  const uint64_t room_bytes_;
  Breaker breaker_;
  MooncakeCalls calls_;
};

}  // namespace torpor::remote
