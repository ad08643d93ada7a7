// SPDX-License-Identifier: Apache-2.0
#include "tools/gpu_check/gpu_check.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <thread>

#include <fmt/core.h>

#include "allocator/cuda/cuda_device.h"
#include "allocator/host_arena.h"
#include "base/units.h"
#include "engine/rank_memory.h"
#include "engine/tag_sleep.h"
#include "kvcache/kv_layout.h"
#include "offload/blocking_transfers.h"
#include "offload/host_tier.h"
#include "tools/bench/bench.h"
#include "tools/gpu_check/budget.h"
#include "tools/gpu_check/gpu.h"

namespace torpor::gpu_check {
namespace {

using bench::median;
using bench::seconds;
using Json = nlohmann::ordered_json;

constexpr uint64_t kSegment = 64 * kMiB;  // regions as torch's larger segments

std::unique_ptr<RankMemory> make_memory(const Gpu& gpu, const Options& options, bool keep_backup) {
  return must(RankMemory::create(must(make_cuda_device(gpu.driver(), {.ordinal = options.device})), linux_file_system(),
                                 {.arena_slab_bytes = 256 * kMiB, .keep_backup = keep_backup}));
}

// Regions of kSegment, each filled with its own byte.
std::vector<DeviceAddress> fill(const Gpu& gpu, RankMemory& memory, const std::string& tag, uint64_t bytes) {
  std::vector<DeviceAddress> regions;
  for (uint64_t at = 0; at < bytes; at += kSegment) {
    regions.push_back(must(memory.allocate(tag, std::to_string(at), std::min(kSegment, bytes - at))));
    gpu.set(regions.back(), static_cast<unsigned char>(regions.size() * 37), std::min(kSegment, bytes - at));
  }
  return regions;
}

// The first, middle and last MiB of each region.
bool filled(const Gpu& gpu, const std::vector<DeviceAddress>& regions, uint64_t bytes) {
  std::vector<unsigned char> read(std::min<uint64_t>(kMiB, bytes));
  for (size_t i = 0; i < regions.size(); ++i) {
    const uint64_t size = std::min(kSegment, bytes - i * kSegment);
    const uint64_t piece = std::min<uint64_t>(read.size(), size);
    for (const uint64_t at : {uint64_t{0}, (size - piece) / 2, size - piece}) {
      gpu.down(read.data(), regions[i] + at, piece);
      const auto wanted = static_cast<unsigned char>((i + 1) * 37);
      if (std::any_of(read.begin(), read.begin() + static_cast<std::ptrdiff_t>(piece),
                      [wanted](unsigned char byte) { return byte != wanted; }))
        return false;
    }
  }
  return true;
}

double rate(uint64_t bytes, const std::vector<double>& times) {
  return static_cast<double>(bytes) / 1e9 / median(times);
}

const char* verdict(bool passed) { return passed ? "passed" : "failed"; }

// Pinned host memory in one copy: what the link gives.
Json line_rate(const Gpu& gpu, const Options& options, const Budget& budget, double& down, double& up) {
  const uint64_t bytes = std::min<uint64_t>(options.bytes, kGiB);
  auto device = must(make_cuda_device(gpu.driver(), {.ordinal = options.device}));
  const auto arena = must(HostArena::create({.slab_bytes = bytes, .pin_for = device.get()}));
  const auto host = must(arena->allocate(bytes));
  auto memory = make_memory(gpu, options, false);
  const DeviceAddress address = must(memory->allocate("line", "line", bytes));
  std::vector<double> down_times, up_times;
  for (int round = 0; round <= options.rounds && (round < 2 || budget.go_on()); ++round) {
    down_times.push_back(seconds([&] { gpu.down(host.bytes().data(), address, bytes); }));
    up_times.push_back(seconds([&] { gpu.up(address, host.bytes().data(), bytes); }));
  }
  down_times.erase(down_times.begin());
  up_times.erase(up_times.begin());
  down = rate(bytes, down_times);
  up = rate(bytes, up_times);
  return {{"check", "line rate, pinned"},
          {"verdict", verdict(arena->info().unpinned_bytes == 0)},
          {"device_to_host", down},
          {"host_to_device", up}};
}

// A loop over allocations with host memory of its own for each; nothing is proven, nothing undone, no digests.
class Loop {
 public:
  // `per_sleep`: host memory is allocated at each sleep and freed at each wake; else the first sleep's is kept.
  Loop(const Gpu& gpu, const ExtraFunctions& extra, const Options& options, bool per_sleep)
      : gpu_(gpu), extra_(extra), per_sleep_(per_sleep) {
    device_ = must(make_cuda_device(gpu.driver(), {.ordinal = options.device}));
    for (uint64_t at = 0; at < options.bytes; at += kSegment) {
      Region region{.bytes = align_up(std::min(kSegment, options.bytes - at), device_->granularity())};
      region.address = must(device_->reserve(region.bytes));
      map(region);
      regions_.push_back(region);
    }
  }
  ~Loop() {
    for (Region& region : regions_) {
      if (region.host != nullptr) extra_.free_host(region.host);
      (void)device_->unmap(region.address, region.bytes);  // it may be asleep
      (void)device_->release(region.id);
      (void)device_->free_reservation(region.address);
    }
  }
  void sleep() {
    for (Region& region : regions_) {
      if (region.host == nullptr) gpu_.check(extra_.host_alloc(&region.host, region.bytes, 0), "cuMemHostAlloc");
      gpu_.down(region.host, region.address, region.bytes);
      unmap(region);
    }
  }
  void wake() {
    for (Region& region : regions_) {
      map(region);
      gpu_.up(region.address, region.host, region.bytes);
      if (!per_sleep_) continue;
      extra_.free_host(region.host);
      region.host = nullptr;
    }
  }

 private:
  struct Region {
    DeviceAddress address = 0;
    uint64_t bytes = 0;
    PhysicalId id{};
    void* host = nullptr;
  };
  void map(Region& region) {
    region.id = must(device_->create(region.bytes));
    must(device_->map(region.address, region.id));
    must(device_->set_access(region.address, region.bytes, Access::kReadWrite));
  }
  void unmap(Region& region) {
    must(device_->unmap(region.address, region.bytes));
    must(device_->release(region.id));
  }
  const Gpu& gpu_;
  const ExtraFunctions& extra_;
  const bool per_sleep_;
  std::unique_ptr<DeviceMemory> device_;
  std::vector<Region> regions_;
};

Json bulk(const Gpu& gpu, const ExtraFunctions& extra, const Options& options, const Budget& budget, double line_down,
          double line_up) {
  Json row = {{"check", "sleep and wake of weights"}, {"bytes", options.bytes}};
  bool whole = true;
  std::vector<double> first, armed, sleep, wake, unchanged;
  for (int round = 0; round < options.rounds && (round == 0 || budget.go_on()); ++round) {
    auto memory = make_memory(gpu, options, true);
    const std::vector<DeviceAddress> regions = fill(gpu, *memory, "weights", options.bytes);
    armed.push_back(seconds([&] { must(memory->arena().prefault(options.bytes + kGiB / 4)); }));
    first.push_back(seconds([&] { must(TagSleep(*memory).sleep({}, {"weights"})); }));
    wake.push_back(seconds([&] { must(TagSleep(*memory).wake({})); }));
    memory->mark_dirty("weights");
    sleep.push_back(seconds([&] { must(TagSleep(*memory).sleep({}, {"weights"})); }));
    wake.push_back(seconds([&] { must(TagSleep(*memory).wake({})); }));
    unchanged.push_back(seconds([&] { must(TagSleep(*memory).sleep({}, {"weights"})); }));
    must(TagSleep(*memory).wake({}));
    whole = whole && filled(gpu, regions, options.bytes);
  }
  row["verdict"] = verdict(whole);
  row["rounds"] = first.size();
  row["first_sleep"] = rate(options.bytes, first);
  row["second_sleep"] = rate(options.bytes, sleep);
  row["wake"] = rate(options.bytes, wake);
  row["unchanged_sleep_seconds"] = median(unchanged);
  row["arena_seconds"] = median(armed);
  row["sleep_of_line"] = rate(options.bytes, sleep) / line_down;
  row["wake_of_line"] = rate(options.bytes, wake) / line_up;
  if (extra.host_alloc == nullptr) return row;
  for (const auto& [name, per_sleep] : {std::pair("host memory kept (as vLLM)", false),
                                        std::pair("host memory for each sleep (as torch_memory_saver)", true)}) {
    std::vector<double> loop_first, loop_sleep, loop_wake;
    for (int round = 0; round < std::min(options.rounds, 3) && (round == 0 || budget.go_on()); ++round) {
      Loop loop(gpu, extra, options, per_sleep);
      loop_first.push_back(seconds([&] { loop.sleep(); }));
      loop_wake.push_back(seconds([&] { loop.wake(); }));
      loop_sleep.push_back(seconds([&] { loop.sleep(); }));
      loop_wake.push_back(seconds([&] { loop.wake(); }));
    }
    row["loops"].push_back({{"loop", name},
                            {"first_sleep", rate(options.bytes, loop_first)},
                            {"second_sleep", rate(options.bytes, loop_sleep)},
                            {"wake", rate(options.bytes, loop_wake)},
                            {"times_first_sleep", median(loop_first) / median(first)},
                            {"times_second_sleep", median(loop_sleep) / median(sleep)},
                            {"times_wake", median(loop_wake) / median(wake)}});
  }
  return row;
}

// Scattered KV blocks of a model with 80 layers and 8 KV heads of 128 in bfloat16, layer after layer; by the kernel or
// by the copy engines. The digests of what came down go to `digests`, or are compared with what is there.
Json paged(const Gpu& gpu, const Options& options, const Budget& budget, int tokens, bool by_kernel, double line_down,
           double line_up, std::vector<Digest>& digests) {
  constexpr uint32_t kLayers = 80;
  const uint64_t piece = static_cast<uint64_t>(tokens) * 8 * 128 * 2 * 2;
  const auto moved =
      static_cast<uint32_t>(std::max<uint64_t>(4, std::min<uint64_t>(options.bytes, kGiB) / (piece * kLayers)));
  const uint32_t blocks = 2 * moved;
  CudaDeviceInfo info;
  auto device = must(make_cuda_device(
      gpu.driver(), {.ordinal = options.device, .gather_below_bytes = by_kernel ? ~uint64_t{0} : 0}, &info));
  Json row = {{"check", fmt::format("scattered KV blocks of {} tokens, by the {}", tokens,
                                    by_kernel ? "kernel" : "copy engines")},
              {"verdict", "not here"},
              {"piece_bytes", piece}};
  if (by_kernel && !info.gathers) return row.update({{"note", info.notes.empty() ? "" : info.notes.back()}}), row;
  const auto arena = must(HostArena::create({.slab_bytes = 256 * kMiB, .pin_for = device.get()}));
  const auto allocator = must(SleepAllocator::create(*device));
  const auto engine = must(TransferEngine::create(*device, *arena));
  BlockingTransfers transfers(*engine);
  const uint64_t bytes = piece * kLayers * blocks;
  const KvLayout layout{.num_blocks = blocks,
                        .tensors = {{.address = must(allocator->allocate("kv_cache", "kv", bytes)),
                                     .layers = kLayers,
                                     .layer_stride = piece * blocks,
                                     .block_stride = piece,
                                     .block_bytes = piece}}};
  std::vector<uint64_t> content(bytes / sizeof(uint64_t));
  std::mt19937_64 random(2);
  for (uint64_t& word : content) word = random();
  gpu.up(layout.tensors[0].address, content.data(), bytes);
  std::vector<uint32_t> ids(blocks);
  for (uint32_t i = 0; i < blocks; ++i) ids[i] = i;
  std::shuffle(ids.begin(), ids.end(), std::mt19937(1));
  std::vector<ChunkPlan> plans;
  for (uint32_t i = 0; i < moved; ++i) {
    plans.push_back(
        {.key = {.kind = ChunkKind::kKvBlock, .tag = "kv_cache", .index = ids[i]}, .pieces = layout.pieces_of(ids[i])});
  }
  std::vector<double> down, up;
  bool same = true;
  for (int round = 0; round <= options.rounds && (round < 2 || budget.go_on()); ++round) {
    HostTier tier(*arena);
    std::vector<SavedChunk> saved;
    down.push_back(seconds([&] { saved = must(transfers.save(plans, tier)); }));
    gpu.set(layout.tensors[0].address, 0, bytes);
    up.push_back(seconds([&] { must(transfers.restore(saved, plans, tier)); }));
    if (digests.empty()) {
      for (const SavedChunk& chunk : saved) digests.push_back(chunk.digest);
    }
    for (size_t i = 0; i < saved.size(); ++i) same = same && saved[i].digest == digests.at(i);
  }
  std::vector<uint64_t> read(content.size());
  gpu.down(read.data(), layout.tensors[0].address, bytes);
  for (uint32_t i = 0; i < blocks; ++i) {
    for (const DevicePiece& part : layout.pieces_of(ids[i])) {
      const uint64_t at = (part.address - layout.tensors[0].address) / sizeof(uint64_t);
      const auto* const expected = content.data() + at;
      same = same &&
             (i < moved ? std::equal(expected, expected + piece / sizeof(uint64_t), read.data() + at) : read[at] == 0);
    }
  }
  down.erase(down.begin());
  up.erase(up.begin());
  const double found_down = rate(piece * kLayers * moved, down);
  const double found_up = rate(piece * kLayers * moved, up);
  row.update({{"verdict", verdict(same)},
              {"device_to_host", found_down},
              {"host_to_device", found_up},
              {"down_of_line", found_down / line_down},
              {"up_of_line", found_up / line_up}});
  return row;
}

Json cycles(const Gpu& gpu, const Options& options, const Budget& budget) {
  size_t free = 0, total = 0;
  gpu.check(gpu.driver().cuMemGetInfo(&free, &total), "cuMemGetInfo");
  const uint64_t bytes = std::min<uint64_t>(options.cycle_bytes, free / 10 * 8 / kSegment * kSegment);
  const uint64_t kept = std::min<uint64_t>(kSegment, bytes);
  auto memory = make_memory(gpu, options, false);
  const std::vector<DeviceAddress> regions = fill(gpu, *memory, "weights", kept);
  fill(gpu, *memory, "kv_cache", bytes - kept);  // not kept over a sleep
  const auto cycle = [&] {
    must(TagSleep(*memory).sleep({}, {"weights"}));
    const uint64_t asleep = gpu.used();
    must(TagSleep(*memory).wake({}));
    return asleep;
  };
  for (int i = 0; i < 10; ++i) cycle();  // what is allocated once is allocated now
  const uint64_t awake_before = gpu.used();
  const uint64_t asleep_before = cycle();
  uint64_t asleep_after = asleep_before;
  int made = 0;
  const double taken = seconds([&] {
    for (; made < options.cycles && (made < 2 || budget.go_on()); ++made) asleep_after = cycle();
  });
  const bool grew = asleep_after > asleep_before || gpu.used() > awake_before;
  return {{"check", "cycles"},
          {"verdict", verdict(!grew && filled(gpu, regions, kept))},
          {"cycles", made},
          {"wanted_cycles", options.cycles},
          {"bytes", bytes},
          {"used_asleep_before", asleep_before},
          {"used_asleep_after", asleep_after},
          {"ms_a_cycle", 1e3 * taken / std::max(1, made)}};
}

// A captured graph copies one region into another; it must do so after every cycle, for the addresses are the same.
Json graph(const Gpu& gpu, const ExtraFunctions& extra, const Options& options) {
  constexpr uint64_t kBytes = 16 * kMiB;
  auto memory = make_memory(gpu, options, false);
  const DeviceAddress from = must(memory->allocate("weights", "from", kBytes));
  const DeviceAddress to = must(memory->allocate("scratch", "to", kBytes));
  gpu.set(from, 0x5a, kBytes);
  CUgraph captured = nullptr;
  CUgraphExec executable = nullptr;
  gpu.check(extra.begin_capture(gpu.stream(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
  gpu.check(extra.copy_on_device(to, from, kBytes, gpu.stream()), "cuMemcpyDtoDAsync");
  gpu.check(extra.end_capture(gpu.stream(), &captured), "cuStreamEndCapture");
  gpu.check(extra.instantiate(&executable, captured, 0), "cuGraphInstantiateWithFlags");
  std::vector<unsigned char> read(kBytes);
  int right = 0;
  for (int i = 0; i < options.graph_cycles; ++i) {
    must(TagSleep(*memory).sleep({}, {"weights"}));
    must(TagSleep(*memory).wake({}));
    gpu.check(extra.launch(executable, gpu.stream()), "cuGraphLaunch");
    gpu.wait();
    gpu.down(read.data(), to, kBytes);
    right += std::all_of(read.begin(), read.end(), [](unsigned char byte) { return byte == 0x5a; }) ? 1 : 0;
  }
  extra.destroy_executable(executable);
  extra.destroy_graph(captured);
  return {{"check", "a captured graph after each cycle"},
          {"verdict", verdict(right == options.graph_cycles)},
          {"cycles", options.graph_cycles},
          {"right", right}};
}

Json arena(const Gpu& gpu, const ExtraFunctions& extra, const Options& options, const Budget& budget) {
  auto device = must(make_cuda_device(gpu.driver(), {.ordinal = options.device}));
  std::vector<double> ours, theirs;
  std::string method;
  int node = -1;
  for (int round = 0; round < options.rounds && (round == 0 || budget.go_on()); ++round) {
    const auto made = must(HostArena::create({.pin_for = device.get()}));
    made->prefault_in_background(0);
    must(made->wait_prefault());
    method = to_string(made->info().prefault_method);
    node = made->info().numa_node.value_or(-1);
    ours.push_back(seconds([&] { must(made->prefault(options.bytes)); }));
    if (extra.host_alloc == nullptr) continue;
    void* host = nullptr;
    theirs.push_back(seconds([&] { gpu.check(extra.host_alloc(&host, options.bytes, 0), "cuMemHostAlloc"); }));
    extra.free_host(host);
  }
  Json row = {{"check", "pinned host memory"},
              {"verdict", verdict(true)},
              {"method", method},
              {"numa_node", node},
              {"arena", rate(options.bytes, ours)}};
  if (!theirs.empty())
    row.update({{"cuMemHostAlloc", rate(options.bytes, theirs)}, {"times", median(theirs) / median(ours)}});
  return row;
}

}  // namespace

Json run(const CudaDriver& driver, const ExtraFunctions& extra, const Options& options, const OnRow& on_row) {
  CudaDeviceInfo info;
  must(make_cuda_device(driver, {.ordinal = options.device, .rdma = true, .exportable = true}, &info));
  const Gpu gpu(driver, options.device);
  Budget budget(options.seconds);
  Json report = {{"gpu", info.name},
                 {"driver", info.driver_version},
                 {"batched_copies", info.batched_copies},
                 {"notes", info.notes},
                 {"seconds", options.seconds}};
  if (on_row) on_row(report);
  report["checks"] = Json::array();
  const auto add = [&](double share, const std::string& name, const std::function<Json()>& check) {
    Json row;
    try {
      row = budget.begin(share) ? check()
                                : Json{{"check", name},
                                       {"verdict", "not here"},
                                       {"note", fmt::format("the {} seconds are used up", options.seconds)}};
    } catch (const std::exception& failed) {
      row = {{"check", name}, {"verdict", verdict(false)}, {"error", failed.what()}};
    }
    if (on_row) on_row(row);
    report["checks"].push_back(std::move(row));
  };
  double down = 0;
  double up = 0;
  add(0.05, "line rate, pinned", [&] { return line_rate(gpu, options, budget, down, up); });
  add(0.35, "sleep and wake of weights", [&] { return bulk(gpu, extra, options, budget, down, up); });
  for (const int tokens : {1, 4, 16, 32, 128}) {
    std::vector<Digest> digests;
    for (const bool by_kernel : {false, true})
      add(0.025,
          fmt::format("scattered KV blocks of {} tokens, by the {}", tokens, by_kernel ? "kernel" : "copy engines"),
          [&] { return paged(gpu, options, budget, tokens, by_kernel, down, up, digests); });
  }
  if (extra.begin_capture != nullptr)
    add(0.05, "a captured graph after each cycle", [&] { return graph(gpu, extra, options); });
  add(0.1, "pinned host memory", [&] { return arena(gpu, extra, options, budget); });
  add(0.2, "cycles", [&] { return cycles(gpu, options, budget); });  // last: as many as there is time for
  report["passed"] = std::none_of(report["checks"].begin(), report["checks"].end(),
                                  [](const Json& row) { return row["verdict"] == "failed"; });
  return report;
}

}  // namespace torpor::gpu_check
