// SPDX-License-Identifier: Apache-2.0
// TagContents: what is known of the content of each tag of a rank: how often it was written, whether it came back from
// a sleep without any, and its digest where it was read, or a load has proved it. The tag of the KV cache is not among
// them.
//
// Writes are told by who makes them. On the device without a GPU most others are noticed: a sample of the tag's bytes
// is compared. Owner: ContentIndex.
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
  TagContents(const DeviceMemory& device, const SleepAllocator& allocator)  // both outlive it
      : device_(device), allocator_(allocator) {}

  void note_write(std::string_view tag);
  // Whether the tag, which is attached, was written without a word since it was looked at last: unless every place that
  // is looked at was left as it was. True again until note_write().
  bool was_written(const std::string& tag);
  void look_anew(const std::string& tag);  // later writes are noticed against what the tag is now
  void came_back_empty(const std::string& tag);
  bool missing(std::string_view tag) const;  // it came back empty, and was not written since
  // The content was filled with bytes of this digest, until note_write() or forget_proof().
  void prove(const std::string& tag, std::string digest);
  // The same of content that was read, and is as it was when the tag was looked at last.
  void know(const std::string& tag, std::string digest);
  void forget_proof(std::string_view tag) noexcept;
  std::optional<std::string> proven(std::string_view tag) const;
  void describe(orders::Describe::Reply& reply) const;

 private:
  struct Content {
    uint64_t writes = 0;           // how often it was seen to be another
    std::optional<Digest> sample;  // of its bytes, when they were looked at last; none: never
    bool missing = false;
    std::optional<std::string> proven;  // its digest
  };
  std::optional<Digest> sample(const std::string& tag) const;

  const DeviceMemory& device_;
  const SleepAllocator& allocator_;
  std::map<std::string, Content, std::less<>> contents_;
};

}  // namespace torpor
