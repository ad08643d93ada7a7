// SPDX-License-Identifier: Apache-2.0
// Control: what a process answers to who looks at it and stops it, without the socket (control_server.h); and
// ControlSession: one peer's lines in, answers and events out.
//
// A line is a JSON object: {"id", "method", "params"}; its answer {"id", "result"} or {"id", "error": {"code", "what",
// "next_step", "state_changed"}}. What comes in is hostile: a line has at most 1 MiB and 16 levels, and what it asks
// for is checked by the table of methods. Events of a subscription are lines {"subscription", "event"}; who reads too
// slowly is told how many it missed (`lost`), and holds up nobody. A sleep is the front end's: its answer comes when it
// has ended, and other answers before it.
//
// Threads: one, the server's; the ring is written meanwhile, and the engine asks `breakpoints()`.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "base/event_ring.h"
#include "console/breakpoints.h"
#include "console/control_methods.h"
#include "console/engine_view.h"
#include "console/event_export.h"
#include "console/front_access.h"
#include "console/offload_access.h"
#include "console/recorder.h"

namespace torpor::console {

enum class ControlRole : uint8_t { kRead, kOperate };

struct ControlPeer {
  uint64_t connection = 0;  // from 1
  uint32_t uid = 0;
  int32_t pid = 0;
};

class Control {
 public:
  // Both outlive it, and so does what tells events to the ring: it watches.
  Control(EventRing& ring, const Clock& clock, ControlRole role);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  Result<nlohmann::ordered_json> call(const ControlPeer& peer, const ControlMethod& method,
                                      const nlohmann::json& params);
  // The engine's, from now on; null: none any more. Waits for the end of a call that uses the one before. Any thread.
  void serve(OffloadAccess* offload);
  // Likewise: who carries out what only the front end can. Waits for a call that is just being begun.
  void serve(FrontAccess* front);
  // Where record.start makes its directories; empty: nowhere, and it is refused.
  void record_below(std::string directory);
  // Begins it, and gives what its answer will be in. Refused: it is in there at once.
  std::shared_ptr<FrontCall> begin(const ControlPeer& peer, const ControlMethod& method, const nlohmann::json& params);
  // Tells of those that have ended since. True: some have not.
  bool look_at_front();
  Breakpoints& breakpoints() { return breakpoints_; }
  EventRing& ring() { return ring_; }
  // Who may not connect is told, too.
  void tell(const ControlPeer& peer, uint8_t method, const Error* error) noexcept;

 private:
  using Json = nlohmann::ordered_json;
  const EngineView& now();
  Result<Json> do_call(const ControlPeer& peer, const ControlMethod& method, const nlohmann::json& params);
  Json hello() const;
  Result<Json> slots(const nlohmann::json& params);
  Result<Json> events(const nlohmann::json& params);
  Result<Json> request(const nlohmann::json& params);
  Json stops();
  Json breakpoint_list();
  Result<Json> add_breakpoint(const ControlPeer& peer, const nlohmann::json& params);
  Result<Json> use_offload(const ControlMethod& method, const nlohmann::json& params);
  Status may_call(const ControlMethod& method, const nlohmann::json& params) const;
  Result<Json> start_record(const nlohmann::json& params);
  Result<Json> stop_record();
  Json recording() const;  // null: none

  EventRing& ring_;
  const Clock& clock_;
  const ControlRole role_;
  Breakpoints breakpoints_;
  EventReader reader_;
  EngineView view_;  // until the event before the reader's next
  Mutex offload_mutex_;
  OffloadAccess* offload_ TORPOR_GUARDED_BY(offload_mutex_) = nullptr;
  Mutex front_mutex_;
  FrontAccess* front_ TORPOR_GUARDED_BY(front_mutex_) = nullptr;
  std::list<std::shared_ptr<FrontCall>> front_calls_;  // that were begun, until their end was told
  Mutex record_mutex_;
  std::string record_below_ TORPOR_GUARDED_BY(record_mutex_);
  std::string record_name_;
  std::unique_ptr<RecorderThread> recorder_;  // the last one
};

// Checked against the method's table. kInvalidArgument names the parameter.
Status check_parameters(const ControlMethod& method, const nlohmann::json& params);

class ControlSession {
 public:
  static constexpr size_t kMostLine = 1 << 20;
  static constexpr size_t kMostDepth = 16;
  static constexpr size_t kEnoughOutput = 4 << 20;  // beyond it nothing is read and no event is added
  static constexpr size_t kMostSubscriptions = 4;

  ControlSession(Control& control, const ControlPeer& peer) : control_(control), peer_(peer) {}
  ~ControlSession() { control_.breakpoints().drop_owner(peer_.connection); }
  ControlSession(const ControlSession&) = delete;
  ControlSession& operator=(const ControlSession&) = delete;

  // False: what came is no protocol; output() says so, and then it is to be cut off.
  bool receive(std::string_view bytes);
  // Adds some events for each subscription: few, for others wait meanwhile. True: there are more.
  bool pump();
  std::string& output() { return output_; }
  bool subscribed() const { return !subscriptions_.empty(); }
  bool waits() const { return !calls_.empty(); }  // for the front end's answers
  bool reads() const { return output_.size() < kEnoughOutput; }

 private:
  struct Subscription {
    uint64_t number = 0;
    EventReader reader;
    EventExport writer;
  };
  bool line(std::string_view text);
  void answer(const nlohmann::json& id, Result<nlohmann::ordered_json> result);
  void answer_calls();
  Result<nlohmann::ordered_json> subscribe(const nlohmann::json& params);

  Control& control_;
  const ControlPeer peer_;
  std::string input_;
  std::string output_;
  std::list<Subscription> subscriptions_;
  std::list<std::pair<nlohmann::json, std::shared_ptr<FrontCall>>> calls_;  // by the peer's ids
  uint64_t last_subscription_ = 0;
};

}  // namespace torpor::console
