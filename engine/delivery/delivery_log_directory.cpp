// SPDX-License-Identifier: Apache-2.0
#include "engine/delivery/delivery_log_directory.h"

#include <algorithm>
#include <cerrno>

#include <fmt/core.h>

#include "base/log.h"
#include "checkpoint/engine_checkpoint.h"

namespace torpor {
namespace {

constexpr std::string_view kAside = "set-aside-";  // begins the name of a file that was set aside

}  // namespace

Result<std::unique_ptr<DeliveryLogDirectory>> DeliveryLogDirectory::open(FileSystem& file_system,
                                                                         const std::string& path) {
  TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<Directory> directory, file_system.open_directory(path, true));
  std::unique_ptr<DeliveryLogDirectory> opened(new DeliveryLogDirectory(std::move(directory), path));
  Result<std::unique_ptr<File>> lock = opened->directory_->lock("LOCK");
  if (!lock) {
    if (lock.error().code != Code::kUnavailable) return lock.error();
    return Error{.code = Code::kUnavailable,
                 .what = fmt::format("another server uses {}", path),
                 .next_step = "end it, or give this one another directory"};
  }
  opened->lock_ = std::move(*lock);
  TORPOR_ASSIGN_OR_RETURN(opened->at_open_, opened->numbers());
  if (!opened->at_open_.empty()) opened->newest_ = opened->at_open_.back();
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, opened->directory_->list());
  for (const Entry& entry : entries) {
    const std::string_view name = entry.name;
    if (!name.starts_with(kAside)) continue;
    const uint64_t number = delivery_log_file_number(name.substr(kAside.size())).value_or(0);
    opened->newest_ = std::max(opened->newest_, number);
  }
  return opened;
}

Result<std::vector<uint64_t>> DeliveryLogDirectory::numbers() const {
  std::vector<uint64_t> numbers;
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, directory_->list());
  for (const Entry& entry : entries) {
    const std::optional<uint64_t> number = delivery_log_file_number(entry.name);
    if (number && entry.kind == EntryKind::kFile) numbers.push_back(*number);
  }
  return numbers;  // list() sorts by name
}

// --- reading what an earlier server left -----------------------------------------------------------------------------

Result<DeliveryLogFound> DeliveryLogDirectory::read(AnswerTable& answers, const DeliveryLogReader& reader,
                                                    const Clock& clock) {
  DeliveryLogFound found;
  if (at_open_.empty()) return found;
  const Status read = read_files(answers, reader, clock, found);
  if (read) return found;
  const Code code = read.error().code;
  if (reader.other_engine != OtherEngine::kSetAside || (code != Code::kUnauthenticated && code != Code::kIncompatible))
    return read.error();
  answers.clear();
  found.of_another = read.error().what;
  found.sets_aside = true;
  return found;
}

// Read the newest complete file. If none is complete, read what is readable of the oldest: it was complete when the
// others were begun.
Status DeliveryLogDirectory::read_files(AnswerTable& answers, const DeliveryLogReader& reader, const Clock& clock,
                                        DeliveryLogFound& found) {
  Fingerprint engine = reader.engine;
  const DeliveryLogSink sink = {
      .engine = [&](Fingerprint read) { engine = std::move(read); },
      .answer =
          [&](Answer answer) {
            const Answer* const earlier = answers.get(answer.request.id);
            if (earlier != nullptr) {  // that answer had ended and was forgotten before its id was used again
              if (earlier->state == AnswerState::kRunning) return false;
              answers.forget(answer.request.id);
            }
            answer.ended = std::min(answer.ended, clock.unix_seconds());  // it was recorded by a clock that was ahead
            answers.put(std::move(answer));
            return true;
          },
      .steps =
          [&](std::vector<AnswerStep> steps) {
            const Result<std::vector<Answer*>> prepared = answers.prepare(steps);
            if (!prepared) return false;
            for (size_t i = 0; i < steps.size(); ++i) {
              steps[i].time = std::min(steps[i].time, clock.unix_seconds());
              answers.apply(steps[i], *(*prepared)[i]);
            }
            return true;
          },
  };
  bool whole = false;
  for (auto number = at_open_.rbegin(); number != at_open_.rend() && !whole; ++number) {
    answers.clear();
    engine = reader.engine;
    counts_ = *number;
    TORPOR_ASSIGN_OR_RETURN(const DeliveryLogFileRead read,
                            read_delivery_log_file(*directory_, delivery_log_file_name(*number), reader.key, sink));
    whole = read.whole;
    found.lost_bytes = read.lost_bytes;
  }
  if (found.lost_bytes > 0) log().warn("{}: {} bytes behind damage were left out", path_, found.lost_bytes);
  // Any server may read ended answers, which are text. Running answers need the engine that began them.
  const Status same = compare_fingerprints(engine, reader.engine);
  if (same || answers.running() == 0) return ok();
  if (reader.other_engine == OtherEngine::kRefuse)
    return Error{.code = Code::kIncompatible,
                 .what = fmt::format("{} has answers of another engine: {}", path_, same.error().what),
                 .next_step = "start the server as the one that began them, or give another directory"};
  found.of_another = same.error().what;
  found.sets_aside = reader.other_engine == OtherEngine::kSetAside;
  return ok();
}

// --- files -----------------------------------------------------------------------------------------------------------

Result<std::shared_ptr<DeliveryLogFile>> DeliveryLogDirectory::create(const Key* key, bool encrypt) {
  return DeliveryLogFile::create(*directory_, ++newest_, key, encrypt);
}

Status DeliveryLogDirectory::remove_older(uint64_t number) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<uint64_t> numbers, this->numbers());
  for (const uint64_t each : numbers) {
    if (each >= number) break;
    if (const Status removed = directory_->remove_file(delivery_log_file_name(each)); !removed)
      log().warn("{}: an old file of the log stays: {}", path_, removed.error());
  }
  return ok();
}

Result<std::string> DeliveryLogDirectory::set_aside_older(uint64_t number) {
  TORPOR_ASSIGN_OR_RETURN(std::vector<uint64_t> older, numbers());
  std::erase_if(older, [&](uint64_t each) { return each >= number; });
  // The file that counts is the last one, so that after a kill no other file counts in its place.
  std::stable_partition(older.begin(), older.end(), [&](uint64_t each) { return each != counts_; });
  std::string last;
  for (size_t i = 0; i < older.size(); ++i) {
    const bool is_last = i + 1 == older.size();
    if (is_last && i > 0) TORPOR_RETURN_IF_ERROR(directory_->sync());
    Result<std::string> aside = set_aside(older[i]);
    if (!aside) {
      remove(number);
      return aside;
    }
    last = path_ + "/" + *aside;
  }
  TORPOR_RETURN_IF_ERROR(directory_->sync());
  return last;
}

Result<std::string> DeliveryLogDirectory::set_aside(uint64_t number) {
  const std::string name = delivery_log_file_name(number);
  std::string aside = fmt::format("{}{}", kAside, name);
  Status renamed = directory_->rename_new(name, aside);
  if (!renamed && renamed.error().native == EEXIST) {  // a log before this one began with the same numbers
    aside = fmt::format("{}{}", kAside, delivery_log_file_name(++newest_));
    renamed = directory_->rename_new(name, aside);
  }
  if (!renamed) return std::move(renamed).error();
  return aside;
}

}  // namespace torpor
