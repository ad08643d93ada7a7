// torpor.memory for Python: regions by tag, without an engine.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include <fmt/core.h>

#include "allocator/cuda/cuda_device.h"
#include "allocator/host_device.h"
#include "base/log.h"
#include "bindings/bind_errors.h"
#include "bindings/bind_subjects.h"
#include "bindings/bind_values.h"
#include "bindings/module_files.h"
#include "bindings/process_events.h"
#include "bindings/process_memory.h"
#include "bindings/rank_memory_options.h"
#include "offload/codec.h"

namespace py = pybind11;

namespace torpor {
namespace {

using Tags = std::vector<std::string>;

std::string_view environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// None where it is not set.
Result<std::optional<uint64_t>> bytes_from_environment(const char* name) {
  const std::string_view text = environment(name);
  if (text.empty()) return std::optional<uint64_t>();
  uint64_t bytes = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), bytes);
  if (failed == std::errc() && end == text.data() + text.size()) return std::optional(bytes);
  return Error{.code = Code::kInvalidArgument,
               .what = fmt::format("{} is \"{}\"", name, text),
               .next_step = "give a number of bytes"};
}

Result<std::unique_ptr<DeviceMemory>> make_device(int ordinal) {
  TORPOR_ASSIGN(const std::optional<uint64_t> gather_below, bytes_from_environment("TORPOR_CUDA_GATHER_BELOW_BYTES"));
  if (environment("TORPOR_MEMORY_DEVICE") == "host") return make_host_device();
  return make_cuda_device({.ordinal = ordinal, .gather_below_bytes = gather_below.value_or(0)});
}

struct KeptBackups {
  std::atomic<bool> wanted = environment("TORPOR_KEEP_BACKUPS") == "1";
  std::atomic<bool> settled = false;  // memory was made
};

KeptBackups& kept_backups() {
  static KeptBackups kept;
  return kept;
}

Result<std::unique_ptr<RankMemory>> make_memory(int ordinal) {
  kept_backups().settled = true;
  TORPOR_ASSIGN(const std::optional<uint64_t> budget, bytes_from_environment("TORPOR_ARENA_BUDGET_BYTES"));
  TORPOR_ASSIGN(const std::optional<uint64_t> prefault, bytes_from_environment("TORPOR_ARENA_PREFAULT_BYTES"));
  TORPOR_ASSIGN(const std::optional<uint64_t> keep, bytes_from_environment("TORPOR_ARENA_KEEP_BYTES"));
  const std::string compression(environment("TORPOR_HOST_COMPRESSION"));
  TORPOR_ASSIGN(const CompressionOptions packing,
                CompressionOptions::of(compression.empty() ? "none" : compression, std::nullopt));
  TORPOR_ASSIGN(std::unique_ptr<DeviceMemory> device, make_device(ordinal));
  // An engine's ranks have their own; this is a program's.
  if (const std::string directory(environment("TORPOR_EVENTS_DIRECTORY")); !directory.empty()) {
    if (const auto begun = begin_process_events(directory, "memory", 0); !begun)
      log().warn("torpor.memory tells no events: {}", begun.error().to_string());
  }
  return RankMemory::create(std::move(device), module_files(),
                            {.rank = ordinal,
                             .arena_budget_bytes = budget.value_or(0),
                             .arena_prefault_bytes = prefault.value_or(0),
                             .arena_keep_bytes = keep,
                             .keep_backup = backups_kept(),
                             .host_compression = packing.codec,
                             .events = process_events()});
}

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

// Without Python's lock: copying takes long, and another thread may be at torch.
template <class Work>
py::dict moved(const Work& work) {
  Result<TagMove> move = [&] {
    const py::gil_scoped_release released;
    return work();
  }();
  return to_dict(value_or_raise(std::move(move)));
}

}  // namespace

MemorySaver& memory_saver() {
  static MemorySaver* const made = new MemorySaver(make_memory);
  return *made;
}

bool backups_kept() { return kept_backups().wanted; }

Status set_backups_kept(bool kept) {
  if (kept == backups_kept()) return ok();
  if (kept_backups().settled) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = "whether backups are kept cannot change any more: memory was allocated",
                 .next_step = "say it before the first region"};
  }
  kept_backups().wanted = kept;
  return ok();
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
      "memory_of",
      [](int device, const py::dict& dict) {
        RankMemoryOptions options = rank_memory_options_from(dict);
        const auto make = [&](int ordinal) -> Result<std::unique_ptr<RankMemory>> {
          TORPOR_ASSIGN(std::unique_ptr<DeviceMemory> made, make_device(ordinal));
          options.prefault_waits = made->kind() != "host";  // the engine captures CUDA graphs first
          return RankMemory::create(std::move(made), module_files(), options);
        };
        return value_or_raise(without_lock([&] { return memory_saver().memory_of(device, make); }));
      },
      py::arg("device"), py::arg("options"), py::return_value_policy::reference,
      "The RankMemory that torch's allocations on this device come from; made with these options if there is none "
      "yet. On a GPU it brings up no host memory before start_prefault().");
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
      [](const std::string& tag, bool keep) { MemorySaver::scopes().push_back({.tag = tag, .keep = keep}); },
      py::arg("tag"), py::arg("keep"));
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
    for (const auto& [device, ledger] : without_lock([] { return memory_saver().ledgers(); }))
      out[py::int_(device)] = to_python(ledger);
    return out;
  });
}

}  // namespace torpor
