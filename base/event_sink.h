// Who watches an operation: phases with their bytes and seconds. A null sink costs one pointer comparison.
// Called from the thread that does the work, perhaps under a lock of its own; must not call back into the object that
// reports.
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

struct BlockEvent {  // a KV block went from one state to another
  int32_t block = 0;
  std::string_view from;
  std::string_view to;
};

struct OffloadEvent {      // blocks came to a stage of an offload pipeline, or ended
  std::string_view route;  // "device to host", …
  std::string_view stage;  // "enqueued", "waiting", "ready", "committed", or the name of a BlockOutcome
  uint64_t blocks = 0;
};

struct TransferEvent {  // a batch was copied
  std::string_view route;
  uint64_t blocks = 0;
  uint64_t transferred = 0;  // of them
  double seconds = 0;
};

class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void on_phase(const PhaseEvent&) {}
  virtual void on_block(const BlockEvent&) {}
  virtual void on_offload(const OffloadEvent&) {}
  virtual void on_transfer(const TransferEvent&) {}
};

}  // namespace torpor
