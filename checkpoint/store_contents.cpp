// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/store_contents.h"

#include <set>

#include <fmt/core.h>

#include "base/log.h"
#include "base/mutex.h"
#include "checkpoint/store_names.h"

namespace torpor {
namespace {

CheckpointInfo info_of(const Directory& store, uint64_t generation, const Key* key, Trust trust) {
  CheckpointInfo info{.name = generation_name(generation), .generation = generation};
  info.path = fmt::format("{}/{}", store.path(), info.name);
  Result<OpenedManifest> opened = [&]() -> Result<OpenedManifest> {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> directory, store.open_directory(info.name));
    info.woken = directory->open_file(kWokenFile).has_value();
    Result<OpenedManifest> read = read_manifest(*directory, key);
    if (!read && trust == Trust::kAnySeal && key != nullptr && read.error().code == Code::kUnauthenticated)
      read = read_manifest(*directory);
    return read;
  }();
  info.readable = opened.has_value();
  if (!opened) {
    info.problem = opened.error();
    return info;
  }
  info.bytes = opened->manifest.total_bytes();
  info.manifest = std::move(opened->manifest);
  info.manifest.sections.clear();
  return info;
}

// Return whether this is the first call with `path`.
bool is_news(const std::string& path) {
  static Mutex mutex;
  static std::set<std::string> known;
  const MutexLock lock(mutex);
  return known.insert(path).second;
}

}  // namespace

Result<std::vector<CheckpointInfo>> infos_in(const Directory& store, const Key* key, Trust trust) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<uint64_t> generations, generations_in(store));
  std::vector<CheckpointInfo> infos;
  for (const uint64_t generation : generations) infos.push_back(info_of(store, generation, key, trust));
  return infos;
}

bool is_slept_on(const Directory& store, uint64_t generation) {
  const Result<std::unique_ptr<Directory>> directory = store.open_directory(generation_name(generation));
  if (!directory || !(*directory)->open_file(kAsleepFile)) return false;
  const Result<std::unique_ptr<File>> lock = (*directory)->lock(kAsleepFile);
  return !lock && lock.error().code == Code::kUnavailable;
}

Status check_not_slept_on(const Directory& store, uint64_t generation) {
  if (!is_slept_on(store, generation)) return ok();
  return Error{.code = Code::kUnavailable,
               .what = fmt::format("an engine sleeps on {}/{}", store.path(), generation_name(generation)),
               .next_step = "wake it, or end its process"};
}

Status remove_generation(Directory& store, uint64_t generation) {
  TORPOR_RETURN_IF_ERROR(check_not_slept_on(store, generation));
  TORPOR_ASSIGN_OR_RETURN(const std::string doomed, hide_generation(store, generation));
  return store.remove_tree(doomed);
}

Result<std::string> hide_generation(Directory& store, uint64_t generation) {
  const std::string name = generation_name(generation);
  std::string doomed = fmt::format("{}{}", kTrashPrefix, name);
  TORPOR_RETURN_IF_ERROR(store.rename_new(name, doomed));
  TORPOR_RETURN_IF_ERROR(store.sync());
  return doomed;
}

Result<std::vector<std::string>> leftovers_in(const Directory& store) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, store.list());
  std::vector<std::string> names;
  for (const Entry& entry : entries) {
    if (is_leftover(entry)) names.push_back(entry.name);
  }
  return names;
}

Status remove_leftovers(Directory& store) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> names, leftovers_in(store));
  for (const std::string& name : names) TORPOR_RETURN_IF_ERROR(store.remove_tree(name));
  return ok();
}

Result<std::vector<std::string>> retire(Directory& store, const Key* key, const Retention& retention,
                                        double now_unix_seconds, bool dry_run, const std::optional<Digest>& owner) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<CheckpointInfo> infos, infos_in(store, key, Trust::kAnySeal));
  for (const CheckpointInfo& info : infos) {
    if (info.readable || !is_news(info.path)) continue;
    log().warn("{} cannot be read: retention leaves it there and counts the others ({}); see torpor verify, torpor rm",
               info.path, info.problem);
  }
  const std::vector<uint64_t> gone = retired(infos, retention, now_unix_seconds, owner);
  std::vector<std::string> names;
  Status first;  // what cannot be removed keeps no other one there
  for (auto generation = gone.rbegin(); generation != gone.rend(); ++generation) {
    if (is_slept_on(store, *generation)) continue;
    Status removed = dry_run ? ok() : remove_generation(store, *generation);
    if (!removed && first) first = std::move(removed).error().within(generation_name(*generation));
    names.push_back(generation_name(*generation));
  }
  if (!first) return std::move(first).error();
  return names;
}

}  // namespace torpor
