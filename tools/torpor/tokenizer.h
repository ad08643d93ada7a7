// SPDX-License-Identifier: Apache-2.0
// Tokenizer: tokens back to text, by a tokenizer.json (Hugging Face tokenizers). Decoding only; byte-level BPE (GPT-2,
// Llama 3, Qwen, SmolLM) and BPE with byte fallback (Llama 2, Mistral, Gemma). Others are refused by name.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>

#include "base/status.h"

namespace torpor::cli {

class Tokenizer {
 public:
  // kInvalidArgument: not a tokenizer.json; kUnsupported: a decoder that this does not know.
  static Result<Tokenizer> read_file(const std::string& path);
  // Bytes that are not UTF-8 (a character cut in two) are replaced when printed. Unknown ids become <id>.
  std::string text(std::span<const int32_t> tokens) const;

 private:
  std::unordered_map<int32_t, std::string> pieces_;  // already as bytes
};

}  // namespace torpor::cli
