// SPDX-License-Identifier: Apache-2.0
// RankMemory for Python: one object for each worker process.
#include <algorithm>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "allocator/host_device.h"
#include "allocator/prefault.h"
#include "bindings/bind_subjects.h"
#include "bindings/bind_values.h"
#include "bindings/dict_reader.h"
#include "bindings/module_files.h"
#include "bindings/process_events.h"
#include "bindings/rank_memory_options.h"
#include "engine/rank_service.h"
#include "offload/codec.h"

namespace py = pybind11;

namespace torpor {
namespace {

constexpr const char* kWhere = "RankMemory options";

std::unique_ptr<RankMemory> make_rank_memory(const py::dict& dict) {
  DictReader in(dict, kWhere);
  RankMemoryOptions options = rank_memory_options_from(in);
  options.huge_pages = huge_pages_while_fast();
  HostDeviceOptions device_options{.huge_pages = options.huge_pages};
  std::string device = "host";
  in.read_if_given("capacity_bytes", device_options.capacity_bytes);
  in.read_if_given("device", device);
  in.finish();
  if (device != "host") {
    raise(Error{.code = Code::kUnsupported,
                .what = fmt::format("the device \"{}\" is not supported by this version", device),
                .next_step = "use \"host\""});
  }
  return value_or_raise(without_lock([&]() -> Result<std::unique_ptr<RankMemory>> {
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<DeviceMemory> made, make_host_device(device_options));
    return RankMemory::create(std::move(made), module_files(), options);
  }));
}

}  // namespace

RankMemoryOptions rank_memory_options_from(DictReader& in) {
  RankMemoryOptions options;
  in.read_if_given("rank", options.rank);
  in.read_if_given("arena_budget_bytes", options.arena_budget_bytes);
  options.arena_prefault_bytes.reset();  // unless the option is given
  in.read_if_given("arena_prefault_bytes", options.arena_prefault_bytes);
  std::optional<int> threads;
  in.read_if_given("copy_threads", threads);
  options.threads = threads.value_or(0);
  in.read_if_given("keep_backup", options.keep_backup);
  in.read_if_given("retain_kv_bytes", options.retain_kv_bytes);
  std::optional<std::string> host_compression;
  in.read_if_given("host_compression", host_compression);
  options.host_compression = value_or_raise(CompressionOptions::of(host_compression, std::nullopt)).codec;
  std::optional<std::string> spill_dir;
  in.read_if_given("spill_dir", spill_dir);
  options.spill_dir = spill_dir.value_or("");
  in.read_if_given("encrypt", options.encrypt);
  in.read_if_given("deferred_job_bytes", options.deferred_job_bytes);
  in.read_if_given("deferred_thread", options.deferred_thread);
  std::optional<std::string> key_file;
  in.read_if_given("key_file", key_file);
  options.key = key_from(key_file);
  options.events = process_events();
  return options;
}

RankMemoryOptions rank_memory_options_from(const py::dict& dict) {
  DictReader in(dict, kWhere);
  RankMemoryOptions options = rank_memory_options_from(in);
  in.finish();
  return options;
}

// Every method waits for the order in progress, which may read or write files for long. So no method holds the
// interpreter's lock.
void bind_rank_memory(py::module_& module) {
  py::class_<RankMemory>(module, "RankMemory",
                         "The memory of one worker rank: regions by tag, and the controller's orders on them.",
                         py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&make_rank_memory), py::arg("options") = py::dict())
      .def(
          "allocate",
          [](RankMemory& self, const std::string& tag, const std::string& name, uint64_t size_bytes) {
            return value_or_raise(without_lock([&] { return self.allocate(tag, name, size_bytes); }));
          },
          py::arg("tag"), py::arg("name"), py::arg("size_bytes"),
          "A new zeroed region; returns its address, which stays valid for life.")
      .def(
          "free",
          [](RankMemory& self, uint64_t address) { value_or_raise(without_lock([&] { return self.free(address); })); },
          py::arg("address"))
      .def(
          "set_kv_layout",
          [](RankMemory& self, const std::string& tag, const py::dict& layout) {
            const KvLayout wanted = kv_layout_from(layout);
            value_or_raise(without_lock([&] { return self.set_kv_layout(tag, wanted); }));
          },
          py::arg("tag"), py::arg("layout"), "From now on `tag` holds KV blocks laid out like this.")
      .def(
          "mark_dirty", [](RankMemory& self, const std::string& tag) { without_lock([&] { self.mark_dirty(tag); }); },
          py::arg("tag"), "The owner changed bytes of this tag: a kept backup is no longer that of its content.")
      .def(
          "invalidate_digest",
          [](RankMemory& self, const std::string& tag) { without_lock([&] { self.invalidate_digest(tag); }); },
          py::arg("tag"), "Somebody may have changed bytes of this tag: they are read when they are wanted next.")
      .def(
          "start_prefault", [](RankMemory& self) { without_lock([&] { self.start_prefault(); }); },
          "Begin to prefault host memory for the first sleep, which waits for this on a GPU; else it has begun.")
      .def(
          "name_weights",
          [](RankMemory& self, const std::string& label, const std::vector<std::pair<uint64_t, uint64_t>>& places) {
            std::vector<DevicePiece> pieces;
            pieces.reserve(places.size());
            for (const auto& [address, bytes] : places) pieces.push_back({address, bytes});
            value_or_raise(without_lock([&] { return self.name_weights(label, std::move(pieces)); }));
          },
          py::arg("label"), py::arg("places"),
          "The weights are these bytes, address and size of each: fingerprints are of them, not of their whole tag.")
      .def(
          "load_tag",
          [](RankMemory& self, const std::string& tag, const std::string& directory, uint64_t generation,
             const py::bytes& id) {
            StoredTag stored{.tag = tag, .directory = directory, .generation = generation};
            const std::string_view given = id;
            if (given.size() != stored.id.size())
              raise(Error{.code = Code::kInvalidArgument, .what = "that is not the id of a checkpoint"});
            std::copy(given.begin(), given.end(), stored.id.begin());
            const LoadedTag loaded = value_or_raise(without_lock([&] { return self.load_tag(stored); }));
            py::dict out;
            out["bytes"] = loaded.bytes;
            out["digest"] = loaded.digest;
            return out;
          },
          py::arg("tag"), py::arg("directory"), py::arg("generation"), py::arg("id"),
          "Fills the regions of a tag from this checkpoint, each piece proved before it is copied.")
      .def(
          "proven_digest",
          [](RankMemory& self, const std::string& tag) {
            return without_lock([&] { return self.proven_digest(tag); });
          },
          py::arg("tag"), "Of what load_tag() filled: its digest; None if it was seen to be written since.")
      .def(
          "call",
          [](RankMemory& self, const py::bytes& order) {
            const Bytes payload = bytes_from(order, "an order");
            Bytes reply;
            {
              const py::gil_scoped_release released;
              reply = RankService(self).call(payload);
            }
            return to_python(reply);
          },
          py::arg("order"), "Carries out an order of the controller; a failure is in the reply.")
      .def(
          "states",
          [](const RankMemory& self) {
            py::dict states;
            for (const auto& [tag, state] : without_lock([&] { return self.states(); }))
              states[py::str(tag)] = std::string(name(state));
            return states;
          },
          "The state of each tag.");
  module.def(
      "order_name", [](const py::bytes& order) { return std::string(order_name(bytes_from(order, "an order"))); },
      py::arg("order"), "What an order of the controller to the ranks is called.");
}

}  // namespace torpor
