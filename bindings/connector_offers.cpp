// SPDX-License-Identifier: Apache-2.0
#include "bindings/connector_offers.h"

#include <algorithm>

#include "bindings/bind_errors.h"
#include "bindings/bind_values.h"

namespace py = pybind11;

namespace torpor {
namespace {

constexpr size_t kAhead = 8;  // blocks of vLLM to prefetch: enough that memory has answered when their turn comes

// Return the text of a Python str, which holds it; empty if it is no UTF-8.
std::string_view words_of(PyObject* text) {
  Py_ssize_t size = 0;
  const char* const words = PyUnicode_AsUTF8AndSize(text, &size);
  if (words != nullptr) return {words, static_cast<size_t>(size)};
  PyErr_Clear();
  return {};
}

}  // namespace

ConnectorOffers::ConnectorOffers(const py::object& pool, const ConnectorOptions& options, const GroupTables& groups,
                                 EngineBlocks& blocks, OffloadScheduler& scheduler)
    : options_(options),
      stride_tokens_(options.stride_tokens),
      queue_(pool.attr("free_block_queue")),
      groups_(groups),
      blocks_(blocks),
      scheduler_(scheduler),
      offered_(static_cast<size_t>(blocks.size()), ContentVersion::kNone),
      stale_(static_cast<size_t>(blocks.size()), ContentVersion::kNone),
      marked_(static_cast<size_t>(blocks.size())) {}

void ConnectorOffers::end_step(const py::dict& scheduled, uint64_t step) {
  if (!options_.lazy) return;
  taken_ += most_taken(scheduled);
  if (taken_ >= options_.watermark / 2) offer_next_to_go(step);
}

void ConnectorOffers::finished(Progress& progress, const Request& request, uint64_t step) {
  if (looks_at(progress)) offer(progress, request, 0, step);
}

void ConnectorOffers::reset() {
  std::fill(offered_.begin(), offered_.end(), ContentVersion::kNone);
  for (size_t block = 0; block < stale_.size(); ++block) stale_[block] = blocks_.version(static_cast<int32_t>(block));
  any_stale_ = true;
}

// Offer the request's blocks that this step fills, where it ends a stride. vLLM has already entered those into the
// prefix cache whose tokens are known; a later step offers the others.
void ConnectorOffers::offer(Progress& progress, const Request& request, int64_t tokens, uint64_t step) {
  static PyObject* const kComputed = PyUnicode_InternFromString("num_computed_tokens");
  PyObject* const computed = PyObject_GetAttr(request.object, kComputed);
  if (computed == nullptr) throw py::error_already_set();
  const int64_t all = PyLong_AsLongLong(computed) + tokens;
  Py_DECREF(computed);
  const int64_t strides = all / stride_tokens_;
  const size_t full = static_cast<size_t>(strides) * groups_.stride();
  const size_t entered = full > progress.offered ? groups_.entered(request.id) : 0;
  const size_t ready = std::max(progress.offered, std::min(full, entered / groups_.stride() * groups_.stride()));
  if (ready >= full) progress.to_fill = (strides + 1) * stride_tokens_ - all;
  if (groups_.partial_hits() && !progress.tail) offer_tail(progress, request, all, step);
  if (ready <= progress.offered) return;
  for (size_t group = 0; group < groups_.size(); ++group) {
    const GroupTables::Table table = groups_.of(group, request.id);
    const size_t end = std::min(ready / groups_.units(group), table.size);
    for (size_t i = progress.offered / groups_.units(group); i < end;) {
      if (progress.stale) {
        i = mark_stale(table, i);
      } else if (options_.lazy) {
        i = mark_priority(table, i, request.priority);
      } else {
        i = offer_run(request, table, i, end, step);
      }
    }
  }
  progress.offered = ready;
}

// Offer the last block of the prompt, of each group that sees all tokens, when this step fills it up to the last unit
// that another request can take. The engine hands over states, which it goes on to change.
void ConnectorOffers::offer_tail(Progress& progress, const Request& request, int64_t all, uint64_t step) {
  const auto prompt = py::handle(request.object).attr("num_prompt_tokens").cast<int64_t>();
  const int64_t unit = groups_.unit_tokens();
  const int64_t tail = std::max<int64_t>(prompt - 1, 0) / unit * unit;
  if (all < tail) {
    progress.to_fill = std::min(progress.to_fill, tail - all);
    return;
  }
  progress.tail = true;
  const auto end = static_cast<size_t>(tail / unit);
  for (size_t group = 0; group < groups_.size(); ++group) {
    const GroupTables::Table table = groups_.of(group, request.id);
    const size_t i = end / groups_.units(group);
    if (!groups_.reach(group).all() || end % groups_.units(group) == 0 || i >= table.size) continue;
    if (progress.stale) {
      (void)mark_stale(table, i);
    } else if (!options_.lazy) {
      offer_one(request, table[i], step);
    }
  }
}

void ConnectorOffers::handed(const Progress& progress, const Request& request, const py::list& blocks, uint64_t step) {
  for (const py::handle each : blocks) {
    const auto number = each.cast<py::tuple>()[1].cast<int32_t>();
    if (number < 0 || number >= blocks_.size()) continue;
    if (progress.stale) {
      stale_[static_cast<size_t>(number)] = blocks_.version(number);
    } else if (!options_.lazy && !blocks_.is_full(number)) {
      offer_one(request, blocks_.block(number), step);
    }
  }
}

// Offer one block of the request, if it has a key.
void ConnectorOffers::offer_one(const Request& request, PyObject* block, uint64_t step) {
  BlockKey key{.space = scheduler_.space()};
  if (!blocks_.key_of(block, key)) return;
  keys_.assign(1, key);
  few_.assign(1, blocks_.number_of(block));
  offer_keys(request, {}, step);
}

// Offer the blocks of the request from `first` on, up to one without a key: it is outside of a window, or of no use to
// a hit. Return the position after the last block.
size_t ConnectorOffers::offer_run(const Request& request, const GroupTables::Table& table, size_t first, size_t end,
                                  uint64_t step) {
  keys_.clear();
  few_.clear();
  for (size_t at = first; at < std::min(end, first + 2 * kAhead); ++at) blocks_.prefetch(table[at]);
  for (size_t at = first; at < std::min(end, first + kAhead); ++at) blocks_.prefetch_values(table[at]);
  size_t i = first;
  for (BlockKey key{.space = scheduler_.space()}; i < end && blocks_.key_of(table[i], key); ++i) {
    if (i + 2 * kAhead < end) blocks_.prefetch(table[i + 2 * kAhead]);
    if (i + kAhead < end) blocks_.prefetch_values(table[i + kAhead]);
    keys_.push_back(key);
    few_.push_back(blocks_.number_of(table[i]));
  }
  if (keys_.empty()) return first + 1;
  BlockKey before;
  const bool named = first > 0 && options_.offload.events > 0 && blocks_.key_of(table[first - 1], before);
  offer_keys(request, named ? before.hash : BlockHash{}, step);
  return i;
}

// Offer keys_ and few_, which are consecutive blocks of the request.
void ConnectorOffers::offer_keys(const Request& request, const BlockHash& parent, uint64_t step) {
  OffloadOffer offer{.keys = keys_, .blocks = few_, .parent = parent, .after_step = step, .priority = request.priority};
  if (scheduler_.has_policy()) offer.request = words_of(request.id);
  value_or_raise(try_catch([&]() -> Status { return (void)scheduler_.offer(offer), ok(); }));
}

size_t ConnectorOffers::mark_stale(const GroupTables::Table& table, size_t i) {
  const int32_t number = blocks_.number_of(table[i]);
  if (number >= 0) stale_[static_cast<size_t>(number)] = blocks_.version(number);
  return i + 1;
}

// Mark the content of a block with the request's priority; with the highest, if several requests share it.
size_t ConnectorOffers::mark_priority(const GroupTables::Table& table, size_t i, int32_t priority) {
  const int32_t number = blocks_.number_of(table[i]);
  const ContentVersion version = blocks_.version(number);
  if (version == ContentVersion::kNone) return i + 1;
  Marked& marked = marked_[static_cast<size_t>(number)];
  marked = {.version = version, .priority = marked.version == version ? std::max(marked.priority, priority) : priority};
  return i + 1;
}

void ConnectorOffers::allocated(Progress& progress, PyObject* id) {
  progress.to_fill = 0;
  if (!any_stale_) return;
  for (size_t group = 0; group < groups_.size() && !progress.stale; ++group) {
    const GroupTables::Table table = groups_.of(group, id);
    for (size_t i = 0; i < table.size && !progress.stale; ++i) {
      const int32_t number = blocks_.number_of(table[i]);
      progress.stale = number >= 0 && is_stale(number, blocks_.version(number));
    }
  }
}

// Lazy: return the most blocks that this step can take from the free queue.
int64_t ConnectorOffers::most_taken(const py::dict& scheduled) const {
  int64_t tokens = 0;
  PyObject* id = nullptr;
  PyObject* count = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(scheduled.ptr(), &at, &id, &count) != 0;) tokens += PyLong_AsLongLong(count);
  const auto requests = static_cast<int64_t>(scheduled.size());
  return (tokens / groups_.unit_tokens() + requests) * static_cast<int64_t>(groups_.size());
}

// Lazy: offer the head of vLLM's free queue, which it evicts next. The last step that writes one of these blocks is the
// present one: vLLM has freed its copy of a part of a block by now. A freed block is among them at once if the queue is
// short, and after a while if it is long. They belong to many requests, the last
// block of each first, so the block before one in its request is not known here.
void ConnectorOffers::offer_next_to_go(uint64_t step) {
  next_to_go_.clear();
  py::object block = blocks_.next_free(py::object(queue_.attr("fake_free_list_head")).ptr());
  int32_t seen = 0;
  for (; seen < options_.watermark && block && !block.is_none(); ++seen, block = blocks_.next_free(block.ptr())) {
    const int32_t number = blocks_.number_of(block.ptr());
    const ContentVersion version = blocks_.version(number);
    if (version == ContentVersion::kNone || offered_[static_cast<size_t>(number)] == version ||
        is_stale(number, version))
      continue;
    BlockKey key{.space = scheduler_.space()};
    if (!blocks_.key_of(block.ptr(), key)) continue;
    offered_[static_cast<size_t>(number)] = version;
    const Marked& marked = marked_[static_cast<size_t>(number)];
    next_to_go_.push_back({.priority = marked.version == version ? marked.priority : 0, .number = number, .key = key});
  }
  taken_ = seen < options_.watermark ? options_.watermark : 0;
  if (any_priority_) {
    std::stable_sort(next_to_go_.begin(), next_to_go_.end(),
                     [](const NextToGo& a, const NextToGo& b) { return a.priority > b.priority; });
  }
  for (size_t first = 0, end = 0; first < next_to_go_.size(); first = end) {
    const int32_t priority = next_to_go_[first].priority;
    keys_.clear();
    few_.clear();
    for (; end < next_to_go_.size() && next_to_go_[end].priority == priority; ++end) {
      keys_.push_back(next_to_go_[end].key);
      few_.push_back(next_to_go_[end].number);
    }
    const OffloadOffer offer{
        .keys = keys_, .blocks = few_, .consecutive = false, .after_step = step, .priority = priority};
    value_or_raise(try_catch([&]() -> Status { return (void)scheduler_.offer(offer), ok(); }));
  }
}

}  // namespace torpor
