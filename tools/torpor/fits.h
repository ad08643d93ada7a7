// SPDX-License-Identifier: Apache-2.0
// Whether a checkpoint may be woken into a model, a configuration and this machine, as far as the arguments tell.
#pragma once

#include <string>

#include "checkpoint/checkpoint.h"
#include "tools/torpor/verb.h"

namespace torpor::cli {

void declare_fit(CLI::App& app, Arguments& arguments);  // --model, --like, --field, --memory
bool asks_for_fit(const Arguments& arguments);
// `fewest_blocks`: KV blocks that its requests need; 0: not known before its state is here. Then the wake
// decides.
// {path, fits, checks: [{field, checkpoint, here, fits}], not_known_here: [{field, checkpoint}]}
Result<Json> check_fit(const Arguments& arguments, const Manifest& manifest, const std::string& path,
                       int32_t fewest_blocks = 0);

}  // namespace torpor::cli
