// SPDX-License-Identifier: Apache-2.0
// Sleeps and wakes over a link with an H100's prices, all slowed by one factor (paced_device.h has the table): how much
// of the link the real save and restore code reaches, and where the rest of the time goes.
//
// Everything is simulated but the code: figures say what overlaps and what does not, and nothing of a GPU. Baseline of
// each row: its bytes, by the link's rate. Rounds are interleaved, after one that only warms.
#include <iostream>
#include <random>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "engine/rank_service.h"
#include "engine/tag_sleep.h"
#include "tools/bench/bench.h"
#include "tools/bench/paced_device.h"

namespace {

using namespace torpor;
using bench::Charges;
using bench::median;
using bench::must;
using bench::PacedDevice;
using bench::Prices;
using Json = nlohmann::ordered_json;

constexpr uint64_t kRegion = 64 * kMiB;  // as torch's larger segments
const std::vector<std::string> kWeights{"weights"};
const std::vector<std::string> kKv{"kv_cache"};

struct Setting {
  Prices prices;
  int threads = 8;
  uint64_t pin_step_bytes = 0;
};

// A measured operation: seconds and charges of each round.
struct Row {
  std::string name;
  uint64_t bytes = 0;  // that should be copied
  std::vector<double> seconds{};
  std::vector<Charges> charges{};
  std::map<std::string, std::vector<double>> phases{};
};

class Rank {
 public:
  Rank(const Setting& setting, uint64_t gather_below_bytes, bool keep_backup) {
    auto device = std::make_unique<PacedDevice>(bench::PacedOptions{
        .prices = setting.prices, .gather_below_bytes = gather_below_bytes, .pin_step_bytes = setting.pin_step_bytes});
    device_ = device.get();
    memory_ = must(RankMemory::create(
        std::move(device), linux_file_system(),
        {.arena_prefault_bytes = 0, .threads = setting.threads, .keep_backup = keep_backup, .retain_kv_bytes = 0}));
  }
  RankMemory& memory() { return *memory_; }
  Charges charges() const { return device_->charges(); }
  // Prefault and pin the arena for so many saved bytes.
  void ready(uint64_t bytes, uint64_t chunks) { must(memory_->arena().prefault(bytes + chunks * kPage)); }
  DeviceAddress allocate(const std::string& tag, const std::string& name, uint64_t bytes, int value) {
    const DeviceAddress address = must(memory_->allocate(tag, name, bytes));
    std::memset(reinterpret_cast<void*>(address), value, bytes);  // NOLINT(performance-no-int-to-ptr)
    return address;
  }

 private:
  std::unique_ptr<RankMemory> memory_;
  PacedDevice* device_ = nullptr;  // memory_ has it
};

void measure(Rank& rank, Row& row, bool counts, const std::function<TagMove()>& work) {
  const Charges before = rank.charges();
  TagMove move;
  const double taken = bench::seconds([&] { move = work(); });
  if (!counts) return;
  row.seconds.push_back(taken);
  row.charges.push_back(rank.charges() - before);
  for (const auto& [phase, seconds] : move.seconds) row.phases[phase].push_back(seconds);
  if (move.copied_bytes != row.bytes)
    must(
        Status(Error{.code = Code::kInternal,
                     .what = fmt::format("{}: {} bytes were copied, not {}", row.name, move.copied_bytes, row.bytes)}));
}

class Weights {
 public:
  Weights(const Setting& setting, uint64_t bytes)
      : setting_(setting),
        bytes_(bytes),
        rows_{Row{"first sleep, arena not ready", bytes}, Row{"first sleep, arena ready", bytes},
              Row{"next sleep", bytes}, Row{"wake", bytes}, Row{"next sleep, unchanged", 0}} {}

  void round(bool counts) {
    for (const bool ready : {false, true}) {
      Rank rank(setting_, 0, /*keep_backup=*/true);
      for (uint64_t at = 0; at < bytes_; at += kRegion)
        rank.allocate("weights", std::to_string(at), std::min(kRegion, bytes_ - at), 7);
      if (ready) rank.ready(bytes_, bytes_ / kMiB);
      const auto sleep = [&] { return must(TagSleep(rank.memory()).sleep({}, kWeights)); };
      const auto wake = [&] { return must(TagSleep(rank.memory()).wake({})); };
      measure(rank, rows_[ready ? 1 : 0], counts, sleep);
      if (!ready) {
        (void)wake();
        continue;
      }
      measure(rank, rows_[3], counts, wake);
      rank.memory().mark_dirty("weights");
      measure(rank, rows_[2], counts, sleep);
      (void)wake();
      measure(rank, rows_[4], counts, sleep);
      (void)wake();
    }
  }
  const std::vector<Row>& rows() const { return rows_; }

 private:
  const Setting setting_;
  const uint64_t bytes_;
  std::vector<Row> rows_;
};

// Every second block of a KV cache, in no order, layer outermost: each block is a piece in each layer.
class Pieces {
 public:
  Pieces(const Setting& setting, uint64_t wanted_bytes, uint64_t piece_bytes, bool by_kernel)
      : rank_(setting, by_kernel ? ~uint64_t{0} : 0, false) {
    const uint64_t layers = std::clamp<uint64_t>(2 * kMiB / piece_bytes, 1, 64);
    const uint64_t block_bytes = piece_bytes * layers;
    const auto moved = static_cast<uint32_t>(std::max<uint64_t>(4, wanted_bytes / block_bytes));
    const uint32_t blocks = 2 * moved;
    const uint64_t bytes = blocks * block_bytes;
    const DeviceAddress address = rank_.allocate("kv_cache", "kv", bytes, 5);
    must(rank_.memory().set_kv_layout("kv_cache", {.num_blocks = blocks,
                                                   .tensors = {{.address = address,
                                                                .layers = static_cast<uint32_t>(layers),
                                                                .layer_stride = piece_bytes * blocks,
                                                                .block_stride = piece_bytes,
                                                                .block_bytes = piece_bytes}}}));
    for (uint32_t block = 0; block < blocks; block += 2) save_.blocks.push_back(static_cast<int32_t>(block));
    std::shuffle(save_.blocks.begin(), save_.blocks.end(), std::mt19937(1));
    save_.tags = kKv;
    rank_.ready(moved * block_bytes, moved);
    const std::string name =
        fmt::format("{} KiB pieces, {}", piece_bytes / kKiB, by_kernel ? "kernel" : "copy engines");
    sleep_ = {name + ", sleep", moved * block_bytes};
    wake_ = {name + ", wake", moved * block_bytes};
  }
  void round(bool counts) {
    ++save_.steps;
    save_.versions.clear();
    for (size_t i = 0; i < save_.blocks.size(); ++i) save_.versions.push_back(++last_version_);  // all were written
    measure(rank_, sleep_, counts, [&] {
      const uint64_t copied = call(orders::Save(save_)).bytes;
      call(orders::Detach{.tags = kKv});
      return TagMove{.copied_bytes = copied};
    });
    measure(rank_, wake_, counts, [&] {
      const uint64_t copied = call(orders::Restore{.tags = kKv}).bytes;
      call(orders::Finish{.tags = kKv});
      return TagMove{.copied_bytes = copied};
    });
  }
  const Row& sleep() const { return sleep_; }
  const Row& wake() const { return wake_; }

 private:
  template <class Order>
  typename Order::Reply call(const Order& order) {
    return must(decode_reply<Order>(RankService(rank_.memory()).call(encode_order(order))));
  }
  Rank rank_;
  orders::Save save_;
  uint64_t last_version_ = 0;
  Row sleep_, wake_;
};

double least(const Row& row) { return *std::min_element(row.seconds.begin(), row.seconds.end()); }

double of_link(const Row& row, const Prices& prices) {
  return static_cast<double>(row.bytes) / prices.link_rate / median(row.seconds);
}

Json json_of(const Row& row, const Prices& prices) {
  Json json = {{"row", row.name}, {"bytes", row.bytes}, {"seconds", median(row.seconds)}};
  json["least_seconds"] = least(row);  // other work on this machine only adds to it
  json["baseline_seconds"] = static_cast<double>(row.bytes) / prices.link_rate;
  json["of_link"] = of_link(row, prices);
  json["best_of_link"] = static_cast<double>(row.bytes) / prices.link_rate / least(row);
  const auto charged = [&](const char* name, int64_t Charges::*what) {
    std::vector<double> seconds;
    for (const Charges& each : row.charges) seconds.push_back(1e-9 * static_cast<double>(each.*what));
    json["charged_seconds"][name] = median(seconds);
  };
  charged("link", &Charges::link);
  charged("pieces", &Charges::pieces);
  charged("copy_calls", &Charges::copy_calls);
  charged("pins", &Charges::pins);
  charged("maps", &Charges::maps);
  charged("zeroing", &Charges::zeroing);
  charged("digests", &Charges::digests);
  charged("waited_for_driver", &Charges::waited_for_driver);
  charged("waited_for_link", &Charges::waited_for_link);
  for (const auto& [phase, seconds] : row.phases) json["phase_seconds"][phase] = median(seconds);
  return json;
}

void print(const Json& row) {
  const auto charged = [&](const char* name) { return row["charged_seconds"][name].get<double>(); };
  const uint64_t bytes = row["bytes"];
  const auto share = [&](const char* name) {
    return bytes == 0 ? "-" : fmt::format("{:.2f}", row[name].get<double>());
  };
  fmt::print("{:<36} {:>7.3f} {:>6} {:>6} {:>7.3f} {:>7.3f} {:>6.3f} {:>7.3f} {:>6.3f} {:>7.3f} {:>7.3f} {:>7.3f}\n",
             row["row"].get<std::string>(), row["seconds"].get<double>(), share("of_link"), share("best_of_link"),
             charged("link"), charged("pieces"), charged("copy_calls"), charged("pins"), charged("maps"),
             charged("digests"), charged("waited_for_driver"), charged("waited_for_link"));
}

Json table_of(const Prices& prices) {
  return {{"link_bytes_per_second", prices.link_rate},
          {"kernel_down_bytes_per_second", prices.kernel_down_rate},
          {"kernel_up_bytes_per_second", prices.kernel_up_rate},
          {"copy_call_ns", prices.copy_call_ns},
          {"piece_ns", prices.piece_ns},
          {"pin_bytes_per_second", prices.pin_rate},
          {"reserve_ns", prices.reserve_ns},
          {"create_ns", prices.create_ns},
          {"map_ns", prices.map_ns},
          {"set_access_ns", prices.set_access_ns},
          {"unmap_ns", prices.unmap_ns},
          {"zero_bytes_per_second", prices.zero_rate},
          {"digest_bytes_per_second_a_thread", prices.digest_rate}};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Sleeps and wakes over a link with an H100's prices, slowed by one factor; simulated."};
  uint64_t mib = 256;
  uint64_t sweep_mib = 48;
  uint64_t pin_step_mib = 1024;
  int rounds = 5;
  int threads = 8;
  double link = 0.5;
  bool as_json = false;
  app.add_option("--mib", mib, "of weights; half of it of KV")->capture_default_str()->check(CLI::Range(64, 1 << 20));
  app.add_option("--sweep-mib", sweep_mib, "of KV at each piece size, by copy engines and by the kernel; 0: none")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 20));
  app.add_option("--rounds", rounds, "measured rounds")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_option("--threads", threads, "that copy")->capture_default_str()->check(CLI::Range(1, 256));
  app.add_option("--pin-step-mib", pin_step_mib, "pinned at a time")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--link", link, "GB/s of the slowed link; memory here must be much faster")
      ->capture_default_str()
      ->check(CLI::Range(0.05, 10.0));
  app.add_flag("--json", as_json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);

  log().set_level(LogLevel::kWarn);
  const Prices full;
  const double factor = full.link_rate / (link * 1e9);
  const Setting setting{.prices = full.slowed(factor), .threads = threads, .pin_step_bytes = pin_step_mib * kMiB};
  Weights weights(setting, mib * kMiB);
  Pieces blocks(setting, mib * kMiB / 2, 64 * kKiB, false);
  Pieces latent(setting, mib * kMiB / 2, 18 * kKiB, false);
  std::vector<std::unique_ptr<Pieces>> sweep;  // of each size by copy engines, then by the kernel
  const std::vector<uint64_t> sizes{4, 18, 64, 128, 256, 512};
  for (const uint64_t size : sweep_mib == 0 ? std::vector<uint64_t>{} : sizes) {
    for (const bool by_kernel : {false, true})
      sweep.push_back(std::make_unique<Pieces>(setting, sweep_mib * kMiB, size * kKiB, by_kernel));
  }
  for (int round = 0; round <= rounds; ++round) {
    weights.round(round > 0);
    blocks.round(round > 0);
    latent.round(round > 0);
    for (const auto& each : sweep) each->round(round > 0);
  }

  Json json = {{"simulated", true},
               {"slowed_by", factor},
               {"rounds", rounds},
               {"threads", threads},
               {"prices_at_full_speed", table_of(full)},
               {"rows", Json::array()},
               {"kernel", Json::array()}};
  for (const Row& row : weights.rows()) json["rows"].push_back(json_of(row, setting.prices));
  for (const Pieces* each : {&blocks, &latent}) {
    json["rows"].push_back(json_of(each->sleep(), setting.prices));
    json["rows"].push_back(json_of(each->wake(), setting.prices));
  }
  for (size_t i = 0; i + 1 < sweep.size(); i += 2) {
    const auto both = [](const Pieces& each) { return median(each.sleep().seconds) + median(each.wake().seconds); };
    const auto best = [](const Pieces& each) { return least(each.sleep()) + least(each.wake()); };
    const Pieces& engines = *sweep[i];
    const Pieces& kernel = *sweep[i + 1];
    json["kernel"].push_back({{"piece_bytes", sizes[i / 2] * kKiB},
                              {"engines_down_of_link", of_link(engines.sleep(), setting.prices)},
                              {"kernel_down_of_link", of_link(kernel.sleep(), setting.prices)},
                              {"engines_up_of_link", of_link(engines.wake(), setting.prices)},
                              {"kernel_up_of_link", of_link(kernel.wake(), setting.prices)},
                              {"kernel_times_as_fast", both(engines) / both(kernel)},
                              {"kernel_sleeps_times_as_fast", least(engines.sleep()) / least(kernel.sleep())},
                              {"kernel_wakes_times_as_fast", least(engines.wake()) / least(kernel.wake())},
                              {"kernel_best_times_as_fast", best(engines) / best(kernel)}});
  }
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  fmt::print("simulated: an H100's prices slowed {:.0f} times, link {} GB/s; medians of {} rounds, {} threads\n",
             factor, link, rounds, threads);
  fmt::print("seconds and share of the link, median and best; then charged seconds, of all threads together\n");
  fmt::print("{:<36} {:>7} {:>6} {:>6} {:>7} {:>7} {:>6} {:>7} {:>6} {:>7} {:>7} {:>7}\n", "", "seconds", "median",
             "best", "link", "pieces", "calls", "pins", "maps", "digests", "driver", "waited");
  for (const Json& row : json["rows"]) print(row);
  if (!json["kernel"].empty()) {
    fmt::print("times as fast by the kernel as by the copy engines, best rounds; both together: medians\n");
    fmt::print("{:>8} {:>6} {:>6} {:>6} {:>8}\n", "pieces", "sleep", "wake", "both", "medians");
  }
  for (const Json& row : json["kernel"]) {
    const auto number = [&](const char* name) { return row[name].get<double>(); };
    fmt::print("{:>4} KiB {:>6.2f} {:>6.2f} {:>6.2f} {:>8.2f}\n", row["piece_bytes"].get<uint64_t>() / kKiB,
               number("kernel_sleeps_times_as_fast"), number("kernel_wakes_times_as_fast"),
               number("kernel_best_times_as_fast"), number("kernel_times_as_fast"));
  }
  return 0;
}
