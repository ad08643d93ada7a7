// SPDX-License-Identifier: Apache-2.0
#include "engine/memory_saver.h"

#include <algorithm>
#include <set>

#include <unistd.h>

#include <fmt/core.h>

#include "base/event.h"
#include "base/log.h"
#include "base/text.h"
#include "engine/phases.h"
#include "engine/tags.h"

namespace torpor {
namespace {

// Suffix of the tag of memory that a sleep does not save. Tags of users have no control characters.
constexpr const char* kNotKept = "\x01";

std::string tag_of(const MemorySaver::Scope& scope) { return scope.keep ? scope.tag : scope.tag + kNotKept; }
std::string user_tag(const std::string& tag) { return tag.ends_with(kNotKept) ? tag.substr(0, tag.size() - 1) : tag; }

Status leaves_margin(const DeviceMemoryInfo& info, uint64_t bytes, uint64_t margin) {
  const uint64_t used = info.used_bytes.value_or(info.physical_bytes);
  const uint64_t free = info.capacity_bytes - std::min(info.capacity_bytes, used);
  if (info.capacity_bytes == 0 || (bytes <= free && margin <= free - bytes)) return ok();
  return Error{.code = Code::kResourceExhausted,
               .what = fmt::format("{} bytes would leave less than the margin of {}: {} are free", bytes, margin, free),
               .next_step = "free memory, or set a smaller margin"};
}

}  // namespace

MemorySaver::MemorySaver(MakeMemory make_memory) : make_memory_(std::move(make_memory)) {}
MemorySaver::~MemorySaver() = default;

std::vector<MemorySaver::Scope>& MemorySaver::scopes() {
  thread_local std::vector<Scope> scopes;
  return scopes;
}

Status MemorySaver::same_process() const {
  const int64_t process = process_;
  return process == 0 || process == ::getpid() ? ok() : of_another_process(process);
}

Result<RankMemory*> MemorySaver::find_or_make(int device, const MakeMemory& make) {
  Device& entry = devices_[device];
  if (entry.memory == nullptr) {
    const int64_t before = process_.exchange(::getpid());
    Result<std::unique_ptr<RankMemory>> made = make(device);
    if (!made) {
      process_ = before;
      return std::move(made).error();
    }
    entry.memory = std::move(*made);
  }
  return entry.memory.get();
}

Result<RankMemory*> MemorySaver::memory_of(int device, const MakeMemory& make) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  return find_or_make(device, make ? make : make_memory_);
}

Result<DeviceAddress> MemorySaver::allocate(int device, uint64_t bytes) {
  const Scope scope = scopes().empty() ? Scope{} : scopes().back();
  if (!scope.active || scope.tag.find(kNotKept) != std::string::npos) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = "this thread is outside of a region",
                 .next_step = "allocate inside one"};
  }
  if (scope.on_disk) {
    return Error{.code = Code::kUnsupported,
                 .what = "a backup on disk is not offered for single regions",
                 .next_step = "keep it in host memory"};
  }
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  TORPOR_ASSIGN_OR_RETURN(RankMemory* const memory, find_or_make(device, make_memory_));
  if (margin_bytes_ > 0) TORPOR_RETURN_IF_ERROR(leaves_margin(memory->device().info(), bytes, margin_bytes_));
  TORPOR_RETURN_IF_ERROR(is_owner(scope));
  if (scope.engine)
    engine_tags_.insert(scope.tag);
  else
    engine_tags_.erase(scope.tag);
  memory->set_foreign(tag_of(scope), !scope.engine);
  return memory->allocate(tag_of(scope), std::to_string(++devices_[device].allocations), bytes);
}

Status MemorySaver::is_owner(const Scope& scope) const {
  if (engine_tags_.contains(scope.tag) == scope.engine) return ok();
  for (const auto& [ordinal, device] : devices_) {
    if (device.memory == nullptr) continue;
    for (const auto& [name, state] : device.memory->states()) {
      if (user_tag(name) != scope.tag) continue;
      return Error{.code = Code::kFailedPrecondition,
                   .what = fmt::format("the tag \"{}\" has memory of {}", scope.tag,
                                       scope.engine ? "a region of this program" : "an engine of this process"),
                   .next_step = "give the region another tag"};
    }
  }
  return ok();
}

Status MemorySaver::check_owner(const Scope& scope) const {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  return is_owner(scope);
}

std::set<std::string> MemorySaver::engine_tags() const {
  if (!same_process()) return {};
  const MutexLock lock(mutex_);
  return engine_tags_;
}

bool MemorySaver::is_left_out(const std::vector<std::string>& tags, const std::string& name) const {
  return tags.empty() ? engine_tags_.contains(user_tag(name)) : !has_tag(tags, user_tag(name));
}

Result<RankMemory*> MemorySaver::find(int device) const {
  const auto found = devices_.find(device);
  if (found == devices_.end() || found->second.memory == nullptr) {
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("nothing was allocated on device {}", device),
                 .next_step = "free what was allocated here"};
  }
  return found->second.memory.get();
}

Status MemorySaver::free(int device, DeviceAddress address) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  TORPOR_ASSIGN_OR_RETURN(RankMemory* const memory, find(device));
  return memory->free(address);
}

Status MemorySaver::free_soon(int device, DeviceAddress address) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  TORPOR_ASSIGN_OR_RETURN(RankMemory* const memory, find(device));
  return memory->free_soon(address);
}

void MemorySaver::free_left() {
  for (const auto& [ordinal, device] : devices_) {
    if (device.memory == nullptr || !device.memory->same_process()) continue;
    const MutexLock lock(device.memory->mutex());
    device.memory->free_left();
  }
}

uint64_t MemorySaver::trim(int device, std::span<const DeviceAddress> addresses) {
  if (!same_process()) return 0;
  const MutexLock lock(mutex_);
  const auto found = devices_.find(device);
  if (found == devices_.end() || found->second.memory == nullptr) return 0;
  uint64_t bytes = 0;
  for (const DeviceAddress address : addresses) {
    const Result<uint64_t> trimmed = found->second.memory->trim(address);
    if (trimmed) {
      bytes += *trimmed;
    } else if (trimmed.error().code != Code::kNotFound && trimmed.error().code != Code::kFailedPrecondition) {
      log().warn("memory that nothing uses was not given back to the device: {}", trimmed.error());
    }
  }
  return bytes;
}

void MemorySaver::set_margin(uint64_t bytes) {
  if (!same_process()) return;
  const MutexLock lock(mutex_);
  margin_bytes_ = bytes;
}

Status MemorySaver::read_saved(DeviceAddress address, std::span<std::byte> out) const {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  for (const auto& [ordinal, device] : devices_) {
    if (device.memory == nullptr) continue;
    Status read = device.memory->read_saved(address, out);
    if (read || read.error().code != Code::kNotFound) return read;
  }
  return Error{.code = Code::kNotFound,
               .what = fmt::format("nothing is saved of {} bytes at {:#x}", out.size(), address),
               .next_step = "ask for memory that sleeps and keeps its content"};
}

namespace {

// Emit the events of an operation on one device, and its memory afterwards.
Result<TagMove> publish_operation(std::string_view name, RankMemory& memory,
                                  const std::function<Result<TagMove>()>& work) {
  const EventPort& port = memory.events();
  if (name.empty() || !port.on()) return work();
  const uint8_t kind = number_of(name, kOperationNames);
  const int64_t began = port.now();
  const uint64_t number =
      port.record({.type = EventType::kOperation, .from = kind, .to = static_cast<uint8_t>(Edge::kBegin)});
  Result<TagMove> move = work();
  if (!move) port.text(TextKind::kError, 0, number, move.error().what);
  (void)port.record({.type = EventType::kOperation,
                     .from = kind,
                     .to = static_cast<uint8_t>(move ? Edge::kEnd : Edge::kFailed),
                     .transfer = number,
                     .b = static_cast<uint64_t>(port.now() - began)});
  (void)memory.ledger();  // emits its memory
  return move;
}

}  // namespace

Result<TagMove> MemorySaver::each(
    std::string_view operation, const std::vector<std::string>& wanted_tags, RegionState wanted,
    const std::function<Result<TagMove>(RankMemory&, const std::vector<std::string>&)>& work) {
  std::vector<std::pair<Device*, std::vector<std::string>>> selected;
  std::set<std::string> known;
  for (auto& [ordinal, device] : devices_) {
    if (device.memory == nullptr) continue;
    std::vector<std::string> tags;
    for (const auto& [name, state] : device.memory->states()) {
      if (is_left_out(wanted_tags, name)) continue;
      known.insert(user_tag(name));
      const bool fits =
          state == wanted || state == RegionState::kBroken || (wanted == RegionState::kDetached && is_asleep(state));
      if (fits) tags.push_back(name);
    }
    if (!tags.empty()) selected.emplace_back(&device, std::move(tags));
  }
  for (const std::string& tag : wanted_tags) {
    if (!known.contains(tag))
      return Error{.code = Code::kNotFound,
                   .what = fmt::format("there is no tag \"{}\"", tag),
                   .next_step = "see the tags of the ledger"};
  }
  if (selected.empty()) {
    const std::string what = wanted_tags.empty() ? "nothing" : fmt::format("nothing of {}", joined(wanted_tags, ", "));
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("{} is {}", what, name(wanted)),
                 .next_step = wanted == RegionState::kAttached ? "wake it first" : "put it to sleep first"};
  }
  TagMove sum;
  for (const auto& [device, tags] : selected) {
    TORPOR_ASSIGN_OR_RETURN(TagMove move,
                            publish_operation(operation, *device->memory, [&] { return work(*device->memory, tags); }));
    sum.copied_bytes += move.copied_bytes;
    sum.clean_bytes += move.clean_bytes;
    sum.dropped_bytes += move.dropped_bytes;
    sum.physical_bytes += move.physical_bytes;
    if (sum.obstacle.empty()) sum.obstacle = std::move(move.obstacle);
    std::move(move.seconds.begin(), move.seconds.end(), std::back_inserter(sum.seconds));
  }
  return sum;
}

// Return those of `tags` whose content is saved.
std::vector<std::string> MemorySaver::kept(const std::vector<std::string>& tags,
                                           const std::optional<std::vector<std::string>>& keep) {
  std::vector<std::string> kept;
  std::copy_if(tags.begin(), tags.end(), std::back_inserter(kept),
               [&](const std::string& tag) { return keep ? has_tag(*keep, user_tag(tag)) : !tag.ends_with(kNotKept); });
  return kept;
}

Result<TagMove> MemorySaver::sleep(const std::vector<std::string>& tags,
                                   const std::optional<std::vector<std::string>>& keep, CleanCheck clean) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  free_left();
  return each("sleep", tags, RegionState::kAttached, [&](RankMemory& memory, const std::vector<std::string>& selected) {
    return TagSleep(memory).sleep(selected, kept(selected, keep), clean);
  });
}

Result<TagMove> MemorySaver::wake(const std::vector<std::string>& tags) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  free_left();
  return each("wake", tags, RegionState::kDetached, [](RankMemory& memory, const std::vector<std::string>& selected) {
    return TagSleep(memory).wake(selected);
  });
}

Result<TagMove> MemorySaver::plan_sleep(const std::vector<std::string>& tags,
                                        const std::optional<std::vector<std::string>>& keep) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  return each("", tags, RegionState::kAttached, [&](RankMemory& memory, const std::vector<std::string>& selected) {
    return TagSleep(memory).plan_sleep(selected, kept(selected, keep));
  });
}

Result<TagMove> MemorySaver::plan_wake(const std::vector<std::string>& tags) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  return each("", tags, RegionState::kDetached, [](RankMemory& memory, const std::vector<std::string>& selected) {
    return TagSleep(memory).plan_wake(selected);
  });
}

void MemorySaver::mark_dirty(const std::vector<std::string>& tags) {
  if (!same_process()) return;
  const MutexLock lock(mutex_);
  for (auto& [ordinal, device] : devices_) {
    if (device.memory == nullptr) continue;
    for (const auto& [name, state] : device.memory->states()) {
      if (!is_left_out(tags, name)) device.memory->mark_dirty(name);
    }
  }
}

Result<std::map<int, RankLedger>> MemorySaver::ledgers() const {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  std::map<int, RankLedger> ledgers;
  for (const auto& [ordinal, device] : devices_) {
    if (device.memory == nullptr) continue;
    RankLedger ledger = device.memory->ledger();
    std::map<std::string, RankLedger::Tag> tags;
    for (auto& [tag, held] : ledger.tags)
      tags.emplace(tag.ends_with(kNotKept) ? user_tag(tag) + " (not kept)" : tag, held);
    ledger.tags = std::move(tags);
    ledgers.emplace(ordinal, std::move(ledger));
  }
  return ledgers;
}

void MemorySaver::end_prefault() noexcept {
  if (!mutex_.try_lock()) return;
  const MutexLock lock(mutex_, std::adopt_lock);
  for (const auto& [ordinal, device] : devices_)
    if (device.memory != nullptr) device.memory->end_prefault();
}

}  // namespace torpor
