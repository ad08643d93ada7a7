// SPDX-License-Identifier: Apache-2.0
// EventRing: the last events of a process, in memory that others may read while it is written and after its process was
// killed: a file that is mapped and shared. Nobody empties it: the newest event goes where the oldest was.
//
// Many threads write, without waiting. A cell has its event's sequence in its first word, marked while it is written; a
// reader that finds the same sequence before and after it copied a cell has the event whole. A writer that finds its
// cell still being written by one that was overtaken by a whole round gives up: that event is lost, and its sequence is
// the hole that says so. So readers know of every event that they did not get.
//
// The file lies where nothing is ever written back (tmpfs), or a writer could wait for a disk. 0600: who may read it is
// decided by the kernel. A forked child writes nothing.
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

// Whose events they are.
struct EventSource {
  std::string role;  // "core", "rank", …; at most 15 bytes
  int32_t rank = 0;
  int32_t pid = 0;
  uint64_t process_start = 0;  // as the kernel counts it: a pid that is used again is another process
  int64_t monotonic_ns = 0;    // one moment by both clocks: wall time = time - monotonic + wall
  int64_t wall_ns = 0;
  uint64_t capacity = 0;
  uint16_t major = 0;  // of the schema
  uint16_t minor = 0;
  int64_t wall(int64_t time) const { return within(time) - monotonic_ns + wall_ns; }
  double wall_seconds(int64_t time) const { return static_cast<double>(wall(time)) * 1e-9; }
};
// This process, now.
EventSource this_process(std::string role, int32_t rank, const Clock& clock);
// Whether that process is still there.
bool is_alive(const EventSource& source);

inline constexpr uint16_t kEventSchemaMajor = 1;
inline constexpr uint16_t kEventSchemaMinor = 5;
inline constexpr uint64_t kEventHeadBytes = 4096;

// The first bytes of a ring and of a recording.
void write_event_head(const EventSource& source, const char (&magic)[9], std::byte* head);
// kCorruption, kIncompatible: of another major version.
Result<EventSource> read_event_head(const char (&magic)[9], std::span<const std::byte> head);

class EventRing {
 public:
  static constexpr uint64_t kDefaultEvents = 1 << 18;  // 16 MiB
  // For this process alone. `events`: rounded up to a power of two.
  static Result<std::unique_ptr<EventRing>> in_memory(const EventSource& source, uint64_t events = kDefaultEvents);
  // A new file; its memory is taken at once. kFailedPrecondition: not on tmpfs.
  static Result<std::unique_ptr<EventRing>> create(const std::string& path, const EventSource& source,
                                                   uint64_t events = kDefaultEvents);
  // Somebody's, to be read. kNotFound, kCorruption, kIncompatible; kFailedPrecondition: another user's.
  static Result<std::unique_ptr<EventRing>> open(const std::string& path);
  // What create() made goes: a process that ends by itself leaves no last words.
  ~EventRing();
  EventRing(const EventRing&) = delete;
  EventRing& operator=(const EventRing&) = delete;

  // The event's sequence; 0: it was lost.
  uint64_t record(const Event& event, int64_t time) noexcept;
  uint64_t told() const noexcept { return head().told.load(std::memory_order_acquire); }
  uint64_t capacity() const noexcept { return mask_ + 1; }
  const EventSource& source() const { return source_; }
  const std::string& path() const { return path_; }
  // Null: nobody watches. Outlives every event that is told, or is taken away when nobody tells any.
  void watch(EventWatch* watch) noexcept { watch_.store(watch, std::memory_order_release); }
  EventWatch* watch() const noexcept { return watch_.load(std::memory_order_acquire); }

  // The event with this sequence, if it is there: kGone: overwritten; kNotYet: being written, or lost.
  enum class Found : uint8_t { kThere, kGone, kNotYet };
  Found find(uint64_t sequence, Event& event) const noexcept;

 private:
  struct alignas(64) Cell {
    std::atomic<uint64_t> words[8];  // an Event; the first: its sequence, with kWriting while it is written
  };
  struct alignas(64) Counter {
    std::atomic<uint64_t> told;
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
  const uint32_t forks_;    // of this process before
  std::atomic<EventWatch*> watch_ = nullptr;
};

// Reads on: all events after those that it read before.
class EventReader {
 public:
  // From the oldest that is there. The ring outlives it.
  explicit EventReader(const EventRing& ring, uint64_t after = 0) : ring_(ring), next_(after + 1) {}
  // Adds what is there, in order; where events are missing a kLost with how many (`a` the first, `b` the number), as
  // soon as that is certain: what is being written is waited for in the next calls, for a second, and not if `last`.
  // Stops when there are `most` in `events`.
  void read(std::vector<Event>& events, bool last = false, size_t most = SIZE_MAX);
  uint64_t lost() const { return lost_; }
  uint64_t next() const { return next_; }

 private:
  void skip(std::vector<Event>& events, uint64_t to);
  const EventRing& ring_;
  uint64_t next_;
  uint64_t lost_ = 0;
  std::optional<std::chrono::nanoseconds> waits_since_;  // for `next_`, which is being written, or was lost
};

}  // namespace torpor
