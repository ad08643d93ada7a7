#include "allocator/host_device.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <random>
#include <thread>

#include <sys/mman.h>
#include <unistd.h>

#include <fmt/format.h>

#include "base/copy.h"
#include "base/log.h"
#include "base/units.h"

namespace torpor {
namespace {

// One stream: calls in order on a thread of its own, or, deferred, on the thread that waits.
class HostStream {
 public:
  HostStream(bool deferred, uint64_t link_bytes_per_second)
      : deferred_(deferred), link_bytes_per_second_(link_bytes_per_second) {
    if (!deferred_) worker_ = std::thread([this] { run(); });
  }
  ~HostStream() {
    drain(enqueued());
    if (deferred_) return;
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    worker_.join();
  }

  void enqueue(Direction direction, std::vector<Copy> copies) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back({direction, std::move(copies)});
      ++enqueued_;
    }
    changed_.notify_all();
  }

  uint64_t enqueued() const {
    const std::lock_guard lock(mutex_);
    return enqueued_;
  }

  // Returns when the first `count` calls of this stream's life are done.
  void drain(uint64_t count) {
    std::unique_lock lock(mutex_);
    if (deferred_) {
      while (done_ < count) run_one(lock);
    } else {
      changed_.wait(lock, [&] { return done_ >= count; });
    }
  }

 private:
  struct Call {
    Direction direction;
    std::vector<Copy> copies;
  };

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ending_ || !queue_.empty(); });
      if (queue_.empty()) return;
      run_one(lock);
    }
  }

  // Precondition: the queue is not empty, or another waiter is at work on it. Releases the lock while it copies.
  void run_one(std::unique_lock<std::mutex>& lock) {
    if (queue_.empty()) {
      changed_.wait(lock);
      return;
    }
    const Call call = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    for (const Copy& copy : call.copies) carry_out(call.direction, copy);
    lock.lock();
    ++done_;
    changed_.notify_all();
  }

  void carry_out(Direction direction, const Copy& copy) const {
    const auto began = std::chrono::steady_clock::now();
    auto* device = reinterpret_cast<std::byte*>(copy.device);  // NOLINT(performance-no-int-to-ptr)
    const bool down = direction == Direction::kDeviceToHost;
    const std::span<std::byte> to(down ? copy.host : device, copy.bytes);
    const std::span<const std::byte> from(down ? device : copy.host, copy.bytes);
    if (copy.digest != nullptr) {
      copy_with_digest(to, from, *copy.digest);
    } else {
      copy_past_cache(to, from);
    }
    if (link_bytes_per_second_ == 0) return;
    const double seconds = static_cast<double>(copy.bytes) / static_cast<double>(link_bytes_per_second_);
    std::this_thread::sleep_until(
        began + std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds)));
  }

  const bool deferred_;
  const uint64_t link_bytes_per_second_;
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<Call> queue_;
  uint64_t enqueued_ = 0;
  uint64_t done_ = 0;
  bool ending_ = false;
  std::thread worker_;
};

void* pointer(DeviceAddress address) { return reinterpret_cast<void*>(address); }  // NOLINT(performance-no-int-to-ptr)

Error device_error(int native, const std::string& what) {
  Error error = system_error(native, what, "free memory and call again");
  error.origin = Origin::kDevice;
  if (error.code == Code::kIo) error.code = Code::kDevice;
  return error;
}

class HostDevice final : public DeviceMemory {
 public:
  explicit HostDevice(HostDeviceOptions options) : options_(options) {}

  ~HostDevice() override {
    streams_.clear();
    const DeviceMemoryInfo left = info();
    if (left.mapped_bytes != 0 || left.physical_bytes != 0 || left.reserved_bytes != 0) {
      log().error("host device destroyed with {} bytes mapped, {} created, {} reserved", left.mapped_bytes,
                  left.physical_bytes, left.reserved_bytes);
    }
    for (const auto& [id, memory] : physical_) ::munmap(pointer(memory.parking), memory.size);
  }

  std::string_view kind() const override { return "host"; }
  uint64_t granularity() const override { return options_.granularity_bytes; }
  bool takes_digests() const override {
    return options_.shuffle_seed == 0;
  }  // a digest needs the copies in their order

 protected:
  uint64_t capacity_bytes() const override { return options_.capacity_bytes; }

  Result<DeviceAddress> do_reserve(uint64_t size) override {
    // Over-reserve to place the range at a multiple of the granularity, and of a huge page when it is large enough.
    const uint64_t alignment =
        std::max(granularity(), size >= 2 * kMiB && options_.huge_pages ? 2 * kMiB : uint64_t{0});
    void* base = ::mmap(nullptr, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return device_error(errno, fmt::format("cannot reserve {} bytes of addresses", size));
    const auto start = reinterpret_cast<uint64_t>(base);
    const uint64_t address = align_up(start, alignment);
    if (address > start) ::munmap(base, address - start);
    if (const uint64_t tail = start + size + alignment - (address + size); tail > 0)
      ::munmap(pointer(address + size), tail);
    return address;
  }

  Status do_free_reservation(DeviceAddress address, uint64_t size) override {
    if (::munmap(pointer(address), size) != 0)
      return device_error(errno, fmt::format("cannot free the addresses at {:#x}", address));
    return ok();
  }

  // Physical memory is a private mapping at an address of its own, where it stands when it is mapped nowhere. Mapping
  // it moves its pages (mremap), so that huge pages stay whole.
  Result<PhysicalId> do_create(uint64_t size) override {
    TORPOR_ASSIGN(const DeviceAddress parking, do_reserve(size));
    const std::lock_guard lock(mutex_);
    const auto id = static_cast<PhysicalId>(++last_id_);
    physical_.emplace(id, Physical{parking, size});
    return id;
  }

  Status do_release(PhysicalId id) override {
    const std::lock_guard lock(mutex_);
    const auto found = physical_.find(id);
    if (found->second.mapped) {
      found->second.released = true;
      return ok();
    }
    TORPOR_TRY(do_free_reservation(found->second.parking, found->second.size));
    physical_.erase(found);
    return ok();
  }

  Status do_map(DeviceAddress address, PhysicalId id, uint64_t size) override {
    const std::lock_guard lock(mutex_);
    Physical& memory = physical_.at(id);
    if (memory.mapped) {
      return Error{.code = Code::kUnsupported,
                   .what = "the device without a GPU maps physical memory in one place at a time",
                   .next_step = "unmap it first",
                   .origin = Origin::kDevice};
    }
    TORPOR_TRY(move_pages(memory.parking, address, size));
    if (options_.huge_pages) ::madvise(pointer(address), size, MADV_HUGEPAGE);  // advice only
    ::madvise(pointer(address), size, MADV_DONTDUMP);                           // prompts have no place in core files
    memory.mapped = true;
    mapped_.emplace(address, Mapped{id, size, PROT_NONE});
    return ok();
  }

  Status do_set_access(DeviceAddress address, uint64_t size, Access access) override {
    int protection = PROT_NONE;
    if (access == Access::kRead) protection = PROT_READ;
    if (access == Access::kReadWrite) protection = PROT_READ | PROT_WRITE;
    const std::lock_guard lock(mutex_);
    if (::mprotect(pointer(address), size, protection) != 0) {
      return device_error(errno, fmt::format("cannot set access to {} bytes at {:#x}", size, address));
    }
    for (auto at = mapped_.find(address); at != mapped_.end() && at->first < address + size; ++at)
      at->second.protection = protection;
    return ok();
  }

  Status do_unmap(DeviceAddress address, uint64_t size) override {
    const std::lock_guard lock(mutex_);
    const auto first = mapped_.find(address);
    auto at = first;
    for (; at != mapped_.end() && at->first < address + size; ++at) {
      Status moved = take_back(at->first, at->second);
      if (moved) continue;
      Error error = moved.error();
      for (auto undone = first; undone != at; ++undone)
        error.state_changed = !put_back(undone->first, undone->second) || error.state_changed;
      return error;
    }
    for (auto gone = first; gone != at; gone = mapped_.erase(gone)) {
      const auto memory = physical_.find(gone->second.id);
      memory->second.mapped = false;
      if (!memory->second.released) continue;
      TORPOR_TRY(do_free_reservation(memory->second.parking, memory->second.size));
      physical_.erase(memory);
    }
    return ok();
  }

  std::optional<uint64_t> resident_bytes() const override {
    const std::lock_guard lock(mutex_);
    const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    std::vector<unsigned char> present;
    uint64_t pages = 0;
    for (const auto& [address, mapping] : mapped_) {
      present.resize(mapping.size / page);
      if (::mincore(pointer(address), mapping.size, present.data()) != 0) return std::nullopt;
      pages += static_cast<uint64_t>(
          std::count_if(present.begin(), present.end(), [](unsigned char byte) { return (byte & 1) != 0; }));
    }
    return pages * page;
  }

  Result<StreamId> do_create_stream() override {
    const std::lock_guard lock(mutex_);
    const auto id = static_cast<StreamId>(++last_id_);
    streams_.emplace(id, std::make_shared<HostStream>(options_.defer_copies, options_.link_bytes_per_second));
    return id;
  }

  Status do_destroy_stream(StreamId stream) override {
    std::shared_ptr<HostStream> doomed;  // its destructor drains; not under the lock
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(stream);
    if (found == streams_.end()) return unknown("stream", static_cast<uint64_t>(stream));
    doomed = std::move(found->second);
    streams_.erase(found);
    return ok();
  }

  Status do_copy_async(StreamId stream, Direction direction, std::span<const Copy> copies) override {
    const std::shared_ptr<HostStream> found = stream_of(stream);
    if (found == nullptr) return unknown("stream", static_cast<uint64_t>(stream));
    std::vector<Copy> ordered(copies.begin(), copies.end());
    if (options_.shuffle_seed != 0) {
      std::mt19937_64 random(options_.shuffle_seed + copies.size());
      std::shuffle(ordered.begin(), ordered.end(), random);
      for (Copy& copy : ordered) copy.digest = nullptr;
    }
    found->enqueue(direction, std::move(ordered));
    return ok();
  }

  Result<EventId> do_record(StreamId stream) override {
    const std::shared_ptr<HostStream> found = stream_of(stream);
    if (found == nullptr) return unknown("stream", static_cast<uint64_t>(stream));
    const uint64_t count = found->enqueued();
    const std::lock_guard lock(mutex_);
    const auto id = static_cast<EventId>(++last_id_);
    events_.emplace(id, Event{found, count});
    return id;
  }

  DrainResult do_wait(EventId event) override {
    Event waited;
    {
      const std::lock_guard lock(mutex_);
      const auto found = events_.find(event);
      if (found == events_.end()) {
        return {Drain::kDrainedWithError, unknown("event", static_cast<uint64_t>(event))};
      }
      waited = std::move(found->second);
      events_.erase(found);
    }
    waited.stream->drain(waited.count);
    return {};
  }

  DrainResult do_drain(StreamId stream) override {
    const std::shared_ptr<HostStream> found = stream_of(stream);
    if (found == nullptr) return {Drain::kDrainedWithError, unknown("stream", static_cast<uint64_t>(stream))};
    found->drain(found->enqueued());
    return {};
  }

 private:
  struct Event {
    std::shared_ptr<HostStream> stream;
    uint64_t count = 0;
  };

  struct Physical {
    DeviceAddress parking = 0;
    uint64_t size = 0;
    bool mapped = false;
    bool released = false;
  };
  struct Mapped {
    PhysicalId id{};
    uint64_t size = 0;
    int protection = PROT_NONE;
  };

  // Both ranges stay reserved; the one that is left has no pages and no access.
  static Status move_pages(DeviceAddress from, DeviceAddress to, uint64_t size) {
    if (::mremap(pointer(from), size, size, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, pointer(to)) ==
        MAP_FAILED) {
      return device_error(errno, fmt::format("cannot move {} bytes from {:#x} to {:#x}", size, from, to));
    }
    return ok();
  }
  // The lock is held.
  Status take_back(DeviceAddress address, const Mapped& mapping) {
    if (::mprotect(pointer(address), mapping.size, PROT_NONE) != 0)
      return device_error(errno, fmt::format("cannot unmap {} bytes at {:#x}", mapping.size, address));
    const Status moved = move_pages(address, physical_.at(mapping.id).parking, mapping.size);
    if (!moved) ::mprotect(pointer(address), mapping.size, mapping.protection);
    return moved;
  }
  bool put_back(DeviceAddress address, const Mapped& mapping) {
    return move_pages(physical_.at(mapping.id).parking, address, mapping.size) &&
           ::mprotect(pointer(address), mapping.size, mapping.protection) == 0;
  }

  static Error unknown(std::string_view what, uint64_t id) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("{} {} does not exist", what, id),
                 .origin = Origin::kDevice};
  }

  std::shared_ptr<HostStream> stream_of(StreamId id) {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(id);
    return found == streams_.end() ? nullptr : found->second;
  }

  const HostDeviceOptions options_;
  mutable std::mutex mutex_;  // guards all below; taken after DeviceMemory's
  uint64_t last_id_ = 0;
  std::map<PhysicalId, Physical> physical_;
  std::map<DeviceAddress, Mapped> mapped_;
  std::map<StreamId, std::shared_ptr<HostStream>> streams_;
  std::map<EventId, Event> events_;
};

}  // namespace

Result<std::unique_ptr<DeviceMemory>> make_host_device(HostDeviceOptions options) {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  if (!is_power_of_two(options.granularity_bytes) || options.granularity_bytes < page) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("granularity_bytes is {}", options.granularity_bytes),
                 .next_step = fmt::format("use a power of two of at least {}", page)};
  }
  return std::unique_ptr<DeviceMemory>(std::make_unique<HostDevice>(options));
}

}  // namespace torpor
