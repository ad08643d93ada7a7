// SPDX-License-Identifier: Apache-2.0
// A small, valid engine state, to copy and to damage: three requests (running, waiting, held), a shared prefix block, a
// cached block without a request, and one worker.
#pragma once

#include "checkpoint/engine_checkpoint.h"

namespace torpor::test {

inline RequestState example_request(std::string id, RequestStatus status, int prompt, int output, int computed) {
  RequestState request{
      .id = std::move(id), .arrival_time = 1.5e9, .status = status, .num_computed_tokens = computed, .max_tokens = 100};
  for (int i = 0; i < prompt; ++i) request.prompt_token_ids.push_back(100 + i);
  for (int i = 0; i < output; ++i) request.output_token_ids.push_back(200 + i);
  request.block_hashes = {1, 2, 3, 4};
  request.block_hash_bytes = 2;
  request.sampling.seed = 7;
  request.sampling.stop = {"\n\n"};
  request.engine.data = Dict{{"list", {List{{int64_t{1}}, {std::string("two")}}}}, {"none", {}}};
  return request;
}

// 8 blocks of 4 tokens, null block 0. Blocks 1 and 2 belong to "run", 1 and 3 to "held"; block 4 is only cached.
inline EngineCheckpoint example_checkpoint() {
  EngineCheckpoint checkpoint;
  checkpoint.fingerprint = {{"model", "example"}, {"block_size", "4"}};
  SchedulerSnapshot& scheduler = checkpoint.state.scheduler;
  scheduler.policy = "fcfs";
  scheduler.requests = {example_request("run", RequestStatus::kRunning, 5, 2, 6),
                        example_request("wait", RequestStatus::kWaiting, 3, 0, 0),
                        example_request("held", RequestStatus::kPreempted, 6, 1, 5)};
  scheduler.running = {"run"};
  scheduler.waiting = {"wait"};
  scheduler.held = {"held"};
  scheduler.finished = {"gone"};
  KvSnapshot& kv = checkpoint.state.kv;
  kv.num_blocks = 8;
  kv.groups = {{.block_size = 4, .tables = {{"run", {1, 2}, 1}, {"held", {1, 3}, 1}}}};
  kv.blocks = {{1, 2, {11}, 4}, {2, 1, {}, 0}, {3, 1, {}, 0}, {4, 0, {44}, 4}};
  kv.prefix_index = {{{11}, {1}}, {{44}, {4}}};
  kv.free_order = {5, 6, 7, 4};
  checkpoint.state.workers = {
      {.rank = 0, .rows = {"run"}, .default_generator = {1, 2, 3}, .generators = {{"run", {4, 5}}}}};
  checkpoint.outputs.data = Dict{{"text", {std::string("Once upon a time")}}};
  return checkpoint;
}

// The same with a second KV group, a window of 4 tokens: "run" has block 5 left in it, "held" block 6. Blocks before
// the window are the null block. Keys end with the group's number.
inline EngineCheckpoint example_of_two_groups() {
  EngineCheckpoint checkpoint = example_checkpoint();
  KvSnapshot& kv = checkpoint.state.kv;
  kv.groups.push_back({.block_size = 4, .tables = {{"run", {0, 5}, 1}, {"held", {0, 6}, 1}}});
  kv.blocks.push_back({5, 1, {}, 0});
  kv.blocks.push_back({6, 1, {66, 1}, 4});
  kv.prefix_index.push_back({{66, 1}, {6}});
  kv.free_order = {7, 4};
  return checkpoint;
}

}  // namespace torpor::test
