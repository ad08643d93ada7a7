// SPDX-License-Identifier: Apache-2.0
// torpor.memory for Python: regions by tag, without an engine.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdlib>

#include "allocator/cuda/cuda_device.h"
#include "base/log.h"
#include "bindings/bind_errors.h"
#include "bindings/bind_subjects.h"
#include "bindings/bind_values.h"
#include "bindings/module_files.h"
#include "bindings/process_events.h"
#include "bindings/process_memory.h"
#include "bindings/rank_memory_options.h"

namespace py = pybind11;

namespace torpor {
namespace {

using Tags = std::vector<std::string>;

py::dict to_dict(const TagMove& move) {
  py::dict out;
  out["copied_bytes"] = move.copied_bytes;
  out["clean_bytes"] = move.clean_bytes;
  out["dropped_bytes"] = move.dropped_bytes;
  out["physical_bytes"] = move.physical_bytes;
  out["obstacle"] = move.obstacle;
  py::list seconds;
  for (const auto& [phase, taken] : move.seconds) seconds.append(py::make_tuple(phase, taken));
  out["seconds"] = seconds;
  return out;
}

// Run `work` without the interpreter's lock: copying takes long, and another thread may use torch.
template <class Work>
py::dict moved(const Work& work) {
  Result<TagMove> move = [&] {
    const py::gil_scoped_release released;
    return work();
  }();
  return to_dict(value_or_raise(std::move(move)));
}

}  // namespace

ProcessParts process_parts() {
  // The ranks of an engine have rings of their own; this one is of a program.
  const char* const directory = std::getenv("TORPOR_EVENTS_DIR");
  if (directory != nullptr && *directory != '\0') {
    if (const auto begun = begin_process_events(directory, "memory", 0); !begun)
      log().warn("torpor.memory publishes no events: {}", begun.error());
  }
  return {.file_system = module_files(), .events = process_events()};
}

void bind_memory(py::module_& module) {
  module.def("built_with_cuda", &built_with_cuda, "Whether cuda.h was there when this was built.");
  module.def(
      "memory_allocate",
      [](int device, uint64_t bytes) {
        return value_or_raise(without_lock([&] { return memory_saver().allocate(device, bytes); }));
      },
      py::arg("device"), py::arg("bytes"));
  module.def(
      "memory_free",
      [](int device, uint64_t address) {
        value_or_raise(without_lock([&] { return memory_saver().free(device, address); }));
      },
      py::arg("device"), py::arg("address"));
  module.def(
      "memory_trim",
      [](int device, const std::vector<uint64_t>& addresses) {
        return without_lock([&] { return memory_saver().trim(device, addresses); });
      },
      py::arg("device"), py::arg("addresses"),
      "Give the memory of allocations of which nothing is in use back to the device. Their addresses stay taken until "
      "they are freed. Return the bytes given back.");
  module.def(
      "memory_of",
      [](int device, const py::dict& dict) {
        RankMemoryOptions options = rank_memory_options_from(dict);
        bool made_here = false;
        const auto make = [&](int ordinal) -> Result<std::unique_ptr<RankMemory>> {
          made_here = true;
          TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<DeviceMemory> made, make_process_device(ordinal));
          options.prefault_waits = made->kind() != "host";  // the engine captures CUDA graphs first
          return RankMemory::create(std::move(made), module_files(), options);
        };
        return value_or_raise(without_lock([&]() -> Result<RankMemory*> {
          TORPOR_ASSIGN_OR_RETURN(RankMemory* const memory, memory_saver().memory_of(device, make));
          if (!made_here) TORPOR_RETURN_IF_ERROR(memory->apply(options));
          return memory;
        }));
      },
      py::arg("device"), py::arg("options"), py::return_value_policy::reference,
      "The RankMemory that torch's allocations on this device come from; made with these options if there is none yet, "
      "else they apply to it, but for copy_threads and the size of deferred jobs. On a GPU it prefaults no host memory "
      "before start_prefault().");
  module.def(
      "memory_saved",
      [](uint64_t address, uint64_t bytes) {
        auto out = py::reinterpret_steal<py::bytearray>(
            PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
        if (!out) throw py::error_already_set();
        auto* const begin = reinterpret_cast<std::byte*>(PyByteArray_AS_STRING(out.ptr()));
        value_or_raise(without_lock([&] { return memory_saver().read_saved(address, {begin, bytes}); }));
        return out;
      },
      py::arg("address"), py::arg("bytes"), "A copy of what is saved of memory that sleeps.");
  module.def(
      "memory_set_margin", [](uint64_t bytes) { without_lock([&] { memory_saver().set_margin(bytes); }); },
      py::arg("bytes"), "An allocation that would leave less free on its device fails.");
  module.def("memory_backups_kept", &backups_kept);
  module.def(
      "memory_keep_backups", [](bool kept) { value_or_raise(set_backups_kept(kept)); }, py::arg("kept"));
  module.def(
      "memory_begin",
      [](const std::string& tag, bool keep, bool engine) {
        const MemorySaver::Scope scope{.tag = tag, .keep = keep, .engine = engine};
        value_or_raise(without_lock([&] { return memory_saver().check_owner(scope); }));
        MemorySaver::scopes().push_back(scope);
      },
      py::arg("tag"), py::arg("keep"), py::arg("engine"));
  module.def(
      "memory_engine_tags", [] { return without_lock([] { return memory_saver().engine_tags(); }); },
      "The tags of an engine's scopes, with and without memory.");
  module.def("memory_end", [] {
    if (MemorySaver::scopes().empty()) {
      value_or_raise(Status(Error{.code = Code::kFailedPrecondition,
                                  .what = "no tag was begun on this thread",
                                  .next_step = "end a tag on the thread that began it"}));
    }
    MemorySaver::scopes().pop_back();
  });
  module.def(
      "memory_sleep",
      [](const Tags& tags, const std::optional<Tags>& keep, bool check) {
        return moved(
            [&] { return memory_saver().sleep(tags, keep, check ? CleanCheck::kDigest : CleanCheck::kTrust); });
      },
      py::arg("tags"), py::arg("keep"), py::arg("check"));
  module.def(
      "memory_wake", [](const Tags& tags) { return moved([&] { return memory_saver().wake(tags); }); },
      py::arg("tags"));
  module.def(
      "memory_plan_sleep",
      [](const Tags& tags, const std::optional<Tags>& keep) {
        return moved([&] { return memory_saver().plan_sleep(tags, keep); });
      },
      py::arg("tags"), py::arg("keep"));
  module.def(
      "memory_plan_wake", [](const Tags& tags) { return moved([&] { return memory_saver().plan_wake(tags); }); },
      py::arg("tags"));
  module.def(
      "memory_mark_dirty", [](const Tags& tags) { without_lock([&] { memory_saver().mark_dirty(tags); }); },
      py::arg("tags"));
  module.def("memory_ledgers", [] {
    py::dict out;
    for (const auto& [device, ledger] : value_or_raise(without_lock([] { return memory_saver().ledgers(); })))
      out[py::int_(device)] = to_python(ledger);
    return out;
  });
}

}  // namespace torpor
