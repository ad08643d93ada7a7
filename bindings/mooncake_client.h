// SPDX-License-Identifier: Apache-2.0
// Mooncake's client, which exists as a Python extension: torpor/vllm/mooncake.py makes it.
#pragma once

#include "remote/mooncake_client.h"
#include "remote/mooncake_settings.h"

namespace torpor {

// kUnsupported: it is not. Asks no server.
Status mooncake_is_installed();
// Takes the interpreter's lock for each call, and Mooncake lets go of it while it works.
Result<std::shared_ptr<remote::MooncakeClient>> connect_mooncake(const remote::MooncakeSettings& settings);

}  // namespace torpor
