// SPDX-License-Identifier: Apache-2.0
#include "base/shared_page.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include <fmt/core.h>

#include "base/linux_file.h"

namespace torpor {
namespace {

struct Marked {
  std::atomic<uint64_t> mark;
};

}  // namespace

Result<std::unique_ptr<SharedPage>> SharedPage::map(int fd) {
  void* const memory = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return system_error(errno, "mapping it");
  try {
    return std::unique_ptr<SharedPage>(new SharedPage(memory));
  } catch (...) {
    (void)::munmap(memory, kPage);
    throw;
  }
}

Result<std::unique_ptr<SharedPage>> SharedPage::create(const std::string& path, uint64_t mark) {
  return try_catch([&]() -> Result<std::unique_ptr<SharedPage>> {
    const Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (file.get() < 0) return system_error(errno, fmt::format("making {}", path));
    Result<std::unique_ptr<SharedPage>> made = try_catch([&]() -> Result<std::unique_ptr<SharedPage>> {
      // Allocate the page now: if memory is short, that is an error here and not a signal later.
      if (const int failed = ::posix_fallocate(file.get(), 0, kPage); failed != 0) return system_error(failed, path);
      return map(file.get());
    });
    if (!made) {
      (void)::unlink(path.c_str());
      return made.error().within(path);
    }
    (*made)->as<Marked>().mark.store(mark, std::memory_order_release);
    return made;
  });
}

Result<std::unique_ptr<SharedPage>> SharedPage::open(const std::string& path, uint64_t mark, std::string_view what) {
  return try_catch([&]() -> Result<std::unique_ptr<SharedPage>> {
    const Descriptor file(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (file.get() < 0) return system_error(errno, fmt::format("opening {}", path));
    return open(file.get(), path, mark, what);
  });
}

Result<std::unique_ptr<SharedPage>> SharedPage::open(int file, const std::string& path, uint64_t mark,
                                                     std::string_view what) {
  return try_catch([&]() -> Result<std::unique_ptr<SharedPage>> {
    struct stat status {};
    if (::fstat(file, &status) != 0) return system_error(errno, fmt::format("looking at {}", path));
    if (!S_ISREG(status.st_mode) || !is_own(status)) {
      return Error{.code = Code::kFailedPrecondition,
                   .what = fmt::format("{} is not a file of this user alone", path),
                   .next_step = "use one of your own engines"};
    }
    const Error damaged{.code = Code::kCorruption, .what = fmt::format("{} is not {}", path, what)};
    if (status.st_size != static_cast<off_t>(kPage)) return damaged;
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<SharedPage> opened, map(file));
    if (opened->as<Marked>().mark.load(std::memory_order_acquire) != mark) return damaged;
    return opened;
  });
}

SharedPage::~SharedPage() { (void)::munmap(memory_, kPage); }

}  // namespace torpor
