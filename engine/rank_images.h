// SPDX-License-Identifier: Apache-2.0
// RankImages: KV blocks of requests that left their engine, on one rank, until they are admitted to an engine again.
//
// An image is a list of chunks in the host arena, one KV block each, with its digest. An image is made whole or not at
// all. It takes room of the arena's budget, and stays over sleeps. What the blocks mean is known where the scheduler is
// (engine/request_images.h).
//
// Owner: RankMemory; its lock is held at every call. Failure: errors are values, and leave all images as they were.
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
  explicit RankImages(const RankParts& parts) : parts_(parts) {}  // outlives it

  // Nothing writes into these blocks meanwhile. kFailedPrecondition: there is an image of this id. kInvalidArgument: no
  // such block. kResourceExhausted: the arena has no room. kCorruption: a block was written while it was copied.
  Result<orders::Extract::Reply> extract(const orders::Extract& order, const KvLayout& layout);
  // The same from a committed checkpoint, which need not stay. kNotFound: it does not have a block. kIncompatible: its
  // blocks have another size, or it is not the one that the order names. kCorruption names what is damaged.
  Result<orders::ReadImage::Reply> read(const orders::ReadImage& order, const KvLayout& layout);
  // Write an image into a checkpoint under construction. kNotFound, kCorruption, errors of files. The image stays.
  Result<orders::SaveImage::Reply> save(const orders::SaveImage& order) const;
  // kNotFound, kCorruption.
  Result<orders::VerifyImage::Reply> verify(const orders::VerifyImage& order) const;
  // Waits for what the device was given before. kNotFound, kInvalidArgument, kCorruption.
  Result<orders::Admit::Reply> admit(const orders::Admit& order, const KvLayout& layout);
  orders::DropImage::Reply drop(const orders::DropImage& order) noexcept;
  void abandon() noexcept;  // copies may still run: the memory of all images is kept until the process ends

 private:
  struct Image {
    std::unique_ptr<HostTier> host;
    std::vector<SavedChunk> chunks;
    uint64_t bytes() const;
  };
  Result<const Image*> find(const std::string& id) const;
  Status is_new(const std::string& id) const;

  const RankParts& parts_;
  std::map<std::string, Image, std::less<>> images_;  // by id
};

}  // namespace torpor
