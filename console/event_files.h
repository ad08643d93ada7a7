// SPDX-License-Identifier: Apache-2.0
// Where the events of processes are: rings in a directory of its own, one a process and role, and recordings.
//
// A directory of rings is 0700 and the user's, on tmpfs. Who ends by itself takes its ring away; the rings of killed
// processes stay as their last words, the newest few of them.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/event_ring.h"
#include "base/file_system.h"
#include "console/source_events.h"

namespace torpor::console {

// $XDG_RUNTIME_DIR/torpor, else below /dev/shm, with the user's number.
std::string default_event_directory();

// A ring of this process in `directory`, which is made if it is not there. kFailedPrecondition: it is not this user's
// alone, or not on tmpfs.
Result<std::unique_ptr<EventRing>> begin_events(const std::string& directory, std::string role, int32_t rank,
                                                const Clock& clock, uint64_t events = EventRing::kDefaultEvents);

// The socket of the process whose ring this is, if it has one (console/control_server.h).
std::string socket_of(const std::string& ring_path);

// Rings that are there, of the processes that live first of all, the newest first. kNotFound: no such directory.
Result<std::vector<std::unique_ptr<EventRing>>> open_rings(const std::string& path);

// All that is there: a directory of rings or recordings, or one of either. kNotFound: nothing is.
Result<std::vector<SourceEvents>> read_events(FileSystem& file_system, const std::string& path);

// What is new of rings that are written, and of those that come.
class EventFollower {
 public:
  // `from_now`: nothing of before.
  EventFollower(std::string path, bool from_now) : path_(std::move(path)), from_now_(from_now) {}
  // Each source with what is new; the same ones in the same order in each call, new ones behind. `last`: what is still
  // being written counts as lost.
  Result<std::vector<SourceEvents>> poll(bool last = false);
  // Whether a process lives is looked at five times a second, and in the last call.
  bool any_alive() const;

 private:
  struct Followed {
    std::unique_ptr<EventRing> ring;
    EventReader reader;
    bool alive = true;   // its process, when it was last looked at
    bool ended = false;  // it is not, and all of it was read
    std::chrono::steady_clock::time_point looked{};
  };
  bool may_have_changed();
  const std::string path_;
  bool from_now_;
  std::vector<Followed> rings_;
  std::optional<std::pair<int64_t, int64_t>> seen_;  // when the directory had changed last; of a time long enough ago
};

// One event of one of several sources.
struct Placed {
  size_t source = 0;
  const Event* event = nullptr;
};
// By time; events of one source stay in their order.
std::vector<Placed> merged(const std::vector<SourceEvents>& sources);

}  // namespace torpor::console
