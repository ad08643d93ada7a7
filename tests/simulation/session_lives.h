// SPDX-License-Identifier: Apache-2.0
// Simulation of sessions. A seed determines the life of some engines that share a directory of images: their requests
// are hibernated to host memory and to disk, resumed, forked, moved, deleted and aborted, while weights change, files
// are damaged, calls to the file system and orders to ranks fail, and engines are killed at a step of a call. What they
// had in memory is lost then; what was durable is not.
//
// After each call, and after each kill: each request that has not ended has exactly one owner (an engine that runs it,
// an engine that holds its image in memory, or an image on disk); none is lost but with the memory of a killed engine;
// none comes back that has ended; no block, host memory or file is left of what is gone. Each token is given once, in
// order, and is that of a run to which nothing happens. At the end all images are resumed, by whichever engine.
//
// Planted mistakes show that the simulation would find them.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/simulation/session_engine.h"

namespace torpor::test {

enum class SessionVerb : uint8_t {
  kHibernate,  // to host memory or to disk
  kResume,     // an image of this engine
  kOpen,       // an image on disk, of whichever engine
  kTake,       // after kOpen
  kFork,
  kMoveFrom,  // a move, seen by the engine that gives
  kMoveTo,    // a move, seen by the engine that takes
  kDelete,    // of a hibernated request
  kAbort,     // of a running request
  kServe,     // steps, in which resumed requests get their KV
};
inline constexpr size_t kSessionVerbs = 10;
std::string_view name(SessionVerb verb);

struct SessionResult {
  std::optional<std::string> failure;  // the first one
  uint64_t calls = 0;                  // of verbs
  uint64_t tokens = 0;                 // each as expected
  uint64_t requests = 0;
  uint64_t failed = 0;  // calls in which a step failed
  uint64_t kills = 0;
  uint64_t lost = 0;      // requests that ended with the memory of a killed engine
  uint64_t resumed = 0;   // images that came back to their engine
  uint64_t taken = 0;     // images that came to another one
  uint64_t too_late = 0;  // images that another engine had taken before
  uint64_t forked = 0;    // children
  uint64_t damaged = 0;   // images that were refused because they were damaged
  uint64_t swept = 0;     // leftovers of killed engines that were removed
  void add(const SessionResult& other);
};

// Which step of each verb an engine was killed at, over many lives.
class SessionSteps {
 public:
  // Choose a step of the verb for a kill, by preference one at which no engine was killed yet.
  uint64_t choose(SessionVerb verb, uint64_t random) const;
  void note_undisturbed(SessionVerb verb, uint64_t steps);
  void note_killed(SessionVerb verb, uint64_t step);
  uint64_t most(SessionVerb verb) const;    // steps of a call that nothing disturbed, at most
  uint64_t killed(SessionVerb verb) const;  // at how many of these some engine was killed
  // Return the steps at which no engine was killed, of those that at least one of 1,000 such calls reaches.
  std::vector<uint64_t> missed(SessionVerb verb) const;

 private:
  std::array<std::map<uint64_t, uint64_t>, kSessionVerbs> undisturbed_;  // steps -> calls
  std::array<std::map<uint64_t, uint64_t>, kSessionVerbs> killed_;       // step -> kills
};

// `steps`: of the lives before, which also decide where engines are killed: life n replays after lives 0 … n - 1 alone.
// `print`: print each call, and who has which request then.
SessionResult simulate_sessions(uint64_t seed, SessionSteps& steps, Planted planted = Planted::kNone,
                                bool print = false);

}  // namespace torpor::test
