// SPDX-License-Identifier: Apache-2.0
// Compressed bf16 values. The first two bytes are the promised size, the third says what the rest is: what a file may
// hold, which is refused or decodes to that many bytes; or values, which come back as they were.
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "offload/bf16_codec.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torpor;
  if (size < 3) return 0;
  const auto rest = std::as_bytes(std::span(data + 3, size - 3));
  if (data[2] % 2 == 0) {
    std::vector<std::byte> out(data[0] + data[1] * 256u);
    (void)bf16::decompress(rest, out);
    return 0;
  }
  std::vector<std::byte> packed(bf16::compressed_bound(rest.size())), out(rest.size());
  const auto stored = bf16::compress_into(rest, packed);
  if (!stored) return 0;
  if (!bf16::decompress(std::span(packed).first(*stored), out) || !std::ranges::equal(out, rest)) std::abort();
  return 0;
}
