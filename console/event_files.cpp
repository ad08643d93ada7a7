// SPDX-License-Identifier: Apache-2.0
#include "console/event_files.h"

#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <tuple>

#include <fmt/core.h>
#include <boost/filesystem.hpp>

#include "console/recording.h"

namespace torpor::console {
namespace {

namespace fs = boost::filesystem;

constexpr std::string_view kRing = ".ring";
constexpr std::string_view kSocket = ".sock";
// Between two checks of a process: asking the system costs more than reading new events.
constexpr std::chrono::milliseconds kBetweenLooks{200};
constexpr size_t kLastWords = 4;  // rings of killed processes that are kept

Status own_directory(const std::string& path) {
  boost::system::error_code problem;
  if (const fs::path parent = fs::path(path).parent_path(); !parent.empty()) fs::create_directories(parent, problem);
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return system_error(errno, fmt::format("making {}", path));
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) return system_error(errno, fmt::format("looking at {}", path));
  if (S_ISDIR(status.st_mode) && status.st_uid == ::geteuid() && (status.st_mode & 077) == 0) return ok();
  return Error{.code = Code::kFailedPrecondition,
               .what = fmt::format("{} is not a directory of this user alone", path),
               .next_step = "name another one for events, or chmod it to 0700"};
}

std::vector<std::string> files_in(const std::string& directory, std::string_view ending) {
  std::vector<std::string> names;
  boost::system::error_code problem;
  for (fs::directory_iterator at(directory, problem), end; !problem && at != end; at.increment(problem)) {
    if (const std::string name = at->path().filename().string(); name.ends_with(ending))
      names.push_back(at->path().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

void forget_old_words(const std::string& directory) {
  Result<std::vector<std::unique_ptr<EventRing>>> rings = open_rings(directory);
  if (!rings) return;
  size_t dead = 0;
  for (const auto& ring : *rings) {
    if (is_alive(ring->source())) continue;
    (void)::unlink(socket_of(ring->path()).c_str());
    if (++dead > kLastWords) (void)::unlink(ring->path().c_str());
  }
}

SourceEvents read_ring(const EventRing& ring) {
  SourceEvents read{.source = ring.source(), .path = ring.path(), .alive = is_alive(ring.source())};
  read.gone = !read.alive;
  EventReader reader(ring);
  reader.read(read.events, !read.alive);
  for (int more = 0; read.alive && more < 4; ++more) {  // events that were being written at that moment
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    reader.read(read.events);
  }
  read.lost = reader.lost();
  return read;
}

}  // namespace

std::string socket_of(const std::string& ring_path) {
  return ring_path.substr(0, ring_path.rfind('.')) + std::string(kSocket);
}

std::string default_event_directory() {
  const char* const runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && *runtime != '\0') return std::string(runtime) + "/torpor";
  return fmt::format("/dev/shm/torpor-{}", ::geteuid());
}

Result<std::unique_ptr<EventRing>> begin_events(const std::string& directory, std::string role, int32_t rank,
                                                const Clock& clock, uint64_t events) {
  return try_catch([&]() -> Result<std::unique_ptr<EventRing>> {
    TORPOR_RETURN_IF_ERROR(own_directory(directory));
    forget_old_words(directory);
    const EventSource source = this_process(std::move(role), rank, clock);
    for (int more = 0;; ++more) {  // engines of one process
      const std::string name = fmt::format("{}/{}-{}-{}{}{}", directory, source.pid, source.role, source.rank,
                                           more == 0 ? "" : fmt::format(".{}", more), kRing);
      boost::system::error_code problem;
      if (more < 1000 && fs::exists(name, problem)) continue;
      return EventRing::create(name, source, events);
    }
  });
}

Result<std::vector<std::unique_ptr<EventRing>>> open_rings(const std::string& path) {
  return try_catch([&]() -> Result<std::vector<std::unique_ptr<EventRing>>> {
    std::vector<std::unique_ptr<EventRing>> rings;
    boost::system::error_code problem;
    if (!fs::is_directory(path, problem)) {
      TORPOR_ASSIGN_OR_RETURN(rings.emplace_back(), EventRing::open(path));
      return rings;
    }
    for (const std::string& name : files_in(path, kRing)) {
      Result<std::unique_ptr<EventRing>> ring = EventRing::open(name);
      if (ring) rings.push_back(std::move(*ring));  // otherwise it was removed, or is being made
    }
    const auto order = [](const auto& ring) {
      return std::tuple(!is_alive(ring->source()), -ring->source().wall_ns, ring->source().rank);
    };
    std::stable_sort(rings.begin(), rings.end(), [&](const auto& a, const auto& b) { return order(a) < order(b); });
    return rings;
  });
}

Result<std::vector<SourceEvents>> read_events(FileSystem& file_system, const std::string& path) {
  return try_catch([&]() -> Result<std::vector<SourceEvents>> {
    std::vector<SourceEvents> all;
    boost::system::error_code problem;
    const bool directory = fs::is_directory(path, problem);
    if (!directory && path.ends_with(kRecordingEnding)) {
      const fs::path file(path);
      TORPOR_ASSIGN_OR_RETURN(
          const auto in, file_system.open_directory(file.has_parent_path() ? file.parent_path().string() : ".", false));
      TORPOR_ASSIGN_OR_RETURN(all.emplace_back(), read_recording(*in, file.filename().string()));
      return all;
    }
    TORPOR_ASSIGN_OR_RETURN(const std::vector<std::unique_ptr<EventRing>> rings, open_rings(path));
    for (const auto& ring : rings) all.push_back(read_ring(*ring));
    if (directory && !files_in(path, kRecordingEnding).empty()) {
      TORPOR_ASSIGN_OR_RETURN(const auto in, file_system.open_directory(path, false));
      for (const std::string& file : files_in(path, kRecordingEnding)) {
        TORPOR_ASSIGN_OR_RETURN(all.emplace_back(), read_recording(*in, fs::path(file).filename().string()));
      }
    }
    if (all.empty()) {
      return Error{.code = Code::kNotFound,
                   .what = fmt::format("there are no events in {}", path),
                   .next_step = "start an engine with the option events_dir, or name a recording"};
    }
    return all;
  });
}

// Check whether the directory has changed: opening all rings in each poll would be most of a follower's cost. A new
// ring is in the directory before it can be opened, so a change is looked at repeatedly for a while.
bool EventFollower::may_have_changed() {
  constexpr int64_t kWhileMade = 2;  // seconds
  struct stat status {};
  if (::stat(path_.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) return true;
  const std::pair<int64_t, int64_t> changed = {status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
  if (seen_ == changed) return false;
  timespec now{};
  (void)::clock_gettime(CLOCK_REALTIME, &now);
  seen_.reset();
  if (now.tv_sec - changed.first > kWhileMade) seen_ = changed;
  return true;
}

Result<std::vector<SourceEvents>> EventFollower::poll(bool last) {
  return try_catch([&]() -> Result<std::vector<SourceEvents>> {
    Result<std::vector<std::unique_ptr<EventRing>>> there = std::vector<std::unique_ptr<EventRing>>();
    if (may_have_changed()) there = open_rings(path_);
    if (!there && (rings_.empty() || there.error().code != Code::kNotFound)) return there.error();
    for (size_t i = 0; there && i < there->size(); ++i) {
      std::unique_ptr<EventRing>& ring = (*there)[i];
      if (from_now_ && !is_alive(ring->source())) continue;
      if (std::any_of(rings_.begin(), rings_.end(), [&](const Followed& known) {
            return known.ring->path() == ring->path() &&
                   known.ring->source().process_start == ring->source().process_start;
          }))
        continue;
      const uint64_t after = from_now_ ? ring->last_sequence() : 0;
      EventReader reader(*ring, after);
      rings_.push_back({std::move(ring), std::move(reader)});
    }
    from_now_ = false;  // rings that appear later are read from their beginning
    std::vector<SourceEvents> news;
    const auto now = std::chrono::steady_clock::now();
    for (Followed& each : rings_) {
      if (!each.ended && (last || now - each.looked >= kBetweenLooks)) {
        each.alive = is_alive(each.ring->source());
        each.looked = now;
      }
      SourceEvents& read = news.emplace_back(SourceEvents{
          .source = each.ring->source(), .path = each.ring->path(), .alive = each.alive, .gone = !each.alive});
      if (!each.ended) each.reader.read(read.events, last || !each.alive);
      each.ended = !each.alive;
      read.lost = each.reader.lost();
    }
    return news;
  });
}

bool EventFollower::any_alive() const {
  return std::any_of(rings_.begin(), rings_.end(), [](const Followed& each) { return !each.ended; });
}

std::vector<Placed> merged(const std::vector<SourceEvents>& sources) {
  std::vector<Placed> all;
  std::vector<int64_t> times;
  size_t count = 0;
  for (const SourceEvents& source : sources) count += source.events.size();
  all.reserve(count);
  struct Key {
    int64_t time;
    size_t at;
  };
  std::vector<Key> keys;
  keys.reserve(count);
  for (size_t i = 0; i < sources.size(); ++i) {
    int64_t latest = INT64_MIN;  // events of one source keep their order, even if the clocks of their threads disagree
    for (const Event& event : sources[i].events) {
      if (event.type != EventType::kLost) latest = std::max(latest, sources[i].source.wall(event.time));
      keys.push_back({latest, all.size()});
      all.push_back({i, &event});
    }
  }
  std::stable_sort(keys.begin(), keys.end(), [](const Key& a, const Key& b) { return a.time < b.time; });
  std::vector<Placed> sorted;
  sorted.reserve(count);
  for (const Key& key : keys) sorted.push_back(all[key.at]);
  return sorted;
}

}  // namespace torpor::console
