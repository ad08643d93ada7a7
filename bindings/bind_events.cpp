// SPDX-License-Identifier: Apache-2.0
// The events of this process, and an engine's requests as slots, for Python.
#include <unistd.h>

#include <cstdlib>
#include <mutex>

#include <fmt/core.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/text.h"
#include "bindings/bind_errors.h"
#include "bindings/bind_subjects.h"
#include "bindings/module_files.h"
#include "bindings/process_events.h"
#include "console/control_server.h"
#include "console/event_files.h"
#include "console/event_page.h"
#include "console/input_kind.h"
#include "kvcache/slot_table.h"

namespace py = pybind11;

namespace torpor {
namespace {

constexpr uint64_t kFrontEvents = 1 << 12;

// The ring is never unmapped: other threads may emit events until the process has ended.
struct ProcessEvents {
  // The first lock in the order. Its holder waits for a call through the socket, which may need the interpreter's lock.
  // So a thread that has the interpreter's lock never takes this one.
  Mutex serving;
  Mutex mutex;
  EventRing* ring TORPOR_GUARDED_BY(mutex) = nullptr;
  pid_t pid TORPOR_GUARDED_BY(mutex) = 0;
  bool blocks TORPOR_GUARDED_BY(mutex) = false;                       // each state of each block is an event
  console::ControlServer* server TORPOR_GUARDED_BY(mutex) = nullptr;  // of the ring
  console::OffloadAccess* offload TORPOR_GUARDED_BY(mutex) = nullptr;
  console::FrontAccess* front TORPOR_GUARDED_BY(mutex) = nullptr;
};
ProcessEvents& state() {
  static auto* const all = new ProcessEvents;
  return *all;
}

// Forget the ring: a process that ends normally leaves no last events.
void forget() {
  ProcessEvents& all = state();
  const MutexLock lock(all.mutex);
  if (all.ring == nullptr || all.pid != ::getpid()) return;
  (void)::unlink(all.ring->path().c_str());
  if (all.server != nullptr) (void)::unlink(all.server->path().c_str());
}

// A Python function that carries out a call to the front end. It is called in the socket's thread, begins the call and
// returns. It, or the code that goes on with the call, ends the call.
class Front final : public console::FrontAccess {
 public:
  explicit Front(py::function function) : function_(std::move(function)) {}
  void begin(const console::ControlMethod& method, const nlohmann::json& params,
             const std::shared_ptr<console::FrontCall>& call) override {
    const py::gil_scoped_acquire locked;
    try {
      function_(std::string(method.name), params.dump(), call);
    } catch (py::error_already_set& raised) {
      call->end(error_from(raised));
    }
  }

 private:
  py::function function_;
};

// Check a call as the socket does. Raises if it does not fit the table of the method.
void check_call(const std::string& name, const std::string& params) {
  const console::ControlMethod* const method = console::find_control_method(name);
  if (method == nullptr)
    raise({.code = Code::kNotFound,
           .what = fmt::format("there is no method \"{}\"", first_bytes(name, 64)),
           .next_step = "hello lists them"});
  value_or_raise(console::check_parameters(*method, nlohmann::json::parse(params, nullptr, false)));
}

// The requests of one scheduler, with the blocks of its device.
class Slots {
 public:
  Slots() : port_(process_events()), table_(port_) {}
  uint32_t create(std::string id, int64_t tokens) { return value_or_raise(table_.create(std::move(id), tokens)); }
  // If an engine that torpor does not know does something that the table does not allow, the slot is left as it was.
  void stage(uint32_t slot, int32_t blocks) { (void)table_.stage(slot, blocks); }
  // `blocks` blocks are loaded, into as many blocks of the device.
  void onboard(uint32_t slot, int32_t blocks) {
    if (table_.stage(slot, blocks)) (void)table_.onboard(slot, blocks);
  }
  void onboard_failed(uint32_t slot) { (void)table_.onboard_failed(slot); }
  void scheduled(uint32_t slot, int64_t computed, int64_t now, int64_t tokens, int32_t device_blocks) {
    (void)table_.scheduled(slot, computed, now, tokens, device_blocks);
  }
  void keys(uint32_t slot, const std::vector<py::bytes>& keys, size_t first, bool made) {
    const std::vector<std::string_view> views(keys.begin(), keys.end());
    (void)table_.keys(slot, views, first, made ? KeyOf::kMade : KeyOf::kPrompt);
  }
  bool may_admit(uint32_t slot) const { return table_.may_admit(slot); }
  void skip(uint32_t slot) { (void)table_.skip(slot); }
  void preempt(uint32_t slot) { (void)table_.preempt(slot); }
  void finish(uint32_t slot, bool busy) { (void)table_.finish(slot, busy); }
  void step(int32_t running, int32_t waiting, int64_t tokens, int64_t nanoseconds, uint32_t used, uint32_t free) {
    table_.step(running, waiting, tokens, nanoseconds);
    if (used == used_ && free == free_) return;
    used_ = used;
    free_ = free;
    (void)port_.record({.type = EventType::kTier, .a = both(used, used), .b = both(0, free)});
  }

 private:
  const EventPort port_;
  SlotTable table_;
  uint32_t used_ = 0;
  uint32_t free_ = 0;
};

}  // namespace

Result<std::string> begin_process_events(const std::string& directory, const std::string& role, int32_t rank,
                                         bool blocks) {
  ProcessEvents& all = state();
  const MutexLock lock(all.mutex);
  if (all.ring != nullptr && all.pid == ::getpid()) return all.ring->path();
  // A front end emits only events of its calls.
  const uint64_t events = role == console::kFrontRole ? kFrontEvents : EventRing::kDefaultEvents;
  TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<EventRing> ring,
                          console::begin_events(directory, role, rank, system_clock(), events));
  all.ring = ring.release();
  all.pid = ::getpid();
  all.blocks = blocks;
  all.server = nullptr;  // the parent's server does not run here
  static std::once_flag once;
  std::call_once(once, [] { (void)std::atexit(forget); });
  return all.ring->path();
}

Result<std::string> begin_process_control(bool operates, const std::string& records) {
  ProcessEvents& all = state();
  const MutexLock lock(all.mutex);
  if (all.ring == nullptr || all.pid != ::getpid()) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = "this process tells no events",
                 .next_step = "give it a directory for events"};
  }
  if (all.server == nullptr) {
    TORPOR_ASSIGN_OR_RETURN(
        std::unique_ptr<console::ControlServer> server,
        console::ControlServer::start(*all.ring, system_clock(),
                                      operates ? console::ControlRole::kOperate : console::ControlRole::kRead));
    all.server = server.release();  // never freed, as the ring
    all.server->serve(all.offload);
    all.server->serve(all.front);
    all.server->record_below(records);
  }
  return all.server->path();
}

void serve_front(console::FrontAccess* front) {
  ProcessEvents& all = state();
  const MutexLock serving(all.serving);
  console::ControlServer* server = nullptr;
  {
    const MutexLock lock(all.mutex);
    all.front = front;
    if (all.pid == ::getpid()) server = all.server;
  }
  if (server != nullptr) server->serve(front);
}

void serve_offload(console::OffloadAccess& offload) {
  ProcessEvents& all = state();
  const MutexLock serving(all.serving);
  console::ControlServer* server = nullptr;
  {
    const MutexLock lock(all.mutex);
    all.offload = &offload;
    if (all.pid == ::getpid()) server = all.server;
  }
  if (server != nullptr) server->serve(&offload);
}

void unserve_offload(const console::OffloadAccess* offload) {
  ProcessEvents& all = state();
  const MutexLock serving(all.serving);
  console::ControlServer* server = nullptr;
  {
    const MutexLock lock(all.mutex);
    if (offload != nullptr && all.offload != offload) return;
    all.offload = nullptr;
    if (all.pid == ::getpid()) server = all.server;
  }
  if (server != nullptr) server->serve(static_cast<console::OffloadAccess*>(nullptr));
}

EventPort process_events() {
  ProcessEvents& all = state();
  const MutexLock lock(all.mutex);
  return all.ring == nullptr ? EventPort() : EventPort(*all.ring, system_clock(), all.blocks);
}

void bind_events(py::module_& module) {
  module.def(
      "begin_events",
      [](const std::string& directory, const std::string& role, int32_t rank, bool blocks) {
        return value_or_raise(without_lock([&] { return begin_process_events(directory, role, rank, blocks); }));
      },
      py::arg("directory"), py::arg("role"), py::arg("rank") = 0, py::arg("blocks") = false,
      "From now on this process writes its events into a ring there; returns its path. A second call changes nothing. "
      "`blocks`: each state of each block, too.");
  module.def(
      "begin_control",
      [](bool operates, const std::string& records) {
        // After the interpreter has ended no thread gets its lock any more.
        py::module_::import("atexit").attr("register")(py::cpp_function(
            [] { (void)without_lock([] { return unserve_offload(nullptr), serve_front(nullptr), ok(); }); }));
        return value_or_raise(without_lock([&] { return begin_process_control(operates, records); }));
      },
      py::arg("operates"), py::arg("records") = "",
      "A socket beside the ring of this process; returns its path. `operates`: who connects may stop the engine. "
      "`records`: a directory, below which they may begin recordings.");
  py::class_<console::FrontCall, std::shared_ptr<console::FrontCall>>(
      module, "FrontCall", "A call of a console that this front end was asked for.")
      .def(
          "answer",
          [](console::FrontCall& call, const std::string& result) {
            call.end(nlohmann::ordered_json::parse(result, nullptr, false));
          },
          py::arg("result"), "JSON.")
      .def(
          "fail",
          [](console::FrontCall& call, const std::string& code, const std::string& what, const std::string& next_step,
             bool state_changed) {
            Error error{.what = what, .next_step = next_step, .state_changed = state_changed};
            error.code = Code::kInternal;
            for (int each = 0; each <= static_cast<int>(kLastCode); ++each) {
              if (name(static_cast<Code>(each)) == code) error.code = static_cast<Code>(each);
            }
            call.end(error);
          },
          py::arg("code"), py::arg("what"), py::arg("next_step") = "", py::arg("state_changed") = false);
  module.def(
      "serve_front",
      [](const py::function& begin) {
        auto* const front = new Front(begin);  // never freed, as its socket
        without_lock([&] { serve_front(front); });
      },
      py::arg("begin"),
      "What a console asks of this process as a front end: `begin(method, params, call)` is called in another thread, "
      "returns at once, and sees to it that the call is answered or fails. `params` is JSON.");
  module.def("check_call", &check_call, py::arg("method"), py::arg("params"),
             "Raises if a console has no such method, or it does not take these parameters (JSON).");
  module.def(
      "control_methods",
      [] {
        py::list all;
        for (const console::ControlMethod& method : console::control_methods()) {
          all.append(py::dict(py::arg("method") = std::string(method.name), py::arg("control") = method.operates,
                              py::arg("front") = method.place == console::ControlPlace::kFront));
        }
        return all;
      },
      "The table of docs/console.md. `control`: it changes something; `front`: only a front end can carry it out.");
  module.def(
      "console_page", [] { return console::live_page(); }, "A page for a browser that asks the server it comes from.");
  module.def(
      "record_input",
      [](const std::string& kind, const std::string& words) {
        constexpr size_t kMostWords = 8192;  // of a text (EventPort::text)
        int number = static_cast<int>(console::InputKind::kVllmEngine);
        while (number < console::kInputKinds && name(static_cast<console::InputKind>(number)) != kind) ++number;
        if (number == console::kInputKinds || words.size() > kMostWords) {
          raise({.code = Code::kInvalidArgument,
                 .what = fmt::format("an input \"{}\" of {} bytes", first_bytes(kind, 64), words.size()),
                 .next_step = "this is a mistake in the calling code"});
        }
        const EventPort port = process_events();
        const uint64_t input = port.record({.type = EventType::kInput, .from = static_cast<uint8_t>(number)});
        port.text(TextKind::kInput, 0, input, words);
      },
      py::arg("kind"), py::arg("words"), "An input of vLLM as an event with its words; at most 8 KiB.");
  module.def(
      "may_step", [] { return process_events().may_step(); },
      "Whether the engine of this process may take a step: nobody has stopped it to look at it.");
  module.def(
      "end_stops",
      [] {
        const EventPort port = process_events();
        port.operation_begins();
        port.operation_ended();
      },
      "Whoever has stopped this process's engine lets it go.");
  py::class_<Slots>(module, "Slots", "The requests of a scheduler, each with its state, told as events.")
      .def(py::init<>())
      .def("create", &Slots::create, py::arg("id"), py::arg("tokens"), "Its number.")
      .def("stage", &Slots::stage, py::arg("slot"), py::arg("blocks"),
           "They are kept for it below; 0: none is any more.")
      .def("onboard", &Slots::onboard, py::arg("slot"), py::arg("blocks"))
      .def("onboard_failed", &Slots::onboard_failed, py::arg("slot"))
      .def("scheduled", &Slots::scheduled, py::arg("slot"), py::arg("computed"), py::arg("now"), py::arg("tokens"),
           py::arg("device_blocks") = 0)
      .def("keys", &Slots::keys, py::arg("slot"), py::arg("keys"), py::arg("first"), py::arg("made"),
           "Of its blocks, from the one with the number `first` on; `made`: by itself, not of its prompt.")
      .def("may_admit", &Slots::may_admit, py::arg("slot"), "False: somebody holds it; ask again in the next step.")
      .def("skip", &Slots::skip, py::arg("slot"))
      .def("preempt", &Slots::preempt, py::arg("slot"))
      .def("finish", &Slots::finish, py::arg("slot"), py::arg("busy") = false,
           "`busy`: what was committed of it is still under way.")
      .def("step", &Slots::step, py::arg("running"), py::arg("waiting"), py::arg("tokens"), py::arg("nanoseconds"),
           py::arg("used_blocks"), py::arg("free_blocks"));
}

}  // namespace torpor
