// SPDX-License-Identifier: Apache-2.0
// Bytes that the bf16 codec compresses, and bytes that it does not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torpor::test {

// Return bytes whose 16-bit words differ in few bits of their upper bytes.
inline std::vector<std::byte> bf16_values(uint64_t seed, size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) {
    const auto random = static_cast<std::byte>(((i + 1) * (2 * seed + 1) * 2654435761u) >> 11);
    bytes[i] = i % 2 == 1 ? (random & std::byte{0x81}) | std::byte{0x3c} : random;
  }
  return bytes;
}

inline std::vector<std::byte> noise(uint64_t seed, size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(((i + seed + 1) * 0x9e3779b97f4a7c15u) >> 56);
  return bytes;
}

}  // namespace torpor::test
