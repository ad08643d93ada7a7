// SPDX-License-Identifier: Apache-2.0
#include "scheduler_state/scheduler_snapshot.h"

#include <unordered_map>

#include <fmt/core.h>

namespace torpor {

Status SchedulerSnapshot::validate() const {
  const auto wrong = [](std::string what) {
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("scheduler state: {}", what),
                 .next_step = "use another checkpoint"};
  };
  if (policy != "fcfs" && policy != "priority") return wrong(fmt::format("the policy is \"{}\"", policy));
  std::unordered_map<std::string_view, const RequestState*> by_id;
  for (const RequestState& request : requests) {
    TORPOR_RETURN_IF_ERROR(request.validate());
    if (!by_id.emplace(request.id, &request).second)
      return wrong(fmt::format("request {} is listed twice", request.id));
  }
  std::unordered_map<std::string_view, std::string_view> queue_of;
  const auto enqueue = [&](const std::vector<std::string>& queue, std::string_view queue_name) -> Status {
    for (const std::string& id : queue) {
      const auto request = by_id.find(id);
      if (request == by_id.end())
        return wrong(fmt::format("the {} queue names {}, which is not a request", queue_name, id));
      const auto [entry, fresh] = queue_of.emplace(id, queue_name);
      if (!fresh) return wrong(fmt::format("request {} is in two places: {} and {}", id, entry->second, queue_name));
      if ((queue_name == "running") != (request->second->status == RequestStatus::kRunning)) {
        return wrong(
            fmt::format("request {} is {}, but in the {} queue", id, name(request->second->status), queue_name));
      }
    }
    return ok();
  };
  TORPOR_RETURN_IF_ERROR(enqueue(running, "running"));
  TORPOR_RETURN_IF_ERROR(enqueue(waiting, "waiting"));
  TORPOR_RETURN_IF_ERROR(enqueue(held, "held"));
  for (const RequestState& request : requests) {
    if (!queue_of.contains(request.id)) return wrong(fmt::format("request {} is in no queue", request.id));
  }
  return ok();
}

}  // namespace torpor
