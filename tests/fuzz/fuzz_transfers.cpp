// SPDX-License-Identifier: Apache-2.0
// What crosses between the scheduler and the ranks in a step, with bytes from the fuzzer: what is accepted encodes to
// the same bytes, and every job of it lies within its blocks, keys and outcomes.
#include <cstdlib>

#include "kvcache/transfer_plan.h"

namespace {

using namespace torpor;

void require(bool held) {
  if (!held) std::abort();
}

void try_plan(std::span<const uint8_t> bytes) {
  const Result<TransferPlan> plan = TransferPlan::decode(bytes);
  if (!plan) return;
  size_t blocks = 0;
  size_t keys = 0;
  for (const PlannedJob& job : plan->jobs) {
    require(job.first == blocks && job.count > 0);
    blocks += job.count;
    keys += job.keyed() ? job.count : 0;
  }
  require(blocks == plan->from.size() && blocks == plan->to.size() && keys == plan->keys.size());
  require(plan->encode() == Bytes(bytes.begin(), bytes.end()));
}

void try_report(std::span<const uint8_t> bytes) {
  const Result<TransferReport> report = TransferReport::decode(bytes);
  if (!report) return;
  for (const JobReport& job : report->jobs) require(job.first + job.count <= report->outcomes.size());
  require(report->encode() == Bytes(bytes.begin(), bytes.end()));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try_plan({data, size});
  try_report({data, size});
  return 0;
}
