// SPDX-License-Identifier: Apache-2.0
// BlockField: one attribute of vLLM's KVCacheBlock. If its class has the attribute as a slot, it is read and written in
// place, without the interpreter. Otherwise the interpreter looks it up: slower, with the same result.
//
// Threads: those that hold the interpreter's lock. Failure: no method leaves a Python exception.
#pragma once

#include <cstdint>

#include <pybind11/pybind11.h>

namespace torpor {

class BlockField {
 public:
  // `type`: the class of the blocks; null: there are no blocks.
  BlockField(PyTypeObject* type, const char* name);

  // Return the attribute; null if the block has none.
  pybind11::object get(PyObject* block) const {
    if (Py_TYPE(block) == type_ && offset_ >= 0) return pybind11::reinterpret_borrow<pybind11::object>(slot(block));
    return by_name(block);
  }
  // Return the attribute, borrowed; null also if the block does not have it as a slot.
  PyObject* peek(PyObject* block) const { return Py_TYPE(block) == type_ && offset_ >= 0 ? slot(block) : nullptr; }
  // Load the value into the cache, as it is needed soon. Call prefetch(), which loads the slot, a while before.
  void prefetch_value(PyObject* block) const {
    if (offset_ >= 0) __builtin_prefetch(slot(block));
  }
  void prefetch(PyObject* block) const {
    if (offset_ >= 0) __builtin_prefetch(&slot(block));
  }
  // Return the attribute as a number; `otherwise` if it is none.
  int64_t number(PyObject* block, int64_t otherwise) const;
  // Set the attribute. Return false if that failed.
  bool set(PyObject* block, int64_t number) const;

 private:
  PyObject*& slot(PyObject* block) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(block) + offset_);
  }
  pybind11::object by_name(PyObject* block) const;

  PyTypeObject* const type_;  // kept alive by its blocks
  PyObject* const name_;      // interned, never freed
  Py_ssize_t offset_ = -1;
};

}  // namespace torpor
