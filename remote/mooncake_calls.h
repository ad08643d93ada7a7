// SPDX-License-Identifier: Apache-2.0
// MooncakeCalls: runs calls of a MooncakeClient with a time limit.
//
// A call cannot be interrupted, so it runs on a thread of its own, with memory of its own. If the caller's limit is
// over, it abandons the call; thread and memory are free again when the call ends. While all threads are abandoned, the
// next call fails at once. The first call connects the client; a failed connect is repeated by the next one.
//
// Threads: all methods from any thread.
#pragma once

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "base/page_buffer.h"
#include "remote/byte_stream.h"
#include "remote/mooncake_client.h"

namespace torpor::remote {

class MooncakeCalls {
 public:
  // A call with the client, on one of the threads. It owns everything it uses.
  using Work = std::function<void(MooncakeClient&)>;
  class Desk;

  // `room_bytes`: memory of each thread. `longest_end`: how long the destructor waits for calls.
  MooncakeCalls(MooncakeConnect connect, int threads, uint64_t room_bytes, std::chrono::milliseconds longest_end);
  // Calls that do not end in time are abandoned, with the memory they use.
  ~MooncakeCalls();
  MooncakeCalls(const MooncakeCalls&) = delete;
  MooncakeCalls& operator=(const MooncakeCalls&) = delete;

  // Return a thread with its memory, for the caller until give(), or until run() abandons it. kTimeout: none became
  // free. kUnavailable: all are abandoned. kResourceExhausted: no memory.
  Result<Desk*> take(Deadline until);
  std::span<std::byte> room(Desk& desk) const;
  // Run `work` and wait. kTimeout: the call is abandoned; `desk` is null then, and no longer the caller's. Other errors
  // are those of connecting.
  Status run(Desk*& desk, Work work, Deadline until);
  void give(Desk& desk);

 private:
  struct Shared;
  static void serve(const std::shared_ptr<Shared>& shared, Desk& desk);
  const std::shared_ptr<Shared> shared_;
  const std::chrono::milliseconds longest_end_;
};

}  // namespace torpor::remote
