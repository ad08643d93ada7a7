// SPDX-License-Identifier: Apache-2.0
// Calls that change the content of an engine's stores, and transfers under way.
#include <array>

#include <fmt/core.h>

#include "console/control.h"

namespace torpor::console {
namespace {

using Json = nlohmann::ordered_json;
using nlohmann::json;

Error wrong_call(std::string what, std::string next_step) {
  return {.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next_step)};
}

int digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

// Pad shorter keys with zeros, as the engine does.
Result<BlockKey> key_from(std::string_view hex, uint32_t space) {
  BlockKey key{.space = space};
  bool good = !hex.empty() && hex.size() % 2 == 0 && hex.size() <= 2 * key.hash.size();
  for (size_t i = 0; good && i < hex.size(); i += 2) {
    const int high = digit(hex[i]);
    const int low = digit(hex[i + 1]);
    good = high >= 0 && low >= 0;
    if (good) key.hash[i / 2] = static_cast<uint8_t>(high << 4 | low);
  }
  if (good) return key;
  return wrong_call(fmt::format("\"{}\" is no key of a block", hex), "give up to 64 hex digits, all that the key has");
}

Result<std::vector<BlockKey>> keys_from(const json& params, OffloadAccess& access, uint32_t space) {
  if (params.contains("keys") == params.contains("request"))
    return wrong_call("which blocks?", "give keys, or request");
  if (params.contains("request")) return access.keys_of(params["request"].get<std::string>());
  std::vector<BlockKey> keys;
  const std::string words = params["keys"].get<std::string>();
  for (size_t at = 0; at <= words.size();) {
    const size_t end = std::min(words.find(',', at), words.size());
    TORPOR_ASSIGN_OR_RETURN(keys.emplace_back(), key_from(std::string_view(words).substr(at, end - at), space));
    at = end + 1;
  }
  return keys;
}

Result<Json> carry_out(const ControlMethod& method, const json& params, OffloadAccess& access,
                       OffloadScheduler& offload) {
  if (method.call == ControlCall::kCancelTransfer) {
    if (!params.contains("candidate")) return wrong_call("which one?", "give candidate, as events have it");
    TORPOR_ASSIGN_OR_RETURN(const CancelledCandidate done,
                            offload.cancel(static_cast<uint64_t>(params["candidate"].get<double>())));
    return Json{{"blocks", done.blocks}, {"committed", done.committed}};
  }
  TORPOR_ASSIGN_OR_RETURN(const std::vector<BlockKey> keys, keys_from(params, access, offload.space()));
  if (method.call == ControlCall::kDemoteBlocks) {
    TORPOR_ASSIGN_OR_RETURN(const MovedKeys moved, offload.move_on(keys));
    return Json{{"candidate", moved.candidate}, {"blocks", moved.blocks}};
  }
  const std::string tier = params.value("tier", "");
  if (tier != "host" && tier != "disk") return wrong_call(fmt::format("tier is \"{}\"", tier), "use host or disk");
  const DroppedKeys done = offload.drop(keys, tier == "host" ? StoreId::kHost : StoreId::kDisk);
  return Json{{"dropped", done.dropped}, {"pinned", done.pinned}, {"absent", done.absent}};
}

}  // namespace

void Control::serve(OffloadAccess* offload) {
  const MutexLock lock(offload_mutex_);
  offload_ = offload;
}

Status Control::offloads() const {
  if (offload_ != nullptr) return ok();
  return Error{.code = Code::kUnsupported,
               .what = "this process offloads no blocks",
               .next_step = "start the engine with torpor's KV connector"};
}

Status Control::can_hold(EventType type) {
  if (type != EventType::kCandidate) return ok();
  const MutexLock lock(offload_mutex_);
  return offloads();
}

Result<Json> Control::use_offload(const ControlMethod& method, const json& params) {
  const MutexLock lock(offload_mutex_);
  TORPOR_RETURN_IF_ERROR(offloads());
  Result<Json> result = Json();
  OffloadAccess& access = *offload_;
  TORPOR_RETURN_IF_ERROR(access.use([&](OffloadScheduler& offload) -> Status {
    result = try_catch([&] { return carry_out(method, params, access, offload); });
    return ok();
  }));
  return result;
}

}  // namespace torpor::console
