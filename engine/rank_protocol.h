// The messages between the controller and the memory of each worker rank. Orders and replies are values in bytes, so
// that they cross processes; a failure is a value in the reply, so that the controller sees the outcome of every rank.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/value.h"
#include "checkpoint/chunk_writing.h"

namespace torpor {

// What a rank is told. Which fields count is said at each method of RankMemory.
struct RankOrder {
  std::vector<std::string> tags;
  std::vector<int32_t> blocks;     // KV blocks to save
  std::string directory;           // where chunk files are: of a checkpoint under construction, or of a committed one
  ChunkWriting writing;            // "save" to disk: how
  std::vector<RankChunks> chunks;  // what a committed checkpoint says of each rank
  bool keep_backup = false;
};

// What a rank holds, in bytes.
struct RankLedger {
  struct Tag {
    std::string state;
    uint64_t region_bytes = 0;    // as asked for
    uint64_t physical_bytes = 0;  // device memory behind it now
    uint64_t backup_host_bytes = 0;
    uint64_t backup_disk_bytes = 0;
  };
  std::map<std::string, Tag> tags;
  uint64_t device_physical_bytes = 0;
  uint64_t device_capacity_bytes = 0;  // 0: no limit of its own
  uint64_t device_used_bytes =
      0;  // by anybody, by the device's own count; 0: it keeps none. Less the physical bytes: the unexplained rest
  uint64_t arena_held_bytes = 0;
  uint64_t arena_used_bytes = 0;
  uint64_t arena_budget_bytes = 0;
  uint64_t arena_unpinned_bytes = 0;  // held, but the device would not pin it
  // How each chunk that the transfer engine was given since the start ended: pieces of regions, also those of which
  // only a digest was taken, and KV blocks.
  std::map<std::string, uint64_t> chunks_by_outcome;
  uint64_t process_resident_bytes = 0;         // VmRSS
  uint64_t process_resident_region_bytes = 0;  // the part of it that is device memory without a GPU
};

struct RankReply {
  std::optional<Error> error;
  uint64_t bytes = 0;                          // moved, hashed or freed by this order
  RankChunks chunks;                           // "save" to disk
  std::map<std::string, std::string> digests;  // "digest": tag -> digest of its content
  // "restore": tags that came back empty, since nothing was saved of them. "describe": those still not written since.
  std::vector<std::string> without_content;
  std::map<std::string, uint64_t> writes;  // "describe": tag -> how often it was seen to have other content
  uint64_t bytes_per_block = 0;            // "describe"
  RankLedger ledger;                       // "describe"
};

Bytes encode_order(const RankOrder& order);
Result<RankOrder> decode_order(const Bytes& bytes);
Bytes encode_reply(const RankReply& reply);
Result<RankReply> decode_reply(const Bytes& bytes);

}  // namespace torpor
