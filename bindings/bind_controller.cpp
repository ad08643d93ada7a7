// SPDX-License-Identifier: Apache-2.0
// SleepController for Python, with EngineHooks that call a Python object.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/shared_folder.h"
#include "bindings/bind_subjects.h"
#include "bindings/bind_values.h"
#include "bindings/checkpoint_options.h"
#include "bindings/dict_reader.h"
#include "bindings/module_files.h"
#include "bindings/process_events.h"
#include "bindings/python_hooks.h"
#include "engine/delivery/delivery_log_file.h"
#include "engine/delivery/roll_forward.h"
#include "engine/phases.h"
#include "engine/sleep_controller.h"

namespace py = pybind11;

namespace torpor {
namespace {

// The hooks, and the controller that refers to them.
struct BoundController {
  PythonHooks hooks;
  UnsteppedClock clock{system_clock()};  // the age of checkpoints ignores changes of the machine's clock
  SleepController controller;

  BoundController(py::object object, SleepControllerOptions options)
      : hooks(std::move(object)), controller(hooks, module_files(), clock, std::move(options), process_events()) {}
  ~BoundController() {
    const py::gil_scoped_release others_go_on;  // background work may wait for the interpreter's lock
    controller.cancel_checkpoint();
  }
  BoundController(const BoundController&) = delete;
  BoundController& operator=(const BoundController&) = delete;
};

bool one_of(const std::string& where, const std::string& text, const char* yes, const char* no) {
  if (text != yes && text != no) {
    raise(Error{.code = Code::kInvalidArgument,
                .what = fmt::format("{} is \"{}\"", where, text),
                .next_step = fmt::format("use \"{}\" or \"{}\"", no, yes)});
  }
  return text == yes;
}

std::unique_ptr<BoundController> make_controller(py::object hooks, const py::dict& dict) {
  DictReader in(dict, "SleepController options");
  SleepControllerOptions options;
  std::optional<std::string> directory;
  in.read_if_given("directory", directory);
  in.read_if_given("kv_budget_bytes", options.kv_budget_bytes);
  options.checkpoints = checkpoint_options_from(in);
  std::string weights_check = "writes";
  in.read_if_given("weights_check", weights_check);
  in.finish();
  value_or_raise(options.checkpoints.validate());
  options.directory = directory.value_or("");
  options.always_read_weights = one_of("weights_check", weights_check, "digest", "writes");
  return std::make_unique<BoundController>(std::move(hooks), std::move(options));
}

// (rank, size)
DataParallel data_parallel_from(const py::handle& object) {
  std::pair<int, int> place;
  DictReader::cast(object, "data_parallel", place);
  return {.rank = place.first, .size = place.second};
}

// None: all tags. An empty list does not mean all, as code may have computed it.
std::vector<std::string> tags_from(const std::optional<std::vector<std::string>>& tags) {
  if (tags && tags->empty()) {
    raise(Error{.code = Code::kInvalidArgument,
                .what = "tags is an empty list",
                .next_step = "name some, or leave it out for all"});
  }
  return tags.value_or(std::vector<std::string>{});
}

SleepOptions sleep_options_from(const py::dict& dict) {
  DictReader in(dict, "sleep");
  SleepOptions options;
  std::string to = "host";
  std::string on_save_error = "abort";
  std::optional<std::string> weights;
  std::optional<std::vector<std::string>> tags;
  in.read_if_given("level", options.level);
  in.read_if_given("preserve_state", options.preserve_state);
  in.read_if_given("to", to);
  in.read_if_given("in_flight", options.in_flight);
  in.read_if_given("on_save_error", on_save_error);
  in.read_if_given("tags", tags);
  in.read_if_given("timeout", options.timeout_seconds);
  in.read_if_given("weights", weights);
  in.read_if_given("progress", options.progress);
  in.read_if_given("swap_out_to", options.swap_out_to);
  if (in.has("metadata")) options.metadata = metadata_from(in.take("metadata"));
  if (in.has("data_parallel")) options.data_parallel = data_parallel_from(in.take("data_parallel"));
  if (in.has("outputs")) options.outputs = value_from(in.take("outputs"));
  in.finish();
  options.to_disk = one_of("to", to, "disk", "host");
  options.discard_on_save_error = one_of("on_save_error", on_save_error, "discard", "abort");
  if (weights) options.weights = one_of("weights", *weights, "store", "reload") ? Weights::kStore : Weights::kReload;
  options.tags = tags_from(tags);
  return options;
}

OldKv old_kv_from(const std::optional<std::string>& kv) {
  if (!kv) return OldKv::kUnsaid;
  if (*kv == "recompute") return OldKv::kRecompute;
  if (*kv == "keep") return OldKv::kKeep;
  if (*kv != "abort") {
    raise(Error{.code = Code::kInvalidArgument,
                .what = fmt::format("kv is \"{}\"", *kv),
                .next_step = "use \"recompute\", \"keep\" or \"abort\", or leave it out if no weights were loaded"});
  }
  return OldKv::kAbort;
}

// `rolled` outlives the wake, which writes into it how it caught up with a server's answers.
WakeOptions wake_options_from(const py::dict& dict, RolledForward& rolled) {
  DictReader in(dict, "wake_up");
  WakeOptions options;
  std::string on_restore_error = "abort";
  std::optional<std::vector<std::string>> tags;
  std::optional<std::string> from_checkpoint;
  std::optional<std::string> kv;
  in.read_if_given("tags", tags);
  in.read_if_given("from_checkpoint", from_checkpoint);
  in.read_if_given("on_restore_error", on_restore_error);
  in.read_if_given("kv", kv);
  in.read_if_given("hold", options.hold);
  in.read_if_given("early", options.early);
  in.read_if_given("others_wait", options.others_wait);
  in.read_if_given("progress", options.progress);
  in.read_if_given("swap_in_from", options.swap_in_from);
  bool answers_may_extend = true;
  in.read_if_given("answers_may_extend", answers_may_extend);
  if (in.has("answers")) {
    const Bytes packed = bytes_from(in.take("answers"), "wake_up.answers");
    options.catch_up =
        catch_up_with(value_or_raise(unpack_answers(std::as_bytes(std::span(packed)))), rolled, answers_may_extend);
  }
  in.finish();
  options.tags = tags_from(tags);
  options.from_checkpoint = from_checkpoint.value_or("");
  options.old_kv = old_kv_from(kv);
  options.discard_on_restore_error = one_of("on_restore_error", on_restore_error, "discard", "abort");
  return options;
}

DeferredWait deferred_wait_from(const std::string& wait) {
  if (wait == "none") return DeferredWait::kNone;
  if (wait == "some") return DeferredWait::kSome;
  if (wait != "all") {
    raise(Error{.code = Code::kInvalidArgument,
                .what = fmt::format("continue_wake.wait is \"{}\"", wait),
                .next_step = "use \"none\", \"some\" or \"all\""});
  }
  return DeferredWait::kAll;
}

py::list to_python(const std::vector<RankLedger>& ledgers) {
  py::list list;
  for (const RankLedger& ledger : ledgers) list.append(to_python(ledger));
  return list;
}

py::dict to_python(const SleepReport& report, const RolledForward& rolled = {}) {
  py::dict out;
  out["changed"] = report.changed;
  if (report.held) out["held"] = true;
  out["fully_awake"] = report.fully_awake;
  out["note"] = report.note;
  out["level"] = report.level;
  out["preserve_state"] = report.preserve_state;
  out["to"] = report.to;
  out["checkpoint"] = report.checkpoint;
  out["checkpoint_bytes"] = report.checkpoint_bytes;
  out["checkpoint_parts"] = report.checkpoint_parts;
  out["requests"] = report.requests;
  out["saved_bytes"] = report.saved_bytes;
  out["compacted_bytes"] = report.compacted_bytes;
  out["reused_bytes"] = report.reused_bytes;
  out["host_bytes"] = report.host_bytes;
  out["disk_bytes"] = report.disk_bytes;
  out["freed_bytes"] = report.freed_bytes;
  out["restored_bytes"] = report.restored_bytes;
  out["deferred_blocks"] = report.deferred_blocks;
  out["deferred_bytes"] = report.deferred_bytes;
  out["unread_bytes"] = report.unread_bytes;
  out["kept_blocks"] = report.kept_blocks;
  out["dropped_blocks"] = report.dropped_blocks;
  out["reload"] = report.reload;
  py::list failed;
  for (const FailedRequest& request : report.failed_requests) {
    py::dict item;
    item["id"] = request.id;
    item["error"] = request.error;
    failed.append(item);
  }
  out["failed_requests"] = failed;
  out["replayed"] = py::dict(py::arg("extended") = rolled.extended, py::arg("added") = rolled.added,
                             py::arg("dropped") = rolled.dropped);
  out["outputs"] = torpor::to_python(report.outputs);
  out["metadata"] = metadata_to_python(report.metadata);
  py::list phases;
  for (const Phase& phase : report.phases) {
    py::dict item;
    item["name"] = phase.name;
    item["seconds"] = phase.seconds;
    item["bytes"] = phase.bytes;
    item["after"] = phase.after;
    phases.append(item);
  }
  out["phases"] = phases;
  out["seconds"] = report.seconds;
  out["ledgers"] = to_python(report.ledgers);
  return out;
}

}  // namespace

void bind_controller(py::module_& module) {
  py::class_<ProgressFile, std::shared_ptr<ProgressFile>>(
      module, "ProgressFile", "How far a sleep or wake is, in a file that its processes are given as `progress`.")
      .def(py::init([](const std::string& path) { return value_or_raise(ProgressFile::create(path)); }),
           py::arg("path"))
      .def("read",
           [](const ProgressFile& self) {
             const Progress now = self.read();
             const uint8_t phase = self.phase();
             py::dict out;
             out["phase"] = phase > 0 && phase < kPhaseNames.size() ? kPhaseNames[phase] : std::string_view();
             out["bytes_done"] = now.bytes_done;
             out["bytes_total"] = now.bytes_total;
             out["seconds"] = now.seconds;
             out["seconds_left"] = now.seconds_left();
             return out;
           })
      .def("cancel", &ProgressFile::cancel, "The operation is undone, and raises Aborted.");
  py::class_<SharedFolder>(module, "SharedFolder",
                           "A folder for files that processes map. What killed ones left goes when one is made.")
      .def(py::init([] { return value_or_raise(SharedFolder::make()); }))
      .def_property_readonly("path", &SharedFolder::path)
      .def("remove", &SharedFolder::remove, "With all that is in it.")
      .def_static(
          "remove_left", [] { SharedFolder::remove_left(); }, "What killed processes of this user left.");
  py::class_<SwapChannel>(module, "SwapChannel", "Device memory that one engine gives and another takes, in a file.")
      .def(py::init([](const std::string& path, double peer_timeout) {
             return value_or_raise(SwapChannel::create(path, SwapChannel::Seconds(peer_timeout)));
           }),
           py::arg("path"), py::arg("peer_timeout") = SwapChannel::kDefaultPeerTimeout.count(),
           "A half that has no heartbeat of the other for so many seconds gives the swap up.")
      .def(
          "stop",
          [](SwapChannel& self, const std::string& side) {
            const bool out = one_of("stop.side", side, "out", "in");
            (void)self.stop(out ? SwapChannel::Side::kSwapsOut : SwapChannel::Side::kSwapsIn);
          },
          py::arg("side"), "One of the two cannot: the other is told.")
      .def(
          "has_joined",
          [](const SwapChannel& self, const std::string& side) {
            return self.has_joined(one_of("has_joined.side", side, "out", "in") ? SwapChannel::Side::kSwapsOut
                                                                                : SwapChannel::Side::kSwapsIn);
          },
          py::arg("side"), "An engine has begun with this half. It may have failed since.")
      .def(
          "stopped_by",
          [](const SwapChannel& self) {
            const std::optional<SwapChannel::Side> side = self.stopped_by();
            if (!side) return "";
            return *side == SwapChannel::Side::kSwapsOut ? "out" : "in";
          },
          "\"out\" or \"in\": the side that failed first; or \"\".");
  py::class_<BoundController>(module, "SleepController",
                              "Sleep and wake of one engine; lives where its scheduler lives.")
      .def(py::init(&make_controller), py::arg("hooks"), py::arg("options") = py::dict())
      .def(
          "sleep",
          [](BoundController& self, const py::dict& dict) {
            const SleepOptions options = sleep_options_from(dict);
            return to_python(value_or_raise(without_lock([&] { return self.controller.sleep(options); })));
          },
          py::arg("options") = py::dict())
      .def(
          "wake_up",
          [](BoundController& self, const py::dict& dict) {
            RolledForward rolled;
            const WakeOptions options = wake_options_from(dict, rolled);
            const SleepReport report = value_or_raise(without_lock([&] { return self.controller.wake_up(options); }));
            return to_python(report, rolled);
          },
          py::arg("options") = py::dict())
      .def(
          "continue_wake",
          [](BoundController& self, const std::string& wait, const std::vector<int32_t>& wanted,
             const std::vector<int32_t>& skipped) {
            const DeferredWait how = deferred_wait_from(wait);
            const DeferredWishes wishes{.wanted = wanted, .skipped = skipped};
            const WakeProgress progress =
                value_or_raise(without_lock([&] { return self.controller.continue_wake(how, wishes); }));
            return py::dict(py::arg("arrived") = progress.arrived, py::arg("unreadable") = progress.lost,
                            py::arg("skipped") = progress.skipped, py::arg("pending") = progress.left,
                            py::arg("recomputed") = progress.recomputed);
          },
          py::arg("wait") = "none", py::arg("wanted") = std::vector<int32_t>(),
          py::arg("skipped") = std::vector<int32_t>(),
          "After a post-copy wake, between two steps: which blocks have arrived. They are released to the engine.")
      .def(
          "checkpoint",
          [](BoundController& self, const py::handle& outputs, const std::pair<int, int>& place,
             const std::string& progress, const py::dict& given) {
            const Value value = value_from(outputs);
            const Metadata metadata = metadata_from(given);
            const DataParallel of = {.rank = place.first, .size = place.second};
            return to_python(value_or_raise(
                without_lock([&] { return self.controller.checkpoint(value, of, progress, metadata); })));
          },
          py::arg("outputs"), py::arg("data_parallel") = std::pair(0, 1), py::arg("progress") = "",
          py::arg("metadata") = py::dict(),
          "A checkpoint of an engine that serves on; `outputs` is the front end's part.")
      .def(
          "checkpoint_to_wake",
          [](BoundController& self) {
            return value_or_raise(without_lock([&] { return self.controller.checkpoint_to_wake(); }));
          },
          "The directory of checkpoints, if it has one and this engine has had neither a step nor a request; else "
          "\"\".")
      .def(
          "begin_checkpoint",
          [](BoundController& self, const std::string& progress, const py::dict& given) {
            const Metadata metadata = metadata_from(given);
            value_or_raise(without_lock([&] { return self.controller.begin_checkpoint(progress, metadata); }));
          },
          py::arg("progress") = "", py::arg("metadata") = py::dict(),
          "One that is written while the engine serves: continued until it is ready, taken, continued until it has "
          "ended.")
      .def("continue_checkpoint",
           [](BoundController& self) {
             constexpr std::array<const char*, 5> kStages = {"none", "copying", "ready", "writing", "ended"};
             const CheckpointStage stage =
                 value_or_raise(without_lock([&] { return self.controller.continue_checkpoint(); }));
             return kStages.at(static_cast<size_t>(stage));
           })
      .def(
          "take_checkpoint",
          [](BoundController& self, const py::handle& outputs) {
            const Value value = value_from(outputs);
            value_or_raise(without_lock([&] { return self.controller.take_checkpoint(value); }));
          },
          py::arg("outputs"), "The engine stands still, and goes on; later tokens are not in it.")
      .def("end_checkpoint",
           [](BoundController& self) {
             return to_python(value_or_raise(without_lock([&] { return self.controller.end_checkpoint(); })));
           })
      .def("cancel_checkpoint",
           [](BoundController& self) {
             const py::gil_scoped_release released;
             self.controller.cancel_checkpoint();
           })
      .def(
          "end_sleep",
          [](BoundController& self, bool keep) {
            return to_python(value_or_raise(without_lock([&] { return self.controller.end_sleep(keep); })));
          },
          py::arg("keep"), "After a sleep or checkpoint that is held: carries it out, or undoes it.")
      .def(
          "fingerprint",
          [](BoundController& self) {
            return value_or_raise(without_lock([&] { return self.controller.fingerprint(); }));
          },
          "All that must be equal for tokens to be equal, by name.")
      .def(
          "end_hold",
          [](BoundController& self, bool keep) {
            value_or_raise(without_lock([&] { return self.controller.end_hold(keep); }));
          },
          py::arg("keep"), "After wake_up with hold: lets the engine run, or throws away what was restored.")
      .def(
          "plan_sleep",
          [](BoundController& self, const py::dict& dict) {
            const SleepOptions options = sleep_options_from(dict);
            const SleepPlan plan = value_or_raise(without_lock([&] { return self.controller.plan_sleep(options); }));
            py::dict out;
            out["save_bytes"] = plan.save_bytes;
            out["free_bytes"] = plan.free_bytes;
            out["reused_bytes"] = plan.reused_bytes;
            out["host_bytes"] = plan.host_bytes;
            out["disk_bytes"] = plan.disk_bytes;
            out["requests"] = plan.requests;
            out["kept_blocks"] = plan.kept_blocks;
            out["dropped_blocks"] = plan.dropped_blocks;
            out["problems"] = plan.problems;
            return out;
          },
          py::arg("options") = py::dict())
      .def(
          "check_directory",
          [](BoundController& self) {
            value_or_raise(without_lock([&] { return self.controller.check_directory(); }));
          },
          "Raises where the host of a rank does not see the directory of checkpoints.")
      .def("ledger",
           [](BoundController& self) {
             return to_python(value_or_raise(without_lock([&] { return self.controller.ledgers(); })));
           })
      .def("state",
           [](const BoundController& self) {
             const ControllerState state = self.controller.state();
             py::dict out;
             out["engine"] = state.engine;
             out["tags"] = state.tags;
             out["level"] = state.level;
             out["checkpoint"] = state.checkpoint;
             return out;
           })
      .def("is_sleeping", [](const BoundController& self) { return self.controller.is_sleeping(); });
}

}  // namespace torpor
