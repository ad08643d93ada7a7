// SPDX-License-Identifier: Apache-2.0
// RequestImages: requests that left a running engine between two steps, as values, and where the ranks have their KV.
//
// An image has one request or more. It is made whole or not at all, and the engine forgets the requests only
// afterwards. Later the engine admits the requests again, one by one, as it finds blocks for them. When the last
// request has its KV, or has ended, the host memory of the image is freed.
//
//   extract() ── hibernated ── verify(), begin() ── resuming ── admit_order() … release() of each request ── gone
//                    └──────────────── release() of each: they were aborted ──────────────────────────────────┘
//
// An image has a block once, even if several of its requests share it.
//
// Owner: the engine core, beside its scheduler. Threads: the engine core's. Failure: after an error nothing has
// changed.
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
    std::vector<int32_t> chunks{};  // positions in the image of the request's blocks, in token order
    int32_t position = 0;           // on disk: its position among the requests that were saved
  };
  struct Image {
    std::vector<Request> requests{};  // not released yet
    uint64_t bytes = 0;               // on all ranks
    bool resuming = false;
    bool in_memory = true;     // false: on disk alone (engine/stored_images.h)
    int32_t block_tokens = 0;  // tokens of one block
    int32_t count = 0;         // number of chunks
  };
  struct StoredBlocks {  // where a committed checkpoint is
    std::string directory;
    uint64_t generation = 0;
    SealId id{};
  };
  using Images = std::map<std::string, Image, std::less<>>;  // by id

  explicit RequestImages(EngineHooks& hooks) : ranks_(hooks) {}  // `hooks` outlives this object

  // Copy the KV of requests into a new image on every rank, with a digest of each block, and compare each block with
  // the device once more. Precondition: the engine is stopped. `tables`: for each request its blocks that have KV.
  // `block_tokens`: tokens of one block. kFailedPrecondition: the image exists, or another image has one of the
  // requests. kInvalidArgument, kCorruption: values contradict each other. Errors of the ranks: see RankImages.
  Result<const Image*> extract(const std::string& id, std::vector<RequestState> requests,
                               const std::vector<std::vector<int32_t>>& tables, int32_t block_tokens);
  // The same from a committed checkpoint. `tables` are its block tables; they may have blocks for tokens without KV.
  Result<const Image*> read(const std::string& id, std::vector<RequestState> requests,
                            std::vector<std::vector<int32_t>> tables, int32_t block_tokens, const StoredBlocks& stored);
  // Have every rank compare its chunks with their digests, and return the image. kNotFound: there is no such image.
  // kCorruption: a chunk is damaged.
  Result<const Image*> verify(const std::string& id);
  // Mark the image as resuming: its requests are on their way into the engine. kNotFound: there is no such image.
  // kFailedPrecondition: it is resuming already.
  Status begin(const std::string& id);
  // Return the order to all ranks that copies the KV of a request of a resuming image into `blocks`, in token order.
  // kNotFound: no image has the request. kInvalidArgument: the number of blocks is wrong.
  Result<Bytes> admit_order(const std::string& request, const std::vector<int32_t>& blocks) const;
  // Release a request that has its KV, or has ended. If it was the last of its image, return the order to all ranks
  // that frees the image.
  std::optional<Bytes> release(const std::string& request);

  // kNotFound: there is no such image.
  Result<const Image*> get(const std::string& id) const;
  // Return the state of an engine that has exactly the requests of the image, with chunk positions as block numbers.
  // `ranks`: the number of ranks that the state has. kNotFound: there is no such image.
  Result<CapturedState> state_of(const std::string& id, size_t ranks) const;
  // Free the host memory of an image that is on disk. A rank that fails to free it does so at return_to_memory().
  // kNotFound: there is no such image. `saved`: whether it was saved with the present state_of(), or earlier.
  enum class Saved : uint8_t { kNow, kBefore };
  Status leave_memory(const std::string& id, Saved saved);
  // Bring all chunks of an image that left memory back from a checkpoint that has it, verified. kNotFound: there is no
  // such image. Other errors: those of RankImages::read(). After an error the image is as it was.
  Result<const Image*> return_to_memory(const std::string& id, const StoredBlocks& stored);

  const Images& images() const { return images_; }
  // Return the request; null: no image has it.
  const Request* find(const std::string& request) const;

 private:
  Result<Image*> image_of(const std::string& id);
  // `order`: Extract or ReadImage, complete but for its blocks.
  template <class Order>
  Result<const Image*> make(Order order, std::vector<RequestState> requests,
                            const std::vector<std::vector<int32_t>>& tables, int32_t block_tokens);

  RankGroup ranks_;
  Images images_;
  std::map<std::string, std::string, std::less<>> image_of_;  // request id -> image id
};

}  // namespace torpor
