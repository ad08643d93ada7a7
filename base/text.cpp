// SPDX-License-Identifier: Apache-2.0
#include "base/text.h"

#include <algorithm>
#include <array>

#include <fmt/core.h>

namespace torpor {
namespace {

struct Character {
  char32_t code = 0;
  size_t bytes = 1;
  bool is_utf8 = false;
};

// Return the first character of `text`, which is not empty; or its first byte, if no character of UTF-8 begins there.
Character first_of(std::string_view text) {
  const auto byte = [&](size_t at) { return static_cast<unsigned char>(text[at]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {lead, 1, true};
  const size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {lead, 1, false};
  char32_t code = lead & (0xffU >> (bytes + 1));
  for (size_t at = 1; at < bytes; ++at) {
    if ((byte(at) & 0xc0) != 0x80) return {lead, 1, false};
    code = code << 6 | (byte(at) & 0x3fU);
  }
  const bool too_long = code < (bytes == 3 ? 0x800U : bytes == 4 ? 0x10000U : 0x80U);
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  if (too_long || surrogate || code > 0x10ffff) return {lead, 1, false};
  return {code, bytes, true};
}

bool is_obeyed(char32_t code) {
  const bool is_control = code < 0x20 || (code >= 0x7f && code < 0xa0);
  const bool ends_line = code == 0x2028 || code == 0x2029;
  const bool turns = code == 0x61c || code == 0x200e || code == 0x200f || (code >= 0x202a && code <= 0x202e) ||
                     (code >= 0x2066 && code <= 0x2069);
  return is_control || ends_line || turns;
}

// Return `text` with `escape` of each character that may not stay.
template <class Escape>
std::string escaped(std::string_view text, const Escape& escape) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Character character = first_of(text);
    if (character.is_utf8 && !is_obeyed(character.code)) {
      out += text.substr(0, character.bytes);
    } else {
      out += escape(character);
    }
    text.remove_prefix(character.bytes);
  }
  return out;
}

struct Range {
  char32_t first;
  char32_t last;
};
constexpr std::array kTwoColumns = {
    Range{0x1100, 0x115f},   Range{0x2329, 0x232a},   Range{0x2e80, 0x303e},   Range{0x3040, 0xa4cf},
    Range{0xac00, 0xd7a3},   Range{0xf900, 0xfaff},   Range{0xfe30, 0xfe6f},   Range{0xff00, 0xff60},
    Range{0xffe0, 0xffe6},   Range{0x1f300, 0x1f64f}, Range{0x1f680, 0x1f6ff}, Range{0x1f900, 0x1f9ff},
    Range{0x20000, 0x3fffd},
};
constexpr std::array kNoColumn = {  // they are shown with the character before them
    Range{0x300, 0x36f}, Range{0x200b, 0x200d}, Range{0x20d0, 0x20ff}, Range{0xfe00, 0xfe0f}};

size_t columns_of(char32_t code) {
  const auto has = [code](const Range& range) { return code >= range.first && code <= range.last; };
  return std::ranges::any_of(kNoColumn, has) ? 0 : std::ranges::any_of(kTwoColumns, has) ? 2 : 1;
}

// Return the bytes of the colour ("\x1b[1;31m") at the beginning of `text`; 0: there is none.
size_t colour_bytes(std::string_view text) {
  if (!text.starts_with("\x1b[")) return 0;
  const size_t end = text.find_first_not_of("0123456789;", 2);
  return end != std::string_view::npos && text[end] == 'm' ? end + 1 : 0;
}

struct Extent {
  size_t bytes = 0;
  size_t columns = 0;
};

// Return how much of `text` has room in so many columns.
Extent fitting(std::string_view text, size_t columns) {
  Extent all;
  while (all.bytes < text.size()) {
    const std::string_view rest = text.substr(all.bytes);
    if (const size_t colour = colour_bytes(rest); colour > 0) {
      all.bytes += colour;
      continue;
    }
    const Character character = first_of(rest);
    const size_t needed = columns_of(character.code);
    if (needed > columns - all.columns) break;
    all.columns += needed;
    all.bytes += character.bytes;
  }
  return all;
}

template <class Part>
std::string joined_parts(std::span<const Part> parts, std::string_view between) {
  std::string all;
  for (const Part& part : parts) {
    if (&part != parts.data()) all += between;
    all += part;
  }
  return all;
}

}  // namespace

std::string joined(std::span<const std::string> parts, std::string_view between) {
  return joined_parts(parts, between);
}
std::string joined(std::span<const std::string_view> parts, std::string_view between) {
  return joined_parts(parts, between);
}

bool is_harmless(std::string_view text) {
  while (!text.empty()) {
    const Character character = first_of(text);
    if (!character.is_utf8 || is_obeyed(character.code)) return false;
    text.remove_prefix(character.bytes);
  }
  return true;
}

std::string harmless(std::string_view text) {
  return escaped(text, [](const Character& character) -> std::string {
    if (character.code == '\n') return "\\n";
    if (character.code == '\t') return "\\t";
    const auto code = static_cast<uint32_t>(character.code);
    const bool is_byte = !character.is_utf8 || code < 0x80;
    return is_byte ? fmt::format("\\x{:02x}", code) : fmt::format("\\u{:04x}", code);
  });
}

std::string harmless_json(std::string_view json) {
  return escaped(json, [](const Character& character) -> std::string {
    if (character.code == '\n') return "\n";
    return fmt::format("\\u{:04x}", character.is_utf8 ? static_cast<uint32_t>(character.code) : 0xfffdU);
  });
}

std::string_view first_bytes(std::string_view text, size_t bytes) {
  if (text.size() <= bytes) return text;
  size_t end = 0;
  for (size_t next = 0; next <= bytes; next += first_of(text.substr(next)).bytes) end = next;
  return text.substr(0, end);
}

size_t columns_of(std::string_view text) { return fitting(text, std::string_view::npos).columns; }

std::string padded(std::string_view text, size_t columns) {
  const size_t needed = columns_of(text);
  return std::string(text) + std::string(columns - std::min(columns, needed), ' ');
}

std::string fitted(std::string_view text, size_t lines, size_t columns) {
  std::string out;
  size_t line = 0;
  for (size_t at = 0; at < text.size() && ++line < lines;) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view whole = text.substr(at, end - at);
    const std::string_view shown = whole.substr(0, fitting(whole, columns).bytes);
    out += shown;
    if (shown.size() < whole.size() && shown.find('\x1b') != std::string_view::npos) out += "\x1b[0m";
    out += "\x1b[K\n";
    at = end + 1;
  }
  return out;
}

}  // namespace torpor
