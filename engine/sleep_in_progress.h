// SPDX-License-Identifier: Apache-2.0
// A sleep or checkpoint while it runs: of SleepController alone.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/sleep_controller.h"

namespace torpor {

// What was asked, what was found out, what is under way.
struct SleepController::FallingAsleep {
  FallingAsleep(SleepController& controller, std::string_view name, const SleepOptions& asked, uint64_t part_of = 0)
      : options(asked),
        preserved(asked.preserve_state),
        to_disk(asked.to_disk),
        operation(name, controller.clock_, controller.port_, controller, asked.progress, part_of) {}

  const SleepOptions& options;
  SleepReport report{};
  Described described{};
  std::vector<std::string> tags{};           // that lose their memory
  orders::Save save{};                       // what is copied before
  bool deeper = false;                       // the engine is asleep already, and stays so if this fails
  bool preserved = false;                    // the requests' state is kept; false after it was discarded
  bool to_disk = false;                      // false after that failed
  std::vector<std::string> saved_weights{};  // of each rank, the digest of weights that were copied; or empty
  EngineCheckpoint captured{};
  LiveBlocks live{};
  std::vector<int32_t> late{};
  std::unique_ptr<CheckpointManager> checkpoints{};
  std::optional<PendingCheckpoint> pending{};  // kept to the end: with its lock a commit can be taken back, or older
                                               // ones can go
  bool alone = false;  // part of its memory is with an engine that does not give it back: it cannot be cancelled
  bool checkpoint_stays = false;  // it was committed, and not taken back
  Operation operation;            // last: its undo needs all of the above
};

// Of a swap, for the engine that comes.
struct SleepController::Exchange {
  std::string room;                  // path of the SwapChannel
  std::function<Status()> settle;    // waits until the other engine is asleep
  std::function<Status()> commit{};  // from then on this one may run, and does what cannot be undone
};

// Of a swap that failed: whether the engine that went is asleep, and what becomes of it.
enum class SleepController::Gone : uint8_t {
  kNo,
  kMayReturn,  // the other one does not run
  kStays,      // the other one may run
};

// Of a swap, for the engine that goes: the one that comes, in this process or in another.
struct SleepController::OtherEngine {
  std::function<Status()> admit;  // refuses, before anything is touched
  // Saves, gives, and puts to sleep. After an error the other one has none of the memory any more, or gives no sign.
  std::function<Result<SleepReport>(FallingAsleep&, Gone&)> exchange;
};

// One that waits for end_sleep(), with what it was asked for.
struct SleepController::HeldSleep {
  HeldSleep(SleepController& controller, std::string_view name, const SleepOptions& asked, bool checkpoint)
      : options(asked), only_checkpoint(checkpoint), sleep(controller, name, options) {}

  const SleepOptions options;
  const bool only_checkpoint;
  FallingAsleep sleep;
};

}  // namespace torpor
