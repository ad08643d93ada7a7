// The inspector's JSON as text for people. Text out of a checkpoint is made harmless first: no control characters.
#pragma once

#include <string>

#include "tools/torpor/inspect.h"

namespace torpor::render {

std::string list(const inspect::Json& json);
std::string info(const inspect::Json& json);
std::string requests(const inspect::Json& json);
std::string verify(const inspect::Json& json);

// `text` with control characters as \xNN: it may have been written to change a terminal.
std::string harmless(const std::string& text);

}  // namespace torpor::render
