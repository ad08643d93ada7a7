// SPDX-License-Identifier: Apache-2.0
// Layout of each value struct in an archive: its fields, in this order. A change here changes the format: raise
// kSectionVersion (state_sections.cpp) or kFormatVersion (manifest.h); checkpoint/FORMAT.md says what else to do.
#pragma once

#include "checkpoint/bounded_archive.h"
#include "checkpoint/manifest.h"
#include "scheduler_state/kv_snapshot.h"
#include "scheduler_state/scheduler_snapshot.h"

namespace torpor {

// A Value is the number of its alternative, then its content.
inline void CEREAL_SAVE_FUNCTION_NAME(BoundedOutput& archive, const Value& value) {
  archive(static_cast<uint8_t>(value.data.index()));
  std::visit(
      [&archive]<class T>(const T& content) {
        if constexpr (!std::is_same_v<T, std::monostate>) archive(content);
      },
      value.data);
}

template <class Archive>
void serialize(Archive& archive, Field& v) {
  archive(v.first, v.second);
}

template <size_t kAlternative = 0>
void load_alternative(BoundedInput& archive, Value& value, size_t wanted) {
  if constexpr (kAlternative == std::variant_size_v<Value::Alternatives>) {
    throw cereal::Exception(fmt::format("{} is not a kind of value", wanted));
  } else if (kAlternative == wanted) {
    auto& content = value.data.template emplace<kAlternative>();
    if constexpr (kAlternative != 0) archive(content);
  } else {
    load_alternative<kAlternative + 1>(archive, value, wanted);
  }
}

inline void CEREAL_LOAD_FUNCTION_NAME(BoundedInput& archive, Value& value) {
  uint8_t alternative = 0;
  archive(alternative);
  if (++archive.depth > kMaxValueDepth) throw cereal::Exception("a value is nested too deeply");
  load_alternative(archive, value, alternative);
  --archive.depth;
}

template <class Archive>
void serialize(Archive& archive, SamplingState& v) {
  archive(v.n, v.temperature, v.top_p, v.top_k, v.min_p, v.presence_penalty, v.frequency_penalty, v.repetition_penalty,
          v.seed, v.stop, v.stop_token_ids, v.max_tokens, v.min_tokens, v.ignore_eos, v.logprobs, v.prompt_logprobs,
          v.engine);
}

template <class Archive>
void serialize(Archive& archive, RequestState& v) {
  archive(v.id, v.client_index, v.priority, v.arrival_time, checked(v.status, RequestStatus::kPreempted),
          v.prompt_token_ids, v.output_token_ids, v.num_computed_tokens, v.num_preemptions, v.max_tokens,
          v.block_hashes, v.block_hash_bytes, v.cache_salt, v.stop_reason, v.sampling, v.engine);
}

template <class Archive>
void serialize(Archive& archive, WorkerSnapshot& v) {
  archive(v.rank, v.rows, v.default_generator, v.generators, v.engine);
}

template <class Archive>
void serialize(Archive& archive, KvBlock& v) {
  archive(v.id, v.ref_count, v.hash, v.hash_tokens);
}
template <class Archive>
void serialize(Archive& archive, KvTable& v) {
  archive(v.request, v.blocks, v.num_cached_blocks);
}
template <class Archive>
void serialize(Archive& archive, KvGroup& v) {
  archive(v.block_size, v.tables);
}
template <class Archive>
void serialize(Archive& archive, PrefixEntry& v) {
  archive(v.hash, v.blocks);
}
template <class Archive>
void serialize(Archive& archive, ExtraHashes& v) {
  archive(v.block, v.hashes);
}

template <class Archive>
void serialize(Archive& archive, Digest& v) {
  for (uint8_t& byte : v.bytes) archive(byte);
}
template <class Archive>
void serialize(Archive& archive, ChunkKey& v) {
  archive(checked(v.kind, ChunkKind::kKvBlock), v.tag, v.region, v.index);
}
template <class Archive, size_t kSize>
void serialize(Archive& archive, std::array<uint8_t, kSize>& bytes) {  // an id, a tag
  for (uint8_t& byte : bytes) archive(byte);
}
template <class Archive>
void serialize(Archive& archive, SavedChunk& v) {
  archive(v.key, v.bytes, v.digest, checked(v.codec, Codec::kBf16), v.offset, v.stored_bytes, v.file, v.seal);
}
template <class Archive>
void serialize(Archive& archive, LinkedFile& v) {
  archive(v.name, v.id, v.bytes);
}
template <class Archive>
void serialize(Archive& archive, RecordSums& v) {
  archive(v.records, v.bytes, v.stored_bytes, v.linked_bytes);
}
template <class Archive>
void serialize(Archive& archive, RankSummary& v) {
  archive(v.rank, v.refs, v.refs_bytes, v.refs_mac, v.files, v.tags);
}
template <class Archive>
void serialize(Archive& archive, SectionInfo& v) {
  archive(v.name, v.required, v.offset, v.stored_bytes, v.bytes, checked(v.codec, Codec::kBf16), v.digest, v.seal);
}
template <class Archive>
void serialize(Archive& archive, Manifest& v) {  // the other fields are in the header
  archive(v.generation, v.created_unix_seconds, v.creator, v.fingerprint, v.sections, v.ranks, v.owner);
}

}  // namespace torpor
