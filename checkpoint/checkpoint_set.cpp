// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint_set.h"

#include <algorithm>

#include <fmt/core.h>
#include <boost/filesystem.hpp>

#include "checkpoint/archived_values.h"
#include "checkpoint/section_reader.h"
#include "checkpoint/state_sections.h"
#include "checkpoint/store_names.h"

namespace torpor {
namespace {

constexpr uint32_t kSetVersion = 1;

std::string rank_directory_name(size_t rank, size_t ranks) { return fmt::format("rank-{}-of-{}", rank, ranks); }

// Return the last two components of `path`; empty if they do not lie directly below `directory`.
std::string name_below(const std::string& directory, const std::string& path) {
  namespace fs = boost::filesystem;
  const fs::path whole = fs::absolute(path).lexically_normal();
  const std::string name = fmt::format("{}/{}", whole.parent_path().filename().string(), whole.filename().string());
  return (fs::absolute(directory) / name).lexically_normal() == whole ? name : std::string();
}

// Check that a member's name is one that torpor writes, so that no file can point elsewhere.
Status check_name(const SetMember& member, size_t rank, size_t ranks) {
  const std::string expected = rank_directory_name(rank, ranks) + "/";
  if (member.name.starts_with(expected) && generation_of(std::string_view(member.name).substr(expected.size())))
    return ok();
  return Error{.code = Code::kCorruption,
               .what = fmt::format("the set names \"{}\" for rank {}", member.name, rank),
               .next_step = "use another checkpoint"};
}

Result<std::vector<SetMember>> read_members(const Checkpoint& set) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Section> sections, set.read_sections());
  if (std::none_of(sections.begin(), sections.end(), [](const Section& s) { return s.name == kSetSection; })) {
    return Error{
        .code = Code::kIncompatible,
        .what = fmt::format("{} is the checkpoint of one engine, not of several data parallel ranks", set.path()),
        .next_step = "wake it in one engine, or name a set"};
  }
  std::vector<SetMember> members;
  SectionReader reader(sections, kSetVersion);
  TORPOR_RETURN_IF_ERROR(reader.take(kSetSection, members));
  for (size_t rank = 0; rank < members.size(); ++rank)
    TORPOR_RETURN_IF_ERROR(check_name(members[rank], rank, members.size()));
  return members;
}

Status check_member(FileSystem& file_system, const std::string& path, const SetMember& member, size_t rank,
                    const std::shared_ptr<const Key>& key) {
  const std::string which = fmt::format("rank {}'s checkpoint {}", rank, path);
  const auto is_there = [&]() -> Result<OpenedManifest> {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> directory, file_system.open_directory(path, false));
    return read_manifest(*directory, key.get());
  };
  const Result<OpenedManifest> opened = is_there();
  if (!opened && opened.error().code == Code::kNotFound) {
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("{} is missing", which),
                 .next_step = "put it back, or use another checkpoint"};
  }
  if (!opened) return opened.error().within(which);
  if (opened->manifest.id == member.id) return ok();
  return Error{.code = Code::kIncompatible,
               .what = fmt::format("{} is not the one that was written with the others", which),
               .next_step = "put that one back, or use another checkpoint"};
}

}  // namespace

bool is_set(const Manifest& manifest) {
  return std::any_of(manifest.sections.begin(), manifest.sections.end(),
                     [](const SectionInfo& section) { return section.name == kSetSection; });
}

template <class Archive>
void serialize(Archive& archive, SetMember& v) {
  archive(v.name, v.id);
}

std::string rank_directory(const std::string& directory, int rank, int ranks) {
  return fmt::format("{}/{}", directory, rank_directory_name(static_cast<size_t>(rank), static_cast<size_t>(ranks)));
}

Result<CommittedSet> commit_set(FileSystem& file_system, const std::string& directory, CheckpointManagerOptions options,
                                const std::vector<std::string>& paths) {
  return try_catch([&]() -> Result<CommittedSet> {
    const std::shared_ptr<const Key> key = options.key;
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointManager> manager,
                            CheckpointManager::open(file_system, directory, std::move(options)));
    TORPOR_ASSIGN_OR_RETURN(PendingCheckpoint pending, manager->begin(0));
    std::vector<SetMember> members;
    Metadata metadata;  // the first member's metadata is the set's
    for (size_t rank = 0; rank < paths.size(); ++rank) {
      SetMember member{.name = name_below(directory, paths[rank])};
      if (!check_name(member, rank, paths.size())) {
        return Error{.code = Code::kInvalidArgument,
                     .what = fmt::format("the checkpoint {} of rank {} does not lie in {}/{}", paths[rank], rank,
                                         directory, rank_directory_name(rank, paths.size())),
                     .next_step = "write it there"};
      }
      TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint, open_checkpoint(file_system, paths[rank], key));
      member.id = checkpoint.manifest().id;
      if (rank == 0) {
        pending.set_owner(checkpoint.manifest().owner);
        TORPOR_ASSIGN_OR_RETURN(metadata, checkpoint.read_metadata());
      }
      members.push_back(std::move(member));
    }
    std::vector<Section> sections;
    sections.push_back({std::string(kSetSection), to_bytes_after(0, kSetVersion, members)});
    if (!metadata.empty()) sections.push_back(encode_metadata(metadata));
    TORPOR_RETURN_IF_ERROR(
        pending.write_state(Fingerprint{{"data_parallel_size", std::to_string(paths.size())}}, sections));
    Result<std::string> path = pending.commit();
    if (!path) {
      Error error = std::move(path).error();
      if (!pending.withdraw()) error.what += fmt::format("; a set may be left in {}", directory);
      return error;
    }
    return CommittedSet{.pending = std::move(pending), .path = *std::move(path)};
  });
}

Result<CheckpointSet> open_set(FileSystem& file_system, const std::string& path, std::shared_ptr<const Key> key) {
  return try_catch([&]() -> Result<CheckpointSet> {
    TORPOR_ASSIGN_OR_RETURN(const Checkpoint set, open_checkpoint(file_system, path, key));
    TORPOR_ASSIGN_OR_RETURN(const std::vector<SetMember> members, read_members(set));
    const size_t slash = set.path().rfind('/');
    CheckpointSet found{.path = set.path(), .directory = set.path().substr(0, slash)};
    found.generation = generation_of(set.path().substr(slash + 1)).value_or(set.manifest().generation);
    for (size_t rank = 0; rank < members.size(); ++rank) {
      found.members.push_back(fmt::format("{}/{}", found.directory, members[rank].name));
      if (Status there = check_member(file_system, found.members.back(), members[rank], rank, key); !there)
        return std::move(there).error().within(fmt::format("the set {}", found.path));
    }
    return found;
  });
}

Result<Checkpoint> open_checkpoint_of(FileSystem& file_system, const std::string& path, int rank,
                                      std::shared_ptr<const Key> key) {
  TORPOR_ASSIGN_OR_RETURN(Checkpoint checkpoint, open_checkpoint(file_system, path, key));
  if (!is_set(checkpoint.manifest())) return checkpoint;
  TORPOR_ASSIGN_OR_RETURN(const CheckpointSet set, open_set(file_system, checkpoint.path(), key));
  if (rank < 0 || static_cast<size_t>(rank) >= set.members.size()) {
    return Error{
        .code = Code::kIncompatible,
        .what = fmt::format("{} is of {} data parallel ranks, this is rank {}", set.path, set.members.size(), rank),
        .next_step = "start as many as there were"};
  }
  return open_checkpoint(file_system, set.members[static_cast<size_t>(rank)], key);
}

}  // namespace torpor
