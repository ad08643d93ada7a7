// SPDX-License-Identifier: Apache-2.0
#include "remote/resp_store.h"

#include <fmt/core.h>

namespace torpor::remote {
namespace {

BlockStoreOptions block_options(const RespStoreOptions& options, const RespSettings& settings) {
  return BlockStoreOptions::of(options, settings.name, settings.tls ? "tls" : "tcp");
}

}  // namespace

RespStore::RespStore(const RespStoreOptions& options, const RespSettings& settings,
                     std::shared_ptr<const TlsTrust> trust, const Clock& clock)
    : BlockStore(block_options(options, settings), clock),
      timeout_(options.timeout),
      attempts_(options.attempts),
      nodes_(settings, std::move(trust), clock, options.breaker) {}

Result<std::unique_ptr<RespStore>> RespStore::open(const RespStoreOptions& options, const Clock& clock) {
  return try_catch([&]() -> Result<std::unique_ptr<RespStore>> {
    if (options.timeout.count() < 1 || options.attempts < 1) {
      return Error{
          .code = Code::kInvalidArgument,
          .what = fmt::format("a remote store with {} ms and {} attempts", options.timeout.count(), options.attempts),
          .next_step = "use 1 or more of each"};
    }
    TORPOR_ASSIGN_OR_RETURN(const RespSettings settings, resp_settings(options.url, options.credentials));
    TORPOR_RETURN_IF_ERROR(block_options(options, settings).validate());
    std::shared_ptr<const TlsTrust> trust;
    if (settings.tls) {
      TORPOR_ASSIGN_OR_RETURN(trust, TlsTrust::of(options.authorities));
    }
    return std::unique_ptr<RespStore>(new RespStore(options, settings, std::move(trust), clock));
  });
}

}  // namespace torpor::remote
