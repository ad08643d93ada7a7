// SPDX-License-Identifier: Apache-2.0
// ImageEngine: an engine of two ranks that consists of KV blocks and images of requests only. Each block's bytes all
// have one value.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "allocator/host_device.h"
#include "base/units.h"
#include "engine/rank_memory.h"
#include "engine/rank_service.h"
#include "engine/reference/idle_hooks.h"
#include "engine/stored_images.h"
#include "tests/support/results.h"
#include "tests/support/running_request.h"

namespace torpor::test {

class ImageEngine final : public IdleHooks {
 public:
  static constexpr uint32_t kBlocks = 16;
  static constexpr uint64_t kBlockBytes = 6000;
  static constexpr int32_t kBlockTokens = 4;

  ImageEngine(FileSystem& file_system, const std::string& directory, CheckpointManagerOptions options = {})
      : images(*this), stored(*this, images, file_system, directory, options) {
    for (int32_t rank = 0; rank < 2; ++rank) {
      Rank& made = ranks_[rank];
      made.memory = value_of(RankMemory::create(
          value_of(make_host_device()), file_system,
          {.rank = rank, .arena_slab_bytes = 64 * kKiB, .threads = 1, .key = options.key, .encrypt = options.encrypt}));
      made.kv = value_of(made.memory->allocate("kv_cache", "kv", kBlocks * kBlockBytes));
      const KvTensor tensor{
          .address = made.kv, .layers = 1, .layer_stride = 1, .block_stride = kBlockBytes, .block_bytes = kBlockBytes};
      EXPECT_SUCCEEDS(made.memory->set_kv_layout("kv_cache", {.num_blocks = kBlocks, .tensors = {tensor}}));
    }
  }

  void write(int32_t block, int value) {
    for (int rank = 0; rank < 2; ++rank) std::memset(place(rank, block), value + rank, kBlockBytes);
  }
  bool holds(int32_t block, int value) {
    for (int rank = 0; rank < 2; ++rank) {
      const std::byte* const begin = place(rank, block);
      const auto wanted = static_cast<std::byte>(value + rank);
      if (!std::all_of(begin, begin + kBlockBytes, [&](std::byte byte) { return byte == wanted; })) return false;
    }
    return true;
  }
  uint64_t used() {  // bytes of host memory on both ranks
    uint64_t bytes = 0;
    for (Rank& rank : ranks_) bytes += rank.memory->ledger().arena_used_bytes;
    return bytes;
  }

  // Extract requests r1 and r2, which share block 3 and have one block more each. The bytes of each block are ten times
  // its number.
  Result<const RequestImages::Image*> extract(const std::string& id) {
    for (const int32_t block : {3, 7, 9}) write(block, 10 * block);
    return images.extract(id, {running_request("r1", 8), running_request("r2", 5)}, {{3, 7}, {3, 9}}, kBlockTokens);
  }
  static Fingerprint fields() { return {{"model", "m"}}; }
  // Read a stored image, of this engine or of another, from disk into host memory, without requests that have ended.
  Result<const RequestImages::Image*> open(const std::string& path) {
    TORPOR_ASSIGN_OR_RETURN(const StoredImages::Opened opened, stored.open(path));
    const std::string id = opened.image->name();
    const CapturedState& state = opened.state.state;
    std::vector<RequestState> requests;
    std::vector<std::vector<int32_t>> tables;
    for (size_t i = 0; i < state.scheduler.requests.size(); ++i) {
      if (opened.image->ended().contains(static_cast<int32_t>(i))) continue;
      requests.push_back(state.scheduler.requests[i]);
      tables.push_back(state.kv.groups.at(0).tables.at(i).blocks);
    }
    const Manifest& manifest = opened.image->checkpoint().manifest();
    Result<const RequestImages::Image*> read = images.read(
        id, std::move(requests), std::move(tables), kBlockTokens,
        {.directory = opened.image->checkpoint().path(), .generation = manifest.generation, .id = manifest.id});
    if (read) return read;
    const Error error = stored.meaning_of(id, std::move(read).error());
    stored.put_back(id);
    return error;
  }
  // Admit the requests of an image that is in host memory into blocks 1, 2 and so on. Return whether their bytes are
  // those of extract().
  bool brings(const std::string& id) {
    EXPECT_SUCCEEDS(images.begin(id));
    std::vector<std::string> names;
    for (const RequestImages::Request& each : value_of(images.get(id))->requests) names.push_back(each.state.id);
    for (const std::string& name : names) {
      for (const int32_t block : {1, 2}) write(block, 200);
      const Bytes order = value_of(images.admit_order(name, {1, 2}));
      for (const Bytes& reply : value_of(call_ranks(order))) {
        if (!decode_reply<orders::Admit>(reply)) return false;
      }
      if (!holds(1, 30) || !holds(2, name == "r1" ? 70 : 90)) return false;
    }
    for (const std::string& name : names) {
      if (const std::optional<Bytes> drop = images.release(name)) {
        EXPECT_SUCCEEDS(call_ranks(*drop));
      }
    }
    return true;
  }

  std::string fails{};  // name of an order that the second rank fails

  Result<std::vector<Bytes>> call_ranks(const Bytes& order) override {
    std::vector<Bytes> replies;
    for (int rank = 0; rank < 2; ++rank) {
      if (rank == 1 && order_name(order) == fails) {
        replies.push_back(encode_error({.code = Code::kDevice, .what = "planted"}));
      } else {
        replies.push_back(RankService(*ranks_[rank].memory).call(order));
      }
    }
    return replies;
  }
  Result<Fingerprint> fingerprint() override { return fields(); }

 private:
  struct Rank {
    std::unique_ptr<RankMemory> memory{};
    DeviceAddress kv = 0;
  };
  std::byte* place(int rank, int32_t block) {
    return reinterpret_cast<std::byte*>(ranks_[rank].kv + static_cast<uint64_t>(block) * kBlockBytes);  // NOLINT
  }

  Rank ranks_[2];

 public:
  RequestImages images;
  StoredImages stored;
};

}  // namespace torpor::test
