// SPDX-License-Identifier: Apache-2.0
#include "engine/delivery/delivery_log_file.h"

#include <algorithm>
#include <array>
#include <cstring>

#include <fmt/core.h>

#include "base/digest.h"
#include "checkpoint/archived_values.h"

namespace torpor {

// In a file the note of a running answer and the stop reason of an ended one have one place.
template <class Answered>
auto& note_or_stop_reason(Answered& v) {
  return v.state == AnswerState::kRunning ? v.note : v.stop_reason;
}

template <class Archive>
void serialize(Archive& archive, Answer& v) {
  archive(v.request, v.response, v.tenant, v.call, v.choice, v.front, v.text, v.text_ends,
          checked(v.state, AnswerState::kFailed), v.finish_reason);
  archive(note_or_stop_reason(v), v.created, v.ended);  // the state is known by now
}
template <class Archive>
void serialize(Archive& archive, AnswerStep& v) {
  archive(v.id, v.at, v.tokens, v.text, checked(v.state, AnswerState::kFailed), v.finish_reason);
  archive(note_or_stop_reason(v), v.time);
}

namespace {

constexpr std::string_view kMagic = "TORPANSW";
constexpr uint32_t kVersion = 2;
constexpr uint32_t kByteOrder = 0x01020304;
constexpr std::string_view kPlace = "answers";
constexpr std::string_view kStart = "answers-";

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
  std::array<uint8_t, 16> tag{};  // of the seal; without one, XXH3-128 over the offset and the record
};
static_assert(sizeof(RecordHead) == 20);

enum class RecordKind : uint8_t { kEngine, kAnswer, kSteps, kWhole };

template <class T>
Bytes record_of(RecordKind kind, const T& value) {
  return to_bytes_after(0, static_cast<uint8_t>(kind), value);
}

// Writes what an archive would write, into memory that is already allocated. A record of steps is made at each step of
// an engine, and has an entry for each of its requests.
class FlatOutput {
 public:
  explicit FlatOutput(uint8_t* to) : to_(to) {}
  template <class T>
    requires std::is_arithmetic_v<T>
  void put(T value) {
    std::memcpy(to_, &value, sizeof value);
    to_ += sizeof value;
  }
  template <class List>
  void put_raw(const List& list) {
    const size_t bytes = list.size() * sizeof(typename List::value_type);
    if (bytes > 0) std::memcpy(to_, list.data(), bytes);
    to_ += bytes;
  }
  template <class List>
  void put_list(const List& list) {
    put(static_cast<uint64_t>(list.size()));
    put_raw(list);
  }

 private:
  uint8_t* to_;
};

// The bytes of a step without its lists and its stop reason: four lengths, `at`, state, time.
constexpr size_t kStepBytes = 4 * sizeof(uint64_t) + sizeof(uint32_t) + 1 + sizeof(double);

bool is_none(const Value& value) { return value.data.index() == 0; }

Digest digest_at(uint64_t offset, std::span<const std::byte> record) {
  StreamingDigest digest;
  digest.update(std::as_bytes(std::span(&offset, 1)));
  digest.update(record);
  return digest.finish();
}

SealPlace place_at(uint64_t offset) { return {.kind = SealPlace::Kind::kSection, .offset = offset, .what = kPlace}; }

// Return the seal of a file; null if the file is not sealed and need not be.
Result<std::unique_ptr<Seal>> seal_of(const FileHead& head, const Key* key, const std::string& name) {
  if (head.protection == 0) {
    if (key == nullptr) return std::unique_ptr<Seal>();
    return Error{.code = Code::kUnauthenticated,
                 .what = fmt::format("{} is not sealed, but a key was given", name),
                 .next_step = "use another directory, or no key"};
  }
  if (key == nullptr)
    return Error{.code = Code::kUnauthenticated,
                 .what = fmt::format("{} is sealed", name),
                 .next_step = "give the key file that it was written with"};
  auto seal = std::make_unique<Seal>(*key, head.id, static_cast<Protection>(head.protection));
  if (seal->key_name() != head.key)
    return Error{.code = Code::kUnauthenticated,
                 .what = fmt::format("{} is sealed with another key", name),
                 .next_step = "give the key file that it was written with"};
  return seal;
}

// Pass a record to the sink. Return false if its content does not fit.
Result<bool> take(RecordKind kind, std::span<const std::byte> content, const std::string& name,
                  const DeliveryLogSink& sink) {
  switch (kind) {
    case RecordKind::kEngine: {
      TORPOR_ASSIGN_OR_RETURN(Fingerprint engine, from_bytes<Fingerprint>(content, name));
      sink.engine(std::move(engine));
      return true;
    }
    case RecordKind::kAnswer: {
      TORPOR_ASSIGN_OR_RETURN(Answer answer, from_bytes<Answer>(content, name));
      TORPOR_RETURN_IF_ERROR(answer.request.validate());
      const std::vector<uint32_t>& ends = answer.text_ends;
      if (ends.size() != answer.request.output_token_ids.size() || !std::is_sorted(ends.begin(), ends.end()) ||
          (!ends.empty() && ends.back() > code_points(answer.text)))
        return false;
      return sink.answer(std::move(answer));
    }
    case RecordKind::kSteps: {
      TORPOR_ASSIGN_OR_RETURN(std::vector<AnswerStep> steps, from_bytes<std::vector<AnswerStep>>(content, name));
      return sink.steps(std::move(steps));
    }
    default: return false;
  }
}

}  // namespace

std::string delivery_log_file_name(uint64_t number) { return fmt::format("{}{:012}", kStart, number); }

std::optional<uint64_t> delivery_log_file_number(std::string_view name) {
  if (name.size() != kStart.size() + 12 || !name.starts_with(kStart)) return std::nullopt;
  uint64_t number = 0;
  for (const char digit : name.substr(kStart.size())) {
    if (digit < '0' || digit > '9') return std::nullopt;
    number = number * 10 + static_cast<uint64_t>(digit - '0');
  }
  return number;
}

Bytes engine_record(const Fingerprint& engine) { return record_of(RecordKind::kEngine, engine); }
Bytes answer_record(const Answer& answer) { return record_of(RecordKind::kAnswer, answer); }
Bytes steps_record(const std::vector<AnswerStep>& steps) {
  size_t bytes = 1 + sizeof(uint64_t);
  for (const AnswerStep& step : steps) {
    bytes += kStepBytes + step.id.size() + step.tokens.size() * sizeof(int32_t) + step.text.size() +
             step.finish_reason.size();
    const Value& last = note_or_stop_reason(step);
    bytes += is_none(last) ? 1 : to_bytes(last).size();
  }
  Bytes record(bytes);
  FlatOutput out(record.data());
  out.put(static_cast<uint8_t>(RecordKind::kSteps));
  out.put(static_cast<uint64_t>(steps.size()));
  for (const AnswerStep& step : steps) {
    out.put_list(step.id);
    out.put(step.at);
    out.put_list(step.tokens);
    out.put_list(step.text);
    out.put(static_cast<uint8_t>(step.state));
    out.put_list(step.finish_reason);
    if (const Value& last = note_or_stop_reason(step); is_none(last)) {
      out.put(uint8_t{0});
    } else {
      out.put_raw(to_bytes(last));
    }
    out.put(step.time);
  }
  return record;
}
Bytes whole_record() { return {static_cast<uint8_t>(RecordKind::kWhole)}; }

Result<std::unique_ptr<DeliveryLogFile>> DeliveryLogFile::create(Directory& directory, uint64_t number, const Key* key,
                                                                 bool encrypt) {
  std::unique_ptr<DeliveryLogFile> made(new DeliveryLogFile);
  made->number_ = number;
  TORPOR_ASSIGN_OR_RETURN(made->file_, directory.create_file(delivery_log_file_name(number)));
  FileHead head{.version = kVersion, .byte_order = kByteOrder};
  std::copy(kMagic.begin(), kMagic.end(), head.magic.begin());
  if (key != nullptr) {
    head.id = random_seal_id();
    made->seal_ = std::make_unique<Seal>(*key, head.id, encrypt ? Protection::kEncrypted : Protection::kAuthenticated);
    head.protection = static_cast<uint32_t>(made->seal_->protection());
    head.key = made->seal_->key_name();
  }
  TORPOR_RETURN_IF_ERROR(made->file_->pwrite(std::as_bytes(std::span(&head, 1)), 0));
  made->end_ = sizeof head;
  return made;
}

Status DeliveryLogFile::append(const Bytes& record) {
  RecordHead head{.bytes = static_cast<uint32_t>(record.size())};
  Bytes whole(sizeof head + record.size());
  std::copy(record.begin(), record.end(), whole.begin() + sizeof head);
  const auto content = std::as_writable_bytes(std::span(whole)).subspan(sizeof head);
  head.tag = seal_ != nullptr ? seal_->seal(content, content, place_at(end_)) : digest_at(end_, content).bytes;
  std::memcpy(whole.data(), &head, sizeof head);
  TORPOR_RETURN_IF_ERROR(file_->pwrite(std::as_bytes(std::span(whole)), end_));
  end_ += whole.size();
  return ok();
}

Result<DeliveryLogFileRead> read_delivery_log_file(const Directory& directory, const std::string& name, const Key* key,
                                                   const DeliveryLogSink& sink) {
  DeliveryLogFileRead read;
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, directory.open_file(name));
  TORPOR_ASSIGN_OR_RETURN(const uint64_t size, file->size());
  const auto damaged_from = [&](uint64_t offset) {
    read.lost_bytes = size - offset;
    return read;
  };
  FileHead head;
  if (size < sizeof head) return damaged_from(0);  // the process was killed at the very beginning
  TORPOR_RETURN_IF_ERROR(file->pread(std::as_writable_bytes(std::span(&head, 1)), 0));
  if (std::string_view(head.magic.data(), head.magic.size()) != kMagic || head.byte_order != kByteOrder)
    return damaged_from(0);
  if (head.version != kVersion) {
    return Error{.code = Code::kIncompatible,
                 .what = fmt::format("{}: version {}, this torpor reads {}", file->name(), head.version, kVersion),
                 .next_step = "use the version of torpor that wrote it"};
  }
  if (head.protection > static_cast<uint32_t>(Protection::kEncrypted)) return damaged_from(0);
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Seal> seal, seal_of(head, key, file->name()));
  for (uint64_t at = sizeof head; at < size;) {
    RecordHead record;
    if (size - at < sizeof record) return damaged_from(at);
    TORPOR_RETURN_IF_ERROR(file->pread(std::as_writable_bytes(std::span(&record, 1)), at));
    if (record.bytes == 0 || record.bytes > size - at - sizeof record) return damaged_from(at);
    std::vector<std::byte> bytes(record.bytes);
    TORPOR_RETURN_IF_ERROR(file->pread(bytes, at + sizeof record));
    const bool intact = seal != nullptr ? seal->open(bytes, record.tag, place_at(at)).has_value()
                                        : digest_at(at, bytes).bytes == record.tag;
    if (!intact) return damaged_from(at);
    const auto kind = static_cast<RecordKind>(bytes[0]);
    if (kind == RecordKind::kWhole) {
      read.whole = true;
    } else {
      TORPOR_ASSIGN_OR_RETURN(const bool fits,
                              take(kind, std::span<const std::byte>(bytes).subspan(1), file->name(), sink));
      if (!fits) return damaged_from(at);
    }
    at += sizeof record + record.bytes;
  }
  return read;
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
