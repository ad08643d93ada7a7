// SPDX-License-Identifier: Apache-2.0
// Simulation of servers that wake on other machines. A seed determines clients, servers and what happens to them;
// checkpoints and leases have random ids, so a seed does not replay every call of the store. The servers, on three
// machines, share only an object store. The server that owns it serves, and pushes checkpoints and its response log. It
// is drained, killed (also in the middle of a push), cut off, paused, or started again; another one takes over and
// wakes from what was pushed. Calls of the store fail, with or without effect, or take effect late.
//
// Every token that a server makes is compared with that of an undisturbed reference run. Every client gets each token
// of its answer once and in order. No two servers own at a time. Nothing of a published push is missing on the next
// server.
//
// Owning, pushing, pulling, recording and waking are torpor's own code (remote/, engine/). The rest of a server is
// written here again after bindings/python/torpor/vllm/server/remote.py: it checks before each step that it owns.
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
  std::optional<std::string> failure;  // the first failure
  int requests = 0;                    // answered, each once
  int cycles = 0;                      // servers that ended and were succeeded
  std::array<int, kFates> fates{};
  int64_t tokens = 0;   // delivered to clients
  int pushes = 0;       // published
  int failed = 0;       // pushes that were not published, or whose acknowledgement was lost
  int sent_again = 0;   // requests that no push contained
  int extended = 0;     // requests that continued from tokens behind the checkpoint
  int begun_again = 0;  // requests that were computed anew, from the response log
  int too_late = 0;     // pushes of paused servers that were refused
  int late_calls = 0;   // calls of dead servers that took effect later
  int removed = 0;      // checkpoints, parts and logs that torpor gc removed meanwhile
  int kept_out = 0;     // removals refused because a push was under way, or was killed
  void add(const ElsewhereResult& other);
};

// `directory`: an empty directory.
ElsewhereResult simulate_elsewhere(uint64_t seed, int requests, int cycles, const std::string& directory);

}  // namespace torpor::test
