// SPDX-License-Identifier: Apache-2.0
// ControlServer: the socket through which other processes inspect and stop this one (control.h has the protocol).
//
// It is a Unix socket beside the process's ring, 0600 in a directory that is 0700. A peer must be the same user or
// root, according to the kernel; others are cut off, and an event records that. One thread serves it, without the
// interpreter's lock. The thread sleeps until a peer connects, and polls every few milliseconds only while a peer
// listens or a breakpoint is set. No engine ever waits for it. A peer that does not read is sent nothing more, and
// after 30 seconds it is cut off.
//
// A killed peer is an end of file: its stops end at once. The stops of a peer that only hangs stay until their lease
// ends; the engine itself checks the lease, so it does not depend on this thread.
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
inline constexpr std::string_view kFrontRole = "front";  // role of a server's process, in the head of its ring

class ControlServer {
 public:
  // Start a server. `ring` must have a path and must outlive the server, and so must `clock`. The server watches the
  // ring: destroy it only while nothing records events there. kFailedPrecondition: the ring has no path. System errors:
  // the socket cannot be made.
  static Result<std::unique_ptr<ControlServer>> start(EventRing& ring, const Clock& clock, ControlRole role);
  ~ControlServer();  // ends all stops and removes the socket
  ControlServer(const ControlServer&) = delete;
  ControlServer& operator=(const ControlServer&) = delete;
  const std::string& path() const { return path_; }
  void serve(OffloadAccess* offload);  // this and the next two: see Control
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
  // Connect. `path`: a socket; or a directory, for the newest engine in it, or for a server if `place` is kFront: the
  // one that started the engine with the socket `engine`, or the newest. kNotFound: there is none. kUnavailable: nobody
  // answers.
  static Result<ControlClient> connect(const std::string& path, ControlPlace place = ControlPlace::kAny,
                                       const std::string& engine = {});
  ControlClient(ControlClient&& other) noexcept;
  ControlClient& operator=(ControlClient&&) = delete;
  ~ControlClient();
  Status send(std::string_view line);  // `line`: without its line end
  // Return the next line, without its line end; none: none came within `wait`. kUnavailable: the connection has ended.
  Result<std::optional<std::string>> receive(std::chrono::milliseconds wait);
  const std::string& path() const { return path_; }

 private:
  ControlClient(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_;
  std::string path_;
  std::string input_;
};

}  // namespace torpor::console
