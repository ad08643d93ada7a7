// SPDX-License-Identifier: Apache-2.0
// What comes through a process's socket: whatever bytes they are, each line that is taken gets one answer, nothing
// beyond the limits is kept, and what was stopped ends with the connection.
#include <algorithm>
#include <cstdlib>

#include "console/control.h"

namespace {

using namespace torpor;

void require(bool held) {
  if (!held) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto ring = [] {
    auto made = EventRing::in_memory({.role = "core"}, 256);
    EventPort port(**made, system_clock());
    port.text(TextKind::kRequestName, 1, 0, "a");
    (void)port.record({.type = EventType::kSlot, .to = 1, .request = 1, .a = 5});
    return std::move(*made);
  }();
  console::Control control(*ring, system_clock(), console::ControlRole::kOperate);
  {
    console::ControlSession session(control, {.connection = 1});
    const std::string_view bytes(reinterpret_cast<const char*>(data), size);
    // In two pieces: where they are cut changes nothing.
    const bool goes_on = session.receive(bytes.substr(0, size / 2)) && session.receive(bytes.substr(size / 2));
    const std::string out = session.output();
    require(out.empty() || out.back() == '\n');
    const auto answers = static_cast<size_t>(std::count(out.begin(), out.end(), '\n'));
    const auto lines = static_cast<size_t>(std::count(bytes.begin(), bytes.end(), '\n'));
    require(answers <= lines + (goes_on ? 0 : 1));
    session.pump();
  }
  const EventPort port(*ring, system_clock());
  control.breakpoints().resume_all();  // those that stay
  require(port.may_step());
  return 0;
}
