#include "bindings/engine_blocks.h"

#include <algorithm>
#include <cstring>

namespace py = pybind11;

namespace torpor {
namespace {

constexpr size_t kGroupBytes = 4;  // at the end of a hash, the most significant first

PyObject* interned(const char* name) { return PyUnicode_InternFromString(name); }

// New reference; null without an exception where there is none.
PyObject* attribute(PyObject* object, PyObject* name) {
  PyObject* const found = PyObject_GetAttr(object, name);
  if (found == nullptr) PyErr_Clear();
  return found;
}

int64_t whole_number(PyObject* object, int64_t otherwise) {
  if (object == nullptr || !PyLong_Check(object)) return otherwise;
  const int64_t number = PyLong_AsLongLong(object);
  if (number != -1 || PyErr_Occurred() == nullptr) return number;
  PyErr_Clear();
  return otherwise;
}

int64_t number_attribute(PyObject* object, PyObject* name) {
  PyObject* const found = attribute(object, name);
  const int64_t number = whole_number(found, -1);
  Py_XDECREF(found);
  return number;
}

}  // namespace

EngineBlocks::EngineBlocks(const py::object& pool, int64_t block_tokens)
    : blocks_(pool.attr("blocks")),
      touch_(pool.attr("touch")),
      free_(pool.attr("free_blocks")),
      block_tokens_(block_tokens),
      known_(blocks_.size()),
      holds_(blocks_.size()) {}

EngineBlocks::~EngineBlocks() {
  for (const Known& known : known_) Py_XDECREF(known.object);
}

PyObject* EngineBlocks::hash_object(PyObject* block) const {
  static PyObject* const kHash = interned("_block_hash");
  static PyObject* const kTokens = interned("_block_hash_num_tokens");
  PyObject* const hash = attribute(block, kHash);
  if (hash == nullptr) return nullptr;
  Py_DECREF(hash);  // the block keeps it
  if (!PyBytes_Check(hash)) return nullptr;
  const int64_t tokens = number_attribute(block, kTokens);
  return tokens > 0 && tokens % block_tokens_ == 0 ? hash : nullptr;
}

Stamp EngineBlocks::stamp(int32_t number) const {
  if (number < 0 || static_cast<size_t>(number) >= known_.size()) return Stamp::kNone;
  PyObject* const hash = hash_object(PyList_GET_ITEM(blocks_.ptr(), number));
  if (hash == nullptr) return Stamp::kNone;
  Known& known = known_[static_cast<size_t>(number)];
  if (known.object != hash) {
    Py_XDECREF(known.object);
    Py_INCREF(hash);
    known = {hash, Stamp{++last_}};
  }
  return known.stamp;
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
  if (done == nullptr) PyErr_Clear();
  return done != nullptr;
}

void EngineBlocks::hold(std::span<const int32_t> blocks, std::span<const Stamp> stamps, std::span<uint8_t> held) {
  few_.clear();
  for (size_t i = 0; i < blocks.size(); ++i) {
    held[i] = stamps[i] != Stamp::kNone && stamp(blocks[i]) == stamps[i] ? 1 : 0;
    if (held[i] != 0) few_.push_back(blocks[i]);
  }
  if (few_.empty()) return;
  if (!call(touch_, few_)) {
    std::fill(held.begin(), held.end(), uint8_t{0});
    return;
  }
  for (const int32_t block : few_) ++holds_[static_cast<size_t>(block)].now;
  held_ += static_cast<int64_t>(few_.size());
}

void EngineBlocks::release(std::span<const int32_t> blocks) {
  few_.clear();
  for (const int32_t block : blocks) {
    Holds& holds = holds_[static_cast<size_t>(block)];
    if (holds.let_go > 0) {
      --holds.let_go;
    } else if (holds.now > 0) {
      --holds.now;
      few_.push_back(block);
    }
  }
  if (few_.empty()) return;
  held_ -= static_cast<int64_t>(few_.size());
  (void)call(free_, few_);
}

void EngineBlocks::let_go() {
  few_.clear();
  for (size_t block = 0; block < holds_.size(); ++block) {
    Holds& holds = holds_[block];
    holds.let_go += holds.now;
    for (; holds.now > 0; --holds.now) few_.push_back(static_cast<int32_t>(block));
  }
  held_ = 0;
  if (!few_.empty()) (void)call(free_, few_);
}

int32_t EngineBlocks::number_of(PyObject* block) {
  static PyObject* const kNumber = interned("block_id");
  return static_cast<int32_t>(number_attribute(block, kNumber));
}

bool EngineBlocks::key_of(PyObject* block, int64_t block_tokens, BlockKey& key) {
  static PyObject* const kHash = interned("_block_hash");
  static PyObject* const kTokens = interned("_block_hash_num_tokens");
  PyObject* const hash = attribute(block, kHash);
  if (hash == nullptr) return false;
  bool good = PyBytes_Check(hash) != 0;
  if (good) {
    const auto size = static_cast<size_t>(PyBytes_GET_SIZE(hash));
    const auto* const bytes = reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(hash));
    const int64_t tokens = number_attribute(block, kTokens);
    good = size > kGroupBytes && size - kGroupBytes <= key.hash.size() && tokens > 0 && tokens % block_tokens == 0;
    if (good) {
      key.hash.fill(0);
      std::memcpy(key.hash.data(), bytes, size - kGroupBytes);
      key.group = 0;
      for (size_t i = size - kGroupBytes; i < size; ++i) key.group = key.group << 8 | bytes[i];
    }
  }
  Py_DECREF(hash);
  return good;
}

}  // namespace torpor
