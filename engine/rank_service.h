// SPDX-License-Identifier: Apache-2.0
// RankService: the rank's end of the controller's orders. It decodes an order, carries it out on the rank's memory, and
// encodes the reply. It has no state: make one where it is needed.
#pragma once

#include "engine/rank_memory.h"

namespace torpor {

class RankService {
 public:
  explicit RankService(RankMemory& memory) : memory_(memory) {}  // `memory` outlives this object

  // Carry out an order and return the reply. Failures, also exceptions, are in the reply; a reply without bytes means
  // that there was no memory to encode one. An order whose failure is for want of memory may have been carried out:
  // send the order that undoes it. Threads: any; one order at a time, others wait.
  Bytes call(const Bytes& order);

 private:
  template <class Order>
  Result<Bytes> answer(const Order& order) TORPOR_REQUIRES(memory_.mutex());
  RankMemory& memory_;
};

}  // namespace torpor
