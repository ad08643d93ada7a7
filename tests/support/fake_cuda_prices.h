// SPDX-License-Identifier: Apache-2.0
// Prices of driver calls in simulated time, for tests that compare sequences of calls. No wall clock is used.
//
// The figures are rounded reports of others. A test may rely on the order of magnitude only.
//
// Owner: FakeCuda. Values.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace torpor::test {

// In nanoseconds, and bytes per nanosecond.
struct FakeCudaPrices {
  // | what                  | price     | source                                                                     |
  // | a call                | 2.3 us    | one cudaMemcpyAsync, H20: FlexKV pull request 193                          |
  // | a piece of a batch    | 1.1 us    | half a call: batches of small blocks 1.9 to 2.4 times: llm-d-kv-cache 607  |
  // | pin, a call           | 5 us      | assumed                                                                    |
  // | pin, bytes            | 8.1 GB/s  | 94 GB in 11.6 s, other calls wait: vLLM pull request 51414                 |
  // | create, a handle      | 193 us    | A100, 2 MiB: kvcached, bench_vmm                                           |
  // | map                   | 1.45 us   | the same                                                                   |
  // | access                | 36 us     | the same                                                                   |
  // | unmap                 | 25.6 us   | the same                                                                   |
  // | link, pinned memory   | 55 GB/s   | H100, PCIe 5 x16: nvbandwidth, thaw                                        |
  // | link, other memory    | 5.3 GB/s  | L20, torch_memory_saver issue 111                                          |
  uint64_t call = 2'300;
  uint64_t piece = 1'100;
  uint64_t pin = 5'000;
  double pin_bytes = 8.1;
  uint64_t create = 193'000;
  uint64_t map = 1'450;
  uint64_t access = 36'000;
  uint64_t unmap = 25'600;
  double link_bytes = 55;
  double pageable_bytes = 5.3;
};

inline constexpr FakeCudaPrices kFakeCudaPrices{};

struct FakeCudaCost {
  uint64_t host = 0;                              // nanoseconds that callers spend in calls, summed over threads
  uint64_t link = 0;                              // nanoseconds of copies, one after another
  uint64_t locked = 0;                            // part of `host` while no other call of the process can run
  uint64_t longest_locked = 0;                    // the longest single one
  std::map<std::string, uint64_t> by_function{};  // parts of `host`
};

}  // namespace torpor::test
