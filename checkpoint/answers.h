// Answers: what each request of a server asked and what its readers were given so far; in memory, and in a log that
// survives the end of the process.
//
// A server records here before it delivers, so that after a crash every request can go on from what was delivered, and
// readers that lost their connection can take up their answers. One directory holds the log of one server at a time.
//
// The log is a numbered file of records (checkpoint/FORMAT.md). When it has grown to several times what is still
// wanted, and at each start, a new file begins with the present state and the older ones go. A record that is cut off
// or damaged ends the reading of its file: a kill or power loss takes the last records with it, never those before.
//
// Threads: all methods from any thread. sync() lets others go on while it waits for the disk.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/file_system.h"
#include "base/seal.h"
#include "checkpoint/manifest.h"
#include "scheduler_state/request_state.h"

namespace torpor {

enum class AnswerState : uint8_t { kRunning, kFinished, kAborted, kFailed };
std::string_view name(AnswerState state);  // "running", "finished", "aborted", "failed"

// One choice of one response.
struct Answer {
  RequestState
      request;  // what was asked; output_token_ids: what was given. Its status and computed tokens mean nothing here.
  std::string response;  // the id that clients know
  std::string tenant;    // who may see it; empty: anybody
  int32_t choice = 0;
  Value front;                      // what the adapter's front end keeps beside
  std::string text;                 // given so far, UTF-8
  std::vector<uint32_t> text_ends;  // for each token: code points of `text` after it
  AnswerState state = AnswerState::kRunning;
  std::string finish_reason;
  Value stop_reason;
  double created = 0;  // seconds since 1970
  double ended = 0;
  friend bool operator==(const Answer&, const Answer&) = default;
};

// What one engine step gave to one answer.
struct AnswerStep {
  std::string id;
  uint32_t at = 0;  // tokens that were given before
  std::vector<int32_t> tokens;
  std::string text;
  AnswerState state = AnswerState::kRunning;
  std::string finish_reason;
  Value stop_reason;
  double time = 0;  // seconds since 1970; Answers sets it
};

// A part of an answer: from some token, or from some code point of its text, on.
struct AnswerPart {
  std::vector<int32_t> tokens;
  std::string text;
  uint32_t tokens_end = 0;  // tokens of the answer up to here
  uint32_t text_end = 0;    // code points
  AnswerState state = AnswerState::kRunning;
  std::string finish_reason;
  Value stop_reason;
};

struct AnswersOptions {
  const Clock* clock = nullptr;  // required; of the wall
  std::string directory;         // made if absent; empty: in memory only
  Fingerprint engine;            // of the engine that serves: answers that still run are only taken up by an equal one
  double keep_seconds = 3600;    // ended answers
  uint64_t keep_bytes = 256ull << 20;  // of ended answers, the oldest go first
  uint64_t file_bytes =
      64ull << 20;                 // a file of the log is replaced when it is larger, and four times what it began with
  std::shared_ptr<const Key> key;  // seals the log
  bool encrypt = false;
};

class Answers {
 public:
  // Reads what an earlier server left. kUnavailable: another one uses the directory. kIncompatible: answers that still
  // run belong to another engine; kUnauthenticated: sealed otherwise. The log is then as it was.
  static Result<std::unique_ptr<Answers>> open(FileSystem& file_system, AnswersOptions options);
  ~Answers();

  // A new answer. kInvalidArgument: the id is in use.
  Status start(Answer answer);
  // All in one record. Unknown ids and steps that do not begin where the answer ends are kInvalidArgument; nothing is
  // recorded then.
  Status step(std::vector<AnswerStep> steps);
  // What was recorded before is durable when this returns.
  Status sync();
  // Nothing is recorded from now on: the process is about to end, and what happens to the requests meanwhile is not
  // their fate.
  void close();

  // Ids of the choices of a response, in their order; the newest where an id was used again. Empty: no such answer, or
  // not of this tenant.
  std::vector<std::string> find(std::string_view response, std::string_view tenant) const;
  // kNotFound: no such answer. kInvalidArgument: beyond its end. At most one of `from_token` and `from_text` is meant,
  // the other 0.
  Result<AnswerPart> part(const std::string& id, uint32_t from_token, uint32_t from_text = 0) const;
  Result<AnswerPart> position(const std::string& id) const;  // its ends and state, without content
  std::optional<Answer> get(const std::string& id) const;
  std::vector<Answer> all() const;  // in the order of their start

  struct Counts {
    uint64_t running = 0;
    uint64_t ended = 0;
    uint64_t log_bytes = 0;
    uint64_t lost_bytes = 0;  // of the log that was read, behind damage
    std::string problem;      // why the log cannot be written at present; empty: it can
  };
  Counts counts() const;

 private:
  Answers(FileSystem& file_system, AnswersOptions options);
  Status read_log();
  Status read_file(const std::string& name);
  Status begin_file();                // with the present state; older files go
  Status record(const Bytes& bytes);  // into the present file
  Status append(const Bytes& bytes);
  Status apply(AnswerStep step, bool replay);
  void put(Answer answer);
  void forget_old();

  FileSystem& file_system_;
  const AnswersOptions options_;
  std::unique_ptr<Directory> directory_;
  std::unique_ptr<File> lock_;

  mutable std::mutex mutex_;        // guards all below
  std::vector<std::string> order_;  // ids, in the order of their start
  std::unordered_map<std::string, Answer> answers_;
  std::multimap<std::pair<std::string, std::string>, std::string> by_response_;  // (tenant, response) -> id
  uint64_t ended_bytes_ = 0;
  std::shared_ptr<File> file_;  // null: in memory only, or closed
  std::unique_ptr<Seal> seal_;
  uint64_t number_ = 0;      // of the file
  uint64_t at_ = 0;          // its end
  uint64_t began_with_ = 0;  // bytes of the state it began with
  uint64_t lost_bytes_ = 0;
  double failed_at_ = 0;  // when writing last failed
  std::string problem_;
  bool closed_ = false;
};

// What a new engine needs to let the requests go on, as bytes for the way to the process of the engine; of ended ones,
// that they have ended.
Bytes pack_answers(std::vector<Answer> answers);
Result<std::vector<Answer>> unpack_answers(std::span<const std::byte> bytes);

}  // namespace torpor
