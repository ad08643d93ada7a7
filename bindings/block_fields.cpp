// SPDX-License-Identifier: Apache-2.0
#include "bindings/block_fields.h"

#include <structmember.h>

namespace py = pybind11;

namespace torpor {

BlockField::BlockField(PyTypeObject* type, const char* name) : type_(type), name_(PyUnicode_InternFromString(name)) {
  if (type == nullptr || name_ == nullptr) return;
  PyObject* const found = PyDict_GetItemWithError(type->tp_dict, name_);
  if (found == nullptr || !Py_IS_TYPE(found, &PyMemberDescr_Type)) return;
  const PyMemberDef& member = *reinterpret_cast<PyMemberDescrObject*>(found)->d_member;
  if (member.type == T_OBJECT_EX && member.flags == 0) offset_ = member.offset;
}

py::object BlockField::by_name(PyObject* block) const {
  PyObject* const found = PyObject_GetAttr(block, name_);
  if (found == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(found);
}

int64_t BlockField::number(PyObject* block, int64_t otherwise) const {
  const py::object found = get(block);
  if (!found || !PyLong_Check(found.ptr())) return otherwise;
  const int64_t number = PyLong_AsLongLong(found.ptr());
  if (number != -1 || PyErr_Occurred() == nullptr) return number;
  PyErr_Clear();
  return otherwise;
}

bool BlockField::set(PyObject* block, int64_t number) const {
  PyObject* const value = PyLong_FromLongLong(number);
  if (value == nullptr) return PyErr_Clear(), false;
  if (Py_TYPE(block) == type_ && offset_ >= 0) {
    PyObject* const before = slot(block);
    slot(block) = value;
    Py_XDECREF(before);
    return true;
  }
  const int failed = PyObject_SetAttr(block, name_, value);
  Py_DECREF(value);
  if (failed != 0) PyErr_Clear();
  return failed == 0;
}

}  // namespace torpor
