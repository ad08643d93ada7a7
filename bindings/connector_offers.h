// SPDX-License-Identifier: Apache-2.0
// ConnectorOffers: which of vLLM's blocks are offered to the tiers, and when. Eager: what a step fills, and what a
// request has filled at its end. Lazy: what lies at the head of vLLM's free queue, which it evicts next.
//
// Threads: those that hold the interpreter's lock, one at a time.
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
  // How far a request is.
  struct Progress {
    size_t offered = 0;   // blocks of its tables
    int64_t to_fill = 0;  // no other block is full before it was given so many tokens
    bool stale = false;   // what it computes stands on blocks from before a reset
  };
  struct Request {
    PyObject* object = nullptr;  // vLLM's
    PyObject* id = nullptr;
    int32_t priority = 0;
  };

  // All but `pool` outlive it.
  ConnectorOffers(const pybind11::object& pool, const ConnectorOptions& options, const GroupTables& groups,
                  EngineBlocks& blocks, OffloadScheduler& scheduler);

  // Requests of this priority come: lazily, blocks are looked at when they are filled only if some have one.
  void expect(int32_t priority) { any_priority_ = any_priority_ || priority != 0; }
  // Whether computes() has anything to do.
  bool looks_at_requests() const { return !options_.lazy || any_stale_ || any_priority_; }
  // It computes `tokens` in this step.
  void computes(Progress& progress, const Request& request, int64_t tokens, uint64_t step) {
    progress.to_fill -= tokens;
    if (progress.to_fill <= 0 && looks_at(progress)) offer(progress, request, tokens, step);
  }
  // After computes() of all: `scheduled` has how many tokens each request computes.
  void end_step(const pybind11::dict& scheduled);
  // It has other blocks than before; some may be of the engine's prefix cache.
  void allocated(Progress& progress, PyObject* id);
  // Loads took so many from the free queue.
  void took(size_t blocks) { taken_ += options_.lazy ? static_cast<int64_t>(blocks) : 0; }
  // With steps in flight it may have filled some blocks since the last one, `step`.
  void finished(Progress& progress, const Request& request, uint64_t step);
  // What the engine's blocks have now is not for the new namespace, nor is what a request computes on top of it.
  void reset();

 private:
  void offer(Progress& progress, const Request& request, int64_t tokens, uint64_t step);
  size_t offer_run(const Request& request, const GroupTables::Table& table, size_t first, size_t end, uint64_t step);
  size_t mark_stale(const GroupTables::Table& table, size_t i);
  size_t mark_priority(const GroupTables::Table& table, size_t i, int32_t priority);
  bool looks_at(const Progress& progress) const { return !options_.lazy || progress.stale || any_priority_; }
  bool is_stale(int32_t number, ContentVersion version) const {
    return version != ContentVersion::kNone && stale_[static_cast<size_t>(number)] == version;
  }
  int64_t most_taken(const pybind11::dict& scheduled) const;
  void offer_next_to_go();

  const ConnectorOptions& options_;
  const int64_t block_tokens_;
  const pybind11::object queue_;
  const GroupTables& groups_;
  EngineBlocks& blocks_;
  OffloadScheduler& scheduler_;
  std::vector<ContentVersion> offered_;  // lazy: by block, what was offered last
  std::vector<ContentVersion> stale_;    // by block: content that is not for this namespace
  struct Marked {
    ContentVersion version = ContentVersion::kNone;
    int32_t priority = 0;
  };
  std::vector<Marked> marked_;  // lazy: by block, the highest priority of those that have computed with it
  bool any_stale_ = false;
  bool any_priority_ = false;
  int64_t taken_ = std::numeric_limits<int32_t>::max();  // lazy: blocks, at most, since they were looked at
  // Of one call; they keep their memory.
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
