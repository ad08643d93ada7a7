// SPDX-License-Identifier: Apache-2.0
// Whether Python can still be called.
#pragma once

#include <pybind11/pybind11.h>

namespace torpor {

// Return whether Python's interpreter is ending. Then a thread that asks for the interpreter's lock would be ended in
// the middle of its work.
inline bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

}  // namespace torpor
