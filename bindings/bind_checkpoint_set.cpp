// SPDX-License-Identifier: Apache-2.0
// Sets of checkpoints for Python: the front end of several engines writes and reads them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bind_subjects.h"
#include "bindings/bind_values.h"
#include "bindings/checkpoint_options.h"
#include "bindings/dict_reader.h"
#include "bindings/module_files.h"
#include "checkpoint/checkpoint_set.h"

namespace py = pybind11;

namespace torpor {
namespace {

// Holds the lock of its directory for as long as it lives.
struct BoundSet {
  std::optional<PendingCheckpoint> pending;
  std::string path;

  explicit BoundSet(CommittedSet set) : pending(std::move(set.pending)), path(std::move(set.path)) {}
  BoundSet(const BoundSet&) = delete;
  BoundSet& operator=(const BoundSet&) = delete;
  ~BoundSet() {
    const py::gil_scoped_release released;
    pending.reset();
  }
  // Either call ends it.
  void keep() {
    if (!pending) return;
    pending->retire_older();
    pending.reset();
  }
  Status withdraw() {
    if (!pending) return ok();
    TORPOR_RETURN_IF_ERROR(pending->withdraw());
    pending.reset();
    return ok();
  }
};

}  // namespace

void bind_checkpoint_set(py::module_& module) {
  module.def("rank_directory", &rank_directory, py::arg("directory"), py::arg("rank"), py::arg("ranks"),
             "Where the engine of this data parallel rank writes its checkpoints.");
  py::class_<BoundSet>(module, "CheckpointSet", "A committed set of checkpoints, until it is kept or withdrawn.")
      .def_readonly("path", &BoundSet::path)
      .def(
          "keep", [](BoundSet& self) { without_lock([&] { self.keep(); }); }, "It stays; older ones may go.")
      .def(
          "withdraw", [](BoundSet& self) { value_or_raise(without_lock([&] { return self.withdraw(); })); },
          "It goes again.");
  module.def(
      "commit_set",
      [](const std::string& directory, const std::vector<std::string>& paths, const py::dict& dict) {
        DictReader in(dict, "commit_set options");
        CheckpointManagerOptions options = checkpoint_options_from(in);
        in.finish();
        return std::make_unique<BoundSet>(value_or_raise(
            without_lock([&] { return commit_set(module_files(), directory, std::move(options), paths); })));
      },
      py::arg("directory"), py::arg("paths"), py::arg("options") = py::dict(),
      "Makes the checkpoints of all data parallel ranks, by rank, one: a CheckpointSet.");
  module.def(
      "open_set",
      [](const std::string& path, const std::optional<std::string>& key_file) {
        const std::shared_ptr<const Key> key = key_from(key_file);
        const CheckpointSet set = value_or_raise(without_lock([&] { return open_set(module_files(), path, key); }));
        py::dict out;
        out["path"] = set.path;
        out["directory"] = set.directory;
        out["generation"] = set.generation;
        out["members"] = set.members;
        return out;
      },
      py::arg("path"), py::arg("key_file") = py::none(),
      "The checkpoints of a set, by rank; all of them are there, and those that were written together.");
  module.def(
      "set_woken_from",
      [](const std::string& directory, uint64_t generation, const py::dict& dict) {
        DictReader in(dict, "set_woken_from options");
        CheckpointManagerOptions options = checkpoint_options_from(in);
        in.finish();
        value_or_raise(without_lock([&]() -> Status {
          TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointManager> manager,
                                  CheckpointManager::open(module_files(), directory, std::move(options)));
          return manager->woken_from(generation);
        }));
      },
      py::arg("directory"), py::arg("generation"), py::arg("options") = py::dict(),
      "Its engines run: older sets may go.");
}

}  // namespace torpor
