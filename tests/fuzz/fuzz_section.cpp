// SPDX-License-Identifier: Apache-2.0
// One section of a checkpoint, named by the environment's TORPOR_FUZZ_SECTION, with bytes from the fuzzer and the
// others as they should be: decoded, validated, and, if it was believed, encoded and decoded again to the same.
#include <cstdlib>

#include "checkpoint/engine_checkpoint.h"
#include "checkpoint/state_sections.h"
#include "tests/support/example_state.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torpor;
  static const std::vector<Section> whole = encode(test::example_checkpoint());
  static const char* const wanted = std::getenv("TORPOR_FUZZ_SECTION");
  if (wanted == nullptr) std::abort();
  std::vector<Section> sections = whole;
  const Bytes bytes(data, data + size);
  for (Section& section : sections) {
    if (section.name == wanted) section.bytes = bytes;
  }
  const Result<EngineCheckpoint> decoded = decode(sections);
  if (!decoded) return 0;
  (void)decoded->state.validate();
  const std::vector<Section> again = encode(*decoded);
  const Result<EngineCheckpoint> twice = decode(again);
  if (!twice || encode(*twice) != again) std::abort();  // compared as bytes: a NaN equals nothing
  return 0;
}
