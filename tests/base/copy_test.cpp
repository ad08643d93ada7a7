// SPDX-License-Identifier: Apache-2.0
#include "base/copy.h"

#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace torpor {
namespace {

// Sizes around every threshold, at every alignment within a line.
TEST(Copy, EveryByteArrivesAndNoneBesideAndTheDigestIsThatOfTheBytes) {
  std::mt19937 random(1);
  std::vector<std::byte> source(600'000);
  for (std::byte& byte : source) byte = static_cast<std::byte>(random());
  for (const size_t size : {0, 1, 63, 64, 65, 1000, 4095, 4096, 4097, 12'288, 262'143, 262'144, 500'001}) {
    for (const size_t from : {0, 1, 33}) {
      for (const size_t to : {0, 1, 48, 63}) {
        const std::span<const std::byte> bytes = std::span(source).subspan(from, size);
        for (const uint64_t batch : {uint64_t{0}, uint64_t{1} << 20}) {  // through the cache, and past it
          for (const bool digested : {false, true}) {
            std::vector<std::byte> target(size + 200, std::byte{0xee});
            const std::span<std::byte> place = std::span(target).subspan(to, size);
            if (digested) {
              StreamingDigest digest;
              BulkCopy(size + batch).copy(place, bytes, digest);
              EXPECT_EQ(digest.finish(), digest_of(bytes));
            } else {
              BulkCopy(size + batch).copy(place, bytes);
            }
            ASSERT_TRUE(std::equal(bytes.begin(), bytes.end(), place.begin()))
                << size << " from " << from << " to " << to;
            ASSERT_TRUE(std::all_of(target.begin(), target.begin() + static_cast<std::ptrdiff_t>(to),
                                    [](std::byte b) { return b == std::byte{0xee}; }));
            ASSERT_TRUE(std::all_of(target.begin() + static_cast<std::ptrdiff_t>(to + size), target.end(),
                                    [](std::byte b) { return b == std::byte{0xee}; }));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace torpor
