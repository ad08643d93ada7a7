// SPDX-License-Identifier: Apache-2.0
#include "console/control.h"

#include <algorithm>
#include <cmath>

#include <fmt/core.h>

#include "base/text.h"
#include "console/schema.h"
#include "kvcache/offload_queue.h"

namespace torpor::console {
namespace {

using Json = nlohmann::ordered_json;
using nlohmann::json;

constexpr double kMostNumber = 9e15;  // exact as a double

Error wrong(std::string what, std::string next_step) {
  return {.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next_step)};
}

uint64_t number_or(const json& params, const char* name, uint64_t otherwise) {
  const auto found = params.find(name);
  return found == params.end() ? otherwise : static_cast<uint64_t>(found->get<double>());
}
std::string words_or(const json& params, const char* name) {
  const auto found = params.find(name);
  return found == params.end() ? std::string() : found->get<std::string>();
}
bool flag(const json& params, const char* name) {
  const auto found = params.find(name);
  return found != params.end() && found->get<bool>();
}
std::chrono::nanoseconds lease_of(const json& params) {
  const auto found = params.find("lease");
  if (found == params.end()) return kUsualLease;
  return std::chrono::nanoseconds(static_cast<int64_t>(std::min(found->get<double>(), 1e6) * 1e9));
}

// Return the index of `word` in `names`. kInvalidArgument: the error lists the names.
Result<uint8_t> value_named(std::string_view parameter, std::string_view word,
                            std::span<const std::string_view> names) {
  std::string all;
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == word && !word.empty()) return static_cast<uint8_t>(i);
    if (!names[i].empty()) all += (all.empty() ? "" : ", ") + std::string(names[i]);
  }
  return wrong(fmt::format("{} is \"{}\"", parameter, word),
               all.empty() ? std::string("leave it out: this event has none") : "use one of: " + all);
}

Result<EventType> type_named(std::string_view word) {
  std::string all;
  for (int i = 1; i < kEventTypes; ++i) {
    const auto type = static_cast<EventType>(i);
    const EventSchema* schema = schema_of(type);
    if (schema == nullptr || !may_stop_at(type)) continue;
    if (schema->name == word) return type;
    all += (all.empty() ? "" : ", ") + std::string(schema->name);
  }
  return wrong(fmt::format("type is \"{}\"", word), "use one of: " + all);
}

// Return the nesting depth of objects and lists, without looking into strings.
size_t depth_of(std::string_view text) {
  size_t depth = 0;
  size_t most = 0;
  bool in_words = false;
  for (size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (in_words) {
      if (c == '\\') ++at;
      if (c == '"') in_words = false;
    } else if (c == '"') {
      in_words = true;
    } else if (c == '{' || c == '[') {
      most = std::max(most, ++depth);
    } else if ((c == '}' || c == ']') && depth > 0) {
      --depth;
    }
  }
  return most;
}

std::string line_of(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n'; }

Json to_json(const Error& error) {
  return {{"code", name(error.code)},
          {"what", error.what},
          {"next_step", error.next_step},
          {"origin", name(error.origin)},
          {"state_changed", error.state_changed}};
}

}  // namespace

Status check_parameters(const ControlMethod& method, const json& params) {
  if (!params.is_object()) return wrong("params is no object", "give {\"name\": value}");
  for (const auto& [key, value] : params.items()) {
    const auto known = std::find_if(method.parameters.begin(), method.parameters.end(),
                                    [&](const ControlParameter& each) { return each.name == key; });
    if (known == method.parameters.end()) {
      std::string names;
      for (const ControlParameter& each : method.parameters)
        names += (names.empty() ? "" : ", ") + std::string(each.name);
      return wrong(fmt::format("{} has no parameter \"{}\"", method.name, key),
                   names.empty() ? std::string("it takes none") : "use some of: " + names);
    }
    const auto no = [&](std::string_view kind) {
      return wrong(fmt::format("{} is not {}", key, kind), std::string(known->help));
    };
    switch (known->kind) {
      case ParameterKind::kNumber:
        if (!value.is_number() || !(value.get<double>() >= 0) || value.get<double>() > kMostNumber)
          return no("a number of 0 or more");
        break;
      case ParameterKind::kWords:
        if (!value.is_string() || value.get_ref<const std::string&>().size() > 1024) return no("a string");
        break;
      case ParameterKind::kFlag:
        if (!value.is_boolean()) return no("true or false");
        break;
    }
  }
  return ok();
}

Control::Control(EventRing& ring, const Clock& clock, ControlRole role)
    : ring_(ring), clock_(clock), role_(role), breakpoints_(ring, clock), reader_(ring) {
  ring_.watch(&breakpoints_);
}

Control::~Control() { ring_.watch(nullptr); }

void Control::publish(const ControlPeer& peer, uint8_t method, const Error* error) noexcept {
  (void)ring_.record({.type = EventType::kControl,
                      .from = method,
                      .to = outcome_of(error),
                      .a = peer.uid,
                      .b = static_cast<uint64_t>(peer.pid)},
                     clock_.now().count());
}

const EngineView& Control::now() {
  std::vector<Event> events;
  reader_.read(events);
  for (const Event& event : events) view_.apply(event);
  return view_;
}

Result<Json> Control::call(const ControlPeer& peer, const ControlMethod& method, const json& params) {
  Result<Json> result = try_catch([&] { return do_call(peer, method, params); });
  if (method.operates)
    publish(peer, static_cast<uint8_t>(&method - control_methods().data()), result ? nullptr : &result.error());
  return result;
}

Status Control::may_call(const ControlMethod& method, const json& params) const {
  TORPOR_RETURN_IF_ERROR(check_parameters(method, params));
  if (!method.operates || role_ == ControlRole::kOperate) return ok();
  return Error{.code = Code::kFailedPrecondition,
               .what = fmt::format("{} changes what the engine does, and this one may only be looked at", method.name),
               .next_step = "start the engine with the option console=control"};
}

Result<Json> Control::do_call(const ControlPeer& peer, const ControlMethod& method, const json& params) {
  TORPOR_RETURN_IF_ERROR(may_call(method, params));
  const uint64_t owner = flag(params, "stay") ? 0 : peer.connection;
  switch (method.call) {
    case ControlCall::kHello: return hello();
    case ControlCall::kSnapshot: {
      Json all = now().to_json();
      all["at"] = reader_.next() - 1;
      all["stops"] = stops()["stops"];
      all["breakpoints"] = breakpoint_list()["breakpoints"];
      all["recording"] = recording();
      return all;
    }
    case ControlCall::kSlots: return slots(params);
    case ControlCall::kEvents: return events(params);
    case ControlCall::kRequest: return request(params);
    case ControlCall::kStops: return stops();
    case ControlCall::kPause: {
      TORPOR_ASSIGN_OR_RETURN(const uint32_t stop, breakpoints_.pause(lease_of(params), owner));
      return Json{{"stop", stop}};
    }
    case ControlCall::kResume:
      if (!params.contains("stop")) return Json{{"resumed", breakpoints_.resume_all()}};
      TORPOR_RETURN_IF_ERROR(breakpoints_.resume(static_cast<uint32_t>(number_or(params, "stop", 0))));
      return Json{{"resumed", 1}};
    case ControlCall::kStep: {
      const uint64_t steps = number_or(params, "steps", 1);
      TORPOR_RETURN_IF_ERROR(breakpoints_.step(steps));
      return Json{{"steps", steps}};
    }
    case ControlCall::kRenew:
      TORPOR_RETURN_IF_ERROR(breakpoints_.renew(static_cast<uint32_t>(number_or(params, "stop", 0)), lease_of(params)));
      return Json{{"left_seconds", static_cast<double>(lease_of(params).count()) * 1e-9}};
    case ControlCall::kAddBreakpoint: return add_breakpoint(peer, params);
    case ControlCall::kRemoveBreakpoint:
      TORPOR_RETURN_IF_ERROR(breakpoints_.remove(static_cast<uint32_t>(number_or(params, "breakpoint", 0))));
      return Json::object();
    case ControlCall::kListBreakpoints: return breakpoint_list();
    case ControlCall::kCancelTransfer:
    case ControlCall::kDropBlocks:
    case ControlCall::kDemoteBlocks: return use_offload(method, params);
    case ControlCall::kStartRecord: return start_record(params);
    case ControlCall::kStopRecord: return stop_record();
    case ControlCall::kWaitTransfer:  // a session carries these out
    case ControlCall::kSubscribe:
    case ControlCall::kPlan:
    case ControlCall::kSleep:
    case ControlCall::kWake:
    case ControlCall::kCheckpoint: break;
  }
  return Error{
      .code = Code::kUnsupported, .what = fmt::format("{} needs a connection", method.name), .next_step = "connect"};
}

Json Control::hello() const {
  const EventSource& source = ring_.source();
  Json methods = Json::array();
  for (const ControlMethod& method : control_methods()) {
    Json parameters = Json::object();
    for (const ControlParameter& each : method.parameters) parameters[std::string(each.name)] = each.help;
    methods.push_back({{"method", method.name},
                       {"control", method.operates},
                       {"front", method.place == ControlPlace::kFront},
                       {"parameters", std::move(parameters)},
                       {"help", method.help}});
  }
  return {{"protocol", 1},
          {"schema", fmt::format("{}.{}", source.major, source.minor)},
          {"process", fmt::format("{}{}", source.role, source.rank)},
          {"pid", source.pid},
          {"role", role_ == ControlRole::kOperate ? "control" : "read"},
          {"methods", std::move(methods)}};
}

Json Control::stops() {
  breakpoints_.expire();
  Json rows = Json::array();
  for (const StopRow& row : breakpoints_.stops()) {
    rows.push_back({{"stop", row.id},
                    {"cause", name(row.cause)},
                    {"event", row.event},
                    {"request", row.request == 0 ? Json() : Json(now().name_of(row.request))},
                    {"held", row.held},
                    {"seconds", static_cast<double>(row.stood.count()) * 1e-9},
                    {"left_seconds", static_cast<double>(row.left.count()) * 1e-9}});
  }
  return {{"stops", std::move(rows)}};
}

Json Control::breakpoint_list() {
  Json rows = Json::array();
  for (const BreakpointRow& row : breakpoints_.list()) {
    const EventSchema* schema = schema_of(row.what.type);
    const auto word = [](std::span<const std::string_view> names, std::optional<uint8_t> value) {
      return value && *value < names.size() ? Json(names[*value]) : Json();
    };
    rows.push_back({{"breakpoint", row.id},
                    {"type", schema->name},
                    {"from", word(schema->from, row.what.from)},
                    {"to", word(schema->to, row.what.to)},
                    {"request", row.what.request.empty() ? Json() : Json(row.what.request)},
                    {"way", row.what.way ? Json(name(static_cast<Way>(*row.what.way))) : Json()},
                    {"at_least", row.what.at_least},
                    {"after", row.what.after},
                    {"every", row.what.every},
                    {"once", row.what.once},
                    {"alone", row.what.alone},
                    {"lease", static_cast<double>(row.what.lease.count()) * 1e-9},
                    {"matches", row.matches}});
  }
  return {{"breakpoints", std::move(rows)}};
}

Result<Json> Control::add_breakpoint(const ControlPeer& peer, const json& params) {
  Breakpoint made{.request = words_or(params, "request"),
                  .at_least = number_or(params, "at_least", 0),
                  .after = number_or(params, "after", 0),
                  .every = number_or(params, "every", 1),
                  .once = flag(params, "once"),
                  .alone = flag(params, "alone"),
                  .lease = lease_of(params)};
  TORPOR_ASSIGN_OR_RETURN(made.type, type_named(words_or(params, "type")));
  const EventSchema* schema = schema_of(made.type);
  if (params.contains("from")) {
    TORPOR_ASSIGN_OR_RETURN(made.from, value_named("from", words_or(params, "from"), schema->from));
  }
  if (params.contains("to")) {
    TORPOR_ASSIGN_OR_RETURN(made.to, value_named("to", words_or(params, "to"), schema->to));
  }
  if (params.contains("way")) {
    static const std::array<std::string_view, kWays> ways = [] {
      std::array<std::string_view, kWays> names;
      for (size_t i = 0; i < names.size(); ++i) names[i] = name(static_cast<Way>(i));
      return names;
    }();
    TORPOR_ASSIGN_OR_RETURN(made.way, value_named("way", words_or(params, "way"), ways));
  }
  if (made.alone) TORPOR_RETURN_IF_ERROR(can_hold(made.type));
  std::map<uint32_t, std::string> names;
  for (const auto& [number, words] : now().names()) names.emplace(number, words);
  TORPOR_ASSIGN_OR_RETURN(const uint32_t id, breakpoints_.add(made, flag(params, "stay") ? 0 : peer.connection, names));
  return Json{{"breakpoint", id}};
}

// ---- one peer

bool ControlSession::receive(std::string_view bytes) {
  input_.append(bytes);
  size_t at = 0;
  while (reads()) {
    const size_t end = input_.find('\n', at);
    if (end == std::string::npos) break;
    if (end - at > kMostLine || !line(std::string_view(input_).substr(at, end - at))) return false;
    at = end + 1;
  }
  input_.erase(0, at);
  if (input_.size() <= kMostLine || !reads()) return true;
  answer(nullptr, wrong(fmt::format("a line of more than {} bytes", kMostLine), "ask for less at once"));
  return false;
}

bool ControlSession::line(std::string_view text) {
  if (text.find_first_not_of(" \t\r") == std::string_view::npos) return true;
  if (depth_of(text) > kMostDepth) {
    answer(nullptr, wrong(fmt::format("more than {} levels", kMostDepth), "send {\"id\", \"method\", \"params\"}"));
    return false;
  }
  const json asked = json::parse(text, nullptr, false);
  if (!asked.is_object() || !asked.contains("method") || !asked["method"].is_string()) {
    answer(nullptr, wrong("this is no request", "send a line {\"id\", \"method\", \"params\"}"));
    return !asked.is_discarded();
  }
  json id = asked.value("id", json());
  if (id.is_structured()) id = nullptr;
  const std::string& word = asked["method"].get_ref<const std::string&>();
  const ControlMethod* const method = find_control_method(word);
  if (method == nullptr) {
    answer(id, Error{.code = Code::kNotFound,
                     .what = fmt::format("there is no method \"{}\"", first_bytes(word, 64)),
                     .next_step = "hello lists them"});
    return true;
  }
  const json params = asked.value("params", json::object());
  if (method->call == ControlCall::kSubscribe) {
    answer(id, try_catch([&] { return subscribe(params); }));
  } else if (method->call == ControlCall::kWaitTransfer) {
    if (const Status begun = try_catch([&] { return wait(id, params); }); !begun) answer(id, begun.error());
  } else if (method->place == ControlPlace::kFront) {
    calls_.emplace_back(id, control_.begin(peer_, *method, params));
    answer_calls();
  } else {
    answer(id, control_.call(peer_, *method, params));
  }
  return true;
}

void ControlSession::answer(const json& id, Result<Json> result) {
  Json line = {{"id", id}};
  if (result) {
    line["result"] = std::move(*result);
  } else {
    line["error"] = to_json(result.error());
  }
  output_ += line_of(line);
}

Result<Json> ControlSession::subscribe(const json& params) {
  TORPOR_RETURN_IF_ERROR(check_parameters(*find_control_method("subscribe"), params));
  if (subscriptions_.size() >= kMostSubscriptions) {
    return Error{.code = Code::kResourceExhausted,
                 .what = fmt::format("this connection has {} subscriptions", kMostSubscriptions),
                 .next_step = "connect once more"};
  }
  const uint64_t newest = control_.ring().last_sequence();
  const uint64_t after = std::min(number_or(params, "after", newest), newest);
  TORPOR_ASSIGN_OR_RETURN(
      EventExport writer,
      EventExport::create({.types = words_or(params, "types"), .match = words_or(params, "match"), .after = after}));
  // From the oldest event on, because earlier events have the names.
  subscriptions_.push_back({++last_subscription_, EventReader(control_.ring()), std::move(writer)});
  return Json{{"subscription", last_subscription_}, {"after", after}};
}

void ControlSession::answer_calls() {
  for (auto call = calls_.begin(); call != calls_.end();) {
    const Result<Json>* const result = call->second->result();
    if (result != nullptr) answer(call->first, *result);
    call = result != nullptr ? calls_.erase(call) : std::next(call);
  }
}

Status ControlSession::wait(const json& id, const json& params) {
  TORPOR_RETURN_IF_ERROR(check_parameters(*find_control_method("transfer.wait"), params));
  if (!params.contains("candidate"))
    return wrong("which one?", "give candidate, as events have it: block.demote returns one");
  if (waits_.size() >= kMostWaits) {
    return Error{.code = Code::kResourceExhausted,
                 .what = fmt::format("this connection waits for {} transfers", kMostWaits),
                 .next_step = "connect once more"};
  }
  constexpr double kUsual = 30;
  constexpr double kLongest = 300;
  const auto given = params.find("timeout");
  const double seconds = given == params.end() ? kUsual : given->get<double>();
  if (seconds > kLongest)
    return wrong(fmt::format("timeout is {} s", seconds), fmt::format("give at most {} s, and wait again", kLongest));
  Wait begun{.id = id,
             .reader = EventReader(control_.ring()),
             .story = TransferStory(number_or(params, "candidate", 0)),
             .until = control_.clock().now() + std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9))};
  std::vector<Event> events;
  begun.reader.read(events);
  begun.story.take(events);
  if (begun.story.empty()) {
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("no event that is still there has a candidate {}", begun.story.candidate()),
                 .next_step = "look at `events types=candidate`: it may have ended long ago"};
  }
  waits_.push_back(std::move(begun));
  answer_waits();
  return ok();
}

void ControlSession::answer_waits() {
  for (auto each = waits_.begin(); each != waits_.end();) {
    std::vector<Event> events;
    each->reader.read(events);
    each->story.take(events);
    const bool ends = each->story.done() || control_.clock().now() >= each->until;
    if (ends) answer(each->id, each->story.to_json());
    each = ends ? waits_.erase(each) : std::next(each);
  }
}

bool ControlSession::pump() {
  constexpr size_t kAtOnce = 256;
  bool more = false;
  answer_calls();
  answer_waits();
  for (Subscription& each : subscriptions_) {
    if (!reads()) return false;
    std::vector<SourceEvents> news(1);
    news[0].source = control_.ring().source();
    each.reader.read(news[0].events, false, kAtOnce);
    (void)each.writer.write(news, EventExport::Format::kNdjson, [&](std::string_view line) {
      line.remove_suffix(1);
      output_ += fmt::format("{{\"subscription\":{},\"event\":{}}}\n", each.number, line);
      return true;
    });
    more = more || news[0].events.size() >= kAtOnce;
  }
  return more && reads();
}

}  // namespace torpor::console
