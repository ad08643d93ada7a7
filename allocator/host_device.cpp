// SPDX-License-Identifier: Apache-2.0
#include "allocator/host_device.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <random>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include <fmt/core.h>

#include "allocator/host_stream.h"
#include "allocator/shared_capacity.h"
#include "base/copy.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/units.h"

namespace torpor {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kSmallAfterSlow{1};

void* pointer(DeviceAddress address) { return reinterpret_cast<void*>(address); }  // NOLINT(performance-no-int-to-ptr)

Error device_error(int native, const std::string& what) {
  Error error = system_error(native, what, "free memory and call again");
  error.origin = Origin::kDevice;
  if (error.code == Code::kIo) error.code = Code::kDevice;
  return error;
}

class HostDevice final : public DeviceMemory {
 public:
  HostDevice(HostDeviceOptions options, std::unique_ptr<SharedCapacity> shared)
      : options_(std::move(options)), shared_(std::move(shared)) {}

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
  std::optional<uint64_t> used_bytes() const override { return shared_ ? shared_->used_bytes() : std::nullopt; }

  Result<DeviceAddress> do_reserve(uint64_t size) override {
    // Reserve more than `size`, to place the range at a multiple of the granularity, and of a huge page if it is large
    // enough.
    const uint64_t alignment = std::max(granularity(), size >= kHugePage ? kHugePage : uint64_t{0});
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

  // Physical memory is a private mapping. While it is mapped nowhere it stays at an address of its own. Mapping it
  // moves its pages (mremap), so that huge pages stay whole.
  Result<PhysicalId> do_create(uint64_t size) override {
    std::map<PhysicalId, Physical> made;
    Physical& memory = made.emplace(PhysicalId{}, Physical{.size = size}).first->second;
    if (shared_) TORPOR_RETURN_IF_ERROR(shared_->take(size));
    const Result<DeviceAddress> parking = do_reserve(size);
    if (!parking) {
      gone(size);
      return parking.error();
    }
    memory.parking = *parking;
    auto node = made.extract(made.begin());
    const MutexLock lock(mutex_);
    const auto id = static_cast<PhysicalId>(++last_id_);
    node.key() = id;
    physical_.insert(std::move(node));
    return id;
  }

  Status do_release(PhysicalId id) override {
    Physical memory;
    {
      const MutexLock lock(mutex_);
      Physical& found = physical_.at(id);
      if (found.mapped) {
        found.released = true;
        return ok();
      }
      memory = found;
    }
    TORPOR_RETURN_IF_ERROR(do_free_reservation(memory.parking, memory.size));
    gone(memory.size);
    const MutexLock lock(mutex_);
    physical_.erase(id);
    return ok();
  }

  Status do_map(DeviceAddress address, PhysicalId id, uint64_t size) override {
    std::map<DeviceAddress, Mapped> made{{address, Mapped{.id = id, .size = size}}};
    DeviceAddress parking = 0;
    {
      const MutexLock lock(mutex_);
      const Physical& memory = physical_.at(id);
      if (memory.mapped) {
        return Error{.code = Code::kUnsupported,
                     .what = "the device without a GPU maps physical memory in one place at a time",
                     .next_step = "unmap it first",
                     .origin = Origin::kDevice};
      }
      parking = memory.parking;
    }
    TORPOR_RETURN_IF_ERROR(move_pages(parking, address, size));
    if (size >= kHugePage)
      prefer_huge_pages(static_cast<std::byte*>(pointer(address)), size, /*huge=*/!options_.huge_pages);
    ::madvise(pointer(address), size, MADV_DONTDUMP);  // keep prompts out of core files
    const MutexLock lock(mutex_);
    physical_.at(id).mapped = true;
    mapped_.merge(made);
    return ok();
  }

  Status do_set_access(DeviceAddress address, uint64_t size, Access access) override {
    const int protection = access == Access::kReadWrite ? PROT_READ | PROT_WRITE : PROT_NONE;
    if (::mprotect(pointer(address), size, protection) != 0) {
      return device_error(errno, fmt::format("cannot set access to {} bytes at {:#x}", size, address));
    }
    const MutexLock lock(mutex_);
    for (auto at = mapped_.find(address); at != mapped_.end() && at->first < address + size; ++at)
      at->second.protection = protection;
    return ok();
  }

  Status do_unmap(DeviceAddress address, uint64_t size) override {
    const DeviceAddress end = address + size;
    for (Piece piece = next_piece(address, end); piece.mapping != nullptr; piece = next_piece(piece.end(), end)) {
      if (piece.mapping->gone) continue;
      Status moved = take_back(piece.address, *piece.mapping, piece.memory.parking);
      if (moved) {
        piece.mapping->gone = true;
        continue;
      }
      Error error = std::move(moved).error();
      for (Piece undone = next_piece(address, piece.address); undone.mapping != nullptr;
           undone = next_piece(undone.end(), piece.address)) {
        const bool back = put_back(undone.address, *undone.mapping, undone.memory.parking);
        undone.mapping->gone = !back;
        error.state_changed = error.state_changed || !back;
      }
      return error;
    }
    for (Piece piece = next_piece(address, end); piece.mapping != nullptr; piece = next_piece(piece.end(), end)) {
      if (piece.memory.released) {
        (void)try_catch([&] {
          const Status freed = do_free_reservation(piece.memory.parking, piece.memory.size);
          if (!freed) log().error("addresses stay reserved: {}", freed.error());
          return ok();
        });
        gone(piece.memory.size);
      }
      const MutexLock lock(mutex_);
      const auto memory = physical_.find(piece.mapping->id);
      memory->second.mapped = false;
      if (memory->second.released) physical_.erase(memory);
      mapped_.erase(piece.address);
    }
    return ok();
  }

  std::optional<uint64_t> resident_bytes() const override {
    const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    std::vector<std::pair<DeviceAddress, uint64_t>> mapped;
    {
      const MutexLock lock(mutex_);
      for (const auto& [address, mapping] : mapped_) mapped.emplace_back(address, mapping.size);
    }
    std::vector<unsigned char> present;
    uint64_t pages = 0;
    for (const auto& [address, size] : mapped) {
      present.resize(size / page);
      if (::mincore(pointer(address), size, present.data()) != 0) return std::nullopt;
      pages += static_cast<uint64_t>(
          std::count_if(present.begin(), present.end(), [](unsigned char byte) { return (byte & 1) != 0; }));
    }
    return pages * page;
  }

  Result<StreamId> do_create_stream() override {
    HostStream::OnSlow on_slow{.bytes_per_second = options_.slow_bytes_per_second};
    if (options_.huge_pages) on_slow.call = [this](DeviceAddress to) { prefer_pages_of(to, /*huge=*/false); };
    auto stream =
        std::make_shared<HostStream>(options_.defer_copies, options_.link_bytes_per_second, std::move(on_slow));
    if (!options_.defer_copies) TORPOR_RETURN_IF_ERROR(stream->start());
    const MutexLock lock(mutex_);
    const auto id = static_cast<StreamId>(++last_id_);
    streams_.emplace(id, std::move(stream));
    return id;
  }

  Status do_destroy_stream(StreamId stream) override {
    std::shared_ptr<HostStream> doomed;  // its destructor drains, so it must not run under the lock
    const MutexLock lock(mutex_);
    const auto found = streams_.find(stream);
    if (found == streams_.end()) return unknown("stream", static_cast<uint64_t>(stream));
    doomed = std::move(found->second);
    streams_.erase(found);
    return ok();
  }

  Status do_copy_async(StreamId stream, Direction direction, std::span<const Copy> copies, CopyBy) override {
    const std::shared_ptr<HostStream> found = stream_of(stream);
    if (found == nullptr) return unknown("stream", static_cast<uint64_t>(stream));
    if (direction == Direction::kHostToDevice && options_.huge_pages) prepare_pages(copies);
    std::vector<Copy> ordered(copies.begin(), copies.end());
    if (options_.shuffle_seed != 0) {
      std::mt19937_64 random(options_.shuffle_seed + copies.size());
      std::shuffle(ordered.begin(), ordered.end(), random);
      for (Copy& copy : ordered) copy.digest = nullptr;
    }
    found->enqueue(direction, std::move(ordered));
    return ok();
  }

  Status do_copy_within(std::span<const InnerCopy> copies) override {
    for (const InnerCopy& copy : copies) std::memcpy(pointer(copy.to), pointer(copy.from), copy.bytes);
    return ok();
  }

  Result<EventId> do_record(StreamId stream) override {
    const std::shared_ptr<HostStream> found = stream_of(stream);
    if (found == nullptr) return unknown("stream", static_cast<uint64_t>(stream));
    const uint64_t count = found->enqueued();
    const MutexLock lock(mutex_);
    const auto id = static_cast<EventId>(++last_id_);
    events_.emplace(id, Event{found, count});
    return id;
  }

  DrainResult do_wait(EventId event) override {
    Event waited;
    {
      const MutexLock lock(mutex_);
      const auto found = events_.find(event);
      if (found == events_.end()) {
        return {Drain::kDrainedWithError, unknown("event", static_cast<uint64_t>(event))};
      }
      waited = std::move(found->second);
      events_.erase(found);
    }
    return waited.stream->drain(waited.count);
  }

  DrainResult do_drain(StreamId stream) override {
    const std::shared_ptr<HostStream> found = stream_of(stream);
    if (found == nullptr) return {Drain::kDrainedWithError, unknown("stream", static_cast<uint64_t>(stream))};
    return found->drain(found->enqueued());
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
    bool asked_for_huge_pages = false;
    bool gone = false;  // a failed call unmapped it and could not map it again
  };

  struct Piece {
    DeviceAddress address = 0;
    Mapped* mapping = nullptr;  // only the caller works on it
    Physical memory;
    DeviceAddress end() const { return address + memory.size; }
  };
  // Return the first mapping in the range; if there is none, `mapping` is null.
  Piece next_piece(DeviceAddress from, DeviceAddress to) {
    const MutexLock lock(mutex_);
    const auto at = mapped_.lower_bound(from);
    if (at == mapped_.end() || at->first >= to) return {};
    return {at->first, &at->second, physical_.at(at->second.id)};
  }

  // Other processes may have this memory now.
  void gone(uint64_t size) {
    if (shared_) shared_->give_back(size);
  }

  // Ask for huge pages where copies to the device fill some.
  void prepare_pages(std::span<const Copy> copies) {
    DeviceAddress begin = 0;
    DeviceAddress end = 0;
    for (const Copy& copy : copies) {
      if (copy.device != end) begin = copy.device;
      end = copy.device + copy.bytes;
      if (end - begin >= kHugePage && !asked_about(copy.device) && options_.huge_pages())
        prefer_pages_of(copy.device, /*huge=*/true);
    }
  }

  // Return whether the mapping at this address needs no question about huge pages; from then on it needs none.
  bool asked_about(DeviceAddress address) {
    const MutexLock lock(mutex_);
    Mapped& mapping = std::prev(mapped_.upper_bound(address))->second;
    return Clock::now() < small_until_ || std::exchange(mapping.asked_for_huge_pages, true);
  }

  // Precondition: a copy uses the mapping at this address, so that it stays.
  void prefer_pages_of(DeviceAddress address, bool huge) {
    DeviceAddress begin = 0;
    uint64_t size = 0;
    {
      const MutexLock lock(mutex_);
      if (!huge) small_until_ = Clock::now() + kSmallAfterSlow;
      const auto mapping = std::prev(mapped_.upper_bound(address));
      begin = mapping->first;
      size = mapping->second.size;
    }
    prefer_huge_pages(static_cast<std::byte*>(pointer(begin)), size, huge);
  }

  // Move the pages. Both ranges stay reserved; `from` then has no pages and no access.
  static Status move_pages(DeviceAddress from, DeviceAddress to, uint64_t size) {
    if (::mremap(pointer(from), size, size, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, pointer(to)) ==
        MAP_FAILED) {
      return device_error(errno, fmt::format("cannot move {} bytes from {:#x} to {:#x}", size, from, to));
    }
    return ok();
  }
  static Status take_back(DeviceAddress address, const Mapped& mapping, DeviceAddress parking) {
    if (::mprotect(pointer(address), mapping.size, PROT_NONE) != 0)
      return device_error(errno, fmt::format("cannot unmap {} bytes at {:#x}", mapping.size, address));
    const Status moved = move_pages(address, parking, mapping.size);
    if (!moved) ::mprotect(pointer(address), mapping.size, mapping.protection);
    return moved;
  }
  static bool put_back(DeviceAddress address, const Mapped& mapping, DeviceAddress parking) {
    return move_pages(parking, address, mapping.size) &&
           ::mprotect(pointer(address), mapping.size, mapping.protection) == 0;
  }

  static Error unknown(std::string_view what, uint64_t id) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("{} {} does not exist", what, id),
                 .origin = Origin::kDevice};
  }

  std::shared_ptr<HostStream> stream_of(StreamId id) {
    const MutexLock lock(mutex_);
    const auto found = streams_.find(id);
    return found == streams_.end() ? nullptr : found->second;
  }

  const HostDeviceOptions options_;
  const std::unique_ptr<SharedCapacity> shared_;
  mutable Mutex mutex_;  // never held during a system call or a copy
  uint64_t last_id_ TORPOR_GUARDED_BY(mutex_) = 0;
  // DeviceMemory lets only one call at a time work on an entry of these two.
  std::map<PhysicalId, Physical> physical_ TORPOR_GUARDED_BY(mutex_);
  std::map<DeviceAddress, Mapped> mapped_ TORPOR_GUARDED_BY(mutex_);
  Clock::time_point small_until_ TORPOR_GUARDED_BY(mutex_);
  std::map<StreamId, std::shared_ptr<HostStream>> streams_ TORPOR_GUARDED_BY(mutex_);
  std::map<EventId, Event> events_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace

Result<std::unique_ptr<DeviceMemory>> make_host_device(HostDeviceOptions options) {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  if (!is_power_of_two(options.granularity_bytes) || options.granularity_bytes < page) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("granularity_bytes is {}", options.granularity_bytes),
                 .next_step = fmt::format("use a power of two of at least {}", page)};
  }
  std::unique_ptr<SharedCapacity> shared;
  if (!options.shared_file.empty()) {
    if (options.capacity_bytes == 0) {
      return Error{.code = Code::kInvalidArgument,
                   .what = "a shared device (TORPOR_HOST_DEVICE_SHARED_FILE) without a capacity",
                   .next_step = "say how many bytes the processes share: TORPOR_HOST_DEVICE_BYTES, or capacity_bytes"};
    }
    TORPOR_ASSIGN_OR_RETURN(shared, SharedCapacity::open(options.shared_file, options.capacity_bytes));
  }
  return std::unique_ptr<DeviceMemory>(std::make_unique<HostDevice>(std::move(options), std::move(shared)));
}

}  // namespace torpor
