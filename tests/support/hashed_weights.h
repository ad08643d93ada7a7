// SPDX-License-Identifier: Apache-2.0
// What an order to a rank cost that it has to wait for.
#pragma once

#include "engine/rank_orders.h"
#include "engine/tags.h"
#include "tests/support/results.h"

namespace torpor::test {

// Bytes of weights that were read for a digest, by what a rank says of an order.
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
