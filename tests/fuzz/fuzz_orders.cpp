// SPDX-License-Identifier: Apache-2.0
// What crosses between the controller and a rank, with bytes from the fuzzer: the first says whether the rest is an
// order, or the answer to which.
#include <algorithm>
#include <cstdlib>

#include "engine/rank_orders.h"

namespace {

using namespace torpor;

void require(bool held) {
  if (!held) std::abort();
}

template <class Order>
std::string_view name_of(const Order& order) {
  if constexpr (std::is_same_v<Order, orders::Save>) return order.kStages[static_cast<size_t>(order.stage)];
  if constexpr (std::is_same_v<Order, orders::Undo>) return order.kWhats[static_cast<size_t>(order.what)];
  return order.kName;
}

void try_order(const Bytes& bytes) {
  const Result<RankOrder> order = decode_order(bytes);
  if (!order) return;
  require(std::visit([](const auto& one) { return encode_order(one); }, *order) == bytes);
  require(std::visit([](const auto& one) { return name_of(one); }, *order) == order_name(bytes));
}

// A map of an answer may come in another order of its keys, or with one of them twice: the second encoding is final.
template <class Order>
void try_answer(const Bytes& bytes) {
  const Result<typename Order::Reply> reply = decode_reply<Order>(bytes);
  if (!reply) return;
  const Bytes encoded = encode_reply<Order>(*reply);
  const Result<typename Order::Reply> again = decode_reply<Order>(encoded);
  require(again && encode_reply<Order>(*again) == encoded);
}

template <size_t... kAlternatives>
void try_answer_to(size_t number, const Bytes& bytes, std::index_sequence<kAlternatives...>) {
  ((number == kAlternatives ? try_answer<std::variant_alternative_t<kAlternatives, RankOrder>>(bytes) : void()), ...);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const Bytes bytes(data + 1, data + size);
  if (data[0] == 0) {
    try_order(bytes);
  } else {
    try_answer_to(data[0] - 1, bytes, std::make_index_sequence<std::variant_size_v<RankOrder>>());
  }
  return 0;
}
