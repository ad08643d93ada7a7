// SPDX-License-Identifier: Apache-2.0
// DeliveryLogDirectory: the directory of a response log: who owns it, which numbered files it has, and what an earlier
// server left in them.
//
// A file counts once it is complete; until then the one before it counts. So a new file is made beside the older ones,
// and those are deleted when the new one is durable. Files that are to be kept are set aside under other names before
// the new one is complete: otherwise the next server would delete them after a kill.
//
// Owner: a DeliveryLog, or who looks into the directory of another server. Threads: one at a time. Failure: errors are
// values. A number is never used twice, whatever became of its file.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/file_system.h"
#include "engine/delivery/answer_table.h"
#include "engine/delivery/delivery_log_file.h"

namespace torpor {

// What to do with answers that still run and belong to another engine.
enum class OtherEngine {
  kRefuse,  // fail; the log stays as it was
  kTakeUp,  // take them over; the caller computes them again
  // End them as failed, rename the log's files, and begin a new log. Of a log that cannot be read (it has another
  // format, or another seal) the files are renamed too, and the new log is empty.
  kSetAside,
};

// Who reads a log.
struct DeliveryLogReader {
  const Fingerprint& engine;  // that serves
  OtherEngine other_engine = OtherEngine::kRefuse;
  const Key* key = nullptr;  // of the seal; null: there is none
};

// What reading a log found out, beside its answers.
struct DeliveryLogFound {
  uint64_t lost_bytes = 0;  // of the log, from damage on
  std::string of_another;   // why the log counts as another engine's; empty: it does not
  bool sets_aside = false;  // the files that it was read from are to be set aside
};

class DeliveryLogDirectory {
 public:
  // Make the directory if it is absent, and lock it. kUnavailable: another server uses it.
  static Result<std::unique_ptr<DeliveryLogDirectory>> open(FileSystem& file_system, const std::string& path);

  // Read the files that were there at open() into `answers`, which is empty. Nothing is written. `clock`: no answer is
  // newer than it. kIncompatible: running answers belong to another engine (OtherEngine). kUnauthenticated: the log has
  // another seal.
  Result<DeliveryLogFound> read(AnswerTable& answers, const DeliveryLogReader& reader, const Clock& clock);

  // Make the next file, which is empty, sealed if there is a key.
  Result<std::shared_ptr<DeliveryLogFile>> create(const Key* key, bool encrypt);
  Status sync() { return directory_->sync(); }  // makes the names of files durable
  // Remove a file that was not completed. Readers ignore it in any case.
  void remove(uint64_t number) { (void)directory_->remove_file(delivery_log_file_name(number)); }
  // Remove all files before this one. What cannot be removed is logged, and stays.
  Status remove_older(uint64_t number);
  // Rename all files before this one, and sync. This one has all answers and is synced, but is not complete. Return the
  // path of the file that read() took the answers from; empty: there was none. After a rename that failed this file is
  // removed, and that one is as it was.
  Result<std::string> set_aside_older(uint64_t number);

  // Let another server open the directory. The owner uses it no more, except to look whether there is one.
  void unlock() { lock_.reset(); }

 private:
  DeliveryLogDirectory(std::unique_ptr<Directory> directory, std::string path)
      : directory_(std::move(directory)), path_(std::move(path)) {}
  Status read_files(AnswerTable& answers, const DeliveryLogReader& reader, const Clock& clock, DeliveryLogFound& found);
  Result<std::vector<uint64_t>> numbers() const;   // ascending
  Result<std::string> set_aside(uint64_t number);  // return the new name

  const std::unique_ptr<Directory> directory_;
  const std::string path_;
  std::unique_ptr<File> lock_;     // null: released
  std::vector<uint64_t> at_open_;  // numbers of files, ascending
  uint64_t counts_ = 0;            // number of the file that read() took the answers from; 0: none
  uint64_t newest_ = 0;            // the highest number that was used, also by a file that was set aside
};

}  // namespace torpor
