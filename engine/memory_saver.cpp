#include "engine/memory_saver.h"

#include <fmt/format.h>

namespace torpor {
namespace {

// The tag of memory that is not kept; a tag of a user has no control character in it.
constexpr const char* kNotKept = "\x01";

std::string tag_of(const MemorySaver::Scope& scope) { return scope.keep ? scope.tag : scope.tag + kNotKept; }
std::string user_tag(const std::string& tag) { return tag.ends_with(kNotKept) ? tag.substr(0, tag.size() - 1) : tag; }

}  // namespace

MemorySaver::MemorySaver(MakeDevice make_device, RankMemoryOptions options) : make_device_(std::move(make_device)), options_(std::move(options)) {}
MemorySaver::~MemorySaver() = default;

std::vector<MemorySaver::Scope>& MemorySaver::scopes() {
  thread_local std::vector<Scope> scopes;
  return scopes;
}

// Precondition: the lock is held.
Result<RankMemory*> MemorySaver::memory_of(int device) {
  Device& entry = devices_[device];
  if (entry.memory == nullptr) {
    TORPOR_ASSIGN(std::unique_ptr<DeviceMemory> made, make_device_(device));
    RankMemoryOptions options = options_;
    options.rank = device;
    TORPOR_ASSIGN(entry.memory, RankMemory::create(std::move(made), linux_file_system(), options));
  }
  return entry.memory.get();
}

Result<DeviceAddress> MemorySaver::allocate(int device, uint64_t bytes) {
  const Scope scope = scopes().empty() ? Scope{} : scopes().back();
  if (!scope.active || scope.tag.find(kNotKept) != std::string::npos) {
    return Error{.code = Code::kFailedPrecondition, .what = "this thread is outside of a region", .next_step = "allocate inside one"};
  }
  const std::lock_guard lock(mutex_);
  TORPOR_ASSIGN(RankMemory* const memory, memory_of(device));
  return memory->allocate(tag_of(scope), std::to_string(++devices_[device].allocations), bytes);
}

Status MemorySaver::free(int device, DeviceAddress address) {
  const std::lock_guard lock(mutex_);
  const auto found = devices_.find(device);
  if (found == devices_.end() || found->second.memory == nullptr) {
    return Error{.code = Code::kNotFound, .what = fmt::format("nothing was allocated on device {}", device), .next_step = "free what was allocated here"};
  }
  return found->second.memory->free(address);
}

Result<TagMove> MemorySaver::each(const std::string& tag, RegionState wanted, const std::function<Result<TagMove>(RankMemory&, const std::vector<std::string>&)>& work) {
  TagMove sum;
  bool known = false;
  bool any = false;
  for (auto& [ordinal, device] : devices_) {
    if (device.memory == nullptr) continue;
    std::vector<std::string> tags;
    for (const auto& [name, state] : device.memory->states()) {
      if (!tag.empty() && user_tag(name) != tag) continue;
      known = true;
      const bool fits = state == wanted || state == RegionState::kBroken || (wanted == RegionState::kDetached && state == RegionState::kRestoring);
      if (fits) tags.push_back(name);
    }
    if (tags.empty()) continue;
    any = true;
    TORPOR_ASSIGN(const TagMove move, work(*device.memory, tags));
    sum.copied_bytes += move.copied_bytes;
    sum.clean_bytes += move.clean_bytes;
    sum.dropped_bytes += move.dropped_bytes;
    sum.physical_bytes += move.physical_bytes;
    for (const auto& [phase, seconds] : move.seconds) sum.seconds.emplace_back(fmt::format("{} on device {}", phase, ordinal), seconds);
  }
  if (!tag.empty() && !known) return Error{.code = Code::kNotFound, .what = fmt::format("there is no tag \"{}\"", tag), .next_step = "see the tags of the ledger"};
  if (!any) {
    const std::string what = tag.empty() ? "nothing" : fmt::format("nothing of the tag {}", tag);
    return Error{.code = Code::kFailedPrecondition, .what = fmt::format("{} is {}", what, name(wanted)), .next_step = wanted == RegionState::kAttached ? "wake it first" : "put it to sleep first"};
  }
  return sum;
}

Result<TagMove> MemorySaver::sleep(const std::string& tag, CleanCheck clean) {
  const std::lock_guard lock(mutex_);
  return each(tag, RegionState::kAttached, [clean](RankMemory& memory, const std::vector<std::string>& tags) {
    std::vector<std::string> keep;
    for (const std::string& each : tags) {
      if (!each.ends_with(kNotKept)) keep.push_back(each);
    }
    return memory.sleep(tags, keep, clean);
  });
}

Result<TagMove> MemorySaver::wake(const std::string& tag) {
  const std::lock_guard lock(mutex_);
  return each(tag, RegionState::kDetached, [](RankMemory& memory, const std::vector<std::string>& tags) { return memory.wake(tags); });
}

void MemorySaver::mark_dirty(const std::string& tag) {
  const std::lock_guard lock(mutex_);
  for (auto& [ordinal, device] : devices_) {
    if (device.memory == nullptr) continue;
    for (const auto& [name, state] : device.memory->states()) {
      if (tag.empty() || user_tag(name) == tag) device.memory->mark_dirty(name);
    }
  }
}

std::map<std::string, std::pair<std::map<std::string, std::string>, RankLedger>> MemorySaver::describe() const {
  const std::lock_guard lock(mutex_);
  std::map<std::string, std::pair<std::map<std::string, std::string>, RankLedger>> all;
  for (const auto& [ordinal, device] : devices_) {
    if (device.memory == nullptr) continue;
    auto& [states, ledger] = all[fmt::format("{}", ordinal)];
    for (const auto& [tag, state] : device.memory->states()) states[tag.ends_with(kNotKept) ? user_tag(tag) + " (not kept)" : tag] = name(state);
    ledger = device.memory->ledger();
  }
  return all;
}

}  // namespace torpor
