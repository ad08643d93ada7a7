// The first token of an early wake, beside a wake that brings back everything before it.
//
// An engine of weights and twice as much KV, all of it of running requests, falls asleep to host memory, or to disk,
// and wakes, whole and early in turn. A token of a request is made by reading all of its KV and comparing it with what
// was there before the sleep. Told are, from the call of wake_up() on: when a whole wake returns, when the first
// request has its token, and when the last one has. Each round wakes both ways, after one that only warms.
#include <chrono>
#include <cstring>
#include <iostream>
#include <set>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <boost/filesystem.hpp>
#include <nlohmann/json.hpp>

#include "allocator/host_device.h"
#include "base/log.h"
#include "engine/rank_service.h"
#include "engine/sleep_controller.h"
#include "tools/bench/bench.h"

namespace {

using namespace torpor;
using bench::median;
using bench::must;

struct Shape {
  uint64_t kv_bytes = 0;
  uint64_t block_bytes = 0;
  int32_t requests = 0;
  uint64_t link_bytes_per_second = 0;
  int32_t blocks() const { return static_cast<int32_t>(kv_bytes / block_bytes); }
  int32_t blocks_each() const { return blocks() / requests; }
};

class Engine final : public EngineHooks {
 public:
  explicit Engine(const Shape& shape) : shape_(shape) {
    memory_ = must(RankMemory::create(must(make_host_device({.link_bytes_per_second = shape.link_bytes_per_second})),
                                      linux_file_system(), {.retain_kv_bytes = 0}));
    weights_ = must(memory_->allocate("weights", "all", shape.kv_bytes / 2));
    kv_ = must(memory_->allocate("kv_cache", "all", shape.kv_bytes));
    must(memory_->set_kv_layout("kv_cache", {.num_blocks = static_cast<uint32_t>(shape.blocks()),
                                             .tensors = {{.address = kv_,
                                                          .layers = 1,
                                                          .layer_stride = shape.kv_bytes,
                                                          .block_stride = shape.block_bytes,
                                                          .block_bytes = shape.block_bytes}}}));
    fill(at(weights_), shape.kv_bytes / 2, 1);
    for (int32_t block = 0; block < shape.blocks(); ++block) fill(block_at(block), shape.block_bytes, block);
  }

  // Tokens of the requests whose blocks are there, in their order, of those that have none yet.
  void step() {
    for (int32_t request = 0; request < shape_.requests; ++request) {
      if (done_.contains(request)) continue;
      const int32_t first = request * shape_.blocks_each();
      const auto late = late_.lower_bound(first);
      if (late != late_.end() && *late < first + shape_.blocks_each()) continue;
      for (int32_t block = first; block < first + shape_.blocks_each(); ++block) compare(block);
      done_.insert(request);
    }
  }
  size_t done() const { return done_.size(); }
  void forget_tokens() { done_.clear(); }
  void write_all() {  // every byte is copied every time
    ++steps_;
    memory_->mark_dirty("weights");
  }

  Result<std::vector<std::string>> unsupported() override { return std::vector<std::string>{}; }
  Result<int64_t> unfinished_requests() override { return shape_.requests; }
  Status quiesce(std::optional<double>) override { return ok(); }
  Status resume() override { return ok(); }
  Result<SchedulerCheckpoint> capture() override {
    SchedulerCheckpoint state;
    state.scheduler.policy = "fcfs";
    KvGroup group{.block_size = 16};
    state.kv.num_blocks = shape_.blocks();
    state.kv.null_block = -1;
    state.kv.steps = steps_;
    for (int32_t request = 0; request < shape_.requests; ++request) {
      const std::string id = fmt::format("r{:04}", request);
      KvTable table{.request = id, .num_cached_blocks = -1};
      for (int32_t i = 0; i < shape_.blocks_each(); ++i) {
        const int32_t block = request * shape_.blocks_each() + i;
        table.blocks.push_back(block);
        const Digest digest = digest_of(std::as_bytes(std::span(&block, 1)));
        const Bytes hash(digest.bytes.begin(), digest.bytes.end());
        state.kv.blocks.push_back({.id = block, .ref_count = 1, .hash = hash, .hash_tokens = 16});
        state.kv.prefix_index.push_back({hash, {block}});
      }
      group.tables.push_back(std::move(table));
      const auto tokens = static_cast<int32_t>(shape_.blocks_each() * 16);
      state.scheduler.requests.push_back({.id = id,
                                          .status = RequestStatus::kRunning,
                                          .prompt_token_ids = std::vector<int32_t>(static_cast<size_t>(tokens), 1),
                                          .num_computed_tokens = tokens,
                                          .max_tokens = 1});
      state.scheduler.running.push_back(id);
    }
    state.kv.groups = {std::move(group)};
    state.workers = {{.rank = 0}};
    return state;
  }
  Result<Fingerprint> fingerprint() override { return Fingerprint{{"engine", "bench"}}; }
  Status drop_requests(const std::string&) override { return ok(); }
  Status drop_prefix(const std::vector<int32_t>&) override { return ok(); }
  Status retire_prefix() override { return ok(); }
  Status release_derived() override { return ok(); }
  Status rebuild_derived() override { return ok(); }
  Status reconnect(const std::vector<WorkerSnapshot>&) override { return ok(); }
  Result<std::vector<FailedRequest>> restore(const EngineCheckpoint&) override { return std::vector<FailedRequest>{}; }
  Status forget_restored() override { return ok(); }
  HoldsBack holds_back() override { return HoldsBack::kAll; }
  Status hold_blocks(const std::vector<int32_t>& blocks) override {
    late_ = {blocks.begin(), blocks.end()};
    return ok();
  }
  Result<std::vector<std::string>> release_blocks(const ArrivedBlocks& blocks) override {
    if (!blocks.lost.empty() || !blocks.unproven.empty())
      return Error{.code = Code::kCorruption, .what = "blocks were lost"};
    for (const int32_t block : blocks.arrived) late_.erase(block);
    return std::vector<std::string>{};
  }
  Result<std::vector<Bytes>> call_ranks(const Bytes& order) override {
    return std::vector<Bytes>{RankService(*memory_).call(order)};
  }

 private:
  static std::byte* at(DeviceAddress address) {
    return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
  }
  std::byte* block_at(int32_t block) const { return at(kv_ + static_cast<uint64_t>(block) * shape_.block_bytes); }
  static void fill(std::byte* place, uint64_t bytes, int32_t seed) { std::memset(place, seed & 0xff, bytes); }
  void compare(int32_t block) const {
    const std::byte* const place = block_at(block);
    const bool same =
        place[0] == static_cast<std::byte>(block & 0xff) && std::memcmp(place, place + 1, shape_.block_bytes - 1) == 0;
    if (!same) must(Status(Error{.code = Code::kCorruption, .what = fmt::format("block {} is another one", block)}));
  }

  const Shape shape_;
  std::unique_ptr<RankMemory> memory_;
  DeviceAddress weights_ = 0;
  DeviceAddress kv_ = 0;
  std::set<int32_t> late_;
  std::set<int32_t> done_;
  uint64_t steps_ = 0;
};

struct Times {  // seconds from the call on
  std::vector<double> returned, first_token, last_token;
};

void cycle(Engine& engine, SleepController& controller, bool to_disk, bool early, Times& times) {
  engine.write_all();
  engine.forget_tokens();
  must(controller.sleep({.preserve_state = true, .to_disk = to_disk}));
  const auto began = std::chrono::steady_clock::now();
  const auto since = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count(); };
  const SleepReport report = must(controller.wake_up({.early = early}));
  times.returned.push_back(since());
  if (early == (report.late_blocks == 0)) must(Status(Error{.code = Code::kInternal, .what = "it did not wake so"}));
  engine.step();
  // A whole wake has all of its first tokens from one step: the first is there when one request was read.
  times.first_token.push_back(since());
  if (early) {
    for (int64_t left = 1; left > 0;) {
      left = must(controller.continue_wake(LateWait::kSome)).left;
      engine.step();
    }
  }
  times.last_token.push_back(since());
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"The first and the last token of an early wake, beside a wake that brings back everything first."};
  uint64_t mib = 1024;
  uint64_t block_kib = 512;
  int32_t requests = 64;
  int rounds = 7;
  double link = 0;
  bool to_disk = false;
  bool as_json = false;
  std::string directory = "/tmp";
  app.add_option("--mib", mib, "of KV; the weights are half of it")
      ->capture_default_str()
      ->check(CLI::Range(64, 1 << 20));
  app.add_option("--block-kib", block_kib, "of a block")->capture_default_str()->check(CLI::Range(4, 1 << 16));
  app.add_option("--requests", requests, "that run")->capture_default_str()->check(CLI::Range(1, 4096));
  app.add_option("--rounds", rounds, "measured rounds")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_option("--link", link, "GB/s of the link to the device; 0: as fast as memory")->capture_default_str();
  app.add_flag("--disk", to_disk, "sleep to disk");
  app.add_option("--directory", directory, "for checkpoints")->capture_default_str();
  app.add_flag("--json", as_json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);

  log().set_level(spdlog::level::warn);
  Shape shape{.kv_bytes = mib * kMiB,
              .block_bytes = block_kib * kKiB,
              .requests = requests,
              .link_bytes_per_second = static_cast<uint64_t>(link * 1e9)};
  if (shape.blocks_each() < 1)
    must(Status(Error{.code = Code::kInvalidArgument, .what = "fewer blocks than requests"}));
  shape.kv_bytes = static_cast<uint64_t>(shape.blocks_each()) * static_cast<uint64_t>(requests) * shape.block_bytes;
  const boost::filesystem::path place =
      boost::filesystem::path(directory) / boost::filesystem::unique_path("torpor-early-%%%%%%%%");
  boost::filesystem::create_directory(place);
  boost::filesystem::permissions(place, boost::filesystem::owner_all);
  Times whole, early;
  {
    Engine engine(shape);
    SleepController controller(engine, linux_file_system(), system_clock(), {.directory = place.string()});
    for (int round = 0; round <= rounds; ++round) {
      if (round == 1) whole = early = {};
      cycle(engine, controller, to_disk, false, whole);
      cycle(engine, controller, to_disk, true, early);
    }
  }
  boost::filesystem::remove_all(place);

  const double wake = median(whole.returned);
  const nlohmann::ordered_json json = {
      {"weights_bytes", shape.kv_bytes / 2},
      {"kv_bytes", shape.kv_bytes},
      {"requests", requests},
      {"from", to_disk ? "disk" : "host"},
      {"rounds", rounds},
      {"whole", {{"wake_seconds", wake}, {"last_token_seconds", median(whole.last_token)}}},
      {"early",
       {{"wake_seconds", median(early.returned)},
        {"first_token_seconds", median(early.first_token)},
        {"last_token_seconds", median(early.last_token)}}},
      {"first_token_of_whole_wake", median(early.first_token) / wake},
      {"last_token_of_whole", median(early.last_token) / median(whole.last_token)}};
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  fmt::print("{} MiB of weights, {} MiB of KV of {} requests, from {}; medians of {} rounds, ms\n",
             shape.kv_bytes / 2 / kMiB, shape.kv_bytes / kMiB, requests, to_disk ? "disk" : "host memory", rounds);
  fmt::print("{:<6} {:>8} {:>12} {:>11}\n", "", "wake_up", "first token", "last token");
  for (const auto& [name, times] : {std::pair("whole", &whole), std::pair("early", &early)}) {
    fmt::print("{:<6} {:>8.1f} {:>12.1f} {:>11.1f}\n", name, 1e3 * median(times->returned),
               1e3 * median(times->first_token), 1e3 * median(times->last_token));
  }
  fmt::print("first token {:.2f} of a whole wake, last token {:.2f} of the whole wake's\n",
             json["first_token_of_whole_wake"].get<double>(), json["last_token_of_whole"].get<double>());
  return 0;
}
