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
  HostStream(bool deferred, uint64_t link_bytes_per_second) : deferred_(deferred), link_bytes_per_second_(link_bytes_per_second) {
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
    std::this_thread::sleep_until(began + std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds)));
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
    for (const auto& [id, fd] : files_) ::close(fd);
  }

  std::string_view kind() const override { return "host"; }
  uint64_t granularity() const override { return options_.granularity_bytes; }
  bool takes_digests() const override { return options_.shuffle_seed == 0; }  // a digest needs the copies in their order

 protected:
  uint64_t capacity_bytes() const override { return options_.capacity_bytes; }

  Result<DeviceAddress> do_reserve(uint64_t size) override {
    // Over-reserve to place the range at a multiple of the granularity, and of a huge page when it is large enough.
    const uint64_t alignment = std::max(granularity(), size >= 2 * kMiB && options_.huge_pages ? 2 * kMiB : uint64_t{0});
    void* base = ::mmap(nullptr, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return device_error(errno, fmt::format("cannot reserve {} bytes of addresses", size));
    const auto start = reinterpret_cast<uint64_t>(base);
    const uint64_t address = align_up(start, alignment);
    if (address > start) ::munmap(base, address - start);
    if (const uint64_t tail = start + size + alignment - (address + size); tail > 0) ::munmap(pointer(address + size), tail);
    return address;
  }

  Status do_free_reservation(DeviceAddress address, uint64_t size) override {
    if (::munmap(pointer(address), size) != 0) return device_error(errno, fmt::format("cannot free the addresses at {:#x}", address));
    return ok();
  }

  Result<PhysicalId> do_create(uint64_t size) override {
    const int fd = ::memfd_create("torpor", MFD_CLOEXEC);
    if (fd < 0) return device_error(errno, fmt::format("cannot create {} bytes of memory", size));
    if (::ftruncate(fd, static_cast<off_t>(size)) != 0) {
      const int problem = errno;
      ::close(fd);
      return device_error(problem, fmt::format("cannot create {} bytes of memory", size));
    }
    const std::lock_guard lock(mutex_);
    const auto id = static_cast<PhysicalId>(++last_id_);
    files_.emplace(id, fd);
    return id;
  }

  Status do_release(PhysicalId id) override {
    const std::lock_guard lock(mutex_);
    const auto found = files_.find(id);
    ::close(found->second);
    files_.erase(found);
    return ok();
  }

  Status do_map(DeviceAddress address, PhysicalId id, uint64_t size) override {
    int fd = -1;
    {
      const std::lock_guard lock(mutex_);
      fd = files_.at(id);
    }
    if (::mmap(pointer(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
      return device_error(errno, fmt::format("cannot map {} bytes at {:#x}", size, address));
    }
    if (options_.huge_pages) ::madvise(pointer(address), size, MADV_HUGEPAGE);  // advice only
    ::madvise(pointer(address), size, MADV_DONTDUMP);                           // prompts have no place in core files
    return ok();
  }

  Status do_set_access(DeviceAddress address, uint64_t size, Access access) override {
    int protection = PROT_NONE;
    if (access == Access::kRead) protection = PROT_READ;
    if (access == Access::kReadWrite) protection = PROT_READ | PROT_WRITE;
    if (::mprotect(pointer(address), size, protection) != 0) {
      return device_error(errno, fmt::format("cannot set access to {} bytes at {:#x}", size, address));
    }
    return ok();
  }

  Status do_unmap(DeviceAddress address, uint64_t size) override {
    void* replaced = ::mmap(pointer(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (replaced == MAP_FAILED) return device_error(errno, fmt::format("cannot unmap {} bytes at {:#x}", size, address));
    return ok();
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

  static Error unknown(std::string_view what, uint64_t id) {
    return Error{.code = Code::kInvalidArgument, .what = fmt::format("{} {} does not exist", what, id), .origin = Origin::kDevice};
  }

  std::shared_ptr<HostStream> stream_of(StreamId id) {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(id);
    return found == streams_.end() ? nullptr : found->second;
  }

  const HostDeviceOptions options_;
  std::mutex mutex_;  // guards all below; taken after DeviceMemory's
  uint64_t last_id_ = 0;
  std::map<PhysicalId, int> files_;
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
