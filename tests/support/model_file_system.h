// SPDX-License-Identifier: Apache-2.0
// A file system in memory that records what is done to it, and from the record makes the states in which a disk may be
// found after a power cut: what was synced is there; of what was not, any part.
//
// What may happen to unsynced things, as POSIX allows it: each write is kept, lost, or torn at 512 bytes or 4 KiB, each
// sector by itself and in any order; each change of a directory (a name made, removed, moved) is kept or lost. fsync of
// a file makes its bytes durable, not its name; fsync of a directory makes the names in it durable.
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
  Bytes bytes;                         // of a file
  std::map<std::string, int> entries;  // of a directory: name -> node
};

using ModelDisk = std::vector<ModelNode>;  // node 0 is the root

struct ModelChange {
  enum class Kind : uint8_t { kWrite, kTruncate, kSyncFile, kLink, kUnlink, kRename, kSyncDirectory, kNote };
  Kind kind = Kind::kNote;
  int node = 0;         // the file, or the directory whose entries change
  uint64_t offset = 0;  // kTruncate: the new size
  Bytes bytes;
  std::string name;        // of the entry; kNote: a word of the workload's own
  std::string to;          // kRename
  int target = 0;          // kLink, kRename: the node; kNote: a number
  bool directory = false;  // kLink, kRename: what the target is
};

class ModelFileSystem final : public FileSystem {
 public:
  explicit ModelFileSystem(ModelDisk disk = ModelDisk(1, ModelNode{.is_directory = true})) : disk_(std::move(disk)) {}

  // Changes for which this returns true are not done, though reported as done: a mistake in the protocol.
  std::function<bool(const ModelChange&)> ignored;
  std::vector<ModelChange> record;
  void note(std::string word, int number) { record.push_back({.name = std::move(word), .target = number}); }
  ModelDisk& disk() { return disk_; }
  int find(const std::string& path) const;  // a node; -1 if there is none

  Result<std::unique_ptr<Directory>> open_directory(const std::string& path, bool create) override;

 private:
  friend class ModelFile;
  friend class ModelDirectory;
  void apply(ModelChange change);
  int add(ModelNode node);
  ModelDisk disk_;
  std::set<int> locked_;
};

// Applies one change to a disk.
void apply_change(ModelDisk& disk, const ModelChange& change);

// Walks through a record and gives states of the disk as they may be found if the power goes after change `k`.
class PowerCuts {
 public:
  PowerCuts(const std::vector<ModelChange>& record, ModelDisk start) : record_(record), durable_(std::move(start)) {}
  bool done() const { return at_ == record_.size(); }
  size_t position() const { return at_; }
  void step();  // takes the next change into account
  // A state that is possible now; `choice` 0: nothing unsynced survived, 1: all did, else a random part.
  ModelDisk state(int choice, std::mt19937_64& random) const;

 private:
  const std::vector<ModelChange>& record_;
  size_t at_ = 0;
  ModelDisk durable_;
  std::map<int, std::vector<const ModelChange*>> pending_;  // by node
};

}  // namespace torpor::test
