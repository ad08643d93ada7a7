// SPDX-License-Identifier: Apache-2.0
#include "engine/rank_service.h"

#include <type_traits>

#include <fmt/core.h>

namespace torpor {
namespace {

template <class Reply>
void leave_out(const std::set<std::string>& tags, Reply& reply) {
  for (const std::string& tag : tags) {
    reply.ledger.tags.erase(tag);
    if constexpr (std::is_same_v<Reply, orders::Describe::Reply>) {
      reply.writes.erase(tag);
      reply.proven.erase(tag);
      std::erase(reply.without_content, tag);
    }
  }
}

}  // namespace

template <class Order>
Result<Bytes> RankService::answer(const Order& order) {
  TORPOR_ASSIGN_OR_RETURN(typename Order::Reply reply, memory_.steps().carry_out(order));
  constexpr bool ends_a_move = std::is_same_v<Order, orders::Detach> || std::is_same_v<Order, orders::Undo> ||
                               std::is_same_v<Order, orders::Finish>;
  if constexpr (ends_a_move) memory_.free_left();
  if constexpr (requires { reply.ledger; }) {
    memory_.fill(reply.ledger);
    leave_out(memory_.foreign(), reply);
  }
  return encode_reply<Order>(reply);
}

Bytes RankService::call(const Bytes& order) {
  Result<Bytes> answered = try_catch([&]() -> Result<Bytes> {
    TORPOR_RETURN_IF_ERROR(memory_.same_process());
    const MutexLock lock(memory_.mutex());
    TORPOR_ASSIGN_OR_RETURN(const RankOrder decoded, decode_order(order));
    return std::visit([this](const auto& one) TORPOR_REQUIRES(memory_.mutex()) { return answer(one); }, decoded);
  });
  if (answered) return std::move(*answered);
  Result<Bytes> failure = try_catch(
      [&]() -> Result<Bytes> { return encode_error(answered.error().within(fmt::format("rank {}", memory_.rank()))); });
  return failure ? std::move(*failure) : Bytes{};
}

}  // namespace torpor
