// SPDX-License-Identifier: Apache-2.0
#include "engine/content_index.h"

#include <utility>

#include "engine/tags.h"

namespace torpor {

ContentIndex::ContentIndex(const DeviceMemory& device, const SleepAllocator& allocator, HostArena& arena)
    : tags_(device, allocator), arena_(arena) {
  arena_.set_reclaim([retained = retained_](uint64_t bytes) { return retained->evict(bytes); });
}

ContentIndex::~ContentIndex() {
  arena_.set_reclaim(nullptr);
  retained_->clear();
}

void ContentIndex::note_write(std::string_view tag) {
  if (tag == kWeightsTag) weights_unwritten_ = false;
  tags_.note_write(tag);
}

void ContentIndex::invalidate_digest(std::string_view tag) {
  if (tag == kWeightsTag) weights_unwritten_ = false;
  tags_.forget_proof(tag);
}

bool ContentIndex::notice_write(const std::string& tag) {
  if (!tags_.was_written(tag)) return false;
  note_write(tag);
  tags_.look_anew(tag);
  return true;
}

void ContentIndex::note_watched_digest(std::string digest) {
  const std::string weights(kWeightsTag);
  if (weights_unwritten_ && !tags_.was_written(weights)) tags_.know(weights, std::move(digest));
}

void ContentIndex::forget_blocks() noexcept {
  retained_->clear();
  stored_.clear();
}

BlocksInStore ContentIndex::find_in_store(std::span<const Slot> slots) const {
  BlocksInStore found{.store = slots.empty() ? nullptr : host_store_.lock(), .stored = {}};
  if (found.store == nullptr) return found;
  found.stored.reserve(slots.size());
  for (const Slot slot : slots) found.stored.push_back(found.store->stored(slot));
  return found;
}

}  // namespace torpor
