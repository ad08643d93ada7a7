// SPDX-License-Identifier: Apache-2.0
// The bytes of a delivery log: its files (engine/delivery/FORMAT.md), and answers as bytes for another process.
//
// A file begins with the state at the time of its begin. A mark ends that state: a file with the mark is whole and
// counts alone; without it the file before counts. Then come the changes. Reading a file ends at a record that is cut
// off or damaged.
//
// Owner: DeliveryLog. Threads: free functions any. Failure: errors are values.
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

// Records, not sealed yet.
Bytes engine_record(const Fingerprint& engine);  // the engine whose tokens these are
Bytes answer_record(const Answer& answer);       // its present state
Bytes steps_record(const std::vector<AnswerStep>& steps);
Bytes whole_record();  // the mark that ends the state at the file's begin

// A file that is being written. Owner: DeliveryLog. Threads: one calls append(); sync() may run beside it.
class DeliveryLogFile {
 public:
  // Create a file. `key` null: records are protected against accidents only. Errors: those of Directory::create_file().
  static Result<std::unique_ptr<DeliveryLogFile>> create(Directory& directory, uint64_t number, const Key* key,
                                                         bool encrypt);
  // Append a record. After an error the file lacks it, and records that are appended later will not be read.
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

// Receives what is read, in order. A function that returns false ends the reading, as damage does.
struct DeliveryLogSink {
  std::function<void(Fingerprint)> engine;
  std::function<bool(Answer)> answer;
  std::function<bool(std::vector<AnswerStep>)> steps;
};
struct DeliveryLogFileRead {
  bool whole = false;
  uint64_t lost_bytes = 0;  // from the first damage on
};
// Read a file. kIncompatible: it has another format version. kUnauthenticated: it is not sealed with `key`.
Result<DeliveryLogFileRead> read_delivery_log_file(const Directory& directory, const std::string& name, const Key* key,
                                                   const DeliveryLogSink& sink);

// Encode what a new engine needs to let the requests go on, for the process of that engine; of ended requests only that
// they have ended.
Bytes pack_answers(std::vector<Answer> answers);
Result<std::vector<Answer>> unpack_answers(std::span<const std::byte> bytes);

}  // namespace torpor
