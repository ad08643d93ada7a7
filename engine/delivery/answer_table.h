// SPDX-License-Identifier: Apache-2.0
// AnswerTable: the answers of a server in memory, by id and by the response that clients know.
//
// Owner: DeliveryLog, whose lock guards it. Threads: none of its own; no call waits for anything. Errors: kNotFound for
// an id that is not there, kInvalidArgument for what does not fit; nothing has changed then.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/delivery/answer.h"

namespace torpor {

class AnswerTable {
 public:
  AnswerTable(double keep_seconds, uint64_t keep_bytes) : keep_seconds_(keep_seconds), keep_bytes_(keep_bytes) {}

  const Answer* get(const std::string& id) const;  // null: there is none
  bool contains(const std::string& id) const { return get(id) != nullptr; }
  const std::vector<std::string>& ids() const { return order_; }  // in the order of their start
  std::vector<Answer> all() const;                                // in that order
  uint64_t running() const;
  uint64_t ended() const { return order_.size() - running(); }
  // As DeliveryLog's.
  std::vector<std::string> find(std::string_view response, std::string_view tenant) const;
  Result<AnswerPart> part(const std::string& id, uint32_t from_token, uint32_t from_text) const;
  Result<AnswerPart> position(const std::string& id) const;

  // For each id the ends of its answer; nothing where there is none, or where it has ended.
  std::vector<std::optional<AnswerEnds>> running_ends(std::span<const std::string_view> ids) const;

  // A new one, whose id is not in use: all of it or, for want of memory, nothing.
  void put(Answer answer);
  // The answers of the steps, if all fit, and room for them: once the steps are in the log, they can be applied. The
  // pointers hold until an answer is taken out.
  Result<std::vector<Answer*>> prepare(const std::vector<AnswerStep>& steps);
  void apply(AnswerStep& step, Answer& answer);  // that prepare() gave; takes no memory

  bool too_old(const Answer& answer, double now) const;
  bool over_budget() const { return ended_bytes_ > keep_bytes_; }
  // Takes out ended answers that are too old, and the oldest of the others as long as it is over its budget.
  void forget_old(double now);
  void forget(const std::string& id);  // an ended one
  // Ended answers that went because the table was over its budget, before they were too old.
  uint64_t dropped() const { return dropped_; }
  // Whether this response was one of them, and finished: as long as it would have been kept, of the last 65,536.
  bool was_dropped(std::string_view response, std::string_view tenant) const;
  void clear();

 private:
  struct IdHash {
    using is_transparent = void;
    size_t operator()(std::string_view id) const noexcept { return std::hash<std::string_view>{}(id); }
  };

  void drop_oldest();
  std::vector<std::string> of_response(const Answer& answer) const;  // ids of all its choices, of all its calls
  void remember_drop(const Answer& answer, size_t choices);
  void forget_oldest_drop();
  void take_out(const std::string& id);  // but for its place in order_

  const double keep_seconds_;  // of ended answers
  const uint64_t keep_bytes_;
  std::vector<std::string> order_;
  std::unordered_map<std::string, Answer, IdHash, std::equal_to<>> answers_;
  std::multimap<std::pair<std::string, std::string>, std::string> by_response_;  // (tenant, response) -> id
  uint64_t ended_bytes_ = 0;
  uint64_t dropped_ = 0;
  std::unordered_map<size_t, double> dropped_at_;  // hash of tenant and response -> when the answer had ended
  std::deque<std::pair<size_t, double>> drops_;    // the same, the oldest first; some were begun again
};

}  // namespace torpor
