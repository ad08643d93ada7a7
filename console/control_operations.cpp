// SPDX-License-Identifier: Apache-2.0
// Calls that the front end carries out, and recordings that a process makes of itself.
#include <algorithm>

#include <fmt/core.h>

#include "console/control.h"

namespace torpor::console {
namespace {

using Json = nlohmann::ordered_json;
using nlohmann::json;

constexpr uint64_t kUsualBytes = 1 << 30;
constexpr size_t kMostName = 64;

// A name that cannot lead to another directory.
bool is_plain_name(std::string_view name) {
  return !name.empty() && name.size() <= kMostName && name.front() != '.' &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '_' ||
                  c == '.';
         });
}

}  // namespace

// ---- the front end

void Control::serve(FrontAccess* front) {
  const MutexLock lock(front_mutex_);
  front_ = front;
}

std::shared_ptr<FrontCall> Control::begin(const ControlPeer& peer, const ControlMethod& method, const json& params) {
  const auto number = static_cast<uint8_t>(&method - control_methods().data());
  const auto call = std::make_shared<FrontCall>(number, peer.uid, peer.pid);
  front_calls_.push_back(call);
  if (const Status may = may_call(method, params); !may) {
    call->end(may.error());
    return call;
  }
  const MutexLock lock(front_mutex_);
  if (front_ == nullptr) {
    call->end(
        Error{.code = Code::kFailedPrecondition,
              .what = fmt::format("{} is not this process's: the program that owns this engine does that", method.name),
              .next_step =
                  "call it there; of a server: its own socket, or POST /torpor/console/" + std::string(method.name)});
    return call;
  }
  front_->begin(method, params, call);
  return call;
}

bool Control::look_at_front() {
  for (auto call = front_calls_.begin(); call != front_calls_.end();) {
    const Result<Json>* const result = (*call)->result();
    if (result != nullptr && control_methods()[(*call)->method].operates)
      publish({.uid = (*call)->uid, .pid = (*call)->pid}, (*call)->method, *result ? nullptr : &result->error());
    call = result != nullptr ? front_calls_.erase(call) : std::next(call);
  }
  return !front_calls_.empty();
}

// ---- recordings

void Control::record_below(std::string directory) {
  const MutexLock lock(record_mutex_);
  record_below_ = std::move(directory);
}

Result<Json> Control::start_record(const json& params) {
  std::string below;
  {
    const MutexLock lock(record_mutex_);
    below = record_below_;
  }
  const std::string ring = ring_.path();
  if (below.empty() || ring.empty()) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = "this process has no directory for recordings",
                 .next_step = "start the engine with the option recordings_dir, or use: torpor record"};
  }
  if (recorder_ != nullptr && recorder_->runs()) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("{} is being recorded", record_name_),
                 .next_step = "record.stop ends it"};
  }
  const std::string name = params.value("directory", "");
  if (!is_plain_name(name)) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("directory is \"{}\"", name),
                 .next_step = "give a name of letters, digits, -, _ and . that does not begin with a dot"};
  }
  const std::string path = below + "/" + name;
  TORPOR_ASSIGN_OR_RETURN(auto recorder, Recorder::create(linux_file_system(), ring.substr(0, ring.rfind('/')), path));
  TORPOR_RETURN_IF_ERROR(recorder->look(false));  // report an error now, not from the thread
  const double bytes = params.value("bytes", static_cast<double>(kUsualBytes));
  recorder_ = std::make_unique<RecorderThread>(
      std::move(recorder), std::chrono::duration<double>(params.value("seconds", 0.0)), static_cast<uint64_t>(bytes));
  record_name_ = path;
  return Json{{"directory", path}};
}

Result<Json> Control::stop_record() {
  if (recorder_ == nullptr) {
    return Error{.code = Code::kNotFound, .what = "nothing is recorded", .next_step = "record.start begins it"};
  }
  (void)recorder_->stop();
  Json result = recording();
  recorder_.reset();
  return result;
}

Json Control::recording() const {
  if (recorder_ == nullptr) return nullptr;
  const auto [counts, status] = recorder_->now();
  return {{"directory", record_name_},
          {"runs", recorder_->runs()},
          {"processes", counts.processes},
          {"events", counts.events},
          {"lost", counts.lost},
          {"bytes", counts.bytes},
          {"error", status ? Json() : Json(status.error().to_string())}};
}

}  // namespace torpor::console
