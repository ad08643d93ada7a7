// SPDX-License-Identifier: Apache-2.0
// AnswerTable: the answers of a server in memory, by id and by the response that clients know.
//
// Owner: DeliveryLog, whose lock guards it. Threads: none of its own; no call blocks. Failure: kNotFound for an unknown
// id, kInvalidArgument for values that do not fit; then nothing has changed.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/delivery/answer.h"

namespace torpor {

class AnswerTable {
 public:
  // `keep_seconds`, `keep_bytes`: how long, and up to how many bytes, ended answers stay.
  AnswerTable(double keep_seconds, uint64_t keep_bytes) : keep_seconds_(keep_seconds), keep_bytes_(keep_bytes) {}

  const Answer* get(const std::string& id) const;  // null: there is none
  bool contains(const std::string& id) const { return get(id) != nullptr; }
  const std::vector<std::string>& ids() const { return order_; }  // in the order of their start
  std::vector<Answer> all() const;                                // in the order of their start
  uint64_t running() const;
  uint64_t ended() const { return order_.size() - running(); }
  // See the methods of DeliveryLog with these names.
  std::vector<std::string> find(std::string_view response, std::string_view tenant) const;
  Result<AnswerPart> part(const std::string& id, uint32_t from_token, uint32_t from_text) const;
  Result<AnswerPart> position(const std::string& id) const;

  // Return the end of each answer; none if there is no such answer, or it has ended.
  std::vector<std::optional<AnswerEnds>> running_ends(std::span<const std::string_view> ids) const;

  // Add an answer whose id is not in use. It throws if there is no memory; then nothing has changed.
  void put(Answer answer);
  // Check the steps and reserve memory for them, so that apply() cannot fail once they are in the log. Return the
  // answer of each step; the pointers are valid until an answer is removed. kInvalidArgument: a step does not fit; then
  // nothing has changed.
  Result<std::vector<Answer*>> prepare(const std::vector<AnswerStep>& steps);
  void apply(AnswerStep& step, Answer& answer);  // `answer`: from prepare(); allocates nothing

  // Return the ids of ended answers that are too old. The choices of one call become so together: a reader tells them
  // apart by their places.
  std::unordered_set<std::string> too_old(double now) const;
  bool over_budget() const { return ended_bytes_ > keep_bytes_; }
  // Remove ended answers that are too old, then the oldest ended ones while the table is over its budget.
  void forget_old(double now);
  void forget(const std::string& id);  // an ended one
  // Return the number of ended answers that were removed because the table was over its budget.
  uint64_t dropped() const { return dropped_; }
  // Return whether this response finished and its last answer was removed for the budget. Remembered for
  // `keep_seconds`, and for the last 65,536 responses.
  bool was_dropped(std::string_view response, std::string_view tenant) const;
  void clear();

 private:
  struct IdHash {
    using is_transparent = void;
    size_t operator()(std::string_view id) const noexcept { return std::hash<std::string_view>{}(id); }
  };

  bool is_past(const Answer& answer, double now) const;  // of this choice alone
  void drop_oldest();
  std::vector<std::string> of_call(const Answer& answer) const;  // ids of all choices of its call
  void remember_drop(const Answer& answer, size_t choices);
  void forget_oldest_drop();
  void take_out(const std::string& id);  // everywhere but from order_

  const double keep_seconds_;  // of ended answers
  const uint64_t keep_bytes_;
  std::vector<std::string> order_;
  std::unordered_map<std::string, Answer, IdHash, std::equal_to<>> answers_;
  std::multimap<std::pair<std::string, std::string>, std::string> by_response_;  // (tenant, response) -> id
  uint64_t ended_bytes_ = 0;
  uint64_t dropped_ = 0;
  std::unordered_map<size_t, double> dropped_at_;  // hash of (tenant, response) -> end of the answer
  std::deque<std::pair<size_t, double>> drops_;    // the same, the oldest first; may list responses that began again
};

}  // namespace torpor
