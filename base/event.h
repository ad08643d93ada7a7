// SPDX-License-Identifier: Apache-2.0
// Event: what happened, in 64 bytes; EventPort: what components tell events to. Both are values.
//
// Telling an event waits for nobody, takes no memory and no lock, and is legal under any lock and on any thread
// (base/event_ring.h). A port of no ring tells nothing and costs one comparison. Which event has what in which field
// stands in docs/console.md; numbers of types and of what `from` and `to` say are only ever added.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "base/clock.h"
#include "base/digest.h"

namespace torpor {

class EventRing;

enum class EventType : uint16_t {
  kText = 1,  // a name, or words about something: parts of 32 bytes (EventPort::text)
  kLost,      // made by who reads: so many events are missing here
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
};
inline constexpr int kEventTypes = 23;

// Of a copy, an operation or a phase.
enum class Edge : uint8_t { kNone, kBegin, kEnd, kFailed, kUnproven, kUndone, kLost };
inline constexpr int kEdges = 7;

// Of a request's block, in `to`: its prompt's, or of what it made.
enum class KeyOf : uint8_t { kPrompt, kMade };

// What a text is about, in the lower bits of `from`; `request` or `transfer` says of which.
enum class TextKind : uint8_t { kRequestName, kOperation, kError, kInput, kTag };
inline constexpr int kTextKinds = 5;
inline constexpr uint8_t kLastPart = 0x80;  // of `from`

struct Event {
  uint64_t sequence = 0;  // in its process, from 1, without holes; EventPort::record() sets it
  int64_t time = 0;       // Clock::now(), nanoseconds; EventPort::record() sets it
  EventType type{};
  uint8_t from = 0;
  uint8_t to = 0;
  uint32_t request = 0;   // a number; 0: none
  uint64_t transfer = 0;  // a candidate, a job or an operation
  Digest key;             // of a block; zeros: none
  uint64_t a = 0;
  uint64_t b = 0;
  friend bool operator==(const Event&, const Event&) = default;
};
static_assert(sizeof(Event) == 64);

// More than any clock says. What is read may hold any time: whoever calculates with it takes it as within().
inline constexpr int64_t kMostEventTime = INT64_MAX / 4;
constexpr int64_t within(int64_t time) { return std::clamp<int64_t>(time, 0, kMostEventTime); }

// Two numbers in one field.
constexpr uint64_t both(uint64_t high, uint64_t low) { return high << 32 | (low & UINT32_MAX); }
constexpr uint32_t high_of(uint64_t field) { return static_cast<uint32_t>(field >> 32); }
constexpr uint32_t low_of(uint64_t field) { return static_cast<uint32_t>(field); }

// Hears of every event of a ring and of every name, in the thread and under the locks of who tells it; so it waits for
// nothing and takes no lock. And says whether the engine may take its next step. All methods: any thread.
class EventWatch {
 public:
  virtual void saw(const Event& event) noexcept = 0;
  virtual void named(uint32_t request, std::string_view name) noexcept = 0;
  virtual bool may_step() noexcept = 0;
  // `about` is what would be told. False: it is held; leave it undone and ask again.
  virtual bool may_go(const Event& about) noexcept = 0;
  // Something is held, or may be: else nobody need ask.
  virtual bool holds() const noexcept = 0;
  virtual void operation_begins() noexcept = 0;
  virtual void operation_ended() noexcept = 0;

 protected:
  ~EventWatch() = default;
};

class EventPort {
 public:
  EventPort() = default;  // tells nothing
  // Both outlive everything that has the port. `blocks`: each state of each block, too.
  EventPort(EventRing& ring, const Clock& clock, bool blocks = false) : ring_(&ring), clock_(&clock), blocks_(blocks) {}

  bool on() const noexcept { return ring_ != nullptr; }
  bool blocks() const noexcept { return blocks_; }
  // Its sequence; 0: nobody listens, or it was lost.
  uint64_t record(const Event& event) const noexcept { return ring_ == nullptr ? 0 : record_now(event); }
  // At most 8 KiB of it.
  void text(TextKind kind, uint32_t request, uint64_t transfer, std::string_view words) const noexcept;
  // 0 without a ring: for how long something took, which nobody is told then.
  int64_t now() const noexcept { return ring_ == nullptr ? 0 : clock_->now().count(); }
  // How many events there ever were, of all ports of the ring.
  uint64_t told() const noexcept;
  // Half of what the ring holds has been told since it was `told` so many: who has a state that lasts tells it anew.
  bool half_gone(uint64_t told) const noexcept;

  // For who steps an engine, where no lock is held. False: somebody looks at it as it stands; leave the step undone and
  // ask again. It returns at once.
  bool may_step() const noexcept;
  // The same for one request or transfer, before it is admitted or committed: `about` is what would be told of it.
  // `holds()`: it may be worth asking.
  bool holds() const noexcept;
  bool may_go(const Event& about) const noexcept;
  // Around a sleep, a wake or a checkpoint: nobody stops the engine then, and who stopped it before lets it go.
  void operation_begins() const noexcept;
  void operation_ended() const noexcept;

 private:
  uint64_t record_now(const Event& event) const noexcept;
  EventRing* ring_ = nullptr;
  const Clock* clock_ = nullptr;
  bool blocks_ = false;
};

}  // namespace torpor
