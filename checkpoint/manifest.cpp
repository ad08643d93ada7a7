// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/manifest.h"

#include <set>
#include <span>
#include <string_view>

#include <fmt/core.h>

namespace torpor {
namespace {

constexpr uint64_t kMaxSectionBytes = uint64_t{1} << 36;

}  // namespace

// Leave out the number of KV blocks: each start measures it anew.
Digest owner_of(const Fingerprint& fingerprint) {
  StreamingDigest digest;
  const auto add = [&](const std::string& text) {
    const uint64_t length = text.size();
    digest.update(std::as_bytes(std::span(&length, 1)));
    digest.update(std::as_bytes(std::span(text)));
  };
  for (const auto& [field, value] : fingerprint) {
    if (field == "kv_num_blocks") continue;
    add(field);
    add(value);
  }
  return digest.finish();
}

const RankSummary* Manifest::find_rank(int32_t rank) const {
  for (const RankSummary& each : ranks) {
    if (each.rank == rank) return &each;
  }
  return nullptr;
}

uint64_t Manifest::total_bytes() const {
  uint64_t sum = 0;
  for (const SectionInfo& section : sections) sum += section.stored_bytes;
  for (const RankSummary& rank : ranks) sum += rank.refs_bytes + rank.own_bytes();
  return sum;
}

uint64_t Manifest::stored_bytes_but_of(const std::string& tag) const {
  uint64_t sum = 0;
  for (const RankSummary& rank : ranks) {
    for (const auto& [name, sums] : rank.tags) sum += name == tag ? 0 : sums.stored_bytes;
  }
  return sum;
}

uint64_t Manifest::linked_bytes() const {
  uint64_t sum = 0;
  for (const RankSummary& rank : ranks) {
    for (size_t i = 1; i < rank.files.size(); ++i) sum += rank.files[i].bytes;
  }
  return sum;
}

Error damaged_manifest(std::string what) {
  return Error{
      .code = Code::kCorruption, .what = fmt::format("MANIFEST: {}", what), .next_step = "use another checkpoint"};
}

Status check_sections(const Manifest& manifest) {
  std::set<std::string_view> names;
  uint64_t offset = 0;
  for (const SectionInfo& section : manifest.sections) {
    if (!names.insert(section.name).second)
      return damaged_manifest(fmt::format("the section {} is listed twice", section.name));
    if (section.offset != offset || section.stored_bytes > kMaxSectionBytes)
      return damaged_manifest(fmt::format("the section {} is misplaced", section.name));
    offset += section.stored_bytes;
  }
  return ok();
}

}  // namespace torpor
