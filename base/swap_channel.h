// SPDX-License-Identifier: Apache-2.0
// SwapChannel: device memory that one engine gives and another takes, rank by rank: a page of a file that the processes
// of both map. Rank r of both is on the same device. What was taken is never more than what was given and lent, so that
// both together never have more than the larger of them.
//
// Where each engine has a process of its own, both take a side. Each says how far it is and waits for the other
// (base/swap_handshake.h). That the other's process has ended is seen by a lock on the file, which goes with the
// process. One that is stopped, or hangs, is seen by its silence: there is no sign of it, which each page and each
// stage is, for a time that who makes the file says. Who waits gives the swap up then. Time for which it was stopped
// itself does not count.
//
// Threads and processes: any. Only take(), wait_for_more(), wait_for() and wait_for_end() wait; who gives never does.
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
  static constexpr Seconds kUsualSilence{60};
  static constexpr Seconds kNoBound{std::numeric_limits<double>::infinity()};
  using Side = SwapHandshake::Side;
  using Stage = SwapHandshake::Stage;
  using End = SwapHandshake::End;

  // The caller removes it. `most_silence`: for which a side waits for a sign of the other; above zero.
  static Result<std::unique_ptr<SwapChannel>> create(const std::string& path, Seconds most_silence = kUsualSilence);
  // The path may come from another process. kInvalidArgument: it is not absolute; kFailedPrecondition: others than this
  // user can write the file or its directory; kCorruption: not such a file.
  static Result<std::unique_ptr<SwapChannel>> open(const std::string& path);
  ~SwapChannel();

  // Takes a side until this object, or the process, ends. kFailedPrecondition: somebody has it, or the other side has
  // another number of ranks.
  Status join(Side side, size_t ranks);
  void say(Stage stage) noexcept;  // of the side that was taken
  // Waits until the other side is so far. kAborted: after stop(), or it cannot come any more: it failed, its process
  // ended, or it never came and the process that made the file has ended. kTimeout: this side has given it up for its
  // silence. `go_on` is asked several times a second.
  Status wait_for(Stage stage, const std::function<Status()>& go_on = {});
  // Who gives: waits until who takes runs, or for what it is instead.
  End wait_for_end() noexcept;
  // Who takes, when the other side is done, before what cannot be undone. Nobody stops it then. kAborted: it was
  // stopped.
  Status commit();
  bool other_ended() const noexcept;                    // the other side's process did, without a word
  bool has_come(Side side) const noexcept;              // somebody took it, who may have left since
  Error stopped() const { return stopped_for(side_); }  // why neither goes on

  // Who gives. What it will have given in the end, before anybody takes.
  Status promise(size_t rank, uint64_t bytes);
  Status give(size_t rank, uint64_t bytes);  // they are free now. kAborted after stop()
  void end() noexcept;                       // nothing more comes

  // Who takes. It needs so much in all: what was not promised of that is lent.
  Status need(size_t rank, uint64_t bytes);
  // Waits until so much is free, which is its own then. kAborted after stop(); kResourceExhausted after end().
  Status take(size_t rank, uint64_t bytes);
  // Waits until more than `seen` was given. False: nothing more comes. kAborted after stop().
  Result<bool> wait_for_more(size_t rank, uint64_t seen);

  uint64_t given(size_t rank) const noexcept;
  // Either: neither gives nor takes from now on, and who takes does not run. False: that was so already, or it is too
  // late.
  bool stop() noexcept;           // by the side that was taken, if one was
  bool stop(Side side) noexcept;  // by that side, taken or not
  // The side that stopped it, or ended without a word; none: nobody did, or no side was taken.
  std::optional<Side> stopped_by() const noexcept;

 private:
  struct Page;
  class Silence;
  SwapChannel(std::unique_ptr<SharedPage> page, int locks);
  static Status check(size_t rank);
  Error stopped_for(std::optional<Side> side) const;
  Side other() const noexcept;  // than the one that was taken
  SwapHandshake agreement() const noexcept;
  template <class Step>
  bool step(const Step& next) noexcept;
  bool held(int lock) const noexcept;
  bool ended(Side side) const noexcept;       // its process did, without a word
  bool stopped_or(Side ended_side) noexcept;  // it was stopped, and is where that side's process ended
  bool stop_by(std::optional<Side> whom, bool for_silence = false) noexcept;
  void sign(Side side) noexcept;
  void tell() noexcept;
  void wait(uint32_t seen) const noexcept;  // for a change, and not for long: nobody tells of a process that ends

  const std::unique_ptr<SharedPage> shared_;
  Page& page_;
  const int locks_;  // a descriptor: one byte for each side, and one for who made the file
  std::optional<Side> side_;
};

}  // namespace torpor
