// SPDX-License-Identifier: Apache-2.0
#include "engine/delivery/roll_forward.h"

#include <algorithm>
#include <unordered_map>

#include "checkpoint/repair.h"

namespace torpor {
namespace {

// Return the request as a scheduler would hold it after it lost its blocks; if it has no tokens of its own, as a new
// one.
RequestState begun_again(RequestState request) {
  request.status = request.output_token_ids.empty() ? RequestStatus::kWaiting : RequestStatus::kPreempted;
  request.num_computed_tokens = 0;
  request.num_preemptions = request.output_token_ids.empty() ? 0 : 1;
  request.block_hashes.clear();
  request.block_hash_bytes = 0;
  return request;
}

// Return the request of an answer as the checkpoint has it: no log has the images or embeddings of a prompt.
RequestState with_inputs_of(const RequestState& saved, const RequestState& answered) {
  if (saved.prompt_token_ids != answered.prompt_token_ids) return answered;  // another request has its id now
  RequestState request = saved;
  request.output_token_ids = answered.output_token_ids;
  return request;
}

bool begins_with(const std::vector<int32_t>& tokens, const std::vector<int32_t>& start) {
  return tokens.size() >= start.size() && std::equal(start.begin(), start.end(), tokens.begin());
}

}  // namespace

Result<RolledForward> roll_forward(CapturedState& state, std::span<const Answer> answers, bool forgotten,
                                   bool may_extend) {
  return try_catch([&]() -> Result<RolledForward> {
    RolledForward rolled;
    std::unordered_map<std::string, RequestState*> known;
    for (RequestState& request : state.scheduler.requests) known.emplace(request.id, &request);
    std::vector<RequestState> anew;
    for (const Answer& answer : answers) {
      const auto found = known.find(answer.request.id);
      if (answer.state != AnswerState::kRunning) {
        if (found != known.end()) rolled.dropped.push_back(answer.request.id);
        continue;
      }
      if (found == known.end()) {
        anew.push_back(begun_again(answer.request));
        continue;
      }
      RequestState& request = *found->second;
      const std::vector<int32_t>& given = answer.request.output_token_ids;
      if (begins_with(request.output_token_ids, given)) continue;
      if (may_extend && begins_with(given, request.output_token_ids) && request.status != RequestStatus::kWaiting) {
        request.output_token_ids = given;
        rolled.extended.push_back(request.id);
      } else {  // the delivered tokens count; and a waiting request has no tokens
        rolled.dropped.push_back(request.id);
        anew.push_back(begun_again(with_inputs_of(request, answer.request)));
      }
    }
    if (forgotten) {
      for (const Answer& answer : answers) known.erase(answer.request.id);
      for (const auto& [id, request] : known) rolled.dropped.push_back(id);
    }
    for (const std::string& id : rolled.dropped) drop_request(state, id);
    for (RequestState& request : anew) {
      state.scheduler.waiting.push_back(request.id);
      rolled.added.push_back(request.id);
      state.scheduler.requests.push_back(std::move(request));
    }
    TORPOR_RETURN_IF_ERROR(state.validate());
    return rolled;
  });
}

std::function<Status(CapturedState& state, bool woken_before)> catch_up_with(std::vector<Answer> answers,
                                                                             RolledForward& rolled, bool may_extend) {
  return [answers = std::move(answers), &rolled, may_extend](CapturedState& state, bool woken_before) -> Status {
    TORPOR_ASSIGN_OR_RETURN(rolled, roll_forward(state, answers, woken_before, may_extend));
    return ok();
  };
}

}  // namespace torpor
