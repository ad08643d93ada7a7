#include "checkpoint/answers.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>

#include "base/log.h"
#include "checkpoint/engine_checkpoint.h"

namespace torpor {
namespace {

constexpr uint64_t kSafetyBytes = 4ull << 20;  // a file is not replaced before it grew by as much
constexpr std::chrono::seconds kRetry(1);      // after a write that failed
constexpr int kTailRounds = 8;                 // each takes up what was recorded during the one before

// Where the code point `index` begins; the end if there are no more.
size_t offset_of(std::string_view text, uint32_t index) {
  size_t at = 0;
  for (; at < text.size(); ++at) {
    if ((static_cast<uint8_t>(text[at]) & 0xC0) != 0x80 && index-- == 0) break;
  }
  return at;
}

uint64_t size_of(const Answer& answer) {
  return sizeof(Answer) + answer.text.size() +
         (answer.request.prompt_token_ids.size() + answer.request.output_token_ids.size() + answer.text_ends.size()) *
             sizeof(int32_t);
}

Error wrong_call(std::string what) {
  return Error{.code = Code::kInvalidArgument, .what = std::move(what), .next_step = "correct the call"};
}

AnswerPart end_of(const Answer& answer) {
  return {.tokens_end = static_cast<uint32_t>(answer.request.output_token_ids.size()),
          .text_end = answer.text_ends.empty() ? 0 : answer.text_ends.back(),
          .state = answer.state,
          .finish_reason = answer.finish_reason,
          .stop_reason = answer.stop_reason,
          .call = answer.call};
}

Error no_answer(const std::string& id) {
  return {.code = Code::kNotFound,
          .what = fmt::format("there is no answer {}", id),
          .next_step = "ask for one that was begun here"};
}

}  // namespace

Answers::Answers(FileSystem& file_system, AnswersOptions options)
    : file_system_(file_system), options_(std::move(options)), clock_(*options_.clock) {}

Answers::~Answers() {
  {
    const MutexLock lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Result<std::unique_ptr<Answers>> Answers::open(FileSystem& file_system, AnswersOptions options) {
  return catching([&]() -> Result<std::unique_ptr<Answers>> {
    std::unique_ptr<Answers> answers(new Answers(file_system, std::move(options)));
    if (answers->options_.directory.empty()) return answers;
    {  // over calls of files, too: nobody else knows it yet
      const MutexLock lock(answers->mutex_);
      TORPOR_TRY(answers->read_log());
      answers->forget_old();
    }
    TORPOR_TRY(answers->rotate());
    if (!answers->options_.own_thread) return answers;
    try {
      answers->thread_ = std::thread([&self = *answers] { self.run(); });
    } catch (const std::system_error& problem) {
      return Error{.code = Code::kResourceExhausted,
                   .what = fmt::format("no thread for the log of answers: {}", problem.what()),
                   .next_step = "let this user have more threads"};
    }
    return answers;
  });
}

// --- reading what was left -------------------------------------------------------------------------------------------

Status Answers::read_log() {
  TORPOR_ASSIGN(directory_, file_system_.open_directory(options_.directory, true));
  Result<std::unique_ptr<File>> lock = directory_->lock("LOCK");
  if (!lock) {
    if (lock.error().code != Code::kUnavailable) return lock.error();
    return Error{.code = Code::kUnavailable,
                 .what = fmt::format("another server uses {}", options_.directory),
                 .next_step = "end it, or give this one another directory"};
  }
  lock_ = std::move(*lock);
  std::vector<uint64_t> numbers;  // ascending, as list() is
  TORPOR_ASSIGN(const std::vector<Entry> entries, directory_->list());
  for (const Entry& entry : entries) {
    const std::optional<uint64_t> number = answers_file_number(entry.name);
    if (number && entry.kind == EntryKind::kFile) numbers.push_back(*number);
  }
  if (numbers.empty()) return ok();
  number_ = numbers.back();
  Fingerprint engine = options_.engine;
  const AnswersSink sink = {
      .engine = [&](Fingerprint read) { engine = std::move(read); },
      .answer =
          [&](Answer answer) TORPOR_REQUIRES(mutex_) {
            if (answers_.contains(answer.request.id)) return false;
            answer.ended = std::min(answer.ended, clock_.unix_seconds());  // by a clock that was ahead
            put(std::move(answer));
            return true;
          },
      .steps =
          [&](std::vector<AnswerStep> steps) TORPOR_REQUIRES(mutex_) {
            if (!prepare(steps)) return false;
            for (AnswerStep& step : steps) {
              step.time = std::min(step.time, clock_.unix_seconds());
              apply(step);
            }
            return true;
          },
  };
  // The newest whole one. If none is, of the oldest what can be read: those after it were begun when it was whole.
  bool whole = false;
  for (auto number = numbers.rbegin(); number != numbers.rend() && !whole; ++number) {
    clear();
    engine = options_.engine;
    TORPOR_ASSIGN(const AnswersFileRead read,
                  read_answers_file(*directory_, answers_file_name(*number), options_.key.get(), sink));
    whole = read.whole;
    lost_bytes_ = read.lost_bytes;
  }
  if (lost_bytes_ > 0) log().warn("{}: {} bytes behind damage were left out", options_.directory, lost_bytes_);
  // Ended answers are text that anybody may read; running ones need the engine that began them.
  const Status same = compare_fingerprints(engine, options_.engine);
  const auto runs = [](const auto& entry) { return entry.second.state == AnswerState::kRunning; };
  if (same || std::none_of(answers_.begin(), answers_.end(), runs)) return ok();
  return Error{.code = Code::kIncompatible,
               .what = fmt::format("{} has answers of another engine: {}", options_.directory, same.error().what),
               .next_step = "start the server as the one that began them, or give another directory"};
}

// --- the state in memory ---------------------------------------------------------------------------------------------

void Answers::clear() {
  order_.clear();
  answers_.clear();
  by_response_.clear();
  ended_bytes_ = 0;
}

// Room for `more` elements, so that they can be added without memory.
template <class Sequence>
void make_room(Sequence& in, size_t more) {
  if (in.capacity() - in.size() < more) in.reserve(std::max(in.capacity() * 2, in.size() + more));
}

// A new one: all of it or, for want of memory, nothing.
void Answers::put(Answer answer) {
  std::string id = answer.request.id;
  make_room(order_, 1);
  const uint64_t bytes = answer.state != AnswerState::kRunning ? size_of(answer) : 0;
  const auto entry = by_response_.emplace(std::pair(answer.tenant, answer.response), id);
  try {
    answers_.emplace(id, std::move(answer));
  } catch (...) {
    by_response_.erase(entry);
    throw;
  }
  order_.push_back(std::move(id));
  ended_bytes_ += bytes;
}

// Whether the steps fit, and room for them: once they are in the log, they can be applied.
Status Answers::prepare(const std::vector<AnswerStep>& steps) {
  std::set<std::string_view> ids;
  for (const AnswerStep& step : steps) {
    const auto found = answers_.find(step.id);
    if (found == answers_.end()) return wrong_call(fmt::format("there is no answer {}", step.id));
    Answer& answer = found->second;
    const size_t known = answer.request.output_token_ids.size();
    if (answer.state != AnswerState::kRunning) return wrong_call(fmt::format("the answer {} has ended", step.id));
    if (step.at != known)
      return wrong_call(fmt::format("the answer {} has {} tokens, a step begins at {}", step.id, known, step.at));
    const auto most = static_cast<size_t>(std::max(answer.request.max_tokens, 0));
    if (known > most || step.tokens.size() > most - known)
      return wrong_call(fmt::format("the answer {} may have {} tokens, a step brings it to {}", step.id, most,
                                    known + step.tokens.size()));
    if (std::any_of(step.tokens.begin(), step.tokens.end(), [](int32_t token) { return token < 0; }))
      return wrong_call(fmt::format("a step of the answer {} has a negative token", step.id));
    if (!ids.insert(step.id).second) return wrong_call(fmt::format("two steps of the answer {} at once", step.id));
    make_room(answer.request.output_token_ids, step.tokens.size());
    make_room(answer.text_ends, step.tokens.size());
    make_room(answer.text, step.text.size());
  }
  return ok();
}

void Answers::apply(AnswerStep& step) {
  Answer& answer = answers_.at(step.id);
  std::vector<int32_t>& tokens = answer.request.output_token_ids;
  const uint32_t text_end = (answer.text_ends.empty() ? 0 : answer.text_ends.back());
  tokens.insert(tokens.end(), step.tokens.begin(), step.tokens.end());
  answer.text_ends.resize(tokens.size(), text_end);
  answer.text += step.text;
  if (!answer.text_ends.empty()) answer.text_ends.back() = text_end + code_points(step.text);
  if (step.state == AnswerState::kRunning) return;
  answer.state = step.state;
  answer.finish_reason = std::move(step.finish_reason);
  answer.stop_reason = std::move(step.stop_reason);
  answer.ended = step.time;
  ended_bytes_ += size_of(answer);
}

bool Answers::too_old(const Answer& answer, double now) const {
  return answer.state != AnswerState::kRunning && now - answer.ended > options_.keep_seconds;
}

void Answers::forget_old() {
  forget_ = false;
  const double now = clock_.unix_seconds();
  std::erase_if(order_, [&](const std::string& id) TORPOR_REQUIRES(mutex_) {
    const Answer& answer = answers_.at(id);
    if (answer.state == AnswerState::kRunning) return false;
    if (!too_old(answer, now) && ended_bytes_ <= options_.keep_bytes) return false;
    ended_bytes_ -= size_of(answer);
    const auto [first, last] = by_response_.equal_range(std::pair(answer.tenant, answer.response));
    by_response_.erase(std::find_if(first, last, [&](const auto& entry) { return entry.second == id; }));
    answers_.erase(id);
    return true;
  });
}

// --- a new file ------------------------------------------------------------------------------------------------------

bool Answers::due() const {
  if (file_ == nullptr || closed_ || rotation_ || clock_.now() < retry_at_) return false;
  return !problem_.empty() || log_bytes_ > std::max(options_.file_bytes, began_with_ * 4 + kSafetyBytes);
}

bool Answers::rotation_due() const {
  const MutexLock lock(mutex_);
  return due();
}

void Answers::failed(const Error& why, std::chrono::nanoseconds retry) {
  retry_at_ = clock_.now() + retry;
  changed_.notify_all();
  problem_ = why.to_string();
}

void Answers::run() {
  MutexLock lock(mutex_);
  while (!ends_) {
    if (due()) {
      lock.unlock();
      (void)rotate();  // a failure is in the log, and tried again
      lock.lock();
    } else if (problem_.empty() && clock_.now() >= retry_at_) {
      changed_.wait(mutex_);
    } else {
      changed_.wait_for(mutex_, kRetry);
    }
  }
}

Status Answers::rotate() {
  return catching([this]() -> Status {
    uint64_t number = 0;
    {
      const MutexLock lock(mutex_);
      if (directory_ == nullptr) return ok();
      if (rotation_) {
        return Error{.code = Code::kUnavailable,
                     .what = "the log of answers is being written anew",
                     .next_step = "wait for that to end"};
      }
      rotation_ = Rotation{};
      number = ++number_;  // also after a failure: the name is taken
    }
    bool in_use = false;
    const Status done = catching([&]() -> Status {
      TORPOR_ASSIGN(const std::shared_ptr<AnswersFile> file, write_beside(number));
      TORPOR_TRY(switch_to(file));
      in_use = true;
      // What went into the older file and was synced there, and all since.
      TORPOR_TRY(file->sync());
      return remove_older(number);
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
    log().warn("{}: no new file of the log: {}", options_.directory, done.error().to_string());
    return done;
  });
}

Result<std::shared_ptr<AnswersFile>> Answers::write_beside(uint64_t number) {
  std::vector<std::string> ids;  // in their order
  {
    const MutexLock lock(mutex_);
    const double now = clock_.unix_seconds();
    for (const std::string& id : order_) {
      if (!too_old(answers_.at(id), now)) ids.push_back(id);
    }
    rotation_->written.reserve(ids.size());
    forget_ = true;
  }
  TORPOR_ASSIGN(const std::shared_ptr<AnswersFile> file,
                AnswersFile::create(*directory_, number, options_.key.get(), options_.encrypt));
  const Status written = [&]() -> Status {
    TORPOR_TRY(file->append(engine_record(options_.engine)));
    for (const std::string& id : ids) {
      Bytes record;
      {
        const MutexLock lock(mutex_);
        if (ends_) return Error{.code = Code::kAborted, .what = "the answers end", .next_step = "open them again"};
        const auto found = answers_.find(id);
        if (found == answers_.end()) continue;  // forgotten since
        record = answer_record(found->second);
        rotation_->written.insert(id);
      }
      TORPOR_TRY(file->append(record));
    }
    TORPOR_TRY(append_tail(*file));
    TORPOR_TRY(file->sync());
    TORPOR_TRY(directory_->sync());  // a sync() of the file alone is enough from here on
    return append_tail(*file);
  }();
  if (written) return file;
  (void)directory_->remove_file(answers_file_name(number));  // not whole: a reader passes it over in any case
  return written.error();
}

// What was recorded since, so that little is left for when writers wait.
Status Answers::append_tail(AnswersFile& file) {
  for (int round = 0; round < kTailRounds; ++round) {
    std::vector<Bytes> tail;
    {
      const MutexLock lock(mutex_);
      tail.swap(rotation_->tail);
    }
    if (tail.empty()) break;
    for (const Bytes& record : tail) TORPOR_TRY(file.append(record));
  }
  return ok();
}

Status Answers::switch_to(const std::shared_ptr<AnswersFile>& file) {
  std::shared_ptr<AnswersFile> closed_last = file;  // the older one, closed without a lock
  const MutexLock writing(writer_);
  TORPOR_TRY(append_tail(*file));
  {
    const MutexLock lock(mutex_);
    if (rotation_->incomplete)
      return Error{.code = Code::kResourceExhausted, .what = "no memory", .next_step = "free some"};
  }
  TORPOR_TRY(file->append(whole_record()));
  const MutexLock lock(mutex_);
  file_.swap(closed_last);
  log_bytes_ = began_with_ = file->bytes();
  problem_.clear();
  writable_ = true;
  rotation_->switched = true;
  return ok();
}

Status Answers::remove_older(uint64_t number) {
  TORPOR_ASSIGN(const std::vector<Entry> entries, directory_->list());
  for (const Entry& entry : entries) {
    if (answers_file_number(entry.name).value_or(number) >= number) continue;
    if (const Status removed = directory_->remove_file(entry.name); !removed)
      log().warn("{}: an old file of the log stays: {}", options_.directory, removed.error().to_string());
  }
  return ok();
}

// --- what a server calls ---------------------------------------------------------------------------------------------

std::shared_ptr<AnswersFile> Answers::file() const {
  const MutexLock lock(mutex_);
  return file_;
}

// A write that fails leaves the record out; a new file with the whole state is tried a second later.
Status Answers::append(const Bytes& record) {
  const std::shared_ptr<AnswersFile> file = this->file();
  if (file == nullptr || !writable_) return ok();  // reported when it began, and in counts()
  const Status written = catching([&] { return file->append(record); });
  writable_ = written.has_value();
  const MutexLock lock(mutex_);
  log_bytes_ = file->bytes();
  if (!written) failed(written.error(), kRetry);
  if (due()) changed_.notify_all();
  return written;
}

void Answers::note(const std::function<Bytes()>& record) {
  if (!rotation_ || rotation_->switched) return;
  try {
    if (Bytes bytes = record(); !bytes.empty()) rotation_->tail.push_back(std::move(bytes));
  } catch (const std::bad_alloc&) {
    rotation_->incomplete = true;
  }
}

Status Answers::start(Answer answer) {
  return catching([&]() -> Status {
    TORPOR_TRY(answer.request.validate());
    const MutexLock writing(writer_);
    answer.text_ends.assign(answer.request.output_token_ids.size(), 0);
    answer.created = clock_.unix_seconds();
    {
      const MutexLock lock(mutex_);
      if (closed_) return ok();
      if (answers_.contains(answer.request.id))
        return wrong_call(fmt::format("there is an answer {} already", answer.request.id));
    }
    const Bytes record = file() != nullptr ? answer_record(answer) : Bytes{};
    {
      const MutexLock lock(mutex_);
      const std::string id = answer.request.id;
      put(std::move(answer));
      if (forget_ || ended_bytes_ > options_.keep_bytes) forget_old();
      note([&]() TORPOR_REQUIRES(mutex_) {
        rotation_->written.insert(id);
        return record;
      });
    }
    return append(record);
  });
}

Status Answers::step(std::vector<AnswerStep> steps) {
  return catching([&]() -> Status {
    const MutexLock writing(writer_);
    for (AnswerStep& step : steps) step.time = clock_.unix_seconds();
    {
      const MutexLock lock(mutex_);
      if (closed_ || steps.empty()) return ok();
      TORPOR_TRY(prepare(steps));
    }
    const Bytes record = file() != nullptr ? steps_record(steps) : Bytes{};
    const Status written = append(record);
    const MutexLock lock(mutex_);
    note([&]() TORPOR_REQUIRES(
             mutex_) -> Bytes {  // of what the new file has already; the rest goes into it as it is then
      std::vector<AnswerStep> known;
      for (const AnswerStep& step : steps) {
        if (rotation_->written.contains(step.id)) known.push_back(step);
      }
      if (known.size() == steps.size()) return record;
      return known.empty() ? Bytes{} : steps_record(known);
    });
    for (AnswerStep& step : steps) apply(step);
    return written;
  });
}

Status Answers::sync() {
  return catching([this]() -> Status {
    std::shared_ptr<AnswersFile> file;
    bool failing = false;
    {
      const MutexLock lock(mutex_);
      // A record is missing in the file, or a sync of it failed: only a new file can be durable.
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
    if (file == file_) failed(synced.error(), {});  // what was written to it may be gone: all goes into a new one
    return synced;
  });
}

void Answers::close() {
  const MutexLock lock(mutex_);
  closed_ = true;
}

std::vector<std::string> Answers::find(std::string_view response, std::string_view tenant) const {
  const MutexLock lock(mutex_);
  const auto [first, last] = by_response_.equal_range(std::pair(std::string(tenant), std::string(response)));
  if (first == last) return {};
  const uint64_t call =
      answers_.at(std::prev(last)->second).call;  // of the newest: they are in the order of their start
  std::map<int32_t, std::string> choices;
  for (auto entry = first; entry != last; ++entry) {
    const Answer& answer = answers_.at(entry->second);
    if (answer.call == call) choices[answer.choice] = answer.request.id;
  }
  std::vector<std::string> ids;
  for (auto& [choice, id] : choices) ids.push_back(std::move(id));
  return ids;
}

Result<AnswerPart> Answers::position(const std::string& id) const {
  const MutexLock lock(mutex_);
  const auto found = answers_.find(id);
  if (found == answers_.end()) return no_answer(id);
  return end_of(found->second);
}

Result<AnswerPart> Answers::part(const std::string& id, uint32_t from_token, uint32_t from_text) const {
  const MutexLock lock(mutex_);
  const auto found = answers_.find(id);
  if (found == answers_.end()) return no_answer(id);
  const Answer& answer = found->second;
  const std::vector<int32_t>& tokens = answer.request.output_token_ids;
  AnswerPart part = end_of(answer);
  if (from_token > part.tokens_end)
    return wrong_call(fmt::format("the answer has {} tokens, {} is beyond them", part.tokens_end, from_token));
  if (from_text > part.text_end)
    return wrong_call(fmt::format("the answer has {} characters, {} is beyond them", part.text_end, from_text));
  if (from_text > 0) {
    from_token = static_cast<uint32_t>(std::upper_bound(answer.text_ends.begin(), answer.text_ends.end(), from_text) -
                                       answer.text_ends.begin());
  } else if (from_token > 0) {
    from_text = answer.text_ends[from_token - 1];
  }
  part.tokens.assign(tokens.begin() + from_token, tokens.end());
  part.text = answer.text.substr(offset_of(answer.text, from_text));
  return part;
}

std::optional<Answer> Answers::get(const std::string& id) const {
  const MutexLock lock(mutex_);
  const auto found = answers_.find(id);
  return found == answers_.end() ? std::nullopt : std::optional(found->second);
}

std::vector<Answer> Answers::all() const {
  const MutexLock lock(mutex_);
  std::vector<Answer> all;
  for (const std::string& id : order_) all.push_back(answers_.at(id));
  return all;
}

Answers::Counts Answers::counts() const {
  const MutexLock lock(mutex_);
  Counts counts{.log_bytes = log_bytes_, .lost_bytes = lost_bytes_, .problem = problem_};
  for (const auto& [id, answer] : answers_) ++(answer.state == AnswerState::kRunning ? counts.running : counts.ended);
  return counts;
}

}  // namespace torpor
