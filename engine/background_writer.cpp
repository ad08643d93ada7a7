// SPDX-License-Identifier: Apache-2.0
#include "engine/background_writer.h"

#include "base/units.h"
#include "engine/combined_digest.h"

namespace torpor {
namespace {

// One batch, and so one thread of a lane; the other threads serve the engine.
constexpr uint64_t kPieceBytes = 256 * kKiB;

}  // namespace

BackgroundWriter::~BackgroundWriter() {
  stop_ = true;
  (void)background_.wait();
}

Status BackgroundWriter::go_on() const {
  if (stop_) return Error{.code = Code::kAborted, .what = "the checkpoint was given up", .next_step = "none"};
  return progress_ == nullptr ? ok() : progress_->check();
}

void BackgroundWriter::expect() const noexcept {
  if (progress_ != nullptr) progress_->expect(bytes_of(plans_));
}

void BackgroundWriter::written(std::span<const ChunkPlan> plans) const noexcept {
  if (progress_ != nullptr) progress_->moved(bytes_of(plans));
}

Status BackgroundWriter::in_pieces(std::span<const ChunkPlan> plans, const Piece& piece) const {
  for (size_t first = 0; first < plans.size();) {
    TORPOR_RETURN_IF_ERROR(go_on());
    size_t end = first;
    uint64_t bytes = 0;
    do {
      bytes += plans[end].bytes();
      ++end;
    } while (end < plans.size() && bytes + plans[end].bytes() <= kPieceBytes);
    TORPOR_RETURN_IF_ERROR(piece(plans.subspan(first, end - first), first));
    first = end;
  }
  return ok();
}

Status BackgroundWriter::wait_idle() {
  if (failed_) return *failed_;
  Status ended = background_.wait();
  if (!ended) failed_ = ended.error();
  return ended;
}

Status BackgroundWriter::open(FileSystem& file_system, std::string directory, int32_t rank,
                              std::shared_ptr<const Key> key, std::vector<ChunkPlan> weights,
                              std::vector<ChunkPlan> named_weights) {
  TORPOR_RETURN_IF_ERROR(wait_idle());
  return background_.begin([this, &file_system, directory = std::move(directory), rank, key = std::move(key),
                            weights = std::move(weights), named_weights = std::move(named_weights)]() -> Status {
    TORPOR_RETURN_IF_ERROR(go_on());
    TORPOR_ASSIGN_OR_RETURN(writer_, RankWriter::create(file_system, directory, writing_, rank, key));
    TORPOR_ASSIGN_OR_RETURN(digest_, digest_of(weights));
    TORPOR_ASSIGN_OR_RETURN(named_digest_, digest_of(named_weights));
    return ok();
  });
}

// Return the digest of these pieces; none if there are none.
Result<std::optional<std::string>> BackgroundWriter::digest_of(std::span<const ChunkPlan> weights) const {
  if (weights.empty()) return std::optional<std::string>();
  CombinedDigest all;
  TORPOR_RETURN_IF_ERROR(in_pieces(weights, [&](std::span<const ChunkPlan> plans, size_t) -> Status {
    TORPOR_ASSIGN_OR_RETURN(const std::vector<Digest> digests, transfers_.digests(plans));
    for (size_t i = 0; i < plans.size(); ++i) all.add(plans[i].key, digests[i]);
    return ok();
  }));
  return std::optional<std::string>(all.finish());
}

Status BackgroundWriter::precopy(std::vector<ChunkPlan> plans, std::vector<BlockContent> contents, size_t rooms,
                                 uint64_t room_bytes) {
  TORPOR_RETURN_IF_ERROR(wait_idle());
  plans_ = std::move(plans);
  contents_ = std::move(contents);
  expect();
  return background_.begin([this, rooms, room_bytes]() -> Status {
    TORPOR_RETURN_IF_ERROR(in_pieces(plans_, [this](std::span<const ChunkPlan> plans, size_t first) -> Status {
      TORPOR_ASSIGN_OR_RETURN(std::vector<SavedChunk> saved, transfers_.put(plans, *writer_));
      for (size_t i = 0; i < plans.size(); ++i)
        ahead_[plans[i].key.index] = {.content = contents_[first + i], .record = std::move(saved[i])};
      written(plans);
      return ok();
    }));
    make_room(rooms, room_bytes);
    return ok();
  });
}

// Take what memory there is; the rest is taken when it is needed.
void BackgroundWriter::make_room(size_t rooms, uint64_t room_bytes) noexcept {
  (void)try_catch([&]() -> Status {
    const HostArena::GoOn unless_stopped = [this](uint64_t) { return !stop_; };
    while (true) {
      TORPOR_ASSIGN_OR_RETURN(const uint64_t came,
                              arena_.prefault_slowly(rooms * align_up(room_bytes, kPage), unless_stopped));
      if (came == 0) break;
    }
    for (rooms_.reserve(rooms); rooms_.size() < rooms;) {
      HostArena::Span room = arena_.allocate_held(room_bytes);
      if (room.empty()) break;
      rooms_.push_back(std::move(room));
    }
    return ok();
  });
}

const SavedChunk* BackgroundWriter::ahead(const ChunkKey& block, const BlockContent& content) const {
  const auto found = ahead_.find(block.index);
  return found != ahead_.end() && content.same_as(found->second.content) ? &found->second.record : nullptr;
}

Status BackgroundWriter::copy_rest(std::vector<ChunkPlan> plans) {
  TORPOR_RETURN_IF_ERROR(wait_idle());
  plans_ = std::move(plans);
  copied_.clear();
  rooms_.clear();
  if (plans_.empty()) return ok();
  host_ = std::make_unique<HostTier>(arena_);
  Result<std::vector<SavedChunk>> saved = try_catch([&] { return transfers_.save(plans_, *host_); });
  if (!saved) {
    if (transfers_.engine().quarantined()) HostTier::abandon(std::move(host_));  // a copy may still write there
    host_.reset();
    return std::move(saved).error();
  }
  copied_ = std::move(*saved);
  expect();
  return ok();
}

Status BackgroundWriter::write(std::vector<SavedChunk> records, std::vector<size_t> places, orders::Save::Reply reply) {
  TORPOR_RETURN_IF_ERROR(wait_idle());
  records_ = std::move(records);
  return background_.begin([this, places = std::move(places), reply = std::move(reply)]() mutable -> Status {
    if (host_ != nullptr) {
      TORPOR_RETURN_IF_ERROR(in_pieces(plans_, [this](std::span<const ChunkPlan> plans, size_t first) -> Status {
        TORPOR_RETURN_IF_ERROR(
            transfers_.move(plans, std::span(copied_).subspan(first, plans.size()), *host_, *writer_));
        written(plans);
        return ok();
      }));
      host_.reset();
    }
    for (size_t i = 0; i < places.size(); ++i) records_[places[i]] = std::move(copied_[i]);
    TORPOR_RETURN_IF_ERROR(go_on());
    TORPOR_ASSIGN_OR_RETURN(reply.saved, writer_->write_refs(records_));
    written_ = std::move(reply);
    return ok();
  });
}

}  // namespace torpor
