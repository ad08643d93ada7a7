// SPDX-License-Identifier: Apache-2.0
// A store on another machine, in memory: what several engines put and find; it can be gone.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <tuple>

#include "offload/slot_store.h"

namespace torpor::test {

struct SharedBlocks {
  using Name = std::tuple<int32_t, uint32_t, std::array<uint8_t, 32>, std::array<uint8_t, 16>>;
  std::mutex mutex;
  std::map<Name, std::pair<Digest, std::vector<std::byte>>> blocks;
  bool gone = false;
  bool refusing = false;  // what engines are told of it: not asked for a while
};

class SharedStore final : public SlotStore {
 public:
  SharedStore(SharedBlocks& blocks, int32_t rank, uint64_t record_bytes)
      : traits_{.kind = "remote", .shared = true, .record_bytes = record_bytes}, shared_(blocks), rank_(rank) {}
  const StoreTraits& traits() const override { return traits_; }
  void open_space(uint32_t space, const Digest& digest) override { spaces_[space] = digest; }
  bool accepting() const override {
    const std::lock_guard lock(shared_.mutex);
    return !shared_.refusing;
  }
  void drop(std::span<const SlotRange>) override {}
  Status sync() override { return ok(); }
  StoreHealth health() const override { return {.io = "memory"}; }

 private:
  Status with(const RecordPart& part, const std::function<Status(SharedBlocks::Name)>& work) {
    const std::lock_guard lock(shared_.mutex);
    if (shared_.gone) return Error{.code = Code::kUnavailable, .what = "gone"};
    return work({rank_, key_of(part).group, key_of(part).hash, spaces_.at(key_of(part).space).bytes});
  }
  void do_put(std::span<RecordPart> parts) override {
    for (RecordPart& part : parts) {
      part.status = with(part, [&](const SharedBlocks::Name& name) {
        shared_.blocks.try_emplace(name, part.chunk->digest, std::vector(part.bytes.begin(), part.bytes.end()));
        return ok();
      });
    }
  }
  void do_get(std::span<RecordPart> parts) override {
    for (RecordPart& part : parts) {
      part.status = with(part, [&](const SharedBlocks::Name& name) -> Status {
        const auto found = shared_.blocks.find(name);
        if (found == shared_.blocks.end()) return not_there(slot_of(part));
        describe(part, {.bytes = part.bytes.size(), .stored = part.bytes.size(), .digest = found->second.first});
        std::copy(found->second.second.begin(), found->second.second.end(), part.bytes.begin());
        return ok();
      });
    }
  }
  void do_find(std::span<RecordPart> parts) override {
    for (RecordPart& part : parts) {
      part.status = with(part, [&](const SharedBlocks::Name& name) {
        return shared_.blocks.contains(name) ? ok() : Status(not_there(slot_of(part)));
      });
    }
  }

  const StoreTraits traits_;
  SharedBlocks& shared_;
  const int32_t rank_;
  std::map<uint32_t, Digest> spaces_;
};

}  // namespace torpor::test
