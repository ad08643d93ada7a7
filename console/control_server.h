// SPDX-License-Identifier: Apache-2.0
// ControlServer: a process's socket, for who looks at it and stops it (control.h has what is said there).
//
// A Unix socket beside the process's ring, 0600 in a directory that is 0700. Who connects must be of the same user, or
// root, by the kernel's word; others are cut off, and that is told. One thread, without the interpreter's lock; it
// sleeps until somebody connects, and looks every few milliseconds only while somebody listens or a breakpoint is set.
// No engine ever waits for it: a peer that does not read is sent nothing more, and after a while it is cut off.
//
// A peer that is killed is an end of file: what it stopped goes on at once. One that only stands still keeps what it
// stopped until the lease ends; the engine itself looks at that, so it does not hang on this thread.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <thread>

#include "base/event_ring.h"
#include "base/status.h"
#include "console/control.h"

namespace torpor::console {

inline constexpr size_t kMostPeers = 16;
inline constexpr std::string_view kFrontRole = "front";  // of a server's process, in its ring's head

class ControlServer {
 public:
  // `ring` has a path, and outlives it with all that tells events there. kFailedPrecondition: the socket cannot be
  // made.
  static Result<std::unique_ptr<ControlServer>> start(EventRing& ring, const Clock& clock, ControlRole role);
  ~ControlServer();  // stops end, and the socket goes
  ControlServer(const ControlServer&) = delete;
  ControlServer& operator=(const ControlServer&) = delete;
  const std::string& path() const { return path_; }
  void serve(OffloadAccess* offload);  // these as Control has them
  void serve(FrontAccess* front);
  void record_below(std::string directory);

 private:
  class Loop;
  ControlServer(std::string path, std::unique_ptr<Loop> loop);
  const std::string path_;
  const pid_t pid_;
  std::unique_ptr<Loop> loop_;
  std::thread thread_;
};

// A connection to such a socket.
class ControlClient {
 public:
  // `path`: a socket, or a directory, of which the newest engine's is taken, or the newest server's. kNotFound;
  // kUnavailable: nobody answers.
  static Result<ControlClient> connect(const std::string& path, ControlPlace place = ControlPlace::kAny);
  ControlClient(ControlClient&& other) noexcept;
  ControlClient& operator=(ControlClient&&) = delete;
  ~ControlClient();
  Status send(std::string_view line);  // without its end
  // The next line, without its end; no value: none came within `wait`. kUnavailable: the connection has ended.
  Result<std::optional<std::string>> receive(std::chrono::milliseconds wait);
  const std::string& path() const { return path_; }

 private:
  ControlClient(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_;
  std::string path_;
  std::string input_;
};

}  // namespace torpor::console
