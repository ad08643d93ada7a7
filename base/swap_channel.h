// SPDX-License-Identifier: Apache-2.0
// SwapChannel: device memory that goes from one engine to another in a swap, rank by rank. It is one page of a file
// that the processes of both engines map. Rank r of both uses the same device. The engine that wakes never acquires
// more than was released and lent, so both together never have more memory than the larger of them needs.
//
// If each engine has a process of its own, each joins as one side. Each side publishes its stage and waits for the
// other's (base/swap_handshake.h). A side sees by a lock on the file that the process of the other has ended: the lock
// ends with the process. It sees by heartbeats that the other is stopped or hangs: each page and each stage is one. A
// side that waits longer than the peer timeout for a heartbeat stops the swap. Time for which its own process was
// stopped does not count.
//
// Threads and processes: any. Only acquire(), wait_for_more(), wait_for() and wait_for_end() block; release() never
// does.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "base/shared_page.h"
#include "base/status.h"
#include "base/swap_handshake.h"

namespace torpor {

class SwapChannel {
 public:
  static constexpr size_t kMostRanks = 64;
  using Seconds = std::chrono::duration<double>;
  static constexpr Seconds kDefaultPeerTimeout{60};
  static constexpr Seconds kNoBound{std::numeric_limits<double>::infinity()};
  using Side = SwapHandshake::Side;
  using Stage = SwapHandshake::Stage;
  using End = SwapHandshake::End;

  // Make the file; the caller removes it. `peer_timeout`: how long a side waits for a heartbeat of the other; above 0.
  static Result<std::unique_ptr<SwapChannel>> create(const std::string& path,
                                                     Seconds peer_timeout = kDefaultPeerTimeout);
  // The path may come from another process. kInvalidArgument: it is not absolute; kFailedPrecondition: others than this
  // user can write the file or its directory; kCorruption: not such a file.
  static Result<std::unique_ptr<SwapChannel>> open(const std::string& path);
  ~SwapChannel();

  // Be this side until this object, or the process, ends. kFailedPrecondition: another engine is this side, or the
  // other side has another number of ranks.
  Status join(Side side, size_t ranks);
  void reach(Stage stage) noexcept;  // publishes the stage of the own side
  // Wait until the other side has reached `stage`. kAborted: stop() was called, or the other side cannot reach it: it
  // failed, its process ended, or it never joined and the process that made the file has ended. kTimeout: this side
  // stopped the swap for want of a heartbeat. `go_on` is called several times a second; its error ends the wait.
  Status wait_for(Stage stage, const std::function<Status()>& go_on = {});
  // The side that falls asleep: wait until the other engine runs, or until it is clear that it does not.
  End wait_for_end() noexcept;
  // The side that wakes, when the other side is done, before the step that cannot be undone: from here on stop() does
  // nothing. kAborted: the swap was stopped before.
  Status commit();
  bool other_ended() const noexcept;                    // the other side's process has, and did not say so
  bool has_joined(Side side) const noexcept;            // an engine did, which may have left since
  Error stopped() const { return stopped_for(side_); }  // why neither side goes on

  // The side that falls asleep: all bytes that it will release. Call it before the other side demands any.
  Status supply(size_t rank, uint64_t bytes);
  Status release(size_t rank, uint64_t bytes);  // these bytes are free now. kAborted after stop()
  void end() noexcept;                          // nothing more will be released

  // The side that wakes: all bytes that it needs. What the other side does not supply of them is lent.
  Status demand(size_t rank, uint64_t bytes);
  // Wait until so many bytes are free, and own them. kAborted after stop(); kResourceExhausted after end().
  Status acquire(size_t rank, uint64_t bytes);
  // Wait until more than `seen` bytes were released. False: nothing more will be. kAborted after stop().
  Result<bool> wait_for_more(size_t rank, uint64_t seen);

  uint64_t released(size_t rank) const noexcept;
  // Stop the swap: no side releases or acquires any more, and the engine that wakes does not run. False: it was stopped
  // before, or commit() was first.
  bool stop() noexcept;           // in the name of the own side, if it has joined
  bool stop(Side side) noexcept;  // in the name of that side, joined or not
  // Return the side that stopped the swap, or whose process ended; none: no side did, or none was named.
  std::optional<Side> stopped_by() const noexcept;

 private:
  struct Page;
  class PeerTimeout;
  SwapChannel(std::unique_ptr<SharedPage> page, int locks);
  static Status check(size_t rank);
  Error stopped_for(std::optional<Side> side) const;
  Side other() const noexcept;  // than the own one
  SwapHandshake agreement() const noexcept;
  template <class Step>
  bool step(const Step& next) noexcept;
  bool held(int lock) const noexcept;
  bool ended(Side side) const noexcept;       // its process has, and did not say so
  bool stopped_or(Side ended_side) noexcept;  // whether the swap is stopped; stops it if that side's process ended
  bool stop_by(std::optional<Side> whom, bool for_timeout = false) noexcept;
  void send_heartbeat(Side side) noexcept;
  void tell() noexcept;
  void wait(uint32_t seen) const noexcept;  // for a change, and not for long: a process that ends tells nobody

  const std::unique_ptr<SharedPage> shared_;
  Page& page_;
  const int locks_;  // a descriptor: one byte for each side, and one for the process that made the file
  std::optional<Side> side_;
};

}  // namespace torpor
