// SPDX-License-Identifier: Apache-2.0
// RankMemoryOptions from what Python gives.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/dict_reader.h"
#include "engine/rank_memory.h"

namespace torpor {

// Reads what it knows and leaves the rest to the caller, who ends with finish(). Raises for wrong values.
RankMemoryOptions rank_memory_options_from(DictReader& in);
// All of it: raises for keys that are no options, too.
RankMemoryOptions rank_memory_options_from(const pybind11::dict& dict);

}  // namespace torpor
