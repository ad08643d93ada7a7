// SPDX-License-Identifier: Apache-2.0
// Checkpoints for Python: reading one, and the encoding of its values.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bind_subjects.h"
#include "bindings/bind_values.h"
#include "bindings/dict_reader.h"
#include "bindings/module_files.h"
#include "checkpoint/checkpoint_manager.h"
#include "checkpoint/checkpoint_set.h"
#include "checkpoint/image_section.h"
#include "checkpoint/state_sections.h"

namespace py = pybind11;

namespace torpor {

void bind_checkpoint(py::module_& module) {
  py::class_<EngineCheckpoint>(module, "EngineCheckpoint",
                               "All state of an engine but the bytes of its memory, as values.")
      .def_static(
          "from_dict", [](const py::dict& values) { return engine_checkpoint_from(values); }, py::arg("values"),
          "The reverse of to_dict(). Raises InvalidArgument, which names the value that is missing or of another type.")
      .def(
          "to_dict", [](const EngineCheckpoint& self) { return to_python(self); },
          "Plain values, by the names of the structs: fingerprint, scheduler, kv, workers, outputs, metadata.")
      .def(
          "validate", [](const EngineCheckpoint& self) { value_or_raise(self.state.validate()); },
          "Raises for the first contradiction.")
      .def(
          "encode",
          [](const EngineCheckpoint& self) {
            std::vector<Section> sections;
            {
              const py::gil_scoped_release released;
              sections = encode(self);
            }
            py::list list;
            for (const Section& section : sections) list.append(py::make_tuple(section.name, to_python(section.bytes)));
            return list;
          },
          "The sections of a checkpoint, uncompressed: a list of (name, bytes). The fingerprint is not among them.")
      .def_static(
          "decode",
          [](const py::list& list, const py::dict& fingerprint) {
            std::vector<Section> sections;
            for (const py::handle item : list) {
              const auto pair = py::reinterpret_borrow<py::sequence>(item);
              sections.push_back({pair[0].cast<std::string>(), bytes_from(pair[1], "a section")});
            }
            Result<EngineCheckpoint> decoded = [&] {
              const py::gil_scoped_release released;
              return decode(sections);
            }();
            EngineCheckpoint checkpoint = value_or_raise(std::move(decoded));
            checkpoint.fingerprint = fingerprint_from(fingerprint);
            return checkpoint;
          },
          py::arg("sections"), py::arg("fingerprint") = py::dict(),
          "The reverse of encode(). Raises Damaged or Incompatible, which names the section.")
      .def("__eq__", [](const EngineCheckpoint& a, const EngineCheckpoint& b) { return a == b; });

  module.def(
      "check_metadata",
      [](const py::dict& metadata, bool to_disk) { value_or_raise(check_metadata(metadata_from(metadata), to_disk)); },
      py::arg("metadata"), py::arg("to_disk"),
      "Raises InvalidArgument for names that are no str, values that are none of JSON, what is beyond the limits of "
      "metadata, or where nothing is written to disk.");
  module.def(
      "list_checkpoints",
      [](const std::string& directory, const std::optional<std::string>& key_file) {
        CheckpointManagerOptions options;
        options.key = key_from(key_file);
        Result<std::vector<CheckpointInfo>> found = without_lock([&]() -> Result<std::vector<CheckpointInfo>> {
          TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointManager> manager,
                                  CheckpointManager::open(module_files(), directory, std::move(options)));
          return manager->list();
        });
        py::list list;
        for (const CheckpointInfo& info : value_or_raise(std::move(found))) {
          py::dict item;
          item["name"] = info.name;
          item["path"] = info.path;
          item["readable"] = info.readable;
          item["problem"] = info.readable ? "" : info.problem.to_string();
          item["created"] = info.manifest.created_unix_seconds;
          item["bytes"] = info.bytes;
          item["metadata"] = metadata_to_python(info.metadata);
          item["woken"] = info.woken;
          list.append(item);
        }
        return list;
      },
      py::arg("directory"), py::arg("key_file") = py::none(),
      "The committed checkpoints of a directory, oldest first.");
  module.def(
      "read_checkpoint",
      [](const std::string& path, const std::optional<std::string>& key_file) {
        const std::shared_ptr<const Key> key = key_from(key_file);
        return value_or_raise(without_lock([&]() -> Result<EngineCheckpoint> {
          TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint, open_checkpoint(module_files(), path, key));
          return checkpoint.read_state();
        }));
      },
      py::arg("path"), py::arg("key_file") = py::none(),
      "The verified state of a checkpoint, or of the latest one of a directory.");
  module.def(
      "describe_checkpoint",
      [](const std::string& path, int data_parallel_rank, const std::optional<std::string>& key_file) {
        const std::shared_ptr<const Key> key = key_from(key_file);
        Manifest manifest;
        std::string directory;
        const EngineCheckpoint state = value_or_raise(without_lock([&]() -> Result<EngineCheckpoint> {
          TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                                  open_checkpoint_of(module_files(), path, data_parallel_rank, key));
          TORPOR_RETURN_IF_ERROR(check_is_whole_engine(checkpoint.manifest(), checkpoint.path()));
          manifest = checkpoint.manifest();
          directory = checkpoint.path();
          return checkpoint.read_state();
        }));
        py::dict out;
        out["path"] = directory;
        out["generation"] = manifest.generation;
        out["id"] = py::bytes(reinterpret_cast<const char*>(manifest.id.data()), manifest.id.size());
        py::dict fingerprint;
        for (const auto& [field, value] : manifest.fingerprint) fingerprint[py::str(field)] = value;
        out["fingerprint"] = fingerprint;
        py::list workers;
        for (const WorkerSnapshot& worker : state.state.workers) workers.append(to_python(worker.engine));
        out["workers"] = workers;
        return out;
      },
      py::arg("path"), py::arg("data_parallel_rank") = 0, py::arg("key_file") = py::none(),
      "Which checkpoint is there, of which engine, and what its adapter keeps of each worker.");
}

}  // namespace torpor
