// SPDX-License-Identifier: Apache-2.0
#include "base/event_ring.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <mutex>

#include <fmt/core.h>

#include "base/process.h"
#include "base/text.h"

namespace torpor {
namespace {

constexpr char kMagic[9] = "TORPOREV";
constexpr uint64_t kMostEvents = 1 << 24;
// A writer may be held up in the middle of an event; a reader waits this long for it.
constexpr std::chrono::seconds kPatience{1};

std::atomic<uint32_t> forks{0};  // number of forks between the first process and this one

uint32_t count_forks() {
  static std::once_flag once;
  std::call_once(
      once, [] { (void)::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); }); });
  return forks.load(std::memory_order_relaxed);
}

class RingFile {
 public:
  explicit RingFile(int fd) : fd_(fd) {}
  RingFile(const RingFile&) = delete;
  RingFile& operator=(const RingFile&) = delete;
  ~RingFile() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  const int fd_;
};

// Return the start time of a process in the kernel's ticks; 0: there is no such process.
uint64_t process_start(int32_t pid) {
  const Result<ProcessId> found = find_process(pid);
  return found ? found->started : 0;
}

// Memory that is mapped and that no ring owns yet.
struct Unmap {
  uint64_t bytes;
  void operator()(void* memory) const { (void)::munmap(memory, bytes); }
};
using Mapping = std::unique_ptr<void, Unmap>;

struct Head {
  char magic[8];
  uint16_t major;
  uint16_t minor;
  uint32_t record_bytes;
  uint64_t capacity;
  int32_t pid;
  int32_t rank;
  uint64_t process_start;
  int64_t monotonic_ns;
  int64_t wall_ns;
  char role[16];
  Digest digest;  // of all bytes before it
};
static_assert(sizeof(Head) == 88 && sizeof(Head) < 2048);

Digest digest_of_head(const Head& head) {
  return digest_of(std::as_bytes(std::span(&head, 1)).first(offsetof(Head, digest)));
}

}  // namespace

EventSource this_process(std::string role, int32_t rank, const Clock& clock) {
  return {.role = std::move(role),
          .rank = rank,
          .pid = ::getpid(),
          .process_start = process_start(::getpid()),
          .monotonic_ns = clock.now().count(),
          .wall_ns = static_cast<int64_t>(clock.unix_seconds() * 1e9),
          .major = kEventSchemaMajor,
          .minor = kEventSchemaMinor};
}

bool is_alive(const EventSource& source) {
  return source.process_start != 0 && process_start(source.pid) == source.process_start;
}

void write_event_head(const EventSource& source, const char (&magic)[9], std::byte* bytes) {
  Head head{.major = source.major,
            .minor = source.minor,
            .record_bytes = sizeof(Event),
            .capacity = source.capacity,
            .pid = source.pid,
            .rank = source.rank,
            .process_start = source.process_start,
            .monotonic_ns = source.monotonic_ns,
            .wall_ns = source.wall_ns};
  std::memcpy(head.magic, magic, sizeof head.magic);
  std::memcpy(head.role, source.role.data(), std::min(source.role.size(), sizeof head.role - 1));
  head.digest = digest_of_head(head);
  std::memcpy(bytes, &head, sizeof head);
}

Result<EventSource> read_event_head(const char (&magic)[9], std::span<const std::byte> bytes) {
  const auto damaged = [](std::string what) {
    return Error{.code = Code::kCorruption, .what = std::move(what), .next_step = "it is of no use"};
  };
  Head head;
  if (bytes.size() < kEventHeadBytes) return damaged("events without a whole head");
  std::memcpy(&head, bytes.data(), sizeof head);
  if (std::memcmp(head.magic, magic, sizeof head.magic) != 0) return damaged("these are not torpor's events");
  if (head.digest != digest_of_head(head)) return damaged("the head of the events is damaged");
  if (head.major != kEventSchemaMajor || head.record_bytes != sizeof(Event)) {
    return Error{
        .code = Code::kIncompatible,
        .what = fmt::format("events of schema {}.{}, {} bytes each", head.major, head.minor, head.record_bytes),
        .next_step = "use the torpor that wrote them"};
  }
  if (within(head.monotonic_ns) != head.monotonic_ns || within(head.wall_ns) != head.wall_ns)
    return damaged("the head of the events has impossible times");
  head.role[sizeof head.role - 1] = '\0';
  return EventSource{.role = harmless(head.role),
                     .rank = head.rank,
                     .pid = head.pid,
                     .process_start = head.process_start,
                     .monotonic_ns = head.monotonic_ns,
                     .wall_ns = head.wall_ns,
                     .capacity = head.capacity,
                     .major = head.major,
                     .minor = head.minor};
}

// ---- the port

uint64_t EventPort::record_now(const Event& event) const noexcept {
  const int64_t time = clock_->now().count();
  const uint64_t sequence = ring_->record(event, time);
  if (EventWatch* const watch = ring_->watch()) {
    Event published = event;
    published.sequence = sequence;
    published.time = time;
    watch->saw(published);
  }
  return sequence;
}

bool EventPort::may_step() const noexcept {
  EventWatch* const watch = ring_ == nullptr ? nullptr : ring_->watch();
  return watch == nullptr || watch->may_step();
}

bool EventPort::holds() const noexcept {
  const EventWatch* const watch = ring_ == nullptr ? nullptr : ring_->watch();
  return watch != nullptr && watch->holds();
}

bool EventPort::may_go(const Event& about) const noexcept {
  EventWatch* const watch = ring_ == nullptr ? nullptr : ring_->watch();
  return watch == nullptr || watch->may_go(about);
}

void EventPort::operation_begins() const noexcept {
  if (EventWatch* const watch = ring_ == nullptr ? nullptr : ring_->watch()) watch->operation_begins();
}

void EventPort::operation_ended() const noexcept {
  if (EventWatch* const watch = ring_ == nullptr ? nullptr : ring_->watch()) watch->operation_ended();
}

uint64_t EventPort::last_sequence() const noexcept { return ring_ == nullptr ? 0 : ring_->last_sequence(); }

bool EventPort::half_gone(uint64_t since) const noexcept {
  return ring_ != nullptr && ring_->last_sequence() - since >= ring_->capacity() / 2;
}

void EventPort::text(TextKind kind, uint32_t request, uint64_t transfer, std::string_view words) const noexcept {
  if (ring_ == nullptr) return;
  if (EventWatch* const watch = ring_->watch(); watch != nullptr && kind == TextKind::kRequestName)
    watch->named(request, words);
  constexpr size_t kPart = 32;
  words = first_bytes(words, 256 * kPart);
  uint8_t part = 0;
  do {
    std::array<char, kPart> bytes{};
    const size_t taken = words.copy(bytes.data(), kPart);
    words.remove_prefix(taken);
    Event event{.type = EventType::kText,
                .from = static_cast<uint8_t>(static_cast<uint8_t>(kind) | (words.empty() ? kLastPart : 0)),
                .to = part++,
                .request = request,
                .transfer = transfer};
    std::memcpy(event.key.bytes.data(), bytes.data(), 16);
    std::memcpy(&event.a, bytes.data() + 16, 8);
    std::memcpy(&event.b, bytes.data() + 24, 8);
    (void)record_now(event);
  } while (!words.empty());
}

// ---- the ring

EventRing::EventRing(void* memory, uint64_t bytes, EventSource source, std::string path, bool own)
    : memory_(static_cast<std::byte*>(memory)),
      bytes_(bytes),
      mask_(source.capacity - 1),
      source_(std::move(source)),
      path_(std::move(path)),
      own_(own),
      forks_(count_forks()) {
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
}

EventRing::~EventRing() {
  if (own_ && !path_.empty() && forks.load(std::memory_order_relaxed) == forks_) (void)::unlink(path_.c_str());
  (void)::munmap(memory_, bytes_);
}

Result<std::unique_ptr<EventRing>> EventRing::map(int fd, EventSource source, std::string path) {
  const uint64_t bytes = kEventHeadBytes + source.capacity * sizeof(Cell);
  const int how = MAP_POPULATE | (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, how, fd, 0);
  if (memory == MAP_FAILED) return system_error(errno, "the memory for events");
  Mapping mapped(memory, Unmap{bytes});
  write_event_head(source, kMagic, static_cast<std::byte*>(memory));
  std::unique_ptr<EventRing> ring(new EventRing(memory, bytes, std::move(source), std::move(path), true));
  (void)mapped.release();
  return ring;
}

Result<std::unique_ptr<EventRing>> EventRing::in_memory(const EventSource& source, uint64_t events) {
  EventSource sized = source;
  sized.capacity = std::bit_ceil(std::clamp<uint64_t>(events, 2, kMostEvents));
  return try_catch([&] { return map(-1, std::move(sized), {}); });
}

Result<std::unique_ptr<EventRing>> EventRing::create(const std::string& path, const EventSource& source,
                                                     uint64_t events) {
  EventSource sized = source;
  sized.capacity = std::bit_ceil(std::clamp<uint64_t>(events, 2, kMostEvents));
  return try_catch([&]() -> Result<std::unique_ptr<EventRing>> {
    const RingFile file(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (file.get() < 0) return system_error(errno, fmt::format("making {}", path));
    Result<std::unique_ptr<EventRing>> made = [&]() -> Result<std::unique_ptr<EventRing>> {
      struct statfs system {};
      if (::fstatfs(file.get(), &system) != 0) return system_error(errno, fmt::format("looking at {}", path));
      if (system.f_type != TMPFS_MAGIC) {
        return Error{.code = Code::kFailedPrecondition,
                     .what = fmt::format("{} is not on tmpfs: whoever tells an event could wait for a disk", path),
                     .next_step = "use a directory below /dev/shm or $XDG_RUNTIME_DIR"};
      }
      // Allocate all of it now: if memory is short, that is an error here and not a signal later.
      const auto bytes = static_cast<off_t>(kEventHeadBytes + sized.capacity * sizeof(Cell));
      if (const int failed = ::posix_fallocate(file.get(), 0, bytes); failed != 0)
        return system_error(failed, fmt::format("{} bytes for {}", bytes, path));
      return map(file.get(), sized, path);
    }();
    if (!made) (void)::unlink(path.c_str());
    return made;
  });
}

Result<std::unique_ptr<EventRing>> EventRing::open(const std::string& path) {
  return try_catch([&]() -> Result<std::unique_ptr<EventRing>> {
    const RingFile file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
    if (file.get() < 0) return system_error(errno, fmt::format("opening {}", path));
    struct stat status {};
    if (::fstat(file.get(), &status) != 0) return system_error(errno, fmt::format("looking at {}", path));
    if (!S_ISREG(status.st_mode) || (status.st_uid != ::geteuid() && ::geteuid() != 0)) {
      return Error{.code = Code::kFailedPrecondition,
                   .what = fmt::format("{} is not a file of this user", path),
                   .next_step = "read the events of your own engines"};
    }
    const auto damaged = [&] {
      return Error{.code = Code::kCorruption, .what = fmt::format("{} has another size than it says", path)};
    };
    const auto bytes = static_cast<uint64_t>(status.st_size);
    if (bytes < kEventHeadBytes + sizeof(Cell)) return damaged();
    void* const memory = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.get(), 0);
    if (memory == MAP_FAILED) return system_error(errno, fmt::format("mapping {}", path));
    Mapping mapped(memory, Unmap{bytes});
    Result<EventSource> source =
        read_event_head(kMagic, std::span(static_cast<const std::byte*>(memory), kEventHeadBytes));
    const bool sized = source && std::has_single_bit(source->capacity) && source->capacity <= kMostEvents &&
                       bytes == kEventHeadBytes + source->capacity * sizeof(Cell);
    if (!sized) return source ? damaged() : source.error().within(path);
    std::unique_ptr<EventRing> ring(new EventRing(memory, bytes, std::move(*source), path, false));
    (void)mapped.release();
    return ring;
  });
}

uint64_t EventRing::record(const Event& event, int64_t time) noexcept {
  if (forks.load(std::memory_order_relaxed) != forks_) return 0;
  const uint64_t sequence = head().last_sequence.fetch_add(1, std::memory_order_relaxed) + 1;
  Cell& cell = this->cell(sequence);
  uint64_t before = cell.words[0].load(std::memory_order_relaxed);
  // The writer of this cell was overtaken by a whole round, or has overtaken this one.
  if ((before & kWriting) != 0 || before > sequence) return 0;
  if (!cell.words[0].compare_exchange_strong(before, sequence | kWriting, std::memory_order_relaxed)) return 0;
  uint64_t words[8];
  std::memcpy(words, &event, sizeof words);
  words[1] = static_cast<uint64_t>(time);
  for (size_t i = 1; i < 8; ++i) cell.words[i].store(words[i], std::memory_order_release);  // after the mark
  cell.words[0].store(sequence, std::memory_order_release);
  return sequence;
}

EventRing::Found EventRing::find(uint64_t sequence, Event& event) const noexcept {
  const Cell& cell = this->cell(sequence);
  uint64_t words[8];
  words[0] = cell.words[0].load(std::memory_order_acquire);
  if (words[0] != sequence) return (words[0] & ~kWriting) > sequence ? Found::kGone : Found::kNotYet;
  for (size_t i = 1; i < 8; ++i) words[i] = cell.words[i].load(std::memory_order_acquire);
  if (cell.words[0].load(std::memory_order_relaxed) != sequence) return Found::kGone;
  std::memcpy(&event, words, sizeof event);
  return Found::kThere;
}

void EventReader::skip(std::vector<Event>& events, uint64_t to) {
  const uint64_t count = to - next_;
  lost_ += count;
  if (!events.empty() && events.back().type == EventType::kLost && events.back().a + events.back().b == next_) {
    events.back().b += count;
  } else {
    events.push_back({.type = EventType::kLost, .a = next_, .b = count});
  }
  next_ = to;
}

void EventReader::read(std::vector<Event>& events, bool last, size_t most) {
  const uint64_t newest = ring_.last_sequence();
  while (next_ <= newest && events.size() < most) {
    if (newest - next_ >= ring_.capacity()) skip(events, newest - ring_.capacity() + 1);
    Event event;
    const EventRing::Found found = ring_.find(next_, event);
    if (found == EventRing::Found::kNotYet && !last) {
      const std::chrono::nanoseconds now = system_clock().now();
      if (!waits_since_) waits_since_ = now;
      if (now - *waits_since_ < kPatience) return;
    }
    waits_since_.reset();
    if (found != EventRing::Found::kThere) {
      skip(events, next_ + 1);
      continue;
    }
    events.push_back(event);
    ++next_;
  }
}

}  // namespace torpor
