// ChunkMover: the chunks of one sleep or wake through an OffloadPipeline: the same stages, outcomes and counters as the
// blocks that move while the engine serves. All or nothing: after the first failure what is not committed is cancelled.
//
// Threads: one operation at a time; it transfers with as many threads as the executor has workers.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "base/event_sink.h"
#include "base/status.h"
#include "offload/offload_pipeline.h"
#include "offload/transfer_executor.h"

namespace torpor {

class ChunkMover {
 public:
  explicit ChunkMover(TransferExecutor& executor, EventSink* sink = nullptr)
      : executor_(executor), sink_(sink) {}  // both outlive it

  // Copies every chunk into `target` and finishes it. After an error the tier's content is void.
  Result<std::vector<SavedChunk>> save(std::span<const ChunkPlan> plans, Tier& target);
  // Copies every chunk of `saved` (same keys, same order as `plans`) up. kCorruption names the first chunk whose digest
  // is wrong; the device's bytes are void then.
  Status restore(std::span<const SavedChunk> saved, std::span<const ChunkPlan> plans, Tier& source);
  // Digests of what is in device memory now.
  Result<std::vector<Digest>> digests(std::span<const ChunkPlan> plans);

  const OutcomeCounts& counts() const { return counts_; }  // of all chunks of all operations

 private:
  using Work = std::function<void(std::span<ChunkTransfer>)>;
  Status run(std::string_view route, std::vector<ChunkTransfer>& transfers, uint64_t batch_bytes, const Work& work);
  TransferExecutor& executor_;
  EventSink* const sink_;
  OutcomeCounts counts_{};
};

}  // namespace torpor
