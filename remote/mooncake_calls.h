// SPDX-License-Identifier: Apache-2.0
// MooncakeCalls: calls of a MooncakeClient that nobody has to wait for longer than he wants to.
//
// A call cannot be broken off, so it is made by a thread of its own, on memory of its own. Who does not want to wait
// longer leaves it there; the thread is free again when the call is over. While all of them are left, the next one
// fails at once. The client is made by the first call, and once.
//
// Threads: all methods from any.
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
  // What is done with the client, on one of the threads. It owns all it needs.
  using Work = std::function<void(MooncakeClient&)>;
  class Desk;

  MooncakeCalls(MooncakeConnect connect, int threads, uint64_t room_bytes, std::chrono::milliseconds longest_end);
  // Calls that do not end in time are left behind, with what they use.
  ~MooncakeCalls();
  MooncakeCalls(const MooncakeCalls&) = delete;
  MooncakeCalls& operator=(const MooncakeCalls&) = delete;

  // A thread and its memory; lent until give(), or until run() leaves it. kTimeout, kUnavailable, kResourceExhausted.
  Result<Desk*> take(Deadline until);
  std::span<std::byte> room(Desk& desk) const;
  // kTimeout where it is left: `desk` is null then, and not the caller's any more. Else what connecting came to.
  Status run(Desk*& desk, Work work, Deadline until);
  void give(Desk& desk);

 private:
  struct Shared;
  static void serve(const std::shared_ptr<Shared>& shared, Desk& desk);
  const std::shared_ptr<Shared> shared_;
  const std::chrono::milliseconds longest_end_;
};

}  // namespace torpor::remote
