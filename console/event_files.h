// SPDX-License-Identifier: Apache-2.0
// Files of events: rings in a directory, one for each process and role, and recordings.
//
// A directory of rings is 0700, belongs to the user, and is on tmpfs. A process that ends by itself removes its ring.
// The rings of killed processes stay, the newest few of them, and show their last events.
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

// Return $XDG_RUNTIME_DIR/torpor, or else a directory below /dev/shm with the user's id.
std::string default_event_directory();

// Make a ring of this process in `directory`; make the directory if it is missing. kFailedPrecondition: the directory
// does not belong to this user alone, or is not on tmpfs.
Result<std::unique_ptr<EventRing>> begin_events(const std::string& directory, std::string role, int32_t rank,
                                                const Clock& clock, uint64_t events = EventRing::kDefaultEvents);

// Return the path of the socket that belongs to this ring (console/control_server.h); the process may have none.
std::string socket_of(const std::string& ring_path);

// Open the rings at `path`: first those of live processes, then the newest. kNotFound: no such directory.
Result<std::vector<std::unique_ptr<EventRing>>> open_rings(const std::string& path);

// Read all events at `path`: a directory of rings or recordings, or one ring or recording. kNotFound: there are none.
Result<std::vector<SourceEvents>> read_events(FileSystem& file_system, const std::string& path);

// EventFollower: returns new events of rings that are being written, including rings that appear later. Threads: one at
// a time.
class EventFollower {
 public:
  // `from_now`: skip events from before the first poll().
  EventFollower(std::string path, bool from_now) : path_(std::move(path)), from_now_(from_now) {}
  // Return each source with its new events. The order of sources is the same in each call; new ones come last. `last`:
  // an event that is still being written counts as lost.
  Result<std::vector<SourceEvents>> poll(bool last = false);
  // Return whether some process lives. It is checked five times a second and in the last call.
  bool any_alive() const;

 private:
  struct Followed {
    std::unique_ptr<EventRing> ring;
    EventReader reader;
    bool alive = true;   // its process lived at the last check
    bool ended = false;  // its process has ended and all events were read
    std::chrono::steady_clock::time_point looked{};
  };
  bool may_have_changed();
  const std::string path_;
  bool from_now_;
  std::vector<Followed> rings_;
  std::optional<std::pair<int64_t, int64_t>> seen_;  // last change of the directory, if it is long enough ago
};

// An event and the index of its source.
struct Placed {
  size_t source = 0;
  const Event* event = nullptr;
};
// Merge the events of all sources by time; events of one source keep their order.
std::vector<Placed> merged(const std::vector<SourceEvents>& sources);

}  // namespace torpor::console
