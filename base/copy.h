// SPDX-License-Identifier: Apache-2.0
// Copies of much memory, past the cache: with ordinary stores the machine reads every line of the target before it
// writes it. Measured on AVX2 and AVX-512 machines: streaming stores copy pieces of 12 KiB as fast as megabytes, as
// long as nobody waits for them after each piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/digest.h"

namespace torpor {

// Copies of one batch, in pieces of any size. Equal sizes each, no overlap.
// Other threads see the bytes once it is gone.
class BulkCopy {
 public:
  explicit BulkCopy(uint64_t bytes) : past_cache_(bytes >= kWorthIt) {}  // of all copies together
  ~BulkCopy();
  BulkCopy(const BulkCopy&) = delete;
  BulkCopy& operator=(const BulkCopy&) = delete;
  void copy(std::span<std::byte> to, std::span<const std::byte> from);
  // And adds the bytes to `digest` in the same pass: each part is hashed, and is still in the cache when it is copied.
  void copy(std::span<std::byte> to, std::span<const std::byte> from, StreamingDigest& digest);

 private:
  static constexpr uint64_t kWorthIt = 256 * 1024;  // less may well be read from the cache soon
  const bool past_cache_;
};

}  // namespace torpor
