// SPDX-License-Identifier: Apache-2.0
// Processes of this machine, seen from another process: find them, wait for their end, and end them.
//
// The system may give a process number to another process later. ProcessId has the start time, too, and Process holds a
// file descriptor of the process (pidfd), so neither ever means another process.
//
// Threads: any.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/linux_file.h"
#include "base/status.h"

namespace torpor {

struct ProcessId {
  int32_t pid = 0;
  uint64_t started = 0;  // clock ticks since the machine's start
  friend bool operator==(const ProcessId&, const ProcessId&) = default;
};

// The scope of process numbers: a number of one space means nothing in another space.
struct ProcessSpace {
  std::string boot;            // boot ID of the machine; changes with each start
  uint64_t pid_namespace = 0;  // inode number; differs between containers
  friend bool operator==(const ProcessSpace&, const ProcessSpace&) = default;
};
// kIo: the system does not say (no /proc).
Result<ProcessSpace> this_process_space();

// kNotFound: there is no such process, or it has ended, even if its parent has not waited for it yet.
Result<ProcessId> find_process(int32_t pid);
// Return the processes that `pid` started, and those that these started, and so on.
std::vector<ProcessId> descendants_of(int32_t pid);
// Return whether `ancestor` started this process, or started a process that did, and so on; false: it has ended.
bool is_descendant_of(const ProcessId& process, int32_t ancestor);
// Return the words of the command line, separated by blanks; empty: the process has ended, or is another user's.
std::string command_line(int32_t pid);
// Return the path of the program; empty: the process has ended, or is another user's.
std::string executable_of(int32_t pid);

class Process {
 public:
  // kNotFound: it has ended. kUnsupported: the kernel has no pidfd (before Linux 5.3).
  static Result<Process> open(const ProcessId& id);
  const ProcessId& id() const { return id_; }
  bool ended() const;    // with all its threads; its parent need not have waited for it
  bool stopped() const;  // by SIGSTOP or a debugger
  // Send SIGKILL. It is no error if the process has ended.
  Status kill() const;

 private:
  friend std::optional<size_t> wait_for_end(std::span<const Process> processes, std::chrono::nanoseconds patience);
  Process(const ProcessId& id, Descriptor fd) : id_(id), fd_(std::move(fd)) {}
  ProcessId id_;
  Descriptor fd_;
};

// Wait until one of the processes has ended, and return its index; return nothing after `patience`.
std::optional<size_t> wait_for_end(std::span<const Process> processes, std::chrono::nanoseconds patience);

}  // namespace torpor
