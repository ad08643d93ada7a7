// SPDX-License-Identifier: Apache-2.0
// Answers as they travel, with bytes from the fuzzer: decoded, and a state rolled forward to them, which must stay
// whole.
#include <cstdlib>

#include "engine/delivery/delivery_log_file.h"
#include "engine/delivery/roll_forward.h"
#include "tests/support/example_state.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torpor;
  static const CapturedState example = test::example_checkpoint().state;
  const Result<std::vector<Answer>> answers = unpack_answers(std::as_bytes(std::span(data, size)));
  if (!answers) return 0;
  for (const bool forgotten : {false, true}) {
    CapturedState state = example;
    if (roll_forward(state, *answers, forgotten) && !state.validate()) std::abort();
  }
  return 0;
}
