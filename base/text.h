// SPDX-License-Identifier: Apache-2.0
// Parts of sentences. What fmt/ranges.h does too, but that compiles fmt's own output of strings into each source.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace torpor {

// "a, b, c" of "a", "b", "c" with ", " between them.
std::string joined(std::span<const std::string> parts, std::string_view between);
std::string joined(std::span<const std::string_view> parts, std::string_view between);

}  // namespace torpor
