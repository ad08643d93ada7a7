// SPDX-License-Identifier: Apache-2.0
// RankImages: on one rank, KV blocks of requests that left their engine, until the requests are admitted to an engine
// again.
//
// An image is a list of chunks in the host arena, each one KV block with its digest. It is made whole or not at all. It
// counts against the arena's budget and stays over sleeps. Only the scheduler's side knows what the blocks mean
// (engine/request_images.h).
//
// Owner: RankMemory. Threads: the caller holds RankMemory's lock. Failure: an error is a value and leaves all images as
// they were.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/rank_orders.h"
#include "engine/rank_parts.h"
#include "kvcache/kv_layout.h"
#include "offload/host_tier.h"

namespace torpor {

class RankImages {
 public:
  explicit RankImages(const RankParts& parts) : parts_(parts) {}  // `parts` outlives this object

  // Copy KV blocks of the device into a new image, with a digest of each. Precondition: nothing writes into these
  // blocks meanwhile. kFailedPrecondition: an image of this id exists. kInvalidArgument: a block does not exist.
  // kResourceExhausted: the arena is full. kCorruption: a block was written while it was copied.
  Result<orders::Extract::Reply> extract(const orders::Extract& order, const KvLayout& layout);
  // Copy blocks of a committed checkpoint into a new image. The checkpoint need not stay. kNotFound: it does not have a
  // block. kIncompatible: its blocks have another size, or it is not the checkpoint that the order names. kCorruption
  // names what is damaged.
  Result<orders::ReadImage::Reply> read(const orders::ReadImage& order, const KvLayout& layout);
  // Write an image into a checkpoint under construction. The image stays. kNotFound: there is no such image.
  // kCorruption: a chunk is damaged. Other errors: those of files.
  Result<orders::SaveImage::Reply> save(const orders::SaveImage& order) const;
  // Compare each chunk of an image with its digest. kNotFound: there is no such image. kCorruption: a chunk is damaged.
  Result<orders::VerifyImage::Reply> verify(const orders::VerifyImage& order) const;
  // Copy chunks of an image, verified, into KV blocks, after all work that the device was given before. kNotFound:
  // there is no such image. kInvalidArgument: a chunk or a block does not exist. kCorruption: a chunk is damaged.
  Result<orders::Admit::Reply> admit(const orders::Admit& order, const KvLayout& layout);
  // Free an image. It does nothing if there is none.
  orders::DropImage::Reply drop(const orders::DropImage& order) noexcept;
  // Host memory for the largest image that was extracted since the engine last slept, with staging memory. As much
  // stays held for the next one: the engine stops for it, and the first use of new memory takes longer than the copy.
  uint64_t room_for_next() const { return room_for_next_; }
  void on_detached() noexcept { room_for_next_ = 0; }
  void abandon() noexcept;  // copies may still run: keeps the memory of all images until the process ends

 private:
  struct Image {
    std::unique_ptr<HostTier> host;
    std::vector<SavedChunk> chunks;
    uint64_t bytes() const;
  };
  uint64_t room_of(const std::vector<SavedChunk>& chunks) const;
  Result<const Image*> find(const std::string& id) const;
  Status is_new(const std::string& id) const;

  const RankParts& parts_;
  std::map<std::string, Image, std::less<>> images_;  // by id
  uint64_t room_for_next_ = 0;
};

}  // namespace torpor
