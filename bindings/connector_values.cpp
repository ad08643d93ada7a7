#include "bindings/connector_values.h"

#include <cstring>

#include <fmt/format.h>

#include "bindings/bind_errors.h"

namespace py = pybind11;

namespace torpor {
namespace {

struct PackedBlock {
  std::array<uint8_t, 32> hash;
  uint32_t group;
  int32_t number;  // segment or slot
};
static_assert(sizeof(PackedBlock) == 40);

template <class Block, class Number>
Bytes pack(const std::vector<Block>& blocks, Number number) {
  Bytes bytes(blocks.size() * sizeof(PackedBlock));
  for (size_t i = 0; i < blocks.size(); ++i) {
    const PackedBlock block{blocks[i].key.hash, blocks[i].key.group, number(blocks[i])};
    std::memcpy(bytes.data() + i * sizeof block, &block, sizeof block);
  }
  return bytes;
}

template <class Block>
std::vector<Block> unpack(const Bytes& bytes, int32_t Block::*number) {
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
    blocks[i].*number = block.number;
  }
  return blocks;
}

}  // namespace

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
  for (const Way way : {Way::kUp, Way::kDown, Way::kOn}) {
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
  out["queued_blocks"] = scheduler.queue().queued_blocks();
  out["jobs_under_way"] = scheduler.queue().jobs_under_way();
  out["held_blocks"] = held;
  out["loading_requests"] = loading;
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
