// SPDX-License-Identifier: Apache-2.0
// RankParts: what all parts of one rank's memory work with: its device, allocator, arena, transfers and options.
//
// Owner: RankMemory. The objects behind its references outlive it; all objects that refer to it end before it. Options:
// see RankMemoryOptions; RankMemory::apply() changes those that an engine gives, under its lock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "allocator/host_arena.h"
#include "allocator/sleep_allocator.h"
#include "base/file_system.h"
#include "base/seal.h"
#include "offload/blocking_transfers.h"
#include "offload/transfer_engine.h"

namespace torpor {

struct RankParts {
  DeviceMemory& device;
  SleepAllocator& allocator;
  HostArena& arena;
  TransferEngine& transfers;
  BlockingTransfers& blocking_transfers;
  FileSystem& file_system;
  int32_t rank = 0;
  bool keep_backup = false;         // keep backups of tags without blocks after a wake
  uint64_t arena_keep_bytes = 0;    // the most unused host memory that stays held between operations
  uint64_t retain_kv_bytes = 0;     // the most bytes of KV blocks retained after a wake
  Codec host_codec = Codec::kNone;  // of chunks in the arena
  std::string spill_dir;            // directory of the spill file; empty: none
  std::shared_ptr<const Key> key;   // of sealed files; null: none
  bool encrypt = false;             // encrypt the spill file
  uint64_t spill_staging_bytes = 0;
  uint64_t deferred_job_bytes = 0;
  bool deferred_thread = false;
  bool own_threads = true;  // off: a wake maps all regions before it copies
};

}  // namespace torpor
