// SPDX-License-Identifier: Apache-2.0
// Mooncake's client. It exists as a Python extension, which torpor/vllm/mooncake.py loads. Threads: any.
#pragma once

#include "remote/mooncake_client.h"
#include "remote/mooncake_settings.h"

namespace torpor {

// Return kUnsupported if Mooncake is not installed. No server is asked.
Status mooncake_is_installed();
// Connect a client. Each of its calls takes the interpreter's lock, which Mooncake releases while it works.
Result<std::shared_ptr<remote::MooncakeClient>> connect_mooncake(const remote::MooncakeSettings& settings);

}  // namespace torpor
