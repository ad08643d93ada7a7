// Events of this process, and the requests of an engine as their states, for Python.
#include <unistd.h>

#include <cstdlib>
#include <mutex>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/clock.h"
#include "base/mutex.h"
#include "bindings/bind_errors.h"
#include "bindings/bind_subjects.h"
#include "bindings/module_files.h"
#include "bindings/process_events.h"
#include "console/control_server.h"
#include "console/event_files.h"
#include "kvcache/slot_table.h"

namespace py = pybind11;

namespace torpor {
namespace {

// Whoever tells events may still do so while the process ends: the ring is never unmapped.
struct ProcessEvents {
  // First. While it is held a call through the socket is waited for, that may want the interpreter's lock: nobody who
  // has that lock takes this one.
  Mutex serving;
  Mutex mutex;
  EventRing* ring TORPOR_GUARDED_BY(mutex) = nullptr;
  pid_t pid TORPOR_GUARDED_BY(mutex) = 0;
  console::ControlServer* server TORPOR_GUARDED_BY(mutex) = nullptr;  // of the ring
  console::OffloadAccess* offload TORPOR_GUARDED_BY(mutex) = nullptr;
};
ProcessEvents& state() {
  static auto* const all = new ProcessEvents;
  return *all;
}

// A process that ends by itself leaves no last words.
void forget() {
  ProcessEvents& all = state();
  const MutexLock lock(all.mutex);
  if (all.ring == nullptr || all.pid != ::getpid()) return;
  (void)::unlink(all.ring->path().c_str());
  if (all.server != nullptr) (void)::unlink(all.server->path().c_str());
}

// The requests of one scheduler, with the blocks of its device.
class Slots {
 public:
  Slots() : port_(process_events()), table_(port_) {}
  uint32_t create(std::string id, int64_t tokens) { return value_or_raise(table_.create(std::move(id), tokens)); }
  // What an engine of another hand does is not always in the table: then it is left as it was.
  void stage(uint32_t slot, int32_t blocks) { (void)table_.stage(slot, blocks); }
  // `blocks` of it are loaded, into as many of the device.
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

Result<std::string> begin_process_events(const std::string& directory, const std::string& role, int32_t rank) {
  ProcessEvents& all = state();
  const MutexLock lock(all.mutex);
  if (all.ring != nullptr && all.pid == ::getpid()) return all.ring->path();
  TORPOR_ASSIGN(std::unique_ptr<EventRing> ring, console::begin_events(directory, role, rank, system_clock()));
  all.ring = ring.release();
  all.pid = ::getpid();
  all.server = nullptr;  // that of who forked is not here
  static std::once_flag once;
  std::call_once(once, [] { (void)std::atexit(forget); });
  return all.ring->path();
}

Result<std::string> begin_process_control(bool operates) {
  ProcessEvents& all = state();
  const MutexLock lock(all.mutex);
  if (all.ring == nullptr || all.pid != ::getpid()) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = "this process tells no events",
                 .next_step = "give it a directory for events"};
  }
  if (all.server == nullptr) {
    TORPOR_ASSIGN(
        std::unique_ptr<console::ControlServer> server,
        console::ControlServer::start(*all.ring, system_clock(),
                                      operates ? console::ControlRole::kOperate : console::ControlRole::kRead));
    all.server = server.release();  // as the ring, for as long as the process lives
    all.server->serve(all.offload);
  }
  return all.server->path();
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
  if (server != nullptr) server->serve(nullptr);
}

EventPort process_events() {
  ProcessEvents& all = state();
  const MutexLock lock(all.mutex);
  return all.ring == nullptr ? EventPort() : EventPort(*all.ring, system_clock());
}

void bind_events(py::module_& module) {
  module.def(
      "begin_events",
      [](const std::string& directory, const std::string& role, int32_t rank) {
        return value_or_raise(without_lock([&] { return begin_process_events(directory, role, rank); }));
      },
      py::arg("directory"), py::arg("role"), py::arg("rank") = 0,
      "From now on what this process does is told in a ring there; returns its path. A second call changes nothing.");
  module.def(
      "begin_control",
      [](bool operates) {
        // Once the interpreter ends nobody gets its lock any more.
        py::module_::import("atexit").attr("register")(
            py::cpp_function([] { (void)without_lock([] { return unserve_offload(nullptr), ok(); }); }));
        return value_or_raise(without_lock([&] { return begin_process_control(operates); }));
      },
      py::arg("operates"),
      "A socket beside the ring of this process; returns its path. `operates`: who connects may stop the engine.");
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
