// SPDX-License-Identifier: Apache-2.0
#include "engine/delivery/answer_table.h"

#include <algorithm>

#include <fmt/core.h>

namespace torpor {
namespace {

constexpr size_t kMostDropped = 1 << 16;  // responses that are remembered

// Return the offset of the code point `index`; the end of the text if there are no more.
size_t offset_of(std::string_view text, uint32_t index) {
  size_t at = 0;
  for (; at < text.size(); ++at) {
    if ((static_cast<uint8_t>(text[at]) & 0xC0) != 0x80 && index-- == 0) break;
  }
  return at;
}

uint64_t text_bytes(const Value& value) {
  const auto* const text = std::get_if<std::string>(&value.data);
  return text == nullptr ? 0 : text->size();
}

// Return the bytes of an ended answer. Clients choose the lengths of its ids, too, so each copy of them counts.
uint64_t size_of(const Answer& answer) {
  const RequestState& request = answer.request;
  uint64_t bytes = sizeof(Answer) + answer.text.size() + text_bytes(answer.stop_reason);
  bytes += (request.prompt_token_ids.size() + request.output_token_ids.size() + answer.text_ends.size() +
            request.sampling.stop_token_ids.size()) *
           sizeof(int32_t);
  bytes += 4 * request.id.size();                                // also in order_, answers_ and by_response_
  bytes += 2 * (answer.response.size() + answer.tenant.size());  // also in by_response_
  for (const std::string& stop : request.sampling.stop) bytes += sizeof(stop) + stop.size();
  if (request.cache_salt) bytes += request.cache_salt->size();
  if (const auto* front = std::get_if<Dict>(&answer.front.data)) {
    for (const auto& [name, value] : *front) bytes += text_bytes(value);
  }
  return bytes;
}

// Drop what only a request that runs needs, and a client may have made large.
void forget_what_ran(Answer& answer) {
  answer.request.engine = Value{Dict{}};
  answer.request.sampling.engine = Value{Dict{}};
  if (auto* front = std::get_if<Dict>(&answer.front.data))
    std::erase_if(*front, [](const Field& field) { return field.first != kEchoField; });
}

Error wrong_call(std::string what) {
  return Error{.code = Code::kInvalidArgument, .what = std::move(what), .next_step = "correct the call"};
}

AnswerPart end_of(const Answer& answer) {
  return {.tokens_end = static_cast<uint32_t>(answer.request.output_token_ids.size()),
          .text_end = answer.text_ends.empty() ? 0 : answer.text_ends.back(),
          .state = answer.state,
          .finish_reason = answer.finish_reason,
          .stop_reason = answer.stop_reason,
          .call = answer.call};
}

size_t hash_of(std::string_view response, std::string_view tenant) {
  const std::hash<std::string_view> hash;
  return hash(response) * 31 + hash(tenant);
}

size_t hash_of_call(const Answer& answer) {
  return hash_of(answer.response, answer.tenant) * 31 + std::hash<uint64_t>{}(answer.call);
}

Error no_answer(const std::string& id) {
  return {.code = Code::kNotFound,
          .what = fmt::format("there is no answer {}", id),
          .next_step = "ask for one that was begun here"};
}

// Reserve memory for `more` elements, so that adding them cannot fail.
template <class Sequence>
void make_room(Sequence& in, size_t more) {
  if (in.capacity() - in.size() < more) in.reserve(std::max(in.capacity() * 2, in.size() + more));
}

}  // namespace

const Answer* AnswerTable::get(const std::string& id) const {
  const auto found = answers_.find(id);
  return found == answers_.end() ? nullptr : &found->second;
}

std::vector<Answer> AnswerTable::all() const {
  std::vector<Answer> all;
  for (const std::string& id : order_) all.push_back(answers_.at(id));
  return all;
}

uint64_t AnswerTable::running() const {
  return static_cast<uint64_t>(std::count_if(
      answers_.begin(), answers_.end(), [](const auto& entry) { return entry.second.state == AnswerState::kRunning; }));
}

std::vector<std::string> AnswerTable::find(std::string_view response, std::string_view tenant) const {
  const auto [first, last] = by_response_.equal_range(std::pair(std::string(tenant), std::string(response)));
  if (first == last) return {};
  const uint64_t call =
      answers_.at(std::prev(last)->second).call;  // of the newest answer: they are in the order of their start
  std::map<int32_t, std::string> choices;
  for (auto entry = first; entry != last; ++entry) {
    const Answer& answer = answers_.at(entry->second);
    if (answer.call == call) choices[answer.choice] = answer.request.id;
  }
  std::vector<std::string> ids;
  for (auto& [choice, id] : choices) ids.push_back(std::move(id));
  return ids;
}

Result<AnswerPart> AnswerTable::position(const std::string& id) const {
  const auto found = answers_.find(id);
  if (found == answers_.end()) return no_answer(id);
  return end_of(found->second);
}

std::vector<std::optional<AnswerEnds>> AnswerTable::running_ends(std::span<const std::string_view> ids) const {
  std::vector<std::optional<AnswerEnds>> ends(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto found = answers_.find(ids[i]);
    if (found == answers_.end() || found->second.state != AnswerState::kRunning) continue;
    const Answer& answer = found->second;
    ends[i] = {.tokens = static_cast<uint32_t>(answer.request.output_token_ids.size()),
               .text = answer.text_ends.empty() ? 0 : answer.text_ends.back()};
  }
  return ends;
}

Result<AnswerPart> AnswerTable::part(const std::string& id, uint32_t from_token, uint32_t from_text) const {
  const auto found = answers_.find(id);
  if (found == answers_.end()) return no_answer(id);
  const Answer& answer = found->second;
  const std::vector<int32_t>& tokens = answer.request.output_token_ids;
  AnswerPart part = end_of(answer);
  if (from_token > part.tokens_end)
    return wrong_call(fmt::format("the answer has {} tokens, {} is beyond them", part.tokens_end, from_token));
  if (from_text > part.text_end)
    return wrong_call(fmt::format("the answer has {} characters, {} is beyond them", part.text_end, from_text));
  if (from_text > 0) {
    from_token = static_cast<uint32_t>(std::upper_bound(answer.text_ends.begin(), answer.text_ends.end(), from_text) -
                                       answer.text_ends.begin());
  } else if (from_token > 0) {
    from_text = answer.text_ends[from_token - 1];
  }
  part.tokens.assign(tokens.begin() + from_token, tokens.end());
  part.text = answer.text.substr(offset_of(answer.text, from_text));
  return part;
}

void AnswerTable::put(Answer answer) {
  std::string id = answer.request.id;
  make_room(order_, 1);
  if (answer.state != AnswerState::kRunning) forget_what_ran(answer);
  const uint64_t bytes = answer.state != AnswerState::kRunning ? size_of(answer) : 0;
  const size_t hash = hash_of(answer.response, answer.tenant);
  const auto entry = by_response_.emplace(std::pair(answer.tenant, answer.response), id);
  try {
    answers_.emplace(id, std::move(answer));
  } catch (...) {
    by_response_.erase(entry);
    throw;
  }
  order_.push_back(std::move(id));
  ended_bytes_ += bytes;
  if (!dropped_at_.empty()) dropped_at_.erase(hash);  // the response has begun again
}

Result<std::vector<Answer*>> AnswerTable::prepare(const std::vector<AnswerStep>& steps) {
  std::vector<Answer*> answers;
  answers.reserve(steps.size());
  for (const AnswerStep& step : steps) {
    const auto found = answers_.find(step.id);
    if (found == answers_.end()) return wrong_call(fmt::format("there is no answer {}", step.id));
    Answer& answer = found->second;
    const size_t known = answer.request.output_token_ids.size();
    if (answer.state != AnswerState::kRunning) return wrong_call(fmt::format("the answer {} has ended", step.id));
    if (step.at != known)
      return wrong_call(fmt::format("the answer {} has {} tokens, a step begins at {}", step.id, known, step.at));
    const auto most = static_cast<size_t>(std::max(answer.request.max_tokens, 0));
    if (known > most || step.tokens.size() > most - known)
      return wrong_call(fmt::format("the answer {} may have {} tokens, a step brings it to {}", step.id, most,
                                    known + step.tokens.size()));
    if (std::any_of(step.tokens.begin(), step.tokens.end(), [](int32_t token) { return token < 0; }))
      return wrong_call(fmt::format("a step of the answer {} has a negative token", step.id));
    const bool ends = step.state != AnswerState::kRunning;
    if ((ends ? step.note : step.stop_reason) != Value{})
      return wrong_call(fmt::format("a step that {} the answer {} has {}", ends ? "ends" : "does not end", step.id,
                                    ends ? "a note" : "a stop reason"));
    make_room(answer.request.output_token_ids, step.tokens.size());
    make_room(answer.text_ends, step.tokens.size());
    make_room(answer.text, step.text.size());
    answers.push_back(&answer);
  }
  std::vector<Answer*> sorted = answers;
  std::sort(sorted.begin(), sorted.end());
  if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end())
    return wrong_call(fmt::format("two steps of the answer {} at once", (*twice)->request.id));
  return answers;
}

void AnswerTable::apply(AnswerStep& step, Answer& answer) {
  std::vector<int32_t>& tokens = answer.request.output_token_ids;
  const uint32_t text_end = (answer.text_ends.empty() ? 0 : answer.text_ends.back());
  tokens.insert(tokens.end(), step.tokens.begin(), step.tokens.end());
  answer.text_ends.resize(tokens.size(), text_end);
  answer.text += step.text;
  if (!answer.text_ends.empty()) answer.text_ends.back() = text_end + code_points(step.text);
  answer.note = std::move(step.note);
  if (step.state == AnswerState::kRunning) return;
  answer.note = Value{};
  answer.stop_reason = std::move(step.stop_reason);
  answer.state = step.state;
  answer.finish_reason = std::move(step.finish_reason);
  answer.ended = step.time;
  forget_what_ran(answer);
  ended_bytes_ += size_of(answer);
}

bool AnswerTable::is_past(const Answer& answer, double now) const {
  return answer.state != AnswerState::kRunning && now - answer.ended > keep_seconds_;
}

std::unordered_set<std::string> AnswerTable::too_old(double now) const {
  std::unordered_set<std::string> old;
  for (const auto& [id, answer] : answers_) {
    if (is_past(answer, now)) old.insert(id);
  }
  if (old.empty()) return old;
  std::unordered_set<size_t> kept;  // hashes of calls; one that is like another's keeps that a while longer
  for (const auto& [id, answer] : answers_) {
    if (!is_past(answer, now)) kept.insert(hash_of_call(answer));
  }
  std::erase_if(old, [&](const std::string& id) { return kept.contains(hash_of_call(answers_.at(id))); });
  return old;
}

void AnswerTable::forget_old(double now) {
  while (!drops_.empty() && now - drops_.front().second > keep_seconds_) forget_oldest_drop();
  try {
    const std::unordered_set<std::string> old = too_old(now);
    for (const std::string& id : old) take_out(id);
  } catch (const std::bad_alloc&) {}  // the rest is forgotten next time
  if (order_.size() > answers_.size())
    std::erase_if(order_, [&](const std::string& id) { return !answers_.contains(id); });
  if (over_budget()) drop_oldest();
}

// Drop the oldest calls, each as a whole, of which all choices have ended. Not the oldest responses: a client that
// uses an id again and again always has an answer under it that runs.
void AnswerTable::drop_oldest() {
  try {
    for (const std::string& id : order_) {
      if (!over_budget()) break;
      const auto found = answers_.find(id);
      if (found == answers_.end()) continue;  // it was dropped with an earlier choice
      const std::vector<std::string> choices = of_call(found->second);
      const bool runs = std::any_of(choices.begin(), choices.end(), [&](const std::string& choice) {
        return answers_.at(choice).state == AnswerState::kRunning;
      });
      if (runs) continue;
      remember_drop(found->second, choices.size());
      for (const std::string& choice : choices) take_out(choice);
    }
  } catch (const std::bad_alloc&) {}  // the rest is dropped next time
  std::erase_if(order_, [&](const std::string& id) { return !answers_.contains(id); });
}

std::vector<std::string> AnswerTable::of_call(const Answer& answer) const {
  const auto [first, last] = by_response_.equal_range(std::pair(answer.tenant, answer.response));
  std::vector<std::string> ids;
  for (auto entry = first; entry != last; ++entry) {
    if (answers_.at(entry->second).call == answer.call) ids.push_back(entry->second);
  }
  return ids;
}

// Aborted and failed responses are not remembered: they may begin again, and for a reader they do not exist. Nor is a
// response of which another call is here: readers get that one's answer.
void AnswerTable::remember_drop(const Answer& answer, size_t choices) {
  dropped_ += choices;
  if (answer.state != AnswerState::kFinished) return;
  if (by_response_.count(std::pair(answer.tenant, answer.response)) > choices) return;
  if (drops_.size() >= kMostDropped) forget_oldest_drop();
  const size_t hash = hash_of(answer.response, answer.tenant);
  drops_.emplace_back(hash, answer.ended);
  dropped_at_[hash] = answer.ended;
}

void AnswerTable::forget_oldest_drop() {
  const auto [hash, ended] = drops_.front();
  const auto found = dropped_at_.find(hash);
  if (found != dropped_at_.end() && found->second == ended) dropped_at_.erase(found);
  drops_.pop_front();
}

bool AnswerTable::was_dropped(std::string_view response, std::string_view tenant) const {
  return dropped_at_.contains(hash_of(response, tenant));
}

void AnswerTable::forget(const std::string& id) {
  take_out(id);
  order_.erase(std::find(order_.begin(), order_.end(), id));
}

void AnswerTable::take_out(const std::string& id) {
  const Answer& answer = answers_.at(id);
  const auto [first, last] = by_response_.equal_range(std::pair(answer.tenant, answer.response));
  ended_bytes_ -= size_of(answer);
  by_response_.erase(std::find_if(first, last, [&](const auto& entry) { return entry.second == id; }));
  answers_.erase(id);
}

void AnswerTable::clear() {
  order_.clear();
  answers_.clear();
  by_response_.clear();
  ended_bytes_ = 0;
}

}  // namespace torpor
