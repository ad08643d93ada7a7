// SPDX-License-Identifier: Apache-2.0
// BlockField: one attribute of vLLM's KVCacheBlock. Where its class has it as a slot, the slot is read and written
// where it lies, without the interpreter; of any other object it is asked for by name, slower and as right.
//
// Threads: those that hold the interpreter's lock.
#pragma once

#include <cstdint>

#include <pybind11/pybind11.h>

namespace torpor {

class BlockField {
 public:
  // `type`: of the blocks; null: there are none.
  BlockField(PyTypeObject* type, const char* name);

  // Null, without an exception, where there is none.
  pybind11::object get(PyObject* block) const {
    if (Py_TYPE(block) == type_ && offset_ >= 0) return pybind11::reinterpret_borrow<pybind11::object>(slot(block));
    return by_name(block);
  }
  // The same, borrowed and without a look at it; null also where the block has no such slot.
  PyObject* peek(PyObject* block) const { return Py_TYPE(block) == type_ && offset_ >= 0 ? slot(block) : nullptr; }
  // It is asked for soon; prefetch() of the block before.
  void prefetch_value(PyObject* block) const {
    if (offset_ >= 0) __builtin_prefetch(slot(block));
  }
  void prefetch(PyObject* block) const {
    if (offset_ >= 0) __builtin_prefetch(&slot(block));
  }
  int64_t number(PyObject* block, int64_t otherwise) const;
  // False, without an exception: it was not written.
  bool set(PyObject* block, int64_t number) const;

 private:
  PyObject*& slot(PyObject* block) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(block) + offset_);
  }
  pybind11::object by_name(PyObject* block) const;

  PyTypeObject* const type_;  // kept alive by its blocks
  PyObject* const name_;      // interned, for ever
  Py_ssize_t offset_ = -1;
};

}  // namespace torpor
