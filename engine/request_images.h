// SPDX-License-Identifier: Apache-2.0
// RequestImages: requests that left a live engine between two steps, as values, and where their KV lies on the ranks.
//
// An image has one request or more. It is made whole or not at all, and the engine forgets its requests only after
// that. Later its requests are admitted to the engine again, one by one, as it finds blocks for them. When the last one
// has its KV, or has ended, the host memory of the image is free.
//
//   extract() ── hibernated ── verify(), begin() ── resuming ── admit_order() … release() of each request ── gone
//                    └──────────────── release() of each: they were aborted ──────────────────────────────────┘
//
// Blocks that several requests of an image share are in it once.
// Owner: the engine core, beside its scheduler. Threads: the engine core's. Failure: an error changes nothing.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine_hooks.h"
#include "engine/rank_group.h"
#include "scheduler_state/request_state.h"

namespace torpor {

class RequestImages {
 public:
  struct Request {
    RequestState state;
    std::vector<int32_t> chunks{};  // of the image: its blocks, in token order
    int32_t position = 0;           // on disk: among the requests that were saved
  };
  struct Image {
    std::vector<Request> requests{};  // that have not been released
    uint64_t bytes = 0;               // on all ranks
    bool resuming = false;
    bool in_memory = true;  // its KV: in that of the ranks, else on disk alone (engine/stored_images.h)
    int32_t block_tokens = 0;
    int32_t count = 0;  // of its chunks
  };
  struct StoredBlocks {  // of a committed checkpoint
    std::string directory;
    uint64_t generation = 0;
    SealId id{};
  };
  using Images = std::map<std::string, Image, std::less<>>;  // by id

  explicit RequestImages(EngineHooks& hooks) : ranks_(hooks) {}  // `hooks` outlives it

  // Copy the KV of requests into a new image on every rank, and verify it. The engine stands still. `tables`: of each
  // request, its blocks that have KV; `block_tokens`: of one block. kFailedPrecondition: there is such an image, or
  // one of a request. kInvalidArgument, kCorruption: values that contradict each other. Errors of the ranks: see
  // RankImages.
  Result<const Image*> extract(const std::string& id, std::vector<RequestState> requests,
                               const std::vector<std::vector<int32_t>>& tables, int32_t block_tokens);
  // The same from a committed checkpoint: `tables` are its block tables, perhaps with blocks for tokens without KV.
  Result<const Image*> read(const std::string& id, std::vector<RequestState> requests,
                            std::vector<std::vector<int32_t>> tables, int32_t block_tokens, const StoredBlocks& stored);
  // Have every rank compare its chunks with their digests. Return the image. kNotFound, kCorruption.
  Result<const Image*> verify(const std::string& id);
  // The requests of the image are on their way into the engine. kNotFound; kFailedPrecondition if they are already.
  Status begin(const std::string& id);
  // Return the order to all ranks that brings the KV of a request of an image that is resuming. `blocks`: those of the
  // request, in token order. kNotFound, kInvalidArgument.
  Result<Bytes> admit_order(const std::string& request, const std::vector<int32_t>& blocks) const;
  // A request has its KV, or has ended. Return the order to all ranks that frees the image if it was the last one.
  std::optional<Bytes> release(const std::string& request);

  // kNotFound.
  Result<const Image*> get(const std::string& id) const;
  // The state of an engine that has the requests of the image, their blocks by the number of their chunk, and nothing
  // else. `ranks`: that it has. kNotFound.
  Result<SchedulerCheckpoint> state_of(const std::string& id, size_t ranks) const;
  // The image is on disk, and its host memory goes. A rank that cannot free it does so at return_to_memory().
  // kNotFound. `saved`: with the state_of() of now.
  enum class Saved : uint8_t { kNow, kBefore };
  Status leave_memory(const std::string& id, Saved saved);
  // Bring all chunks of an image that has left memory from a checkpoint that it was saved in, verified. kNotFound,
  // errors of RankImages::read(): then it is as it was.
  Result<const Image*> return_to_memory(const std::string& id, const StoredBlocks& stored);

  const Images& images() const { return images_; }
  // Null: no image has it.
  const Request* find(const std::string& request) const;

 private:
  Result<Image*> image_of(const std::string& id);
  // `order`: Extract or ReadImage, with all but its blocks.
  template <class Order>
  Result<const Image*> make(Order order, std::vector<RequestState> requests,
                            const std::vector<std::vector<int32_t>>& tables, int32_t block_tokens);

  RankGroup ranks_;
  Images images_;
  std::map<std::string, std::string, std::less<>> image_of_;  // of each request: its image
};

}  // namespace torpor
