// SPDX-License-Identifier: Apache-2.0
// ConnectorHits: how much of a request's prompt can be loaded, for all KV cache groups of the engine; and GroupTables,
// their block tables. A group is layers with one table; its blocks have keys of their own.
//
// What a hit needs: of a group that sees all tokens each block, of the others those that the first token behind the hit
// still sees. What the engine has itself of a prefix it has for all groups.
//
// Threads: those that hold the interpreter's lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include <pybind11/pybind11.h>

#include "kvcache/block_index.h"

namespace torpor {

// What a layer of the group sees: all tokens before its own; the last `window` with its own; or those of its chunk.
struct GroupReach {
  int64_t window = 0;
  int64_t chunk = 0;
  bool all() const { return window == 0 && chunk == 0; }
  // The first block that a token behind `end` blocks sees something of.
  size_t first_seen(size_t end, int64_t block_tokens) const;
};

// vLLM's, by request id. Blocks are its KVCacheBlocks; where a request needs none any more, there is the null block.
class GroupTables {
 public:
  struct Table {
    PyObject* list = nullptr;
    size_t size = 0;
    PyObject* operator[](size_t i) const { return PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i)); }
  };

  // Of each group (req_to_blocks, num_cached_block, window, chunk).
  explicit GroupTables(const pybind11::list& groups);
  size_t size() const { return groups_.size(); }
  const GroupReach& reach(size_t group) const { return groups_[group].reach; }
  // A part of a hit is of no use: what a shorter one needs of a window is something else.
  bool whole_hits() const { return groups_.size() > 1 || !groups_[0].reach.all(); }
  Table of(size_t group, PyObject* request) const;
  // Blocks of the request that are full and were entered into the prefix cache, as far as they ever will be.
  size_t entered(PyObject* request) const;

 private:
  struct Group {
    pybind11::dict tables;
    pybind11::dict entered;
    GroupReach reach;
  };
  std::vector<Group> groups_;
};

class ConnectorHits {
 public:
  // Both outlive it.
  ConnectorHits(const GroupTables& groups, const BlockIndex& index, int64_t block_tokens)
      : groups_(groups), index_(index), block_tokens_(block_tokens) {}

  // How many blocks behind the first `have` can be loaded, never the last token's. keys() and places() are of what is
  // to be loaded for that, group after group.
  size_t find(const pybind11::object& request, size_t have, uint32_t space);
  // keys() of all its blocks and groups, wherever they are.
  void take_all(const pybind11::object& request, uint32_t space);
  // Where `group` begins to need blocks for a hit of those from `have` up to `end`.
  size_t first_needed(size_t group, size_t have, size_t end) const {
    return std::max(have, groups_.reach(group).first_seen(end, block_tokens_));
  }

  // With one group that sees all tokens, all of it in host memory: what was found stays the answer as long as
  // has_next() says no.
  bool ends_where_it_ends() const {
    return !groups_.whole_hits() && tokens_from(StoreId::kDisk) == 0 && tokens_from(StoreId::kRemote) == 0;
  }
  // The request's block of this number can be loaded, too.
  bool has_next(const pybind11::object& request, size_t block, uint32_t space) const;

  std::span<const BlockKey> keys() const { return keys_; }
  // The engine takes the first `blocks` of them; not with whole_hits().
  void shorten(size_t blocks) { places_.resize(std::min(places_.size(), blocks)); }
  // How many tokens of the first group's come from there, and from nowhere nearer.
  int64_t tokens_from(StoreId store) const;

 private:
  static size_t last_key(const pybind11::object& request, const pybind11::list& hashes, int64_t block_tokens);
  static bool take_key(PyObject* hash, BlockKey& key);
  bool take_keys(const pybind11::object& request, size_t group, size_t first, size_t most, uint32_t space);
  void find_from_left(const pybind11::object& request, size_t group, size_t have, uint32_t space);
  size_t whole_group() const;
  size_t find_for_all(size_t have);
  size_t shorten_from_right(size_t group, size_t have, size_t blocks);
  bool is_there(size_t group, size_t block);

  const GroupTables& groups_;
  const BlockIndex& index_;
  const int64_t block_tokens_;
  std::vector<BlockKey> keys_;
  std::vector<BlockLocations> places_;
  std::vector<BlockKey> chain_;  // of one group, from `have` on
  size_t of_first_group_ = 0;    // keys
};

}  // namespace torpor
