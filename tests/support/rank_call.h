// SPDX-License-Identifier: Apache-2.0
// call_rank(): sends an order to one rank and returns its reply, encoded as between processes.
#pragma once

#include "engine/rank_service.h"

namespace torpor::test {

template <class Order>
Result<typename Order::Reply> call_rank(RankMemory& memory, const Order& order) {
  return decode_reply<Order>(RankService(memory).call(encode_order(order)));
}

}  // namespace torpor::test
