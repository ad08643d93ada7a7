// SPDX-License-Identifier: Apache-2.0
#include "bindings/connector_stores.h"

#include <algorithm>
#include <chrono>

#include "base/clock.h"
#include "base/log.h"
#include "base/units.h"
#include "bindings/bind_values.h"
#include "bindings/module_files.h"
#include "offload/cache_epoch.h"
#include "offload/segment_store.h"
#ifdef TORPOR_HAS_REMOTE
#include "bindings/mooncake_client.h"
#include "remote/mooncake_store.h"
#include "remote/object_block_store.h"
#include "remote/resp_store.h"
#endif

namespace torpor {
namespace {

constexpr int32_t kSegments = 8;  // at least, if the disk has space for so many
constexpr uint64_t kMostSegmentBytes = 64 * kMiB;
constexpr std::chrono::seconds kLockWait{10};

#ifdef TORPOR_HAS_REMOTE
// Return what the options of all shared stores have in common.
template <class StoreOptions>
StoreOptions shared_options(const ConnectorStoreOptions& options, uint64_t bytes) {
  StoreOptions made;
  made.rank = options.rank;
  made.slots = options.remote_slots;
  made.record_bytes = bytes;
  made.key = options.key;
  made.encrypt = options.encrypt;
  made.compression = options.compression;
  made.timeout = std::chrono::milliseconds(options.kv_store_timeout_ms);
  return made;
}

Result<std::unique_ptr<SlotStore>> open_mooncake(const ConnectorStoreOptions& options, uint64_t bytes) {
  if (!options.kv_store_credentials.empty() || !options.kv_store_ca.empty()) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "kv_store_credentials or kv_store_ca with a Mooncake store, which knows neither",
                 .next_step = "leave them out; a key_file of torpor's protects blocks"};
  }
  TORPOR_ASSIGN_OR_RETURN(const remote::MooncakeSettings settings, remote::mooncake_settings(options.kv_store));
  TORPOR_RETURN_IF_ERROR(mooncake_is_installed());
  log().warn("KV connector: a Mooncake store has no TLS and no passwords: {}",
             options.key == nullptr ? "who reaches it can read and forge blocks; give torpor a key_file"
             : options.encrypt      ? "blocks are encrypted with torpor's key"
                                    : "blocks are authenticated with torpor's key, and who reaches it can read them");
  remote::MooncakeStoreOptions with = shared_options<remote::MooncakeStoreOptions>(options, bytes);
  with.name = settings.name;
  with.io = settings.protocol;
  return remote::MooncakeStore::open(
      with, [settings] { return connect_mooncake(settings); }, system_clock());
}

Result<std::unique_ptr<SlotStore>> open_objects(const ConnectorStoreOptions& options, uint64_t bytes) {
  if (!options.kv_store_credentials.empty() || !options.kv_store_ca.empty()) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "kv_store_credentials or kv_store_ca with an object store",
                 .next_step = "use AWS's environment variables or credentials file, as for checkpoints"};
  }
  constexpr double kSecondsOfADay = 86400;
  remote::ObjectBlockStoreOptions with = shared_options<remote::ObjectBlockStoreOptions>(options, bytes);
  with.expire = std::chrono::seconds(static_cast<int64_t>(options.kv_store_expire_days * kSecondsOfADay));
  return remote::ObjectBlockStore::open(options.kv_store, module_files(), with, system_clock());
}
#endif

}  // namespace

void read_store_options(DictReader& in, ConnectorStoreOptions& options) {
  std::optional<std::string> directory;
  std::optional<std::string> key_file;
  in.read("rank", options.rank);
  in.read("disk_bytes", options.disk_bytes);
  in.read("directory", directory);
  in.read_if_given("key_file", key_file);
  in.read_if_given("encrypt", options.encrypt);
  for (const auto& [name, to] :
       {std::pair("kv_store", &options.kv_store), std::pair("kv_store_credentials", &options.kv_store_credentials),
        std::pair("kv_store_ca", &options.kv_store_ca)}) {
    std::optional<std::string> text;
    in.read_if_given(name, text);
    *to = text.value_or("");
  }
  in.read_if_given("kv_store_blocks", options.remote_slots);
  in.read_if_given("kv_store_timeout_ms", options.kv_store_timeout_ms);
  in.read_if_given("kv_store_expire_days", options.kv_store_expire_days);
  std::optional<std::string> codec;
  in.read_if_given("block_compression", codec);
  options.compression = value_or_raise(CompressionOptions::of(codec, std::nullopt));
  options.directory = directory.value_or("");
  options.key = key_from(key_file);
}

Result<DiskBlocks> open_disk_blocks(const ConnectorStoreOptions& options, uint64_t bytes) {
  const uint64_t record = align_up(bytes, kPage);
  const uint64_t most = std::max<uint64_t>(kMostSegmentBytes / record, 1);
  const uint64_t slots = std::clamp<uint64_t>(options.disk_bytes / record / kSegments, 1, most);
  SegmentStoreOptions with{.rank = options.rank,
                           .record_bytes = bytes,
                           .slots_per_segment = static_cast<int32_t>(slots),
                           .budget_bytes = options.disk_bytes,
                           .compression = options.compression,
                           .key = options.key,
                           .encrypt = options.encrypt,
                           .lock_wait = kLockWait};
  const uint64_t segments = options.disk_bytes / SegmentStore::most_bytes_of_segment(with);
  if (segments < 3) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("disk_bytes is {}, a block has {} bytes", options.disk_bytes, bytes),
                 .next_step = fmt::format("use {} or more", 3 * SegmentStore::most_bytes_of_segment(with))};
  }
  DiskBlocks made{
      .segments = static_cast<int32_t>(std::min(segments - 1, kMostStoreSlots / slots)),  // one more is written
      .segment_slots = static_cast<int32_t>(slots)};
  TORPOR_ASSIGN_OR_RETURN(
      made.store, SegmentStore::open(module_files(), options.directory + "/store", std::move(with), system_clock()));
  return made;
}

Result<std::unique_ptr<SlotStore>> open_shared_blocks([[maybe_unused]] const ConnectorStoreOptions& options,
                                                      [[maybe_unused]] uint64_t bytes) {
#ifdef TORPOR_HAS_REMOTE
  if (remote::is_mooncake(options.kv_store)) return open_mooncake(options, bytes);
  if (options.kv_store.starts_with("s3://") || options.kv_store.starts_with("file://"))
    return open_objects(options, bytes);
  remote::RespStoreOptions with = shared_options<remote::RespStoreOptions>(options, bytes);
  with.url = options.kv_store;
  with.credentials = options.kv_store_credentials;
  with.authorities = options.kv_store_ca;
  return remote::RespStore::open(with, system_clock());
#else
  return Error{.code = Code::kUnsupported,
               .what = "a remote store for KV blocks: this build of torpor knows none",
               .next_step = "install the packages of docs/vllm.md, then build it on this machine: pip install ."};
#endif
}

std::string epoch_of(const std::string& directory) {
  const Result<std::string> word = cache_epoch(module_files(), directory);
  if (word) return *word;
  log().warn("what is on disk is not found again: {}", word.error());
  return random_cache_epoch();
}

std::string new_epoch_of(const std::string& directory) {
  RenewedEpoch renewed = renew_cache_epoch(module_files(), directory);
  if (!renewed.kept) {
    log().warn("a reset of the cache is not on disk; after a restart no block there is found until one is: {}",
               renewed.kept.error());
  }
  return std::move(renewed.word);
}

}  // namespace torpor
