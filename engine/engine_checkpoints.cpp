// SPDX-License-Identifier: Apache-2.0
#include "engine/engine_checkpoints.h"

#include <vector>

#include "base/log.h"
#include "checkpoint/checkpoint_set.h"
#include "checkpoint/store_names.h"

namespace torpor {

std::string EngineCheckpoints::directory_of(const DataParallel& place) const {
  const std::string& directory = engine_.options.directory;
  return place.size > 1 ? rank_directory(directory, place.rank, place.size) : directory;
}

Result<std::unique_ptr<CheckpointManager>> EngineCheckpoints::open(const std::string& directory) const {
  CheckpointManagerOptions options = engine_.options.checkpoints;
  options.clock = &engine_.clock;
  return CheckpointManager::open(engine_.file_system, directory, std::move(options));
}

std::optional<EngineCheckpoints::Generation> EngineCheckpoints::generation_at(const std::string& path) {
  const size_t name = path.rfind('/') + 1;
  const std::optional<uint64_t> generation = generation_of(path.substr(name));
  if (!generation) return std::nullopt;
  return Generation{.directory = path.substr(0, name - 1), .number = *generation};
}

void EngineCheckpoints::name_owner(PendingCheckpoint& checkpoint, const Fingerprint& fingerprint) {
  if (!owner_) owner_ = owner_of(fingerprint);
  checkpoint.set_owner(*owner_);
}

Status EngineCheckpoints::commit(PendingCheckpoint& checkpoint, SleepReport& report) const {
  TORPOR_ASSIGN_OR_RETURN(report.checkpoint, checkpoint.commit());
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint committed,
                          open_checkpoint(engine_.file_system, report.checkpoint, engine_.options.checkpoints.key));
  report.checkpoint_bytes = committed.manifest().total_bytes();
  for (const SectionInfo& section : committed.manifest().sections)
    report.checkpoint_parts[section.name] = section.stored_bytes;
  return ok();
}

void EngineCheckpoints::mark_woken(const Generation& from) noexcept {
  const auto mark = [&]() -> Status {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointManager> checkpoints, open(from.directory));
    return checkpoints->woken_from(from.number);
  };
  Status marked = try_catch(mark);
  if (!marked) marked = try_catch(mark);
  if (marked) return;
  (void)try_catch([&]() -> Status {
    log().warn("after a wake from {}/{}: {}", from.directory, generation_name(from.number), marked.error());
    return ok();
  });
}

Status EngineCheckpoints::check_seen_by_all(PendingCheckpoint& checkpoint) const {
  TORPOR_ASSIGN_OR_RETURN(std::vector<orders::WriteTestFile::Reply> written,
                          engine_.ranks.call(orders::WriteTestFile{.directory = checkpoint.staging_path()}));
  std::vector<std::string> hosts;
  for (orders::WriteTestFile::Reply& reply : written) hosts.push_back(std::move(reply.host));
  return checkpoint.check_test_files(hosts);
}

Status EngineCheckpoints::check_seen_by_all(const std::string& directory, size_t ranks) const {
  if (ranks < 2) return ok();
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointManager> checkpoints, open(directory));
  TORPOR_ASSIGN_OR_RETURN(PendingCheckpoint empty, checkpoints->begin(0));
  return check_seen_by_all(empty);
}

}  // namespace torpor
