// SPDX-License-Identifier: Apache-2.0
// hashed_weights(): the bytes of weights that an order to a rank hashed, while the engine waited for it.
#pragma once

#include "engine/rank_orders.h"
#include "engine/tags.h"
#include "tests/support/results.h"

namespace torpor::test {

// Return that number, by the rank's reply to the order.
inline uint64_t hashed_weights(const Bytes& order, const Bytes& reply, uint64_t weight_bytes) {
  const RankOrder decoded = value_of(decode_order(order));
  if (std::holds_alternative<orders::DigestTags>(decoded)) {
    const auto digested = decode_reply<orders::DigestTags>(reply);
    return digested ? digested->bytes : 0;
  }
  const auto* save = std::get_if<orders::Save>(&decoded);
  if (save == nullptr) return 0;
  const auto saved = decode_reply<orders::Save>(reply);
  if (save->stage == orders::Save::Stage::kStopAndCopy) return saved ? saved->digested_bytes : 0;
  if (!has_tag(save->tags, kWeightsTag)) return 0;
  return saved && saved->bytes >= weight_bytes ? weight_bytes : 0;
}

}  // namespace torpor::test
