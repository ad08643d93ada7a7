// SPDX-License-Identifier: Apache-2.0
// ConnectorHits: how many blocks of a request's prompt can be loaded, over all KV cache groups of the engine.
// GroupTables: the block tables of these groups. A group is a set of layers that share one table; its blocks have keys
// of their own.
//
// A hit needs every block of a group that sees all tokens. It needs those blocks of other groups that the first token
// after the hit still sees. A prefix that the engine has itself is there for all groups.
//
// Owner: the scheduler's side of the connector. Threads: those that hold the interpreter's lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <pybind11/pybind11.h>

#include "kvcache/block_index.h"

namespace torpor {

// The tokens that a layer of the group sees: all before its own; the last `window`, with its own; or those of its
// chunk.
struct GroupReach {
  int64_t window = 0;
  int64_t chunk = 0;
  bool all() const { return window == 0 && chunk == 0; }
  // Return the first block of which a token after `end` blocks sees a part.
  size_t first_seen(size_t end, int64_t block_tokens) const;
};

// vLLM's block tables, by request id. Blocks are its KVCacheBlocks. The null block stands for blocks that a request
// does not need any more.
class GroupTables {
 public:
  struct Table {
    PyObject* list = nullptr;
    size_t size = 0;
    PyObject* operator[](size_t i) const { return PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i)); }
  };

  // `groups`: for each group (req_to_blocks, num_cached_block, window, chunk).
  explicit GroupTables(const pybind11::list& groups);
  size_t size() const { return groups_.size(); }
  const GroupReach& reach(size_t group) const { return groups_[group].reach; }
  // Return whether a part of a hit is useless: a shorter hit would need other blocks of a window.
  bool whole_hits() const { return groups_.size() > 1 || !groups_[0].reach.all(); }
  // Return the block table of a request in a group; an empty one if there is none.
  Table of(size_t group, PyObject* request) const;
  // Return the number of full blocks of the request that all groups have entered into the prefix cache.
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

  // Return how many blocks after the first `have` can be loaded; never the block of the last token. Afterwards keys()
  // has what must be loaded for that, group after group.
  size_t find(const pybind11::object& request, size_t have, uint32_t space);
  // Keep the first `blocks` blocks of the found hit. Precondition: there is one group, which sees all tokens.
  void shorten(size_t blocks);
  // Fill keys() with the keys of all blocks of the request in all groups, whether they can be found or not.
  void take_all(const pybind11::object& request, uint32_t space);
  // Return the first block that `group` needs for a hit of the blocks from `have` up to `end`.
  size_t first_needed(size_t group, size_t have, size_t end) const {
    return std::max(have, groups_.reach(group).first_seen(end, block_tokens_));
  }

  // Return whether the found hit stays the answer until has_next() is true: there is one group, it sees all tokens, and
  // the whole hit is in host memory.
  bool ends_where_it_ends() const {
    return !groups_.whole_hits() &&
           std::all_of(places_.begin(), places_.end(), [](const BlockLocations& places) { return places.host >= 0; });
  }
  // Return whether the request's block of this number can be loaded, too.
  bool has_next(const pybind11::object& request, size_t block, uint32_t space) const;

  // Return where the key's block can be loaded from; nothing: nowhere.
  std::optional<BlockLocations> find_one(const BlockKey& key) const {
    BlockLocations places;
    return index_.run({&key, 1}, {&places, 1}) == 1 ? std::optional(places) : std::nullopt;
  }

  std::span<const BlockKey> keys() const { return keys_; }
  // Write to `sources` the nearest store of each block of the found hit: of the first group that sees all tokens, or of
  // the first group if none does. A block that no window sees is not loaded; it has the store of the next one.
  void take_sources(std::vector<StoreId>& sources) const;

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
  std::vector<BlockKey> chain_;  // of one group, from block `have` on
  size_t blocks_ = 0;            // of the found hit
  size_t counted_ = 0;           // in keys_: the first key of the group that take_sources() looks at
  size_t of_counted_ = 0;        // number of its keys
};

}  // namespace torpor
