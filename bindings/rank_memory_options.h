// SPDX-License-Identifier: Apache-2.0
// RankMemoryOptions from a Python dict. Threads: those that hold the interpreter's lock.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/dict_reader.h"
#include "engine/rank_memory.h"

namespace torpor {

// Read the entries that are options; the caller reads the others and calls finish(). Raises InvalidArgument for a wrong
// value.
RankMemoryOptions rank_memory_options_from(DictReader& in);
// The same for a dict that has only options: also raises for unknown keys.
RankMemoryOptions rank_memory_options_from(const pybind11::dict& dict);

}  // namespace torpor
