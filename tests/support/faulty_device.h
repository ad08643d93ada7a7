// SPDX-License-Identifier: Apache-2.0
// FaultyDevice: a DeviceMemory that fails on command: at the n-th call that can fail, once or from then on; or a wait
// that proves nothing. Threads: fail_at() and drain_as() while other threads call.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "allocator/device_memory.h"

namespace torpor::test {

class FaultyDevice final : public DeviceMemory {
 public:
  explicit FaultyDevice(std::unique_ptr<DeviceMemory> inner) : inner_(std::move(inner)) {}

  // The n-th fallible call from now (1 is the next) fails; with `sticky`, all later ones too. 0: none fails.
  void fail_at(uint64_t n, bool sticky = false) { calls_ = 0, fail_at_ = n, sticky_ = sticky; }
  // All later waits end like this; kCompleted: normally.
  void drain_as(Drain drain) { drain_ = drain; }
  // Called by each synchronize(), before it returns.
  void on_synchronize(std::function<void()> call) { on_synchronize_ = std::move(call); }
  void fail_synchronize(bool fails) { synchronize_fails_ = fails; }
  // Called before each batch of copies begins.
  void on_copy(std::function<void()> call) { on_copy_ = std::move(call); }
  // Called after physical memory was created or released.
  void on_change(std::function<void()> call) { on_change_ = std::move(call); }
  // Report a kind() of its own, as if its memory were not the machine's.
  void has_own_memory() { own_memory_ = true; }
  // While one exists, no call fails or counts.
  class Spared {
   public:
    explicit Spared(FaultyDevice& device) : device_(device) { ++device_.spared_; }
    Spared(const Spared&) = delete;
    Spared& operator=(const Spared&) = delete;
    ~Spared() { --device_.spared_; }

   private:
    FaultyDevice& device_;
  };
  uint64_t calls() const { return calls_; }
  CopyBy copied_by() const { return copied_by_; }  // of the last copies
  bool fired() const { return fail_at_ != 0 && calls_ >= fail_at_; }

  std::string_view kind() const override { return own_memory_ ? "faulty" : inner_->kind(); }
  uint64_t granularity() const override { return inner_->granularity(); }
  bool takes_digests() const override { return inner_->takes_digests(); }
  std::optional<uint64_t> resident_bytes() const override { return inner_->resident_bytes(); }

 protected:
  Result<DeviceAddress> do_reserve(uint64_t size) override {
    return fails() ? Result<DeviceAddress>(injected()) : inner_->reserve(size);
  }
  Status do_free_reservation(DeviceAddress address, uint64_t) override {
    return fails() ? Status(injected()) : inner_->free_reservation(address);
  }
  Result<PhysicalId> do_create(uint64_t size) override {
    if (fails()) return injected();
    Result<PhysicalId> made = inner_->create(size);
    if (on_change_) on_change_();
    return made;
  }
  Status do_release(PhysicalId id) override {
    if (fails()) return injected();
    Status done = inner_->release(id);
    if (on_change_) on_change_();
    return done;
  }
  Status do_map(DeviceAddress address, PhysicalId id, uint64_t) override {
    return fails() ? Status(injected()) : inner_->map(address, id);
  }
  Status do_set_access(DeviceAddress address, uint64_t size, Access access) override {
    return fails() ? Status(injected()) : inner_->set_access(address, size, access);
  }
  Status do_unmap(DeviceAddress address, uint64_t size) override {
    return fails() ? Status(injected()) : inner_->unmap(address, size);
  }
  Status do_synchronize() override {
    if (on_synchronize_) on_synchronize_();
    return synchronize_fails_ || fails() ? Status(injected()) : inner_->synchronize();
  }
  Result<StreamId> do_create_stream() override { return inner_->create_stream(); }
  Status do_destroy_stream(StreamId stream) override { return inner_->destroy_stream(stream); }
  Status do_copy_async(StreamId stream, Direction direction, std::span<const Copy> copies, CopyBy by) override {
    copied_by_ = by;
    if (on_copy_) on_copy_();
    return fails() ? Status(injected()) : inner_->copy_async(stream, direction, copies, by);
  }
  Status do_copy_within(std::span<const InnerCopy> copies) override {
    if (on_copy_) on_copy_();
    return fails() ? Status(injected()) : inner_->copy_within(copies);
  }
  Result<EventId> do_record(StreamId stream) override { return inner_->record(stream); }
  DrainResult do_wait(EventId event) override {
    DrainResult result = inner_->wait(event);
    if (drain_ != Drain::kCompleted) result = {drain_, injected()};
    return result;
  }
  DrainResult do_drain(StreamId stream) override {
    DrainResult result = inner_->drain(stream);
    if (drain_ != Drain::kCompleted) result = {drain_, injected()};
    return result;
  }
  uint64_t capacity_bytes() const override { return inner_->info().capacity_bytes; }

 private:
  bool fails() {
    if (spared_ > 0) return false;
    const uint64_t call = ++calls_;
    return fail_at_ != 0 && (sticky_ ? call >= fail_at_ : call == fail_at_);
  }
  static Error injected() {
    return Error{.code = Code::kDevice,
                 .what = "injected device failure",
                 .next_step = "none",
                 .origin = Origin::kDevice,
                 .native = 999};
  }

  bool own_memory_ = false;
  std::unique_ptr<DeviceMemory> inner_;
  std::atomic<uint64_t> calls_ = 0;
  std::atomic<int> spared_ = 0;
  std::atomic<uint64_t> fail_at_ = 0;
  std::atomic<bool> sticky_ = false;
  std::atomic<bool> synchronize_fails_ = false;
  std::atomic<Drain> drain_ = Drain::kCompleted;
  std::atomic<CopyBy> copied_by_ = CopyBy::kFastest;
  std::function<void()> on_synchronize_;
  std::function<void()> on_change_;
  std::function<void()> on_copy_;
};

}  // namespace torpor::test
