// SPDX-License-Identifier: Apache-2.0
// The methods of DeliveryLog that only read. They read memory, never a file.
#include "engine/delivery/delivery_log.h"

namespace torpor {

std::vector<std::string> DeliveryLog::find(std::string_view response, std::string_view tenant) const {
  const MutexLock lock(mutex_);
  return answers_.find(response, tenant);
}

Result<AnswerPart> DeliveryLog::position(const std::string& id) const {
  const MutexLock lock(mutex_);
  return answers_.position(id);
}

Result<AnswerPart> DeliveryLog::part(const std::string& id, uint32_t from_token, uint32_t from_text) const {
  const MutexLock lock(mutex_);
  return answers_.part(id, from_token, from_text);
}

std::optional<Answer> DeliveryLog::get(const std::string& id) const {
  const MutexLock lock(mutex_);
  const Answer* answer = answers_.get(id);
  return answer == nullptr ? std::nullopt : std::optional(*answer);
}

std::vector<Answer> DeliveryLog::all() const {
  const MutexLock lock(mutex_);
  return answers_.all();
}

std::vector<std::optional<AnswerEnds>> DeliveryLog::running_ends(std::span<const std::string_view> ids) const {
  const MutexLock lock(mutex_);
  return answers_.running_ends(ids);
}

bool DeliveryLog::was_dropped(std::string_view response, std::string_view tenant) const {
  const MutexLock lock(mutex_);
  return answers_.was_dropped(response, tenant);
}

uint64_t DeliveryLog::dropped() const {
  const MutexLock lock(mutex_);
  return answers_.dropped();
}

std::vector<std::string> DeliveryLog::unwritten() const {
  const MutexLock lock(mutex_);
  return {unwritten_.begin(), unwritten_.end()};
}

DeliveryLog::Counts DeliveryLog::counts() const {
  const MutexLock lock(mutex_);
  return {.running = answers_.running(),
          .ended = answers_.ended(),
          .log_bytes = log_bytes_,
          .lost_bytes = lost_bytes_,
          .dropped = answers_.dropped(),
          .of_another = of_another_,
          .set_aside = set_aside_,
          .discarded = discarded_,
          .problem = problem_};
}

}  // namespace torpor
