// SPDX-License-Identifier: Apache-2.0
#include "base/text.h"

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

}  // namespace torpor
