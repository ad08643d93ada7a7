// ls of a URL: what checkpoints an object store has.
#pragma once

#include <string>

#include "tools/torpor/verb.h"

namespace torpor::cli {

bool is_url(const std::string& path);
Result<Json> ls_of_store(const Context& context);
std::string show_ls_of_store(const Json& json);

}  // namespace torpor::cli
