// SPDX-License-Identifier: Apache-2.0
// A child process that is killed at a chosen call to the file system, and what it said until then.
#pragma once

#include <functional>

#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/faulty_file_system.h"
#include "tests/support/results.h"

namespace torpor::proof {

struct Ending {
  bool killed = false;
  bool failed = false;
};

using Say = std::function<void(char word, char number)>;

// Runs `work` in a child whose file system has `fault` at its n-th call. `hear` gets all that the child said.
inline Ending run_killed(test::Fault fault, uint64_t n, const std::function<Status(FileSystem&, const Say&)>& work,
                         const Say& hear) {
  int channel[2];
  EXPECT_EQ(::pipe(channel), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    test::FaultyFileSystem file_system;
    file_system.plan.set(fault, n);
    const Say say = [&](char word, char number) {
      const char said[2] = {word, number};
      (void)!::write(channel[1], said, 2);
    };
    ::_exit(work(file_system, say) ? 0 : 1);
  }
  ::close(channel[1]);
  char said[2];
  while (::read(channel[0], said, 2) == 2) hear(said[0], said[1]);
  ::close(channel[0]);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  return {.killed = killed, .failed = !killed && !(WIFEXITED(status) && WEXITSTATUS(status) == 0)};
}

}  // namespace torpor::proof
