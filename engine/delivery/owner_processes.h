// SPDX-License-Identifier: Apache-2.0
// OwnerRecord and OwnerWatch: the processes that own a server's directory, for a second server on the same machine that
// is to take over from them; and the processes of that second server, for the owner that hands over to it.
//
// The owner is the server that holds the lock of the response log. It writes one page, OWNER, beside the log: its
// processes, its term, and a heartbeat, a number that grows while it serves. OwnerWatch follows that page, and ends
// what is left of the owner. The lock alone decides which server may write: a server that takes over ends the owner
// first, and then asks for the lock like any server.
//
// A standby writes the same page, STANDBY, without the lock: the owner finds it there, and ends it if it does not come
// to an end with what it was handed. Of two standbys the last one to write counts.
//
// Threads: one at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/digest.h"
#include "base/file_system.h"
#include "base/process.h"
#include "base/status.h"

namespace torpor {

enum class RecordRole {
  kOwner,    // file OWNER
  kStandby,  // file STANDBY
};

// The side of the server that is recorded. Precondition of all with kOwner: this process holds the lock of the response
// log in `directory`/answers.
class OwnerRecord {
 public:
  // Record this process, and those of the same program that it has started. `directory`: the owner's. `term`: without a
  // heartbeat for so long, another server may end this one. `address`: URL of this server; empty: none is known.
  // kResourceExhausted: too many processes for the page. kInvalidArgument: the address is longer than 256 bytes.
  static Result<std::unique_ptr<OwnerRecord>> begin(FileSystem& file_system, const std::string& directory,
                                                    std::chrono::nanoseconds term, std::string_view address = {},
                                                    RecordRole role = RecordRole::kOwner);
  // Give a heartbeat: several times a term, from the thread that serves.
  Status beat();

 private:
  explicit OwnerRecord(std::unique_ptr<File> file) : file_(std::move(file)) {}
  std::unique_ptr<File> file_;
  uint64_t beats_ = 0;
};

enum class OwnerState {
  kNone,    // there is no owner, or none that this process can see; `why` says which
  kServes,  // its processes live, and it gives its heartbeat
  kEnded,   // one of its processes has ended
  kSilent,  // it lives, without a heartbeat for a term, or with a process that is stopped for a term
};

struct OwnerLook {
  OwnerState state = OwnerState::kNone;
  int32_t pid = 0;  // of the server; 0: there is none
  std::string why;
  std::string address;  // as the server recorded it; empty: it did not, or it has ended
};

// The side of the other server. "Owner" stands for the one that is watched, whatever its role.
class OwnerWatch {
 public:
  OwnerWatch(FileSystem& file_system, const Clock& clock, std::string directory, RecordRole role = RecordRole::kOwner)
      : file_system_(file_system), clock_(clock), directory_(std::move(directory)), role_(role) {}

  // Return the owner's state: after `patience` if it serves, at once in all other states. An owner that has ended
  // before the first look is kNone; one that recorded itself and ended between two looks is kEnded. Errors: of the file
  // OWNER.
  Result<OwnerLook> wait(std::chrono::nanoseconds patience);
  // End what is left of the owner that was seen, and of what it has started since (SIGKILL); return when all of it is
  // gone. kTimeout: something lives on after `patience`. kUnavailable: another process still writes checkpoints into
  // the directory.
  Status end_owner(std::chrono::nanoseconds patience);

 private:
  Result<OwnerLook> find_owner();
  Status see_heartbeat();
  std::optional<OwnerLook> ended(std::chrono::nanoseconds patience) const;
  std::optional<OwnerLook> silent() const;

  FileSystem& file_system_;
  const Clock& clock_;
  const std::string directory_;
  const RecordRole role_;
  std::string address_;
  std::vector<Process> processes_;  // of the owner; the server is the first. Empty: there is none
  std::optional<Digest> page_;      // the last record that was looked at; zeros: there was none. Nothing: no look yet
  std::chrono::nanoseconds term_{0};
  uint64_t beats_ = 0;
  std::chrono::nanoseconds looked_{0};                               // when the owner was last looked at
  std::chrono::nanoseconds beat_at_{0};                              // when its heartbeat was last seen to grow
  std::vector<std::optional<std::chrono::nanoseconds>> stopped_at_;  // since when each process is stopped
};

}  // namespace torpor
