// SPDX-License-Identifier: Apache-2.0
// TagContents: what is known of the content of each tag of a rank, except the tag of the KV cache: how often it was
// written, whether it came back from a sleep without content, and its digest if it was read or a load has verified it.
//
// The code that writes a tag calls note_write(). On the device without a GPU most other writes are detected, by
// comparing a sample of the tag's bytes. Owner: ContentIndex. Threads: the caller holds RankMemory's lock.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "allocator/device_memory.h"
#include "allocator/sleep_allocator.h"
#include "base/digest.h"
#include "engine/rank_orders.h"

namespace torpor {

class TagContents {
 public:
  TagContents(const DeviceMemory& device, const SleepAllocator& allocator)  // both outlive this object
      : device_(device), allocator_(allocator) {}

  // Note that the tag was written: its sample and its digest are forgotten.
  void note_write(std::string_view tag);
  // Return whether the bytes of the sample of this attached tag have changed since the sample was taken. It stays true
  // until note_write().
  bool was_written(const std::string& tag);
  void look_anew(const std::string& tag);  // takes the sample anew
  // Note that the tag came back from a sleep without content.
  void came_back_empty(const std::string& tag);
  bool missing(std::string_view tag) const;  // it came back without content, and was not written since
  // Note the digest of the content with which the tag was just filled, until note_write() or forget_proof().
  void prove(const std::string& tag, std::string digest);
  // Note the digest of content that was read; it is as it was when the sample was taken.
  void know(const std::string& tag, std::string digest);
  void forget_proof(std::string_view tag) noexcept;
  std::optional<std::string> proven(std::string_view tag) const;
  // Fill the reply's `writes`, `without_content` and `proven`.
  void describe(orders::Describe::Reply& reply) const;

 private:
  struct Content {
    uint64_t writes = 0;           // number of writes that were seen
    std::optional<Digest> sample;  // digest of the sample; none: never taken
    bool missing = false;
    std::optional<std::string> proven;  // digest of the content
  };
  std::optional<Digest> sample(const std::string& tag) const;

  const DeviceMemory& device_;
  const SleepAllocator& allocator_;
  std::map<std::string, Content, std::less<>> contents_;
};

}  // namespace torpor
