// SPDX-License-Identifier: Apache-2.0
// The bytes of a delivery log: its files (engine/delivery/FORMAT.md), and answers on their way to another process.
//
// A file begins with the state at its begin, whose end a mark tells: only with it the file is whole and counts alone;
// without it the file before it counts. Then come the changes. A record that is cut off or damaged ends the reading of
// its file.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_system.h"
#include "base/seal.h"
#include "checkpoint/manifest.h"
#include "engine/delivery/answer.h"

namespace torpor {

std::string delivery_log_file_name(uint64_t number);  // "answers-000000000042"
std::optional<uint64_t> delivery_log_file_number(std::string_view name);

// Records, before they are sealed.
Bytes engine_record(const Fingerprint& engine);  // whose tokens these are
Bytes answer_record(const Answer& answer);       // as it is now
Bytes steps_record(const std::vector<AnswerStep>& steps);
Bytes whole_record();  // the end of the state that the file began with

// A file that is being written. Owner: DeliveryLog. Threads: append() from one at a time, sync() beside it.
class DeliveryLogFile {
 public:
  // `key` null: only protected against accidents. Errors: Directory::create_file().
  static Result<std::unique_ptr<DeliveryLogFile>> create(Directory& directory, uint64_t number, const Key* key,
                                                         bool encrypt);
  // A failure leaves the record out; what is appended later is not read then.
  Status append(const Bytes& record);
  Status sync() { return file_->sync(); }
  uint64_t bytes() const { return end_; }
  uint64_t number() const { return number_; }

 private:
  DeliveryLogFile() = default;
  uint64_t number_ = 0;
  std::shared_ptr<File> file_;
  std::unique_ptr<Seal> seal_;
  uint64_t end_ = 0;
};

// Who takes what is read, in its order. False: it does not fit, and ends the reading as damage does.
struct DeliveryLogSink {
  std::function<void(Fingerprint)> engine;
  std::function<bool(Answer)> answer;
  std::function<bool(std::vector<AnswerStep>)> steps;
};
struct DeliveryLogFileRead {
  bool whole = false;
  uint64_t lost_bytes = 0;  // from damage on
};
// kIncompatible: of another version. kUnauthenticated: sealed otherwise than with `key`.
Result<DeliveryLogFileRead> read_delivery_log_file(const Directory& directory, const std::string& name, const Key* key,
                                                   const DeliveryLogSink& sink);

// What a new engine needs to let the requests go on, as bytes for the way to the process of the engine; of ended ones,
// that they have ended.
Bytes pack_answers(std::vector<Answer> answers);
Result<std::vector<Answer>> unpack_answers(std::span<const std::byte> bytes);

}  // namespace torpor
