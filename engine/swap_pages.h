// SPDX-License-Identifier: Apache-2.0
// The memory of a rank page by page, while an engine gives it to another one: which pages have bytes that are still to
// be copied, and which have to be there before bytes are.
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
  SwapPages(const SleepAllocator& allocator, std::span<const std::string> tags) : pages_(allocator.pages_of(tags)) {
    std::sort(pages_.begin(), pages_.end(),
              [](const DevicePage& a, const DevicePage& b) { return a.address() < b.address(); });
  }
  size_t size() const { return pages_.size(); }
  const DevicePage& operator[](size_t page) const { return pages_[page]; }
  uint64_t most_bytes() const {  // of one
    uint64_t most = 1;
    for (const DevicePage& page : pages_) most = std::max(most, page.size_bytes);
    return most;
  }
  // Calls `use` with the number of each page in which a piece of `plan` lies, once for each piece.
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

// The pages of tags that are being saved, each given when all is copied that lies in it.
class PageGiver final : public ReleaseGate {
 public:
  // All outlive it. The chunks to be copied are told by expect(), before begin().
  PageGiver(SleepAllocator& allocator, std::span<const std::string> tags, SwapChannel& channel, size_t rank);
  void expect(std::span<const ChunkPlan> chunks);
  Status begin();                                               // gives the pages of which nothing is to be copied
  Status on_saved(std::span<const ChunkPlan> chunks) override;  // each of them was expected once
  uint64_t job_bytes() const override { return pages_.most_bytes(); }
  bool has_given() const { return has_given_; }  // a page, or may have

 private:
  Status give(size_t page);

  SleepAllocator& allocator_;
  SwapChannel& channel_;
  const size_t rank_;
  const SwapPages pages_;
  std::vector<uint64_t> missing_;  // of each page: pieces that are not copied
  bool has_given_ = false;
};

// The pages of tags that are attaching, each taken when somebody wants it and the other engine has given as much.
class PageTaker final : public RestoreGate {
 public:
  // All but the tags outlive it.
  PageTaker(SleepAllocator& allocator, const std::vector<std::string>& tags, SwapChannel& channel, size_t rank);
  Status begin();  // says how much it needs
  Status wait_for(const ChunkPlan& chunk) override;
  Status wait_for_all() override;
  bool all_there() const override { return false; }
  uint64_t job_bytes() const override { return pages_.most_bytes(); }
  bool by_address() const override { return true; }

 private:
  Status take(size_t page);

  SleepAllocator& allocator_;
  SwapChannel& channel_;
  const size_t rank_;
  const std::vector<std::string> tags_;
  const SwapPages pages_;
  std::vector<bool> there_;
};

}  // namespace torpor
