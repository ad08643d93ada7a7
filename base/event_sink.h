// Who watches an operation: phases with their bytes and seconds. A null sink costs one pointer comparison.
// Called from the thread that runs the operation; must not call back into the object that reports.
#pragma once

#include <cstdint>
#include <string_view>

namespace torpor {

struct PhaseEvent {
  std::string_view operation;  // "sleep", "wake"
  std::string_view phase;      // "quiesce", "capture", …
  bool finished = false;       // false: begins now; the two numbers are 0 then
  double seconds = 0;
  uint64_t bytes = 0;
};

class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void on_phase(const PhaseEvent& event) = 0;
};

}  // namespace torpor
