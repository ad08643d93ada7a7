// SPDX-License-Identifier: Apache-2.0
#include "bindings/connector_values.h"

#include <algorithm>
#include <cstring>

#include <fmt/core.h>

#include "bindings/bind_errors.h"
#include "bindings/dict_reader.h"

namespace py = pybind11;

namespace torpor {
namespace {

struct PackedBlock {
  std::array<uint8_t, 32> hash;
  uint32_t group;
  uint32_t zero;
  int64_t number;  // segment or slot
};
static_assert(sizeof(PackedBlock) == 48);

template <class Block, class Number>
Bytes pack(const std::vector<Block>& blocks, Number number) {
  Bytes bytes(blocks.size() * sizeof(PackedBlock));
  for (size_t i = 0; i < blocks.size(); ++i) {
    const PackedBlock block{blocks[i].key.hash, blocks[i].key.group, 0, number(blocks[i])};
    std::memcpy(bytes.data() + i * sizeof block, &block, sizeof block);
  }
  return bytes;
}

template <class Block, class Number>
std::vector<Block> unpack(const Bytes& bytes, Number Block::*number) {
  if (bytes.size() % sizeof(PackedBlock) != 0) {
    raise(Error{.code = Code::kInvalidArgument,
                .what = fmt::format("{} bytes are no list of recovered blocks", bytes.size()),
                .next_step = "this is a mistake in the calling code"});
  }
  std::vector<Block> blocks(bytes.size() / sizeof(PackedBlock));
  for (size_t i = 0; i < blocks.size(); ++i) {
    PackedBlock block;
    std::memcpy(&block, bytes.data() + i * sizeof block, sizeof block);
    blocks[i].key.hash = block.hash;
    blocks[i].key.group = block.group;
    blocks[i].*number = static_cast<Number>(block.number);
  }
  return blocks;
}

}  // namespace

ConnectorOptions connector_options_from(const py::dict& dict) {
  DictReader in(dict, "connector options");
  ConnectorOptions options;
  int64_t events = 0;
  int64_t kv_store_wait_ms = 0;
  in.read("lazy", options.lazy);
  in.read("ranks", options.offload.ranks);
  in.read("block_tokens", options.offload.block_tokens);
  in.read("host_slots", options.offload.index.host_slots);
  in.read("disk_segments", options.offload.index.disk_segments);
  in.read("segment_slots", options.offload.index.segment_slots);
  in.read("device_blocks", options.offload.index.device_blocks);
  in.read("min_uses", options.placement.min_uses);
  in.read("min_prefix_tokens", options.placement.min_prefix_tokens);
  in.read_if_given("watermark", options.watermark);
  in.read_if_given("remote_slots", options.offload.index.remote_slots);
  in.read_if_given("kv_store_wait_ms", kv_store_wait_ms);
  in.read_if_given("events", events);
  in.read_if_given("max_batch_size", options.offload.queue.max_batch_size);
  in.read_if_given("min_batch_size", options.offload.queue.min_batch_size);
  in.read_if_given("max_concurrent_transfers", options.offload.queue.max_concurrent_transfers);
  in.read_if_given("on_deck_batches", options.offload.queue.on_deck_batches);
  in.read_if_given("loading_batches", options.offload.queue.loading_batches);
  in.read_if_given("queue_blocks", options.offload.queue.queue_blocks);
  for (const auto& [name, interval] : {std::pair("flush_interval_ms", &options.offload.queue.flush_interval),
                                       std::pair("policy_timeout_ms", &options.offload.queue.policy_timeout),
                                       std::pair("sweep_interval_ms", &options.offload.queue.sweep_interval)}) {
    int64_t milliseconds = interval->count();
    in.read_if_given(name, milliseconds);
    *interval = std::chrono::milliseconds(milliseconds);
  }
  in.read_if_given("presence", options.placement.presence);
  in.finish();
  // Blocks are held in both modes: if the free queue is short, vLLM would reuse a block before it was copied.
  options.offload.mode = OffloadMode::kEager;
  options.offload.events = static_cast<size_t>(std::max<int64_t>(events, 0));
  options.placement.host = options.offload.index.host_slots > 0;
  options.placement.disk = options.offload.index.disk_segments > 0;
  options.placement.remote = options.offload.index.remote_slots > 0;
  options.remote_wait = std::chrono::milliseconds(kv_store_wait_ms);
  if (options.placement.min_uses > 1) options.offload.counted_keys = 1 << 20;
  return options;
}

Bytes packed(const std::vector<RecoveredBlock>& blocks) {
  return pack(blocks, [](const RecoveredBlock& block) { return block.segment; });
}
Bytes packed(const std::vector<AdoptedBlock>& blocks) {
  return pack(blocks, [](const AdoptedBlock& block) { return block.slot; });
}
std::vector<RecoveredBlock> recovered_from(const Bytes& bytes) { return unpack(bytes, &RecoveredBlock::segment); }
std::vector<AdoptedBlock> adopted_from(const Bytes& bytes) { return unpack(bytes, &AdoptedBlock::slot); }

py::dict connector_stats(const OffloadScheduler& scheduler, int64_t held, int64_t loading) {
  py::dict out;
  for (const Way way : {Way::kOnboard, Way::kOffload, Way::kDemote, Way::kPublish, Way::kLookup}) {
    const OutcomeCounts& counts = scheduler.queue().counts(way);
    for (int i = 0; i < kBlockOutcomes; ++i) {
      const uint64_t count = counts[static_cast<size_t>(i)];
      if (count > 0) out[py::str(fmt::format("{}_{}", name(way), name(static_cast<BlockOutcome>(i))))] = count;
    }
  }
  for (const StoreId store : {StoreId::kHost, StoreId::kDisk}) {
    const StoreCounts counts = scheduler.index().counts(store);
    const auto put = [&](const char* what, auto number) {
      out[py::str(fmt::format("{}_{}", name(store), what))] = number;
    };
    put("blocks", counts.visible);
    put("quarantined", counts.quarantined);
    put("evicted", counts.evicted_stale + counts.evicted_clean + counts.evicted_dirty);
  }
  out["kv_store_blocks"] = scheduler.index().counts(StoreId::kRemote).visible;
  out["kv_store_onboarded_blocks"] = scheduler.loaded_from_remote();
  const CachedTokens& cached = scheduler.cached();
  out["cached_device_tokens"] = cached.device;
  out["cached_host_tokens"] = cached.stores[static_cast<size_t>(StoreId::kHost)];
  out["cached_disk_tokens"] = cached.stores[static_cast<size_t>(StoreId::kDisk)];
  out["cached_kv_store_tokens"] = cached.stores[static_cast<size_t>(StoreId::kRemote)];
  out["cached_other_tokens"] = cached.other;
  out["queued_blocks"] = scheduler.queue().queued_blocks();
  out["jobs_under_way"] = scheduler.queue().jobs_under_way();
  out["held_blocks"] = held;
  out["loading_requests"] = loading;
  return out;
}

py::dict times_to_python(const OffloadTimes& times) {
  py::dict out;
  for (const Way way : {Way::kOnboard, Way::kOffload, Way::kDemote, Way::kPublish, Way::kLookup}) {
    const std::vector<double>& seconds = times.batches[static_cast<size_t>(way)];
    if (!seconds.empty()) out[py::str(std::string(name(way)))] = py::cast(seconds);
  }
  if (!times.loads.empty()) out["load"] = py::cast(times.loads);
  return out;
}

py::object events_to_python(const BlockEvents& events) {
  if (events.events.empty() && !events.cleared && events.lost == 0) return py::none();
  py::list list;
  for (const BlockEvent& event : events.events) {
    const auto hash = [](const std::array<uint8_t, 32>& bytes) {
      return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    };
    list.append(py::make_tuple(event.stored, std::string(name(event.store)), hash(event.key.hash), hash(event.parent),
                               event.key.group));
  }
  py::dict out;
  out["cleared"] = events.cleared;
  out["lost"] = events.lost;
  out["events"] = list;
  return out;
}

}  // namespace torpor
