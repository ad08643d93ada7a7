// SPDX-License-Identifier: Apache-2.0
// GuardedHooks: calls an engine's hooks and turns their exceptions into errors. It is the one border between the
// controller and code that may throw. Threads: as EngineHooks.
#pragma once

#include "engine/engine_hooks.h"

namespace torpor {

class GuardedHooks final : public EngineHooks {
 public:
  explicit GuardedHooks(EngineHooks& hooks) : hooks_(hooks) {}  // `hooks` outlives this object

  Result<std::vector<std::string>> unsupported() override {
    return guard("unsupported", [&] { return hooks_.unsupported(); });
  }
  Result<int64_t> unfinished_requests() override {
    return guard("unfinished_requests", [&] { return hooks_.unfinished_requests(); });
  }
  Status quiesce(std::optional<double> timeout_seconds) override {
    return guard("quiesce", [&] { return hooks_.quiesce(timeout_seconds); });
  }
  Status resume() override {
    return guard("resume", [&] { return hooks_.resume(); });
  }
  Result<CapturedState> capture() override {
    return guard("capture", [&] { return hooks_.capture(); });
  }
  Result<Moment> capture_moment() override {
    return guard("capture", [&]() -> Result<Moment> {
      TORPOR_ASSIGN_OR_RETURN(Moment moment, hooks_.capture_moment());
      moment.read = [read = std::move(moment.read)] { return guard("capture", read); };
      return moment;
    });
  }
  Result<Fingerprint> fingerprint() override {
    return guard("fingerprint", [&] { return hooks_.fingerprint(); });
  }
  Result<KvContents> kv_contents() override {
    return guard("kv_contents", [&] { return hooks_.kv_contents(); });
  }
  Result<std::vector<int32_t>> host_slots(const std::vector<int32_t>& blocks, bool keep) override {
    return guard("host_slots", [&] { return hooks_.host_slots(blocks, keep); });
  }
  Status release_host_slots() override {
    return guard("release_host_slots", [&] { return hooks_.release_host_slots(); });
  }
  Status drop_requests(const std::string& mode) override {
    return guard("drop_requests", [&] { return hooks_.drop_requests(mode); });
  }
  Status drop_prefix(const std::vector<int32_t>& blocks) override {
    return guard("drop_prefix", [&] { return hooks_.drop_prefix(blocks); });
  }
  Status retire_prefix() override {
    return guard("retire_prefix", [&] { return hooks_.retire_prefix(); });
  }
  Status release_derived() override {
    return guard("release_derived", [&] { return hooks_.release_derived(); });
  }
  Status rebuild_derived() override {
    return guard("rebuild_derived", [&] { return hooks_.rebuild_derived(); });
  }
  Status reconnect(const std::vector<WorkerSnapshot>& workers) override {
    return guard("reconnect", [&] { return hooks_.reconnect(workers); });
  }
  Result<std::vector<FailedRequest>> restore(const EngineCheckpoint& checkpoint) override {
    return guard("restore", [&] { return hooks_.restore(checkpoint); });
  }
  Status forget_restored() override {
    return guard("forget_restored", [&] { return hooks_.forget_restored(); });
  }
  HoldsBack holds_back() override {
    const Result<HoldsBack> held = guard("holds_back", [&]() -> Result<HoldsBack> { return hooks_.holds_back(); });
    return held ? *held : HoldsBack::kNothing;
  }
  Status hold_blocks(const std::vector<int32_t>& blocks) override {
    return guard("hold_blocks", [&] { return hooks_.hold_blocks(blocks); });
  }
  Result<std::vector<std::string>> release_blocks(const ArrivedBlocks& blocks) override {
    return guard("release_blocks", [&] { return hooks_.release_blocks(blocks); });
  }
  Result<std::vector<Bytes>> call_ranks(const Bytes& order) override {
    return guard("call_ranks", [&] { return hooks_.call_ranks(order); });
  }

 private:
  template <class Call>
  static auto guard(const char* hook, const Call& call) -> decltype(call()) {
    bool thrown = true;
    auto result = try_catch([&] {
      auto returned = call();
      thrown = false;
      return returned;
    });
    if (!thrown) return result;
    // Name the hook, if there is memory for it.
    return try_catch([&]() -> decltype(call()) {
      Error error = result.error().within(hook);
      error.origin = Origin::kEngine;
      return error;
    });
  }

  EngineHooks& hooks_;
};

}  // namespace torpor
