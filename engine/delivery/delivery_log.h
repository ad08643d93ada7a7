// SPDX-License-Identifier: Apache-2.0
// DeliveryLog: what each request of a server asked and what its readers were given so far; in memory, and in a log that
// survives the end of the process.
//
// A server records here before it delivers, so that after a crash every request can go on from what was delivered, and
// readers that lost their connection can take up their answers. One directory holds the log of one server at a time.
//
// The log is a numbered file of records (engine/delivery/delivery_log_file.h). When it has grown to several times what
// is still wanted, when it could not be written, and at each start, rotate() begins a new one beside it: the state,
// answer by answer; then what was recorded meanwhile; fsync; what was recorded during that, and the mark that makes the
// file whole, while writers wait; from then on records go into the new file; fsync; and the older files go. Until the
// mark is there the older file counts, and has everything. A kill or power loss takes the last records with it, never
// those before.
//
// Time: answers end by a wall clock that goes on from where it was at the start, whatever is done to the machine's.
//
// Threads: all methods from any thread. Nobody who reads waits for a file; who records waits for the write of earlier
// records, never for an fsync or a new file. A thread of its own rotates.
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
#include "engine/delivery/delivery_log_file.h"

namespace torpor {

// What open() does with answers that still run and belong to another engine.
enum class OtherEngine {
  kRefuse,    // fail; the log stays as it was
  kTakeUp,    // take them up: the caller computes them again
  kSetAside,  // take them up for the caller to end them, and keep the log's files under another name. Does so, and
              // begins an empty log, with a log that cannot be read, too: of another format, or sealed otherwise
};

struct DeliveryLogOptions {
  const Clock* clock = nullptr;  // required
  std::string directory;         // made if absent; empty: in memory only
  Fingerprint engine;            // of the engine that serves
  OtherEngine other_engine = OtherEngine::kRefuse;
  double keep_seconds = 3600;          // ended answers
  uint64_t keep_bytes = 256ull << 20;  // of ended answers in memory; beyond it the oldest of them go
  uint64_t file_bytes =
      64ull << 20;                 // a file of the log is replaced when it is larger, and four times what it began with
  std::shared_ptr<const Key> key;  // seals the log
  bool encrypt = false;
  bool own_thread = true;  // false: the owner calls rotate() when rotation_due()
};

class DeliveryLog {
 public:
  // Reads what an earlier server left. kUnavailable: another one uses the directory. kIncompatible: answers that still
  // run belong to another engine (OtherEngine); kUnauthenticated: sealed otherwise. The log is then as it was.
  static Result<std::unique_ptr<DeliveryLog>> open(FileSystem& file_system, DeliveryLogOptions options);
  // How many answers still run that an earlier server left. Errors as of open(). Nothing is written.
  static Result<uint64_t> count_running(FileSystem& file_system, DeliveryLogOptions options);
  ~DeliveryLog();

  // A new answer. kInvalidArgument: the id is in use.
  Status start(Answer answer);
  // All in one record. Unknown ids, two steps of one answer, steps that do not begin where the answer ends or bring it
  // beyond its max_tokens are kInvalidArgument; nothing is recorded then.
  Status step(std::vector<AnswerStep> steps);
  // What was recorded before is durable when this returns.
  Status sync();
  // Whether the log should begin anew: it has grown, or could not be written a while ago.
  bool rotation_due() const;
  // Begins it anew; returns when that is durable and the older files are gone. kUnavailable: it is being done already.
  // After another failure the log is as it was, and what could not be written stays in memory only.
  Status rotate();
  // Nothing is recorded from now on: the process is about to end, and what happens to the requests meanwhile is not
  // their fate.
  void close();

  // Ids of the choices of a response, in their order; of the newest call where a client used an id again. Empty: no
  // such answer, or not of this tenant.
  std::vector<std::string> find(std::string_view response, std::string_view tenant) const;
  // kNotFound: no such answer. kInvalidArgument: beyond its end. At most one of `from_token` and `from_text` is meant,
  // the other 0.
  Result<AnswerPart> part(const std::string& id, uint32_t from_token, uint32_t from_text = 0) const;
  Result<AnswerPart> position(const std::string& id) const;  // its ends and state, without content
  // For each id the ends of its answer; nothing where there is none, or where it has ended.
  std::vector<std::optional<AnswerEnds>> running_ends(std::span<const std::string_view> ids) const;
  // Whether an ended answer of this response went for keep_bytes, less than keep_seconds after its end. Only since
  // open(), and only of the last 65,536 that did.
  bool was_dropped(std::string_view response, std::string_view tenant) const;
  uint64_t dropped() const;  // ended answers that went for keep_bytes since open()
  // Ids of the answers of which the file lacks records, because it could not be written. rotate() writes them.
  std::vector<std::string> unwritten() const;
  std::optional<Answer> get(const std::string& id) const;
  std::vector<Answer> all() const;  // in the order of their start

  struct Counts {
    uint64_t running = 0;
    uint64_t ended = 0;
    uint64_t log_bytes = 0;
    uint64_t lost_bytes = 0;  // of the log that was read, behind damage
    uint64_t dropped = 0;     // as dropped()
    std::string of_another;   // why open() took up or set aside a log of another engine; empty: it did not
    std::string set_aside;    // where that log is now; empty: it was not set aside
    std::string problem;      // why the log cannot be written at present; empty: it can
  };
  Counts counts() const;

 private:
  // A new file in the making. What is recorded of answers that it has already is kept for its end.
  struct Rotation {
    std::unordered_set<std::string> written;
    std::vector<Bytes> tail;
    bool incomplete = false;  // there was no memory for the tail
    bool switched = false;    // the new file is in use
  };

  DeliveryLog(FileSystem& file_system, DeliveryLogOptions options);
  void run();  // the thread

  Status append(const Bytes& record) TORPOR_REQUIRES(writer_);

  Status read_log() TORPOR_REQUIRES(mutex_);
  Status read_files(const std::vector<uint64_t>& numbers) TORPOR_REQUIRES(mutex_);
  void forget_old() TORPOR_REQUIRES(mutex_);
  bool due() const TORPOR_REQUIRES(mutex_);
  void failed(const Error& why, std::chrono::nanoseconds retry) TORPOR_REQUIRES(mutex_);
  void note(const std::function<Bytes()>& record) TORPOR_REQUIRES(mutex_);

  std::shared_ptr<DeliveryLogFile> file() const TORPOR_EXCLUDES(mutex_);
  Result<std::shared_ptr<DeliveryLogFile>> write_beside(uint64_t number) TORPOR_EXCLUDES(writer_, mutex_);
  Status append_tail(DeliveryLogFile& file) TORPOR_EXCLUDES(mutex_);
  Status switch_to(const std::shared_ptr<DeliveryLogFile>& file) TORPOR_EXCLUDES(writer_, mutex_);
  Status remove_older(uint64_t number, bool aside) TORPOR_EXCLUDES(writer_, mutex_);

  FileSystem& file_system_;
  const DeliveryLogOptions options_;
  const UnsteppedClock clock_;
  std::unique_ptr<Directory> directory_;  // used by rotate() only, after open()
  std::unique_ptr<File> lock_;

  // Held by who records, from the check over the write to the change in memory; taken before mutex_.
  Mutex writer_;
  bool writable_ TORPOR_GUARDED_BY(writer_) = true;  // false: a record is missing in the file, no other may follow

  mutable Mutex mutex_;                            // never held over a call of a file
  AnswerTable answers_ TORPOR_GUARDED_BY(mutex_);  // changed with writer_ held, too
  // At the next start(): so that nothing goes between two calls of the one who records.
  bool forget_ TORPOR_GUARDED_BY(mutex_) = false;
  // Null: in memory only. Changed with writer_ held, too.
  std::shared_ptr<DeliveryLogFile> file_ TORPOR_GUARDED_BY(mutex_);
  std::optional<Rotation> rotation_ TORPOR_GUARDED_BY(mutex_);
  uint64_t number_ TORPOR_GUARDED_BY(mutex_) = 0;      // of the newest file that was begun
  uint64_t log_bytes_ TORPOR_GUARDED_BY(mutex_) = 0;   // of file_
  uint64_t began_with_ TORPOR_GUARDED_BY(mutex_) = 0;  // bytes of the state it began with
  uint64_t lost_bytes_ TORPOR_GUARDED_BY(mutex_) = 0;
  std::string of_another_ TORPOR_GUARDED_BY(mutex_);
  bool sets_aside_ TORPOR_GUARDED_BY(mutex_) = false;  // the files that the first new one replaces
  std::string set_aside_ TORPOR_GUARDED_BY(mutex_);
  std::string problem_ TORPOR_GUARDED_BY(mutex_);
  std::unordered_set<std::string> unwritten_ TORPOR_GUARDED_BY(mutex_);  // as unwritten()
  std::chrono::nanoseconds retry_at_ TORPOR_GUARDED_BY(mutex_){0};       // no rotation before, by Clock::now()
  bool closed_ TORPOR_GUARDED_BY(mutex_) = false;
  bool ends_ TORPOR_GUARDED_BY(mutex_) = false;

  CondVar changed_;  // of what rotation_due() looks at, and of ends_
  std::thread thread_;
};

}  // namespace torpor
