// SPDX-License-Identifier: Apache-2.0
// FaultyFileSystem: a FileSystem over another one. It counts every call that changes or reads something. At the n-th
// call it fails, or kills the process with SIGKILL, before or after the call took effect.
#pragma once

#include <atomic>
#include <cerrno>
#include <csignal>
#include <memory>
#include <set>

#include <unistd.h>

#include "base/file_system.h"

namespace torpor::test {

// kKillTorn: kill in the middle of a write. kErrorTorn: kError, and a write that fails takes effect by half.
enum class Fault : uint8_t { kNone, kError, kErrorTorn, kKillBefore, kKillAfter, kKillTorn };

// The plan may be set while other threads call.
struct FaultPlan {
  std::atomic<Fault> fault = Fault::kNone;
  std::atomic<uint64_t> at = 0;      // number of the call; 1 is the first
  std::atomic<int> native = EIO;     // kError, kErrorTorn: errno
  std::atomic<bool> sticky = false;  // kError, kErrorTorn: all later calls fail too
  std::atomic<uint64_t> calls = 0;
  std::set<uint64_t>* writes = nullptr;  // gets the numbers of all writes; for one thread only

  void set(Fault what, uint64_t n, int error = EIO, bool all_after = false) {
    calls = 0, fault = what, at = n, native = error, sticky = all_after;
  }
  void clear() { set(Fault::kNone, 0); }
  bool fired() const { return fault != Fault::kNone && calls >= at; }

  // Run one call under the plan.
  template <class Call>
  auto run(Call call) -> decltype(call()) {
    const uint64_t number = ++calls;
    const bool now = number == at || (sticky && number > at);
    if ((fault == Fault::kError || fault == Fault::kErrorTorn) && now) return system_error(native, "injected");
    if (fault == Fault::kKillBefore && now) ::kill(::getpid(), SIGKILL);
    auto result = call();
    if (fault == Fault::kKillAfter && now) ::kill(::getpid(), SIGKILL);
    return result;
  }
};

class FaultyFile final : public File {
 public:
  FaultyFile(std::unique_ptr<File> inner, FaultPlan& plan) : inner_(std::move(inner)), plan_(plan) {}
  Result<uint64_t> size() const override {
    return plan_.run([&] { return inner_->size(); });
  }
  Status pread(std::span<std::byte> bytes, uint64_t offset) const override {
    return plan_.run([&] { return inner_->pread(bytes, offset); });
  }
  Status pwrite(std::span<const std::byte> bytes, uint64_t offset) override {
    if (plan_.fault == Fault::kErrorTorn && plan_.calls + 1 == plan_.at)
      (void)inner_->pwrite(bytes.first(bytes.size() / 2), offset);
    return plan_.run([&]() -> Status {
      if (plan_.writes != nullptr) plan_.writes->insert(plan_.calls);
      if (plan_.fault == Fault::kKillTorn && plan_.calls == plan_.at) {
        (void)inner_->pwrite(bytes.first(bytes.size() / 2), offset);
        ::kill(::getpid(), SIGKILL);
      }
      return inner_->pwrite(bytes, offset);
    });
  }
  Status preallocate(uint64_t size) override {
    return plan_.run([&] { return inner_->preallocate(size); });
  }
  Status truncate(uint64_t size) override {
    return plan_.run([&] { return inner_->truncate(size); });
  }
  Status sync() override {
    return plan_.run([&] { return inner_->sync(); });
  }
  const std::string& name() const override { return inner_->name(); }
  std::string_view io() const override { return inner_->io(); }

 private:
  std::unique_ptr<File> inner_;
  FaultPlan& plan_;
};

class FaultyDirectory final : public Directory {
 public:
  FaultyDirectory(std::unique_ptr<Directory> inner, FaultPlan& plan) : inner_(std::move(inner)), plan_(plan) {}
  const std::string& path() const override { return inner_->path(); }
  Result<std::unique_ptr<File>> create_file(std::string_view name,
                                            FileIo) override {  // plain, so that writes can be torn anywhere
    return file([&] { return inner_->create_file(name); });
  }
  Result<std::unique_ptr<File>> open_file(std::string_view name, FileIo) const override {
    return file([&] { return inner_->open_file(name); });
  }
  Result<std::unique_ptr<File>> open_slots(std::string_view name, FileIo wish) override {
    return file([&] { return inner_->open_slots(name, wish); });
  }
  Result<std::unique_ptr<Directory>> create_directory(std::string_view name) override {
    return directory([&] { return inner_->create_directory(name); });
  }
  Result<std::unique_ptr<Directory>> open_directory(std::string_view name) const override {
    return directory([&] { return inner_->open_directory(name); });
  }
  Result<std::vector<Entry>> list() const override {
    return plan_.run([&] { return inner_->list(); });
  }
  Status rename_new(std::string_view from, std::string_view to) override {
    return plan_.run([&] { return inner_->rename_new(from, to); });
  }
  Status link_new(std::string_view name, Directory& into, std::string_view to) override {
    const auto* const faulty = dynamic_cast<const FaultyDirectory*>(&into);
    return plan_.run([&] { return inner_->link_new(name, faulty != nullptr ? *faulty->inner_ : into, to); });
  }
  Status remove_file(std::string_view name) override {
    return plan_.run([&] { return inner_->remove_file(name); });
  }
  Status remove_tree(std::string_view name) override {
    return plan_.run([&] { return inner_->remove_tree(name); });
  }
  Status sync() override {
    return plan_.run([&] { return inner_->sync(); });
  }
  Result<uint64_t> free_bytes() const override {
    return plan_.run([&] { return inner_->free_bytes(); });
  }
  Result<std::unique_ptr<File>> lock(std::string_view name) override {
    return file([&] { return inner_->lock(name); });
  }

 private:
  template <class Call>
  Result<std::unique_ptr<File>> file(Call call) const {
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<File> inner, plan_.run(call));
    return std::unique_ptr<File>(std::make_unique<FaultyFile>(std::move(inner), plan_));
  }
  template <class Call>
  Result<std::unique_ptr<Directory>> directory(Call call) const {
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<Directory> inner, plan_.run(call));
    return std::unique_ptr<Directory>(std::make_unique<FaultyDirectory>(std::move(inner), plan_));
  }
  std::unique_ptr<Directory> inner_;
  FaultPlan& plan_;
};

class FaultyFileSystem final : public FileSystem {
 public:
  explicit FaultyFileSystem(FileSystem& inner = linux_file_system()) : inner_(inner) {}
  FaultPlan plan;
  Result<std::unique_ptr<Directory>> open_directory(const std::string& path, bool create) override {
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<Directory> inner,
                            plan.run([&] { return inner_.open_directory(path, create); }));
    return std::unique_ptr<Directory>(std::make_unique<FaultyDirectory>(std::move(inner), plan));
  }

 private:
  FileSystem& inner_;
};

}  // namespace torpor::test
