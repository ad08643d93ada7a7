// SPDX-License-Identifier: Apache-2.0
#include "base/progress_file.h"

#include <atomic>

#include "base/log.h"

namespace torpor {
namespace {

constexpr uint64_t kMark = 0x31474f5250524f54;  // "TORPROG1"

}  // namespace

// Content of the page; the rest of it is zero.
struct ProgressFile::Page {
  std::atomic<uint64_t> mark;
  std::atomic<uint64_t> phase;
  std::atomic<uint64_t> cancelled;
  std::atomic<uint64_t> began_ns;  // monotonic time of the first expect(); 0: none yet
  std::atomic<uint64_t> bytes_total;
  std::atomic<uint64_t> bytes_done;
};

ProgressFile::ProgressFile(std::unique_ptr<SharedPage> page, const Clock& clock)
    : shared_(std::move(page)), page_(shared_->as<Page>()), clock_(clock) {}

Result<std::shared_ptr<ProgressFile>> ProgressFile::create(const std::string& path, const Clock& clock) {
  TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<SharedPage> page, SharedPage::create(path, kMark));
  return try_catch([&]() -> Result<std::shared_ptr<ProgressFile>> {
    return std::shared_ptr<ProgressFile>(new ProgressFile(std::move(page), clock));
  });
}

Result<std::shared_ptr<ProgressFile>> ProgressFile::open(const std::string& path, const Clock& clock) {
  TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<SharedPage> page, SharedPage::open(path, kMark, "a file of progress"));
  return try_catch([&]() -> Result<std::shared_ptr<ProgressFile>> {
    return std::shared_ptr<ProgressFile>(new ProgressFile(std::move(page), clock));
  });
}

std::shared_ptr<ProgressFile> ProgressFile::of_caller(const std::string& path, const Clock& clock) noexcept {
  std::shared_ptr<ProgressFile> found;
  if (path.empty()) return found;
  (void)try_catch([&]() -> Status {
    Result<std::shared_ptr<ProgressFile>> opened = open(path, clock);
    if (opened) found = std::move(*opened);
    if (!opened) log().warn("nobody sees the progress of this: {}", opened.error());
    return ok();
  });
  return found;
}

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
