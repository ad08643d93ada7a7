// SPDX-License-Identifier: Apache-2.0
// Random values of bf16: such as weights have (normal, each row with a scale of its own), and such as KV has (normal,
// each channel with a scale of its own, from a wider range).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "base/units.h"

namespace torpor::bench {

inline void fill_bf16(std::span<std::byte> bytes, double spread, bool by_channel) {
  constexpr size_t kRow = 4096;
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> scales(kRow);
  for (float& scale : scales) scale = std::exp(static_cast<float>(spread) * normal(random)) * 0.02F;
  auto* const words = reinterpret_cast<uint16_t*>(bytes.data());
  for (size_t i = 0; i < bytes.size() / 2; ++i) {
    const float scale = scales[by_channel ? i % kRow : i / kRow % kRow];
    words[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(random) * scale) >> 16);
  }
}
inline void fill_weights(std::span<std::byte> bytes) { fill_bf16(bytes, 0.3, false); }
inline void fill_kv(std::span<std::byte> bytes) { fill_bf16(bytes, 1.0, true); }

// The same again and again, from so many bytes that no cache has them.
inline void fill_large(std::span<std::byte> bytes, void (*fill)(std::span<std::byte>)) {
  const std::span<std::byte> pattern = bytes.first(std::min<size_t>(bytes.size(), 64 * kMiB));
  fill(pattern);
  for (size_t at = pattern.size(); at < bytes.size(); at += pattern.size())
    std::memcpy(bytes.data() + at, pattern.data(), std::min(pattern.size(), bytes.size() - at));
}

}  // namespace torpor::bench
