// SPDX-License-Identifier: Apache-2.0
// Writes a whole checkpoint: the example state, and a chunk for each of its blocks.
#pragma once

#include "checkpoint/checkpoint_manager.h"
#include "tests/support/example_state.h"

namespace torpor::test {

inline std::vector<std::byte> example_block(uint64_t block) {
  return std::vector<std::byte>(1000, static_cast<std::byte>(block));
}

// `changed`: the block that has other bytes than its number says.
inline Status write_rank(PendingCheckpoint& pending, const KvSnapshot& kv, int32_t rank, uint64_t changed = 0) {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<RankWriter> writer, pending.create_rank(rank));
  std::vector<SavedChunk> chunks;
  TORPOR_RETURN_IF_ERROR(writer->prepare(1'000 * kv.blocks.size(), kv.blocks.size()));
  for (const KvBlock& block : kv.blocks) {
    const auto number = static_cast<uint64_t>(block.id);
    std::vector<std::byte> bytes = example_block(number == changed ? number + 100 : number);
    SavedChunk chunk{.key = {.kind = ChunkKind::kKvBlock, .tag = "kv_cache", .index = static_cast<uint64_t>(block.id)},
                     .bytes = bytes.size(),
                     .digest = digest_of(bytes)};
    RecordPart part{&chunk, bytes, ok()};
    writer->put({&part, 1});
    TORPOR_RETURN_IF_ERROR(part.status);
    chunks.push_back(chunk);
  }
  TORPOR_ASSIGN_OR_RETURN(RankSummary summary, writer->write_refs(chunks));
  pending.add_rank(std::move(summary));
  return ok();
}

inline Result<std::string> write_checkpoint(CheckpointManager& manager,
                                            const EngineCheckpoint& state = example_checkpoint(), int ranks = 1,
                                            uint64_t changed = 0, const std::optional<Digest>& owner = {}) {
  TORPOR_ASSIGN_OR_RETURN(PendingCheckpoint pending, manager.begin(100'000));
  if (owner) pending.set_owner(*owner);
  TORPOR_RETURN_IF_ERROR(pending.write_state(state));
  for (int32_t rank = 0; rank < ranks; ++rank)
    TORPOR_RETURN_IF_ERROR(write_rank(pending, state.state.kv, rank, changed));
  TORPOR_ASSIGN_OR_RETURN(std::string path, pending.commit());
  pending.retire_older();
  return path;
}

}  // namespace torpor::test
