#include "base/progress_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <new>

#include <fmt/format.h>

#include "base/linux_file.h"
#include "base/log.h"
#include "base/units.h"

namespace torpor {
namespace {

constexpr uint64_t kMagic = 0x31474f5250524f54;  // "TORPROG1"

}  // namespace

// What the file has; the rest of it is zero.
struct ProgressFile::Page {
  std::atomic<uint64_t> magic;
  std::atomic<uint64_t> phase;
  std::atomic<uint64_t> cancelled;
  std::atomic<uint64_t> began_ns;  // by the monotonic clock, when bytes were expected first; 0: never
  std::atomic<uint64_t> bytes_total;
  std::atomic<uint64_t> bytes_done;
};

Result<std::shared_ptr<ProgressFile>> ProgressFile::map(int fd, const Clock& clock) {
  static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(Page) <= kPage);
  void* const memory = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return system_error(errno, "mapping it");
  try {
    return std::shared_ptr<ProgressFile>(new ProgressFile(*static_cast<Page*>(memory), clock));
  } catch (...) {
    (void)::munmap(memory, kPage);
    throw;
  }
}

Result<std::shared_ptr<ProgressFile>> ProgressFile::create(const std::string& path, const Clock& clock) {
  return catching([&]() -> Result<std::shared_ptr<ProgressFile>> {
    const Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (file.get() < 0) return system_error(errno, fmt::format("making {}", path));
    Result<std::shared_ptr<ProgressFile>> made = catching([&]() -> Result<std::shared_ptr<ProgressFile>> {
      // The page of it now: where there is no room, that is an error here, and not a signal later.
      if (const int failed = ::posix_fallocate(file.get(), 0, kPage); failed != 0) return system_error(failed, path);
      return map(file.get(), clock);
    });
    if (!made) {
      (void)::unlink(path.c_str());
      return made.error().within(path);
    }
    (*made)->page_.magic.store(kMagic, std::memory_order_release);
    return made;
  });
}

Result<std::shared_ptr<ProgressFile>> ProgressFile::open(const std::string& path, const Clock& clock) {
  return catching([&]() -> Result<std::shared_ptr<ProgressFile>> {
    const Descriptor file(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (file.get() < 0) return system_error(errno, fmt::format("opening {}", path));
    struct stat status {};
    if (::fstat(file.get(), &status) != 0) return system_error(errno, fmt::format("looking at {}", path));
    if (!S_ISREG(status.st_mode) || status.st_uid != ::geteuid()) {
      return Error{.code = Code::kFailedPrecondition,
                   .what = fmt::format("{} is not a file of this user", path),
                   .next_step = "watch operations of your own engines"};
    }
    const Error damaged{.code = Code::kCorruption, .what = fmt::format("{} is not a file of progress", path)};
    if (status.st_size != static_cast<off_t>(kPage)) return damaged;
    TORPOR_ASSIGN(std::shared_ptr<ProgressFile> opened, map(file.get(), clock));
    if (opened->page_.magic.load(std::memory_order_acquire) != kMagic) return damaged;
    return opened;
  });
}

std::shared_ptr<ProgressFile> ProgressFile::of_caller(const std::string& path, const Clock& clock) noexcept {
  std::shared_ptr<ProgressFile> found;
  if (path.empty()) return found;
  (void)catching([&]() -> Status {
    Result<std::shared_ptr<ProgressFile>> opened = open(path, clock);
    if (opened) found = std::move(*opened);
    if (!opened) log().warn("nobody sees the progress of this: {}", opened.error().to_string());
    return ok();
  });
  return found;
}

ProgressFile::~ProgressFile() { (void)::munmap(&page_, kPage); }

void ProgressFile::begin_phase(uint8_t phase) noexcept { page_.phase.store(phase, std::memory_order_relaxed); }

void ProgressFile::expect(uint64_t bytes) noexcept {
  uint64_t never = 0;
  page_.began_ns.compare_exchange_strong(never, static_cast<uint64_t>(clock_.now().count()), std::memory_order_relaxed);
  page_.bytes_total.fetch_add(bytes, std::memory_order_relaxed);
}

void ProgressFile::moved(uint64_t bytes) noexcept { page_.bytes_done.fetch_add(bytes, std::memory_order_relaxed); }

void ProgressFile::cancel() noexcept { page_.cancelled.store(1, std::memory_order_relaxed); }

bool ProgressFile::cancelled() const noexcept { return page_.cancelled.load(std::memory_order_relaxed) != 0; }

Status ProgressFile::check() const {
  if (!cancelled()) return ok();
  return Error{.code = Code::kAborted, .what = "cancelled by who watches its progress", .next_step = "start it again"};
}

uint8_t ProgressFile::phase() const noexcept {
  return static_cast<uint8_t>(page_.phase.load(std::memory_order_relaxed));
}

Progress ProgressFile::read() const noexcept {
  Progress progress;
  const uint64_t began = page_.began_ns.load(std::memory_order_relaxed);
  progress.bytes_done = page_.bytes_done.load(std::memory_order_relaxed);
  progress.bytes_total = page_.bytes_total.load(std::memory_order_relaxed);
  const std::chrono::nanoseconds since(static_cast<int64_t>(began));
  if (began != 0) progress.seconds = seconds_between(since, clock_.now());
  return progress;
}

}  // namespace torpor
