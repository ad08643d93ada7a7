// SPDX-License-Identifier: Apache-2.0
#include "bindings/engine_blocks.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.h"

namespace py = pybind11;

namespace torpor {
namespace {

constexpr size_t kGroupBytes = 4;  // the group, at the end of a hash, most significant byte first
constexpr uint8_t kByPool = 2;     // a hold that only the pool's touch() can make

// Return the group at the end of vLLM's hash of a block, which has more than kGroupBytes bytes.
uint32_t group_of(PyObject* hash) {
  const auto* const end = reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(hash)) + PyBytes_GET_SIZE(hash);
  uint32_t group = 0;
  for (const uint8_t* byte = end - kGroupBytes; byte < end; ++byte) group = group << 8 | *byte;
  return group;
}

PyTypeObject* type_of_first(const py::list& blocks) {
  return blocks.empty() ? nullptr : Py_TYPE(PyList_GET_ITEM(blocks.ptr(), 0));
}

}  // namespace

EngineBlocks::EngineBlocks(const py::object& pool, std::vector<int64_t> block_tokens, bool partial)
    : pool_(pool),
      blocks_(pool.attr("blocks")),
      touch_(pool.attr("touch")),
      free_(pool.attr("free_blocks")),
      block_tokens_(std::move(block_tokens)),
      partial_(partial),
      type_(type_of_first(blocks_)),
      hash_(type_of_first(blocks_), "_block_hash"),
      hash_tokens_(type_of_first(blocks_), "_block_hash_num_tokens"),
      number_(type_of_first(blocks_), "block_id"),
      references_(type_of_first(blocks_), "ref_cnt"),
      owner_(type_of_first(blocks_), "pool"),
      next_(type_of_first(blocks_), "next_free_block"),
      known_(blocks_.size()),
      holds_(blocks_.size()) {
  few_.reserve(blocks_.size());  // so that hold() and release() cannot fail for want of memory once a job is committed
}

EngineBlocks::~EngineBlocks() {
  for (const Known& known : known_) Py_XDECREF(known.object);
}

PyObject* EngineBlocks::hash_object(PyObject* block) const {
  const py::object hash = hash_.get(block);  // the block keeps it
  if (!hash || !PyBytes_Check(hash.ptr()) || static_cast<size_t>(PyBytes_GET_SIZE(hash.ptr())) <= kGroupBytes)
    return nullptr;
  return has_key(group_of(hash.ptr()), block) ? hash.ptr() : nullptr;
}

bool EngineBlocks::has_key(uint32_t group, PyObject* block) const {
  if (!partial_) return is_full(group, block);
  return group < block_tokens_.size() && hash_tokens_.number(block, -1) > 0;
}

bool EngineBlocks::is_full(int32_t number) const {
  if (number < 0 || static_cast<size_t>(number) >= known_.size()) return false;
  PyObject* const block = PyList_GET_ITEM(blocks_.ptr(), number);
  const py::object hash = hash_.get(block);
  return hash && PyBytes_Check(hash.ptr()) && static_cast<size_t>(PyBytes_GET_SIZE(hash.ptr())) > kGroupBytes &&
         is_full(group_of(hash.ptr()), block);
}

bool EngineBlocks::is_full(uint32_t group, PyObject* block) const {
  const int64_t tokens = hash_tokens_.number(block, -1);
  return group < block_tokens_.size() && tokens > 0 && tokens % block_tokens_[group] == 0;
}

ContentVersion EngineBlocks::version(int32_t number) const {
  if (number < 0 || static_cast<size_t>(number) >= known_.size()) return ContentVersion::kNone;
  PyObject* const block = PyList_GET_ITEM(blocks_.ptr(), number);
  Known& known = known_[static_cast<size_t>(number)];
  if (known.object != nullptr && hash_.peek(block) == known.object) return known.version;  // it was looked at before
  PyObject* const hash = hash_object(block);
  if (hash == nullptr) return ContentVersion::kNone;
  if (known.object != hash) {
    Py_XDECREF(known.object);
    Py_INCREF(hash);
    known = {hash, ContentVersion{++last_}};
  }
  return known.version;
}

bool EngineBlocks::call(const py::object& method, std::span<const int32_t> blocks) {
  PyObject* const list = PyList_New(static_cast<Py_ssize_t>(blocks.size()));
  if (list != nullptr) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      PyObject* const block = PyList_GET_ITEM(blocks_.ptr(), blocks[i]);
      Py_INCREF(block);
      PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), block);
    }
  }
  PyObject* const done = list == nullptr ? nullptr : PyObject_CallOneArg(method.ptr(), list);
  Py_XDECREF(list);
  Py_XDECREF(done);
  if (done == nullptr) report_failure(method, blocks.size());
  return done != nullptr;
}

// Log an exception of the pool's method. The caller goes on without the result, so that the scheduler's step does not
// fail.
void EngineBlocks::report_failure(const py::object& method, size_t blocks) const {
  const py::error_already_set raised;  // takes the exception
  const bool frees = method.is(free_);
  log().error("vLLM's {} of {} KV blocks failed: {}; {}", frees ? "free_blocks()" : "touch()", blocks, raised.what(),
              frees ? "they stay in use until the engine ends" : "they are not offloaded");
}

// Do what touch() and free_blocks() of the pool would do, if they would only count references. Return false if they
// would do more.
bool EngineBlocks::count_one(int32_t number, int64_t more) {
  PyObject* const block = PyList_GET_ITEM(blocks_.ptr(), number);
  const py::object owner = owner_.get(block);
  if (owner && !owner.is_none() && !owner.is(pool_)) return false;
  const int64_t references = references_.number(block, 0);
  const int64_t least = more > 0 ? 1 : 2;  // otherwise the block would leave or enter the free queue
  return references >= least && references_.set(block, references + more);
}

bool EngineBlocks::pool_only_counts() const {
  return py::getattr(pool_, "metrics_collector", py::bool_(true)).is_none();
}

void EngineBlocks::hold(std::span<const int32_t> blocks, std::span<const ContentVersion> versions,
                        std::span<uint8_t> held) {
  few_.clear();
  const bool counts = pool_only_counts();
  for (size_t i = 0; i < blocks.size(); ++i) {
    held[i] = versions[i] != ContentVersion::kNone && version(blocks[i]) == versions[i] ? 1 : 0;
    if (held[i] == 0) continue;
    if (counts && count_one(blocks[i], 1)) {
      ++holds_[static_cast<size_t>(blocks[i])].now;
      ++held_;
    } else {
      few_.push_back(blocks[i]);
      held[i] = kByPool;
    }
  }
  if (few_.empty()) return;
  const bool done = call(touch_, few_);
  for (uint8_t& each : held) {
    if (each == kByPool) each = done ? 1 : 0;
  }
  if (!done) return;
  for (const int32_t block : few_) ++holds_[static_cast<size_t>(block)].now;
  held_ += static_cast<int64_t>(few_.size());
}

void EngineBlocks::release(std::span<const int32_t> blocks) {
  few_.clear();
  const bool counts = pool_only_counts();
  for (const int32_t block : blocks) {
    Holds& holds = holds_[static_cast<size_t>(block)];
    if (holds.released > 0) {
      --holds.released;
    } else if (holds.now > 0) {
      --holds.now;
      --held_;
      if (!counts || !count_one(block, -1)) few_.push_back(block);
    }
  }
  if (!few_.empty()) (void)call(free_, few_);
}

void EngineBlocks::release_all() {
  few_.clear();
  for (size_t block = 0; block < holds_.size(); ++block) {
    Holds& holds = holds_[block];
    holds.released += holds.now;
    for (; holds.now > 0; --holds.now) few_.push_back(static_cast<int32_t>(block));
  }
  held_ = 0;
  if (!few_.empty()) (void)call(free_, few_);
}

void EngineBlocks::prefetch(PyObject* block) const {
  hash_.prefetch(block);
  number_.prefetch(block);
}

void EngineBlocks::prefetch_values(PyObject* block) const {
  if (Py_TYPE(block) != type_) return;
  hash_.prefetch_value(block);
  hash_tokens_.prefetch_value(block);
  number_.prefetch_value(block);
}

int32_t EngineBlocks::number_of(PyObject* block) const { return static_cast<int32_t>(number_.number(block, -1)); }

bool EngineBlocks::key_of(PyObject* block, BlockKey& key) const {
  const py::object hash = hash_.get(block);
  if (!hash || !PyBytes_Check(hash.ptr())) return false;
  const auto size = static_cast<size_t>(PyBytes_GET_SIZE(hash.ptr()));
  if (size <= kGroupBytes || size - kGroupBytes > key.hash.size()) return false;
  const uint32_t group = group_of(hash.ptr());
  if (!has_key(group, block)) return false;
  key.hash.fill(0);
  std::memcpy(key.hash.data(), PyBytes_AS_STRING(hash.ptr()), size - kGroupBytes);
  key.group = group;
  return true;
}

}  // namespace torpor
