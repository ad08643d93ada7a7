// SPDX-License-Identifier: Apache-2.0
#include "engine/tag_sleep.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include <fmt/core.h>

#include "engine/tags.h"

namespace torpor {
namespace {

// Measures the seconds of phases that follow one another.
class Phases {
 public:
  explicit Phases(TagMove& move) : move_(move) { move_.seconds.reserve(kMost); }
  // It allocates nothing: the vector has capacity for all phases, and their names are short.
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

// A plan names the first obstacle: the call would end there.
void note_obstacle(TagMove& move, std::string why) {
  if (move.obstacle.empty()) move.obstacle = std::move(why);
}

}  // namespace

// Return the tags of the call, each once. A named tag must be in the state `wanted`; if none is named, return those
// that are. A tag whose wake could not be undone counts as asleep; the allocator refuses broken tags.
Result<std::vector<std::string>> TagSleep::select(std::vector<std::string> tags, RegionState wanted) const {
  const std::map<std::string, RegionState> states = memory_.states();
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

// Carry out an order. It never throws.
template <class Order>
Result<typename Order::Reply> TagSleep::carry_out(const Order& order) {
  return try_catch([&]() TORPOR_REQUIRES(memory_.mutex()) { return memory_.steps().carry_out(order); });
}

Result<TagMove> TagSleep::sleep(std::vector<std::string> wanted, const std::vector<std::string>& keep,
                                CleanCheck clean) {
  return try_catch([&] { return sleep_now(std::move(wanted), keep, clean); });
}

Result<TagMove> TagSleep::sleep_now(std::vector<std::string> wanted, const std::vector<std::string>& keep,
                                    CleanCheck clean) {
  TORPOR_RETURN_IF_ERROR(memory_.same_process());
  const MutexLock lock(memory_.mutex());
  TORPOR_RETURN_IF_ERROR(memory_.transfers().usable());
  TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> tags, select(std::move(wanted), RegionState::kAttached));
  std::vector<std::string> kept;
  std::copy_if(tags.begin(), tags.end(), std::back_inserter(kept),
               [&](const std::string& tag) { return has_tag(keep, tag); });
  TagMove move;
  Phases phases(move);
  uint64_t content = 0;
  for (const RegionInfo& region : memory_.allocator().regions()) {
    if (has_tag(tags, region.tag)) content += region.size_bytes;
  }
  memory_.images().distrust();
  if (clean == CleanCheck::kDigest) {
    TORPOR_RETURN_IF_ERROR(memory_.device().synchronize());
    TORPOR_RETURN_IF_ERROR(memory_.images().compare(kept));
    phases.done("check");
  }
  const orders::Detach leaving{.tags = tags};
  std::vector<orders::Undo> undoing;  // tag by tag, so that a broken tag does not keep the others from being undone
  for (const std::string& tag : kept) undoing.push_back({.what = orders::Undo::What::kSave, .tags = {tag}});
  if (!kept.empty()) {
    TORPOR_ASSIGN_OR_RETURN(const orders::Save::Reply saved, carry_out(orders::Save{.tags = kept}));
    move.copied_bytes = saved.bytes;
    phases.done("save");
  }
  // From here on only the orders themselves can fail.
  Result<orders::Detach::Reply> detached = carry_out(leaving);
  if (!detached) {
    for (const orders::Undo& saving : undoing) (void)carry_out(saving);  // a tag that was detached refuses it
    return std::move(detached).error();
  }
  phases.done("detach");
  move.physical_bytes = detached->bytes;
  uint64_t backed_up = 0;
  for (const std::string& tag : kept) {
    if (const TagImage* const image = memory_.images().find(tag)) backed_up += image->bytes();
  }
  move.clean_bytes = backed_up - move.copied_bytes;
  move.dropped_bytes = content - backed_up;
  return move;
}

Result<TagMove> TagSleep::wake(std::vector<std::string> wanted) {
  return try_catch([&] { return wake_now(std::move(wanted)); });
}

Result<TagMove> TagSleep::wake_now(std::vector<std::string> wanted) {
  TORPOR_RETURN_IF_ERROR(memory_.same_process());
  const MutexLock lock(memory_.mutex());
  TORPOR_ASSIGN_OR_RETURN(std::vector<std::string> tags, select(std::move(wanted), RegionState::kDetached));
  sort_for_wake(tags);
  TagMove move;
  Phases phases(move);
  for (const RegionInfo& region : memory_.allocator().regions()) {
    if (!has_tag(tags, region.tag)) continue;
    move.physical_bytes += region.reserved_bytes;
    move.dropped_bytes += region.size_bytes;
  }
  const orders::Restore restoring{.tags = tags};
  const orders::Finish finishing{.tags = tags, .keep_backup = true};
  const orders::Undo undoing{.what = orders::Undo::What::kRestore, .tags = tags};
  const Status restored = [&]() TORPOR_REQUIRES(memory_.mutex()) -> Status {
    TORPOR_ASSIGN_OR_RETURN(const orders::Restore::Reply reply, carry_out(restoring));
    phases.done("restore");
    move.copied_bytes = reply.bytes;
    TORPOR_RETURN_IF_ERROR(carry_out(finishing));
    phases.done("finish");
    return ok();
  }();
  if (!restored) {
    (void)carry_out(undoing);
    return restored.error();
  }
  move.dropped_bytes -= move.copied_bytes;
  return move;
}

Result<TagMove> TagSleep::plan_sleep(std::vector<std::string> wanted, const std::vector<std::string>& keep) const {
  const MutexLock lock(memory_.mutex());
  TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> tags, select(std::move(wanted), RegionState::kAttached));
  TagMove move;
  if (const Status usable = memory_.transfers().usable(); !usable) note_obstacle(move, usable.error().to_string());
  uint64_t needed = 0;  // of host memory
  for (const RegionInfo& region : memory_.allocator().regions()) {
    if (!has_tag(tags, region.tag)) continue;
    move.physical_bytes += region.reserved_bytes;
    const TagImage* const image = memory_.images().find(region.tag);
    const bool clean = image != nullptr && image->needs_no_copy();
    (!has_tag(keep, region.tag) ? move.dropped_bytes
     : clean                    ? move.clean_bytes
                                : move.copied_bytes) += region.size_bytes;
    if (has_tag(keep, region.tag) && !clean) needed += memory_.steps().saver().held_for(region.tag, region.size_bytes);
    if (region.state == RegionState::kBroken)
      note_obstacle(move, fmt::format("the region {}/{} is broken", region.tag, region.name));
  }
  // The sleep gives these back before it takes more: images that it replaces, and retained blocks.
  uint64_t given_back = memory_.images().index().retained_bytes();
  for (const std::string& tag : tags) {
    const TagImage* const image = memory_.images().find(tag);
    if (image != nullptr && has_tag(keep, tag) && !image->needs_no_copy()) given_back += image->host_bytes();
  }
  needed -= std::min(needed, given_back);
  const HostArenaInfo arena = memory_.arena().info();
  const uint64_t free = arena.held_bytes - arena.used_bytes;
  const uint64_t left = arena.budget_bytes - std::min(arena.budget_bytes, arena.used_bytes);
  if (!memory_.steps().saver().spills() && arena.budget_bytes != 0 && needed > free &&
      needed - free > arena.budget_bytes - std::min(arena.budget_bytes, arena.held_bytes)) {
    note_obstacle(move, fmt::format("{} bytes of host memory are needed, {} of the budget of {} are left", needed, left,
                                    arena.budget_bytes));
  }
  if (memory_.steps().saver().spills() && arena.budget_bytes != 0) needed = std::min(needed, left);
  if (const Status can = memory_.arena().check_free(needed); !can) note_obstacle(move, can.error().to_string());
  return move;
}

Result<TagMove> TagSleep::plan_wake(std::vector<std::string> wanted) const {
  const MutexLock lock(memory_.mutex());
  TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> tags, select(std::move(wanted), RegionState::kDetached));
  TagMove move;
  if (const Status usable = memory_.transfers().usable(); !usable) note_obstacle(move, usable.error().to_string());
  for (const RegionInfo& region : memory_.allocator().regions()) {
    if (!has_tag(tags, region.tag)) continue;
    move.physical_bytes += region.reserved_bytes;
    move.dropped_bytes += region.size_bytes;
    if (region.state == RegionState::kBroken)
      note_obstacle(move, fmt::format("the region {}/{} is broken", region.tag, region.name));
  }
  for (const std::string& tag : tags) {
    if (const TagImage* const image = memory_.images().find(tag)) move.copied_bytes += image->bytes();
  }
  move.dropped_bytes -= move.copied_bytes;
  const DeviceMemoryInfo device = memory_.device().info();
  if (const std::optional<uint64_t> free = device.free_bytes(); free && move.physical_bytes > *free) {
    note_obstacle(move, fmt::format("{} bytes of device memory are needed, {} of {} are free", move.physical_bytes,
                                    *free, device.capacity_bytes));
  }
  return move;
}

}  // namespace torpor
