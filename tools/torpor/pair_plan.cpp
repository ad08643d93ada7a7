// SPDX-License-Identifier: Apache-2.0
#include "tools/torpor/pair_plan.h"

#include <algorithm>

namespace torpor::cli {

std::optional<ServerState> server_state_of(std::string_view word) {
  if (word == "starting") return ServerState::kStarting;
  if (word == "standby") return ServerState::kStandby;
  if (word == "taking over") return ServerState::kTakingOver;
  if (word == "awake" || word == "falling asleep" || word == "asleep" || word == "waking" || word == "handing over")
    return ServerState::kOwns;
  if (word == "failed") return ServerState::kFailed;
  if (word == "ending") return ServerState::kEnding;
  return std::nullopt;
}

namespace {

constexpr double kLonelySeconds = 10;  // after the owner's end, for a standby to notice it
constexpr double kLongestPauseSeconds = 30;

double pause_of(int ended_early) {
  return ended_early == 0 ? 0 : std::min(kLongestPauseSeconds, 1.0 * (1 << std::min(ended_early - 1, 5)));
}

}  // namespace

std::optional<PairStart> next_start(const std::array<PairedServer, 2>& servers, double now) {
  for (size_t which = 0; which < servers.size(); ++which) {
    const PairedServer& gone = servers[which];
    if (gone.state != ServerState::kNone) continue;
    const double since = gone.ended_at < 0 ? kLonelySeconds : now - gone.ended_at;
    if (gone.ended_at >= 0 && since < pause_of(gone.ended_early)) continue;
    switch (servers[1 - which].state) {
      case ServerState::kNone:  // both: the standby first
        return PairStart{.which = which, .as_standby = true};
      case ServerState::kStandby:
        // It takes over from an owner that it has seen. From one that ended before, it never will.
        if (gone.owned && since < kLonelySeconds) break;
        return PairStart{.which = which, .as_standby = false};
      case ServerState::kOwns: return PairStart{.which = which, .as_standby = true};
      case ServerState::kStarting:
      case ServerState::kTakingOver:
      case ServerState::kFailed:
      case ServerState::kEnding: break;
    }
  }
  return std::nullopt;
}

bool is_owner(const PairedServer& server, const PairedServer& other) {
  if (server.state == ServerState::kEnding) return server.owned && !is_left_over(server, other);
  return server.state == ServerState::kOwns;
}

bool is_left_over(const PairedServer& server, const PairedServer& other) {
  return server.state == ServerState::kEnding && server.owned && other.state == ServerState::kOwns;
}

bool is_to_end(const PairedServer& server) {
  return server.state == ServerState::kFailed && (server.as_standby || server.owned);
}

}  // namespace torpor::cli
