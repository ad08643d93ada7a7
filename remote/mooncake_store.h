// SPDX-License-Identifier: Apache-2.0
// MooncakeStore: KV blocks in a Mooncake store that engines share (remote/block_store.h), through a MooncakeClient.
//
// Answers of Mooncake are trusted only if they prove something. A 0 from put proves nothing: after a writer died before
// its end, puts of that key "succeed" for half a minute, and the key cannot be read. So put() looks each block up
// afterwards; a block that is missing was not stored. A master that restarts has lost all keys: these are misses, not
// errors.
//
// Calls hang for seconds if a node or the master is gone (remote/mooncake_calls.h). No call is repeated; after a few
// failed calls in a row the store is not asked for a while (remote/breaker.h).
//
// Threads: all methods from any thread.
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
  std::shared_ptr<const Key> key;  // this and the next two: as in BlockStoreOptions
  bool encrypt = false;
  CompressionOptions compression{.codec = Codec::kNone};
  std::chrono::milliseconds timeout{2000};  // for each call
  int threads = 4;
  BreakerOptions breaker{};
};

class MooncakeStore final : public BlockStore {
 public:
  // Connects with the first call, not here. kInvalidArgument: invalid options. `clock` outlives the result.
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
