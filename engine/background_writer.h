// SPDX-License-Identifier: Apache-2.0
// BackgroundWriter: writes one rank's part of a checkpoint while the engine serves. It works in small pieces, so that
// more urgent transfers wait for one piece at most.
//
//   open()        make the files, and take the digest of the weights if it is not known
//   precopy()     copy blocks that have a version from device memory into the file. The engine may write them
//                 meanwhile: a copy counts only if the block has the same version when the engine is stopped.
//                 Then take host memory for what copy_rest() will copy, so that the stop does not wait for it
//   copy_rest()   while the engine is stopped: copy all other chunks to host memory
//   write()       write those into the file, sync it, and write the refs
//
// Owner: CheckpointSaver. Threads: the caller holds RankMemory's lock. A thread of its own writes in the background and
// takes no lock. Failure: if background work fails, the next wait_idle() returns its error, and so do all later calls.
// The rank's memory and the checkpoint before stay as they were.
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
#include "offload/blocking_transfers.h"
#include "offload/host_tier.h"

namespace torpor {

class BackgroundWriter {
 public:
  // `transfers` and `arena` outlive this object. `progress`: the caller's ProgressFile, which counts the bytes written
  // and may cancel; or null.
  BackgroundWriter(BlockingTransfers& transfers, HostArena& arena, const RankWriting& writing,
                   std::shared_ptr<ProgressFile> progress)
      : transfers_(transfers),
        arena_(arena),
        writing_(writing),
        progress_(std::move(progress)),
        background_(transfers.engine().own_threads()) {}
  ~BackgroundWriter();  // stops the background work after its current piece, and waits for it

  // Make the files of this rank in `directory`. `weights`, `named_weights`: the pieces to take the digests of.
  Status open(FileSystem& file_system, std::string directory, int32_t rank, std::shared_ptr<const Key> key,
              std::vector<ChunkPlan> weights, std::vector<ChunkPlan> named_weights);
  bool ended() { return background_.ended(); }
  Status wait_idle();  // waits for the background work, and returns its error

  // Call all functions below only after wait_idle() returned no error.
  const RankWriting& writing() const { return writing_; }
  RankWriter& writer() { return *writer_; }
  std::optional<std::string> take_digest() { return std::exchange(digest_, std::nullopt); }  // of `weights`
  std::optional<std::string> take_named_digest() { return std::exchange(named_digest_, std::nullopt); }

  // Copy these blocks into the file in the background. Then take host memory for `rooms` chunks of `room_bytes` each:
  // an estimate of what copy_rest() will copy.
  Status precopy(std::vector<ChunkPlan> plans, std::vector<BlockContent> contents, size_t rooms, uint64_t room_bytes);
  void forget_ahead() noexcept { ahead_.clear(); }  // blocks were written beside the engine
  // Return the record of a block that precopy() wrote with this content; null if it wrote none.
  const SavedChunk* ahead(const ChunkKey& block, const BlockContent& content) const;
  // Mark a block that the checkpoint before has in a file that this checkpoint should not link (RankWriter::sparse()).
  void note_sparse(uint64_t block) { sparse_.insert(block); }
  bool is_sparse(uint64_t block) const { return sparse_.contains(block); }
  // Copy these chunks to host memory, and return when they are copied. Precondition: the engine is stopped. Errors:
  // those of the arena and of copies.
  Status copy_rest(std::vector<ChunkPlan> plans);
  // Write the chunks of copy_rest(), sync, and write the refs, in the background. `records`: all records of the rank.
  // `places`: the positions in `records` of the chunks of copy_rest(), in their order.
  Status write(std::vector<SavedChunk> records, std::vector<size_t> places, orders::Save::Reply reply);
  const std::optional<orders::Save::Reply>& written() const { return written_; }

 private:
  struct Ahead {
    BlockContent content;
    SavedChunk record;
  };
  Result<std::optional<std::string>> digest_of(std::span<const ChunkPlan> weights) const;
  using Piece = std::function<Status(std::span<const ChunkPlan> plans, size_t first)>;
  Status go_on() const;
  Status in_pieces(std::span<const ChunkPlan> plans, const Piece& piece) const;
  void make_room(size_t rooms, uint64_t room_bytes) noexcept;
  // Announce the bytes of plans_ to the ProgressFile.
  void expect() const noexcept;
  void written(std::span<const ChunkPlan> plans) const noexcept;

  BlockingTransfers& transfers_;
  HostArena& arena_;
  const RankWriting writing_;
  const std::shared_ptr<ProgressFile> progress_;
  std::unique_ptr<RankWriter> writer_;
  std::optional<std::string> digest_, named_digest_;
  std::unordered_map<uint64_t, Ahead> ahead_;  // by block number
  std::unordered_set<uint64_t> sparse_;        // blocks marked since open()
  std::vector<ChunkPlan> plans_;               // of the background work
  std::vector<BlockContent> contents_;
  std::vector<HostArena::Span> rooms_;  // host memory for copy_rest(), prefaulted
  std::unique_ptr<HostTier> host_;      // null: copy_rest() has copied nothing
  std::vector<SavedChunk> copied_;
  std::vector<SavedChunk> records_;
  std::optional<orders::Save::Reply> written_;
  std::optional<Error> failed_;
  std::atomic<bool> stop_ = false;
  Background background_;  // last member: its work uses all above
};

}  // namespace torpor
