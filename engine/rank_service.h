// SPDX-License-Identifier: Apache-2.0
// RankService: the end of the controller's orders on a rank: decodes one, carries it out on the rank's memory, encodes
// the answer. It has no state of its own: make one where it is needed.
#pragma once

#include "engine/rank_memory.h"

namespace torpor {

class RankService {
 public:
  explicit RankService(RankMemory& memory) : memory_(memory) {}  // `memory` outlives it

  // Threads: any, one order at a time, others wait. Failures, exceptions too, are in the answer; no bytes at all: there
  // was not even memory for it. An order that failed may have been carried out all the same, when there was no memory
  // to say so: send the one that undoes it.
  Bytes call(const Bytes& order);

 private:
  template <class Order>
  Result<Bytes> answer(const Order& order) TORPOR_REQUIRES(memory_.mutex());
  RankMemory& memory_;
};

}  // namespace torpor
