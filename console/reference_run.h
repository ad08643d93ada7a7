// SPDX-License-Identifier: Apache-2.0
// ReferenceRun: a reference engine with its controller. It records each input as an event before it is carried out: the
// engine's options, requests, aborts, steps, sleeps and wakes. Nothing else influences the engine, so its recording can
// be replayed event by event (console/replay.h). Time is an input, too: the clock is stopped while an input is
// carried out.
//
// An input is an event of type kInput, followed by its words: JSON, as texts of kind kInput. They contain the tokens of
// prompts, so this engine is for tests, tours and bug reports, not for serving.
//
// Threads: one. With threads of its own for transfers the run works, too, but cannot be replayed exactly.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/event_ring.h"
#include "base/file_system.h"
#include "console/input_kind.h"
#include "engine/reference/reference_engine.h"
#include "engine/sleep_controller.h"

namespace torpor::console {

// A clock that keeps its time until one thread sets it; background threads may read it meanwhile.
class RunClock final : public Clock {
 public:
  std::chrono::nanoseconds now() const override { return now_; }
  double unix_seconds() const override { return 0; }
  void set(std::chrono::nanoseconds now) { now_ = now; }

 private:
  std::atomic<std::chrono::nanoseconds> now_ = std::chrono::nanoseconds(1);
};

// The parts of a run that a recording does not contain.
struct RunHost {
  FileSystem& files;
  std::string directory;  // for checkpoints and the disk tier
  std::function<Result<std::vector<std::unique_ptr<DeviceMemory>>>(int ranks)> devices;  // null: host memory
  std::function<void(uint64_t a, uint64_t b)> other = {};  // inputs of the host's own, such as a fault of its device
};

struct RunOptions {
  reference::ReferenceOptions engine;  // without the directory of its disk tier: the host chooses that
  int ranks = 1;
  std::optional<uint64_t> kv_budget_bytes;
  bool blocks = false;  // record each state of each block, too
};

class ReferenceRun {
 public:
  // `ring` and `clock` must outlive this object. Nothing else may record in the ring.
  ReferenceRun(RunHost host, EventRing& ring, RunClock& clock);

  Status begin(const RunOptions& options);  // replaces the previous engine, if there was one
  Status add(const reference::ReferenceRequest& request, int32_t samples = 1);
  bool abort(const std::string& id);
  std::vector<reference::ReferenceOutput> step();
  bool step_offload();
  void cancel(size_t offload);  // index in engine().offloads()
  Result<SleepReport> sleep(const SleepOptions& options);
  Result<SleepReport> wake(const WakeOptions& options);
  Result<WakeProgress> continue_wake(DeferredWait wait);
  // A background checkpoint: the same calls as in SleepController. continue_checkpoint() continues until the checkpoint
  // is ready or has ended, because what threads do meanwhile is no input.
  Status begin_checkpoint();
  Result<CheckpointStage> continue_checkpoint();
  Status take_checkpoint();
  Result<SleepReport> end_checkpoint();
  void cancel_checkpoint();
  void load_weights(uint64_t seed);
  void other(uint64_t a, uint64_t b);

  // Make one of the calls above from its recorded words. kCorruption: they make no sense.
  Status give(InputKind kind, const nlohmann::json& words, uint64_t a = 0, uint64_t b = 0);

  reference::ReferenceEngine& engine() { return *engine_; }
  SleepController& controller() { return *controller_; }

 private:
  enum CheckpointCall : uint64_t { kBegin, kContinue, kTake, kEnd, kCancel };
  Status checkpoint(uint64_t call);
  Status carry_out(InputKind kind, const nlohmann::json& words, uint64_t a, uint64_t b);
  Status build(const nlohmann::json& words);

  const RunHost host_;
  RunClock& clock_;
  EventRing& ring_;
  const EventPort port_;  // of the inputs
  std::unique_ptr<reference::ReferenceEngine> engine_;
  std::unique_ptr<SleepController> controller_;
  // Results of the last input.
  std::vector<reference::ReferenceOutput> outputs_;
  bool happened_ = false;
  std::optional<Result<SleepReport>> report_;
  Result<WakeProgress> progress_ = WakeProgress{};
  Status checkpoint_status_;
  CheckpointStage stage_ = CheckpointStage::kNone;
};

}  // namespace torpor::console
