// SPDX-License-Identifier: Apache-2.0
// Deterministic simulation: one number fixes an engine's shape, its requests, and everything that happens to it: steps,
// offload steps, cancellations, aborts, faults of the device and of the disk, sleeps to host and to disk, wakes in the
// same and in a new engine. Each token is compared with that of a twin to which none of this happens.
//
// Two kinds of seeds. In exact ones only sleeps happen, and whole steps are compared, unseeded sampling included. In
// the others tiers, faults and budgets change which tokens are computed when, so unseeded requests, which share one
// generator, are left out, and each request's stream is compared for itself.
//
// In all of them the engine is stopped at breakpoints and let go again, which changes no token; where steps are not
// compared, single requests and candidates are held, too. Only what is recorded to be replayed has no stops.
//
// Everything runs in one order, so a seed replays exactly: half of the engines move bytes on the thread of the
// simulation, and in the others the transfer engine has one thread a lane, for which the simulation waits.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "console/breakpoints.h"
#include "console/replay.h"
#include "console/source_events.h"

namespace torpor::test {

struct SimulationResult {
  std::optional<std::string> failure;  // the first thing that was wrong: step and what
  bool exact = false;
  int tokens = 0;
  int sleeps = 0;         // that happened
  uint64_t reused = 0;    // bytes that they found saved
  int new_engines = 0;    // wakes from a checkpoint in a new engine
  int refused = 0;        // sleeps and wakes that failed under a fault and left everything as it was
  int lost = 0;           // engines lost for a fault that cannot be undone, and woken from a checkpoint or given up
  int checkpoints = 0;    // written while the engine served
  int rewound = 0;        // engines that ended, and were gone on from such a one
  int64_t onboarded = 0;  // tokens whose KV came from below
  int64_t offloaded = 0;  // blocks
  int64_t preemptions = 0;
  int early = 0;                                 // wakes whose engine ran before all blocks were back
  int early_steps = 0;                           // that gave tokens meanwhile
  int64_t late = 0;                              // blocks that came behind it
  int64_t deferred_lost = 0;                     // under a fault
  std::array<int, console::kStopEdges> stops{};  // that began, and how they ended
  std::array<int, 5> regions{};                  // runs with 1 to 5 regions a tag
  std::array<int, 3> tags{};                     // runs with 3 to 5 tags

  void add(const SimulationResult& other);  // all numbers
};

// `directory`: an empty one, for checkpoints and the disk tier. `tell`: print each event. `recorded` gets all that its
// engines told, inputs as well; nothing has threads of its own then.
SimulationResult simulate(uint64_t seed, const std::string& directory, bool tell = false,
                          console::SourceEvents* recorded = nullptr);
// The same again from what was recorded of the seed, in an empty directory of the same name.
Result<console::ReplayResult> replay_simulation(uint64_t seed, const console::SourceEvents& recorded,
                                                const std::string& directory);

}  // namespace torpor::test
