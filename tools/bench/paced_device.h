// SPDX-License-Identifier: Apache-2.0
// PacedDevice: torpor's device without a GPU, where each call takes the time that a GPU's driver and link would take,
// slowed by one factor. Bytes really move; what is simulated is only how long it takes, so that the overlap of threads
// shows on a machine whose memory is much faster than the slowed link.
//
// Two kinds of lane serve one caller at a time, in the order in which they come: the driver (each call holds it for its
// price; a pin holds it long) and each direction of the link (all streams together; pieces of a batch pay one by one).
// Digests are taken by the engine's threads on the CPU; a GPU's link is so much faster than a slowed one that they,
// too, must be slowed: the thread that waits for a copy down pays for them after it, the thread that gives a copy up
// before.
//
// Owner: a bench, by way of RankMemory. Threads: any. Failure: as the device without a GPU.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "allocator/device_memory.h"

namespace torpor::bench {

// Times in nanoseconds, rates in bytes a second. "Measured": on one H100 on PCIe 5 x16 (docs/measurements.md, On a
// GPU). The others are figures of an H100, H20 or A100 that somebody published, or an estimate where nobody did.
struct Prices {
  double link_rate = 55e9;           // each direction. Measured: 55.2 and 55.1, one large copy
  double kernel_down_rate = 47.4e9;  // copies by a kernel. Measured, pieces of 64 KiB
  double kernel_up_rate = 45e9;      // the same
  int64_t copy_call_ns = 2'000;      // giving one copy, one batch or one kernel. FlexKV pull request 193, H20: 2.3 us
  int64_t piece_ns = 700;            // on the link, of each piece. Measured: 0.66 to 0.92 us at 4 and 16 KiB
  double pin_rate = 17e9;            // touched and pinned. Measured: 17.3, 8 GiB
  int64_t reserve_ns = 19'000;       // kvcached's bench_vmm, A100, handles of 2 MiB: this and the next four
  int64_t create_ns = 193'000;
  int64_t map_ns = 1'450;
  int64_t set_access_ns = 36'000;
  int64_t unmap_ns = 25'600;
  double zero_rate = 2.2e12;  // new memory. Estimate: two thirds of HBM3's 3.35 TB/s
  double digest_rate = 10e9;  // one thread, out of cache; torpor's own digests on AVX-512
  // Not charged, for nobody published a figure: releasing physical memory, unpinning, recording and waiting.

  Prices slowed(double factor) const;
};

// Nanoseconds that were charged so far, of all threads together.
struct Charges {
  int64_t link = 0;    // bytes on the link
  int64_t pieces = 0;  // what they pay besides
  int64_t copy_calls = 0;
  int64_t pins = 0;
  int64_t maps = 0;  // reserving, creating, mapping, access, unmapping
  int64_t zeroing = 0;
  int64_t digests = 0;
  int64_t waited_for_driver = 0;  // while another call held it
  int64_t waited_for_link = 0;    // for copies, until the last byte

  Charges operator-(const Charges& before) const;
};

struct PacedOptions {
  Prices prices{};
  // As CudaDeviceOptions: copies in one call that are smaller than this on average go by a kernel.
  uint64_t gather_below_bytes = 0;
  uint64_t pin_step_bytes = uint64_t{1} << 30;  // as CudaDeviceOptions
  // False: only counts. The clock then stands still, as if all calls came at the same time.
  bool waits = true;
};

class PacedDevice final : public DeviceMemory {
 public:
  explicit PacedDevice(PacedOptions options);
  ~PacedDevice() override;

  Charges charges() const;

  std::string_view kind() const override { return "paced"; }
  uint64_t granularity() const override;

 protected:
  Result<DeviceAddress> do_reserve(uint64_t size) override;
  Status do_free_reservation(DeviceAddress address, uint64_t size) override;
  Result<PhysicalId> do_create(uint64_t size) override;
  Status do_release(PhysicalId id) override;
  Status do_map(DeviceAddress address, PhysicalId id, uint64_t size) override;
  Status do_set_access(DeviceAddress address, uint64_t size, Access access) override;
  Status do_unmap(DeviceAddress address, uint64_t size) override;
  Result<StreamId> do_create_stream() override;
  Status do_destroy_stream(StreamId stream) override;
  Status do_copy_async(StreamId stream, Direction direction, std::span<const Copy> copies, CopyBy by) override;
  Status do_copy_within(std::span<const InnerCopy> copies) override;
  Result<EventId> do_record(StreamId stream) override;
  DrainResult do_wait(EventId event) override;
  DrainResult do_drain(StreamId stream) override;
  Status do_pin_host(std::span<std::byte> host) override;
  uint64_t capacity_bytes() const override { return 0; }

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace torpor::bench
