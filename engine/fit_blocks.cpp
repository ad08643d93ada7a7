// SPDX-License-Identifier: Apache-2.0
#include "engine/fit_blocks.h"

#include <fmt/core.h>

#include "scheduler_state/block_numbers.h"

namespace torpor {

Result<FittedBlocks> fit_blocks(KvSnapshot& kv, const Described& described) {
  FittedBlocks fitted;
  const int32_t here = num_blocks(described);
  const int32_t there = kv.num_blocks;
  if (here == 0 || here == there) return fitted;
  const Result<BlockNumbers> numbers = plan_block_numbers(kv, here);
  if (!numbers) {
    Error error = numbers.error();
    const int32_t fewest = fewest_blocks(kv);
    error.next_step += fmt::format(
        "; of vLLM: --num-gpu-blocks-override {}, --kv-cache-memory-bytes {} or more, or more of "
        "VLLM_CPU_KVCACHE_SPACE or "
        "--gpu-memory-utilization",
        fewest, static_cast<uint64_t>(fewest) * block_bytes(described).most);
    return error;
  }
  renumber(kv, *numbers);
  fitted.dropped = static_cast<int64_t>(numbers->dropped.size());
  if (fitted.dropped > 0) {
    fitted.note = fmt::format("{} cached KV blocks had no room: this engine has {} blocks, the one that slept had {}",
                              fitted.dropped, here, there);
  }
  return fitted;
}

}  // namespace torpor
