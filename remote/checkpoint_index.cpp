// SPDX-License-Identifier: Apache-2.0
#include "remote/checkpoint_index.h"

#include <algorithm>
#include <cmath>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "base/digest.h"
#include "checkpoint/store_names.h"
#include "remote/s3_signature.h"

namespace torpor::remote {
namespace {

using Json = nlohmann::ordered_json;
constexpr int kIndexFormat = 1;
constexpr uint64_t kMostFileBytes = uint64_t{1} << 50;

Error damaged(std::string what) {
  return Error{.code = Code::kCorruption,
               .what = fmt::format("the index of the checkpoint is damaged: {}", what),
               .next_step = "take another checkpoint, or push this one again under another prefix"};
}

// Return whether a checkpoint can have a file of this name. Other files are not written to a directory.
bool is_file_name(const std::string& name) {
  if (name == kManifestFile || name == kStateFile) return true;
  return (name.starts_with("refs-r") || name.starts_with("chunks-r")) && name.size() <= 100 &&
         name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") == std::string::npos;
}

Result<IndexedFile> read_file(const Json& json) {
  if (!json.is_object() || !json.contains("name") || !json["name"].is_string() || !json.contains("bytes") ||
      !json["bytes"].is_number_unsigned() || !json.contains("parts") || !json["parts"].is_array())
    return damaged("a file has no name, bytes or parts");
  IndexedFile file{.name = json["name"], .bytes = json["bytes"]};
  if (!is_file_name(file.name)) return damaged("a file has a name that no file of a checkpoint has");
  if (file.bytes > kMostFileBytes || json["parts"].size() != (file.bytes + kPartBytes - 1) / kPartBytes)
    return damaged(fmt::format("{} has {} parts for {} bytes", file.name, json["parts"].size(), file.bytes));
  for (const Json& part : json["parts"]) {
    if (!part.is_string() || !is_hex(part.get<std::string>(), sizeof(ManifestMac)))
      return damaged(fmt::format("a part of {} has no hash", file.name));
    file.parts.push_back(part);
  }
  return file;
}

}  // namespace

uint64_t CheckpointIndex::bytes() const {
  uint64_t sum = 0;
  for (const IndexedFile& file : files) sum += file.bytes;
  return sum;
}

std::string index_name(const CheckpointIndex& index) {
  return fmt::format("{}-{}", utc_moment(static_cast<std::time_t>(index.created_unix_seconds)), index.id);
}
std::string index_key(std::string_view name) { return fmt::format("checkpoints/{}", name); }
std::string part_key(std::string_view hash) { return fmt::format("parts/{}/{}", hash.substr(0, 2), hash); }

bool is_index_name(std::string_view name) {
  constexpr std::string_view kMoment = "20261123T071500Z-";
  if (name.size() < kMoment.size() || !is_hex(name.substr(kMoment.size()), sizeof(SealId))) return false;
  for (size_t i = 0; i < kMoment.size(); ++i) {
    const bool digit = name[i] >= '0' && name[i] <= '9';
    if (kMoment[i] >= '0' && kMoment[i] <= '9' ? !digit : name[i] != kMoment[i]) return false;
  }
  return true;
}

bool is_part_key(std::string_view key) {
  const size_t slash = key.rfind('/');
  if (slash == std::string_view::npos) return false;
  const std::string_view hash = key.substr(slash + 1);
  return is_hex(hash, sizeof(ManifestMac)) && key == part_key(hash);
}

std::string part_hash(std::span<const std::byte> part) { return hex(unkeyed_mac({}, part)); }

std::string encode_index(const CheckpointIndex& index) {
  Json files = Json::array();
  for (const IndexedFile& file : index.files)
    files.push_back({{"name", file.name}, {"bytes", file.bytes}, {"parts", file.parts}});
  Json json = {{"torpor_checkpoint", kIndexFormat}, {"id", index.id},
               {"generation", index.generation},    {"created_unix_seconds", index.created_unix_seconds},
               {"creator", index.creator},          {"part_bytes", kPartBytes}};
  if (index.has_metadata) json["metadata"] = *index.has_metadata;
  json["files"] = std::move(files);
  return json.dump(1, ' ', false, Json::error_handler_t::replace);
}

Result<CheckpointIndex> decode_index(std::string_view text) {
  return try_catch([&]() -> Result<CheckpointIndex> {
    if (text.size() > kMostIndexBytes) return damaged("it is too large");
    const Json json = Json::parse(text, nullptr, false);
    if (!json.is_object() || !json.contains("torpor_checkpoint")) return damaged("it is none");
    if (json["torpor_checkpoint"] != kIndexFormat || !json.contains("part_bytes") || json["part_bytes"] != kPartBytes)
      return Error{.code = Code::kIncompatible,
                   .what = "the index of the checkpoint is of another format",
                   .next_step = "use the torpor that pushed it"};
    for (const char* name : {"id", "creator"}) {
      if (!json.contains(name) || !json[name].is_string()) return damaged(fmt::format("it has no {}", name));
    }
    if (!json.contains("generation") || !json["generation"].is_number_unsigned() ||
        !json.contains("created_unix_seconds") || !json["created_unix_seconds"].is_number() ||
        !json.contains("files") || !json["files"].is_array())
      return damaged("it has no generation, time or files");
    CheckpointIndex index{.id = json["id"],
                          .generation = json["generation"],
                          .created_unix_seconds = json["created_unix_seconds"],
                          .creator = json["creator"]};
    if (!is_hex(index.id, sizeof(SealId))) return damaged("its id is none");
    if (!(index.created_unix_seconds >= 0 && index.created_unix_seconds < 2.5e11))  // to the year 9892
      return damaged("its time is none");
    if (json.contains("metadata")) {
      if (!json["metadata"].is_boolean()) return damaged("it does not say whether there is metadata");
      index.has_metadata = json["metadata"].get<bool>();
    }
    for (const Json& each : json["files"]) {
      TORPOR_ASSIGN_OR_RETURN(IndexedFile file, read_file(each));
      const bool known = std::any_of(index.files.begin(), index.files.end(),
                                     [&](const IndexedFile& other) { return other.name == file.name; });
      if (known) return damaged(fmt::format("{} is there twice", file.name));
      index.files.push_back(std::move(file));
    }
    if (index.files.empty() || index.files.front().name != kManifestFile ||
        index.files.front().bytes > kMaxManifestBytes)
      return damaged("MANIFEST is not its first file");
    return index;
  });
}

}  // namespace torpor::remote
