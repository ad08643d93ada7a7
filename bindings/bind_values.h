// SPDX-License-Identifier: Apache-2.0
// Values across the Python border: translates structs of scheduler_state, kvcache and checkpoint to and from plain
// dicts, lists and array.array. A key that is missing, unknown or of another type raises InvalidArgument, which names
// it. Token ids and block numbers are array('i'), copied in one piece.
//
// Threads: those that hold the interpreter's lock. Failure: the functions raise the exceptions of torpor.errors.
#pragma once

#include <string>

#include <pybind11/pybind11.h>

#include "checkpoint/engine_checkpoint.h"
#include "engine/rank_orders.h"
#include "kvcache/kv_layout.h"

namespace torpor {

Value value_from(const pybind11::handle& object, int depth = 0);
pybind11::object to_python(const Value& value);

CapturedState captured_state_from(const pybind11::dict& dict);
std::vector<int32_t> block_ids_from(const pybind11::dict& state);  // of its kv.blocks, in their order
pybind11::dict to_python(const EngineCheckpoint& checkpoint);
pybind11::list to_python(const std::vector<WorkerSnapshot>& workers);
pybind11::dict to_python(const RankLedger& ledger);
RequestState request_state_from(const pybind11::handle& object);
pybind11::dict to_python(const RequestState& request);
EngineCheckpoint engine_checkpoint_from(const pybind11::dict& dict);
Fingerprint fingerprint_from(const pybind11::handle& object);
std::shared_ptr<const Key> key_from(const std::optional<std::string>& key_file);  // null if `key_file` is none
KvLayout kv_layout_from(const pybind11::dict& dict);

// Values are those of JSON. A name that is no str, or a value that JSON would change, raises InvalidArgument.
Metadata metadata_from(const pybind11::handle& object);
pybind11::dict metadata_to_python(const Metadata& metadata);

pybind11::bytes to_python(const Bytes& bytes);
// Return the bytes. Anything but bytes raises InvalidArgument, which names `where`.
Bytes bytes_from(const pybind11::handle& object, const std::string& where);

}  // namespace torpor
