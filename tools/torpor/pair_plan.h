// SPDX-License-Identifier: Apache-2.0
// What `torpor pair` does next: when to start which of its two servers. No process, no clock and no file is known here.
//
// One server owns the directory, the other one is its standby. vLLM starts only where the device has the memory that it
// was told to take, so the standby starts first: it sleeps, with that memory released, when the owner starts. Threads:
// one.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace torpor::cli {

// What a server says of itself, or what is known of its process.
enum class ServerState {
  kNone,      // not started yet, or it has ended
  kStarting,  // nothing said so far
  kStandby,   // sleeps, and follows the owner
  kTakingOver,
  kOwns,    // serves, or sleeps as an owner may
  kFailed,  // alive, and serves nothing
  kEnding,
};
std::optional<ServerState> server_state_of(std::string_view word);  // what life.py calls it

struct PairedServer {
  ServerState state = ServerState::kNone;
  bool as_standby = false;  // the last process in this place was started so
  bool owned = false;       // it has been the owner
  double ended_at = -1;     // seconds; -1: none has ended
  int ended_early = 0;      // so many in a row ended before they were of use
};

struct PairStart {
  size_t which = 0;
  bool as_standby = false;
  friend bool operator==(const PairStart&, const PairStart&) = default;
};

// Which server to start now; none: wait. `now`: seconds.
std::optional<PairStart> next_start(const std::array<PairedServer, 2>& servers, double now);

// Whether a server ends after `other`: it owns the directory, or writes the checkpoint of its end.
bool is_owner(const PairedServer& server, const PairedServer& other);

// Whether a server has been the owner and ends, and `other` owns what it had. It has nothing left to save, and `other`
// has no standby before its end.
bool is_left_over(const PairedServer& server, const PairedServer& other);

// Whether a server is to be ended because it has failed and would be there for ever, without use, and keep the other
// one from a new start: a standby, and an owner that has served, whose checkpoint and log a new process goes on with.
// An owner that failed at its start stays: it says why at /torpor/ready.
bool is_to_end(const PairedServer& server);

}  // namespace torpor::cli
