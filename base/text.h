// SPDX-License-Identifier: Apache-2.0
// Parts of sentences. fmt/ranges.h could join too, but it compiles fmt's own output of strings into each source.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace torpor {

// Join `parts` with `between`: "a", "b", "c" and ", " give "a, b, c".
std::string joined(std::span<const std::string> parts, std::string_view between);
std::string joined(std::span<const std::string_view> parts, std::string_view between);

}  // namespace torpor
