// SPDX-License-Identifier: Apache-2.0
// The stores of KV blocks behind host memory, opened as Python's options say: on disk, and on another machine.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "base/seal.h"
#include "bindings/dict_reader.h"
#include "kvcache/key_table.h"
#include "offload/codec.h"
#include "offload/slot_store.h"

namespace torpor {

inline constexpr std::chrono::seconds kBlocksSyncInterval{1};                       // of durable ones
inline constexpr uint64_t kMostStoreSlots = static_cast<uint64_t>(kMostSlots - 1);  // BlockIndexOptions::validate()

struct ConnectorStoreOptions {
  int32_t rank = 0;
  uint64_t disk_bytes = 0;
  std::string directory;
  std::shared_ptr<const Key> key;
  bool encrypt = false;
  std::string kv_store;
  std::string kv_store_credentials;
  std::string kv_store_ca;
  int32_t remote_slots = 0;
  int64_t kv_store_timeout_ms = 0;
  double kv_store_expire_days = 0;
  CompressionOptions compression{.codec = Codec::kNone};
};
// Read the entries of these options. Raises InvalidArgument.
void read_store_options(DictReader& in, ConnectorStoreOptions& options);

struct DiskBlocks {
  std::unique_ptr<SlotStore> store;
  int32_t segments = 0;  // as BlockIndexOptions have them
  int32_t segment_slots = 0;
};
// kInvalidArgument: disk_bytes is too little for blocks of so many bytes.
Result<DiskBlocks> open_disk_blocks(const ConnectorStoreOptions& options, uint64_t bytes);

// kUnsupported: this build of torpor knows no such store.
Result<std::unique_ptr<SlotStore>> open_shared_blocks(const ConnectorStoreOptions& options, uint64_t bytes);

// Return the cache epoch of a directory. If it cannot be read, return one under which nothing was stored.
std::string epoch_of(const std::string& directory);
// Return another one. If it cannot be kept, it still applies to this process, and the log says what that means.
std::string new_epoch_of(const std::string& directory);

}  // namespace torpor
