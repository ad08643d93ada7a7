// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/paced_device.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <thread>

#include <sys/prctl.h>

#include "allocator/host_device.h"
#include "base/mutex.h"
#include "base/units.h"

namespace torpor::bench {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

constexpr uint64_t kPiecesOfALaunch = 1364;  // cuda::kGatherPieces
constexpr unsigned long kTimerSlackNs = 1000;

int64_t price_of(uint64_t bytes, double rate) { return static_cast<int64_t>(static_cast<double>(bytes) / rate * 1e9); }

// Sleep until then, more exactly than a thread does by default.
void sleep_until(Clock::time_point then) {
  thread_local const bool exact = ::prctl(PR_SET_TIMERSLACK, kTimerSlackNs) == 0;
  (void)exact;
  std::this_thread::sleep_until(then);
}

// Serves one caller at a time, in the order in which they come.
class Lane {
 public:
  // Return when a call of this price ends that begins behind all before it, and not before `earliest`.
  Clock::time_point take(int64_t price, Clock::time_point earliest) {
    const MutexLock lock(mutex_);
    free_ = std::max(free_, earliest) + nanoseconds(price);
    return free_;
  }

 private:
  Mutex mutex_;
  Clock::time_point free_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace

Prices Prices::slowed(double factor) const {
  Prices slow = *this;
  for (double* rate : {&slow.link_rate, &slow.kernel_down_rate, &slow.kernel_up_rate, &slow.pin_rate, &slow.zero_rate,
                       &slow.digest_rate})
    *rate /= factor;
  for (int64_t* price : {&slow.copy_call_ns, &slow.piece_ns, &slow.reserve_ns, &slow.create_ns, &slow.map_ns,
                         &slow.set_access_ns, &slow.unmap_ns})
    *price = static_cast<int64_t>(static_cast<double>(*price) * factor);
  return slow;
}

Charges Charges::operator-(const Charges& before) const {
  return {.link = link - before.link,
          .pieces = pieces - before.pieces,
          .copy_calls = copy_calls - before.copy_calls,
          .pins = pins - before.pins,
          .maps = maps - before.maps,
          .zeroing = zeroing - before.zeroing,
          .digests = digests - before.digests,
          .waited_for_driver = waited_for_driver - before.waited_for_driver,
          .waited_for_link = waited_for_link - before.waited_for_link};
}

struct PacedDevice::Impl {
  // Copies down whose digests nobody has paid for yet, and when the last of all copies ends.
  struct Work {
    Clock::time_point ready{};
    uint64_t down_bytes = 0;
  };

  PacedOptions options;
  std::unique_ptr<DeviceMemory> device;
  Lane driver;
  std::array<Lane, 2> link;  // by direction
  mutable Mutex mutex;
  Charges charges TORPOR_GUARDED_BY(mutex);
  std::map<StreamId, Work> streams TORPOR_GUARDED_BY(mutex);
  std::map<EventId, Work> events TORPOR_GUARDED_BY(mutex);

  void charge(int64_t Charges::*what, int64_t price) {
    const MutexLock lock(mutex);
    charges.*what += price;
  }
  Clock::time_point now() const { return options.waits ? Clock::now() : Clock::time_point(); }
  // Hold the driver for so long.
  void call(int64_t Charges::*what, int64_t price) {
    const Clock::time_point began = now();
    const Clock::time_point end = driver.take(price, began);
    charge(what, price);
    charge(&Charges::waited_for_driver, nanoseconds(end - began).count() - price);
    if (options.waits) sleep_until(end);
  }
  // Keep the calling thread busy for so long.
  void work(int64_t Charges::*what, int64_t price) {
    charge(what, price);
    if (options.waits && price > 0) sleep_until(Clock::now() + nanoseconds(price));
  }
  void take_digests(uint64_t bytes) { work(&Charges::digests, price_of(bytes, options.prices.digest_rate)); }

  bool by_kernel(std::span<const Copy> copies, uint64_t bytes) const {
    return copies.size() > 1 && bytes / copies.size() < options.gather_below_bytes;
  }
  void end(const Work& work_done) {
    charge(&Charges::waited_for_link, std::max<int64_t>(0, nanoseconds(work_done.ready - now()).count()));
    if (options.waits) sleep_until(work_done.ready);
    take_digests(work_done.down_bytes);
  }
};

PacedDevice::PacedDevice(PacedOptions options) : impl_(std::make_unique<Impl>()) {
  impl_->options = options;
  impl_->device = make_host_device().value();  // its defaults are valid
}
PacedDevice::~PacedDevice() = default;

Charges PacedDevice::charges() const {
  const MutexLock lock(impl_->mutex);
  return impl_->charges;
}

uint64_t PacedDevice::granularity() const { return impl_->device->granularity(); }

Result<DeviceAddress> PacedDevice::do_reserve(uint64_t size) {
  impl_->call(&Charges::maps, impl_->options.prices.reserve_ns);
  return impl_->device->reserve(size);
}
Status PacedDevice::do_free_reservation(DeviceAddress address, uint64_t) {
  return impl_->device->free_reservation(address);
}
Result<PhysicalId> PacedDevice::do_create(uint64_t size) {
  impl_->call(&Charges::maps, impl_->options.prices.create_ns);
  return impl_->device->create(size);
}
Status PacedDevice::do_release(PhysicalId id) { return impl_->device->release(id); }
Status PacedDevice::do_map(DeviceAddress address, PhysicalId id, uint64_t) {
  impl_->call(&Charges::maps, impl_->options.prices.map_ns);
  return impl_->device->map(address, id);
}
Status PacedDevice::do_set_access(DeviceAddress address, uint64_t size, Access access) {
  impl_->call(&Charges::maps, impl_->options.prices.set_access_ns);
  // torpor sets access once, to memory that is new.
  if (access == Access::kReadWrite) impl_->work(&Charges::zeroing, price_of(size, impl_->options.prices.zero_rate));
  return impl_->device->set_access(address, size, access);
}
Status PacedDevice::do_unmap(DeviceAddress address, uint64_t size) {
  impl_->call(&Charges::maps, impl_->options.prices.unmap_ns);
  return impl_->device->unmap(address, size);
}

Result<StreamId> PacedDevice::do_create_stream() { return impl_->device->create_stream(); }
Status PacedDevice::do_destroy_stream(StreamId stream) { return impl_->device->destroy_stream(stream); }

Status PacedDevice::do_copy_async(StreamId stream, Direction direction, std::span<const Copy> copies, CopyBy by) {
  Impl& impl = *impl_;
  const Prices& prices = impl.options.prices;
  const bool down = direction == Direction::kDeviceToHost;
  uint64_t bytes = 0;
  for (const Copy& copy : copies) bytes += copy.bytes;
  if (!down) impl.take_digests(bytes);
  const bool kernel = by == CopyBy::kFastest && impl.by_kernel(copies, bytes);
  const auto calls = static_cast<int64_t>(kernel ? (copies.size() + kPiecesOfALaunch - 1) / kPiecesOfALaunch : 1);
  impl.call(&Charges::copy_calls, calls * prices.copy_call_ns);
  TORPOR_RETURN_IF_ERROR(impl.device->copy_async(stream, direction, copies));
  const double rate = !kernel ? prices.link_rate : down ? prices.kernel_down_rate : prices.kernel_up_rate;
  const int64_t wire = price_of(bytes, rate);
  const int64_t pieces = kernel ? 0 : static_cast<int64_t>(copies.size()) * prices.piece_ns;
  const MutexLock lock(impl.mutex);
  impl.charges.link += wire;
  impl.charges.pieces += pieces;
  Impl::Work& work = impl.streams[stream];
  work.ready = impl.link[down ? 0 : 1].take(wire + pieces, std::max(impl.now(), work.ready));
  if (down) work.down_bytes += bytes;
  return ok();
}

// A GPU's own memory is so much faster than its link that only the calls are charged.
Status PacedDevice::do_copy_within(std::span<const InnerCopy> copies) {
  impl_->call(&Charges::copy_calls, static_cast<int64_t>(copies.size()) * impl_->options.prices.copy_call_ns);
  return impl_->device->copy_within(copies);
}

Result<EventId> PacedDevice::do_record(StreamId stream) {
  TORPOR_ASSIGN_OR_RETURN(const EventId event, impl_->device->record(stream));
  const MutexLock lock(impl_->mutex);
  Impl::Work& work = impl_->streams[stream];
  impl_->events[event] = work;
  work.down_bytes = 0;
  return event;
}

DrainResult PacedDevice::do_wait(EventId event) {
  DrainResult drained = impl_->device->wait(event);
  Impl::Work work;
  {
    const MutexLock lock(impl_->mutex);
    work = impl_->events[event];
    impl_->events.erase(event);
  }
  impl_->end(work);
  return drained;
}

DrainResult PacedDevice::do_drain(StreamId stream) {
  DrainResult drained = impl_->device->drain(stream);
  Impl::Work work;
  {
    const MutexLock lock(impl_->mutex);
    work = impl_->streams[stream];
    impl_->streams[stream].down_bytes = 0;
  }
  impl_->end(work);
  return drained;
}

Status PacedDevice::do_pin_host(std::span<std::byte> host) {
  for (uint64_t at = 0; at < host.size(); at += impl_->options.pin_step_bytes) {
    const uint64_t bytes = std::min<uint64_t>(impl_->options.pin_step_bytes, host.size() - at);
    impl_->call(&Charges::pins, price_of(bytes, impl_->options.prices.pin_rate));
  }
  return ok();
}

}  // namespace torpor::bench
