// Who watches what is going on: operations by their phases, things that change their state, batches on their way. What
// they are is said by whoever reports. A null sink costs one pointer comparison.
// Called from the thread that does the work, perhaps under a lock of its own; must not call back into the object that
// reports.
#pragma once

#include <cstdint>
#include <string_view>

namespace torpor {

struct PhaseEvent {
  std::string_view operation;
  std::string_view phase;
  bool finished = false;  // false: begins now; the two numbers are 0 then
  double seconds = 0;
  uint64_t bytes = 0;
};

struct StateEvent {  // one thing went from one state to another
  int32_t item = 0;  // its number where it is kept
  std::string_view from;
  std::string_view to;
};

struct StageEvent {  // some came to a stage of their way, or to its end
  std::string_view route;
  std::string_view stage;
  uint64_t items = 0;
};

struct TransferEvent {  // a batch was copied
  std::string_view route;
  uint64_t items = 0;
  uint64_t transferred = 0;  // of them
  double seconds = 0;
};

class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void on_phase(const PhaseEvent&) {}
  virtual void on_state(const StateEvent&) {}
  virtual void on_stage(const StageEvent&) {}
  virtual void on_transfer(const TransferEvent&) {}
};

}  // namespace torpor
