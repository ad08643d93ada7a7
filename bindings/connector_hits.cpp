// SPDX-License-Identifier: Apache-2.0
#include "bindings/connector_hits.h"

#include <algorithm>
#include <limits>

namespace py = pybind11;

namespace torpor {
namespace {

constexpr size_t kFirstKeys = 8;
constexpr size_t kAll = std::numeric_limits<size_t>::max();

}  // namespace

size_t GroupReach::first_seen(size_t end, int64_t block_tokens) const {
  const int64_t tokens = static_cast<int64_t>(end) * block_tokens;
  const int64_t unseen = window > 0 ? tokens - window + 1 : chunk > 0 ? tokens / chunk * chunk : 0;
  return static_cast<size_t>(std::max<int64_t>(unseen, 0) / block_tokens);
}

GroupTables::GroupTables(const py::list& groups) {
  for (const py::handle each : groups) {
    const auto group = each.cast<py::tuple>();
    groups_.push_back({.tables = group[0].cast<py::dict>(),
                       .entered = group[1].cast<py::dict>(),
                       .reach = {.window = group[2].cast<int64_t>(), .chunk = group[3].cast<int64_t>()}});
  }
}

GroupTables::Table GroupTables::of(size_t group, PyObject* request) const {
  PyObject* const list = PyDict_GetItemWithError(groups_[group].tables.ptr(), request);
  if (list == nullptr || !PyList_Check(list)) return {};
  return {list, static_cast<size_t>(PyList_GET_SIZE(list))};
}

size_t GroupTables::entered(PyObject* request) const {
  size_t least = kAll;
  for (const Group& group : groups_) {
    PyObject* const blocks = PyDict_GetItemWithError(group.entered.ptr(), request);
    least = std::min(least, blocks == nullptr ? 0 : PyLong_AsSize_t(blocks));
  }
  return least;
}

// Return the number of blocks of the request that can be loaded. The block of the last token is always computed.
size_t ConnectorHits::last_key(const py::object& request, const py::list& hashes, int64_t block_tokens) {
  const auto tokens = request.attr("num_tokens").cast<int64_t>();
  return std::min<size_t>(hashes.size(), static_cast<size_t>(std::max<int64_t>(tokens - 1, 0) / block_tokens));
}

bool ConnectorHits::take_key(PyObject* hash, BlockKey& key) {
  if (!PyBytes_Check(hash) || static_cast<size_t>(PyBytes_GET_SIZE(hash)) > key.hash.size()) return false;
  std::copy_n(PyBytes_AS_STRING(hash), PyBytes_GET_SIZE(hash), key.hash.begin());
  return true;
}

// Append keys of `group` to keys_, for at most `most` blocks from `first` on. Return false if there are no more.
bool ConnectorHits::take_keys(const py::object& request, size_t group, size_t first, size_t most, uint32_t space) {
  const py::list hashes = request.attr("block_hashes");
  const size_t end = last_key(request, hashes, block_tokens_);
  size_t i = first;
  for (; i < end && i - first < most; ++i) {
    BlockKey key{.group = static_cast<uint32_t>(group), .space = space};
    if (!take_key(PyList_GET_ITEM(hashes.ptr(), static_cast<Py_ssize_t>(i)), key)) return false;
    keys_.push_back(key);
  }
  return i < end;
}

bool ConnectorHits::has_next(const py::object& request, size_t block, uint32_t space) const {
  const py::list hashes = request.attr("block_hashes");
  BlockKey key{.space = space};
  if (block >= last_key(request, hashes, block_tokens_) ||
      !take_key(PyList_GET_ITEM(hashes.ptr(), static_cast<Py_ssize_t>(block)), key)) {
    return false;
  }
  BlockLocations places;
  return index_.run({&key, 1}, {&places, 1}) == 1;
}

void ConnectorHits::take_all(const py::object& request, uint32_t space) {
  keys_.clear();
  (void)take_keys(request, 0, 0, kAll, space);
  const size_t blocks = keys_.size();
  for (size_t group = 1; group < groups_.size(); ++group) {
    for (size_t i = 0; i < blocks; ++i) {
      keys_.push_back(keys_[i]);
      keys_.back().group = static_cast<uint32_t>(group);
    }
  }
}

// Take the group's keys up to the first that is in no store. Each look-up misses the CPU's caches, so it begins with
// one: most prompts are new, and a waiting request asks in each step.
void ConnectorHits::find_from_left(const py::object& request, size_t group, size_t have, uint32_t space) {
  for (size_t few = 1; true; few = few == 1 ? kFirstKeys : 2 * few) {
    const size_t from = keys_.size();
    const bool more = take_keys(request, group, have + from, few, space);
    places_.resize(keys_.size());
    const size_t found = index_.run(std::span(keys_).subspan(from), std::span(places_).subspan(from));
    const bool all = from + found == keys_.size();
    keys_.resize(from + found);
    places_.resize(keys_.size());
    if (!more || !all) return;
  }
}

bool ConnectorHits::is_there(size_t group, size_t block) {
  BlockKey key = chain_[block];
  key.group = static_cast<uint32_t>(group);
  BlockLocations places;
  return index_.run({&key, 1}, {&places, 1}) == 1;
}

// Return the length of the longest hit after `have`, of at most `blocks`, for which the group has all blocks that it
// needs. It goes from the right: a hit ends before a missing block, and then does not need the blocks that were found
// after it. So no block is looked up twice.
size_t ConnectorHits::shorten_from_right(size_t group, size_t have, size_t blocks) {
  for (size_t next = blocks; next > 0 && have + next > first_needed(group, have, have + blocks); --next) {
    if (!is_there(group, next - 1)) blocks = next - 1;
  }
  return blocks;
}

size_t ConnectorHits::find(const py::object& request, size_t have, uint32_t space) {
  keys_.clear();
  places_.clear();
  const size_t whole = whole_group();  // a group that needs every block ends the chain soonest
  if (whole < groups_.size()) {
    find_from_left(request, whole, have, space);
  } else {
    (void)take_keys(request, 0, have, kAll, space);
  }
  counted_ = 0;
  of_counted_ = blocks_ = keys_.size();
  if (groups_.size() > 1 || whole != 0) blocks_ = find_for_all(have);
  return blocks_;
}

void ConnectorHits::shorten(size_t blocks) {
  keys_.resize(std::min(blocks, keys_.size()));
  places_.resize(keys_.size());
  of_counted_ = blocks_ = keys_.size();
}

size_t ConnectorHits::whole_group() const {
  size_t group = 0;
  while (group < groups_.size() && !groups_.reach(group).all()) ++group;
  return group;
}

// keys_ are those of one group, as many as a hit can have.
size_t ConnectorHits::find_for_all(size_t have) {
  chain_ = keys_;
  size_t blocks = chain_.size();
  for (size_t group = whole_group() + 1; group < groups_.size(); ++group) {
    size_t there = 0;
    while (groups_.reach(group).all() && there < blocks && is_there(group, there)) ++there;
    if (groups_.reach(group).all()) blocks = there;
  }
  for (size_t before = kAll; blocks < before;) {  // until all groups agree
    before = blocks;
    for (size_t group = 0; group < groups_.size(); ++group) {
      if (!groups_.reach(group).all()) blocks = shorten_from_right(group, have, blocks);
    }
  }
  keys_.clear();
  of_counted_ = 0;
  const size_t counted = whole_group() < groups_.size() ? whole_group() : 0;
  for (size_t group = 0; group < groups_.size() && blocks > 0; ++group) {
    const size_t before = keys_.size();
    for (size_t i = first_needed(group, have, have + blocks); i < have + blocks; ++i) {
      keys_.push_back(chain_[i - have]);
      keys_.back().group = static_cast<uint32_t>(group);
    }
    if (group == counted) {
      counted_ = before;
      of_counted_ = keys_.size() - before;
    }
  }
  places_.resize(keys_.size());
  (void)index_.run(keys_, places_);
  return blocks;
}

void ConnectorHits::take_sources(std::vector<StoreId>& sources) const {
  sources.assign(blocks_, StoreId::kHost);
  if (of_counted_ == 0) return;
  const size_t unseen = blocks_ - of_counted_;
  for (size_t i = 0; i < blocks_; ++i) sources[i] = nearest(places_[counted_ + std::max(i, unseen) - unseen]);
}

}  // namespace torpor
