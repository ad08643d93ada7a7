// SPDX-License-Identifier: Apache-2.0
// The man page, the reference and shell completions, made from the same App that reads the command line.
#pragma once

#include <optional>
#include <string>

#include <CLI/CLI.hpp>

#include "tools/torpor/verb.h"

namespace torpor::cli {

std::string man_page(const CLI::App& app);  // troff
// Return the verbs with their arguments, the exit codes, and the exit code of each error. docs/reference is made of it.
Json reference(const CLI::App& app);
std::optional<std::string> completion(const CLI::App& app,
                                      const std::string& shell);  // bash, zsh, fish; no value for others

}  // namespace torpor::cli
