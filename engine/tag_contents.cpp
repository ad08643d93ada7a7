// SPDX-License-Identifier: Apache-2.0
#include "engine/tag_contents.h"

#include <algorithm>

#include "base/units.h"

namespace torpor {
namespace {

// This many bytes at this many positions: a few milliseconds for a tag of any size.
constexpr uint64_t kSampleBytes = 64;
constexpr uint64_t kSamplePlaces = 16'384;
constexpr uint64_t kAsked = 16;  // positions to prefetch, as none of them is in a CPU cache

}  // namespace

void TagContents::note_write(std::string_view tag) {
  Content& content = contents_[std::string(tag)];
  ++content.writes;
  content.missing = false;
  content.proven.reset();
  content.sample.reset();  // the next look takes it anew
}

bool TagContents::was_written(const std::string& tag) {
  Content& content = contents_[tag];
  const std::optional<Digest> now = sample(tag);
  if (content.sample && now != content.sample) return true;
  content.sample = now;
  return false;
}

void TagContents::look_anew(const std::string& tag) {
  Content& content = contents_[tag];
  content.sample = sample(tag);
}

void TagContents::came_back_empty(const std::string& tag) {
  Content& content = contents_[tag];
  content.missing = true;
  content.proven.reset();
}

void TagContents::prove(const std::string& tag, std::string digest) {
  look_anew(tag);
  contents_[tag].proven = std::move(digest);
}

void TagContents::know(const std::string& tag, std::string digest) {
  Content& content = contents_[tag];
  if (!content.sample) content.sample = sample(tag);
  content.proven = std::move(digest);
}

void TagContents::forget_proof(std::string_view tag) noexcept {
  if (const auto content = contents_.find(tag); content != contents_.end()) content->second.proven.reset();
}

std::optional<std::string> TagContents::proven(std::string_view tag) const {
  const auto content = contents_.find(tag);
  return content == contents_.end() ? std::nullopt : content->second.proven;
}

bool TagContents::missing(std::string_view tag) const {
  const auto content = contents_.find(tag);
  return content != contents_.end() && content->second.missing;
}

void TagContents::describe(orders::Describe::Reply& reply) const {
  for (const auto& [tag, content] : contents_) {
    reply.writes[tag] = content.writes;
    if (content.missing) reply.without_content.push_back(tag);
    if (content.proven) reply.proven[tag] = *content.proven;
  }
}

// Return a digest of some bytes all over the tag; none if reading them is slow. Precondition: the tag is attached.
std::optional<Digest> TagContents::sample(const std::string& tag) const {
  if (device_.kind() != "host") return std::nullopt;
  const std::vector<RegionInfo> regions = allocator_.regions_of(tag);
  uint64_t all = 0;
  for (const RegionInfo& region : regions) all += region.size_bytes;
  const uint64_t stride = std::max<uint64_t>(4 * kKiB, all / kSamplePlaces);
  StreamingDigest digest;
  for (const RegionInfo& region : regions) {
    for (uint64_t at = 0; at < region.size_bytes; at += stride) {
      const auto* bytes = reinterpret_cast<const std::byte*>(region.address + at);  // NOLINT(performance-no-int-to-ptr)
      if (const uint64_t later = at + kAsked * stride; later < region.size_bytes)
        __builtin_prefetch(bytes + kAsked * stride);
      digest.update({bytes, std::min(kSampleBytes, region.size_bytes - at)});
    }
  }
  return digest.finish();
}

}  // namespace torpor
