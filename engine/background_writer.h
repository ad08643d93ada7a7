// SPDX-License-Identifier: Apache-2.0
// BackgroundWriter: what one rank writes of a checkpoint while its engine serves, in the background and piece by piece,
// so that whatever is more urgent waits for one piece at most.
//
//   open()        makes the files, and takes the digest of weights that is not known
//   precopy()     blocks with a version, from device memory. Nothing keeps them as they are meanwhile: what was copied
//   of
//                 one counts only if its version is the same when the engine stands still, and its bytes were then
//                 the same all along. Then host memory for what is left, which the engine would wait for
//   copy_rest()   while the engine stands still: all else, to host memory
//   write()       that into the file; then the file is made safe, and the refs are written
//
// Owner: CheckpointSaver; RankMemory's lock is held at every call. A thread of its own writes in the background; it
// takes no lock. Failure: what was begun fails at the next wait_idle(), and so does all that follows. The rank's memory
// and the checkpoint before are as they were.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/background.h"
#include "base/progress_file.h"
#include "checkpoint/rank_writer.h"
#include "engine/rank_orders.h"
#include "engine/retained_blocks.h"
#include "offload/host_tier.h"
#include "offload/transfer_engine.h"

namespace torpor {

class BackgroundWriter {
 public:
  // The first two outlive it. `progress`: who watches what is written, and may cancel it; or null.
  BackgroundWriter(TransferEngine& transfers, HostArena& arena, const RankWriting& writing,
                   std::shared_ptr<ProgressFile> progress)
      : transfers_(transfers),
        arena_(arena),
        writing_(writing),
        progress_(std::move(progress)),
        background_(transfers.own_threads()) {}
  ~BackgroundWriter();  // what is under way ends first, at its next piece

  // `weights`: pieces whose digest is wanted.
  Status open(FileSystem& file_system, std::string directory, int32_t rank, std::shared_ptr<const Key> key,
              std::vector<ChunkPlan> weights);
  bool ended() { return background_.ended(); }
  Status wait_idle();  // waits for what is under way

  // All that follows needs wait_idle() without an error.
  const RankWriting& writing() const { return writing_; }
  RankWriter& writer() { return *writer_; }
  std::optional<std::string> take_digest() { return std::exchange(digest_, std::nullopt); }  // of `weights`

  // Then it brings up host memory for `rooms` chunks of `room_bytes`, which copy_rest() is likely to have.
  Status precopy(std::vector<ChunkPlan> plans, std::vector<BlockContent> contents, size_t rooms, uint64_t room_bytes);
  const SavedChunk* ahead(const ChunkKey& block, const BlockContent& content) const;  // null: it was not, or is another
  // Blocks that the checkpoint before has in a file that this one is not to link (RankWriter::sparse()).
  void note_sparse(uint64_t block) { sparse_.insert(block); }
  bool is_sparse(uint64_t block) const { return sparse_.contains(block); }
  Status copy_rest(std::vector<ChunkPlan> plans);
  // `records`: all that the rank has; `places`: those of copy_rest()'s, in its order.
  Status write(std::vector<SavedChunk> records, std::vector<size_t> places, orders::Save::Reply reply);
  const std::optional<orders::Save::Reply>& written() const { return written_; }

 private:
  struct Ahead {
    BlockContent content;
    SavedChunk record;
  };
  using Piece = std::function<Status(std::span<const ChunkPlan> plans, size_t first)>;
  Status go_on() const;
  Status in_pieces(std::span<const ChunkPlan> plans, const Piece& piece) const;
  void make_room(size_t rooms, uint64_t room_bytes) noexcept;
  void expect() const noexcept;  // that plans_ will be written
  void written(std::span<const ChunkPlan> plans) const noexcept;

  TransferEngine& transfers_;
  HostArena& arena_;
  const RankWriting writing_;
  const std::shared_ptr<ProgressFile> progress_;
  std::unique_ptr<RankWriter> writer_;
  std::optional<std::string> digest_;
  std::unordered_map<uint64_t, Ahead> ahead_;  // by block
  std::unordered_set<uint64_t> sparse_;        // of them, since open()
  std::vector<ChunkPlan> plans_;               // of what is under way
  std::vector<BlockContent> contents_;
  std::vector<HostArena::Span> rooms_;  // for copy_rest(), brought up before
  std::unique_ptr<HostTier> host_;      // null: nothing was copied
  std::vector<SavedChunk> copied_;
  std::vector<SavedChunk> records_;
  std::optional<orders::Save::Reply> written_;
  std::optional<Error> failed_;
  std::atomic<bool> stop_ = false;
  Background background_;  // last: it uses all above
};

}  // namespace torpor
