// SPDX-License-Identifier: Apache-2.0
// What the tests of the transfer engine share: a megabyte of device memory, and a tier that stands still.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>

#include "allocator/host_device.h"
#include "base/units.h"
#include "offload/blocking_transfers.h"
#include "offload/host_tier.h"
#include "offload/transfer_engine.h"
#include "tests/support/faulty_device.h"
#include "tests/support/results.h"

namespace torpor {

using test::FaultyDevice;
using test::value_of;

inline constexpr uint64_t kBytes = 1 * kMiB;
inline constexpr uint64_t kChunks = 32;

// Keeps nothing; what is put into it stands still until resume().
class HeldTier final : public RecordStore {
 public:
  const StoreTraits& traits() const override { return traits_; }
  void put(std::span<RecordPart> parts) override {
    const MutexLock lock(mutex_);
    puts_ += parts.size();
    changed_.notify_all();
    while (held_) changed_.wait(mutex_);
    for (RecordPart& part : parts) part.status = ok();
  }
  void wait_until_held() {
    const MutexLock lock(mutex_);
    while (puts_ == 0) changed_.wait(mutex_);
  }
  void resume() {
    const MutexLock lock(mutex_);
    held_ = false;
    changed_.notify_all();
  }
  size_t puts() const {
    const MutexLock lock(mutex_);
    return puts_;
  }

 private:
  const StoreTraits traits_{.kind = "held"};
  mutable Mutex mutex_;
  CondVar changed_;
  bool held_ TORPOR_GUARDED_BY(mutex_) = true;
  size_t puts_ TORPOR_GUARDED_BY(mutex_) = 0;
};

// A megabyte of device memory in 32 chunks, each of two pieces that lie far apart.
class TransferEngineTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    device_ = std::make_unique<FaultyDevice>(value_of(make_host_device({.defer_copies = GetParam()})));
    arena_ = value_of(HostArena::create({.slab_bytes = kMiB}));
    transfers_ = value_of(TransferEngine::create(*device_, *arena_, {.threads = 3}));
    blocking_.emplace(*transfers_);
    address_ = value_of(device_->reserve(kBytes));
    memory_ = value_of(device_->create(kBytes));
    ASSERT_SUCCEEDS(device_->map(address_, memory_));
    ASSERT_SUCCEEDS(device_->set_access(address_, kBytes, Access::kReadWrite));
    for (uint64_t i = 0; i < kBytes; ++i) bytes()[i] = static_cast<std::byte>(i * 2654435761u >> 13);
    for (uint64_t i = 0; i < kChunks; ++i) {
      const uint64_t half = kBytes / kChunks / 2;
      plans_.push_back({.key = {.tag = "t", .region = "r", .index = i},
                        .pieces = {{address_ + i * half, half}, {address_ + kBytes / 2 + i * half, half}}});
    }
    original_.assign(bytes(), bytes() + kBytes);
  }
  void TearDown() override {
    device_->fail_at(0);
    transfers_.reset();
    ASSERT_SUCCEEDS(device_->unmap(address_, kBytes));
    ASSERT_SUCCEEDS(device_->release(memory_));
    ASSERT_SUCCEEDS(device_->free_reservation(address_));
  }
  std::byte* bytes() const { return reinterpret_cast<std::byte*>(address_); }  // NOLINT(performance-no-int-to-ptr)
  void use(TransferEngineOptions options) {
    transfers_.reset();
    transfers_ = value_of(TransferEngine::create(*device_, *arena_, options));
    blocking_.emplace(*transfers_);
  }
  Job job(JobKind kind, RecordStore* tier, std::span<const SavedChunk> saved = {}) const {
    Job made{.kind = kind, .store = tier};
    made.chunks.resize(plans_.size());
    for (size_t i = 0; i < plans_.size(); ++i) {
      made.chunks[i].plan = &plans_[i];
      if (!saved.empty()) made.chunks[i].saved = saved[i];
    }
    return made;
  }
  uint64_t count(BlockOutcome outcome) const { return transfers_->counts()[static_cast<size_t>(outcome)]; }
  static size_t ended_as(const JobResult& result, BlockOutcome outcome) {
    return static_cast<size_t>(std::count_if(result.chunks.begin(), result.chunks.end(),
                                             [&](const auto& chunk) { return chunk.outcome == outcome; }));
  }
  bool content_is_original() const { return std::memcmp(bytes(), original_.data(), kBytes) == 0; }

  std::unique_ptr<FaultyDevice> device_;
  std::unique_ptr<HostArena> arena_;
  std::unique_ptr<TransferEngine> transfers_;
  std::optional<BlockingTransfers> blocking_;
  DeviceAddress address_ = 0;
  PhysicalId memory_{};
  std::vector<ChunkPlan> plans_;
  std::vector<std::byte> original_;
};

}  // namespace torpor
