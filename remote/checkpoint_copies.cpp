// SPDX-License-Identifier: Apache-2.0
#include "remote/checkpoint_copies.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include <fmt/core.h>

#include "base/digest.h"
#include "base/mutex.h"
#include "base/page_buffer.h"
#include "checkpoint/checkpoint_set.h"
#include "checkpoint/state_sections.h"
#include "checkpoint/store_contents.h"
#include "checkpoint/store_names.h"

namespace torpor::remote {
namespace {

struct Part {
  size_t file = 0;  // in the index
  size_t number = 0;
  uint64_t offset() const { return number * kPartBytes; }
  uint64_t bytes(const CheckpointIndex& index) const {
    return std::min(kPartBytes, index.files[file].bytes - offset());
  }
};

std::vector<Part> parts_of(const CheckpointIndex& index, size_t first_file = 0) {
  std::vector<Part> parts;
  for (size_t file = first_file; file < index.files.size(); ++file) {
    for (size_t number = 0; number * kPartBytes < index.files[file].bytes; ++number) parts.push_back({file, number});
  }
  return parts;
}

using PartWork = std::function<Status(const Part& part, std::span<std::byte> room)>;

// Run `work` for all parts on `threads` threads, each with memory for one part. End at the first error.
Status with_each(const std::vector<Part>& parts, int threads, const PartWork& work) {
  std::atomic<size_t> next = 0;
  std::atomic<bool> failed = false;
  std::vector<Status> ended(static_cast<size_t>(std::clamp(threads, 1, 64)));
  const auto run = [&](Status& status) {
    status = try_catch([&]() -> Status {
      PageBuffer memory;
      const std::span<std::byte> room = memory.room(kPartBytes);
      if (room.size() < kPartBytes)
        return Error{.code = Code::kResourceExhausted, .what = "no memory for a part", .next_step = "use less threads"};
      for (size_t i = next++; i < parts.size() && !failed; i = next++) TORPOR_RETURN_IF_ERROR(work(parts[i], room));
      return ok();
    });
    if (!status) failed = true;
  };
  std::vector<std::thread> helpers;
  for (size_t i = 1; i < ended.size(); ++i) {
    const Status begun = try_catch([&]() -> Status {
      helpers.emplace_back(run, std::ref(ended[i]));
      return ok();
    });
    if (!begun) break;  // fewer threads suffice
  }
  run(ended[0]);
  for (std::thread& helper : helpers) helper.join();
  for (const Status& status : ended) TORPOR_RETURN_IF_ERROR(status);
  return ok();
}

Status check_hash(const CheckpointIndex& index, const Part& part, std::span<const std::byte> bytes) {
  const IndexedFile& file = index.files[part.file];
  if (bytes.size() == part.bytes(index) && part_hash(bytes) == file.parts[part.number]) return ok();
  return Error{.code = Code::kCorruption,
               .what = fmt::format("part {} of {} is damaged in the store ({})", part.number, file.name,
                                   part_key(file.parts[part.number])),
               .next_step = "remove that object and push the checkpoint again"};
}

// Return the index of the checkpoint's files, without hashes.
Result<CheckpointIndex> index_of(const Manifest& manifest, const Directory& directory) {
  CheckpointIndex index{
      .id = hex(manifest.id),
      .generation = manifest.generation,
      .created_unix_seconds = manifest.created_unix_seconds,
      .creator = manifest.creator,
      .has_metadata = std::any_of(manifest.sections.begin(), manifest.sections.end(),
                                  [](const SectionInfo& section) { return is_metadata(section.name); })};
  std::vector<std::string> names = {std::string(kManifestFile), std::string(kStateFile)};
  for (const RankSummary& rank : manifest.ranks) {
    names.push_back(rank.refs);
    for (const auto& file : rank.files) names.push_back(file.name);
  }
  for (const std::string& name : names) {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, directory.open_file(name));
    TORPOR_ASSIGN_OR_RETURN(const uint64_t bytes, file->size());
    index.files.push_back({.name = name, .bytes = bytes});
    index.files.back().parts.resize((bytes + kPartBytes - 1) / kPartBytes);
  }
  return index;
}

// Return whether the store has the part. kCorruption: it has one of another size.
Result<bool> has_part(ObjectStore& store, const std::string& key, uint64_t bytes) {
  TORPOR_ASSIGN_OR_RETURN(const std::optional<uint64_t> there, store.size(key));
  if (!there || *there == bytes) return there.has_value();
  return Error{.code = Code::kCorruption,
               .what = fmt::format("{} of {} has {} bytes, not {}", key, store.url(), *there, bytes),
               .next_step = "remove that object and push the checkpoint again"};
}

// Return the parts of a checkpoint in the store that are gone from there. Only sizes are asked for.
Result<std::vector<Part>> missing_parts(ObjectStore& store, const CheckpointIndex& index, int threads) {
  Mutex mutex;
  std::vector<Part> missing;
  TORPOR_RETURN_IF_ERROR(with_each(parts_of(index), threads, [&](const Part& part, std::span<std::byte>) -> Status {
    const std::string key = part_key(index.files[part.file].parts[part.number]);
    TORPOR_ASSIGN_OR_RETURN(const bool there, has_part(store, key, part.bytes(index)));
    const MutexLock lock(mutex);
    if (!there) missing.push_back(part);
    return ok();
  }));
  return missing;
}

// Check that a checkpoint here has the files that were pushed.
Status check_same_files(const CheckpointIndex& here, const CheckpointIndex& pushed, const std::string& path) {
  const bool same =
      std::equal(here.files.begin(), here.files.end(), pushed.files.begin(), pushed.files.end(),
                 [](const IndexedFile& a, const IndexedFile& b) { return a.name == b.name && a.bytes == b.bytes; });
  if (same) return ok();
  return Error{.code = Code::kCorruption,
               .what = fmt::format("{} has other files than were pushed", path),
               .next_step = "see torpor verify, and pull it if it is damaged"};
}

// Put a part that the store lacks. If the index has its hash, the file must have the same bytes still.
Status push_part(const Directory& directory, CheckpointIndex& index, const Part& part, ObjectStore& store,
                 std::span<std::byte> room, std::atomic<uint64_t>& moved) {
  IndexedFile& file = index.files[part.file];
  const std::span<std::byte> bytes = room.first(part.bytes(index));
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> from, directory.open_file(file.name));
  TORPOR_RETURN_IF_ERROR(from->pread(bytes, part.offset()));
  std::string hash = part_hash(bytes);
  std::string& known = file.parts[part.number];
  if (!known.empty() && known != hash)
    return Error{
        .code = Code::kCorruption,
        .what = fmt::format("part {} of {}/{} is not what was pushed", part.number, directory.path(), file.name),
        .next_step = "push the checkpoint from where it is whole; see torpor verify"};
  known = std::move(hash);
  const std::string key = part_key(known);
  TORPOR_ASSIGN_OR_RETURN(const bool there, has_part(store, key, bytes.size()));
  if (there) return ok();
  TORPOR_ASSIGN_OR_RETURN(const bool stored, store.put_new(key, bytes));
  if (stored) moved += bytes.size();
  return ok();
}

Result<CheckpointIndex> read_index(ObjectStore& store, const std::string& name) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<std::byte> text, get_whole(store, index_key(name), kMostIndexBytes));
  Result<CheckpointIndex> index = decode_index({reinterpret_cast<const char*>(text.data()), text.size()});
  if (!index) return index.error().within(fmt::format("{} of {}", name, store.url()));
  return index;
}

Result<std::vector<std::string>> pushed_names(ObjectStore& store) {
  const std::string prefix = index_key("");
  TORPOR_ASSIGN_OR_RETURN(std::vector<std::string> keys, store.list(prefix));
  for (std::string& key : keys) key.erase(0, prefix.size());
  std::erase_if(keys, [](const std::string& name) { return !is_index_name(name); });
  return keys;
}

Status check_is_of(const Manifest& manifest, const CheckpointIndex& index) {
  if (hex(manifest.id) == index.id) return ok();
  return Error{.code = Code::kCorruption,
               .what = fmt::format("MANIFEST is of checkpoint {}, not of {}", hex(manifest.id), index.id),
               .next_step = "take another checkpoint"};
}

Result<OpenedManifest> manifest_in(ObjectStore& store, const CheckpointIndex& index, const Key* key) {
  Bytes bytes;
  for (size_t number = 0; number < index.files[0].parts.size(); ++number) {
    const Part part{0, number};
    bytes.resize(part.offset() + part.bytes(index));  // part by part: the index may claim any size
    const std::span<std::byte> some = std::as_writable_bytes(std::span(bytes)).subspan(part.offset());
    TORPOR_ASSIGN_OR_RETURN(const uint64_t received, store.get(part_key(index.files[0].parts[number]), some));
    TORPOR_RETURN_IF_ERROR(check_hash(index, part, some.first(received)));
  }
  TORPOR_ASSIGN_OR_RETURN(OpenedManifest opened, decode_manifest(std::as_bytes(std::span(bytes)), key));
  TORPOR_RETURN_IF_ERROR(check_is_of(opened.manifest, index));
  return opened;
}

// Fill `room` with the file's bytes at `offset`; fetch each part that has some of them.
Status read_range(ObjectStore& store, const IndexedFile& file, uint64_t offset, std::span<std::byte> room) {
  if (offset > file.bytes || room.size() > file.bytes - offset)
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("{} of {} has {} bytes, MANIFEST names more", file.name, store.url(), file.bytes),
                 .next_step = "take another checkpoint"};
  while (!room.empty()) {
    const uint64_t within = offset % kPartBytes;
    const std::span<std::byte> some = room.first(std::min<uint64_t>(room.size(), kPartBytes - within));
    TORPOR_RETURN_IF_ERROR(store.get_range(part_key(file.parts[offset / kPartBytes]), within, some));
    offset += some.size();
    room = room.subspan(some.size());
  }
  return ok();
}

// A pull into a staging directory. Precondition: the directory of checkpoints is locked.
class Pull {
 public:
  // `resumed`: `staging` has files of an earlier pull.
  Pull(ObjectStore& store, const CheckpointIndex& index, Directory& staging, bool resumed, const CopyOptions& options)
      : store_(store), index_(index), staging_(staging), resumed_(resumed), options_(options) {}

  // Fetch MANIFEST first: it decides whether the rest is wanted.
  Status fetch_manifest() {
    TORPOR_RETURN_IF_ERROR(fetch(0, 1, nullptr));
    TORPOR_ASSIGN_OR_RETURN(const OpenedManifest opened, read_manifest(staging_, options_.key.get()));
    TORPOR_RETURN_IF_ERROR(check_is_of(opened.manifest, index_));
    return options_.accept ? options_.accept(opened.manifest) : ok();
  }

  Status fetch_rest() {
    ProgressMeter progress(options_.progress, "pull", index_.bytes());
    return fetch(1, index_.files.size(), &progress);
  }

  uint64_t moved_bytes() const { return moved_; }

 private:
  Status fetch(size_t begin, size_t end, ProgressMeter* progress) {
    std::vector<std::unique_ptr<File>> files(index_.files.size());
    for (size_t file = begin; file < end; ++file) {
      TORPOR_ASSIGN_OR_RETURN(files[file], staging_.open_slots(index_.files[file].name, FileIo::kPlain));
      TORPOR_RETURN_IF_ERROR(files[file]->preallocate(index_.files[file].bytes));
      TORPOR_RETURN_IF_ERROR(files[file]->truncate(index_.files[file].bytes));
    }
    std::vector<Part> parts = parts_of(index_, begin);
    std::erase_if(parts, [&](const Part& part) { return part.file >= end; });
    TORPOR_RETURN_IF_ERROR(
        with_each(parts, options_.threads, [&](const Part& part, std::span<std::byte> room) -> Status {
          TORPOR_RETURN_IF_ERROR(fetch_part(part, *files[part.file], room));
          return progress != nullptr ? progress->add(part.bytes(index_)) : ok();
        }));
    for (size_t file = begin; file < end; ++file) TORPOR_RETURN_IF_ERROR(files[file]->sync());
    return ok();
  }

  Status fetch_part(const Part& part, File& file, std::span<std::byte> room) {
    const std::span<std::byte> bytes = room.first(part.bytes(index_));
    if (resumed_ && file.pread(bytes, part.offset()) && check_hash(index_, part, bytes)) return ok();
    TORPOR_ASSIGN_OR_RETURN(const uint64_t received,
                            store_.get(part_key(index_.files[part.file].parts[part.number]), bytes));
    TORPOR_RETURN_IF_ERROR(check_hash(index_, part, bytes.first(received)));
    TORPOR_RETURN_IF_ERROR(file.pwrite(bytes, part.offset()));
    moved_ += received;
    return ok();
  }

  ObjectStore& store_;
  const CheckpointIndex& index_;
  Directory& staging_;
  const bool resumed_;
  const CopyOptions& options_;
  std::atomic<uint64_t> moved_ = 0;
};

// Check that the files fit each other: the refs can be read, and the chunk files have the sizes in MANIFEST.
Status check_whole(std::unique_ptr<Directory> staging, std::shared_ptr<const Key> key) {
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint, open_checkpoint_directory(std::move(staging), std::move(key)));
  TORPOR_RETURN_IF_ERROR(checkpoint.read_sections());
  for (const RankSummary& rank : checkpoint.manifest().ranks) {
    TORPOR_RETURN_IF_ERROR(checkpoint.refs(rank));
    TORPOR_RETURN_IF_ERROR(checkpoint.open_rank(rank));
  }
  return ok();
}

}  // namespace

Result<CopyReport> push(FileSystem& file_system, const Checkpoint& checkpoint, ObjectStore& store,
                        const CopyOptions& options) {
  return try_catch([&]() -> Result<CopyReport> {
    const Manifest& manifest = checkpoint.manifest();
    if (is_set(manifest))
      return Error{.code = Code::kUnsupported,
                   .what = fmt::format("{} is of data parallel ranks", checkpoint.path()),
                   .next_step = "push the checkpoint of each rank"};
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> directory,
                            file_system.open_directory(checkpoint.path(), false));
    TORPOR_ASSIGN_OR_RETURN(CheckpointIndex index, index_of(manifest, *directory));
    CopyReport report{.name = index_name(index), .path = checkpoint.path(), .bytes = index.bytes()};
    TORPOR_ASSIGN_OR_RETURN(const std::optional<uint64_t> there, store.size(index_key(report.name)));
    std::vector<Part> parts = parts_of(index);
    if (there) {  // a damaged part may have been removed since, to be sent again
      TORPOR_ASSIGN_OR_RETURN(CheckpointIndex pushed, read_index(store, report.name));
      TORPOR_RETURN_IF_ERROR(check_same_files(index, pushed, checkpoint.path()));
      index = std::move(pushed);
      TORPOR_ASSIGN_OR_RETURN(parts, missing_parts(store, index, options.threads));
      report.was_there = parts.empty();
      if (report.was_there) return report;
    }
    TORPOR_ASSIGN_OR_RETURN(StoreLease begun,
                            StoreLease::begin(store, LeaseKind::kPush, *options.clock, options.patience));
    KeptLease lease(std::move(begun), store);
    if (there) {
      TORPOR_ASSIGN_OR_RETURN(const std::optional<uint64_t> still, store.size(index_key(report.name)));
      if (!still)  // parts that were there when it was asked may be gone, too
        return Error{.code = Code::kAborted,
                     .what = fmt::format("{} was removed from {} meanwhile", report.name, store.url()),
                     .next_step = "push it again"};
    }
    uint64_t bytes = 0;
    for (const Part& part : parts) bytes += part.bytes(index);
    ProgressMeter progress(options.progress, "push", bytes);
    std::atomic<uint64_t> moved = 0;
    const Status sent = with_each(parts, options.threads, [&](const Part& part, std::span<std::byte> room) -> Status {
      TORPOR_RETURN_IF_ERROR(push_part(*directory, index, part, store, room, moved));
      return progress.add(part.bytes(index));
    });
    TORPOR_RETURN_IF_ERROR(sent);
    TORPOR_RETURN_IF_ERROR(lease.check());
    report.moved_bytes = moved;
    if (there) return report;
    const std::string text = encode_index(index);
    const Result<bool> created = store.put_new(index_key(report.name), std::as_bytes(std::span(text)));
    if (!created) lease.leave();  // the index may have been created, or may be later
    if (!created) return created.error();
    if (const Status late = lease.check(); !late) {  // the process was suspended before the index was created
      if (*created) TORPOR_RETURN_IF_ERROR(store.remove(index_key(report.name)));
      return late.error();
    }
    report.was_there = !*created;
    return report;
  });
}

Result<CopyReport> pull(FileSystem& file_system, ObjectStore& store, const std::string& name,
                        const std::string& directory, const CopyOptions& options) {
  return try_catch([&]() -> Result<CopyReport> {
    CopyReport report{.name = name};
    if (name.empty()) {
      TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> names, pushed_names(store));
      if (names.empty())
        return Error{.code = Code::kNotFound,
                     .what = fmt::format("there are no checkpoints in {}", store.url()),
                     .next_step = "push one with torpor push"};
      report.name = names.back();
    }
    TORPOR_ASSIGN_OR_RETURN(const CheckpointIndex index, read_index(store, report.name));
    report.bytes = index.bytes();
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> target, file_system.open_directory(directory, true));
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> lock, target->lock(kLockFile));
    TORPOR_ASSIGN_OR_RETURN(const std::vector<CheckpointInfo> present,
                            infos_in(*target, options.key.get(), Trust::kAnySeal));
    for (const CheckpointInfo& info : present) {
      if (!info.readable || hex(info.manifest.id) != index.id) continue;
      TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<Directory> place, target->open_directory(info.name));
      const Status whole = check_whole(std::move(place), options.key);
      if (!whole && (whole.error().code == Code::kCorruption || whole.error().code == Code::kNotFound)) continue;
      report.path = info.path;
      report.was_there = true;
      return report;
    }
    const std::string staged = fmt::format("{}{}", kPullPrefix, index.id);
    Result<std::unique_ptr<Directory>> staging = target->open_directory(staged);
    const bool resumed = staging.has_value();
    if (!resumed) staging = target->create_directory(staged);
    if (!staging) return staging.error();
    Pull work(store, index, **staging, resumed, options);
    if (Status wanted = work.fetch_manifest(); !wanted) {
      if (!resumed) TORPOR_RETURN_IF_ERROR(target->remove_tree(staged));
      return std::move(wanted).error();
    }
    TORPOR_RETURN_IF_ERROR(work.fetch_rest());
    TORPOR_RETURN_IF_ERROR((*staging)->sync());
    TORPOR_RETURN_IF_ERROR(check_whole(std::move(*staging), options.key));
    TORPOR_ASSIGN_OR_RETURN(const std::vector<uint64_t> generations, generations_in(*target));
    const std::string placed = generation_name(generations.empty() ? 1 : generations.back() + 1);
    TORPOR_RETURN_IF_ERROR(target->rename_new(staged, placed));
    TORPOR_RETURN_IF_ERROR(target->sync());
    report.path = fmt::format("{}/{}", target->path(), placed);
    report.moved_bytes = work.moved_bytes();
    return report;
  });
}

Result<std::vector<PushedCheckpoint>> list_pushed(ObjectStore& store) {
  return try_catch([&]() -> Result<std::vector<PushedCheckpoint>> {
    TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> names, pushed_names(store));
    std::vector<PushedCheckpoint> pushed;
    for (const std::string& name : names) {
      Result<CheckpointIndex> index = read_index(store, name);
      pushed.push_back({.name = name, .readable = index.has_value()});
      if (index) {
        pushed.back().index = std::move(*index);
      } else if (index.error().code == Code::kCorruption || index.error().code == Code::kIncompatible) {
        pushed.back().problem = index.error();
      } else {
        return index.error();
      }
    }
    return pushed;
  });
}

Result<Metadata> metadata_of(ObjectStore& store, const CheckpointIndex& index, const Key* key) {
  return try_catch([&]() -> Result<Metadata> {
    if (index.has_metadata == false) return Metadata{};
    TORPOR_ASSIGN_OR_RETURN(const OpenedManifest opened, manifest_in(store, index, key));
    const auto state = std::find_if(index.files.begin(), index.files.end(),
                                    [](const IndexedFile& file) { return file.name == kStateFile; });
    if (state == index.files.end())
      return Error{.code = Code::kCorruption,
                   .what = fmt::format("{} of {} has no {}", index_name(index), store.url(), kStateFile),
                   .next_step = "take another checkpoint"};
    const std::string name = fmt::format("{}/{}/{}", store.url(), index_name(index), kStateFile);
    return read_metadata(opened, name, [&](uint64_t offset, std::span<std::byte> room) {
      return read_range(store, *state, offset, room);
    });
  });
}

}  // namespace torpor::remote
