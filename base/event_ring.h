// SPDX-License-Identifier: Apache-2.0
// EventRing: the last events of a process. Other processes may read them while they are written, and after the process
// was killed: the ring is a file that is mapped and shared. Nothing empties it; the newest event overwrites the oldest.
//
// Many threads write, without waiting. The first word of a cell is the sequence of its event, with a mark while it is
// written. A reader that finds the same sequence before and after it copied a cell has the whole event. If a writer
// finds that another writer, a whole round behind, still writes its cell, it gives up: its event is lost, and the gap
// in the sequences shows it. So readers know of every event that they miss.
//
// The file must lie on tmpfs, which is never written back; elsewhere a writer could wait for a disk. The mode is 0600,
// so the kernel decides who may read it. A forked child writes nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/event.h"
#include "base/status.h"

namespace torpor {

// The process that recorded the events.
struct EventSource {
  std::string role;  // "core", "rank", …; at most 15 bytes
  int32_t rank = 0;
  int32_t pid = 0;
  // Start time of the process as the kernel counts it; a later process with the same pid has another one.
  uint64_t process_start = 0;
  // One moment on both clocks: wall time = time - monotonic_ns + wall_ns.
  int64_t monotonic_ns = 0;
  int64_t wall_ns = 0;
  uint64_t capacity = 0;
  uint16_t major = 0;  // version of the schema
  uint16_t minor = 0;
  int64_t wall(int64_t time) const { return within(time) - monotonic_ns + wall_ns; }
  double wall_seconds(int64_t time) const { return static_cast<double>(wall(time)) * 1e-9; }
};
// Describe this process, now.
EventSource this_process(std::string role, int32_t rank, const Clock& clock);
// Return whether that process still runs.
bool is_alive(const EventSource& source);

inline constexpr uint16_t kEventSchemaMajor = 1;
inline constexpr uint16_t kEventSchemaMinor = 7;
inline constexpr uint64_t kEventHeadBytes = 4096;

// Write the head: the first kEventHeadBytes of a ring or a recording.
void write_event_head(const EventSource& source, const char (&magic)[9], std::byte* head);
// Read a head. kCorruption: it is damaged. kIncompatible: it has another major version.
Result<EventSource> read_event_head(const char (&magic)[9], std::span<const std::byte> head);

class EventRing {
 public:
  static constexpr uint64_t kDefaultEvents = 1 << 18;  // 16 MiB
  // Make a ring for this process alone. `events` is rounded up to a power of two.
  static Result<std::unique_ptr<EventRing>> in_memory(const EventSource& source, uint64_t events = kDefaultEvents);
  // Make a ring in a new file and allocate all its memory at once. kFailedPrecondition: `path` is not on tmpfs.
  static Result<std::unique_ptr<EventRing>> create(const std::string& path, const EventSource& source,
                                                   uint64_t events = kDefaultEvents);
  // Open a ring of any process, to read it. kNotFound; kCorruption; kIncompatible: another major version;
  // kFailedPrecondition: the file belongs to another user.
  static Result<std::unique_ptr<EventRing>> open(const std::string& path);
  // Removes the file if create() made it: after an orderly exit nobody needs the last events.
  ~EventRing();
  EventRing(const EventRing&) = delete;
  EventRing& operator=(const EventRing&) = delete;

  // Record an event at `time` (nanoseconds). Return its sequence; 0: it was lost.
  uint64_t record(const Event& event, int64_t time) noexcept;
  // Return the sequence of the last event; 0: none.
  uint64_t last_sequence() const noexcept { return head().last_sequence.load(std::memory_order_acquire); }
  uint64_t capacity() const noexcept { return mask_ + 1; }
  const EventSource& source() const { return source_; }
  const std::string& path() const { return path_; }
  // Set the watch; null: none. It must outlive all calls of record(), or be removed while nothing records.
  void watch(EventWatch* watch) noexcept { watch_.store(watch, std::memory_order_release); }
  EventWatch* watch() const noexcept { return watch_.load(std::memory_order_acquire); }

  // Find the event with this sequence. kThere: `event` has it. kGone: it is overwritten. kNotYet: it is being written,
  // or was lost.
  enum class Found : uint8_t { kThere, kGone, kNotYet };
  Found find(uint64_t sequence, Event& event) const noexcept;

 private:
  struct alignas(64) Cell {
    std::atomic<uint64_t> words[8];  // an Event; the first word is its sequence, with kWriting while it is written
  };
  struct alignas(64) Counter {
    std::atomic<uint64_t> last_sequence;
  };
  static constexpr uint64_t kWriting = uint64_t{1} << 63;
  static constexpr uint64_t kCounterAt = 2048;  // in the head
  EventRing(void* memory, uint64_t bytes, EventSource source, std::string path, bool own);
  static Result<std::unique_ptr<EventRing>> map(int fd, EventSource source, std::string path);
  Counter& head() const noexcept { return *reinterpret_cast<Counter*>(memory_ + kCounterAt); }
  Cell& cell(uint64_t sequence) const noexcept {
    return reinterpret_cast<Cell*>(memory_ + kEventHeadBytes)[(sequence - 1) & mask_];
  }

  std::byte* const memory_;
  const uint64_t bytes_;
  const uint64_t mask_;
  const EventSource source_;
  const std::string path_;  // empty: in memory
  const bool own_;          // this process writes
  const uint32_t forks_;    // value of count_forks() when this was made; if it differs, this is a forked child
  std::atomic<EventWatch*> watch_ = nullptr;
};

// EventReader: reads a ring from where it stopped before.
class EventReader {
 public:
  // Start after the event `after`, or at the oldest that is still there. The ring must outlive the reader.
  explicit EventReader(const EventRing& ring, uint64_t after = 0) : ring_(ring), next_(after + 1) {}
  // Append the new events to `events`, in order, until it has `most` entries.
  //
  // If events are missing, append a kLost (`a`: the first sequence, `b`: the count) as soon as the loss is certain. If
  // an event is still being written, stop before it; after a second, or if `last`, count it as lost.
  void read(std::vector<Event>& events, bool last = false, size_t most = SIZE_MAX);
  uint64_t lost() const { return lost_; }
  uint64_t next() const { return next_; }

 private:
  void skip(std::vector<Event>& events, uint64_t to);
  const EventRing& ring_;
  uint64_t next_;
  uint64_t lost_ = 0;
  std::optional<std::chrono::nanoseconds> waits_since_;  // since when `next_` was found unfinished
};

}  // namespace torpor
