// SPDX-License-Identifier: Apache-2.0
// Simulation of servers that go on elsewhere: a number from which clients, servers and what becomes of them are drawn.
// Checkpoints and leases have random ids, so the same number does not replay every call of the store. Servers on three
// machines have nothing in common but an object store. The one that owns it serves, pushes checkpoints and its log of
// answers, and is drained, killed (in the middle of a push, too), cut off, paused, started again; another one takes
// over and goes on. Calls of the store fail, with and without effect, or take effect late.
//
// Every token that a server makes is compared with that of a run to which nothing happens; every client gets each token
// of its answer once and in order, from servers of which no two own at a time; of what was made known as pushed nothing
// is missing on the server that comes after.
//
// What owns, pushes, pulls, records and wakes is torpor's own (remote/, engine/). What a server does around it is said
// here again, as bindings/python/torpor/vllm/server/remote.py has it: it looks before each step whether it owns.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

namespace torpor::test {

// How a server ends.
enum class Fate : uint8_t { kDrained, kKilled, kKilledInPush, kPausedInPush, kCutOff, kStartedAgain };
inline constexpr size_t kFates = 6;

struct ElsewhereResult {
  std::optional<std::string> failure;  // the first thing that was wrong
  int requests = 0;                    // answered, each once
  int cycles = 0;                      // servers that ended, and were gone on after
  std::array<int, kFates> fates{};
  int64_t tokens = 0;   // given to clients
  int pushes = 0;       // made known
  int failed = 0;       // pushes that were not, or of which the server did not hear
  int sent_again = 0;   // requests that no push had
  int extended = 0;     // requests that went on from tokens behind the checkpoint
  int begun_again = 0;  // requests that were computed anew, from what the log had
  int too_late = 0;     // pushes of paused servers that did not count
  int late_calls = 0;   // of dead servers, which took effect later
  int removed = 0;      // checkpoints, parts and logs that torpor gc removed meanwhile
  int kept_out = 0;     // removals that were refused, for somebody pushed or was killed in it
  void add(const ElsewhereResult& other);
};

// `directory`: an empty one.
ElsewhereResult simulate_elsewhere(uint64_t seed, int requests, int cycles, const std::string& directory);

}  // namespace torpor::test
