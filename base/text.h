// SPDX-License-Identifier: Apache-2.0
// Parts of sentences, and text that a terminal may show. fmt/ranges.h could join too, but it compiles fmt's own output
// of strings into each source.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace torpor {

// Join `parts` with `between`: "a", "b", "c" and ", " give "a, b, c".
std::string joined(std::span<const std::string> parts, std::string_view between);
std::string joined(std::span<const std::string_view> parts, std::string_view between);

// Return `text` with escapes in place of what a terminal or a reader of lines could obey: "\n", "\t", "\x1b" for other
// control characters of ASCII and for bytes that are not UTF-8, "\u009b" for the control characters above ASCII, ends
// of lines and paragraphs, and what changes the direction of text. Clients choose names, and files may have any bytes.
// The result of a result is the same.
std::string harmless(std::string_view text);
bool is_harmless(std::string_view text);  // whether harmless() is the same
// Return `json`, JSON as text, with the same characters as escapes of JSON: its values stay the same. Line feeds stay.
// Bytes that are not UTF-8 become U+FFFD.
std::string harmless_json(std::string_view json);

// Return the beginning of `text`, of at most `bytes` bytes, that ends with a whole character.
std::string_view first_bytes(std::string_view text, size_t bytes);
// Return the columns that a terminal shows `text` in. Colours need none, characters of East Asia two.
size_t columns_of(std::string_view text);
// Return `text` and as many spaces as it lacks to `columns` columns.
std::string padded(std::string_view text, size_t columns);
// Return the beginning of `text` that a terminal of this size shows, without its last line, which stays free. Each line
// ends with what erases the rest of it.
std::string fitted(std::string_view text, size_t lines, size_t columns);

}  // namespace torpor
