// SPDX-License-Identifier: Apache-2.0
#include "offload/cache_epoch.h"

#include <algorithm>
#include <charconv>

#include <fmt/core.h>

#include "base/digest.h"
#include "base/seal.h"

namespace torpor {
namespace {

constexpr std::string_view kPrefix = "space-";
constexpr std::string_view kUnfinished = "space-unfinished";  // where a new word is written
constexpr uint32_t kNumbers = 1u << 30;

std::string name_of(uint32_t number) { return fmt::format("{}{}", kPrefix, number); }

// Return the numbers of the files that exist, the newest first.
Result<std::vector<uint32_t>> numbers_in(const Directory& directory) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, directory.list());
  std::vector<uint32_t> numbers;
  for (const Entry& entry : entries) {
    if (entry.kind != EntryKind::kFile || !entry.name.starts_with(kPrefix)) continue;
    uint32_t number = 0;
    const char* const end = entry.name.data() + entry.name.size();
    const auto read = std::from_chars(entry.name.data() + kPrefix.size(), end, number);
    const bool whole = read.ec == std::errc() && read.ptr == end && entry.name == name_of(number);
    if (whole && number < kNumbers) numbers.push_back(number);
  }
  std::sort(numbers.rbegin(), numbers.rend());
  return numbers;
}

bool is_word(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

Error no_word(const std::string& file) {
  return Error{.code = Code::kCorruption,
               .what = fmt::format("{} is not the word of a namespace", file),
               .next_step = "nothing: what is on disk is computed again"};
}

// Return the word in the file. kCorruption if it was not written whole, or is not a word.
Result<std::string> read_word(const Directory& directory, uint32_t number) {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, directory.open_file(name_of(number)));
  TORPOR_ASSIGN_OR_RETURN(const uint64_t bytes, file->size());
  std::string word(kCacheEpochBytes, '\0');
  if (bytes == word.size()) TORPOR_RETURN_IF_ERROR(file->pread(std::as_writable_bytes(std::span(word)), 0));
  if (bytes == word.size() && is_word(word)) return word;
  return no_word(file->name());
}

Status write_word(FileSystem& files, const std::string& path, const std::string& word) {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> directory, files.open_directory(path, true));
  TORPOR_ASSIGN_OR_RETURN(const std::vector<uint32_t> there, numbers_in(*directory));
  {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, directory->open_slots(kUnfinished, FileIo::kPlain));
    TORPOR_RETURN_IF_ERROR(file->truncate(0));
    TORPOR_RETURN_IF_ERROR(file->pwrite(std::as_bytes(std::span(word)), 0));
    TORPOR_RETURN_IF_ERROR(file->sync());
  }
  TORPOR_RETURN_IF_ERROR(directory->rename_new(kUnfinished, name_of(there.empty() ? 1 : there.front() + 1)));
  TORPOR_RETURN_IF_ERROR(directory->sync());
  for (const uint32_t number : there) (void)directory->remove_file(name_of(number));  // the newest file counts
  return ok();
}

}  // namespace

// Where a new word was not written whole, as on a full disk, nobody may find what the older word names: a process may
// have forgotten it. A torn file `space-N` is of an older torpor, whose process ended before it forgot anything.
Result<std::string> cache_epoch(FileSystem& files, const std::string& path) {
  return try_catch([&]() -> Result<std::string> {
    const Result<std::unique_ptr<Directory>> directory = files.open_directory(path, false);
    if (!directory && directory.error().code == Code::kNotFound) return std::string();
    if (!directory) return directory.error();
    const Result<std::unique_ptr<File>> unfinished = (*directory)->open_file(kUnfinished);
    if (unfinished) return no_word((*unfinished)->name());
    if (unfinished.error().code != Code::kNotFound) return unfinished.error();
    TORPOR_ASSIGN_OR_RETURN(const std::vector<uint32_t> there, numbers_in(**directory));
    for (const uint32_t number : there) {
      Result<std::string> word = read_word(**directory, number);
      if (word || word.error().code != Code::kCorruption || number == there.back()) return word;
    }
    return std::string();
  });
}

RenewedEpoch renew_cache_epoch(FileSystem& files, const std::string& path) {
  RenewedEpoch renewed{.word = random_cache_epoch(), .kept = {}};
  renewed.kept = try_catch([&] { return write_word(files, path, renewed.word); });
  return renewed;
}

std::string random_cache_epoch() {
  static_assert(sizeof(SealId) * 2 == kCacheEpochBytes);
  return hex(random_seal_id());
}

}  // namespace torpor
