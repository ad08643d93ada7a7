// SPDX-License-Identifier: Apache-2.0
// One rank as offloading sees it: a device with KV blocks whose layers lie apart, stores, and the worker over them.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "allocator/host_device.h"
#include "base/units.h"
#include "kvcache/offload_worker.h"
#include "offload/host_store.h"
#include "offload/segment_store.h"
#include "tests/kvcache/shared_store.h"
#include "tests/support/faulty_device.h"
#include "tests/support/manual_clock.h"
#include "tests/support/results.h"

namespace torpor::test {

struct OffloadRankOptions {
  int32_t rank = 0;
  int32_t blocks = 16;
  int32_t host_slots = 8;
  Codec host_codec = Codec::kNone;
  int32_t disk_segments = 0;
  int32_t segment_slots = 0;
  std::string directory;  // of the store on disk
  int32_t remote_slots = 0;
  SharedBlocks* remote = nullptr;
  bool late_copies = false;
  bool own_threads = true;
  FileSystem* files = &linux_file_system();
};

class OffloadRank {
 public:
  static constexpr uint64_t kPieceBytes = 1024;
  static constexpr uint32_t kLayers = 3;
  static constexpr uint64_t kBlockBytes = kPieceBytes * kLayers;

  explicit OffloadRank(OffloadRankOptions options) : options_(std::move(options)) {
    device_ = std::make_unique<FaultyDevice>(value_of(make_host_device({.defer_copies = options_.late_copies})));
    const auto blocks = static_cast<uint64_t>(options_.blocks);
    bytes_ = align_up(kLayers * blocks * kPieceBytes, device_->granularity());
    address_ = value_of(device_->reserve(bytes_));
    memory_ = value_of(device_->create(bytes_));
    EXPECT_SUCCEEDS(device_->map(address_, memory_));
    EXPECT_SUCCEEDS(device_->set_access(address_, bytes_, Access::kReadWrite));
    layout_ = {.num_blocks = static_cast<uint32_t>(options_.blocks),
               .tensors = {{.address = address_,
                            .layers = kLayers,
                            .layer_stride = blocks * kPieceBytes,
                            .block_stride = kPieceBytes,
                            .block_bytes = kPieceBytes}}};
    arena_ = value_of(HostArena::create({.slab_bytes = 1 * kMiB}));
    transfers_ =
        value_of(TransferEngine::create(*device_, *arena_, {.threads = 2, .own_threads = options_.own_threads}));
    open();
  }
  ~OffloadRank() {
    device_->fail_at(0);
    device_->drain_as(Drain::kCompleted);
    worker_.reset();
    const bool lost = transfers_->quarantined();
    transfers_.reset();
    if (lost) return;  // its memory may still be written
    EXPECT_SUCCEEDS(device_->unmap(address_, bytes_));
    EXPECT_SUCCEEDS(device_->release(memory_));
    EXPECT_SUCCEEDS(device_->free_reservation(address_));
  }
  OffloadRank(const OffloadRank&) = delete;
  OffloadRank& operator=(const OffloadRank&) = delete;

  // As a new process would, over the same directory.
  void open() {
    worker_.reset();
    std::unique_ptr<SlotStore> host;
    std::unique_ptr<SlotStore> disk;
    if (options_.host_slots > 0)
      host = value_of(HostStore::create(
          *arena_,
          {.slots = options_.host_slots, .slot_bytes = kBlockBytes, .codec = options_.host_codec, .whole = 2}));
    if (options_.disk_segments > 0) {
      disk = value_of(SegmentStore::open(
          *options_.files, options_.directory,
          {.rank = options_.rank, .record_bytes = kBlockBytes, .slots_per_segment = options_.segment_slots}, clock_));
    }
    std::unique_ptr<SlotStore> remote;
    if (options_.remote_slots > 0) remote = std::make_unique<SharedStore>(*options_.remote, options_.rank, kBlockBytes);
    worker_ =
        value_of(OffloadWorker::create({.rank = options_.rank,
                                        .host_slots = options_.host_slots,
                                        .disk_segments = options_.disk_segments,
                                        .segment_slots = options_.segment_slots,
                                        .remote_slots = options_.remote_slots},
                                       layout_, *transfers_, std::move(host), std::move(disk), std::move(remote)));
  }

  // The bytes of a block: one number, but for the layer and the rank.
  void fill(int32_t block, uint32_t value) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) std::fill_n(piece(block, layer), kWords, word(value, layer));
  }
  bool has(int32_t block, uint32_t value) const {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const uint32_t* const words = piece(block, layer);
      if (std::any_of(words, words + kWords, [&](uint32_t each) { return each != word(value, layer); })) return false;
    }
    return true;
  }
  void fill_with(int32_t block, const std::vector<std::byte>& bytes) {  // kBlockBytes many
    for (uint32_t layer = 0; layer < kLayers; ++layer)
      std::memcpy(piece(block, layer), bytes.data() + layer * kPieceBytes, kPieceBytes);
  }
  std::vector<std::byte> bytes_of(int32_t block) const {
    std::vector<std::byte> bytes(kBlockBytes);
    for (uint32_t layer = 0; layer < kLayers; ++layer)
      std::memcpy(bytes.data() + layer * kPieceBytes, piece(block, layer), kPieceBytes);
    return bytes;
  }
  uint32_t value(int32_t block) const { return *piece(block, 0) - word(0, 0); }

  OffloadWorker& worker() { return *worker_; }
  FaultyDevice& device() { return *device_; }
  TransferEngine& transfers() { return *transfers_; }
  ManualClock& clock() { return clock_; }
  const OffloadRankOptions& options() const { return options_; }
  // Runs the plan to its end, by way of its bytes.
  TransferReport run(const TransferPlan& plan) {
    EXPECT_SUCCEEDS(worker_->run(value_of(TransferPlan::decode(plan.encode()))));
    worker_->wait();
    return value_of(TransferReport::decode(worker_->poll().encode()));
  }

 private:
  static constexpr size_t kWords = kPieceBytes / sizeof(uint32_t);
  uint32_t* piece(int32_t block, uint32_t layer) const {
    const uint64_t at = layer * static_cast<uint64_t>(options_.blocks) + static_cast<uint64_t>(block);
    return reinterpret_cast<uint32_t*>(address_ + at * kPieceBytes);  // NOLINT(performance-no-int-to-ptr)
  }
  uint32_t word(uint32_t value, uint32_t layer) const {
    return value + layer * 1'000'003 + static_cast<uint32_t>(options_.rank) * 90'001;
  }

  const OffloadRankOptions options_;
  ManualClock clock_;
  std::unique_ptr<FaultyDevice> device_;
  uint64_t bytes_ = 0;
  DeviceAddress address_ = 0;
  PhysicalId memory_{};
  KvLayout layout_;
  std::unique_ptr<HostArena> arena_;
  std::unique_ptr<TransferEngine> transfers_;
  std::unique_ptr<OffloadWorker> worker_;
};

inline BlockKey key_number(uint32_t number, uint32_t space = 1) {
  BlockKey key{.space = space};
  std::memcpy(key.hash.data(), &number, sizeof number);
  return key;
}

}  // namespace torpor::test
