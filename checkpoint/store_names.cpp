// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/store_names.h"

#include <algorithm>
#include <charconv>

#include <fmt/core.h>

namespace torpor {

std::string generation_name(uint64_t generation) { return fmt::format("{}{:06}", kGenerationPrefix, generation); }

std::optional<uint64_t> generation_of(std::string_view entry_name) {
  if (!entry_name.starts_with(kGenerationPrefix)) return std::nullopt;
  uint64_t generation = 0;
  const std::string_view digits = entry_name.substr(kGenerationPrefix.size());
  const auto [end, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), generation);
  if (problem != std::errc{} || end != digits.data() + digits.size() || generation_name(generation) != entry_name)
    return std::nullopt;
  return generation;
}

bool is_leftover(const Entry& entry) {
  const std::string_view name = entry.name;
  if (entry.kind != EntryKind::kDirectory) return false;
  if (name.starts_with(kTrashPrefix)) return generation_of(name.substr(kTrashPrefix.size())).has_value();
  if (name == kPulledAnswers) return true;
  if (name.starts_with(kPullPrefix)) return is_hex(name.substr(kPullPrefix.size()), sizeof(SealId));
  if (!name.starts_with(kStagingPrefix)) return false;
  const std::string_view number = name.substr(kStagingPrefix.size());
  return generation_of(fmt::format("{}{}", kGenerationPrefix, number)).has_value();
}

Result<std::vector<uint64_t>> generations_in(const Directory& store) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, store.list());
  std::vector<uint64_t> generations;
  for (const Entry& entry : entries) {
    if (entry.kind != EntryKind::kDirectory) continue;
    if (const std::optional<uint64_t> generation = generation_of(entry.name)) generations.push_back(*generation);
  }
  std::sort(generations.begin(), generations.end());
  return generations;
}

Result<Bytes> read_whole(const Directory& directory, std::string_view name, uint64_t most) {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, directory.open_file(name));
  TORPOR_ASSIGN_OR_RETURN(const uint64_t size, file->size());
  if (size > most) {
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("{} has {} bytes", file->name(), size),
                 .next_step = "use another checkpoint"};
  }
  Bytes bytes(size);
  TORPOR_RETURN_IF_ERROR(file->pread(std::as_writable_bytes(std::span(bytes)), 0));
  return bytes;
}

Result<OpenedManifest> read_manifest(const Directory& directory, const Key* key) {
  TORPOR_ASSIGN_OR_RETURN(const Bytes bytes, read_whole(directory, kManifestFile, kMaxManifestBytes));
  Result<OpenedManifest> opened = decode_manifest(std::as_bytes(std::span(bytes)), key);
  if (!opened) return opened.error().within(directory.path());
  return opened;
}

SealPlace section_place(const SectionInfo& info) { return {SealPlace::Kind::kSection, 0, info.offset, info.name}; }

}  // namespace torpor
