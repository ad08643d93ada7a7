// SPDX-License-Identifier: Apache-2.0
#include "engine/delivery/delivery_log.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/log.h"

namespace torpor {
namespace {

constexpr uint64_t kSafetyBytes = 4ull << 20;  // a file is not replaced before it grew by this
constexpr std::chrono::seconds kRetry(1);      // after a write that failed
constexpr double kForgetSeconds = 1;           // at least, between two looks for old answers
constexpr double kForgetShare = 0.01;          // of keep_seconds, likewise: a look reads the whole table
constexpr int kTailRounds = 8;                 // each appends what was recorded during the one before

// Return an error if another server went on from `ours`: it has recorded more than they have.
Status check_not_behind(const AnswerTable& ours, const AnswerTable& theirs) {
  const auto behind = [](const std::string& id) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("another server went on with the answer {}", id),
                 .next_step = "start a new server: it goes on from the response log"};
  };
  for (const std::string& id : theirs.ids()) {
    const Answer& their = *theirs.get(id);
    const Answer* const own = ours.get(id);
    if (own == nullptr) {
      if (their.state == AnswerState::kRunning) return behind(id);
      continue;  // it ended, and is forgotten here
    }
    if (own->state != AnswerState::kRunning) continue;
    const bool more = their.request.output_token_ids.size() > own->request.output_token_ids.size() ||
                      their.text.size() > own->text.size();
    if (more || their.state == AnswerState::kFinished || their.state == AnswerState::kAborted) return behind(id);
  }
  return ok();
}

}  // namespace

DeliveryLog::DeliveryLog(FileSystem& file_system, DeliveryLogOptions options)
    : file_system_(file_system),
      options_(std::move(options)),
      clock_(*options_.clock),
      answers_(options_.keep_seconds, options_.keep_bytes) {}

DeliveryLog::~DeliveryLog() {
  {
    const MutexLock lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Result<std::unique_ptr<DeliveryLog>> DeliveryLog::open(FileSystem& file_system, DeliveryLogOptions options) {
  return try_catch([&]() -> Result<std::unique_ptr<DeliveryLog>> {
    std::unique_ptr<DeliveryLog> opened(new DeliveryLog(file_system, std::move(options)));
    if (opened->options_.directory.empty()) return opened;
    {
      const MutexLock lock(opened->mutex_);
      TORPOR_RETURN_IF_ERROR(opened->read_directory());
      if (opened->sets_aside_) TORPOR_RETURN_IF_ERROR(opened->end_those_of_another());
    }
    TORPOR_RETURN_IF_ERROR(opened->rotate());
    if (!opened->options_.own_thread) return opened;
    try {
      opened->thread_ = std::thread([&self = *opened] { self.run(); });
    } catch (const std::system_error& problem) {
      return Error{.code = Code::kResourceExhausted,
                   .what = fmt::format("no thread for the response log: {}", problem.what()),
                   .next_step = "let this user have more threads"};
    }
    return opened;
  });
}

Result<uint64_t> DeliveryLog::count_running(FileSystem& file_system, DeliveryLogOptions options) {
  return try_catch([&]() -> Result<uint64_t> {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<DeliveryLogDirectory> directory,
                            DeliveryLogDirectory::open(file_system, options.directory));
    AnswerTable answers(options.keep_seconds, options.keep_bytes);
    const DeliveryLogReader reader{options.engine, options.other_engine, options.key.get()};
    TORPOR_RETURN_IF_ERROR(directory->read(answers, reader, UnsteppedClock(*options.clock)));
    return answers.running();
  });
}

// Read what an earlier server left. The lock is held also over file calls: no other thread has the object yet.
Status DeliveryLog::read_directory() {
  TORPOR_ASSIGN_OR_RETURN(directory_, DeliveryLogDirectory::open(file_system_, options_.directory));
  const DeliveryLogReader reader{options_.engine, options_.other_engine, options_.key.get()};
  TORPOR_ASSIGN_OR_RETURN(DeliveryLogFound found, directory_->read(answers_, reader, clock_));
  lost_bytes_ = found.lost_bytes;
  of_another_ = std::move(found.of_another);
  sets_aside_ = found.sets_aside;
  forget_old();
  return ok();
}

// The file that replaces theirs has the fingerprint of this engine: running in it they would be its own after a kill.
Status DeliveryLog::end_those_of_another() {
  std::vector<AnswerStep> steps;
  for (const std::string& id : answers_.ids()) {
    const Answer& answer = *answers_.get(id);
    if (answer.state != AnswerState::kRunning) continue;
    steps.push_back({.id = id,
                     .at = static_cast<uint32_t>(answer.request.output_token_ids.size()),
                     .state = AnswerState::kFailed,
                     .finish_reason = "error",
                     .stop_reason = Value{fmt::format("they are of another engine: {}", of_another_)},
                     .time = clock_.unix_seconds()});
  }
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Answer*> answers, answers_.prepare(steps));
  for (size_t i = 0; i < steps.size(); ++i) answers_.apply(steps[i], *answers[i]);
  discarded_ = steps.size();
  return ok();
}

void DeliveryLog::forget_old() {
  const double now = clock_.unix_seconds();
  forget_ = false;
  forget_at_ = now + std::max(kForgetSeconds, options_.keep_seconds * kForgetShare);
  answers_.forget_old(now);
}

// --- a new file ------------------------------------------------------------------------------------------------------

bool DeliveryLog::due() const {
  if (file_ == nullptr || closed_ || rotation_ || clock_.now() < retry_at_) return false;
  return !problem_.empty() || log_bytes_ > std::max(options_.file_bytes, began_with_ * 4 + kSafetyBytes);
}

bool DeliveryLog::rotation_due() const {
  const MutexLock lock(mutex_);
  return due();
}

void DeliveryLog::failed(const Error& why, std::chrono::nanoseconds retry) {
  retry_at_ = clock_.now() + retry;
  changed_.notify_all();
  problem_ = why.to_string();
}

void DeliveryLog::run() {
  MutexLock lock(mutex_);
  while (!ends_) {
    if (due()) {
      lock.unlock();
      (void)rotate();  // a failure is logged, and tried again
      lock.lock();
    } else if (problem_.empty() && clock_.now() >= retry_at_) {
      changed_.wait(mutex_);
    } else {
      changed_.wait_for(mutex_, kRetry);
    }
  }
}

Status DeliveryLog::rotate() {
  return try_catch([this]() -> Status {
    bool aside = false;
    {
      const MutexLock lock(mutex_);
      if (directory_ == nullptr) return ok();
      if (rotation_) {
        return Error{.code = Code::kUnavailable,
                     .what = "the response log is being written anew",
                     .next_step = "wait for that to end"};
      }
      if (releases_) {
        return Error{.code = Code::kUnavailable,
                     .what = "the response log is handed over to another server",
                     .next_step = "call that server"};
      }
      rotation_ = Rotation{};
      aside = sets_aside_;
    }
    bool in_use = false;
    const Status done = try_catch([&]() -> Status {
      TORPOR_ASSIGN_OR_RETURN(const std::shared_ptr<DeliveryLogFile> file, write_beside());
      if (aside) TORPOR_RETURN_IF_ERROR(set_aside_older(file->number()));
      TORPOR_RETURN_IF_ERROR(switch_to(file));
      in_use = true;
      // Syncs what went into the older file and was synced there, and all since.
      TORPOR_RETURN_IF_ERROR(file->sync());
      return directory_->remove_older(file->number());
    });
    const MutexLock lock(mutex_);
    rotation_.reset();
    changed_.notify_all();
    if (done) return ok();
    if (in_use) {
      failed(done.error(), {});
    } else {
      retry_at_ = clock_.now() + kRetry;
    }
    log().warn("{}: no new file of the log: {}", options_.directory, done.error());
    return done;
  });
}

Result<std::shared_ptr<DeliveryLogFile>> DeliveryLog::write_beside() {
  std::vector<std::string> ids;  // in their order
  {
    const MutexLock lock(mutex_);
    const std::unordered_set<std::string> old = answers_.too_old(clock_.unix_seconds());
    for (const std::string& id : answers_.ids()) {
      if (!old.contains(id)) ids.push_back(id);
    }
    rotation_->written.reserve(ids.size());
    forget_ = true;
  }
  TORPOR_ASSIGN_OR_RETURN(const std::shared_ptr<DeliveryLogFile> file,
                          directory_->create(options_.key.get(), options_.encrypt));
  const Status written = [&]() -> Status {
    TORPOR_RETURN_IF_ERROR(file->append(engine_record(options_.engine)));
    for (const std::string& id : ids) {
      Bytes record;
      {
        const MutexLock lock(mutex_);
        if (ends_) return Error{.code = Code::kAborted, .what = "the answers end", .next_step = "open them again"};
        const Answer* answer = answers_.get(id);
        if (answer == nullptr) continue;                // it was forgotten since
        if (rotation_->written.contains(id)) continue;  // and begun anew: the tail has it
        record = answer_record(*answer);
        rotation_->written.insert(id);
      }
      TORPOR_RETURN_IF_ERROR(file->append(record));
    }
    TORPOR_RETURN_IF_ERROR(append_tail(*file));
    TORPOR_RETURN_IF_ERROR(file->sync());
    TORPOR_RETURN_IF_ERROR(directory_->sync());  // a sync() of the file alone is enough from here on
    return append_tail(*file);
  }();
  if (written) return file;
  directory_->remove(file->number());
  return written.error();
}

// Append what was recorded since, so that little is left when writers wait.
Status DeliveryLog::append_tail(DeliveryLogFile& file) {
  for (int round = 0; round < kTailRounds; ++round) {
    std::vector<Bytes> tail;
    {
      const MutexLock lock(mutex_);
      tail.swap(rotation_->tail);
    }
    if (tail.empty()) break;
    for (const Bytes& record : tail) TORPOR_RETURN_IF_ERROR(file.append(record));
  }
  return ok();
}

Status DeliveryLog::switch_to(const std::shared_ptr<DeliveryLogFile>& file) {
  std::shared_ptr<DeliveryLogFile> closed_last = file;  // the older file, closed without a lock
  const MutexLock writing(writer_);
  TORPOR_RETURN_IF_ERROR(append_tail(*file));
  {
    const MutexLock lock(mutex_);
    if (rotation_->incomplete)
      return Error{.code = Code::kResourceExhausted, .what = "no memory", .next_step = "free some"};
  }
  TORPOR_RETURN_IF_ERROR(file->append(whole_record()));
  const MutexLock lock(mutex_);
  file_.swap(closed_last);
  log_bytes_ = began_with_ = file->bytes();
  problem_.clear();
  unwritten_.clear();
  writable_ = true;
  rotation_->switched = true;
  return ok();
}

Status DeliveryLog::set_aside_older(uint64_t number) {
  TORPOR_ASSIGN_OR_RETURN(std::string path, directory_->set_aside_older(number));
  const MutexLock lock(mutex_);
  sets_aside_ = false;
  set_aside_ = std::move(path);
  return ok();
}

// --- what a server calls ---------------------------------------------------------------------------------------------

std::shared_ptr<DeliveryLogFile> DeliveryLog::file() const {
  const MutexLock lock(mutex_);
  return file_;
}

// Write a record. If that fails, the file lacks the record, and a second later a new file with the whole state is
// tried.
Status DeliveryLog::append(const Bytes& record) {
  const std::shared_ptr<DeliveryLogFile> file = this->file();
  if (file == nullptr || !writable_) return ok();  // reported when it began, and in counts()
  const Status written = try_catch([&] { return file->append(record); });
  writable_ = written.has_value();
  const MutexLock lock(mutex_);
  log_bytes_ = file->bytes();
  if (!written) failed(written.error(), kRetry);
  if (due()) changed_.notify_all();
  return written;
}

void DeliveryLog::note(const std::function<Bytes()>& record) {
  if (!rotation_ || rotation_->switched) return;
  try {
    if (Bytes bytes = record(); !bytes.empty()) rotation_->tail.push_back(std::move(bytes));
  } catch (const std::bad_alloc&) {
    rotation_->incomplete = true;
  }
}

Status DeliveryLog::start(Answer answer) {
  return try_catch([&]() -> Status {
    TORPOR_RETURN_IF_ERROR(answer.request.validate());
    const MutexLock writing(writer_);
    answer.text_ends.assign(answer.request.output_token_ids.size(), 0);
    const double now = clock_.unix_seconds();
    answer.created = now;
    {
      const MutexLock lock(mutex_);
      if (closed_) return ok();
      if (answers_.contains(answer.request.id))
        return Error{.code = Code::kInvalidArgument,
                     .what = fmt::format("there is an answer {} already", answer.request.id),
                     .next_step = "give each request an id of its own"};
    }
    const Bytes record = file() != nullptr ? answer_record(answer) : Bytes{};
    const std::string id = answer.request.id;
    {
      const MutexLock lock(mutex_);
      answers_.put(std::move(answer));
      if (forget_ || now >= forget_at_ || answers_.over_budget()) forget_old();
      note([&]() TORPOR_REQUIRES(mutex_) {
        rotation_->written.insert(id);
        return record;
      });
    }
    const Status written = append(record);
    if (!writable_) {
      const MutexLock lock(mutex_);
      unwritten_.insert(id);
    }
    return written;
  });
}

Status DeliveryLog::step(std::vector<AnswerStep> steps) {
  return try_catch([&]() -> Status {
    const MutexLock writing(writer_);
    const double now = clock_.unix_seconds();
    for (AnswerStep& step : steps) step.time = now;
    std::vector<Answer*> answers;  // they stay valid: only the holder of writer_ removes one
    {
      const MutexLock lock(mutex_);
      if (closed_ || steps.empty()) return ok();
      TORPOR_ASSIGN_OR_RETURN(answers, answers_.prepare(steps));
    }
    const Bytes record = file() != nullptr ? steps_record(steps) : Bytes{};
    const Status written = append(record);
    const MutexLock lock(mutex_);
    note([&]() TORPOR_REQUIRES(
             mutex_) -> Bytes {  // of answers that the new file has; it gets the others as they are then
      std::vector<AnswerStep> known;
      for (const AnswerStep& step : steps) {
        if (rotation_->written.contains(step.id)) known.push_back(step);
      }
      if (known.size() == steps.size()) return record;
      return known.empty() ? Bytes{} : steps_record(known);
    });
    for (size_t i = 0; i < steps.size(); ++i) {
      answers_.apply(steps[i], *answers[i]);
      if (!writable_) unwritten_.insert(steps[i].id);
    }
    return written;
  });
}

Status DeliveryLog::sync() {
  return try_catch([this]() -> Status {
    std::shared_ptr<DeliveryLogFile> file;
    bool failing = false;
    {
      const MutexLock lock(mutex_);
      // The file lacks a record, or its sync failed: only a new file can be durable.
      const bool behind = !problem_.empty();
      while (behind && rotation_) changed_.wait(mutex_);
      file = file_;
      failing = !problem_.empty();
    }
    if (file == nullptr) return ok();
    if (failing) return rotate();
    const Status synced = file->sync();
    if (synced) return synced;
    const MutexLock lock(mutex_);
    if (file == file_) failed(synced.error(), {});  // what was written to it may be lost: all goes into a new file
    return synced;
  });
}

void DeliveryLog::close() {
  const MutexLock lock(mutex_);
  closed_ = true;
}

// --- another server goes on ------------------------------------------------------------------------------------------

Status DeliveryLog::hand_over() {
  return try_catch([this]() -> Status {
    const auto cannot = [](std::string what, std::string next_step) {
      return Error{.code = Code::kFailedPrecondition, .what = std::move(what), .next_step = std::move(next_step)};
    };
    TORPOR_RETURN_IF_ERROR(sync());
    {
      const MutexLock lock(mutex_);
      if (directory_ == nullptr) return cannot("this response log is in memory only", "give it a directory");
      if (closed_) return cannot("this response log is closed", "open it again");
      closed_ = releases_ = true;
      while (rotation_) changed_.wait(mutex_);
    }
    std::shared_ptr<DeliveryLogFile> file;
    {
      const MutexLock writing(writer_);
      const MutexLock lock(mutex_);
      if (!unwritten_.empty() || !problem_.empty() || file_ == nullptr) {
        closed_ = releases_ = false;
        return cannot(fmt::format("the response log lacks {} answers: {}", unwritten_.size(), problem_),
                      "see why it is not written");
      }
      file = file_;
    }
    const Status synced = file->sync();  // also what was recorded since the first one
    const MutexLock writing(writer_);
    const MutexLock lock(mutex_);
    if (!synced) {
      closed_ = releases_ = false;
      failed(synced.error(), {});
      return synced;
    }
    file_.reset();
    directory_->unlock();
    handed_over_ = true;
    return ok();
  });
}

Status DeliveryLog::take_back() {
  return try_catch([this]() -> Status {
    {
      const MutexLock lock(mutex_);
      if (!handed_over_)
        return Error{.code = Code::kFailedPrecondition,
                     .what = "this response log was not handed over",
                     .next_step = "hand it over first"};
    }
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<DeliveryLogDirectory> directory,
                            DeliveryLogDirectory::open(file_system_, options_.directory));
    AnswerTable theirs(options_.keep_seconds, options_.keep_bytes);
    // The other server may be one of another release, which has failed.
    const DeliveryLogReader reader{options_.engine, OtherEngine::kTakeUp, options_.key.get()};
    TORPOR_RETURN_IF_ERROR(directory->read(theirs, reader, clock_));
    {
      const MutexLock lock(mutex_);
      TORPOR_RETURN_IF_ERROR(check_not_behind(answers_, theirs));
      directory_ = std::move(directory);
      retry_at_ = {};
      releases_ = false;
    }
    const Status written = rotate();  // all of it, as it is here
    const MutexLock lock(mutex_);
    if (!written) {
      directory_->unlock();
      releases_ = true;
      return written;
    }
    closed_ = handed_over_ = false;
    return ok();
  });
}

}  // namespace torpor
