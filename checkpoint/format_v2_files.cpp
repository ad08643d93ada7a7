#include "checkpoint/format_v2_files.h"

#include <set>

#include <fmt/core.h>
#include <boost/filesystem.hpp>

#include "checkpoint/store_names.h"

namespace torpor::format_v2 {

Result<std::unique_ptr<File>> open_file(FileSystem& file_system, const Directory& directory, const LinkedFile& file,
                                        const Key* key) {
  const size_t slash = file.name.find('/');
  if (slash == std::string::npos) return directory.open_file(file.name, FileIo::kFastest);
  const std::string generation = file.name.substr(0, slash);
  const auto missing = [&](std::string_view what) {
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("{} needs {}, {}", directory.path(), generation, what),
                 .next_step = "use another checkpoint"};
  };
  const std::string store_path = boost::filesystem::path(directory.path()).parent_path().string();
  TORPOR_ASSIGN(const std::unique_ptr<Directory> store, file_system.open_directory(store_path, false));
  const Result<std::unique_ptr<Directory>> earlier = store->open_directory(generation);
  if (!earlier) return missing(fmt::format("which cannot be opened: {}", earlier.error().what));
  TORPOR_ASSIGN(const OpenedManifest theirs, read_manifest(**earlier, key));
  if (theirs.manifest.id != file.id) return missing("but another one than that is there");
  return (*earlier)->open_file(file.name.substr(slash + 1), FileIo::kFastest);
}

std::vector<uint64_t> needs(const Manifest& manifest) {
  std::set<uint64_t> generations;
  if (manifest.format_version != kOldestFormatVersion) return {};
  for (const RankSummary& rank : manifest.ranks) {
    for (const LinkedFile& file : rank.files) {
      const size_t slash = file.name.find('/');
      if (slash == std::string::npos) continue;
      if (const auto generation = generation_of(file.name.substr(0, slash))) generations.insert(*generation);
    }
  }
  return {generations.begin(), generations.end()};
}

}  // namespace torpor::format_v2
