// SPDX-License-Identifier: Apache-2.0
#include "offload/segment_directory.h"

#include <algorithm>
#include <thread>

#include "base/log.h"
#include "offload/segment_format.h"

namespace torpor {
namespace {

constexpr std::chrono::milliseconds kLockPause{50};

Result<std::unique_ptr<File>> lock_of(Directory& directory, std::chrono::milliseconds wait) {
  const auto end = std::chrono::steady_clock::now() + wait;
  while (true) {
    Result<std::unique_ptr<File>> lock = directory.lock("LOCK");
    const bool taken = !lock && lock.error().code == Code::kUnavailable;
    if (!taken || std::chrono::steady_clock::now() >= end) return lock;
    std::this_thread::sleep_for(kLockPause);
  }
}

}  // namespace

// Exclusive use of the directory for one thread.
class SegmentDirectory::Turn {
 public:
  explicit Turn(SegmentDirectory& of) : of_(of) {
    const MutexLock lock(of_.mutex_);
    while (of_.busy_) of_.turn_ended_.wait(of_.mutex_);
    of_.busy_ = true;
  }
  ~Turn() {
    const MutexLock lock(of_.mutex_);
    of_.busy_ = false;
    of_.turn_ended_.notify_one();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  Directory* operator->() { return of_.directory_.get(); }

 private:
  SegmentDirectory& of_;
};

SegmentDirectory::SegmentDirectory(std::unique_ptr<Directory> directory, std::unique_ptr<File> lock)
    : directory_(std::move(directory)), lock_(std::move(lock)), path_(directory_->path()) {}

Result<std::unique_ptr<SegmentDirectory>> SegmentDirectory::open(FileSystem& file_system, const std::string& path,
                                                                 std::chrono::milliseconds lock_wait) {
  TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<Directory> directory, file_system.open_directory(path, true));
  TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<File> lock, lock_of(*directory, lock_wait));
  return std::unique_ptr<SegmentDirectory>(new SegmentDirectory(std::move(directory), std::move(lock)));
}

Result<SegmentDirectory::Content> SegmentDirectory::content() {
  Content content;
  Turn directory(*this);
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, directory->list());
  for (const Entry& entry : entries) {
    const std::optional<uint64_t> number = segment_number(entry.name);
    if (!number || entry.kind != EntryKind::kFile) continue;
    content.numbers.push_back(*number);
    const Result<std::unique_ptr<File>> file = directory->open_file(entry.name);
    const Result<uint64_t> size = file ? (*file)->size() : Result<uint64_t>(0);
    content.bytes += size ? *size : 0;
  }
  std::sort(content.numbers.begin(), content.numbers.end());
  return content;
}

Result<uint64_t> SegmentDirectory::free_bytes() { return Turn(*this)->free_bytes(); }

Result<std::unique_ptr<File>> SegmentDirectory::create(uint64_t number, FileIo io) {
  return Turn(*this)->create_file(segment_name(number), io);
}

Result<std::unique_ptr<File>> SegmentDirectory::open_file(uint64_t number, FileIo io) {
  return Turn(*this)->open_file(segment_name(number), io);
}

Status SegmentDirectory::sync() { return Turn(*this)->sync(); }

Status SegmentDirectory::link(uint64_t number, Directory& into, const std::string& name) {
  return Turn(*this)->link_new(segment_name(number), into, name);
}

void SegmentDirectory::remove(uint64_t number) noexcept {
  const Status removed = try_catch([&] { return Turn(*this)->remove_file(segment_name(number)); });
  if (!removed && removed.error().code != Code::kNotFound) log().warn("blocks on disk: {}", removed.error());
}

bool SegmentDirectory::remove_later(uint64_t number, std::shared_ptr<File> file) noexcept {
  return try_catch([&] {
           const MutexLock lock(mutex_);
           queued_.push_back({number, std::move(file)});
           return ok();
         })
      .has_value();
}

void SegmentDirectory::remove_queued() noexcept {
  std::vector<Removal> removals;
  {
    const MutexLock lock(mutex_);
    removals.swap(queued_);
  }
  for (const Removal& each : removals) remove(each.number);
}

}  // namespace torpor
