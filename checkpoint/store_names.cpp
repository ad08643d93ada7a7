#include "checkpoint/store_names.h"

#include <algorithm>
#include <charconv>

#include <fmt/format.h>

#include "checkpoint/manifest_codec.h"

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

Result<std::vector<uint64_t>> generations_in(const Directory& store) {
  TORPOR_ASSIGN(const std::vector<Entry> entries, store.list());
  std::vector<uint64_t> generations;
  for (const Entry& entry : entries) {
    if (entry.kind != EntryKind::kDirectory) continue;
    if (const std::optional<uint64_t> generation = generation_of(entry.name)) generations.push_back(*generation);
  }
  std::sort(generations.begin(), generations.end());
  return generations;
}

Result<Manifest> read_manifest(Directory& directory, const Key* key, std::shared_ptr<const Seal>* seal) {
  TORPOR_ASSIGN(const std::unique_ptr<File> file, directory.open_file(kManifestFile));
  TORPOR_ASSIGN(const uint64_t size, file->size());
  if (size > kMaxManifestBytes) {
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("{} has {} bytes", file->name(), size),
                 .next_step = "use another checkpoint"};
  }
  Bytes bytes(size);
  TORPOR_TRY(file->pread(std::as_writable_bytes(std::span(bytes)), 0));
  Result<Manifest> manifest = decode_manifest(std::as_bytes(std::span(bytes)), key, seal);
  if (!manifest) return manifest.error().within(directory.path());
  return manifest;
}

SealPlace section_place(const SectionInfo& info) { return {SealPlace::Kind::kSection, 0, info.offset, info.name}; }

}  // namespace torpor
