// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/rank_writer.h"

#include <atomic>
#include <cerrno>

#include <fmt/core.h>

#include "base/host_name.h"
#include "base/log.h"
#include "base/units.h"
#include "checkpoint/refs_codec.h"
#include "checkpoint/store_names.h"

namespace torpor {
namespace {

// Limits of links, because a link keeps its whole file: linked files hold at most so many times the bytes that the
// checkpoint uses of them, and there are at most so many. A reader of a checkpoint opens all of its files.
constexpr uint64_t kMostHeld = 2;
constexpr size_t kMostLinks = 64;

// Log why a file was not linked; once per process if the file system has no links.
void log_link_failure(const Error& error) {
  static std::atomic<bool> logged = false;
  const bool refused =
      error.native == EPERM || error.native == EXDEV || error.native == EMLINK || error.native == EOPNOTSUPP;
  if (!refused || !logged.exchange(true))
    log().warn("a file of the base checkpoint cannot be linked, so its chunks are written again: {}", error);
}

struct FileUse {
  uint64_t held = 0;  // size of the file; 0: the checkpoint uses nothing of it
  uint64_t used = 0;
  double share() const { return static_cast<double>(used) / static_cast<double>(held); }
};

// Open the staging directory. A rank on another host may have none at this path.
Result<std::unique_ptr<Directory>> open_staging(FileSystem& file_system, const std::string& staging) {
  Result<std::unique_ptr<Directory>> opened = file_system.open_directory(staging, false);
  if (opened || opened.error().code != Code::kNotFound) return opened;
  return Error{
      .code = Code::kFailedPrecondition,
      .what = fmt::format("the host {} does not see {}, where the checkpoint is to be written", host_name(), staging),
      .next_step = kShareIt};
}

// Return how much of each file of the base `records` use.
std::vector<FileUse> uses_of(const std::vector<SavedChunk>& records, const std::vector<LinkedFile>& files) {
  std::vector<FileUse> uses(files.size());
  for (const SavedChunk& record : records) {
    if (record.file == 0) continue;
    FileUse& use = uses[record.file - 1];
    use.held = files[record.file - 1].bytes;
    use.used += align_up(record.stored_bytes, kPage);
  }
  return uses;
}

// Return the file whose records should be put again; none if the links are few and well used.
std::optional<size_t> sparsest(const std::vector<FileUse>& uses) {
  FileUse all;
  size_t links = 0;
  for (const FileUse& use : uses) {
    all.held += use.held;
    all.used += use.used;
    links += use.held == 0 ? 0 : 1;
  }
  if (links <= kMostLinks && all.held / kMostHeld <= all.used) return std::nullopt;
  const auto goes_before = [&](const FileUse& a, const FileUse& b) {
    return links > kMostLinks ? a.used < b.used : a.share() < b.share();
  };
  std::optional<size_t> found;
  for (size_t file = 0; file < uses.size(); ++file) {
    if (uses[file].held != 0 && (!found || goes_before(uses[file], uses[*found]))) found = file;
  }
  return found;
}

}  // namespace

std::string test_file_name(int32_t rank) { return fmt::format("write-test-r{}", rank); }

Status write_test_file(FileSystem& file_system, const std::string& staging, int32_t rank) {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> directory, open_staging(file_system, staging));
  const Result<std::unique_ptr<File>> file = directory->create_file(test_file_name(rank));
  if (file || file.error().native == EEXIST) return ok();  // called again
  return file.error();
}

struct RankWriter::Base {
  std::unique_ptr<RankBase> records;
  std::vector<bool> linked;  // by file of the base
  std::vector<bool> used;    // by file of the base: its records may be taken over
};

RankWriter::RankWriter(std::unique_ptr<Directory> staging, const RankWriting& writing, int32_t rank,
                       std::shared_ptr<ProgressMeter> progress)
    : staging_(std::move(staging)), writing_(writing), rank_(rank), progress_(std::move(progress)) {}
RankWriter::~RankWriter() = default;

Result<std::unique_ptr<RankWriter>> RankWriter::create(FileSystem& file_system, const std::string& staging,
                                                       const RankWriting& writing, int32_t rank,
                                                       std::shared_ptr<const Key> key,
                                                       std::shared_ptr<ProgressMeter> progress) {
  TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<Directory> directory, open_staging(file_system, staging));
  std::unique_ptr<RankWriter> writer(new RankWriter(std::move(directory), writing, rank, std::move(progress)));
  ChunkFileOptions options{.rank = rank, .compression = writing.compression, .progress = writer->progress_};
  if (writing.protection != Protection::kNone) {
    if (key == nullptr)
      return Error{.code = Code::kInvalidArgument,
                   .what = fmt::format("rank {} has no key to seal its chunks with", rank),
                   .next_step = "set key_file for all processes of the engine"};
    options.seal = writer->seal_ = std::make_shared<Seal>(*key, writing.id, writing.protection);
  }
  TORPOR_ASSIGN_OR_RETURN(writer->own_, DiskTier::create(*writer->staging_, chunk_file_name(rank), std::move(options)));
  if (writing.base.empty()) return writer;
  Result<std::unique_ptr<RankBase>> base = RankBase::open(file_system, writing, rank, std::move(key));
  if (!base) {
    log().warn("rank {} is not incremental this time: {}", rank, base.error());
    return writer;
  }
  const size_t files = (*base)->refs().files.size();
  writer->base_.reset(
      new Base{.records = std::move(*base), .linked = std::vector<bool>(files), .used = std::vector<bool>(files)});
  writer->link_base(file_system);
  return writer;
}

// Link each file of the base if possible; records of the others are written again.
void RankWriter::link_base(FileSystem& file_system) {
  const Result<std::unique_ptr<Directory>> from = file_system.open_directory(writing_.base, false);
  const auto link = [&](const LinkedFile& file) -> Status {
    if (!from) return from.error();
    const std::string name = linked_file_name(rank_, file.id);
    TORPOR_RETURN_IF_ERROR((*from)->link_new(file.name, *staging_, name));
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> linked, staging_->open_file(name));
    TORPOR_ASSIGN_OR_RETURN(const uint64_t size, linked->size());
    if (size == file.bytes && size > 0) return ok();
    TORPOR_RETURN_IF_ERROR(staging_->remove_file(name));
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("{}/{} has {} bytes, {} were written", writing_.base, file.name, size, file.bytes),
                 .next_step = "see torpor verify"};
  };
  for (size_t i = 0; i < base_->records->refs().files.size(); ++i) {
    const Status linked = link(base_->records->refs().files[i]);
    base_->linked[i] = base_->used[i] = linked.has_value();
    if (!linked) log_link_failure(linked.error());
  }
}

const SavedChunk* RankWriter::base_record(const ChunkKey& key) const {
  if (base_ == nullptr) return nullptr;
  const SavedChunk* const known = base_->records->find(key);
  return known == nullptr || !base_->used[known->file] ? nullptr : known;
}

Result<SavedChunk> RankWriter::take_over(const ChunkKey& key) {
  const SavedChunk* const known = base_record(key);
  if (known == nullptr) {
    return Error{
        .code = Code::kNotFound,
        .what = fmt::format("nothing of the checkpoint before this one can be linked that has {}", key.to_string()),
        .next_step = "save its bytes"};
  }
  SavedChunk record = *known;
  ++record.file;
  if (progress_ != nullptr) TORPOR_RETURN_IF_ERROR(progress_->add(record.bytes));
  return record;
}

Status RankWriter::prepare(uint64_t bytes, uint64_t chunks) {
  return base_ != nullptr ? ok() : own_->prepare(bytes, chunks);  // with a base far less may be written
}

void RankWriter::put(std::span<RecordPart> parts) {
  std::vector<RecordPart> changed;
  std::vector<size_t> owner;  // index in `parts` of each changed part
  for (size_t i = 0; i < parts.size(); ++i) {
    SavedChunk& chunk = *parts[i].chunk;
    const SavedChunk* const known = base_record(chunk.key);
    if (known != nullptr && known->bytes == chunk.bytes && known->digest == chunk.digest) {
      chunk = *known;
      ++chunk.file;
      parts[i].status = progress_ == nullptr ? ok() : progress_->add(chunk.bytes);
    } else {
      changed.push_back({&chunk, parts[i].bytes, ok()});
      owner.push_back(i);
    }
  }
  own_->put(changed);
  for (size_t i = 0; i < changed.size(); ++i) parts[owner[i]].status = std::move(changed[i].status);
}

std::vector<size_t> RankWriter::sparse(const std::vector<SavedChunk>& records) {
  std::vector<size_t> found;
  if (base_ == nullptr) return found;
  std::vector<FileUse> uses = uses_of(records, base_->records->refs().files);
  for (std::optional<size_t> file = sparsest(uses); file; file = sparsest(uses)) {
    for (size_t i = 0; i < records.size(); ++i) {
      if (records[i].file == *file + 1) found.push_back(i);
    }
    base_->used[*file] = false;
    uses[*file] = {};
  }
  return found;
}

Status RankWriter::drop_unused_links(const std::vector<SavedChunk>& records) {
  if (base_ == nullptr) return ok();
  const std::vector<FileUse> uses = uses_of(records, base_->records->refs().files);
  for (size_t i = 0; i < uses.size(); ++i) {
    if (base_->linked[i] && uses[i].held == 0)
      TORPOR_RETURN_IF_ERROR(staging_->remove_file(linked_file_name(rank_, base_->records->refs().files[i].id)));
  }
  return ok();
}

// Number the files in the order in which records use them.
RankRefs RankWriter::refs_of(std::vector<SavedChunk>& records) const {
  RankRefs refs{.rank = rank_,
                .files = {{.name = chunk_file_name(rank_), .id = writing_.id, .bytes = own_->file_bytes()}}};
  std::vector<uint32_t> place(base_ == nullptr ? 1 : base_->records->refs().files.size() + 1, 0);
  for (SavedChunk& record : records) {
    if (record.file == 0) continue;
    uint32_t& now = place[record.file];
    if (now == 0) {
      now = static_cast<uint32_t>(refs.files.size());
      const LinkedFile& file = base_->records->refs().files[record.file - 1];
      refs.files.push_back({.name = linked_file_name(rank_, file.id), .id = file.id, .bytes = file.bytes});
    }
    record.file = now;
  }
  refs.records = records;
  return refs;
}

Result<RankSummary> RankWriter::write_refs(std::vector<SavedChunk>& records) {
  TORPOR_RETURN_IF_ERROR(own_->finish());
  TORPOR_RETURN_IF_ERROR(drop_unused_links(records));
  const RankRefs refs = refs_of(records);
  const EncodedRefs encoded = encode_refs(refs, writing_.id, seal_.get());
  RankSummary summary = summary_of(refs);
  summary.refs = refs_file_name(rank_);
  summary.refs_bytes = encoded.file.size();
  summary.refs_mac = encoded.mac;
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, staging_->create_file(summary.refs));
  TORPOR_RETURN_IF_ERROR(file->pwrite(std::as_bytes(std::span(encoded.file)), 0));
  TORPOR_RETURN_IF_ERROR(file->sync());
  return summary;
}

}  // namespace torpor
