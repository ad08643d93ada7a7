// SPDX-License-Identifier: Apache-2.0
// A rank's memory for Python: its key, its KV layout, its ledger.
#include <pybind11/stl.h>

#include "bindings/bind_errors.h"
#include "bindings/bind_values.h"
#include "bindings/module_files.h"
#include "bindings/python_arrays.h"

namespace py = pybind11;

namespace torpor {

std::shared_ptr<const Key> key_from(const std::optional<std::string>& key_file) {
  if (!key_file) return nullptr;
  Result<Key> key = without_lock([&]() -> Result<Key> {
    TORPOR_RETURN_IF_ERROR(check_file_call("read", *key_file));
    return Key::read_file(*key_file);
  });
  return std::make_shared<const Key>(value_or_raise(std::move(key)));
}

KvLayout kv_layout_from(const py::dict& dict) {
  DictReader in(dict, "KV layout");
  KvLayout layout;
  in.read("num_blocks", layout.num_blocks);
  for (const py::handle item : sequence_from(in.take("tensors"), "KV layout tensors")) {
    DictReader tensor_in(item, "KV layout tensor");
    KvTensor tensor;
    tensor_in.read("address", tensor.address);
    tensor_in.read("layers", tensor.layers);
    tensor_in.read("layer_stride", tensor.layer_stride);
    tensor_in.read("block_stride", tensor.block_stride);
    tensor_in.read("block_bytes", tensor.block_bytes);
    tensor_in.finish();
    layout.tensors.push_back(tensor);
  }
  in.finish();
  return layout;
}

py::dict to_python(const RankLedger& ledger) {
  py::dict tags;
  for (const auto& [tag, entry] : ledger.tags) {
    py::dict out;
    out["state"] = entry.state;
    out["region_bytes"] = entry.region_bytes;
    out["physical_bytes"] = entry.physical_bytes;
    out["backup_host_bytes"] = entry.backup_host_bytes;
    out["backup_disk_bytes"] = entry.backup_disk_bytes;
    out["reused_bytes"] = entry.reused_bytes;
    tags[py::str(tag)] = out;
  }
  py::dict out;
  out["tags"] = tags;
  out["device_physical_bytes"] = ledger.device_physical_bytes;
  out["device_capacity_bytes"] = ledger.device_capacity_bytes;
  out["arena_held_bytes"] = ledger.arena_held_bytes;
  out["arena_used_bytes"] = ledger.arena_used_bytes;
  out["arena_budget_bytes"] = ledger.arena_budget_bytes;
  out["arena_unpinned_bytes"] = ledger.arena_unpinned_bytes;
  out["device_used_bytes"] = ledger.device_used_bytes;
  out["chunks_by_outcome"] = ledger.chunks_by_outcome;
  out["process_resident_bytes"] = ledger.process_resident_bytes;
  out["process_resident_region_bytes"] = ledger.process_resident_region_bytes;
  // The rest of the process: interpreter, libraries, the engine's own heap.
  const uint64_t explained = ledger.process_resident_region_bytes + ledger.arena_held_bytes;
  out["process_other_bytes"] =
      ledger.process_resident_bytes > explained ? ledger.process_resident_bytes - explained : 0;
  return out;
}

}  // namespace torpor
