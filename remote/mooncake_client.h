// SPDX-License-Identifier: Apache-2.0
// MooncakeClient: the calls of Mooncake's store that torpor needs. Its client exists as a Python extension only, so who
// links Python implements this (bindings/mooncake_client.h).
//
// A call blocks, for seconds where the master or a node is gone. Each answers with one number a key: a length, 0 or 1,
// or one of Mooncake's errors, which are negative.
//
// Threads: all methods from any.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"

namespace torpor::remote {

struct MooncakeValue {
  std::string key;
  std::span<std::byte> bytes{};  // to be sent, or room for what comes
};
using MooncakeAnswers = Result<std::vector<int64_t>>;

class MooncakeClient {
 public:
  virtual ~MooncakeClient() = default;
  // Memory that values lie in from now on, as long as the client lives.
  virtual Status use(std::span<std::byte> memory) = 0;
  virtual MooncakeAnswers put(std::span<const MooncakeValue> values) = 0;
  virtual MooncakeAnswers get(std::span<const MooncakeValue> values) = 0;
  virtual MooncakeAnswers exist(std::span<const MooncakeValue> values) = 0;
  virtual MooncakeAnswers remove(std::span<const MooncakeValue> values, bool force) = 0;  // force: leased ones, too
};
using MooncakeConnect = std::function<Result<std::shared_ptr<MooncakeClient>>()>;

namespace mooncake {
inline constexpr int64_t kNoRoom = -200;
inline constexpr int64_t kTooSmall = -600;
inline constexpr int64_t kNotReady = -703;
inline constexpr int64_t kNotThere = -704;
inline constexpr int64_t kLeased = -706;
inline constexpr int64_t kTransferFailed = -800;
inline constexpr int64_t kNoMaster = -900;
}  // namespace mooncake

}  // namespace torpor::remote
