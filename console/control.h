// SPDX-License-Identifier: Apache-2.0
// Control: answers the calls of a process's socket, without the socket itself (control_server.h). ControlSession: the
// lines of one peer, its answers and its events.
//
// A line is a JSON object: {"id", "method", "params"}. Its answer is {"id", "result"} or {"id", "error": {"code",
// "what", "next_step", "state_changed"}}. Input is hostile: a line has at most 1 MiB and 16 levels, and its parameters
// are checked against the table of methods. Events of a subscription are lines {"subscription", "event"}. A peer that
// reads too slowly gets the number of events that it missed (`lost`), and delays no other peer. The front end runs a
// sleep: its answer comes when it has ended, and other answers may come before it.
//
// Threads: one, the server's. Meanwhile other threads write the ring, and the engine asks `breakpoints()`.
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
#include "console/transfer_story.h"

namespace torpor::console {

enum class ControlRole : uint8_t { kRead, kOperate };

struct ControlPeer {
  uint64_t connection = 0;  // from 1
  uint32_t uid = 0;
  int32_t pid = 0;
};

class Control {
 public:
  // `ring` and `clock` must outlive this object. It watches the ring: destroy it only while nothing records events
  // there.
  Control(EventRing& ring, const Clock& clock, ControlRole role);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  Result<nlohmann::ordered_json> call(const ControlPeer& peer, const ControlMethod& method,
                                      const nlohmann::json& params);
  // Set the engine's access to its stores; null: none any more. Waits until a call that uses the previous one has
  // ended. Any thread.
  void serve(OffloadAccess* offload);
  // Set the front end, which carries out the calls of ControlPlace::kFront; null: none any more. Waits while a call is
  // being begun. Any thread.
  void serve(FrontAccess* front);
  // Set the directory below which record.start makes its directories; empty: record.start is refused. Any thread.
  void record_below(std::string directory);
  // Begin a call of the front end. Return the object that will hold its result; if the call is refused, the result is
  // there at once.
  std::shared_ptr<FrontCall> begin(const ControlPeer& peer, const ControlMethod& method, const nlohmann::json& params);
  // Record the calls that have ended since. Return whether some have not ended.
  bool look_at_front();
  Breakpoints& breakpoints() { return breakpoints_; }
  EventRing& ring() { return ring_; }
  const Clock& clock() const { return clock_; }
  // Record a call as an event; the server also uses it for peers that may not connect. `error`: null if it succeeded.
  void publish(const ControlPeer& peer, uint8_t method, const Error* error) noexcept;

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
  Status offloads() const TORPOR_REQUIRES(offload_mutex_);  // kUnsupported: this process has no stores
  // kUnsupported: this process publishes no events of this type before which it could wait.
  Status can_hold(EventType type);
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
  EngineView view_;  // of all events before the reader's next one
  Mutex offload_mutex_;
  OffloadAccess* offload_ TORPOR_GUARDED_BY(offload_mutex_) = nullptr;
  Mutex front_mutex_;
  FrontAccess* front_ TORPOR_GUARDED_BY(front_mutex_) = nullptr;
  std::list<std::shared_ptr<FrontCall>> front_calls_;  // calls whose end was not recorded yet
  Mutex record_mutex_;
  std::string record_below_ TORPOR_GUARDED_BY(record_mutex_);
  std::string record_name_;
  std::unique_ptr<RecorderThread> recorder_;  // the last one
};

// Check parameters against the method's table. kInvalidArgument: the error names the parameter.
Status check_parameters(const ControlMethod& method, const nlohmann::json& params);

class ControlSession {
 public:
  static constexpr size_t kMostLine = 1 << 20;
  static constexpr size_t kMostDepth = 16;
  static constexpr size_t kEnoughOutput = 4 << 20;  // with more than this, nothing is read and no event is added
  static constexpr size_t kMostSubscriptions = 4;
  static constexpr size_t kMostWaits = 16;

  ControlSession(Control& control, const ControlPeer& peer) : control_(control), peer_(peer) {}
  ~ControlSession() { control_.breakpoints().drop_owner(peer_.connection); }
  ControlSession(const ControlSession&) = delete;
  ControlSession& operator=(const ControlSession&) = delete;

  // Process input. False: it is not the protocol; output() has the error, and the connection must be closed after it is
  // sent.
  bool receive(std::string_view bytes);
  // Add some events for each subscription; only a few, because other peers wait. True: there are more.
  bool pump();
  std::string& output() { return output_; }
  bool subscribed() const { return !subscriptions_.empty(); }
  // Return whether some answers are still to come: of the front end, or when transfers end.
  bool waits() const { return !calls_.empty() || !waits_.empty(); }
  bool reads() const { return output_.size() < kEnoughOutput; }

 private:
  struct Subscription {
    uint64_t number = 0;
    EventReader reader;
    EventExport writer;
  };
  struct Wait {  // a call of transfer.wait
    nlohmann::json id;
    EventReader reader;
    TransferStory story;
    std::chrono::nanoseconds until{};
  };
  bool line(std::string_view text);
  void answer(const nlohmann::json& id, Result<nlohmann::ordered_json> result);
  void answer_calls();
  void answer_waits();
  Result<nlohmann::ordered_json> subscribe(const nlohmann::json& params);
  Status wait(const nlohmann::json& id, const nlohmann::json& params);

  Control& control_;
  const ControlPeer peer_;
  std::string input_;
  std::string output_;
  std::list<Subscription> subscriptions_;
  std::list<std::pair<nlohmann::json, std::shared_ptr<FrontCall>>> calls_;  // by the peer's ids
  std::list<Wait> waits_;
  uint64_t last_subscription_ = 0;
};

}  // namespace torpor::console
