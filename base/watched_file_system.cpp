// SPDX-License-Identifier: Apache-2.0
#include "base/watched_file_system.h"

#include <utility>

#include <fmt/core.h>

namespace torpor {
namespace {

class WatchedFile final : public File {
 public:
  WatchedFile(std::unique_ptr<File> inner, const FileCallCheck& before) : inner_(std::move(inner)), before_(before) {}
  ~WatchedFile() override { (void)before_("close", inner_->name()); }
  Result<uint64_t> size() const override {
    TORPOR_RETURN_IF_ERROR(before_("size", name()));
    return inner_->size();
  }
  Status pread(std::span<std::byte> bytes, uint64_t offset) const override {
    TORPOR_RETURN_IF_ERROR(before_("pread", name()));
    return inner_->pread(bytes, offset);
  }
  Status pwrite(std::span<const std::byte> bytes, uint64_t offset) override {
    TORPOR_RETURN_IF_ERROR(before_("pwrite", name()));
    return inner_->pwrite(bytes, offset);
  }
  void pread_all(std::span<FilePart> parts) const override {
    if (allowed("pread_all", parts)) inner_->pread_all(parts);
  }
  void pwrite_all(std::span<FilePart> parts) override {
    if (allowed("pwrite_all", parts)) inner_->pwrite_all(parts);
  }
  Status preallocate(uint64_t size) override {
    TORPOR_RETURN_IF_ERROR(before_("preallocate", name()));
    return inner_->preallocate(size);
  }
  Status truncate(uint64_t size) override {
    TORPOR_RETURN_IF_ERROR(before_("truncate", name()));
    return inner_->truncate(size);
  }
  Status sync() override {
    TORPOR_RETURN_IF_ERROR(before_("sync", name()));
    return inner_->sync();
  }
  const std::string& name() const override { return inner_->name(); }
  std::string_view io() const override { return inner_->io(); }

 private:
  bool allowed(const char* call, std::span<FilePart> parts) const {
    const Status said = before_(call, name());
    for (FilePart& part : parts) part.status = said;
    return said.has_value();
  }
  const std::unique_ptr<File> inner_;
  const FileCallCheck& before_;
};

class WatchedDirectory final : public Directory {
 public:
  WatchedDirectory(std::unique_ptr<Directory> inner, const FileCallCheck& before)
      : inner_(std::move(inner)), before_(before) {}
  ~WatchedDirectory() override { (void)before_("close", path()); }
  const std::string& path() const override { return inner_->path(); }
  Result<std::unique_ptr<File>> create_file(std::string_view name, FileIo wish) override {
    return file("create_file", name, [&] { return inner_->create_file(name, wish); });
  }
  Result<std::unique_ptr<File>> open_file(std::string_view name, FileIo wish) const override {
    return file("open_file", name, [&] { return inner_->open_file(name, wish); });
  }
  Result<std::unique_ptr<File>> open_slots(std::string_view name, FileIo wish) override {
    return file("open_slots", name, [&] { return inner_->open_slots(name, wish); });
  }
  Result<std::unique_ptr<Directory>> create_directory(std::string_view name) override {
    return directory("create_directory", name, [&] { return inner_->create_directory(name); });
  }
  Result<std::unique_ptr<Directory>> open_directory(std::string_view name) const override {
    return directory("open_directory", name, [&] { return inner_->open_directory(name); });
  }
  Result<std::vector<Entry>> list() const override {
    TORPOR_RETURN_IF_ERROR(before_("list", path()));
    return inner_->list();
  }
  Status rename_new(std::string_view from, std::string_view to) override {
    TORPOR_RETURN_IF_ERROR(before_("rename_new", join(from)));
    return inner_->rename_new(from, to);
  }
  Status link_new(std::string_view name, Directory& into, std::string_view to) override {
    TORPOR_RETURN_IF_ERROR(before_("link_new", join(name)));
    const auto* const watched = dynamic_cast<const WatchedDirectory*>(&into);
    return inner_->link_new(name, watched != nullptr ? *watched->inner_ : into, to);
  }
  Status remove_file(std::string_view name) override {
    TORPOR_RETURN_IF_ERROR(before_("remove_file", join(name)));
    return inner_->remove_file(name);
  }
  Status remove_tree(std::string_view name) override {
    TORPOR_RETURN_IF_ERROR(before_("remove_tree", join(name)));
    return inner_->remove_tree(name);
  }
  Status sync() override {
    TORPOR_RETURN_IF_ERROR(before_("sync", path()));
    return inner_->sync();
  }
  Result<uint64_t> free_bytes() const override {
    TORPOR_RETURN_IF_ERROR(before_("free_bytes", path()));
    return inner_->free_bytes();
  }
  Result<std::unique_ptr<File>> lock(std::string_view name) override {
    return file("lock", name, [&] { return inner_->lock(name); });
  }

 private:
  std::string join(std::string_view name) const { return fmt::format("{}/{}", path(), name); }
  template <class Call>
  Result<std::unique_ptr<File>> file(const char* what, std::string_view name, const Call& call) const {
    TORPOR_RETURN_IF_ERROR(before_(what, join(name)));
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<File> opened, call());
    return std::unique_ptr<File>(std::make_unique<WatchedFile>(std::move(opened), before_));
  }
  template <class Call>
  Result<std::unique_ptr<Directory>> directory(const char* what, std::string_view name, const Call& call) const {
    TORPOR_RETURN_IF_ERROR(before_(what, join(name)));
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<Directory> opened, call());
    return std::unique_ptr<Directory>(std::make_unique<WatchedDirectory>(std::move(opened), before_));
  }
  const std::unique_ptr<Directory> inner_;
  const FileCallCheck& before_;
};

class WatchedFileSystem final : public FileSystem {
 public:
  WatchedFileSystem(FileSystem& inner, FileCallCheck before) : inner_(inner), before_(std::move(before)) {}
  Result<std::unique_ptr<Directory>> open_directory(const std::string& path, bool create) override {
    TORPOR_RETURN_IF_ERROR(before_("open_directory", path));
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<Directory> opened, inner_.open_directory(path, create));
    return std::unique_ptr<Directory>(std::make_unique<WatchedDirectory>(std::move(opened), before_));
  }

 private:
  FileSystem& inner_;
  const FileCallCheck before_;
};

}  // namespace

std::unique_ptr<FileSystem> make_watched_file_system(FileSystem& inner, FileCallCheck before) {
  return std::make_unique<WatchedFileSystem>(inner, std::move(before));
}

}  // namespace torpor
