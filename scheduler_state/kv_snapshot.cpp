// SPDX-License-Identifier: Apache-2.0
#include "scheduler_state/kv_snapshot.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include <fmt/core.h>

namespace torpor {
namespace {

Error contradiction(std::string what) {
  return Error{.code = Code::kCorruption,
               .what = fmt::format("KV bookkeeping: {}", what),
               .next_step = "use another checkpoint"};
}

using BlockMap = std::unordered_map<int32_t, const KvBlock*>;

Status check_blocks(const KvSnapshot& snapshot, BlockMap& by_id) {
  for (const KvBlock& block : snapshot.blocks) {
    if (block.id < 0 || block.id >= snapshot.num_blocks || block.id == snapshot.null_block) {
      return contradiction(fmt::format("block {} is not one of the {} blocks", block.id, snapshot.num_blocks));
    }
    if (!by_id.emplace(block.id, &block).second)
      return contradiction(fmt::format("block {} is listed twice", block.id));
    if (block.ref_count < 0) return contradiction(fmt::format("block {} has {} references", block.id, block.ref_count));
    if (block.ref_count == 0 && block.hash.empty()) {
      return contradiction(fmt::format("block {} is listed, but has neither a reference nor a hash", block.id));
    }
  }
  return ok();
}

Status check_tables(const KvSnapshot& snapshot, const BlockMap& by_id) {
  std::unordered_map<int32_t, int32_t> references;
  for (const KvGroup& group : snapshot.groups) {
    if (group.block_size <= 0) return contradiction(fmt::format("a group's block size is {}", group.block_size));
    std::set<std::string_view> requests;
    for (const KvTable& table : group.tables) {
      if (!requests.insert(table.request).second)
        return contradiction(fmt::format("request {} has two tables in one group", table.request));
      if (table.num_cached_blocks < -1 || table.num_cached_blocks > static_cast<int64_t>(table.blocks.size())) {
        return contradiction(fmt::format("request {} has {} blocks, of which {} are cached", table.request,
                                         table.blocks.size(), table.num_cached_blocks));
      }
      for (const int32_t id : table.blocks) {
        if (id == snapshot.null_block) continue;
        if (!by_id.contains(id))
          return contradiction(fmt::format("request {} uses block {}, which is not listed", table.request, id));
        ++references[id];
      }
    }
  }
  for (const KvBlock& block : snapshot.blocks) {
    const auto found = references.find(block.id);
    const int32_t counted = found == references.end() ? 0 : found->second;
    if (counted != block.ref_count) {
      return contradiction(
          fmt::format("block {} says {} references, tables hold {}", block.id, block.ref_count, counted));
    }
  }
  return ok();
}

using CarriedHash = std::pair<int32_t, std::string_view>;  // a block and one of its hashes

std::string_view view(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

Status check_prefix_index(const KvSnapshot& snapshot, const BlockMap& by_id) {
  std::vector<CarriedHash> carried;
  for (const KvBlock& block : snapshot.blocks) {
    if (!block.hash.empty()) carried.emplace_back(block.id, view(block.hash));
  }
  std::vector<CarriedHash> must_be_indexed = carried;
  for (const ExtraHashes& extra : snapshot.extra_hashes) {
    if (!by_id.contains(extra.block))
      return contradiction(fmt::format("extra hashes of block {}, which is not listed", extra.block));
    for (const Bytes& hash : extra.hashes) carried.emplace_back(extra.block, view(hash));
  }
  std::sort(carried.begin(), carried.end());
  std::vector<CarriedHash> indexed;
  for (const PrefixEntry& entry : snapshot.prefix_index) {
    if (entry.hash.empty() || entry.blocks.empty()) return contradiction("an entry of the prefix index is empty");
    for (const int32_t id : entry.blocks) {
      const CarriedHash key{id, view(entry.hash)};
      if (!std::binary_search(carried.begin(), carried.end(), key)) {
        return contradiction(fmt::format("the prefix index names block {} under a hash that it does not carry", id));
      }
      indexed.push_back(key);
    }
  }
  std::sort(indexed.begin(), indexed.end());
  if (const auto twice = std::adjacent_find(indexed.begin(), indexed.end()); twice != indexed.end()) {
    return contradiction(fmt::format("the prefix index names block {} twice under one hash", twice->first));
  }
  for (const CarriedHash& key : must_be_indexed) {
    if (!std::binary_search(indexed.begin(), indexed.end(), key)) {
      return contradiction(fmt::format("block {} carries a hash that the prefix index does not have", key.first));
    }
  }
  return ok();
}

Status check_free_order(const KvSnapshot& snapshot, const BlockMap& by_id) {
  // Check the count first: `num_blocks` may be any number, and the checks below take memory and time for each block.
  const auto used = std::count_if(snapshot.blocks.begin(), snapshot.blocks.end(),
                                  [](const KvBlock& block) { return block.ref_count > 0; });
  const int64_t expected = snapshot.num_blocks - used - (snapshot.null_block >= 0 ? 1 : 0);
  if (static_cast<int64_t>(snapshot.free_order.size()) != expected) {
    return contradiction(
        fmt::format("{} blocks are in the free order, {} are free", snapshot.free_order.size(), expected));
  }
  std::vector<bool> free(static_cast<size_t>(snapshot.num_blocks), false);
  for (const int32_t id : snapshot.free_order) {
    if (id < 0 || id >= snapshot.num_blocks || id == snapshot.null_block)
      return contradiction(fmt::format("the free order names block {}", id));
    if (free[static_cast<size_t>(id)]) return contradiction(fmt::format("the free order names block {} twice", id));
    free[static_cast<size_t>(id)] = true;
  }
  for (int32_t id = 0; id < snapshot.num_blocks; ++id) {
    if (id == snapshot.null_block) continue;
    const auto found = by_id.find(id);
    const bool referenced = found != by_id.end() && found->second->ref_count > 0;
    if (referenced == free[static_cast<size_t>(id)]) {
      return contradiction(fmt::format(
          "block {} is {}", id, referenced ? "in use and in the free order" : "neither in use nor in the free order"));
    }
  }
  return ok();
}

}  // namespace

void KvSnapshot::complete_free_order() {
  std::vector<bool> known(static_cast<size_t>(std::max(num_blocks, 0)), false);
  const auto know = [&](int32_t id) {
    if (id >= 0 && id < num_blocks) known[static_cast<size_t>(id)] = true;  // validate() reports any other number
  };
  know(null_block);
  for (const KvBlock& block : blocks) {
    if (block.ref_count > 0) know(block.id);
  }
  std::for_each(free_order.begin(), free_order.end(), know);
  std::vector<int32_t> order;
  for (int32_t id = 0; id < num_blocks; ++id) {
    if (!known[static_cast<size_t>(id)]) order.push_back(id);
  }
  order.insert(order.end(), free_order.begin(), free_order.end());
  free_order = std::move(order);
}

Status KvSnapshot::validate() const {
  if (num_blocks <= 0 || null_block < -1 || null_block >= num_blocks) {
    return contradiction(fmt::format("{} blocks, null block {}", num_blocks, null_block));
  }
  BlockMap by_id;
  TORPOR_RETURN_IF_ERROR(check_blocks(*this, by_id));
  TORPOR_RETURN_IF_ERROR(check_tables(*this, by_id));
  TORPOR_RETURN_IF_ERROR(check_prefix_index(*this, by_id));
  return check_free_order(*this, by_id);
}

LiveBlocks select_live_blocks(const KvSnapshot& snapshot, uint64_t bytes_per_block,
                              std::optional<uint64_t> budget_bytes) {
  LiveBlocks live;
  std::unordered_set<int32_t> cached;
  for (const KvBlock& block : snapshot.blocks) {
    if (block.ref_count > 0) {
      live.kept.push_back(block.id);
    } else {
      cached.insert(block.id);
    }
  }
  uint64_t room = budget_bytes && bytes_per_block > 0 ? *budget_bytes / bytes_per_block : cached.size();
  for (auto id = snapshot.free_order.rbegin(); id != snapshot.free_order.rend(); ++id) {
    if (!cached.contains(*id)) continue;
    if (room > 0) {
      live.kept.push_back(*id);
      --room;
    } else {
      live.dropped.push_back(*id);
    }
  }
  std::sort(live.kept.begin(), live.kept.end());
  std::sort(live.dropped.begin(), live.dropped.end());
  return live;
}

std::vector<int32_t> by_need(const KvSnapshot& snapshot, const std::vector<std::string>& requests,
                             const std::vector<int32_t>& kept) {
  std::unordered_map<std::string_view, std::vector<const KvTable*>> tables;  // by request, in order of the groups
  for (const KvGroup& group : snapshot.groups) {
    for (const KvTable& table : group.tables) tables[table.request].push_back(&table);
  }
  std::unordered_set<int32_t> left(kept.begin(), kept.end());
  std::vector<int32_t> order;
  order.reserve(kept.size());
  const auto take = [&](int32_t block) {
    if (left.erase(block) > 0) order.push_back(block);
  };
  for (const std::string& request : requests) {
    const auto found = tables.find(request);
    if (found == tables.end()) continue;
    for (const KvTable* const table : found->second) std::for_each(table->blocks.begin(), table->blocks.end(), take);
  }
  const std::unordered_set<int32_t> free(snapshot.free_order.begin(), snapshot.free_order.end());
  for (const int32_t block : kept) {
    if (!free.contains(block)) take(block);
  }
  std::for_each(snapshot.free_order.rbegin(), snapshot.free_order.rend(), take);
  return order;
}

std::vector<int32_t> deferred_blocks(const KvSnapshot& snapshot, const std::vector<std::string>& requests,
                                     const std::vector<int32_t>& blocks, size_t most_first) {
  std::unordered_map<std::string_view, std::vector<int32_t>> tables;  // by request, all groups
  for (const KvGroup& group : snapshot.groups) {
    for (const KvTable& table : group.tables) {
      std::vector<int32_t>& all = tables[table.request];
      all.insert(all.end(), table.blocks.begin(), table.blocks.end());
    }
  }
  std::unordered_set<int32_t> first;
  for (const std::string& request : requests) {
    const auto found = tables.find(request);
    if (found == tables.end() || found->second.empty()) continue;
    std::unordered_set<int32_t> with = first;
    with.insert(found->second.begin(), found->second.end());
    if (!first.empty() && with.size() > most_first) break;
    first = std::move(with);
  }
  for (const KvBlock& block : snapshot.blocks) {
    if (block.hash.empty()) first.insert(block.id);
  }
  std::vector<int32_t> deferred;
  std::copy_if(blocks.begin(), blocks.end(), std::back_inserter(deferred),
               [&](int32_t block) { return !first.contains(block); });
  return deferred;
}

std::vector<int32_t> cached_blocks(const KvSnapshot& snapshot, const std::vector<int32_t>& blocks) {
  std::unordered_set<int32_t> cached;
  for (const KvBlock& block : snapshot.blocks) {
    if (block.ref_count == 0 && !block.hash.empty()) cached.insert(block.id);
  }
  std::vector<int32_t> found;
  std::copy_if(blocks.begin(), blocks.end(), std::back_inserter(found),
               [&](int32_t block) { return cached.contains(block); });
  return found;
}

std::vector<uint64_t> versions_of(const KvSnapshot& snapshot, const std::vector<int32_t>& blocks) {
  std::unordered_map<int32_t, uint64_t> known;
  known.reserve(snapshot.blocks.size());
  for (const KvBlock& block : snapshot.blocks) known.emplace(block.id, block.version);
  std::vector<uint64_t> versions;
  versions.reserve(blocks.size());
  for (const int32_t id : blocks) {
    const auto found = known.find(id);
    versions.push_back(found == known.end() ? 0 : found->second);
  }
  return versions;
}

void drop_hashes(KvSnapshot& snapshot, const std::vector<int32_t>& dropped) {
  const std::unordered_set<int32_t> gone(dropped.begin(), dropped.end());
  for (KvBlock& block : snapshot.blocks) {
    if (!gone.contains(block.id)) continue;
    block.hash.clear();
    block.hash_tokens = 0;
  }
  std::erase_if(snapshot.blocks, [](const KvBlock& block) { return block.ref_count == 0 && block.hash.empty(); });
  for (PrefixEntry& entry : snapshot.prefix_index) {
    std::erase_if(entry.blocks, [&](int32_t id) { return gone.contains(id); });
  }
  std::erase_if(snapshot.prefix_index, [](const PrefixEntry& entry) { return entry.blocks.empty(); });
  std::erase_if(snapshot.extra_hashes, [&](const ExtraHashes& extra) { return gone.contains(extra.block); });
}

}  // namespace torpor
