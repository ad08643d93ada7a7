// SPDX-License-Identifier: Apache-2.0
// Event: 64 bytes that say what happened. EventPort: the value through which components record events.
//
// To record an event takes no lock, allocates nothing and never blocks; it is allowed on any thread and under any lock
// (base/event_ring.h). A port without a ring records nothing and costs one comparison. docs/console.md says which type
// of event uses which field. Never change a number of a type, of `from` or of `to`; only add new ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "base/clock.h"
#include "base/digest.h"

namespace torpor {

class EventRing;

enum class EventType : uint16_t {
  kText = 1,  // a name or a description, in parts of 32 bytes (EventPort::text)
  kLost,      // events are missing here; the reader makes this event
  kStep,
  kRequest,
  kSlot,
  kHit,
  kCandidate,
  kPlanned,
  kEnded,
  kRegistered,
  kDropped,
  kBlock,
  kCopy,
  kTier,
  kOperation,
  kPhase,
  kEngine,
  kStop,     // since 1.1
  kControl,  // since 1.1
  kInput,    // since 1.1
  kMemory,   // since 1.2
  kKey,      // since 1.2
  kCached,   // since 1.6
};
inline constexpr int kEventTypes = 24;

// State of a copy, an operation or a phase.
enum class Edge : uint8_t { kNone, kBegin, kEnd, kFailed, kUnproven, kUndone, kLost };
inline constexpr int kEdges = 7;

// In `to` of a block of a request: whether the block belongs to the prompt or to generated tokens.
enum class KeyOf : uint8_t { kPrompt, kMade };

// Subject of a text, in the lower bits of `from`; `request` or `transfer` identifies the subject.
enum class TextKind : uint8_t { kRequestName, kOperation, kError, kInput, kTag };
inline constexpr int kTextKinds = 5;
inline constexpr uint8_t kLastPart = 0x80;  // flag in `from`: this is the last part of the text

struct Event {
  uint64_t sequence = 0;  // number within its process: from 1, without gaps; EventPort::record() sets it
  int64_t time = 0;       // Clock::now(), nanoseconds; EventPort::record() sets it
  EventType type{};
  uint8_t from = 0;
  uint8_t to = 0;
  uint32_t request = 0;   // a number; 0: none
  uint64_t transfer = 0;  // number of a candidate, a job or an operation
  Digest key;             // of a block; zeros: none
  uint64_t a = 0;
  uint64_t b = 0;
  friend bool operator==(const Event&, const Event&) = default;
};
static_assert(sizeof(Event) == 64);

// Largest time that code may calculate with; no clock reaches it. A file may hold any time: clamp it with within()
// first.
inline constexpr int64_t kMostEventTime = INT64_MAX / 4;
constexpr int64_t within(int64_t time) { return std::clamp<int64_t>(time, 0, kMostEventTime); }

// Pack two 32-bit numbers into one field.
constexpr uint64_t both(uint64_t high, uint64_t low) { return high << 32 | (low & UINT32_MAX); }
constexpr uint32_t high_of(uint64_t field) { return static_cast<uint32_t>(field >> 32); }
constexpr uint32_t low_of(uint64_t field) { return static_cast<uint32_t>(field); }

// EventWatch: sees each event and each name of a ring, and decides whether the engine may take its next step.
//
// The ring calls saw() and named() on the thread that records the event, under that thread's locks. They must not block
// or take a lock. All methods: any thread.
class EventWatch {
 public:
  virtual void saw(const Event& event) noexcept = 0;
  virtual void named(uint32_t request, std::string_view name) noexcept = 0;
  virtual bool may_step() noexcept = 0;
  // Return whether the engine may do what `about` describes. False: it is held; leave it undone and ask again.
  virtual bool may_go(const Event& about) noexcept = 0;
  // Return whether something is held or may be held; if not, may_go() need not be asked.
  virtual bool holds() const noexcept = 0;
  virtual void operation_begins() noexcept = 0;
  virtual void operation_ended() noexcept = 0;

 protected:
  ~EventWatch() = default;
};

class EventPort {
 public:
  EventPort() = default;  // records nothing
  // `ring` and `clock` must outlive every copy of the port. `blocks`: also record each state of each block.
  EventPort(EventRing& ring, const Clock& clock, bool blocks = false) : ring_(&ring), clock_(&clock), blocks_(blocks) {}

  bool on() const noexcept { return ring_ != nullptr; }
  bool blocks() const noexcept { return blocks_; }
  // Record an event. Return its sequence; 0: the port has no ring, or the event was lost.
  uint64_t record(const Event& event) const noexcept { return ring_ == nullptr ? 0 : record_now(event); }
  // Record a text; all but its first 8 KiB is cut off.
  void text(TextKind kind, uint32_t request, uint64_t transfer, std::string_view words) const noexcept;
  // Return the time in nanoseconds, to measure a duration for an event; 0 without a ring.
  int64_t now() const noexcept { return ring_ == nullptr ? 0 : clock_->now().count(); }
  // Return the sequence of the last event that any port of the ring has recorded; 0: none.
  uint64_t last_sequence() const noexcept;
  // Return whether at least half of the ring's capacity was recorded since last_sequence() returned `since`. A
  // component with a lasting state then records that state again, before it is overwritten.
  bool half_gone(uint64_t since) const noexcept;

  // Return whether the engine may take a step. Call it before each step, without a lock; it returns at once. False: a
  // user inspects the engine as it stands; leave the step undone and ask again.
  bool may_step() const noexcept;
  // holds(): return whether may_go() needs to be asked. may_go(): return whether one request may be admitted or one
  // transfer committed; `about` is the event that would be recorded for it.
  bool holds() const noexcept;
  bool may_go(const Event& about) const noexcept;
  // Call these around a sleep, a wake or a checkpoint. Nothing can hold the engine in between, and a hold from before
  // is released.
  void operation_begins() const noexcept;
  void operation_ended() const noexcept;

 private:
  uint64_t record_now(const Event& event) const noexcept;
  EventRing* ring_ = nullptr;
  const Clock* clock_ = nullptr;
  bool blocks_ = false;
};

}  // namespace torpor
