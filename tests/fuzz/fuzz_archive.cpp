// SPDX-License-Identifier: Apache-2.0
// The archive alone: a tree of values, and lists of everything that the format knows.
#include <cstdlib>

#include "checkpoint/archived_values.h"

namespace {

template <class T>
void try_one(std::span<const std::byte> bytes) {
  const torpor::Result<T> decoded = torpor::from_bytes<T>(bytes, "input");
  if (!decoded) return;
  const torpor::Bytes again = torpor::to_bytes(*decoded);
  if (!std::ranges::equal(std::as_bytes(std::span(again)), bytes)) std::abort();  // one value has one encoding
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torpor;
  const auto bytes = std::as_bytes(std::span(data, size));
  try_one<Value>(bytes);
  try_one<std::vector<std::string>>(bytes);
  try_one<std::vector<SavedChunk>>(bytes);
  try_one<std::vector<LinkedFile>>(bytes);
  try_one<std::optional<int64_t>>(bytes);
  return 0;
}
