// SPDX-License-Identifier: Apache-2.0
// The memory of a rank in pages, for a swap: which pages still have bytes to copy before they are released, and which
// must be acquired before bytes are copied into them.
//
// Owner: one order to a rank. Threads: one.
#pragma once

#include <algorithm>
#include <vector>

#include "allocator/sleep_allocator.h"
#include "base/swap_channel.h"
#include "engine/release_gate.h"
#include "engine/restore_gate.h"
#include "offload/chunk.h"

namespace torpor {

class SwapPages {
 public:
  SwapPages(const SleepAllocator& allocator, std::span<const std::string> tags) {
    if (!tags.empty()) pages_ = allocator.pages_of(tags);  // with no tag named the allocator would take all
    std::sort(pages_.begin(), pages_.end(),
              [](const DevicePage& a, const DevicePage& b) { return a.address() < b.address(); });
  }
  size_t size() const { return pages_.size(); }
  const DevicePage& operator[](size_t page) const { return pages_[page]; }
  uint64_t most_bytes() const {  // of the largest page
    uint64_t most = 1;
    for (const DevicePage& page : pages_) most = std::max(most, page.size_bytes);
    return most;
  }
  // Call `use` with the number of each page in which a piece of `plan` lies, once for each piece.
  template <class Use>
  void each_of(const ChunkPlan& plan, const Use& use) const {
    for (const DevicePiece& piece : plan.pieces) {
      auto page = std::upper_bound(pages_.begin(), pages_.end(), piece.address,
                                   [](uint64_t at, const DevicePage& each) { return at < each.address(); });
      if (page != pages_.begin()) --page;
      for (; page != pages_.end() && page->address() < piece.address + piece.bytes; ++page)
        use(static_cast<size_t>(page - pages_.begin()));
    }
  }

 private:
  std::vector<DevicePage> pages_;
};

// Releases each page of tags that are being saved when all chunks in it are copied.
class PageReleaser final : public ReleaseGate {
 public:
  // All outlive this object. Name all chunks to be copied by expect(), before begin().
  PageReleaser(SleepAllocator& allocator, std::span<const std::string> tags, SwapChannel& channel, size_t rank);
  void expect(std::span<const ChunkPlan> chunks);
  Status begin();                                               // releases the pages from which nothing is copied
  Status on_saved(std::span<const ChunkPlan> chunks) override;  // each chunk was expected once
  uint64_t job_bytes() const override { return pages_.most_bytes(); }
  bool has_released() const { return has_released_; }  // a page was released, or may have been

 private:
  Status release(size_t page);

  SleepAllocator& allocator_;
  SwapChannel& channel_;
  const size_t rank_;
  const SwapPages pages_;
  std::vector<uint64_t> missing_;  // of each page: number of pieces that are not copied yet
  bool has_released_ = false;
};

// Acquires each page of attaching tags when a chunk needs it and the other engine has released enough bytes.
class PageAcquirer final : public RestoreGate {
 public:
  // All but `tags` outlive this object.
  PageAcquirer(SleepAllocator& allocator, const std::vector<std::string>& tags, SwapChannel& channel, size_t rank);
  Status begin();  // publishes how many bytes it needs
  Status wait_for(const ChunkPlan& chunk) override;
  Status wait_for_all() override;
  bool all_there() const override { return false; }
  uint64_t job_bytes() const override { return pages_.most_bytes(); }
  bool by_address() const override { return true; }

 private:
  Status acquire(size_t page);

  SleepAllocator& allocator_;
  SwapChannel& channel_;
  const size_t rank_;
  const std::vector<std::string> tags_;
  const SwapPages pages_;
  std::vector<bool> there_;
};

}  // namespace torpor
