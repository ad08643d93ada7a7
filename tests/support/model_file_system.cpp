// SPDX-License-Identifier: Apache-2.0
#include "tests/support/model_file_system.h"

#include <algorithm>

#include <fmt/core.h>

namespace torpor::test {
namespace {

using Kind = ModelChange::Kind;

Error not_found(const std::string& path) { return system_error(ENOENT, fmt::format("cannot open {}", path)); }

std::vector<std::string> components(const std::string& path) {
  std::vector<std::string> parts;
  std::string part;
  for (const char c : path + "/") {
    if (c != '/') {
      part += c;
    } else if (!part.empty()) {
      parts.push_back(std::move(part));
      part.clear();
    }
  }
  return parts;
}

}  // namespace

class ModelFile final : public File {
 public:
  ModelFile(ModelFileSystem& system, int node, std::string name, bool lock)
      : system_(system), node_(node), name_(std::move(name)), lock_(lock) {}
  ~ModelFile() override {
    if (lock_) system_.locked_.erase(node_);
  }
  Result<uint64_t> size() const override { return system_.disk_[static_cast<size_t>(node_)].bytes.size(); }
  Status pread(std::span<std::byte> bytes, uint64_t offset) const override {
    const Bytes& content = system_.disk_[static_cast<size_t>(node_)].bytes;
    if (offset > content.size() || bytes.size() > content.size() - offset)
      return Error{.code = Code::kCorruption, .what = fmt::format("{} ends too early", name_)};
    if (!bytes.empty()) std::memcpy(bytes.data(), content.data() + offset, bytes.size());
    return ok();
  }
  Status pwrite(std::span<const std::byte> bytes, uint64_t offset) override {
    const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
    system_.apply({.kind = Kind::kWrite, .node = node_, .offset = offset, .bytes = Bytes(data, data + bytes.size())});
    return ok();
  }
  Status preallocate(uint64_t) override { return ok(); }
  Status truncate(uint64_t size) override {
    system_.apply({.kind = Kind::kTruncate, .node = node_, .offset = size});
    return ok();
  }
  Status sync() override {
    system_.apply({.kind = Kind::kSyncFile, .node = node_, .name = name_});
    return ok();
  }
  const std::string& name() const override { return name_; }

 private:
  ModelFileSystem& system_;
  const int node_;
  const std::string name_;
  const bool lock_;
};

class ModelDirectory final : public Directory {
 public:
  ModelDirectory(ModelFileSystem& system, int node, std::string path)
      : system_(system), node_(node), path_(std::move(path)) {}
  const std::string& path() const override { return path_; }
  Result<std::unique_ptr<File>> create_file(std::string_view name, FileIo) override {
    if (entry(name)) return system_error(EEXIST, fmt::format("cannot create {}", join(name)));
    return file(make(name, {}), name);
  }
  Result<std::unique_ptr<File>> open_file(std::string_view name, FileIo) const override {
    const std::optional<int> found = entry(name);
    if (!found || system_.disk_[static_cast<size_t>(*found)].is_directory) return not_found(join(name));
    return file(*found, name);
  }
  Result<std::unique_ptr<File>> open_slots(std::string_view name, FileIo) override {
    return file(entry(name) ? *entry(name) : make(name, {}), name);
  }
  Result<std::unique_ptr<Directory>> create_directory(std::string_view name) override {
    if (entry(name)) return system_error(EEXIST, fmt::format("cannot make {}", join(name)));
    make(name, {.is_directory = true});
    return open_directory(name);
  }
  Result<std::unique_ptr<Directory>> open_directory(std::string_view name) const override {
    const std::optional<int> found = entry(name);
    if (!found || !system_.disk_[static_cast<size_t>(*found)].is_directory) return not_found(join(name));
    return std::unique_ptr<Directory>(std::make_unique<ModelDirectory>(system_, *found, join(name)));
  }
  Result<std::vector<Entry>> list() const override {
    std::vector<Entry> entries;
    for (const auto& [name, node] : self().entries)
      entries.push_back(
          {name, system_.disk_[static_cast<size_t>(node)].is_directory ? EntryKind::kDirectory : EntryKind::kFile});
    return entries;
  }
  Status rename_new(std::string_view from, std::string_view to) override {
    if (!entry(from) || entry(to))
      return system_error(entry(to) ? EEXIST : ENOENT, fmt::format("cannot rename {}", join(from)));
    system_.apply({.kind = Kind::kRename,
                   .node = node_,
                   .name = std::string(from),
                   .to = std::string(to),
                   .target = *entry(from),
                   .directory = system_.disk_[static_cast<size_t>(*entry(from))].is_directory});
    return ok();
  }
  Status link_new(std::string_view name, Directory& into, std::string_view to) override {
    auto* const target = dynamic_cast<ModelDirectory*>(&into);
    if (target == nullptr || &target->system_ != &system_)
      return system_error(EXDEV, fmt::format("cannot link {}", join(name)));
    if (!entry(name) || target->entry(to))
      return system_error(entry(name) ? EEXIST : ENOENT, fmt::format("cannot link {}", join(name)));
    system_.apply({.kind = Kind::kLink, .node = target->node_, .name = std::string(to), .target = *entry(name)});
    return ok();
  }
  Status remove_file(std::string_view name) override {
    if (!entry(name)) return not_found(join(name));
    system_.apply({.kind = Kind::kUnlink, .node = node_, .name = std::string(name)});
    return ok();
  }
  Status remove_tree(std::string_view name) override {
    const std::optional<int> found = entry(name);
    if (!found) return not_found(join(name));
    if (system_.disk_[static_cast<size_t>(*found)].is_directory) {
      ModelDirectory inner(system_, *found, join(name));
      TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, inner.list());
      for (const Entry& each : entries) TORPOR_RETURN_IF_ERROR(inner.remove_tree(each.name));
    }
    return remove_file(name);
  }
  Status sync() override {
    system_.apply({.kind = Kind::kSyncDirectory, .node = node_, .name = path_});
    return ok();
  }
  Result<uint64_t> free_bytes() const override { return uint64_t{1} << 40; }
  Result<std::unique_ptr<File>> lock(std::string_view name) override {
    const int node = entry(name) ? *entry(name) : make(name, {});
    if (!system_.locks_work) return file(node, name);
    if (system_.locked_.contains(node)) return Error{.code = Code::kUnavailable, .what = "locked"};
    std::unique_ptr<File> file = std::make_unique<ModelFile>(system_, node, join(name), true);
    system_.locked_.insert(node);
    return file;
  }

 private:
  const ModelNode& self() const { return system_.disk_[static_cast<size_t>(node_)]; }
  std::optional<int> entry(std::string_view name) const {
    const auto found = self().entries.find(std::string(name));
    return found == self().entries.end() ? std::nullopt : std::optional(found->second);
  }
  std::string join(std::string_view name) const { return fmt::format("{}/{}", path_, name); }
  std::unique_ptr<File> file(int node, std::string_view name) const {
    return std::make_unique<ModelFile>(system_, node, join(name), false);
  }
  int make(std::string_view name, ModelNode node) {
    const bool directory = node.is_directory;
    const int made = system_.add(std::move(node));
    system_.apply(
        {.kind = Kind::kLink, .node = node_, .name = std::string(name), .target = made, .directory = directory});
    return made;
  }
  ModelFileSystem& system_;
  const int node_;
  const std::string path_;
};

int ModelFileSystem::add(ModelNode node) {
  disk_.push_back(std::move(node));
  return static_cast<int>(disk_.size()) - 1;
}

void ModelFileSystem::apply(ModelChange change) {
  if (ignored && ignored(change)) return;
  apply_change(disk_, change);
  record.push_back(std::move(change));
}

int ModelFileSystem::find(const std::string& path) const {
  int node = 0;
  for (const std::string& part : components(path)) {
    const auto found = disk_[static_cast<size_t>(node)].entries.find(part);
    if (found == disk_[static_cast<size_t>(node)].entries.end()) return -1;
    node = found->second;
  }
  return node;
}

Result<std::unique_ptr<Directory>> ModelFileSystem::open_directory(const std::string& path, bool create) {
  int node = 0;
  std::string so_far;
  for (const std::string& part : components(path)) {
    const auto found = disk_[static_cast<size_t>(node)].entries.find(part);
    if (found != disk_[static_cast<size_t>(node)].entries.end()) {
      node = found->second;
    } else if (create) {
      const int made = add({.is_directory = true});
      apply({.kind = Kind::kLink, .node = node, .name = part, .target = made, .directory = true});
      apply({.kind = Kind::kSyncDirectory, .node = node, .name = so_far});
      node = made;
    } else {
      return not_found(path);
    }
    so_far += "/" + part;
  }
  if (!disk_[static_cast<size_t>(node)].is_directory) return not_found(path);
  return std::unique_ptr<Directory>(std::make_unique<ModelDirectory>(*this, node, so_far));
}

void apply_change(ModelDisk& disk, const ModelChange& change) {
  const auto most = static_cast<size_t>(
      std::max(change.node, change.kind == Kind::kLink || change.kind == Kind::kRename ? change.target : 0));
  if (disk.size() <= most) disk.resize(most + 1);
  ModelNode& node = disk[static_cast<size_t>(change.node)];
  switch (change.kind) {
    case Kind::kWrite:
      if (node.bytes.size() < change.offset + change.bytes.size())
        node.bytes.resize(change.offset + change.bytes.size());
      std::copy(change.bytes.begin(), change.bytes.end(),
                node.bytes.begin() + static_cast<std::ptrdiff_t>(change.offset));
      break;
    case Kind::kTruncate: node.bytes.resize(change.offset); break;
    case Kind::kLink:
      disk[static_cast<size_t>(change.target)].is_directory = change.directory;
      node.entries[change.name] = change.target;
      break;
    case Kind::kUnlink: node.entries.erase(change.name); break;
    case Kind::kRename:
      disk[static_cast<size_t>(change.target)].is_directory = change.directory;
      node.entries[change.to] = change.target;  // the new name gets the node, even if the old name was lost
      if (const auto found = node.entries.find(change.name);
          found != node.entries.end() && found->second == change.target)
        node.entries.erase(found);
      break;
    default: break;
  }
}

void PowerCuts::step() {
  const ModelChange& change = record_[at_++];
  switch (change.kind) {
    case Kind::kNote: break;
    case Kind::kSyncFile:
    case Kind::kSyncDirectory:
      for (const ModelChange* each : pending_[change.node]) apply_change(durable_, *each);
      pending_.erase(change.node);
      break;
    default: pending_[change.node].push_back(&change);
  }
}

ModelDisk PowerCuts::state(int choice, std::mt19937_64& random) const {
  ModelDisk disk = durable_;
  const auto half = [&] { return (random() & 1) != 0; };
  for (const auto& [node, changes] : pending_) {
    for (const ModelChange* change : changes) {
      if (choice == 0) break;
      const bool whole = choice == 1 || half();
      if (whole) {
        apply_change(disk, *change);
      } else if (change->kind == Kind::kWrite && half()) {
        const uint64_t sector = half() ? 512 : 4096;
        for (uint64_t at = 0; at < change->bytes.size(); at += sector) {
          if (half()) continue;
          const auto begin = change->bytes.begin() + static_cast<std::ptrdiff_t>(at);
          const auto end = change->bytes.begin() +
                           static_cast<std::ptrdiff_t>(std::min<uint64_t>(at + sector, change->bytes.size()));
          apply_change(disk,
                       {.kind = Kind::kWrite, .node = node, .offset = change->offset + at, .bytes = Bytes(begin, end)});
        }
      }
    }
  }
  return disk;
}

}  // namespace torpor::test
