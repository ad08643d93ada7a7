// SPDX-License-Identifier: Apache-2.0
#include "engine/engine_parts.h"

#include <fmt/core.h>

#include "base/log.h"
#include "base/text.h"

namespace torpor {

Status EngineParts::can_preserve(std::string_view otherwise) const {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> unsupported, hooks.unsupported());
  if (unsupported.empty()) return ok();
  return Error{.code = Code::kUnsupported,
               .what = fmt::format("the state of this engine cannot be preserved yet: {}", joined(unsupported, "; ")),
               .next_step = std::string(otherwise)};
}

void EngineParts::release_host_slots() const noexcept {
  (void)try_catch([&]() -> Status {
    if (const Status released = hooks.release_host_slots(); !released) log().error("{}", released.error());
    return ok();
  });
}

}  // namespace torpor
