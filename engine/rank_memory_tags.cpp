// Sleep and wake of tags without a controller.
#include <algorithm>
#include <chrono>
#include <set>

#include <fmt/format.h>

#include "engine/rank_memory.h"
#include "engine/tags.h"

namespace torpor {
namespace {

// Seconds of one phase after the other.
class Phases {
 public:
  explicit Phases(TagMove& move) : move_(move) { move_.seconds.reserve(kMost); }
  // Takes no memory: there is room for all of them, and their names are short.
  void done(const char* phase) {
    const auto now = std::chrono::steady_clock::now();
    move_.seconds.emplace_back(phase, std::chrono::duration<double>(now - began_).count());
    began_ = now;
  }

 private:
  static constexpr size_t kMost = 3;
  TagMove& move_;
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

uint64_t bytes_of(const std::vector<SavedChunk>& chunks) {
  uint64_t bytes = 0;
  for (const SavedChunk& chunk : chunks) bytes += chunk.bytes;
  return bytes;
}

}  // namespace

// The tags that are meant, each once. Named ones must be in `wanted`; of all, those are taken that are. A tag whose
// wake could not be undone counts as asleep; the allocator refuses broken ones by name.
Result<std::vector<std::string>> RankMemory::select(std::vector<std::string> tags, RegionState wanted) const {
  const std::map<std::string, RegionState> states = allocator_->states();
  const auto fits = [wanted](RegionState state) {
    return state == wanted || state == RegionState::kBroken || (wanted == RegionState::kDetached && is_asleep(state));
  };
  if (tags.empty()) {
    for (const auto& [tag, state] : states) {
      if (fits(state)) tags.push_back(tag);
    }
    if (!tags.empty()) return tags;
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("no tag is {}", name(wanted)),
                 .next_step = "see states()"};
  }
  std::sort(tags.begin(), tags.end());
  tags.erase(std::unique(tags.begin(), tags.end()), tags.end());
  for (const std::string& tag : tags) {
    const auto found = states.find(tag);
    if (found == states.end())
      return Error{.code = Code::kNotFound,
                   .what = fmt::format("there is no tag \"{}\"", tag),
                   .next_step = "see states() for the tags"};
    if (fits(found->second)) continue;
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("the tag {} is {}, not {}", tag, name(found->second), name(wanted)),
                 .next_step = "see states()"};
  }
  return tags;
}

// Takes the digests of what is in memory now; backups of another content go.
Status RankMemory::drop_unclean(const std::vector<std::string>& tags) {
  for (const std::string& tag : tags) {
    const auto found = backups_.find(tag);
    if (found == backups_.end() || !found->second.clean) continue;
    TORPOR_ASSIGN(const std::vector<ChunkPlan> plans, plans_for(found->second.chunks));
    TORPOR_ASSIGN(const std::vector<Digest> digests, transfers_->digests(plans));
    const bool same =
        std::equal(digests.begin(), digests.end(), found->second.chunks.begin(), found->second.chunks.end(),
                   [](const Digest& now, const SavedChunk& then) { return now == then.digest; });
    if (!same) backups_.erase(found);
  }
  return ok();
}

Result<RankReply> RankMemory::carry_out(const char* method, const RankOrder& order) {
  return catching([&]() TORPOR_REQUIRES(mutex_) { return dispatch(method, order); });
}

Result<TagMove> RankMemory::sleep(std::vector<std::string> wanted, const std::vector<std::string>& keep,
                                  CleanCheck clean) {
  return catching([&] { return sleep_tags(std::move(wanted), keep, clean); });
}

Result<TagMove> RankMemory::sleep_tags(std::vector<std::string> wanted, const std::vector<std::string>& keep,
                                       CleanCheck clean) {
  TORPOR_TRY(same_process());
  const MutexLock lock(mutex_);
  TORPOR_TRY(transfers_->usable());
  TORPOR_ASSIGN(const std::vector<std::string> tags, select(std::move(wanted), RegionState::kAttached));
  std::vector<std::string> kept;
  std::copy_if(tags.begin(), tags.end(), std::back_inserter(kept),
               [&](const std::string& tag) { return has_tag(keep, tag); });
  TagMove move;
  Phases phases(move);
  uint64_t content = 0;
  for (const RegionInfo& region : allocator_->regions()) {
    if (has_tag(tags, region.tag)) content += region.size_bytes;
  }
  if (clean == CleanCheck::kDigest) {
    TORPOR_TRY(device_->synchronize());
    TORPOR_TRY(drop_unclean(kept));
    phases.done("check");
  }
  const RankOrder leaving{.tags = tags};
  std::vector<RankOrder> savings;  // tag by tag: one that is broken now is no reason to leave another as it is
  for (const std::string& tag : kept) savings.push_back({.tags = {tag}});
  if (!kept.empty()) {
    TORPOR_ASSIGN(const RankReply saved, carry_out("save", {.tags = kept}));
    move.copied_bytes = saved.bytes;
    phases.done("save");
  }
  // From here on nothing but the orders themselves can fail. What was kept of the others is of no use: they come back
  // without content.
  std::map<std::string, Backup, std::less<>> dropped;
  for (const std::string& tag : tags) {
    if (!has_tag(kept, tag)) dropped.insert(backups_.extract(tag));
  }
  Result<RankReply> detached = carry_out("detach", leaving);
  if (!detached) {
    backups_.merge(dropped);
    for (const RankOrder& saving : savings) (void)carry_out("cancel_save", saving);  // refused where it went
    return std::move(detached).error();
  }
  phases.done("detach");
  move.physical_bytes = detached->bytes;
  uint64_t backed_up = 0;
  for (const std::string& tag : kept) {
    if (const auto backup = backups_.find(tag); backup != backups_.end()) backed_up += bytes_of(backup->second.chunks);
  }
  move.clean_bytes = backed_up - move.copied_bytes;
  move.dropped_bytes = content - backed_up;
  return move;
}

Result<TagMove> RankMemory::wake(std::vector<std::string> wanted) {
  return catching([&] { return wake_tags(std::move(wanted)); });
}

Result<TagMove> RankMemory::wake_tags(std::vector<std::string> wanted) {
  TORPOR_TRY(same_process());
  const MutexLock lock(mutex_);
  TORPOR_ASSIGN(const std::vector<std::string> tags, select(std::move(wanted), RegionState::kDetached));
  TagMove move;
  Phases phases(move);
  for (const RegionInfo& region : allocator_->regions()) {
    if (!has_tag(tags, region.tag)) continue;
    move.physical_bytes += region.reserved_bytes;
    move.dropped_bytes += region.size_bytes;
  }
  const RankOrder order{.tags = tags, .keep_backup = true};
  TORPOR_TRY(carry_out("attach", order));
  phases.done("attach");
  Result<RankReply> restored = carry_out("restore", order);
  phases.done("restore");
  if (restored) {
    move.copied_bytes = restored->bytes;
    restored = carry_out("finish", order);
    phases.done("finish");
  }
  if (!restored) {
    (void)carry_out("cancel_restore", order);
    return restored.error();
  }
  move.dropped_bytes -= move.copied_bytes;
  return move;
}

Result<TagMove> RankMemory::plan_sleep(std::vector<std::string> wanted, const std::vector<std::string>& keep) const {
  const MutexLock lock(mutex_);
  TORPOR_ASSIGN(const std::vector<std::string> tags, select(std::move(wanted), RegionState::kAttached));
  TagMove move;
  for (const RegionInfo& region : allocator_->regions()) {
    if (!has_tag(tags, region.tag)) continue;
    move.physical_bytes += region.reserved_bytes;
    const auto backup = backups_.find(region.tag);
    const bool clean = backup != backups_.end() && backup->second.clean && backup->second.host != nullptr;
    (!has_tag(keep, region.tag) ? move.dropped_bytes
     : clean                    ? move.clean_bytes
                                : move.copied_bytes) += region.size_bytes;
    if (region.state == RegionState::kBroken)
      move.obstacle = fmt::format("the region {}/{} is broken", region.tag, region.name);
  }
  const HostArenaInfo arena = arena_->info();
  const uint64_t free = arena.held_bytes - arena.used_bytes;
  if (arena.budget_bytes != 0 && move.copied_bytes > free &&
      move.copied_bytes - free > arena.budget_bytes - std::min(arena.budget_bytes, arena.held_bytes)) {
    move.obstacle =
        fmt::format("{} bytes of host memory are needed, {} of the budget of {} are left", move.copied_bytes,
                    arena.budget_bytes - std::min(arena.budget_bytes, arena.used_bytes), arena.budget_bytes);
  }
  if (!transfers_->usable()) move.obstacle = transfers_->usable().error().to_string();
  return move;
}

Result<TagMove> RankMemory::plan_wake(std::vector<std::string> wanted) const {
  const MutexLock lock(mutex_);
  TORPOR_ASSIGN(const std::vector<std::string> tags, select(std::move(wanted), RegionState::kDetached));
  TagMove move;
  for (const RegionInfo& region : allocator_->regions()) {
    if (!has_tag(tags, region.tag)) continue;
    move.physical_bytes += region.reserved_bytes;
    move.dropped_bytes += region.size_bytes;
    if (region.state == RegionState::kBroken)
      move.obstacle = fmt::format("the region {}/{} is broken", region.tag, region.name);
  }
  for (const std::string& tag : tags) {
    if (const auto backup = backups_.find(tag); backup != backups_.end())
      move.copied_bytes += bytes_of(backup->second.chunks);
  }
  move.dropped_bytes -= move.copied_bytes;
  const DeviceMemoryInfo device = device_->info();
  const uint64_t used = std::max(device.physical_bytes, device.used_bytes.value_or(0));
  if (device.capacity_bytes != 0 &&
      move.physical_bytes > device.capacity_bytes - std::min(device.capacity_bytes, used)) {
    move.obstacle = fmt::format("{} bytes of device memory are needed, {} of {} are free", move.physical_bytes,
                                device.capacity_bytes - std::min(device.capacity_bytes, used), device.capacity_bytes);
  }
  if (!transfers_->usable()) move.obstacle = transfers_->usable().error().to_string();
  return move;
}

}  // namespace torpor
