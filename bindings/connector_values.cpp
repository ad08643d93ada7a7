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

constexpr std::array kAllWays = {Way::kOnboard, Way::kOffload, Way::kDemote,
                                 Way::kPublish, Way::kLookup,  Way::kPrefetch};
static_assert(kAllWays.size() == kWays);
constexpr std::array kVerbs = {SessionVerb::kDemote, SessionVerb::kPrefetch, SessionVerb::kRetain, SessionVerb::kPin,
                               SessionVerb::kEvict};
static_assert(kVerbs.size() == kSessionVerbs);

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

StoreId store_named(const std::string& given, const char* what) {
  const std::array stores = {StoreId::kHost, StoreId::kDisk, StoreId::kRemote};
  const auto store = std::find_if(stores.begin(), stores.end(), [&](StoreId each) { return name(each) == given; });
  if (store != stores.end()) return *store;
  raise(Error{.code = Code::kInvalidArgument,
              .what = fmt::format("{} is \"{}\"", what, given),
              .next_step = "use host, disk or remote"});
}

std::chrono::nanoseconds nanoseconds_of(double seconds) {
  constexpr double kMost = 1e9;  // 30 years
  if (seconds >= -kMost && seconds <= kMost) return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
  raise(Error{.code = Code::kInvalidArgument,
              .what = fmt::format("{} seconds", seconds),
              .next_step = "use at most 1000000000"});
}

}  // namespace

ConnectorOptions connector_options_from(const py::dict& dict) {
  DictReader in(dict, "connector options");
  ConnectorOptions options;
  int64_t events = 0;
  int64_t kv_store_wait_ms = 0;
  in.read("lazy", options.lazy);
  in.read("ranks", options.offload.ranks);
  in.read("block_tokens", options.unit_tokens);
  in.read("host_slots", options.offload.index.host_slots);
  in.read("disk_segments", options.offload.index.disk_segments);
  in.read("segment_slots", options.offload.index.segment_slots);
  in.read("device_blocks", options.offload.index.device_blocks);
  in.read("min_uses", options.placement.min_uses);
  in.read("min_prefix_tokens", options.placement.min_prefix_tokens);
  options.stride_tokens = options.unit_tokens;
  in.read_if_given("stride_tokens", options.stride_tokens);
  options.offload.block_tokens = static_cast<int32_t>(std::clamp<int64_t>(options.stride_tokens, 0, INT32_MAX));
  in.read_if_given("partial_hits", options.partial_hits);
  in.read_if_given("watermark", options.watermark);
  in.read_if_given("sync_load_blocks", options.sync_load_blocks);
  in.read_if_given("drop_last_block", options.drop_last_block);
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
  int64_t pin_seconds = options.residency.most_ttl.count();
  in.read_if_given("sessions", options.residency.index.sessions);
  in.read_if_given("session_index_bytes", options.residency.index.bytes);
  in.read_if_given("tenant_share", options.residency.index.tenant_share);
  in.read_if_given("pin_share", options.residency.pin_share);
  in.read_if_given("pin_seconds", pin_seconds);
  options.residency.most_ttl = std::chrono::seconds(pin_seconds);
  in.read_if_given("prefetch_share", options.residency.prefetch_share);
  double idle_seconds = 0;
  std::string idle_to = "host";
  in.read_if_given("idle_seconds", idle_seconds);
  in.read_if_given("idle_to", idle_to);
  options.residency.idle = nanoseconds_of(idle_seconds);
  options.residency.idle_to = store_named(idle_to, "idle_to");
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

py::dict connector_stats(const OffloadScheduler& scheduler, const Residency& residency, int64_t held, int64_t loading) {
  py::dict out;
  for (const Way way : kAllWays) {
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
  const ResidencyCounts counts = residency.counts();
  for (const SessionVerb verb : kVerbs) {
    for (size_t tier = 0; tier < kResidences; ++tier) {
      const uint64_t blocks = counts.blocks[static_cast<size_t>(verb)][tier];
      const auto residence = static_cast<Residence>(tier);
      if (blocks > 0) out[py::str(fmt::format("session_{}_{}", name(verb), name(residence)))] = blocks;
    }
  }
  if (counts.freed > 0) out["session_freed_blocks"] = counts.freed;
  if (counts.forgotten > 0) out["session_forgotten"] = counts.forgotten;
  if (counts.idle > 0) out["session_idle"] = counts.idle;
  out["sessions"] = counts.sessions;
  out["held_by_sessions_blocks"] = counts.held;
  out["session_index_bytes"] = counts.index_bytes;
  return out;
}

// ---- sessions

SessionCall session_call_from(const py::dict& dict) {
  DictReader in(dict, "a call of a session");
  SessionCall call;
  std::string verb;
  std::string to = "host";
  double seconds = 0;
  in.read("verb", verb);
  in.read("tenant", call.name.tenant);
  in.read("session", call.name.id);
  in.read_if_given("to", to);
  in.read_if_given("seconds", seconds);
  in.read_if_given("priority", call.priority);
  in.read_if_given("action", call.action);
  in.finish();
  const auto wrong = [](std::string what, std::string next) {
    raise(Error{.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next)});
  };
  const auto known = std::find_if(kVerbs.begin(), kVerbs.end(), [&](SessionVerb each) { return name(each) == verb; });
  if (known == kVerbs.end())
    wrong(fmt::format("the verb is \"{}\"", verb), "use demote, prefetch, retain, pin or evict");
  call.verb = *known;
  call.device = to == "device" && call.verb == SessionVerb::kPrefetch;
  if (!call.device) call.to = store_named(to, "to");
  call.seconds = nanoseconds_of(seconds);
  return call;
}

py::dict answer_to_python(const SessionAnswer& answer) {
  py::dict out;
  out["outcome"] = std::string(name(answer.outcome));
  out["reason"] = answer.reason;
  out["done"] = answer.done;
  out["repeated"] = answer.repeated;
  out["blocks"] = answer.blocks;
  out["freed_blocks"] = answer.freed;
  out["kept_blocks"] = answer.kept;
  out["epoch"] = answer.epoch;
  out["action_id"] = answer.action;
  return out;
}

py::dict page_to_python(const SessionPage& page) {
  py::list list;
  for (const SessionView& view : page.views) {
    py::dict out;
    out["used"] = view.used;
    out["tenant"] = view.name.tenant;
    out["id"] = view.name.id;
    out["epoch"] = view.epoch;
    out["tier"] = std::string(name(view.residence));
    out["prefixes"] = view.prefixes;
    out["blocks"] = view.blocks;
    out["device_blocks"] = view.device;
    out["host_blocks"] = view.host;
    out["disk_blocks"] = view.disk;
    out["kv_store_blocks"] = view.remote;
    out["running"] = view.running;
    out["held"] = !view.held ? "" : view.pinned ? "pinned" : "retained";
    out["priority"] = view.priority;
    out["seconds_left"] = view.seconds_left;
    out["held_blocks"] = view.held_blocks;
    list.append(out);
  }
  py::dict made;
  made["sessions"] = list;
  made["next"] = py::none();
  if (page.next) {
    py::dict next;
    next["tenant"] = page.next->name.tenant;
    next["id"] = page.next->name.id;
    next["listed"] = page.next->listed;
    next["epoch"] = page.next->epoch;
    next["begun"] = page.next->begun;
    next["looked_at"] = page.next->looked_at;
    next["counts"] = std::vector<uint64_t>(page.next->counts.begin(), page.next->counts.end());
    made["next"] = next;
  }
  return made;
}

SessionCursor cursor_from(const py::object& object) {
  SessionCursor cursor;
  if (object.is_none()) return cursor;
  DictReader in(object, "where a list of sessions goes on");
  std::vector<uint64_t> counts;
  in.read("tenant", cursor.name.tenant);
  in.read("id", cursor.name.id);
  in.read("listed", cursor.listed);
  in.read("epoch", cursor.epoch);
  in.read("begun", cursor.begun);
  in.read("looked_at", cursor.looked_at);
  in.read("counts", counts);
  in.finish();
  if (counts.size() != cursor.counts.size()) DictReader::fail("counts", "one number for each tier, and one for all");
  std::copy(counts.begin(), counts.end(), cursor.counts.begin());
  return cursor;
}

py::dict times_to_python(const OffloadTimes& times) {
  py::dict out;
  for (const Way way : kAllWays) {
    const std::vector<double>& seconds = times.batches[static_cast<size_t>(way)];
    if (!seconds.empty()) out[py::str(std::string(name(way)))] = py::cast(seconds);
  }
  if (!times.loads.empty()) out["load"] = py::cast(times.loads);
  return out;
}

py::object events_to_python(const BlockEvents& events, const std::vector<EnginePrefixes::Entered>& entered) {
  if (events.events.empty() && entered.empty() && !events.cleared && events.lost == 0) return py::none();
  py::list list;
  const auto hash = [](const std::array<uint8_t, 32>& bytes) {
    return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  for (const EnginePrefixes::Entered& block : entered)
    list.append(py::make_tuple(true, "device", hash(block.key.hash), hash(block.parent), block.key.group));
  for (const BlockEvent& event : events.events) {
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
