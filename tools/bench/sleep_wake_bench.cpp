// SPDX-License-Identifier: Apache-2.0
// Sleep and wake of regions in host memory: torpor beside a loop that, region after region, allocates host memory,
// copies and unmaps, and beside the machine's own speed for the same bytes.
//
// Everything runs interleaved, round by round, after one round that only warms. The device is the one without a GPU, so
// "device" memory is unmapped by each sleep and fresh on each wake, in all of them. The ceiling: all cores copy one
// large region to and from a warm buffer. torpor also takes a digest of every byte on sleep and checks it on wake; the
// other two do not. Besides: the first cycle of fresh contestants; a sleep of weights that did not change; of KV blocks
// the first sleep, the second after no step, and one after steps that changed one block in a hundred, to host and to
// disk; how fast the arena comes up beside mmap(MAP_POPULATE); and what a sleep and a wake without bytes cost, by the
// number of regions.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <thread>

#include <sys/mman.h>
#include <sys/resource.h>

#include <fmt/core.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "allocator/host_device.h"
#include "base/units.h"
#include "engine/rank_service.h"
#include "engine/tag_sleep.h"
#include "tools/bench/bench.h"
#include "tools/bench/direct_sleeps.h"
#include "tools/bench/disk_sleeps.h"
#include "tools/bench/kv_sleeps.h"
#include "tools/bench/packed_sleeps.h"

namespace {

using namespace torpor;
using bench::Direct;
using bench::median;
using bench::must;
using bench::seconds;

// `regions` of the same size; 0: as torch has its segments, half of it in 20 MiB, a quarter in 128 MiB, the rest in
// one.
std::vector<uint64_t> region_sizes(uint64_t bytes, uint64_t regions) {
  if (regions == 0) {
    std::vector<uint64_t> sizes(bytes / 2 / (20 * kMiB), 20 * kMiB);
    sizes.insert(sizes.end(), bytes / 4 / (128 * kMiB), 128 * kMiB);
    uint64_t rest = bytes;
    for (const uint64_t size : sizes) rest -= size;
    sizes.push_back(rest);
    return sizes;
  }
  std::vector<uint64_t> sizes(regions, bytes / regions / kMiB * kMiB);
  sizes.back() += bytes - sizes[0] * regions;
  return sizes;
}

// torpor: one tag, all regions at once.
class Torpor {
 public:
  Torpor(const std::vector<uint64_t>& sizes, bool keep) {
    memory_ = must(RankMemory::create(must(make_host_device()), linux_file_system(), {.keep_backup = keep}));
    for (size_t i = 0; i < sizes.size(); ++i) {
      const DeviceAddress address = must(memory_->allocate("weights", fmt::format("region {}", i), sizes[i]));
      std::memset(reinterpret_cast<void*>(address), static_cast<int>(i + 1),
                  sizes[i]);  // NOLINT(performance-no-int-to-ptr)
    }
  }
  void sleep() {
    memory_->mark_dirty("weights");  // every byte is copied every time
    call(orders::Save{.tags = kTags});
    call(orders::Detach{.tags = kTags});
  }
  void wake() {
    call(orders::Restore{.tags = kTags});
    call(orders::Finish{.tags = kTags, .keep_backup = true});
  }
  TagMove sleep_unchanged() { return must(TagSleep(*memory_).sleep({}, {"weights"})); }
  void prefault(uint64_t bytes) { must(memory_->arena().prefault(bytes)); }

 private:
  template <class Order>
  void call(const Order& order) {
    must(decode_reply<Order>(RankService(*memory_).call(encode_order(order))));
  }
  inline static const std::vector<std::string> kTags{"weights"};
  std::unique_ptr<RankMemory> memory_;
};

struct Timing {
  std::vector<double> sleep, wake, sleep_cpu, wake_cpu;
  template <class Contestant>
  void run(Contestant& contestant) {
    const double began = bench::cpu_seconds();
    sleep.push_back(seconds([&] { contestant.sleep(); }));
    const double slept = bench::cpu_seconds();
    wake.push_back(seconds([&] { contestant.wake(); }));
    sleep_cpu.push_back(slept - began), wake_cpu.push_back(bench::cpu_seconds() - slept);
  }
  void forget() { *this = {}; }
};

// Seconds to prefault `bytes` of host memory, as the arena does it and by mmap(MAP_POPULATE); and how the arena did it.
struct BroughtUp {
  double arena = 0;
  double populate = 0;
  std::string method;
};
BroughtUp prefaulted(uint64_t bytes, int rounds) {
  std::vector<double> arena_times, populate_times;
  BroughtUp result;
  for (int round = 0; round <= rounds; ++round) {
    {
      const auto arena = must(HostArena::create({}));
      arena->prefault_in_background(0);  // measures which way is the fastest; once a process
      must(arena->wait_prefault());
      arena_times.push_back(seconds([&] { must(arena->prefault(bytes)); }));
      result.method = to_string(arena->info().prefault_method);
    }
    void* memory = MAP_FAILED;
    populate_times.push_back(seconds([&] {
      memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    }));
    if (memory == MAP_FAILED) must(Status(system_error(errno, "MAP_POPULATE")));
    ::munmap(memory, bytes);
  }
  arena_times.erase(arena_times.begin());
  populate_times.erase(populate_times.begin());
  result.arena = median(arena_times);
  result.populate = median(populate_times);
  return result;
}

// Seconds of a sleep and a wake of so many small regions whose content nobody keeps.
double empty_cycle(uint64_t regions, int rounds) {
  const auto memory = must(RankMemory::create(must(make_host_device()), linux_file_system(), {}));
  for (uint64_t i = 0; i < regions; ++i) must(memory->allocate("scratch", std::to_string(i), 64 * kKiB));
  std::vector<double> times;
  for (int round = 0; round <= rounds; ++round) {
    times.push_back(seconds([&] {
      must(TagSleep(*memory).sleep({}, {}));
      must(TagSleep(*memory).wake({}));
    }));
  }
  times.erase(times.begin());
  return median(times);
}

// From the ceiling to torpor, one difference after the other: digests of every byte, then the regions as they are.
void print_steps(const std::vector<uint64_t>& sizes, uint64_t bytes, int rounds) {
  const unsigned cores = bench::cores();
  Direct ceiling({bytes}, {.threads = cores, .keep_host_memory = true});
  Direct digests({bytes}, {.threads = cores, .keep_host_memory = true, .digests = true});
  Direct regions(sizes, {.threads = cores, .keep_host_memory = true, .digests = true});
  Torpor torpor(sizes, true);
  Timing times[4];
  for (int round = 0; round <= rounds; ++round) {
    times[0].run(ceiling);
    times[1].run(digests);
    times[2].run(regions);
    times[3].run(torpor);
    if (round == 0) std::for_each(times, times + 4, [](Timing& each) { each.forget(); });
  }
  fmt::print("{} MiB, medians of {} rounds: ms of CPU, and of the ceiling's; ms, and of the ceiling\n", bytes / kMiB,
             rounds);
  constexpr const char* kNames[] = {"ceiling", "… and digests", "… in the regions", "torpor"};
  const auto print = [&](const char* what, std::vector<double> Timing::*cpu, std::vector<double> Timing::*wall) {
    for (size_t i = 0; i < 4; ++i) {
      const double used = median(times[i].*cpu), taken = median(times[i].*wall);
      fmt::print("{:<6} {:<18} {:>7.1f} {:.2f} {:>7.1f} {:.2f}\n", what, kNames[i], 1e3 * used,
                 median(times[0].*cpu) / used, 1e3 * taken, median(times[0].*wall) / taken);
    }
  };
  print("sleep", &Timing::sleep_cpu, &Timing::sleep);
  print("wake", &Timing::wake_cpu, &Timing::wake);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "Sleep and wake of regions in host memory, beside a loop per region and beside the machine's own copy speed."};
  uint64_t mib = 1024;
  uint64_t regions = 0;
  int rounds = 5;
  bool as_json = false;
  bool steps = false;
  bool packed = false;
  app.add_option("--mib", mib, "size of all regions together")->capture_default_str()->check(CLI::Range(64, 1 << 20));
  app.add_option("--regions", regions, "number of regions; 0: sizes as torch's segments have them")
      ->capture_default_str()
      ->check(CLI::Range(0, 4096));
  app.add_option("--rounds", rounds, "measured rounds")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_flag("--json", as_json, "print one JSON object");
  app.add_flag("--steps", steps, "only the way from the ceiling to torpor, what it does more one by one");
  app.add_flag("--packed", packed, "only bf16 weights and KV that are packed in host memory, beside such as are not");
  CLI11_PARSE(app, argc, argv);

  const uint64_t bytes = mib * kMiB;
  if (packed) return bench::print_packed_sleeps(bytes, rounds, as_json), 0;
  const std::vector<uint64_t> sizes = region_sizes(bytes, regions);
  if (steps) return print_steps(sizes, bytes, rounds), 0;
  Torpor kept(sizes, true);
  Torpor returning(sizes, false);
  Direct loop(sizes, {});
  Direct ceiling({bytes}, {.threads = bench::cores(), .keep_host_memory = true});
  Timing kept_times, returning_times, loop_times, ceiling_times;
  for (int round = 0; round <= rounds; ++round) {
    if (round == 1) {
      for (Timing* timing : {&kept_times, &returning_times, &loop_times, &ceiling_times}) timing->forget();
    }
    kept_times.run(kept);
    loop_times.run(loop);
    ceiling_times.run(ceiling);
    returning_times.run(returning);
  }
  // The first cycle of each, the arena prefaulted before.
  std::vector<double> armed_times, unchanged_times;
  Timing first_torpor, first_loop;
  for (int round = 0; round <= std::min(rounds, 3); ++round) {
    if (round == 1) {
      for (Timing* timing : {&first_torpor, &first_loop}) timing->forget();
    }
    Torpor torpor(sizes, true);
    armed_times.push_back(seconds([&] { torpor.prefault(bytes + 64 * kMiB); }));
    first_torpor.run(torpor);
    Direct fresh(sizes, {});
    first_loop.run(fresh);
  }
  uint64_t moved = 0;
  for (int round = 0; round <= rounds; ++round) {
    unchanged_times.push_back(seconds([&] { moved = kept.sleep_unchanged().copied_bytes; }));
    kept.wake();
  }
  const bench::KvSleeps kv = bench::sleep_kv_again(bytes, rounds);
  const bench::DiskSleeps disk = bench::sleep_to_disk_again(bytes / 4, rounds);
  const BroughtUp up = prefaulted(bytes, rounds);
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &files);
  }
  constexpr uint64_t kFew = 1000;
  constexpr uint64_t kMany = 10'000;
  const double few = empty_cycle(kFew, rounds);
  const double many = empty_cycle(kMany, rounds);

  const auto rate = [&](const std::vector<double>& times) { return static_cast<double>(bytes) / 1e9 / median(times); };
  nlohmann::ordered_json json = {
      {"bytes", bytes}, {"regions", sizes.size()}, {"rounds", rounds}, {"unit", "GB/s, median"}};
  for (const auto& [name, member] : {std::pair("sleep", &Timing::sleep), std::pair("wake", &Timing::wake)}) {
    const double ours = rate(kept_times.*member);
    json[name] = {{"torpor", ours},
                  {"torpor_returning_host_memory", rate(returning_times.*member)},
                  {"baseline", rate(loop_times.*member)},
                  {"ceiling", rate(ceiling_times.*member)},
                  {"times_baseline", ours / rate(loop_times.*member)},
                  {"of_ceiling", ours / rate(ceiling_times.*member)}};
  }
  json["first_sleep"] = {{"torpor", rate(first_torpor.sleep)},
                         {"baseline", rate(first_loop.sleep)},
                         {"times_baseline", rate(first_torpor.sleep) / rate(first_loop.sleep)},
                         {"arena_seconds_before", median(armed_times)}};
  json["first_wake"] = {{"torpor", rate(first_torpor.wake)},
                        {"baseline", rate(first_loop.wake)},
                        {"times_baseline", rate(first_torpor.wake) / rate(first_loop.wake)}};
  json["unchanged_sleep"] = {{"seconds", median(unchanged_times)},
                             {"bytes_moved", moved},
                             {"times_baseline", median(loop_times.sleep) / median(unchanged_times)}};
  for (const auto& [name, sleep] :
       {std::pair("first", &kv.first), std::pair("second", &kv.second), std::pair("after_steps", &kv.after_steps)}) {
    json["kv_sleep"][name] = {{"seconds", median(sleep->seconds)},
                              {"bytes_moved", sleep->bytes},
                              {"times_first", median(kv.first.seconds) / median(sleep->seconds)},
                              {"times_baseline", median(loop_times.sleep) / median(sleep->seconds)},
                              {"cpu_seconds", median(sleep->cpu)},
                              {"times_baseline_cpu", median(loop_times.sleep_cpu) / median(sleep->cpu)},
                              {"of_ceiling", median(kv.given_back.seconds) / median(sleep->seconds)}};
  }
  for (const auto& [name, sleep] : {std::pair("first", &disk.first), std::pair("second", &disk.second),
                                    std::pair("after_steps", &disk.after_steps)}) {
    json["disk_sleep"][name] = {{"seconds", median(sleep->seconds)},
                                {"bytes_moved", sleep->bytes},
                                {"times_first", median(disk.first.seconds) / median(sleep->seconds)},
                                {"of_ceiling", median(disk.nothing.seconds) / median(sleep->seconds)}};
  }
  json["arena"] = {{"seconds", up.arena},
                   {"method", up.method},
                   {"baseline", up.populate},
                   {"times_baseline", up.populate / up.arena}};
  json["no_bytes"] = {{"us_per_region_of_1000", few / kFew * 1e6}, {"us_per_region_of_10000", many / kMany * 1e6}};
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  fmt::print("{} MiB in {} regions, median of {} rounds, GB/s\n", mib, sizes.size(), rounds);
  fmt::print("{:<6} {:>9} {:>22} {:>9} {:>9}   {}\n", "", "torpor", "(arena given back)", "loop", "ceiling",
             "torpor to loop, to ceiling");
  for (const char* name : {"sleep", "wake"}) {
    const auto& row = json[name];
    fmt::print("{:<6} {:>9.2f} {:>22.2f} {:>9.2f} {:>9.2f}   {:.2f} x, {:.0f} %\n", name, row["torpor"].get<double>(),
               row["torpor_returning_host_memory"].get<double>(), row["baseline"].get<double>(),
               row["ceiling"].get<double>(), row["times_baseline"].get<double>(),
               100 * row["of_ceiling"].get<double>());
  }
  fmt::print(
      "first sleep {:.2f}, loop {:.2f}: {:.2f} x, with an arena that took {:.2f} s before; first wake {:.2f}, loop "
      "{:.2f}: {:.2f} x\n",
      rate(first_torpor.sleep), rate(first_loop.sleep), rate(first_torpor.sleep) / rate(first_loop.sleep),
      median(armed_times), rate(first_torpor.wake), rate(first_loop.wake),
      rate(first_torpor.wake) / rate(first_loop.wake));
  fmt::print("sleep of what did not change: {:.1f} ms, {} bytes moved, {:.0f} times as fast as the loop\n",
             1e3 * median(unchanged_times), moved, median(loop_times.sleep) / median(unchanged_times));
  fmt::print(
      "KV in blocks: first sleep {:.1f} ms, {} bytes moved; second, after no step, {:.2f} ms, {} bytes, {:.0f} x; "
      "after steps {:.1f} ms, {} bytes, {:.0f} x; giving the memory back alone {:.2f} ms; the loop {:.0f} ms; of CPU "
      "the "
      "second takes {:.2f} ms, giving back {:.2f}, the loop {:.0f}\n",
      1e3 * median(kv.first.seconds), kv.first.bytes, 1e3 * median(kv.second.seconds), kv.second.bytes,
      median(kv.first.seconds) / median(kv.second.seconds), 1e3 * median(kv.after_steps.seconds), kv.after_steps.bytes,
      median(kv.first.seconds) / median(kv.after_steps.seconds), 1e3 * median(kv.given_back.seconds),
      1e3 * median(loop_times.sleep), 1e3 * median(kv.second.cpu), 1e3 * median(kv.given_back.cpu),
      1e3 * median(loop_times.sleep_cpu));
  fmt::print(
      "to disk, {} MiB: first sleep {:.0f} ms; second, after no step, {:.1f} ms, {} bytes moved, {:.0f} x; after steps "
      "{:.1f} ms, {} bytes, {:.0f} x; files of a page made durable and renamed {:.1f} ms\n",
      mib / 4, 1e3 * median(disk.first.seconds), 1e3 * median(disk.second.seconds), disk.second.bytes,
      median(disk.first.seconds) / median(disk.second.seconds), 1e3 * median(disk.after_steps.seconds),
      disk.after_steps.bytes, median(disk.first.seconds) / median(disk.after_steps.seconds),
      1e3 * median(disk.nothing.seconds));
  fmt::print("arena up in {:.3f} s ({}), MAP_POPULATE {:.3f} s: {:.1f} x\n", up.arena, up.method, up.populate,
             up.populate / up.arena);
  fmt::print("a sleep and a wake without bytes: {:.1f} us a region of 1,000, {:.1f} of 10,000\n", few / kFew * 1e6,
             many / kMany * 1e6);
  return 0;
}
