// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/state_sections.h"

#include <algorithm>

#include "checkpoint/archived_values.h"
#include "checkpoint/section_reader.h"

namespace torpor {
namespace {

constexpr uint32_t kSectionVersion = 2;

// A section is its version, then its values in order.
template <class... Values>
Section pack(std::string name, const Values&... values) {
  return {std::move(name), to_bytes_after(0, kSectionVersion, values...)};
}

}  // namespace

std::vector<Section> encode(const EngineCheckpoint& checkpoint) {
  const SchedulerSnapshot& scheduler = checkpoint.state.scheduler;
  const KvSnapshot& kv = checkpoint.state.kv;
  std::vector<Section> sections;
  sections.push_back(pack("requests", scheduler.requests));
  sections.push_back(
      pack("queues", scheduler.policy, scheduler.running, scheduler.waiting, scheduler.held, scheduler.finished));
  sections.push_back(pack("block_tables", kv.groups));
  sections.push_back(pack("blocks", kv.num_blocks, kv.null_block, kv.blocks));
  sections.push_back(pack("free_order", kv.free_order));
  sections.push_back(pack("prefix_index", kv.prefix_index, kv.extra_hashes));
  sections.push_back(pack("samplers", checkpoint.state.workers));
  sections.push_back(pack("engine", scheduler.engine, kv.engine));
  sections.push_back(pack("outputs", checkpoint.outputs));
  if (!checkpoint.metadata.empty()) sections.push_back(encode_metadata(checkpoint.metadata));
  sections.insert(sections.end(), checkpoint.carried.begin(), checkpoint.carried.end());
  return sections;
}

Result<EngineCheckpoint> decode(std::span<const Section> sections) {
  EngineCheckpoint checkpoint;
  SchedulerSnapshot& scheduler = checkpoint.state.scheduler;
  KvSnapshot& kv = checkpoint.state.kv;
  if (std::any_of(sections.begin(), sections.end(), [](const Section& s) { return s.name == kSetSection; })) {
    return Error{.code = Code::kIncompatible,
                 .what = "it is a set of checkpoints of several data parallel ranks",
                 .next_step = "wake it with as many data parallel ranks, or look at the checkpoint of each"};
  }
  SectionReader reader(sections, kSectionVersion);
  TORPOR_RETURN_IF_ERROR(reader.take("requests", scheduler.requests));
  TORPOR_RETURN_IF_ERROR(reader.take("queues", scheduler.policy, scheduler.running, scheduler.waiting, scheduler.held,
                                     scheduler.finished));
  TORPOR_RETURN_IF_ERROR(reader.take("block_tables", kv.groups));
  TORPOR_RETURN_IF_ERROR(reader.take("blocks", kv.num_blocks, kv.null_block, kv.blocks));
  TORPOR_RETURN_IF_ERROR(reader.take("free_order", kv.free_order));
  TORPOR_RETURN_IF_ERROR(reader.take("prefix_index", kv.prefix_index, kv.extra_hashes));
  TORPOR_RETURN_IF_ERROR(reader.take("samplers", checkpoint.state.workers));
  TORPOR_RETURN_IF_ERROR(reader.take("engine", scheduler.engine, kv.engine));
  TORPOR_RETURN_IF_ERROR(reader.take("outputs", checkpoint.outputs));
  Result<Metadata> metadata = decode_metadata(sections);
  // Otherwise the section is carried along: no decision depends on it.
  if (metadata) checkpoint.metadata = *std::move(metadata);
  for (const Section& section : sections) {
    if (reader.taken(section.name) || (metadata && is_metadata(section.name))) continue;
    if (section.required) {
      return Error{.code = Code::kIncompatible,
                   .what = fmt::format("section {}: this torpor does not know it, and it is needed", section.name),
                   .next_step = "use the version of torpor that wrote it, or a newer one"};
    }
    checkpoint.carried.push_back(section);
  }
  return checkpoint;
}

// Readers that know only text read the section of text.
Section encode_metadata(const Metadata& metadata) {
  const bool json = std::any_of(metadata.begin(), metadata.end(), [](const auto& each) { return each.second.is_json; });
  std::map<std::string, std::string> words;
  for (const auto& [name, value] : metadata) words.emplace(name, json ? value.to_json() : value.words);
  Section section = pack(std::string(json ? kMetadataJsonSection : kMetadataSection), words);
  section.required = false;
  return section;
}

Result<Metadata> decode_metadata(std::span<const Section> sections) {
  Metadata metadata;
  const auto found =
      std::find_if(sections.begin(), sections.end(), [](const Section& section) { return is_metadata(section.name); });
  if (found == sections.end()) return metadata;
  const auto damaged = [](std::string what) {
    return Error{.code = Code::kCorruption, .what = std::move(what), .next_step = "use another checkpoint"};
  };
  std::map<std::string, std::string> words;
  TORPOR_RETURN_IF_ERROR(SectionReader(sections, kSectionVersion).take(found->name, words));
  for (auto& [name, text] : words) {
    if (found->name == kMetadataSection) {
      metadata.emplace(name, std::move(text));
      continue;
    }
    Result<MetadataValue> value = MetadataValue::from_json(text);
    if (!value) return damaged(fmt::format("metadata: of \"{}\" {}", name, value.error().what));
    metadata.emplace(name, *std::move(value));
  }
  if (const Status fits = check_metadata(metadata); !fits) return damaged(fits.error().what);
  return metadata;
}

}  // namespace torpor
