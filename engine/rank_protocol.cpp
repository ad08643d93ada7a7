#include "engine/rank_protocol.h"

#include "checkpoint/archived_values.h"

namespace torpor {

template <class Archive>
void serialize(Archive& archive, Error& v) {
  archive(checked(v.code, kLastCode), v.what, v.next_step, checked(v.origin, Origin::kEngine), v.native,
          v.state_changed);
}
template <class Archive>
void serialize(Archive& archive, CompressionOptions& v) {
  archive(checked(v.codec, Codec::kZstd), v.level, v.long_distance);
}
template <class Archive>
void serialize(Archive& archive, ChunkWriting& v) {
  archive(v.id, checked(v.protection, Protection::kEncrypted), v.compression, v.known);
}
template <class Archive>
void serialize(Archive& archive, RankOrder& v) {
  archive(v.tags, v.blocks, v.directory, v.writing, v.chunks, v.keep_backup);
}
template <class Archive>
void serialize(Archive& archive, RankLedger::Tag& v) {
  archive(v.state, v.region_bytes, v.physical_bytes, v.backup_host_bytes, v.backup_disk_bytes);
}
template <class Archive>
void serialize(Archive& archive, RankLedger& v) {
  archive(v.tags, v.device_physical_bytes, v.device_capacity_bytes, v.device_used_bytes, v.arena_held_bytes,
          v.arena_used_bytes, v.arena_budget_bytes, v.arena_unpinned_bytes, v.chunks_by_outcome,
          v.process_resident_bytes, v.process_resident_region_bytes);
}
template <class Archive>
void serialize(Archive& archive, RankReply& v) {
  archive(v.error, v.bytes, v.chunks, v.digests, v.without_content, v.writes, v.bytes_per_block, v.ledger);
}

Bytes encode_order(const RankOrder& order) { return to_bytes(order); }
Bytes encode_reply(const RankReply& reply) { return to_bytes(reply); }

Result<RankOrder> decode_order(const Bytes& bytes) {
  return from_bytes<RankOrder>(std::as_bytes(std::span(bytes)), "an order to a rank");
}
Result<RankReply> decode_reply(const Bytes& bytes) {
  return from_bytes<RankReply>(std::as_bytes(std::span(bytes)), "the reply of a rank");
}

}  // namespace torpor
