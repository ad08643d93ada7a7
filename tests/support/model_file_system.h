// SPDX-License-Identifier: Apache-2.0
// ModelFileSystem: a file system in memory that records every change. From the record, PowerCuts makes the states in
// which a disk may be after a power cut: everything synced is there, and any part of the rest.
//
// POSIX allows for unsynced changes: each write is kept, lost, or torn at 512 bytes or 4 KiB, each sector by itself and
// in any order; each change of a directory (a name created, removed, moved) is kept or lost. fsync of a file makes its
// bytes durable, not its name; fsync of a directory makes the names in it durable.
#pragma once

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/file_system.h"
#include "base/value.h"

namespace torpor::test {

struct ModelNode {
  bool is_directory = false;
  Bytes bytes;                         // files
  std::map<std::string, int> entries;  // directories: name -> node
};

using ModelDisk = std::vector<ModelNode>;  // node 0 is the root

struct ModelChange {
  enum class Kind : uint8_t { kWrite, kTruncate, kSyncFile, kLink, kUnlink, kRename, kSyncDirectory, kNote };
  Kind kind = Kind::kNote;
  int node = 0;         // the file, or the directory whose entries change
  uint64_t offset = 0;  // kTruncate: the new size
  Bytes bytes;
  std::string name;        // the entry; kNote: the workload's own word
  std::string to;          // kRename
  int target = 0;          // kLink, kRename: the node; kNote: a number
  bool directory = false;  // kLink, kRename: the target is a directory
};

class ModelFileSystem final : public FileSystem {
 public:
  explicit ModelFileSystem(ModelDisk disk = ModelDisk(1, ModelNode{.is_directory = true})) : disk_(std::move(disk)) {}

  // Changes for which this returns true are reported as done, but not done: a planted mistake.
  std::function<bool(const ModelChange&)> ignored;
  std::vector<ModelChange> record;
  bool locks_work = true;  // false: each lock() succeeds, as where a file system has no locks between hosts
  void note(std::string word, int number) { record.push_back({.name = std::move(word), .target = number}); }
  ModelDisk& disk() { return disk_; }
  int find(const std::string& path) const;  // returns a node; -1: none

  Result<std::unique_ptr<Directory>> open_directory(const std::string& path, bool create) override;

 private:
  friend class ModelFile;
  friend class ModelDirectory;
  void apply(ModelChange change);
  int add(ModelNode node);
  ModelDisk disk_;
  std::set<int> locked_;
};

// Apply one change to a disk.
void apply_change(ModelDisk& disk, const ModelChange& change);

// Steps through a record, and makes the states in which the disk may be if the power fails at this point.
class PowerCuts {
 public:
  PowerCuts(const std::vector<ModelChange>& record, ModelDisk start) : record_(record), durable_(std::move(start)) {}
  bool done() const { return at_ == record_.size(); }
  size_t position() const { return at_; }
  void step();  // advances by one change
  // Return a possible state. `choice` 0: nothing unsynced survived; 1: everything did; else a random part.
  ModelDisk state(int choice, std::mt19937_64& random) const;

 private:
  const std::vector<ModelChange>& record_;
  size_t at_ = 0;
  ModelDisk durable_;
  std::map<int, std::vector<const ModelChange*>> pending_;  // by node
};

}  // namespace torpor::test
