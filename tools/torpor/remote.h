// SPDX-License-Identifier: Apache-2.0
// ls, gc and rm of a URL: what checkpoints an object store has, and what goes from it.
#pragma once

#include <string>

#include "tools/torpor/verb.h"

namespace torpor::cli {

bool is_url(const std::string& path);
Result<Json> ls_of_store(const Context& context);
std::string show_ls_of_store(const Json& json);
Result<Json> gc_of_store(const Context& context);
std::string show_gc_of_store(const Json& json);
Result<Json> rm_of_store(const Context& context);

// `sessions` of a server's URL: the images and sessions that its GET /v1/sessions lists.
Result<Json> sessions_of_server(const Context& context);
// `switch` of a server's URL, or of the directory that it owns: what its POST /torpor/switch answers.
Result<Json> switch_server(const Context& context);

}  // namespace torpor::cli
