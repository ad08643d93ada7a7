// SPDX-License-Identifier: Apache-2.0
// A file of the response log, with bytes from the fuzzer, and a server that starts with it. Each record has a digest,
// which would keep the fuzzer out: so the first byte says whether the rest is the file, or records of one length each
// that get a right one. Whatever is believed must be of one piece, and the same for the server after this one.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <source_location>

#include "engine/delivery/delivery_log.h"
#include "engine/delivery/roll_forward.h"
#include "tests/support/example_state.h"
#include "tests/support/manual_clock.h"
#include "tests/support/model_file_system.h"

namespace {

using namespace torpor;

void require(bool held, std::source_location where = std::source_location::current()) {
  if (held) return;
  std::fprintf(stderr, "line %u does not hold\n", static_cast<unsigned>(where.line()));
  std::abort();
}

Status write_file(FileSystem& file_system, const uint8_t* data, size_t size) {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> directory, file_system.open_directory("/log", true));
  const std::span bytes(data, size);
  if (size > 0 && data[0] == 0) {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, directory->create_file(delivery_log_file_name(1)));
    return file->pwrite(std::as_bytes(bytes.subspan(1)), 0);
  }
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<DeliveryLogFile> file,
                          DeliveryLogFile::create(*directory, 1, nullptr, false));
  for (size_t at = 1; at + 2 <= size;) {
    const size_t length = std::min<size_t>(data[at] + 256u * data[at + 1], size - at - 2);
    const auto record = bytes.subspan(at + 2, length);
    TORPOR_RETURN_IF_ERROR(file->append(Bytes(record.begin(), record.end())));
    at += 2 + length;
  }
  return ok();
}

Result<std::unique_ptr<DeliveryLog>> open(FileSystem& file_system, const Clock& clock) {
  return DeliveryLog::open(file_system,
                           {.clock = &clock, .directory = "/log", .engine = {{"model", "a"}}, .own_thread = false});
}

// Compared as bytes: a NaN equals nothing.
std::vector<Bytes> content_of(const DeliveryLog& answers) {
  std::vector<Bytes> content;
  for (const Answer& answer : answers.all()) content.push_back(answer_record(answer));
  return content;
}

// From whatever token a reader goes on, it gets the rest.
void read_in_parts(const DeliveryLog& answers, const Answer& answer) {
  const std::string& id = answer.request.id;
  const std::vector<int32_t>& tokens = answer.request.output_token_ids;
  require(answer.request.validate().has_value());
  require(answers.part(id, 0)->text == answer.text);
  for (uint32_t from = 0; from <= tokens.size(); ++from) {
    const Result<AnswerPart> part = answers.part(id, from);
    require(part && std::equal(part->tokens.begin(), part->tokens.end(), tokens.begin() + from, tokens.end()));
    require(answer.text.ends_with(part->text));
    if (from == 0 || from == tokens.size()) continue;
    const Result<AnswerPart> next = answers.part(id, from + 1);
    require(part->text.ends_with(next->text));
  }
  const std::vector<std::string> found = answers.find(answer.response, answer.tenant);
  require(!found.empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int quiet = ::setenv("TORPOR_LOG", "off", 0);
  static const CapturedState example = test::example_checkpoint().state;
  const test::ManualClock clock;
  test::ModelFileSystem file_system;
  require(quiet == 0 && write_file(file_system, data, size).has_value());
  std::vector<Bytes> content;
  {
    const Result<std::unique_ptr<DeliveryLog>> answers = open(file_system, clock);
    if (!answers) return 0;
    const std::vector<Answer> all = (*answers)->all();
    for (const Answer& answer : all) read_in_parts(**answers, answer);
    CapturedState state = example;
    if (roll_forward(state, all, false)) require(state.validate().has_value());
    const auto running = std::find_if(all.begin(), all.end(), [](const Answer& answer) {
      return answer.state == AnswerState::kRunning &&
             static_cast<int64_t>(answer.request.output_token_ids.size()) < answer.request.max_tokens;
    });
    if (running != all.end()) {
      const auto given = static_cast<uint32_t>(running->request.output_token_ids.size());
      require((*answers)->step({{.id = running->request.id, .at = given, .tokens = {7}, .text = "x"}}).has_value());
      read_in_parts(**answers, *(*answers)->get(running->request.id));
    }
    content = content_of(**answers);
  }
  const Result<std::unique_ptr<DeliveryLog>> next = open(file_system, clock);
  require(next.has_value() && content_of(**next) == content);
  return 0;
}
