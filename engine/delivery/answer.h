// SPDX-License-Identifier: Apache-2.0
// Answer: what one request of a server asked for, and the tokens and text delivered so far. Plain values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "scheduler_state/request_state.h"

namespace torpor {

enum class AnswerState : uint8_t { kRunning, kFinished, kAborted, kFailed };

inline std::string_view name(AnswerState state) {
  switch (state) {
    case AnswerState::kRunning: return "running";
    case AnswerState::kFinished: return "finished";
    case AnswerState::kAborted: return "aborted";
    case AnswerState::kFailed: return "failed";
  }
  return "?";
}

inline uint32_t code_points(std::string_view text) {
  return static_cast<uint32_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<uint8_t>(c) & 0xC0) != 0x80; }));
}

// One choice of one response.
// The entry of Answer::front that stays when the answer has ended: the prompt's text, if readers get it first.
inline constexpr std::string_view kEchoField = "echo";

struct Answer {
  RequestState
      request;  // the request as asked; output_token_ids: tokens delivered. Its status and computed tokens are unused.
  std::string response;  // id that clients know
  std::string tenant;    // tenant that may see it; empty: any
  uint64_t call = 0;     // number of the client's call, which the choices of one call share; 0: not known
  int32_t choice = 0;
  // Data of the adapter's front end. Of an ended answer it is kEchoField alone, and `request` has no data of the
  // engine.
  Value front;
  std::string text;                 // delivered so far, UTF-8
  std::vector<uint32_t> text_ends;  // for each token: code points of `text` up to its end
  AnswerState state = AnswerState::kRunning;
  std::string finish_reason;
  Value stop_reason;   // of an ended answer
  Value note;          // of a running answer: the server's own, until its next step; readers get none
  double created = 0;  // seconds since 1970
  double ended = 0;
  friend bool operator==(const Answer&, const Answer&) = default;
};

// The tokens and text that one engine step adds to one answer.
struct AnswerStep {
  std::string id;
  uint32_t at = 0;  // number of tokens that were delivered before
  std::vector<int32_t> tokens;
  std::string text;
  AnswerState state = AnswerState::kRunning;
  std::string finish_reason;
  Value stop_reason;  // of a step that ends the answer
  Value note;         // of any other step, as in Answer
  double time = 0;    // seconds since 1970; DeliveryLog sets it
};

// The present end of a running answer.
struct AnswerEnds {
  uint32_t tokens = 0;
  uint32_t text = 0;  // code points
  friend bool operator==(const AnswerEnds&, const AnswerEnds&) = default;
};

// A part of an answer, from some token or some code point of its text on.
struct AnswerPart {
  std::vector<int32_t> tokens;
  std::string text;
  uint32_t tokens_end = 0;  // tokens of the answer up to the end of this part
  uint32_t text_end = 0;    // the same in code points
  AnswerState state = AnswerState::kRunning;
  std::string finish_reason;
  Value stop_reason;
  uint64_t call = 0;
};

}  // namespace torpor
