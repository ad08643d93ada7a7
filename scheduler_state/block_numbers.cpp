// SPDX-License-Identifier: Apache-2.0
#include "scheduler_state/block_numbers.h"

#include <algorithm>
#include <unordered_set>

#include <fmt/core.h>

namespace torpor {
namespace {

bool has_null_block(const KvSnapshot& kv) { return kv.null_block >= 0; }

Error too_few(const KvSnapshot& saved, int32_t num_blocks) {
  const int32_t fewest = fewest_blocks(saved);
  return Error{.code = Code::kIncompatible,
               .what = fmt::format("its requests hold {} KV blocks, and this engine has {}{}",
                                   fewest - (has_null_block(saved) ? 1 : 0), num_blocks,
                                   has_null_block(saved) ? ", one of which no request can have" : ""),
               .next_step = fmt::format("start the engine with {} KV blocks or more", fewest)};
}

}  // namespace

int32_t fewest_blocks(const KvSnapshot& saved) {
  const auto held =
      std::count_if(saved.blocks.begin(), saved.blocks.end(), [](const KvBlock& block) { return block.ref_count > 0; });
  return static_cast<int32_t>(held) + (has_null_block(saved) ? 1 : 0);
}

Result<BlockNumbers> plan_block_numbers(const KvSnapshot& saved, int32_t num_blocks) {
  const int32_t fewest = fewest_blocks(saved);
  if (num_blocks < fewest || saved.null_block >= num_blocks) return too_few(saved, num_blocks);
  BlockNumbers numbers{.num_blocks = num_blocks, .new_number = {}, .dropped = {}};
  const LiveBlocks live = select_live_blocks(saved, 1, static_cast<uint64_t>(num_blocks - fewest));
  numbers.dropped = live.dropped;
  // Free blocks keep their numbers too, unless a block that is taken over needs one: nothing else records their order.
  numbers.new_number.assign(static_cast<size_t>(saved.num_blocks), -1);
  const int32_t both = std::min(saved.num_blocks, num_blocks);
  for (int32_t id = 0; id < both; ++id) numbers.new_number[static_cast<size_t>(id)] = id;
  for (const int32_t id : live.dropped) numbers.new_number[static_cast<size_t>(id)] = -1;
  std::vector<bool> taken(static_cast<size_t>(num_blocks), false);
  if (has_null_block(saved)) taken[static_cast<size_t>(saved.null_block)] = true;
  for (const int32_t id : live.kept) {
    if (id < num_blocks) taken[static_cast<size_t>(id)] = true;
  }
  int32_t next = 0;
  for (const int32_t id : live.kept) {  // ascending
    if (id < num_blocks) continue;
    while (taken[static_cast<size_t>(next)]) ++next;
    if (next < both) numbers.new_number[static_cast<size_t>(next)] = -1;
    numbers.new_number[static_cast<size_t>(id)] = next;
    ++next;
  }
  return numbers;
}

void renumber(KvSnapshot& snapshot, const BlockNumbers& numbers) {
  drop_hashes(snapshot, numbers.dropped);
  const auto new_number = [&](int32_t id) { return numbers.new_number[static_cast<size_t>(id)]; };
  const auto renumber_all = [&](std::vector<int32_t>& ids) {
    std::transform(ids.begin(), ids.end(), ids.begin(), new_number);
  };
  // Numbers that no block has any more keep their place in the free order.
  std::vector<bool> placed(static_cast<size_t>(numbers.num_blocks), false);
  if (has_null_block(snapshot)) placed[static_cast<size_t>(snapshot.null_block)] = true;
  for (const KvBlock& block : snapshot.blocks) placed[static_cast<size_t>(new_number(block.id))] = true;
  std::unordered_set<int32_t> cached;
  for (const KvBlock& block : snapshot.blocks) {
    if (block.ref_count == 0) cached.insert(block.id);
  }
  std::vector<int32_t> order;
  for (const int32_t id : snapshot.free_order) {
    if (cached.contains(id)) {
      order.push_back(new_number(id));
    } else if (id < numbers.num_blocks && !placed[static_cast<size_t>(id)]) {
      placed[static_cast<size_t>(id)] = true;
      order.push_back(id);
    }
  }
  snapshot.free_order.clear();
  for (int32_t id = 0; id < numbers.num_blocks; ++id) {
    if (!placed[static_cast<size_t>(id)]) snapshot.free_order.push_back(id);
  }
  snapshot.free_order.insert(snapshot.free_order.end(), order.begin(), order.end());

  for (KvGroup& group : snapshot.groups) {
    for (KvTable& table : group.tables) renumber_all(table.blocks);
  }
  for (KvBlock& block : snapshot.blocks) block.id = new_number(block.id);
  std::sort(snapshot.blocks.begin(), snapshot.blocks.end(),
            [](const KvBlock& a, const KvBlock& b) { return a.id < b.id; });
  for (PrefixEntry& entry : snapshot.prefix_index) renumber_all(entry.blocks);
  for (ExtraHashes& extra : snapshot.extra_hashes) extra.block = new_number(extra.block);
  bool same = true;
  for (int32_t id = 0; id < snapshot.num_blocks && same; ++id) same = new_number(id) == id;
  snapshot.num_blocks = numbers.num_blocks;
  snapshot.block_numbers = same ? std::vector<int32_t>() : numbers.new_number;
}

}  // namespace torpor
