// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/read_ahead.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "base/units.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/refs.h"

namespace torpor {
namespace {

constexpr uint64_t kPieceBytes = uint64_t{1} << 20;  // of one read

struct Extent {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// Read a part of a file, so that the page cache has it; the content of `buffer` is not used. kAborted: `stopped`.
Status read_extent(const File& file, const Extent& extent, const std::atomic<bool>& stopped,
                   std::vector<std::byte>& buffer) {
  for (uint64_t done = 0; done < extent.bytes; done += kPieceBytes) {
    if (stopped)
      return Error{.code = Code::kAborted,
                   .what = "reading a checkpoint ahead was stopped",
                   .next_step = "nothing: a wake reads what is missing"};
    buffer.resize(std::min(kPieceBytes, extent.bytes - done));
    TORPOR_RETURN_IF_ERROR(file.pread(buffer, extent.offset + done));
  }
  return ok();
}

}  // namespace

Result<ReadAheadReport> ReadAhead::follow() {
  return try_catch([&]() -> Result<ReadAheadReport> {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> store, file_system_.open_directory(directory_, false));
    TORPOR_ASSIGN_OR_RETURN(const Checkpoint newest, open_latest(*store, key_));
    if (newest.manifest().id == newest_) {
      last_.read_bytes = 0;
      return last_;
    }
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> directory,
                            file_system_.open_directory(newest.path(), false));
    ReadAheadReport report{.checkpoint = newest.path()};
    std::set<Location> ahead;
    std::vector<std::byte> buffer;
    for (const RankSummary& rank : newest.manifest().ranks) {
      TORPOR_ASSIGN_OR_RETURN(const RankRefs refs, newest.refs(rank));
      std::vector<SavedChunk> blocks;
      for (const SavedChunk& record : refs.records) {
        if (record.key.kind == ChunkKind::kKvBlock) blocks.push_back(record);
      }
      std::sort(blocks.begin(), blocks.end(), [](const SavedChunk& a, const SavedChunk& b) {
        return std::pair(a.file, a.offset) < std::pair(b.file, b.offset);
      });
      std::unique_ptr<File> file;
      std::optional<uint32_t> open;
      for (const SavedChunk& block : blocks) {
        report.bytes += block.stored_bytes;
        if (report.ahead_bytes + block.stored_bytes > budget_) continue;
        const Location location(refs.files[block.file].id, block.offset);
        if (!ahead_.contains(location)) {
          if (open != block.file) {
            TORPOR_ASSIGN_OR_RETURN(file, directory->open_file(refs.files[block.file].name));
            open = block.file;
          }
          TORPOR_RETURN_IF_ERROR(
              read_extent(*file, {.offset = block.offset, .bytes = block.stored_bytes}, stopped_, buffer));
          report.read_bytes += block.stored_bytes;
        }
        report.ahead_bytes += block.stored_bytes;
        ahead.insert(location);
      }
    }
    ahead_ = std::move(ahead);
    newest_ = newest.manifest().id;
    last_ = report;
    return report;
  });
}

}  // namespace torpor
