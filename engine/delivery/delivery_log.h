// SPDX-License-Identifier: Apache-2.0
// DeliveryLog: what each request of a server asked for, and what was delivered to its readers so far; in memory, and in
// a log that survives the end of the process.
//
// A server records here before it delivers. After a crash every request can go on from what was delivered, and readers
// that lost their connection can resume their answers. A directory holds the log of one server at a time.
//
// The log is a numbered file of records (engine/delivery/delivery_log_file.h) in a directory
// (engine/delivery/delivery_log_directory.h). rotate() begins a new file beside it: at each start, after a failed
// write, and when the file has grown to several times the size of what is still needed. It writes the state, answer by
// answer; then what was recorded meanwhile; syncs; then, while writers wait, what was recorded during the sync, and the
// mark that completes the file. From then on records go into the new file. It is synced, and the older files are
// deleted. Until the mark is written the older file counts, and has everything. Older files that are to be kept get
// other names before the mark is written; without them the new file counts, and has everything. A kill or power loss
// loses the last records, never earlier ones.
//
// Times of answers come from a wall clock that ignores later changes of the machine's clock.
//
// Threads: all methods from any thread. Reading never waits for a file. Recording waits for writes of earlier records,
// never for a sync or a new file. A thread of its own rotates. Failure: errors are values; if a write fails, what could
// not be written stays in memory, and unwritten() names it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_set>
#include <vector>

#include "base/clock.h"
#include "base/file_system.h"
#include "base/mutex.h"
#include "base/seal.h"
#include "engine/delivery/answer_table.h"
#include "engine/delivery/delivery_log_directory.h"
#include "engine/delivery/delivery_log_file.h"

namespace torpor {

struct DeliveryLogOptions {
  const Clock* clock = nullptr;  // required
  std::string directory;         // made if it is absent; empty: in memory only
  Fingerprint engine;            // fingerprint of the engine that serves
  OtherEngine other_engine = OtherEngine::kRefuse;
  double keep_seconds = 3600;          // how long ended answers stay; they go when an answer begins
  uint64_t keep_bytes = 256ull << 20;  // the most bytes of ended answers in memory; beyond it the oldest are removed
  uint64_t file_bytes =
      64ull << 20;  // a file is replaced when it is larger than this, and than four times the size that it began with
  std::shared_ptr<const Key> key;  // seals the log; null: none
  bool encrypt = false;
  bool own_thread = true;  // false: the owner calls rotate() if rotation_due()
};

class DeliveryLog {
 public:
  // Open the log, and read what an earlier server left. kUnavailable: another server uses the directory. kIncompatible:
  // answers that still run belong to another engine (OtherEngine). kUnauthenticated: the log has another seal. After an
  // error the log is as it was.
  static Result<std::unique_ptr<DeliveryLog>> open(FileSystem& file_system, DeliveryLogOptions options);
  // Return how many answers of an earlier server still run. Nothing is written. Errors: those of open().
  static Result<uint64_t> count_running(FileSystem& file_system, DeliveryLogOptions options);
  ~DeliveryLog();

  // Record a new answer. kInvalidArgument: its id is in use.
  Status start(Answer answer);
  // Record all steps in one record. kInvalidArgument: an id is unknown, two steps are of one answer, or a step does not
  // begin where its answer ends, or goes beyond its max_tokens; then nothing is recorded.
  Status step(std::vector<AnswerStep> steps);
  // Return when all that was recorded before is durable.
  Status sync();
  // Return whether a new file should begin: the file has grown, or a write failed some time ago.
  bool rotation_due() const;
  // Begin a new file. Return when it is durable and the older files are deleted. kUnavailable: another thread does that
  // already, or the log is handed over. After any other failure the log is as it was, and what could not be written
  // stays in memory only.
  Status rotate();
  // Record nothing from now on. Call it when the process is about to end: what happens to requests after that is not
  // their outcome.
  void close();
  // Let another server of this machine open the log: make all that was recorded durable, and release the lock. Nothing
  // is recorded from then on; readers still get what was recorded before. After an error the log is as it was.
  // kFailedPrecondition: the log is in memory only, is closed, or lacks records that could not be written.
  Status hand_over();
  // Own the log again after hand_over(). kUnavailable: another server has it. kFailedPrecondition: another server has
  // given more of an answer, or has ended or begun one, so what is in memory here is behind. An answer that another
  // server could not go on with (kFailed) is as it was here. After an error it is still handed over.
  Status take_back();

  // Return the ids of the choices of a response, in their order; if a client used an id again, of its newest call.
  // Empty: there is no such answer, or another tenant has it.
  std::vector<std::string> find(std::string_view response, std::string_view tenant) const;
  // Return a part of an answer. At most one of `from_token` and `from_text` is set; the other is 0. kNotFound: there is
  // no such answer. kInvalidArgument: the position is beyond its end.
  Result<AnswerPart> part(const std::string& id, uint32_t from_token, uint32_t from_text = 0) const;
  Result<AnswerPart> position(const std::string& id) const;  // end and state, without content
  // Return the end of each answer; none if there is no such answer, or it has ended.
  std::vector<std::optional<AnswerEnds>> running_ends(std::span<const std::string_view> ids) const;
  // Return whether the last ended answer of this response was removed for keep_bytes, less than keep_seconds after its
  // end. Known only since open(), and for the last 65,536 of them.
  bool was_dropped(std::string_view response, std::string_view tenant) const;
  uint64_t dropped() const;  // number of ended answers removed for keep_bytes since open()
  // Return the ids of answers of which the file lacks records, as writes failed. rotate() writes them.
  std::vector<std::string> unwritten() const;
  std::optional<Answer> get(const std::string& id) const;
  std::vector<Answer> all() const;  // in the order of their start

  struct Counts {
    uint64_t running = 0;
    uint64_t ended = 0;
    uint64_t log_bytes = 0;
    uint64_t lost_bytes = 0;  // of the log that open() read, from damage on
    uint64_t dropped = 0;     // as dropped()
    std::string of_another;   // why open() took over or set aside another engine's log; empty: it did not
    std::string set_aside;    // path of the log that was set aside; empty: none was
    uint64_t discarded = 0;   // running answers of a log that was set aside; open() ended them with kFailed
    std::string problem;      // why the log cannot be written now; empty: it can
  };
  Counts counts() const;

 private:
  // A new file that is being written. Records of answers that it has already are kept for its end.
  struct Rotation {
    std::unordered_set<std::string> written;
    std::vector<Bytes> tail;
    bool incomplete = false;  // the tail is incomplete, for want of memory
    bool switched = false;    // records go into the new file
  };

  DeliveryLog(FileSystem& file_system, DeliveryLogOptions options);
  void run();  // of the thread

  Status append(const Bytes& record) TORPOR_REQUIRES(writer_);

  Status read_directory() TORPOR_REQUIRES(mutex_);
  Status end_those_of_another() TORPOR_REQUIRES(mutex_);
  void forget_old() TORPOR_REQUIRES(mutex_);
  bool due() const TORPOR_REQUIRES(mutex_);
  void failed(const Error& why, std::chrono::nanoseconds retry) TORPOR_REQUIRES(mutex_);
  void note(const std::function<Bytes()>& record) TORPOR_REQUIRES(mutex_);

  std::shared_ptr<DeliveryLogFile> file() const TORPOR_EXCLUDES(mutex_);
  Result<std::shared_ptr<DeliveryLogFile>> write_beside() TORPOR_EXCLUDES(writer_, mutex_);
  Status append_tail(DeliveryLogFile& file) TORPOR_EXCLUDES(mutex_);
  Status switch_to(const std::shared_ptr<DeliveryLogFile>& file) TORPOR_EXCLUDES(writer_, mutex_);
  Status set_aside_older(uint64_t number) TORPOR_EXCLUDES(writer_, mutex_);

  FileSystem& file_system_;
  const DeliveryLogOptions options_;
  const UnsteppedClock clock_;
  // Null: in memory only. After open(), used only by the thread that rotates, that hands over when no other rotates, or
  // that takes back.
  std::unique_ptr<DeliveryLogDirectory> directory_;

  // Held while recording: from the check over the write to the change in memory. Taken before mutex_.
  Mutex writer_;
  bool writable_ TORPOR_GUARDED_BY(writer_) = true;  // false: the file lacks a record, so no other may follow

  mutable Mutex mutex_;                            // never held over a file call
  AnswerTable answers_ TORPOR_GUARDED_BY(mutex_);  // changed only with writer_ held, too
  // Forget old answers at the next start(), so that no answer disappears between two other calls of the writer.
  bool forget_ TORPOR_GUARDED_BY(mutex_) = false;
  double forget_at_ TORPOR_GUARDED_BY(mutex_) = 0;  // also at the first start() from this time on
  // Null: in memory only. Changed only with writer_ held, too.
  std::shared_ptr<DeliveryLogFile> file_ TORPOR_GUARDED_BY(mutex_);
  std::optional<Rotation> rotation_ TORPOR_GUARDED_BY(mutex_);
  uint64_t log_bytes_ TORPOR_GUARDED_BY(mutex_) = 0;   // of file_
  uint64_t began_with_ TORPOR_GUARDED_BY(mutex_) = 0;  // size of the state that file_ began with
  uint64_t lost_bytes_ TORPOR_GUARDED_BY(mutex_) = 0;
  std::string of_another_ TORPOR_GUARDED_BY(mutex_);
  bool sets_aside_ TORPOR_GUARDED_BY(mutex_) = false;  // the first rotation sets aside the files that it replaces
  std::string set_aside_ TORPOR_GUARDED_BY(mutex_);
  uint64_t discarded_ TORPOR_GUARDED_BY(mutex_) = 0;
  std::string problem_ TORPOR_GUARDED_BY(mutex_);
  std::unordered_set<std::string> unwritten_ TORPOR_GUARDED_BY(mutex_);  // as unwritten()
  std::chrono::nanoseconds retry_at_ TORPOR_GUARDED_BY(mutex_){0};       // no rotation before this Clock::now()
  bool closed_ TORPOR_GUARDED_BY(mutex_) = false;
  bool handed_over_ TORPOR_GUARDED_BY(mutex_) = false;
  bool releases_ TORPOR_GUARDED_BY(mutex_) = false;  // no new file begins: another server may have the log, or soon
  bool ends_ TORPOR_GUARDED_BY(mutex_) = false;

  CondVar changed_;  // for the values that rotation_due() reads, and for ends_
  std::thread thread_;
};

}  // namespace torpor
