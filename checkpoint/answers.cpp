#include "checkpoint/answers.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "base/digest.h"
#include "base/log.h"
#include "checkpoint/archived_values.h"
#include "checkpoint/engine_checkpoint.h"

namespace torpor {

template <class Archive>
void serialize(Archive& archive, Answer& v) {
  archive(v.request, v.response, v.tenant, v.choice, v.front, v.text, v.text_ends,
          checked(v.state, AnswerState::kFailed), v.finish_reason, v.stop_reason, v.created, v.ended);
}
template <class Archive>
void serialize(Archive& archive, AnswerStep& v) {
  archive(v.id, v.at, v.tokens, v.text, checked(v.state, AnswerState::kFailed), v.finish_reason, v.stop_reason, v.time);
}

namespace {

constexpr std::string_view kMagic = "TORPANSW";
constexpr uint32_t kVersion = 1;
constexpr uint32_t kByteOrder = 0x01020304;
constexpr uint64_t kSafetyBytes = 4ull << 20;  // a file is not replaced before it grew by as much
constexpr double kRetrySeconds = 1;            // after a write that failed
constexpr std::string_view kPlace = "answers";

struct FileHead {
  std::array<char, 8> magic{};
  uint32_t version = 0;
  uint32_t byte_order = 0;
  uint32_t protection = 0;
  uint32_t zero = 0;
  SealId id{};
  KeyName key{};
  std::array<uint8_t, 16> zeros{};
};
static_assert(sizeof(FileHead) == 64);

struct RecordHead {
  uint32_t bytes = 0;
  std::array<uint8_t, 16> tag{};  // of the seal, or XXH3-128 over the offset and the record
};
static_assert(sizeof(RecordHead) == 20);

enum class RecordKind : uint8_t { kEngine, kAnswer, kSteps };  // whose tokens these are; an answer as it is now; steps

template <class T>
Bytes record_of(RecordKind kind, const T& value) {
  return to_bytes_after(0, static_cast<uint8_t>(kind), value);
}

std::string file_name(uint64_t number) { return fmt::format("answers-{:012}", number); }

std::optional<uint64_t> number_of(std::string_view name) {
  constexpr std::string_view kStart = "answers-";
  if (name.size() != kStart.size() + 12 || !name.starts_with(kStart)) return std::nullopt;
  uint64_t number = 0;
  for (const char digit : name.substr(kStart.size())) {
    if (digit < '0' || digit > '9') return std::nullopt;
    number = number * 10 + static_cast<uint64_t>(digit - '0');
  }
  return number;
}

uint32_t code_points(std::string_view text) {
  return static_cast<uint32_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<uint8_t>(c) & 0xC0) != 0x80; }));
}

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

Digest digest_at(uint64_t offset, std::span<const std::byte> record) {
  StreamingDigest digest;
  digest.update(std::as_bytes(std::span(&offset, 1)));
  digest.update(record);
  return digest.finish();
}

Error wrong_call(std::string what) {
  return Error{.code = Code::kInvalidArgument, .what = std::move(what), .next_step = "correct the call"};
}

AnswerPart end_of(const Answer& answer) {
  return {.tokens_end = static_cast<uint32_t>(answer.request.output_token_ids.size()),
          .text_end = answer.text_ends.empty() ? 0 : answer.text_ends.back(),
          .state = answer.state,
          .finish_reason = answer.finish_reason,
          .stop_reason = answer.stop_reason};
}

Error no_answer(const std::string& id) {
  return {.code = Code::kNotFound,
          .what = fmt::format("there is no answer {}", id),
          .next_step = "ask for one that was begun here"};
}

}  // namespace

std::string_view name(AnswerState state) {
  switch (state) {
    case AnswerState::kRunning: return "running";
    case AnswerState::kFinished: return "finished";
    case AnswerState::kAborted: return "aborted";
    case AnswerState::kFailed: return "failed";
  }
  return "?";
}

Answers::Answers(FileSystem& file_system, AnswersOptions options)
    : file_system_(file_system), options_(std::move(options)) {}
Answers::~Answers() = default;

Result<std::unique_ptr<Answers>> Answers::open(FileSystem& file_system, AnswersOptions options) {
  return catching_no_memory([&]() -> Result<std::unique_ptr<Answers>> {
    std::unique_ptr<Answers> answers(new Answers(file_system, std::move(options)));
    if (!answers->options_.directory.empty()) {
      TORPOR_TRY(answers->read_log());
      TORPOR_TRY(answers->begin_file());
    }
    return answers;
  });
}

// --- reading what was left
// ----------------------------------------------------------------------------------------------

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
  TORPOR_ASSIGN(const std::vector<Entry> entries, directory_->list());  // by name, so by number
  for (const Entry& entry : entries) {
    const std::optional<uint64_t> number = number_of(entry.name);
    if (!number || entry.kind != EntryKind::kFile) continue;
    number_ = *number;
    TORPOR_TRY(read_file(entry.name));
  }
  if (lost_bytes_ > 0) log().warn("{}: {} bytes behind damage were left out", options_.directory, lost_bytes_);
  return ok();
}

Status Answers::read_file(const std::string& name) {
  TORPOR_ASSIGN(const std::unique_ptr<File> file, directory_->open_file(name));
  TORPOR_ASSIGN(const uint64_t size, file->size());
  const auto damaged_from = [&](uint64_t offset) {
    lost_bytes_ += size - offset;
    return ok();
  };
  FileHead head;
  if (size < sizeof head) return damaged_from(0);  // a kill at its very beginning
  TORPOR_TRY(file->pread(std::as_writable_bytes(std::span(&head, 1)), 0));
  if (std::string_view(head.magic.data(), head.magic.size()) != kMagic || head.byte_order != kByteOrder)
    return damaged_from(0);
  if (head.version != kVersion) {
    return Error{.code = Code::kIncompatible,
                 .what = fmt::format("{}: version {}, this torpor reads {}", file->name(), head.version, kVersion),
                 .next_step = "use the version of torpor that wrote it"};
  }
  std::unique_ptr<Seal> seal;
  if (head.protection != 0) {
    if (head.protection > static_cast<uint32_t>(Protection::kEncrypted)) return damaged_from(0);
    if (options_.key == nullptr)
      return Error{.code = Code::kUnauthenticated,
                   .what = fmt::format("{} is sealed", file->name()),
                   .next_step = "give the key file that it was written with"};
    seal = std::make_unique<Seal>(*options_.key, head.id, static_cast<Protection>(head.protection));
    if (seal->key_name() != head.key)
      return Error{.code = Code::kUnauthenticated,
                   .what = fmt::format("{} is sealed with another key", file->name()),
                   .next_step = "give the key file that it was written with"};
  } else if (options_.key != nullptr) {
    return Error{.code = Code::kUnauthenticated,
                 .what = fmt::format("{} is not sealed, but a key was given", file->name()),
                 .next_step = "use another directory, or no key"};
  }
  for (uint64_t at = sizeof head; at < size;) {
    RecordHead record;
    if (size - at < sizeof record) return damaged_from(at);
    TORPOR_TRY(file->pread(std::as_writable_bytes(std::span(&record, 1)), at));
    if (record.bytes == 0 || record.bytes > size - at - sizeof record) return damaged_from(at);
    std::vector<std::byte> bytes(record.bytes);
    TORPOR_TRY(file->pread(bytes, at + sizeof record));
    const bool whole = seal != nullptr ? seal->open(bytes, record.tag,
                                                    {.kind = SealPlace::Kind::kSection, .offset = at, .what = kPlace})
                                             .has_value()
                                       : digest_at(at, bytes).bytes == record.tag;
    if (!whole) return damaged_from(at);
    const auto content = std::span<const std::byte>(bytes).subspan(1);
    switch (static_cast<RecordKind>(bytes[0])) {
      case RecordKind::kEngine: {
        TORPOR_ASSIGN(const Fingerprint engine, from_bytes<Fingerprint>(content, file->name()));
        if (const Status same = compare_fingerprints(engine, options_.engine); !same) {
          // Ended answers are text that anybody may read; running ones need the engine that began them. Judged at the
          // end of the log.
          problem_ = same.error().what;
        } else {
          problem_.clear();
        }
        break;
      }
      case RecordKind::kAnswer: {
        TORPOR_ASSIGN(Answer answer, from_bytes<Answer>(content, file->name()));
        TORPOR_TRY(answer.request.validate());
        if (answer.text_ends.size() != answer.request.output_token_ids.size()) return damaged_from(at);
        put(std::move(answer));
        break;
      }
      case RecordKind::kSteps: {
        TORPOR_ASSIGN(std::vector<AnswerStep> steps, from_bytes<std::vector<AnswerStep>>(content, file->name()));
        for (AnswerStep& step : steps) {
          if (const Status applied = apply(std::move(step), true); !applied) return damaged_from(at);
        }
        break;
      }
      default: return damaged_from(at);
    }
    at += sizeof record + record.bytes;
  }
  if (problem_.empty()) return ok();
  const auto runs = [](const auto& entry) { return entry.second.state == AnswerState::kRunning; };
  if (std::any_of(answers_.begin(), answers_.end(), runs)) {
    return Error{.code = Code::kIncompatible,
                 .what = fmt::format("{} has answers of another engine: {}", options_.directory, problem_),
                 .next_step = "start the server as the one that began them, or give another directory"};
  }
  problem_.clear();
  return ok();
}

// --- the state in memory (the lock is held)
// -----------------------------------------------------------------------------

void Answers::put(Answer answer) {
  const std::string id = answer.request.id;
  if (const auto known = answers_.find(id);
      known != answers_.end()) {  // an older file was not yet removed: the same answer, as it is later
    if (known->second.state != AnswerState::kRunning) ended_bytes_ -= size_of(known->second);
  } else {
    order_.push_back(id);
    by_response_.emplace(std::pair(answer.tenant, answer.response), id);
  }
  if (answer.state != AnswerState::kRunning) ended_bytes_ += size_of(answer);
  answers_[id] = std::move(answer);
}

// In a replay, what an older file has already is skipped.
Status Answers::apply(AnswerStep step, bool replay) {
  const auto found = answers_.find(step.id);
  if (found == answers_.end()) return wrong_call(fmt::format("there is no answer {}", step.id));
  Answer& answer = found->second;
  std::vector<int32_t>& tokens = answer.request.output_token_ids;
  if (replay && (answer.state != AnswerState::kRunning || step.at < tokens.size())) return ok();
  if (answer.state != AnswerState::kRunning) return wrong_call(fmt::format("the answer {} has ended", step.id));
  if (step.at != tokens.size())
    return wrong_call(fmt::format("the answer {} has {} tokens, a step begins at {}", step.id, tokens.size(), step.at));
  const uint32_t text_end = (answer.text_ends.empty() ? 0 : answer.text_ends.back());
  tokens.insert(tokens.end(), step.tokens.begin(), step.tokens.end());
  answer.text_ends.resize(tokens.size(), text_end);
  answer.text += step.text;
  if (!answer.text_ends.empty()) answer.text_ends.back() = text_end + code_points(step.text);
  if (step.state != AnswerState::kRunning) {
    answer.state = step.state;
    answer.finish_reason = std::move(step.finish_reason);
    answer.stop_reason = std::move(step.stop_reason);
    answer.ended = step.time;
    ended_bytes_ += size_of(answer);
  }
  return ok();
}

void Answers::forget_old() {
  const double now = options_.clock->unix_seconds();
  std::erase_if(order_, [&](const std::string& id) {
    const Answer& answer = answers_.at(id);
    if (answer.state == AnswerState::kRunning) return false;
    if (now - answer.ended <= options_.keep_seconds && ended_bytes_ <= options_.keep_bytes) return false;
    ended_bytes_ -= size_of(answer);
    const auto [first, last] = by_response_.equal_range(std::pair(answer.tenant, answer.response));
    by_response_.erase(std::find_if(first, last, [&](const auto& entry) { return entry.second == id; }));
    answers_.erase(id);
    return true;
  });
}

// --- writing (the lock is held, or nobody else is there yet)
// ------------------------------------------------------------

Status Answers::begin_file() {
  forget_old();
  const std::string name = file_name(number_ + 1);
  TORPOR_ASSIGN(std::shared_ptr<File> file, directory_->create_file(name));
  ++number_;  // also after a failure below: the name is taken
  FileHead head{.version = kVersion, .byte_order = kByteOrder};
  std::copy(kMagic.begin(), kMagic.end(), head.magic.begin());
  seal_.reset();
  if (options_.key != nullptr) {
    head.id = random_seal_id();
    seal_ = std::make_unique<Seal>(*options_.key, head.id,
                                   options_.encrypt ? Protection::kEncrypted : Protection::kAuthenticated);
    head.protection = static_cast<uint32_t>(seal_->protection());
    head.key = seal_->key_name();
  }
  TORPOR_TRY(file->pwrite(std::as_bytes(std::span(&head, 1)), 0));
  file_ = file;
  at_ = sizeof head;
  TORPOR_TRY(record(record_of(RecordKind::kEngine, options_.engine)));
  for (const std::string& id : order_) TORPOR_TRY(record(record_of(RecordKind::kAnswer, answers_.at(id))));
  TORPOR_TRY(file->sync());
  TORPOR_TRY(directory_->sync());
  began_with_ = at_;
  problem_.clear();
  TORPOR_ASSIGN(const std::vector<Entry> entries, directory_->list());
  for (const Entry& entry : entries) {
    if (number_of(entry.name).value_or(number_) < number_) TORPOR_TRY(directory_->remove_file(entry.name));
  }
  return ok();
}

Status Answers::record(const Bytes& bytes) {
  RecordHead head{.bytes = static_cast<uint32_t>(bytes.size())};
  Bytes whole(sizeof head + bytes.size());
  std::copy(bytes.begin(), bytes.end(), whole.begin() + sizeof head);
  const auto content = std::as_writable_bytes(std::span(whole)).subspan(sizeof head);
  head.tag = seal_ != nullptr
                 ? seal_->seal(content, content, {.kind = SealPlace::Kind::kSection, .offset = at_, .what = kPlace})
                 : digest_at(at_, content).bytes;
  std::memcpy(whole.data(), &head, sizeof head);
  TORPOR_TRY(file_->pwrite(std::as_bytes(std::span(whole)), at_));
  at_ += whole.size();
  return ok();
}

// A write that fails leaves the record out; a new file with the whole state is tried a second later.
Status Answers::append(const Bytes& bytes) {
  if (file_ == nullptr) return ok();
  const double now = options_.clock->unix_seconds();
  const bool failing = !problem_.empty();
  if (failing && now - failed_at_ < kRetrySeconds) return ok();  // reported when it began, and in counts()
  Status written =
      failing || at_ > std::max(options_.file_bytes, began_with_ * 4 + kSafetyBytes) ? begin_file() : record(bytes);
  if (!written) {
    problem_ = written.error().to_string();
    failed_at_ = now;
    if (failing) return ok();
  }
  return written;
}

// --- what a server calls
// ------------------------------------------------------------------------------------------------

Status Answers::start(Answer answer) {
  return catching_no_memory([&]() -> Status {
    TORPOR_TRY(answer.request.validate());
    const std::lock_guard lock(mutex_);
    if (closed_) return ok();
    if (answers_.contains(answer.request.id))
      return wrong_call(fmt::format("there is an answer {} already", answer.request.id));
    answer.text_ends.assign(answer.request.output_token_ids.size(), 0);
    answer.created = options_.clock->unix_seconds();
    const std::string id = answer.request.id;
    put(std::move(answer));
    if (ended_bytes_ > options_.keep_bytes) forget_old();
    return append(record_of(RecordKind::kAnswer, answers_.at(id)));
  });
}

Status Answers::step(std::vector<AnswerStep> steps) {
  return catching_no_memory([&]() -> Status {
    const std::lock_guard lock(mutex_);
    if (closed_ || steps.empty()) return ok();
    for (AnswerStep& step : steps) {
      step.time = options_.clock->unix_seconds();
      const auto found = answers_.find(step.id);
      if (found == answers_.end()) return wrong_call(fmt::format("there is no answer {}", step.id));
      if (found->second.state != AnswerState::kRunning)
        return wrong_call(fmt::format("the answer {} has ended", step.id));
      if (step.at != found->second.request.output_token_ids.size()) {
        return wrong_call(fmt::format("the answer {} has {} tokens, a step begins at {}", step.id,
                                      found->second.request.output_token_ids.size(), step.at));
      }
    }
    const Bytes bytes = file_ != nullptr ? record_of(RecordKind::kSteps, steps) : Bytes{};
    for (AnswerStep& step : steps) TORPOR_TRY(apply(std::move(step), false));
    return append(bytes);
  });
}

Status Answers::sync() {
  std::shared_ptr<File> file;
  {
    const std::lock_guard lock(mutex_);
    file = file_;
  }
  if (file == nullptr) return ok();
  Status synced = file->sync();
  if (synced) return synced;
  const std::lock_guard lock(mutex_);
  if (file == file_) {  // what was written to it may be gone: all goes into a new one
    problem_ = synced.error().to_string();
    failed_at_ = 0;
  }
  return synced;
}

void Answers::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

std::vector<std::string> Answers::find(std::string_view response, std::string_view tenant) const {
  const std::lock_guard lock(mutex_);
  std::map<int32_t, const Answer*> choices;
  const auto [first, last] = by_response_.equal_range(std::pair(std::string(tenant), std::string(response)));
  for (auto entry = first; entry != last; ++entry) {  // in the order of their start
    const Answer& answer = answers_.at(entry->second);
    choices[answer.choice] = &answer;
  }
  std::vector<std::string> ids;
  for (const auto& [choice, answer] : choices) ids.push_back(answer->request.id);
  return ids;
}

Result<AnswerPart> Answers::position(const std::string& id) const {
  const std::lock_guard lock(mutex_);
  const auto found = answers_.find(id);
  if (found == answers_.end()) return no_answer(id);
  return end_of(found->second);
}

Result<AnswerPart> Answers::part(const std::string& id, uint32_t from_token, uint32_t from_text) const {
  const std::lock_guard lock(mutex_);
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
  const std::lock_guard lock(mutex_);
  const auto found = answers_.find(id);
  return found == answers_.end() ? std::nullopt : std::optional(found->second);
}

std::vector<Answer> Answers::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<Answer> all;
  for (const std::string& id : order_) all.push_back(answers_.at(id));
  return all;
}

Answers::Counts Answers::counts() const {
  const std::lock_guard lock(mutex_);
  Counts counts{.log_bytes = at_, .lost_bytes = lost_bytes_, .problem = problem_};
  for (const auto& [id, answer] : answers_) ++(answer.state == AnswerState::kRunning ? counts.running : counts.ended);
  return counts;
}

Bytes pack_answers(std::vector<Answer> answers) {
  for (Answer& answer : answers) {
    answer.front = {};
    if (answer.state == AnswerState::kRunning) continue;
    answer = Answer{.request = {.id = answer.request.id}, .state = answer.state};
  }
  return to_bytes(answers);
}

Result<std::vector<Answer>> unpack_answers(std::span<const std::byte> bytes) {
  return from_bytes<std::vector<Answer>>(bytes, "answers");
}

}  // namespace torpor
