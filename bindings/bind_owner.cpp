// SPDX-License-Identifier: Apache-2.0
// OwnerRecord, OwnerWatch and ReadAhead for Python: the owner of a server's directory, and its newest checkpoint.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bind_errors.h"
#include "bindings/bind_subjects.h"
#include "bindings/bind_values.h"
#include "bindings/dict_reader.h"
#include "bindings/module_files.h"
#include "checkpoint/read_ahead.h"
#include "engine/delivery/owner_processes.h"

namespace py = pybind11;

namespace torpor {
namespace {

std::chrono::nanoseconds time_of(double seconds) {
  constexpr double kMost = 1e9;  // a lifetime
  return std::chrono::nanoseconds(static_cast<int64_t>(std::min(std::max(seconds, 0.0), kMost) * 1e9));
}

const char* word_of(OwnerState state) {
  switch (state) {
    case OwnerState::kNone: return "none";
    case OwnerState::kServes: return "serves";
    case OwnerState::kEnded: return "ended";
    case OwnerState::kSilent: return "silent";
  }
  return "";
}

RecordRole role_from(const std::string& word) {
  if (word == "owner") return RecordRole::kOwner;
  if (word == "standby") return RecordRole::kStandby;
  DictReader::fail("role", "\"owner\" or \"standby\"");
}

}  // namespace

void bind_owner(py::module_& module) {
  py::class_<OwnerRecord>(module, "OwnerRecord",
                          "Records this process, and those that it has started, as the owner of a server's directory, "
                          "or as its standby.",
                          py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](const std::string& directory, double term_seconds, const std::string& address,
                       const std::string& role) {
             const RecordRole as = role_from(role);
             return value_or_raise(without_lock(
                 [&] { return OwnerRecord::begin(module_files(), directory, time_of(term_seconds), address, as); }));
           }),
           py::arg("directory"), py::arg("term_seconds"), py::arg("address") = "", py::arg("role") = "owner")
      .def(
          "beat", [](OwnerRecord& self) { value_or_raise(without_lock([&] { return self.beat(); })); },
          "Give a heartbeat: several times a term.");
  py::class_<OwnerWatch>(module, "OwnerWatch",
                         "Follows the owner of a server's directory, or its standby, from another process.",
                         py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](const std::string& directory, const std::string& role) {
             return std::make_unique<OwnerWatch>(module_files(), system_clock(), directory, role_from(role));
           }),
           py::arg("directory"), py::arg("role") = "owner")
      .def(
          "wait",
          [](OwnerWatch& self, double seconds) {
            const OwnerLook look = value_or_raise(without_lock([&] { return self.wait(time_of(seconds)); }));
            return py::dict(py::arg("state") = word_of(look.state), py::arg("pid") = look.pid,
                            py::arg("why") = look.why, py::arg("address") = look.address);
          },
          py::arg("seconds"),
          "Return the state of the one that is watched (\"none\", \"serves\", \"ended\", \"silent\"), its process, "
          "why, "
          "and its address: after these seconds if it serves, else at once.")
      .def(
          "end_owner",
          [](OwnerWatch& self, double seconds) {
            value_or_raise(without_lock([&] { return self.end_owner(time_of(seconds)); }));
          },
          py::arg("seconds"),
          "End what is left of the one that was seen (SIGKILL). TimedOut: something lives on after these seconds.");
  py::class_<ReadAhead>(module, "ReadAhead", "Reads the blocks of a directory's newest checkpoint into the page cache.",
                        py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](const std::string& directory, const std::optional<std::string>& key_file, uint64_t budget) {
             return std::make_unique<ReadAhead>(module_files(), directory, key_from(key_file), budget);
           }),
           py::arg("directory"), py::arg("key_file"), py::arg("budget_bytes"))
      .def(
          "follow",
          [](ReadAhead& self) {
            const ReadAheadReport report = value_or_raise(without_lock([&] { return self.follow(); }));
            return py::dict(py::arg("checkpoint") = report.checkpoint, py::arg("bytes") = report.bytes,
                            py::arg("ahead_bytes") = report.ahead_bytes, py::arg("read_bytes") = report.read_bytes);
          },
          "Read what the newest checkpoint has and no earlier call has read. NotFound: there is none. Aborted: stop() "
          "was called.")
      .def("stop", &ReadAhead::stop, "Let follow() return before its next read. Any thread may call it.");
}

}  // namespace torpor
