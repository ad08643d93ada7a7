// SPDX-License-Identifier: Apache-2.0
// MooncakeClient: the calls of Mooncake's store that torpor needs. Mooncake's client exists only as a Python extension,
// so code that links Python implements this (bindings/mooncake_client.h).
//
// A call blocks, for seconds if the master or a node is gone. It returns one number for each key: a length, 0 or 1, or
// an error of Mooncake, which is negative.
//
// Threads: all methods from any thread.
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
  std::span<std::byte> bytes{};  // put: to send; get: where the value is written
};
using MooncakeAnswers = Result<std::vector<int64_t>>;

class MooncakeClient {
 public:
  virtual ~MooncakeClient() = default;
  // Register memory in which values lie from now on. It stays valid as long as the client.
  virtual Status use(std::span<std::byte> memory) = 0;
  virtual MooncakeAnswers put(std::span<const MooncakeValue> values) = 0;
  virtual MooncakeAnswers get(std::span<const MooncakeValue> values) = 0;
  virtual MooncakeAnswers exist(std::span<const MooncakeValue> values) = 0;
  virtual MooncakeAnswers remove(std::span<const MooncakeValue> values, bool force) = 0;  // `force`: leased ones too
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
