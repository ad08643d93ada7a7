// SPDX-License-Identifier: Apache-2.0
// ConnectorHits: how many blocks of a request's prompt can be loaded, over all KV cache groups of the engine.
// GroupTables: the block tables of these groups. A group is a set of layers that share one table; its blocks have keys
// of their own.
//
// A hit needs every block of a group that sees all tokens. It needs those blocks of other groups that the first token
// after the hit still sees; of a group of states (Mamba), the last one. A prefix that the engine has itself is there
// for all groups.
//
// Lengths are counted in units: the tokens of one hash of the engine. Groups may have blocks of different sizes, each a
// whole number of units. The hash of a block's last unit is the block's. A hit begins after a whole number of strides:
// so many units end a block of each group. It ends there, too, or, with partial hits, after any unit: then the last
// block of each group holds what the hit needs of it, and its key is that of a whole block, or of a block that was
// stored when it was filled up to this unit.
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

// The tokens that a layer of the group sees: all before its own; the last `window`, with its own; those of its chunk;
// or none, because a block is the `state` after its last token.
struct GroupReach {
  int64_t window = 0;
  int64_t chunk = 0;
  bool state = false;
  bool all() const { return window == 0 && chunk == 0 && !state; }
  // Return the first block, of `block_tokens`, of which the token after `end` tokens sees a part.
  size_t first_seen(int64_t end, int64_t block_tokens) const;
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

  // `groups`: for each group (req_to_blocks, num_cached_block, window, chunk, state, tokens of a block). Raises
  // InvalidArgument if a block or the stride is not a whole number of units.
  GroupTables(const pybind11::list& groups, int64_t unit_tokens, int64_t stride_tokens, bool partial_hits);
  size_t size() const { return groups_.size(); }
  const GroupReach& reach(size_t group) const { return groups_[group].reach; }
  size_t units(size_t group) const { return groups_[group].units; }  // of one block
  size_t stride() const { return stride_; }                          // in units
  bool partial_hits() const { return align_ < stride_; }
  // Return the end of the longest hit of at most `end` units.
  size_t aligned(size_t end) const { return end / align_ * align_; }
  int64_t unit_tokens() const { return unit_tokens_; }
  std::vector<int64_t> block_tokens() const;  // of each group
  // Return whether a part of a hit is useless: a shorter hit would need other blocks of a window.
  bool whole_hits() const { return groups_.size() > 1 || !groups_[0].reach.all(); }
  // Return the block table of a request in a group; an empty one if there is none.
  Table of(size_t group, PyObject* request) const;
  // Return the units of the request in full blocks that all groups have entered into the prefix cache.
  size_t entered(PyObject* request) const;
  // Return the blocks that `group` needs for a hit of the units from `have` up to `end`.
  struct Blocks {
    size_t first = 0;
    size_t end = 0;
  };
  Blocks needed(size_t group, size_t have, size_t end) const;

 private:
  struct Group {
    pybind11::dict tables;
    pybind11::dict entered;
    GroupReach reach;
    size_t units = 1;
  };
  std::vector<Group> groups_;
  const int64_t unit_tokens_;
  size_t stride_ = 1;
  size_t align_ = 1;  // in units
};

class ConnectorHits {
 public:
  // Both outlive it.
  ConnectorHits(const GroupTables& groups, const BlockIndex& index) : groups_(groups), index_(index) {}

  // Return how many units after the first `have` can be loaded, a whole number of strides; never the block of the last
  // token. Afterwards keys() has what must be loaded for that, group after group.
  size_t find(const pybind11::object& request, size_t have, uint32_t space);
  // Keep the first `units` units of the found hit. Precondition: there is one group, which sees all tokens.
  void shorten(size_t units);
  // Fill keys() with the keys of all blocks of the request in all groups, whether they can be found or not: of whole
  // ones, and with partial hits of those at the end of what can be loaded.
  void take_all(const pybind11::object& request, uint32_t space);

  // Return whether the found hit stays the answer until has_next() is true: there is one group, it sees all tokens, and
  // the whole hit is in host memory.
  bool ends_where_it_ends() const {
    return !groups_.whole_hits() &&
           std::all_of(places_.begin(), places_.end(), [](const BlockLocations& places) { return places.host >= 0; });
  }
  // Return whether the request's block of this number can be loaded, too. Precondition: as for shorten().
  bool has_next(const pybind11::object& request, size_t block, uint32_t space) const;

  // Return where the key's block can be loaded from; nothing: nowhere.
  std::optional<BlockLocations> find_one(const BlockKey& key) const {
    BlockLocations places;
    return index_.run({&key, 1}, {&places, 1}) == 1 ? std::optional(places) : std::nullopt;
  }

  std::span<const BlockKey> keys() const { return keys_; }
  // Write to `sources` the nearest store of each unit of the found hit: of the first group that sees all tokens, or of
  // the first group if none does. Of what that group does not load, it is the store of its first block that is loaded.
  void take_sources(std::vector<StoreId>& sources) const;

 private:
  // The request whose hashes are read.
  struct Chain {
    pybind11::list hashes;
    size_t end = 0;  // units that can be loaded
    uint32_t space = 0;
  };
  Chain chain_of(const pybind11::object& request, uint32_t space) const;
  bool take_key(const Chain& chain, size_t group, size_t end, BlockKey& key) const;
  bool take_keys(const Chain& chain, size_t group, size_t first, size_t most);
  void find_from_left(const Chain& chain, size_t group, size_t have);
  size_t whole_group() const;
  size_t find_for_all(const Chain& chain, size_t have);
  size_t shorten_whole(const Chain& chain, size_t group, size_t end) const;
  size_t shorten_from_right(const Chain& chain, size_t group, size_t have, size_t end) const;
  bool is_there(const Chain& chain, size_t group, size_t end) const;

  const GroupTables& groups_;
  const BlockIndex& index_;
  std::vector<BlockKey> keys_;
  std::vector<BlockLocations> places_;
  std::vector<size_t> runs_;   // by group: units up to the first whole block that is in no store
  size_t units_ = 0;           // of the found hit
  size_t counted_ = 0;         // in keys_: the first key of the group that take_sources() looks at
  size_t of_counted_ = 0;      // number of its keys
  size_t counted_unseen_ = 0;  // blocks before the first of these that the hit does not need
  size_t counted_units_ = 1;   // of one of its blocks
};

}  // namespace torpor
