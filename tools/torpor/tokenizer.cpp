// SPDX-License-Identifier: Apache-2.0
#include "tools/torpor/tokenizer.h"

#include <array>
#include <fstream>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

namespace torpor::cli {
namespace {

// GPT-2's bytes_to_unicode (openai/gpt-2, src/encoder.py): printable bytes stand for themselves, the others for
// characters from U+0100 on, in order. Here the reverse: character -> byte.
std::unordered_map<char32_t, char> byte_characters() {
  std::unordered_map<char32_t, char> map;
  char32_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
    map.emplace(printable ? static_cast<char32_t>(byte) : next++, static_cast<char>(byte));
  }
  return map;
}

// The next character of UTF-8 text; broken text gives its bytes.
char32_t take_character(std::string_view& text) {
  const auto first = static_cast<unsigned char>(text[0]);
  const size_t length = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  char32_t character = length == 1 ? first : first & (0xff >> (length + 1));
  for (size_t i = 1; i < length && i < text.size(); ++i)
    character = character << 6 | (static_cast<unsigned char>(text[i]) & 0x3f);
  text.remove_prefix(std::min(length, text.size()));
  return character;
}

std::string from_byte_level(std::string_view piece) {
  static const std::unordered_map<char32_t, char> bytes = byte_characters();
  std::string out;
  while (!piece.empty()) {
    const std::string_view before = piece;
    const auto found = bytes.find(take_character(piece));
    if (found != bytes.end()) {
      out += found->second;
    } else {
      out += before.substr(0, before.size() - piece.size());
    }
  }
  return out;
}

// "<0x0A>" is a byte, "▁" a space.
std::string from_byte_fallback(std::string_view piece) {
  if (piece.size() == 6 && piece.starts_with("<0x") && piece.back() == '>')
    return {static_cast<char>(std::strtol(std::string(piece.substr(3, 2)).c_str(), nullptr, 16))};
  constexpr std::string_view kSpace = "\xe2\x96\x81";
  std::string out(piece);
  for (size_t at = out.find(kSpace); at != std::string::npos; at = out.find(kSpace, at))
    out.replace(at, kSpace.size(), 1, ' ');
  return out;
}

bool has_decoder(const nlohmann::json& decoder, std::string_view type) {
  if (!decoder.is_object()) return false;
  if (decoder.value("type", "") == type) return true;
  const nlohmann::json inner = decoder.value("decoders", nlohmann::json::array());
  return std::any_of(inner.begin(), inner.end(), [&](const nlohmann::json& each) { return has_decoder(each, type); });
}

}  // namespace

Result<Tokenizer> Tokenizer::read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("cannot open {}", path),
                 .next_step = "give the tokenizer.json of the model"};
  const auto wrong = [&](std::string_view what, Code code = Code::kInvalidArgument) {
    return Error{
        .code = code, .what = fmt::format("{}: {}", path, what), .next_step = "give the tokenizer.json of the model"};
  };
  const nlohmann::json json = nlohmann::json::parse(file, nullptr, false);
  if (!json.is_object() || !json.contains("model") || !json["model"].contains("vocab") ||
      !json["model"]["vocab"].is_object())
    return wrong("it is not a tokenizer.json with a vocabulary of pieces");
  const nlohmann::json decoder = json.value("decoder", nlohmann::json());
  const bool byte_level = has_decoder(decoder, "ByteLevel");
  if (!byte_level && !has_decoder(decoder, "ByteFallback") && !has_decoder(decoder, "Metaspace"))
    return wrong("its decoder is none of ByteLevel, ByteFallback, Metaspace", Code::kUnsupported);
  Tokenizer tokenizer;
  for (const auto& [piece, id] : json["model"]["vocab"].items()) {
    if (!id.is_number_integer()) return wrong("its vocabulary has an id that is not a number");
    tokenizer.pieces_[id.get<int32_t>()] = byte_level ? from_byte_level(piece) : from_byte_fallback(piece);
  }
  for (const nlohmann::json& added : json.value("added_tokens", nlohmann::json::array())) {
    if (added.is_object() && added.contains("id") && added["id"].is_number_integer())
      tokenizer.pieces_[added["id"].get<int32_t>()] = added.value("content", "");
  }
  return tokenizer;
}

std::string Tokenizer::text(std::span<const int32_t> tokens) const {
  std::string out;
  for (const int32_t token : tokens) {
    const auto found = pieces_.find(token);
    out += found != pieces_.end() ? found->second : fmt::format("<{}>", token);
  }
  return out;
}

}  // namespace torpor::cli
