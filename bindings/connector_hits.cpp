// SPDX-License-Identifier: Apache-2.0
#include "bindings/connector_hits.h"

#include <algorithm>
#include <limits>

#include <fmt/core.h>

#include "bindings/bind_errors.h"

namespace py = pybind11;

namespace torpor {
namespace {

constexpr size_t kFirstKeys = 8;
constexpr size_t kAll = std::numeric_limits<size_t>::max();

// Return how many units `tokens` are.
size_t units_of(int64_t tokens, int64_t unit_tokens, const char* what) {
  if (unit_tokens < 1 || tokens < 1 || tokens % unit_tokens != 0) {
    raise(Error{.code = Code::kInvalidArgument,
                .what = fmt::format("{} has {} tokens, and a hash covers {}", what, tokens, unit_tokens),
                .next_step = "set prefix_match_unit to a divisor of all block sizes"});
  }
  return static_cast<size_t>(tokens / unit_tokens);
}

}  // namespace

size_t GroupReach::first_seen(int64_t end, int64_t block_tokens) const {
  if (state) return static_cast<size_t>(std::max<int64_t>(end - 1, 0) / block_tokens);
  const int64_t unseen = window > 0 ? end - window + 1 : chunk > 0 ? end / chunk * chunk : 0;
  return static_cast<size_t>(std::max<int64_t>(unseen, 0) / block_tokens);
}

GroupTables::GroupTables(const py::list& groups, int64_t unit_tokens, int64_t stride_tokens, bool partial_hits)
    : unit_tokens_(unit_tokens),
      stride_(units_of(stride_tokens, unit_tokens, "the stride of hits")),
      align_(partial_hits ? 1 : stride_) {
  for (const py::handle each : groups) {
    const auto group = each.cast<py::tuple>();
    groups_.push_back({.tables = group[0].cast<py::dict>(),
                       .entered = group[1].cast<py::dict>(),
                       .reach = {.window = group[2].cast<int64_t>(),
                                 .chunk = group[3].cast<int64_t>(),
                                 .state = group[4].cast<bool>()},
                       .units = units_of(group[5].cast<int64_t>(), unit_tokens, "a block")});
  }
}

std::vector<int64_t> GroupTables::block_tokens() const {
  std::vector<int64_t> tokens;
  for (const Group& group : groups_) tokens.push_back(static_cast<int64_t>(group.units) * unit_tokens_);
  return tokens;
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
    least = std::min(least, blocks == nullptr ? 0 : PyLong_AsSize_t(blocks) * group.units);
  }
  return least;
}

GroupTables::Blocks GroupTables::needed(size_t group, size_t have, size_t end) const {
  const size_t units = groups_[group].units;
  const auto tokens = static_cast<int64_t>(end) * unit_tokens_;
  const size_t seen = groups_[group].reach.first_seen(tokens, static_cast<int64_t>(units) * unit_tokens_);
  return {.first = std::max(have / units, seen), .end = (end + units - 1) / units};
}

// The block of the last token is always computed.
ConnectorHits::Chain ConnectorHits::chain_of(const py::object& request, uint32_t space) const {
  Chain chain{.hashes = request.attr("block_hashes"), .space = space};
  const auto tokens = request.attr("num_tokens").cast<int64_t>();
  const auto most = static_cast<size_t>(std::max<int64_t>(tokens - 1, 0) / groups_.unit_tokens());
  chain.end = groups_.aligned(std::min<size_t>(chain.hashes.size(), most));
  return chain;
}

// Set the key of the group's block whose last unit, or whose last one that is filled, is before `end`. Return false if
// the engine's hash is none. Precondition: 0 < `end` <= chain.end.
bool ConnectorHits::take_key(const Chain& chain, size_t group, size_t end, BlockKey& key) const {
  PyObject* const hash = PyList_GET_ITEM(chain.hashes.ptr(), static_cast<Py_ssize_t>(end - 1));
  if (!PyBytes_Check(hash) || static_cast<size_t>(PyBytes_GET_SIZE(hash)) > key.hash.size()) return false;
  key = {.group = static_cast<uint32_t>(group), .space = chain.space};
  std::copy_n(PyBytes_AS_STRING(hash), PyBytes_GET_SIZE(hash), key.hash.begin());
  return true;
}

// Append keys of `group` to keys_, for at most `most` whole blocks from `first` on. Return false if there are no more.
bool ConnectorHits::take_keys(const Chain& chain, size_t group, size_t first, size_t most) {
  const size_t units = groups_.units(group);
  const size_t end = chain.end / units;
  size_t i = first;
  BlockKey key;
  for (; i < end && i - first < most; ++i) {
    if (!take_key(chain, group, (i + 1) * units, key)) return false;
    keys_.push_back(key);
  }
  return i < end;
}

bool ConnectorHits::has_next(const py::object& request, size_t block, uint32_t space) const {
  const Chain chain = chain_of(request, space);
  return block < chain.end && is_there(chain, 0, block + 1);
}

void ConnectorHits::take_all(const py::object& request, uint32_t space) {
  keys_.clear();
  const Chain chain = chain_of(request, space);
  BlockKey key;
  for (size_t group = 0; group < groups_.size(); ++group) {
    (void)take_keys(chain, group, 0, kAll);
    if (chain.end % groups_.units(group) != 0 && take_key(chain, group, chain.end, key)) keys_.push_back(key);
  }
}

// Take the group's keys up to the first that is in no store. Each look-up misses the CPU's caches, so it begins with
// one: most prompts are new, and a waiting request asks in each step.
void ConnectorHits::find_from_left(const Chain& chain, size_t group, size_t have) {
  for (size_t few = 1; true; few = few == 1 ? kFirstKeys : 2 * few) {
    const size_t from = keys_.size();
    const bool more = take_keys(chain, group, have / groups_.units(group) + from, few);
    places_.resize(keys_.size());
    const size_t found = index_.run(std::span(keys_).subspan(from), std::span(places_).subspan(from));
    const bool all = from + found == keys_.size();
    keys_.resize(from + found);
    places_.resize(keys_.size());
    if (!more || !all) return;
  }
}

bool ConnectorHits::is_there(const Chain& chain, size_t group, size_t end) const {
  BlockKey key;
  BlockLocations places;
  return take_key(chain, group, end, key) && index_.run({&key, 1}, {&places, 1}) == 1;
}

// Return the end of the longest hit up to `end` for a group that sees all tokens: within its run, where whole blocks
// are; or in the block behind it, if that was stored when it was filled up to there.
size_t ConnectorHits::shorten_whole(const Chain& chain, size_t group, size_t end) const {
  const size_t run = runs_[group];
  if (groups_.partial_hits()) {
    for (size_t each = std::min(end, run + groups_.units(group) - 1); each > run; --each)
      if (is_there(chain, group, each)) return each;
  }
  return groups_.aligned(std::min(end, run));
}

// Return the end of the longest hit after `have`, up to `end`, for which the group has all blocks that it needs. It
// goes from the right: a hit ends before a missing block, and then does not need the blocks that were found after it.
// So no block is looked up twice.
size_t ConnectorHits::shorten_from_right(const Chain& chain, size_t group, size_t have, size_t end) const {
  const size_t units = groups_.units(group);
  if (groups_.reach(group).state) {
    while (end > have && !is_there(chain, group, end)) end = groups_.aligned(end - 1);
    return std::max(have, end);
  }
  for (size_t next = (end + units - 1) / units; end > have && next > groups_.needed(group, have, end).first;) {
    if (is_there(chain, group, std::min(next * units, end))) {
      --next;
      continue;
    }
    end = std::max(have, groups_.aligned((next - 1) * units));
    next = (end + units - 1) / units;
  }
  return end;
}

size_t ConnectorHits::find(const py::object& request, size_t have, uint32_t space) {
  keys_.clear();
  places_.clear();
  const Chain chain = chain_of(request, space);
  const size_t whole = whole_group();  // a group that needs every block ends the hit soonest
  if (whole < groups_.size()) find_from_left(chain, whole, have);
  counted_ = counted_unseen_ = 0;
  of_counted_ = units_ = keys_.size();
  counted_units_ = 1;
  if (groups_.size() > 1 || whole != 0) units_ = find_for_all(chain, have);
  return units_;
}

void ConnectorHits::shorten(size_t units) {
  keys_.resize(std::min(units, keys_.size()));
  places_.resize(keys_.size());
  of_counted_ = units_ = keys_.size();
}

size_t ConnectorHits::whole_group() const {
  size_t group = 0;
  while (group < groups_.size() && !groups_.reach(group).all()) ++group;
  return group;
}

// keys_ are those of the whole blocks of the first group that sees all tokens, if there is one.
size_t ConnectorHits::find_for_all(const Chain& chain, size_t have) {
  const size_t whole = whole_group();
  size_t end = std::max(have, chain.end);
  runs_.assign(groups_.size(), chain.end);
  for (size_t group = whole; group < groups_.size(); ++group) {
    if (!groups_.reach(group).all()) continue;
    const size_t units = groups_.units(group);
    runs_[group] = have + (group == whole ? keys_.size() * units : 0);
    if (group == whole) continue;
    while (runs_[group] + units <= chain.end && is_there(chain, group, runs_[group] + units)) runs_[group] += units;
  }
  for (size_t before = kAll; end < before;) {  // until all groups agree
    before = end;
    for (size_t group = 0; group < groups_.size(); ++group) {
      end = groups_.reach(group).all() ? shorten_whole(chain, group, end) : shorten_from_right(chain, group, have, end);
      end = std::max(have, end);
    }
  }
  keys_.clear();
  of_counted_ = 0;
  const size_t counted = whole < groups_.size() ? whole : 0;
  counted_units_ = groups_.units(counted);
  BlockKey key;
  for (size_t group = 0; group < groups_.size() && end > have; ++group) {
    const size_t before = keys_.size();
    const size_t units = groups_.units(group);
    const size_t run = groups_.reach(group).all() ? runs_[group] : 0;
    const auto [first, last] = groups_.needed(group, have, end);
    for (size_t i = first; i < last; ++i) {
      const size_t full = (i + 1) * units;
      if (!take_key(chain, group, full <= std::max(run, end) ? full : end, key)) break;
      keys_.push_back(key);
    }
    if (group == counted) {
      counted_ = before;
      of_counted_ = keys_.size() - before;
      counted_unseen_ = first - have / units;
    }
  }
  places_.resize(keys_.size());
  (void)index_.run(keys_, places_);
  return end - have;
}

void ConnectorHits::take_sources(std::vector<StoreId>& sources) const {
  sources.assign(units_, StoreId::kHost);
  if (of_counted_ == 0) return;
  for (size_t i = 0; i < units_; ++i) {
    const size_t block = std::max(i / counted_units_, counted_unseen_) - counted_unseen_;
    sources[i] = nearest(places_[counted_ + std::min(block, of_counted_ - 1)]);
  }
}

}  // namespace torpor
