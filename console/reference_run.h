// SPDX-License-Identifier: Apache-2.0
// ReferenceRun: a reference engine with its controller whose inputs are told as events, before each is carried out: the
// engine's options, requests, aborts, steps, sleeps and wakes. Nothing else decides what it does, so its recording can
// be replayed event by event (console/replay.h). Time is an input, too: it stands still while one is carried out.
//
// An input is an event of type kInput, and behind it its words: JSON, as texts of kind kInput. They hold the tokens of
// prompts: this is an engine for tests, tours and bug reports, not one that serves.
//
// Threads: one. With threads of its own for transfers the run works as well, but cannot be replayed exactly.
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

// Stands still until it is set, by one thread; what is done in the background may ask meanwhile.
class RunClock final : public Clock {
 public:
  std::chrono::nanoseconds now() const override { return now_; }
  double unix_seconds() const override { return 0; }
  void set(std::chrono::nanoseconds now) { now_ = now; }

 private:
  std::atomic<std::chrono::nanoseconds> now_ = std::chrono::nanoseconds(1);
};

// What a recording does not say.
struct RunHost {
  FileSystem& files;
  std::string directory;  // for checkpoints and the disk tier
  std::function<Result<std::vector<std::unique_ptr<DeviceMemory>>>(int ranks)> devices;  // null: host memory
  std::function<void(uint64_t a, uint64_t b)> other = {};  // inputs of the host's own, as a fault of its device
};

struct RunOptions {
  reference::ReferenceOptions engine;  // but the directory of its disk tier: that is the host's
  int ranks = 1;
  std::optional<uint64_t> kv_budget_bytes;
};

class ReferenceRun {
 public:
  // Ring and clock outlive it. The ring is its alone.
  ReferenceRun(RunHost host, EventRing& ring, RunClock& clock);

  Status begin(const RunOptions& options);  // in place of the engine before, if there was one
  Status add(const reference::ReferenceRequest& request, int32_t samples = 1);
  bool abort(const std::string& id);
  std::vector<reference::ReferenceOutput> step();
  bool step_offload();
  void cancel(size_t offload);  // of engine().offloads()
  Result<SleepReport> sleep(const SleepOptions& options);
  Result<SleepReport> wake(const WakeOptions& options);
  Result<WakeProgress> continue_wake(DeferredWait wait);
  // Of one that is written while the engine serves: the calls of SleepController. continue_checkpoint() goes on until
  // it is ready or has ended: what threads do meanwhile is no input.
  Status begin_checkpoint();
  Result<CheckpointStage> continue_checkpoint();
  Status take_checkpoint();
  Result<SleepReport> end_checkpoint();
  void cancel_checkpoint();
  void load_weights(uint64_t seed);
  void other(uint64_t a, uint64_t b);

  // As one of the calls above, by what it told. kCorruption: it makes no sense.
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
  const EventPort port_;
  std::unique_ptr<reference::ReferenceEngine> engine_;
  std::unique_ptr<SleepController> controller_;
  // Of the last input.
  std::vector<reference::ReferenceOutput> outputs_;
  bool happened_ = false;
  std::optional<Result<SleepReport>> report_;
  Result<WakeProgress> progress_ = WakeProgress{};
  Status checkpoint_status_;
  CheckpointStage stage_ = CheckpointStage::kNone;
};

}  // namespace torpor::console
