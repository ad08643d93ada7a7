// SPDX-License-Identifier: Apache-2.0
// File for Linux: LinuxFile, a plain file, and FastFile, for large transfers with direct I/O and io_uring, which may
// read from the page cache. A descriptor is never that of a standard stream, and no link is followed.
//
// Owner: linux_file_system.cpp, which decides what may be opened.
#pragma once

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <fmt/core.h>

#include "base/file_system.h"
#include "base/units.h"
#include "base/uring_queue.h"

namespace torpor {

inline constexpr uint64_t kUringPiece = uint64_t{1} << 20;  // bytes of one operation

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

// Take over `fd`, moved above 2: a stray print to a standard stream can then never write into a file of ours.
inline Result<Descriptor> guarded(int fd, const std::string& what) {
  if (fd < 0) return system_error(errno, what);
  if (fd > 2) return Descriptor(fd);
  const Descriptor low(fd);
  const int high = ::fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (high < 0) return system_error(errno, what);
  return Descriptor(high);
}

// Return whether this user owns the file and nobody else may write to it.
inline bool is_own(const struct stat& status) {
  return status.st_uid == ::geteuid() && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

inline Result<Descriptor> open_beneath(int directory, const std::string& name, int flags, mode_t mode,
                                       const std::string& what) {
  open_how how{};
  how.flags = static_cast<uint64_t>(flags | O_CLOEXEC | O_NOFOLLOW);
  how.mode = mode;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS;
  int fd = static_cast<int>(::syscall(SYS_openat2, directory, name.c_str(), &how, sizeof how));
  if (fd < 0 && (errno == ENOSYS || errno == EPERM)) {  // before Linux 5.6, or forbidden by a container
    fd = ::openat(directory, name.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, mode);
  }
  return guarded(fd, what);
}

class LinuxFile : public File {
 public:
  LinuxFile(Descriptor fd, std::string name) : fd_(std::move(fd)), name_(std::move(name)) {}

  Result<uint64_t> size() const override {
    struct stat info {};
    if (::fstat(fd_.get(), &info) != 0) return system_error(errno, fmt::format("cannot read the size of {}", name_));
    return static_cast<uint64_t>(info.st_size);
  }

  Status pread(std::span<std::byte> bytes, uint64_t offset) const override {
    const uint64_t wanted = bytes.size();
    while (!bytes.empty()) {
      const ssize_t got = ::pread(fd_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      const int problem = got < 0 ? errno : 0;
      if (problem != 0 && !(problem == EINVAL && ends_before(offset + bytes.size())))
        return system_error(problem, fmt::format("cannot read {}", name_));
      if (got <= 0) {
        return Error{.code = Code::kCorruption,
                     .what = fmt::format("{} ends too early: {} of {} bytes at offset {}", name_, wanted - bytes.size(),
                                         wanted, offset - (wanted - bytes.size())),
                     .next_step = "the file was truncated; use another checkpoint"};
      }
      bytes = bytes.subspan(static_cast<size_t>(got));
      offset += static_cast<uint64_t>(got);
    }
    return ok();
  }

  Status pwrite(std::span<const std::byte> bytes, uint64_t offset) override {
    while (!bytes.empty()) {
      const ssize_t put = ::pwrite(fd_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
      if (put < 0 && errno == EINTR) continue;
      if (put < 0)
        return system_error(errno, fmt::format("cannot write {}", name_),
                            "free disk space or choose another directory");
      bytes = bytes.subspan(static_cast<size_t>(put));
      offset += static_cast<uint64_t>(put);
    }
    return ok();
  }

  Status preallocate(uint64_t size) override {
    while (::fallocate(fd_.get(), 0, 0, static_cast<off_t>(size)) != 0) {
      if (errno == EINTR) continue;
      if (errno == EOPNOTSUPP || errno == ENOSYS) return ok();
      return system_error(errno, fmt::format("cannot reserve {} bytes for {}", size, name_),
                          "free disk space or choose another directory");
    }
    return ok();
  }

  Status truncate(uint64_t size) override {
    while (::ftruncate(fd_.get(), static_cast<off_t>(size)) != 0) {
      if (errno != EINTR) return system_error(errno, fmt::format("cannot set the size of {}", name_));
    }
    return ok();
  }

  Status sync() override {
    if (::fsync(fd_.get()) != 0)
      return system_error(errno, fmt::format("cannot sync {}", name_), "the file was given up");
    return ok();
  }

  const std::string& name() const override { return name_; }

 protected:
  int descriptor() const { return fd_.get(); }

 private:
  // A direct read that begins in the middle of a block, behind the end of the file, fails with EINVAL.
  bool ends_before(uint64_t offset) const {
    struct stat info {};
    return ::fstat(fd_.get(), &info) == 0 && static_cast<uint64_t>(info.st_size) < offset;
  }
  Descriptor fd_;
  std::string name_;
};

// CachedPages: reads those bytes of a file that lie in the page cache. Thread-safe.
class CachedPages {
 public:
  // `fd`: the file, without direct I/O. Return null if the system does not say what is cached.
  static std::unique_ptr<CachedPages> of(Descriptor fd) {
    struct stat info {};
    if (::fstat(fd.get(), &info) != 0 || info.st_size == 0) return nullptr;
    // mincore() says of files of others that all is cached.
    if (info.st_uid != ::geteuid() && ::geteuid() != 0) return nullptr;
    const auto bytes = static_cast<uint64_t>(info.st_size);
    void* const memory = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd.get(), 0);
    if (memory == MAP_FAILED) return nullptr;
    return std::unique_ptr<CachedPages>(new CachedPages(std::move(fd), static_cast<std::byte*>(memory), bytes));
  }
  ~CachedPages() { ::munmap(memory_, bytes_); }
  CachedPages(const CachedPages&) = delete;
  CachedPages& operator=(const CachedPages&) = delete;

  // Read the cached bytes from `offset` (a multiple of a page) on, up to the first gap. Return how many were read: all
  // of `bytes`, or whole pages.
  size_t read(std::span<std::byte> bytes, uint64_t offset) const {
    // RWF_NOWAIT alone would start a read ahead from the disk if nothing is cached.
    unsigned char first = 0;
    if (offset >= bytes_ || ::mincore(memory_ + offset, 1, &first) != 0 || (first & 1) == 0) return 0;
    const iovec room{bytes.data(), bytes.size()};
    const ssize_t got = ::preadv2(fd_.get(), &room, 1, static_cast<off_t>(offset), RWF_NOWAIT);
    if (got <= 0) return 0;
    const auto some = static_cast<size_t>(got);
    return some == bytes.size() ? some : some / kPage * kPage;
  }

 private:
  CachedPages(Descriptor fd, std::byte* memory, uint64_t bytes) : fd_(std::move(fd)), memory_(memory), bytes_(bytes) {}
  const Descriptor fd_;
  std::byte* const memory_;  // never read: only mincore() uses the address
  const uint64_t bytes_;
};

// A file for large transfers: with direct I/O, io_uring or cached pages, each if given.
class FastFile final : public LinuxFile {
 public:
  FastFile(Descriptor fd, std::string name, bool direct, std::unique_ptr<UringQueue> queue,
           std::unique_ptr<CachedPages> pages)
      : LinuxFile(std::move(fd), std::move(name)),
        direct_(direct),
        queue_(std::move(queue)),
        pages_(std::move(pages)) {}

  void pread_all(std::span<FilePart> parts) const override {
    if (queue_ == nullptr && pages_ == nullptr) return File::pread_all(parts);
    run(parts, false, [this](std::span<std::byte> rest, uint64_t offset) { return pread(rest, offset); });
  }
  void pwrite_all(std::span<FilePart> parts) override {
    if (queue_ == nullptr) return File::pwrite_all(parts);
    run(parts, true, [this](std::span<std::byte> rest, uint64_t offset) { return pwrite(rest, offset); });
  }
  std::string_view io() const override {
    if (queue_ != nullptr) return direct_ ? "io_uring, direct" : "io_uring";
    return direct_ ? "direct" : "plain";
  }

 private:
  // Split large parts into several operations at once, without the bytes that were cached. Plain calls finish what came
  // back short or was interrupted; they also make the error.
  template <class Finish>
  void run(std::span<FilePart> parts, bool write, Finish finish) const {
    std::vector<FilePart> pieces;
    std::vector<FilePart*> owner;
    for (FilePart& part : parts) {
      part.status = ok();
      for (uint64_t at = 0; at < part.bytes.size(); at += kUringPiece) {
        const auto piece = part.bytes.subspan(at, std::min<uint64_t>(kUringPiece, part.bytes.size() - at));
        const size_t cached = write || pages_ == nullptr ? 0 : pages_->read(piece, part.offset + at);
        if (cached == piece.size()) continue;
        pieces.push_back({part.offset + at + cached, piece.subspan(cached), ok()});
        owner.push_back(&part);
      }
    }
    std::vector<int32_t> results(pieces.size(), -EAGAIN);
    if (queue_ != nullptr) queue_->run(descriptor(), write, pieces, results);
    for (size_t i = 0; i < pieces.size(); ++i) {
      const FilePart& piece = pieces[i];
      Status& status = owner[i]->status;
      if (!status) continue;
      const size_t done = results[i] > 0 ? static_cast<size_t>(results[i]) : 0;
      if (results[i] < 0 && results[i] != -EINTR && results[i] != -EAGAIN) {
        status = system_error(-results[i], fmt::format("cannot {} {}", write ? "write" : "read", name()));
      } else if (done != piece.bytes.size()) {
        const size_t whole = direct_ ? done / kPage * kPage : done;  // direct I/O goes on at a page
        status = finish(piece.bytes.subspan(whole), piece.offset + whole);
      }
    }
  }
  const bool direct_;
  const std::unique_ptr<UringQueue> queue_;
  const std::unique_ptr<CachedPages> pages_;
};

}  // namespace torpor
