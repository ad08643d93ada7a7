// SPDX-License-Identifier: Apache-2.0
// SwapChannel: device memory that one engine releases and another acquires in a swap, rank by rank. It is one page of a
// file that the processes of both engines map. Rank r of both engines uses the same device. The engine that wakes never
// acquires more than was released and lent, so both together never have more memory than the larger of them needs.
//
// If each engine has its own process, each process joins as one side. Each side publishes its stage and waits for the
// other's (base/swap_handshake.h). Each side holds a lock on the file; the lock ends with its process, and so the other
// side sees that the process has ended. Heartbeats show that a side is not stopped and does not hang: each page that it
// releases or acquires, and each stage, is one. If a side waits longer than the peer timeout for a heartbeat, it stops
// the swap. Time for which its own process was stopped does not count.
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
  // Open a file. `path` may come from another process. kInvalidArgument: it is not absolute. kFailedPrecondition:
  // others than this user can write to the file or its directory. kCorruption: it is no such file.
  static Result<std::unique_ptr<SwapChannel>> open(const std::string& path);
  ~SwapChannel();

  // Become one side until this object or the process ends. kFailedPrecondition: another engine is this side, or the
  // other side has another number of ranks.
  Status join(Side side, size_t ranks);
  void reach(Stage stage) noexcept;  // publishes the stage of the own side
  // Wait until the other side has reached `stage`. `go_on` is called several times a second; its error ends the wait.
  // kAborted: stop() was called, or the other side cannot reach the stage. (It failed, its process ended, or it never
  // joined and the process that made the file has ended.) kTimeout: this side stopped the swap because no heartbeat
  // came.
  Status wait_for(Stage stage, const std::function<Status()>& go_on = {});
  // For the side that falls asleep: wait until the side that wakes has ended its part, or its process has ended, or no
  // heartbeat came. Return what became of it.
  End wait_for_end() noexcept;
  // For the side that wakes: call this after the other side is done, before the step that cannot be undone. After it
  // stop() does nothing. kAborted: the swap was stopped before.
  Status commit();
  bool other_ended() const noexcept;                    // the other side's process ended before kDone, kFailed or kLost
  bool has_joined(Side side) const noexcept;            // an engine has joined as `side`; it may have left since
  Error stopped() const { return stopped_for(side_); }  // why neither side goes on

  // For the side that falls asleep: announce all bytes that it will release. Call it before the other side calls
  // demand().
  Status supply(size_t rank, uint64_t bytes);
  Status release(size_t rank, uint64_t bytes);  // these bytes are free now. kAborted: stop() was called
  void end() noexcept;                          // nothing more will be released

  // For the side that wakes: announce all bytes that it needs. The channel lends the bytes that the other side does not
  // supply.
  Status demand(size_t rank, uint64_t bytes);
  // Wait until `bytes` bytes are free, and own them. kAborted: stop() was called. kResourceExhausted: end() was called
  // and too few are free.
  Status acquire(size_t rank, uint64_t bytes);
  // Wait until more than `seen` bytes were released. Return false if nothing more will be. kAborted: stop() was called.
  Result<bool> wait_for_more(size_t rank, uint64_t seen);

  uint64_t released(size_t rank) const noexcept;
  // Stop the swap: afterwards no side releases or acquires, and the engine that wakes does not run. Return false if it
  // was stopped before, or if commit() was first.
  bool stop() noexcept;           // in the name of the own side, if it has joined
  bool stop(Side side) noexcept;  // in the name of `side`, joined or not
  // Return the side that stopped the swap, or whose process ended; none: no side did, or stop() named none.
  std::optional<Side> stopped_by() const noexcept;

 private:
  struct Page;
  class PeerTimeout;
  SwapChannel(std::unique_ptr<SharedPage> page, int locks);
  static Status check(size_t rank);
  Error stopped_for(std::optional<Side> side) const;
  Side other() const noexcept;  // the side that is not the own one
  SwapHandshake agreement() const noexcept;
  template <class Step>
  bool step(const Step& next) noexcept;
  bool held(int lock) const noexcept;
  bool ended(Side side) const noexcept;  // the side's process ended before kDone, kFailed or kLost
  // Stop the swap if that side's process has ended. Return whether the swap is stopped.
  bool stopped_or(Side ended_side) noexcept;
  bool stop_by(std::optional<Side> whom, bool for_timeout = false) noexcept;
  void send_heartbeat(Side side) noexcept;
  void announce_change() noexcept;
  void wait(uint32_t seen) const noexcept;  // until a change, but not long: a process that is killed wakes nobody

  const std::unique_ptr<SharedPage> shared_;
  Page& page_;
  const int locks_;  // descriptor; one byte is locked for each side, and one for the process that made the file
  std::optional<Side> side_;
};

}  // namespace torpor
