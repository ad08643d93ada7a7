// SPDX-License-Identifier: Apache-2.0
// Deterministic simulation. A seed determines an engine's shape, its requests, and everything that happens to it:
// steps, offload steps, cancellations, aborts, faults of the device and of the disk, sleeps to host and to disk, wakes
// in the same engine and in a new one. Each token is compared with that of an undisturbed reference run.
//
// There are two kinds of seeds. In exact ones only sleeps happen, and whole steps are compared, unseeded sampling
// included. In the others, tiers, faults and budgets change which tokens are computed when. So they have no unseeded
// requests, which share one generator, and each request's stream is compared by itself.
//
// In all of them, breakpoints stop the engine and let it continue, which changes no token. If steps are not compared,
// single requests and candidates are held too. Only runs that are recorded for a replay have no stops.
//
// Everything runs in one order, so a seed replays exactly: in half of the engines the simulation's thread moves the
// bytes; in the others the transfer engine has one thread for each lane, and the simulation waits for it.
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
  std::optional<std::string> failure;  // the first failure: its step and what was wrong
  bool exact = false;
  int tokens = 0;
  int sleeps = 0;         // that succeeded
  uint64_t reused = 0;    // bytes that sleeps found saved already
  int new_engines = 0;    // wakes from a checkpoint in a new engine
  int refused = 0;        // sleeps and wakes that failed under a fault and changed nothing
  int lost = 0;           // engines that a fault made unrecoverable: woken from a checkpoint, or given up
  int checkpoints = 0;    // written while the engine served
  int rewound = 0;        // engines that ended and were woken from such a checkpoint
  int64_t onboarded = 0;  // tokens whose KV was loaded from a lower tier
  int64_t offloaded = 0;  // blocks
  int64_t preemptions = 0;
  int early = 0;                                 // post-copy wakes: the engine ran before all blocks were back
  int early_steps = 0;                           // steps that made tokens meanwhile
  int64_t late = 0;                              // deferred blocks
  int64_t deferred_lost = 0;                     // deferred blocks lost under a fault
  std::array<int, console::kStopEdges> stops{};  // that began, and how they ended
  std::array<int, 5> regions{};                  // runs with 1 to 5 regions for each tag
  std::array<int, 3> tags{};                     // runs with 3 to 5 tags

  void add(const SimulationResult& other);  // adds all numbers
};

// Run a seed. `directory`: empty, for checkpoints and the disk tier. `verbose`: print each event. `recorded`: if given,
// gets all events of the engines, inputs included; the engines then have no threads of their own.
SimulationResult simulate(uint64_t seed, const std::string& directory, bool verbose = false,
                          console::SourceEvents* recorded = nullptr);
// Replay a recorded seed, in an empty directory of the same name.
Result<console::ReplayResult> replay_simulation(uint64_t seed, const console::SourceEvents& recorded,
                                                const std::string& directory);

}  // namespace torpor::test
