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
#include "console/event_files.h"
#include "kvcache/slot_table.h"

namespace py = pybind11;

namespace torpor {
namespace {

// Whoever tells events may still do so while the process ends: the ring is never unmapped.
struct ProcessEvents {
  Mutex mutex;
  EventRing* ring TORPOR_GUARDED_BY(mutex) = nullptr;
  pid_t pid TORPOR_GUARDED_BY(mutex) = 0;
};
ProcessEvents& state() {
  static auto* const all = new ProcessEvents;
  return *all;
}

// A process that ends by itself leaves no last words.
void forget() {
  ProcessEvents& all = state();
  const MutexLock lock(all.mutex);
  if (all.ring != nullptr && all.pid == ::getpid()) (void)::unlink(all.ring->path().c_str());
}

// The requests of one scheduler, with the blocks of its device.
class Slots {
 public:
  Slots() : port_(process_events()), table_(port_) {}
  uint32_t create(std::string id, int64_t tokens) { return value_or_raise(table_.create(std::move(id), tokens)); }
  // What an engine of another hand does is not always in the table: then it is left as it was.
  void onboard(uint32_t slot, int32_t blocks) {
    if (table_.stage(slot, blocks)) (void)table_.onboard(slot, 0);
  }
  void scheduled(uint32_t slot, int64_t computed, int64_t now, int64_t tokens) {
    (void)table_.scheduled(slot, computed, now, tokens);
  }
  void skip(uint32_t slot) { (void)table_.skip(slot); }
  void preempt(uint32_t slot) { (void)table_.preempt(slot); }
  void finish(uint32_t slot) { (void)table_.finish(slot); }
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
  static std::once_flag once;
  std::call_once(once, [] { (void)std::atexit(forget); });
  return all.ring->path();
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
  py::class_<Slots>(module, "Slots", "The requests of a scheduler, each with its state, told as events.")
      .def(py::init<>())
      .def("create", &Slots::create, py::arg("id"), py::arg("tokens"), "Its number.")
      .def("onboard", &Slots::onboard, py::arg("slot"), py::arg("blocks"))
      .def("scheduled", &Slots::scheduled, py::arg("slot"), py::arg("computed"), py::arg("now"), py::arg("tokens"))
      .def("skip", &Slots::skip, py::arg("slot"))
      .def("preempt", &Slots::preempt, py::arg("slot"))
      .def("finish", &Slots::finish, py::arg("slot"))
      .def("step", &Slots::step, py::arg("running"), py::arg("waiting"), py::arg("tokens"), py::arg("nanoseconds"),
           py::arg("used_blocks"), py::arg("free_blocks"));
}

}  // namespace torpor
