// SPDX-License-Identifier: Apache-2.0
// blocks, prefix: the KV blocks and how prefixes share them.
#include <map>
#include <memory>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "checkpoint/checkpoint.h"
#include "tools/torpor/text.h"

namespace torpor::cli {
namespace {

Result<Json> blocks(const Context& context) {
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          open_checkpoint(context.file_system, context.arguments.path, context.key));
  TORPOR_ASSIGN_OR_RETURN(const EngineCheckpoint engine, checkpoint.read_state());
  const KvSnapshot& kv = engine.state.kv;
  std::map<int32_t, std::vector<std::string>> holders;
  for (const KvGroup& group : kv.groups) {
    for (const KvTable& table : group.tables) {
      for (const int32_t block : table.blocks) holders[block].push_back(table.request);
    }
  }
  std::map<uint64_t, Json> saved;  // by block: where each rank has it
  for (const RankSummary& rank : checkpoint.manifest().ranks) {
    TORPOR_ASSIGN_OR_RETURN(const RankRefs refs, checkpoint.refs(rank));
    for (const SavedChunk& chunk : refs.records) {
      if (chunk.key.kind != ChunkKind::kKvBlock) continue;
      saved[chunk.key.index].push_back({{"rank", rank.rank},
                                        {"file", refs.files[chunk.file].name},
                                        {"offset", chunk.offset},
                                        {"bytes", chunk.bytes},
                                        {"stored_bytes", chunk.stored_bytes},
                                        {"digest", chunk.digest.hex()}});
    }
  }
  Json list = Json::array();
  for (const KvBlock& block : kv.blocks) {
    const auto places = saved.find(static_cast<uint64_t>(block.id));
    list.push_back({{"id", block.id},
                    {"references", block.ref_count},
                    {"hash", hex(block.hash)},
                    {"requests", holders[block.id]},
                    {"saved", places == saved.end() ? Json::array() : places->second}});
  }
  return Json{{"path", checkpoint.path()},
              {"num_blocks", kv.num_blocks},
              {"free_blocks", kv.free_order.size()},
              {"blocks", std::move(list)}};
}

std::string show_blocks(const Json& json) {
  std::vector<Row> rows = {{"BLOCK", "REFS", "HASH", "SAVED", "REQUESTS"}};
  for (const Json& block : json["blocks"]) {
    const auto hash = block["hash"].get<std::string>();
    rows.push_back({cell(block["id"]), cell(block["references"]), hash.empty() ? "-" : hash.substr(0, 16),
                    block["saved"].empty() ? bad("no") : size_text(block["saved"][0]["bytes"]),
                    harmless(fmt::format("{}", fmt::join(block["requests"].get<std::vector<std::string>>(), " ")))});
  }
  return fmt::format("{} of {} blocks in use or cached, {} free\n", json["blocks"].size(), cell(json["num_blocks"]),
                     cell(json["free_blocks"])) +
         table(rows);
}

// A radix tree over the requests' chains of block hashes.
struct Node {
  std::map<std::string, std::unique_ptr<Node>> children;  // by hash
  std::vector<std::string> requests;                      // that go through it
  std::vector<int32_t> blocks;                            // that hold it; empty: a later request would compute it
};

// One line for a run of nodes that the same requests share.
Json runs(const Node& node, size_t depth, int32_t block_size, bool cached_so_far) {
  Json list = Json::array();
  for (const auto& [hash, child] : node.children) {
    const Node* last = child.get();
    size_t blocks = 1;
    Json held = Json::array();
    bool cached = cached_so_far;
    size_t hit_blocks = 0;
    for (;;) {
      held.push_back(last->blocks);
      cached = cached && !last->blocks.empty();
      if (cached) hit_blocks = blocks;
      if (last->children.size() != 1 || last->children.begin()->second->requests != last->requests ||
          last->children.begin()->second->blocks.empty() != last->blocks.empty())
        break;
      last = last->children.begin()->second.get();
      ++blocks;
    }
    list.push_back({{"from_token", depth * static_cast<size_t>(block_size)},
                    {"to_token", (depth + blocks) * static_cast<size_t>(block_size)},
                    {"hit_tokens", (depth + hit_blocks) * static_cast<size_t>(block_size)},
                    {"cached", cached},
                    {"blocks", std::move(held)},
                    {"requests", last->requests},
                    {"children", runs(*last, depth + blocks, block_size, cached)}});
  }
  return list;
}

using Index = std::map<std::string, const PrefixEntry*>;  // by key

// The blocks that hold a piece of a prefix, of all groups. A key is the hash alone, or with the group's number behind.
std::vector<int32_t> blocks_with(const std::string& hash, size_t groups, const Index& index,
                                 std::set<std::string>& used) {
  std::vector<std::string> keys = {hash};
  for (size_t group = 0; group < groups; ++group) keys.push_back(hash + fmt::format("{:08x}", group));
  std::vector<int32_t> blocks;
  for (const std::string& key : keys) {
    const auto found = index.find(key);
    if (found == index.end()) continue;
    blocks.insert(blocks.end(), found->second->blocks.begin(), found->second->blocks.end());
    used.insert(key);
  }
  return blocks;
}

Result<Json> prefix(const Context& context) {
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          open_checkpoint(context.file_system, context.arguments.path, context.key));
  TORPOR_ASSIGN_OR_RETURN(const EngineCheckpoint engine, checkpoint.read_state());
  const KvSnapshot& kv = engine.state.kv;
  Index index;
  for (const PrefixEntry& entry : kv.prefix_index) index.emplace(hex(entry.hash), &entry);
  Node root;
  std::set<std::string> used;
  for (const RequestState& request : engine.state.scheduler.requests) {
    const auto size = static_cast<size_t>(std::max(request.block_hash_bytes, 0));
    Node* at = &root;
    for (size_t offset = 0; size > 0 && offset + size <= request.block_hashes.size(); offset += size) {
      const std::string hash = hex(std::span(request.block_hashes).subspan(offset, size));
      std::unique_ptr<Node>& child = at->children[hash];
      if (child == nullptr) {
        child = std::make_unique<Node>();
        child->blocks = blocks_with(hash, kv.groups.size(), index, used);
      }
      child->requests.push_back(request.id);
      at = child.get();
    }
  }
  const int32_t block_size = kv.groups.empty() ? 0 : kv.groups[0].block_size;
  return Json{{"path", checkpoint.path()},
              {"entries", kv.prefix_index.size()},
              {"of_no_request", kv.prefix_index.size() - used.size()},
              {"block_size", block_size},
              {"tree", runs(root, 0, block_size, true)}};
}

void show_runs(const Json& list, const std::string& indent, std::string& text) {
  for (const Json& run : list) {
    const auto requests = run["requests"].get<std::vector<std::string>>();
    const std::string names = requests.size() > 4 ? fmt::format("{} requests", requests.size())
                                                  : harmless(fmt::format("{}", fmt::join(requests, " ")));
    text += fmt::format("{}tokens {}–{}  {}  {}\n", indent, cell(run["from_token"]), cell(run["to_token"]),
                        run["cached"] ? good(fmt::format("hit {}", cell(run["hit_tokens"]))) : "not cached", names);
    show_runs(run["children"], indent + "  ", text);
  }
}

std::string show_prefix(const Json& json) {
  std::string text = fmt::format("{} cached prefixes in blocks of {} tokens; {} belong to no request any more\n",
                                 cell(json["entries"]), cell(json["block_size"]), cell(json["of_no_request"]));
  show_runs(json["tree"], "", text);
  return text;
}

}  // namespace

Verb blocks_verb() {
  return {.name = "blocks",
          .help = "the KV blocks: references, hash, who holds them, where they are saved",
          .json =
              "path, num_blocks, free_blocks, blocks: [{id, references, hash, requests, saved: [{rank, file, "
              "generation, offset, bytes, stored_bytes, digest}]}]",
          .declare = declare_path,
          .ask = blocks,
          .show = show_blocks};
}
Verb prefix_verb() {
  return {.name = "prefix",
          .help =
              "the tree of prefixes that requests share, with the tokens that a later request would find (with several "
              "KV groups at most so many: one group may have released what another still holds)",
          .json =
              "path, entries, of_no_request, block_size, tree: [{from_token, to_token, hit_tokens, cached, blocks, "
              "requests, children}]",
          .declare = declare_path,
          .ask = prefix,
          .show = show_prefix};
}

}  // namespace torpor::cli
