// SPDX-License-Identifier: Apache-2.0
// An order to one rank and its answer, through the bytes that cross processes.
#pragma once

#include "engine/rank_service.h"

namespace torpor::test {

template <class Order>
Result<typename Order::Reply> call_rank(RankMemory& memory, const Order& order) {
  return decode_reply<Order>(RankService(memory).call(encode_order(order)));
}

}  // namespace torpor::test
