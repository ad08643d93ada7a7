// SPDX-License-Identifier: Apache-2.0
// ConnectorOffers: which of vLLM's blocks are offered to the tiers, and when. Eager: blocks that a step fills, and at
// the end of a request those that it has filled. Lazy: blocks at the head of vLLM's free queue, which are evicted next.
//
// Owner: the scheduler's side of the connector. Threads: those that hold the interpreter's lock, one at a time.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include <pybind11/pybind11.h>

#include "bindings/connector_hits.h"
#include "bindings/connector_values.h"
#include "bindings/engine_blocks.h"
#include "kvcache/offload_scheduler.h"

namespace torpor {

class ConnectorOffers {
 public:
  // The progress of a request.
  struct Progress {
    size_t offered = 0;   // units of its tables that were offered (ConnectorHits)
    int64_t to_fill = 0;  // tokens until the next stride can be full, or the prompt's last unit
    bool tail = false;    // the prompt's last block was offered, which is not full
    bool stale = false;   // it computes on top of blocks from before a reset
  };
  struct Request {
    PyObject* object = nullptr;  // vLLM's request
    PyObject* id = nullptr;
    int32_t priority = 0;
  };

  // All but `pool` outlive this object.
  ConnectorOffers(const pybind11::object& pool, const ConnectorOptions& options, const GroupTables& groups,
                  EngineBlocks& blocks, OffloadScheduler& scheduler);

  // A request of this priority exists. In lazy mode requests are looked at only if one has a priority other than 0.
  void expect(int32_t priority) { any_priority_ = any_priority_ || priority != 0; }
  // Return whether computes() has any work.
  bool looks_at_requests() const { return !options_.lazy || any_stale_ || any_priority_; }
  // Offer the blocks that the request fills by computing `tokens` in this step.
  void computes(Progress& progress, const Request& request, int64_t tokens, uint64_t step) {
    progress.to_fill -= tokens;
    if (progress.to_fill <= 0 && looks_at(progress)) offer(progress, request, tokens, step);
  }
  // Offer blocks that the engine hands over in this step, whose states the step writes. `blocks`: for each the group,
  // the block's number and its tokens. Full ones are offered by computes().
  void handed(const Progress& progress, const Request& request, const pybind11::list& blocks, uint64_t step);
  // Call it after computes() of all requests. `scheduled`: request id -> tokens that it computes.
  void end_step(const pybind11::dict& scheduled, uint64_t step);
  // Note that the request has got other blocks; some may be from the engine's prefix cache.
  void allocated(Progress& progress, PyObject* id);
  // Note that loads have taken this many blocks from the free queue.
  void took(size_t blocks) { taken_ += options_.lazy ? static_cast<int64_t>(blocks) : 0; }
  // Offer the blocks that a request which has ended fills in steps that are in flight. `step`: the last of these steps.
  void finished(Progress& progress, const Request& request, uint64_t step);
  // Begin a new namespace: the present content of the engine's blocks is not for it, nor is KV that a request computes
  // on top of it.
  void reset();

 private:
  void offer(Progress& progress, const Request& request, int64_t tokens, uint64_t step);
  size_t offer_run(const Request& request, const GroupTables::Table& table, size_t first, size_t end, uint64_t step);
  void offer_tail(Progress& progress, const Request& request, int64_t all, uint64_t step);
  void offer_keys(const Request& request, const BlockHash& parent, uint64_t step);
  void offer_one(const Request& request, PyObject* block, uint64_t step);
  size_t mark_stale(const GroupTables::Table& table, size_t i);
  size_t mark_priority(const GroupTables::Table& table, size_t i, int32_t priority);
  bool looks_at(const Progress& progress) const { return !options_.lazy || progress.stale || any_priority_; }
  bool is_stale(int32_t number, ContentVersion version) const {
    return version != ContentVersion::kNone && stale_[static_cast<size_t>(number)] == version;
  }
  int64_t most_taken(const pybind11::dict& scheduled) const;
  void offer_next_to_go(uint64_t step);

  const ConnectorOptions& options_;
  const int64_t stride_tokens_;
  const pybind11::object queue_;
  const GroupTables& groups_;
  EngineBlocks& blocks_;
  OffloadScheduler& scheduler_;
  std::vector<ContentVersion> offered_;  // lazy: by block, the content that was offered last
  std::vector<ContentVersion> stale_;    // by block: content that does not belong to this namespace
  struct Marked {
    ContentVersion version = ContentVersion::kNone;
    int32_t priority = 0;
  };
  std::vector<Marked> marked_;  // lazy: by block, the highest priority of the requests that computed with it
  bool any_stale_ = false;
  bool any_priority_ = false;
  int64_t taken_ = std::numeric_limits<int32_t>::max();  // lazy: the most blocks taken since the queue was looked at
  // Buffers of one call; they keep their memory.
  std::vector<BlockKey> keys_;
  std::vector<int32_t> few_;
  struct NextToGo {
    int32_t priority = 0;
    int32_t number = 0;
    BlockKey key;
  };
  std::vector<NextToGo> next_to_go_;
};

}  // namespace torpor
