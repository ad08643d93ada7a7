// SPDX-License-Identifier: Apache-2.0
#include "remote/answer_copies.h"

#include <algorithm>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/digest.h"
#include "base/page_buffer.h"
#include "checkpoint/store_names.h"

namespace torpor::remote {
namespace {

using Json = nlohmann::ordered_json;
constexpr int kAnswersFormat = 1;
constexpr uint64_t kMostFiles = 100;
constexpr uint64_t kMostLogBytes = uint64_t{1} << 40;
constexpr int kAttempts = 5;  // a log replaces its files by newer ones now and then

std::string answers_key(std::string_view hash) { return fmt::format("{}{}", kAnswersPrefix, hash); }

bool is_log_file(std::string_view name) {
  if (name == "tenants.secret") return true;
  return name.starts_with("answers-") && name.size() == 20 &&
         name.find_first_not_of("0123456789", 8) == std::string_view::npos;
}

Error damaged_answers(std::string_view what) {
  return Error{.code = Code::kCorruption,
               .what = fmt::format("the answers in the store are damaged: {}", what),
               .next_step = "go on without them: with a directory that has none, after torpor pull"};
}

Result<std::span<std::byte>> room_in(PageBuffer& memory) {
  const std::span<std::byte> room = memory.room(kPartBytes);
  if (room.size() >= kPartBytes) return room;
  return Error{.code = Code::kResourceExhausted, .what = "no memory for a part", .next_step = "free some"};
}

Result<IndexedFile> push_file(const Directory& directory, const std::string& name, ObjectStore& store,
                              std::span<std::byte> room) {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, directory.open_file(name));
  IndexedFile pushed{.name = name};
  TORPOR_ASSIGN_OR_RETURN(pushed.bytes, file->size());
  for (uint64_t offset = 0; offset < pushed.bytes; offset += kPartBytes) {
    const std::span<std::byte> part = room.first(std::min(kPartBytes, pushed.bytes - offset));
    TORPOR_RETURN_IF_ERROR(file->pread(part, offset));
    pushed.parts.push_back(part_hash(part));
    TORPOR_RETURN_IF_ERROR(store.put_new(part_key(pushed.parts.back()), part));
  }
  return pushed;
}

Result<std::vector<IndexedFile>> push_files(const Directory& directory, ObjectStore& store) {
  PageBuffer memory;
  TORPOR_ASSIGN_OR_RETURN(const std::span<std::byte> room, room_in(memory));
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, directory.list());
  std::vector<IndexedFile> files;
  for (const Entry& entry : entries) {
    if (entry.kind != EntryKind::kFile || !is_log_file(entry.name)) continue;
    TORPOR_ASSIGN_OR_RETURN(IndexedFile pushed, push_file(directory, entry.name, store, room));
    files.push_back(std::move(pushed));
  }
  return files;
}

std::string encode_files(const std::vector<IndexedFile>& files) {
  Json list = Json::array();
  for (const IndexedFile& file : files)
    list.push_back({{"name", file.name}, {"bytes", file.bytes}, {"parts", file.parts}});
  return Json{{"torpor_answers", kAnswersFormat}, {"files", std::move(list)}}.dump();
}

Result<std::vector<IndexedFile>> decode_files(std::string_view text) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("torpor_answers") || json["torpor_answers"] != kAnswersFormat ||
      !json.contains("files") || !json["files"].is_array() || json["files"].size() > kMostFiles)
    return damaged_answers("their index is none");
  std::vector<IndexedFile> files;
  for (const Json& each : json["files"]) {
    if (!each.is_object() || !each.contains("name") || !each["name"].is_string() || !each.contains("bytes") ||
        !each["bytes"].is_number_unsigned() || !each.contains("parts") || !each["parts"].is_array())
      return damaged_answers("a file has no name, bytes or parts");
    IndexedFile file{.name = each["name"], .bytes = each["bytes"]};
    const bool twice =
        std::any_of(files.begin(), files.end(), [&](const IndexedFile& other) { return other.name == file.name; });
    if (!is_log_file(file.name) || twice) return damaged_answers("a file has a name that it cannot have");
    if (file.bytes > kMostLogBytes || each["parts"].size() != (file.bytes + kPartBytes - 1) / kPartBytes)
      return damaged_answers("a file has another size than its parts");
    for (const Json& part : each["parts"]) {
      if (!part.is_string() || !is_hex(part.get<std::string>(), sizeof(ManifestMac)))
        return damaged_answers("a part has no hash");
      file.parts.push_back(part);
    }
    files.push_back(std::move(file));
  }
  return files;
}

Status pull_file(ObjectStore& store, const IndexedFile& file, Directory& into, std::span<std::byte> room) {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> out, into.create_file(file.name));
  for (size_t i = 0; i < file.parts.size(); ++i) {
    const uint64_t offset = i * kPartBytes;
    const std::span<std::byte> part = room.first(std::min(kPartBytes, file.bytes - offset));
    TORPOR_ASSIGN_OR_RETURN(const uint64_t received, store.get(part_key(file.parts[i]), part));
    if (received != part.size() || part_hash(part) != file.parts[i])
      return damaged_answers(fmt::format("part {} of {}", i, file.name));
    TORPOR_RETURN_IF_ERROR(out->pwrite(part, offset));
  }
  return out->sync();
}

// Keep a log that is in the directory beside the new one: another server wrote it.
Status set_aside(Directory& target, std::string_view index) {
  const auto there = target.open_directory(kAnswersFolder);
  if (!there) return there.error().code == Code::kNotFound ? ok() : Status(there.error());
  const std::string first = fmt::format("answers-before-{}", index.substr(0, 16));
  std::string aside = first;
  for (int number = 2; target.open_directory(aside); ++number) aside = fmt::format("{}-{}", first, number);
  return target.rename_new(kAnswersFolder, aside);
}

}  // namespace

bool is_answers_key(std::string_view key) {
  return key.starts_with(kAnswersPrefix) && is_hex(key.substr(kAnswersPrefix.size()), sizeof(ManifestMac));
}

Result<std::string> push_answers(FileSystem& file_system, const std::string& directory, ObjectStore& store) {
  return try_catch([&]() -> Result<std::string> {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> from, file_system.open_directory(directory, false));
    Result<std::vector<IndexedFile>> files = push_files(*from, store);
    for (int i = 1; !files && files.error().code == Code::kNotFound && i < kAttempts; ++i)
      files = push_files(*from, store);
    if (!files) return files.error();
    const std::string text = encode_files(*files);
    const std::span<const std::byte> bytes = std::as_bytes(std::span(text));
    std::string index = part_hash(bytes);
    TORPOR_RETURN_IF_ERROR(store.put_new(answers_key(index), bytes));
    return index;
  });
}

Result<std::vector<IndexedFile>> read_answers(ObjectStore& store, const std::string& index) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<std::byte> text, get_whole(store, answers_key(index), kMostIndexBytes));
  if (part_hash(text) != index) return damaged_answers("their index has another hash");
  return decode_files({reinterpret_cast<const char*>(text.data()), text.size()});
}

Status pull_answers(FileSystem& file_system, ObjectStore& store, const std::string& index,
                    const std::string& directory) {
  return try_catch([&]() -> Status {
    TORPOR_ASSIGN_OR_RETURN(const std::vector<IndexedFile> files, read_answers(store, index));
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> target, file_system.open_directory(directory, true));
    if (target->open_directory(kPulledAnswers)) TORPOR_RETURN_IF_ERROR(target->remove_tree(kPulledAnswers));
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> staging, target->create_directory(kPulledAnswers));
    PageBuffer memory;
    TORPOR_ASSIGN_OR_RETURN(const std::span<std::byte> room, room_in(memory));
    for (const IndexedFile& file : files) TORPOR_RETURN_IF_ERROR(pull_file(store, file, *staging, room));
    TORPOR_RETURN_IF_ERROR(staging->sync());
    TORPOR_RETURN_IF_ERROR(set_aside(*target, index));
    TORPOR_RETURN_IF_ERROR(target->rename_new(kPulledAnswers, kAnswersFolder));
    return target->sync();
  });
}

}  // namespace torpor::remote
