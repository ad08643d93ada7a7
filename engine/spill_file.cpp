// SPDX-License-Identifier: Apache-2.0
#include "engine/spill_file.h"

#include <fmt/core.h>

#include "base/digest.h"
#include "offload/disk_tier.h"

namespace torpor {
namespace {

std::string name_of(int32_t rank, const SealId& id) { return fmt::format("spill-r{}-{}", rank, hex(id)); }

// Return whether make_spill_file() made this. All else in the directory belongs to others, whatever its name.
bool is_spill_file(const Entry& entry) {
  constexpr std::string_view kPrefix = "spill-r";
  const std::string_view name = entry.name;
  if (entry.kind != EntryKind::kFile || !name.starts_with(kPrefix)) return false;
  const size_t dash = name.find('-', kPrefix.size());
  if (dash == std::string_view::npos || dash == kPrefix.size()) return false;
  const std::string_view rank = name.substr(kPrefix.size(), dash - kPrefix.size());
  return rank.find_first_not_of("0123456789") == std::string_view::npos &&
         is_hex(name.substr(dash + 1), sizeof(SealId));
}

// Remove the files of processes that ended between making a file and removing its name. If such a process still runs,
// its file loses the name a moment earlier.
Status remove_left(Directory& directory) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, directory.list());
  for (const Entry& entry : entries) {
    if (!is_spill_file(entry)) continue;
    if (const Status removed = directory.remove_file(entry.name); !removed && removed.error().code != Code::kNotFound)
      return removed;
  }
  return ok();
}

}  // namespace

Result<std::unique_ptr<RecordStore>> make_spill_file(FileSystem& file_system, const std::string& directory,
                                                     int32_t rank, const Key* key, bool encrypt) {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> opened,
                          file_system.open_directory(directory, /*create=*/true));
  TORPOR_RETURN_IF_ERROR(remove_left(*opened));
  const SealId id = random_seal_id();
  ChunkFileOptions options{.rank = rank, .durable = false};  // it ends with this process
  if (key != nullptr)
    options.seal = std::make_shared<Seal>(*key, id, encrypt ? Protection::kEncrypted : Protection::kAuthenticated);
  const std::string name = name_of(rank, id);
  TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<DiskTier> file, DiskTier::create(*opened, name, std::move(options)));
  if (const Status removed = opened->remove_file(name); !removed && removed.error().code != Code::kNotFound)
    return removed.error();
  return file;
}

}  // namespace torpor
