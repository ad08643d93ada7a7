// SPDX-License-Identifier: Apache-2.0
// The man page and shell completions, made from the same App that reads the command line.
#pragma once

#include <optional>
#include <string>

#include <CLI/CLI.hpp>

namespace torpor::cli {

std::string man_page(const CLI::App& app);  // troff
std::optional<std::string> completion(const CLI::App& app,
                                      const std::string& shell);  // bash, zsh, fish; no value for others

}  // namespace torpor::cli
