// SPDX-License-Identifier: Apache-2.0
// Scattered KV blocks from the device to host memory, as a sleep or an offload copies them: with a digest of every
// block.
//
// Ceiling: one big memcpy of as many bytes, on all cores. Baseline: block after block, each copied, awaited and hashed.
// In between, to tell what bounds it: the same pieces into the same slots by all cores and nothing else, by memcpy,
// past the cache, and past the cache with digests. And what the digest costs: copying with it in one pass, beside the
// plain copy of the same pieces, and beside copying first and hashing then. Interleaved, median of the rounds, after
// one that only warms; all memory is touched before.
#include <iostream>
#include <random>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "allocator/host_device.h"
#include "base/copy.h"
#include "base/units.h"
#include "kvcache/kv_layout.h"
#include "offload/host_store.h"
#include "offload/transfer_engine.h"
#include "tools/bench/bench.h"

namespace {

using namespace torpor;
using bench::median;
using bench::must;
using bench::seconds;

struct Model {
  const char* name;
  uint32_t layers;
  uint64_t token_bytes;  // of keys and values, one layer, bfloat16
};
constexpr Model kSmall{"135M", 30, 3 * 64 * 2 * 2};
constexpr Model kLarge{"70B", 80, 8 * 128 * 2 * 2};

ChunkPlan plan_of(const KvLayout& layout, int32_t block, uint64_t slot) {
  return {.key = {.kind = ChunkKind::kKvBlock, .tag = "kv_cache", .index = slot},
          .pieces = layout.pieces_of(static_cast<uint32_t>(block))};
}

class Case {
 public:
  Case(const Model& model, uint64_t block_tokens, bool layer_outermost, uint64_t wanted_bytes)
      : model_(model), block_tokens_(block_tokens), layer_outermost_(layer_outermost) {
    const uint64_t piece = block_tokens * model.token_bytes;
    const uint64_t block = piece * model.layers;
    const uint64_t moved = std::max<uint64_t>(4, wanted_bytes / block);
    const uint64_t total = 2 * moved;
    bytes_ = moved * block;
    device_ = must(make_host_device());
    size_ = align_up(total * block, device_->granularity());
    address_ = must(device_->reserve(size_));
    memory_ = must(device_->create(size_));
    must(device_->map(address_, memory_));
    must(device_->set_access(address_, size_, Access::kReadWrite));
    std::memset(reinterpret_cast<void*>(address_), 3, size_);  // NOLINT(performance-no-int-to-ptr)
    layout_ = {.num_blocks = static_cast<uint32_t>(total),
               .tensors = {{.address = address_,
                            .layers = model.layers,
                            .layer_stride = layer_outermost ? total * piece : piece,
                            .block_stride = layer_outermost ? piece : block,
                            .block_bytes = piece}}};
    arena_ = must(HostArena::create());
    const auto slots = static_cast<int32_t>(moved);
    store_ = must(HostStore::create(*arena_, {.slots = slots, .slot_bytes = block}));
    transfers_ = must(TransferEngine::create(*device_, *arena_));
    std::vector<int32_t> ids(total);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(1));
    for (uint64_t slot = 0; slot < moved; ++slot) plans_.push_back(plan_of(layout_, ids[slot], slot));
    stream_ = must(device_->create_stream());
    flat_ = std::make_unique<bench::WarmMemory>(bytes_);
  }
  ~Case() {
    must(device_->destroy_stream(stream_));
    transfers_.reset();
    must(device_->unmap(address_, size_));
    must(device_->release(memory_));
    must(device_->free_reservation(address_));
  }

  void torpor() {
    Job job{.store = store_.get(), .priority = TransferPriority::kSleep, .copy_by = CopyBy::kFastest};
    for (const ChunkPlan& plan : plans_)
      job.chunks.push_back({.plan = &plan, .slot = static_cast<StoreSlot>(plan.key.index)});
    must(transfers_->wait(must(transfers_->submit(std::move(job)))).status);
  }
  void ceiling() {
    bench::on_all_cores([&](uint64_t part, uint64_t parts) {
      const uint64_t begin = bytes_ * part / parts;
      std::memcpy(flat_->bytes().data() + begin, reinterpret_cast<std::byte*>(address_) + begin,
                  bytes_ * (part + 1) / parts - begin);  // NOLINT(performance-no-int-to-ptr)
    });
  }
  // What torpor copies, into the same slots, by all cores and nobody else: no jobs, no batches, no threads to wait for.
  enum class How : uint8_t { kMemcpy, kPastCache, kDigested };
  void pieces(How how) {
    bench::on_all_cores([&](uint64_t part, uint64_t parts) {
      BulkCopy bulk(bytes_);
      const size_t end = plans_.size() * (part + 1) / parts;
      for (size_t slot = plans_.size() * part / parts; slot < end; ++slot) {
        std::span<std::byte> to = store_->view({.offset = slot});
        StreamingDigest digest;
        for (const DevicePiece& piece : plans_[slot].pieces) {
          const std::span<const std::byte> from(reinterpret_cast<std::byte*>(piece.address),  // NOLINT
                                                piece.bytes);
          if (how == How::kMemcpy) std::memcpy(to.data(), from.data(), from.size());
          if (how == How::kPastCache) bulk.copy(to.first(from.size()), from);
          if (how == How::kDigested) bulk.copy(to.first(from.size()), from, digest);
          to = to.subspan(from.size());
        }
        if (how == How::kDigested) (void)digest.finish();
      }
    });
  }
  void baseline() {
    for (size_t slot = 0; slot < plans_.size(); ++slot) {
      SavedChunk chunk{.bytes = plans_[slot].bytes(), .offset = slot};
      const std::span<std::byte> place = must(store_->place(chunk));
      uint64_t at = 0;
      for (const DevicePiece& piece : plans_[slot].pieces) {
        const Copy copy{piece.address, place.data() + at, piece.bytes};
        must(device_->copy_async(stream_, Direction::kDeviceToHost, {&copy, 1}));
        at += piece.bytes;
      }
      (void)device_->wait(must(device_->record(stream_)));
      must(store_->placed(static_cast<StoreSlot>(slot), digest_of(place)));
    }
  }
  nlohmann::ordered_json row(int rounds) {
    const std::pair<const char*, std::function<void()>> contestants[] = {
        {"torpor", [&] { torpor(); }},
        {"one_memcpy", [&] { ceiling(); }},
        {"pieces", [&] { pieces(How::kMemcpy); }},
        {"pieces_past_cache", [&] { pieces(How::kPastCache); }},
        {"pieces_digested", [&] { pieces(How::kDigested); }},
        {"per_block", [&] { baseline(); }}};
    std::map<std::string, std::vector<double>> taken, cpu;
    for (int round = 0; round <= rounds; ++round) {
      for (const auto& [name, work] : contestants) {
        const double began = bench::cpu_seconds();
        const double wall = seconds(work);
        const double used = bench::cpu_seconds() - began;
        if (round > 0) taken[name].push_back(wall), cpu[name].push_back(used);
      }
    }
    const auto gigabytes = static_cast<double>(bytes_) / 1e9;
    const auto rate = [&](const char* name) { return gigabytes / median(taken.at(name)); };
    nlohmann::ordered_json by_cpu;
    for (const auto& [name, work] : contestants) by_cpu[name] = gigabytes / median(cpu.at(name));
    return {{"model", model_.name},
            {"block_tokens", block_tokens_},
            {"layout", layer_outermost_ ? "layer outermost" : "block outermost"},
            {"blocks", plans_.size()},
            {"piece_bytes", plans_[0].pieces[0].bytes},
            {"bytes", bytes_},
            {"torpor", rate("torpor")},
            {"baseline", rate("per_block")},
            {"ceiling", rate("one_memcpy")},
            {"a_second_of_cpu", by_cpu},
            {"times_baseline", rate("torpor") / rate("per_block")},
            {"of_ceiling", rate("torpor") / rate("one_memcpy")}};
  }

 private:
  const Model model_;
  const uint64_t block_tokens_;
  const bool layer_outermost_;
  uint64_t bytes_ = 0;
  uint64_t size_ = 0;
  std::unique_ptr<DeviceMemory> device_;
  DeviceAddress address_ = 0;
  PhysicalId memory_{};
  KvLayout layout_;
  std::unique_ptr<HostArena> arena_;
  std::unique_ptr<HostStore> store_;
  std::unique_ptr<TransferEngine> transfers_;
  std::vector<ChunkPlan> plans_;
  StreamId stream_{};
  std::unique_ptr<bench::WarmMemory> flat_;
};

// Copies of 4 MiB pieces: with the digest in one pass, plainly in the same way, and plainly with the digest taken
// afterwards.
nlohmann::ordered_json digest_rows(uint64_t bytes, int rounds) {
  const bench::WarmMemory from(bytes), to(bytes);
  constexpr uint64_t kPiece = 4 * kMiB;
  const auto in_pieces = [&](const std::function<void(std::span<std::byte>, std::span<const std::byte>)>& work) {
    return seconds([&] {
      bench::on_all_cores([&](uint64_t part, uint64_t parts) {
        for (uint64_t at = part * kPiece; at + kPiece <= bytes; at += parts * kPiece)
          work(to.bytes().subspan(at, kPiece), from.bytes().subspan(at, kPiece));
      });
    });
  };
  std::vector<double> one_pass, plain, past_cache, then_hash, all_then_hash;
  for (int round = 0; round <= rounds; ++round) {
    const double a = in_pieces([](auto target, auto source) {
      StreamingDigest digest;
      BulkCopy(source.size()).copy(target, source, digest);
      (void)digest.finish();
    });
    const double b =
        in_pieces([](auto target, auto source) { std::memcpy(target.data(), source.data(), source.size()); });
    const double c = in_pieces([](auto target, auto source) { BulkCopy(source.size()).copy(target, source); });
    const double d = in_pieces([](auto target, auto source) {
      std::memcpy(target.data(), source.data(), source.size());
      (void)digest_of(target);
    });
    const double e =
        in_pieces([](auto target, auto source) { std::memcpy(target.data(), source.data(), source.size()); }) +
        in_pieces([](auto target, auto) { (void)digest_of(target); });
    if (round > 0)
      one_pass.push_back(a), plain.push_back(b), past_cache.push_back(c), then_hash.push_back(d),
          all_then_hash.push_back(e);
  }
  const auto rate = [&](const std::vector<double>& times) { return static_cast<double>(bytes) / 1e9 / median(times); };
  return {{"bytes", bytes},
          {"torpor", rate(one_pass)},
          {"baseline_copy_then_hash", rate(all_then_hash)},
          {"piece_by_piece_copy_then_hash", rate(then_hash)},
          {"memcpy", rate(plain)},
          {"ceiling_copy_past_cache", rate(past_cache)},
          {"times_baseline", rate(one_pass) / rate(all_then_hash)},
          {"times_piece_by_piece", rate(one_pass) / rate(then_hash)},
          {"of_memcpy", rate(one_pass) / rate(plain)},
          {"of_ceiling", rate(one_pass) / rate(past_cache)}};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Scattered KV blocks to host memory, with digests, beside one memcpy and beside block after block."};
  uint64_t mib = 256;
  int rounds = 5;
  bool as_json = false;
  app.add_option("--mib", mib, "bytes moved in each case")->capture_default_str()->check(CLI::Range(16, 16384));
  app.add_option("--rounds", rounds, "measured rounds")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_flag("--json", as_json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);
  nlohmann::ordered_json json = {
      {"rounds", rounds}, {"unit", "GB/s, median"}, {"blocks", nlohmann::ordered_json::array()}};
  for (const Model& model : {kSmall, kLarge}) {
    for (const uint64_t tokens : {16, 32, 128}) {
      for (const bool layer_outermost : {true, false})
        json["blocks"].push_back(Case(model, tokens, layer_outermost, mib * kMiB).row(rounds));
    }
  }
  json["digest"] = digest_rows(mib * kMiB, rounds);
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  fmt::print("scattered KV blocks to host memory with digests, {} MiB each, median of {} rounds, GB/s\n", mib, rounds);
  fmt::print("{:>5} {:>6} {:<16} {:>9} {:>7} {:>9} {:>7}   {}\n", "model", "tokens", "layout", "piece", "torpor",
             "per block", "memcpy", "torpor to per block, to one memcpy");
  for (const auto& row : json["blocks"]) {
    fmt::print("{:>5} {:>6} {:<16} {:>7.0f} K {:>7.2f} {:>9.2f} {:>7.2f}   {:.2f} x, {:.0f} %\n",
               row["model"].get<std::string>(), row["block_tokens"].get<int>(), row["layout"].get<std::string>(),
               row["piece_bytes"].get<double>() / 1024, row["torpor"].get<double>(), row["baseline"].get<double>(),
               row["ceiling"].get<double>(), row["times_baseline"].get<double>(),
               100 * row["of_ceiling"].get<double>());
  }
  fmt::print(
      "GB a second of CPU, all threads together: one memcpy; the pieces by memcpy, past the cache, with digests; "
      "torpor\n");
  for (const auto& row : json["blocks"]) {
    const auto& cpu = row["a_second_of_cpu"];
    const auto rate = [&](const char* name) { return cpu[name].get<double>(); };
    fmt::print("{:>5} {:>6} {:<16} {:>7.0f} K {:>7.2f} {:>7.2f} {:>7.2f} {:>7.2f} {:>7.2f}\n",
               row["model"].get<std::string>(), row["block_tokens"].get<int>(), row["layout"].get<std::string>(),
               row["piece_bytes"].get<double>() / 1024, rate("one_memcpy"), rate("pieces"), rate("pieces_past_cache"),
               rate("pieces_digested"), rate("torpor"));
  }
  const auto& d = json["digest"];
  const auto number = [&](const char* key) { return d[key].get<double>(); };
  fmt::print(
      "copy with digest in one pass {:.2f} GB/s: {:.2f} x copy all then hash all ({:.2f}), {:.2f} x copy then hash "
      "each 4 MiB ({:.2f}),\n  {:.0f} % of memcpy ({:.2f}), {:.0f} % of copying past the cache ({:.2f})\n",
      number("torpor"), number("times_baseline"), number("baseline_copy_then_hash"), number("times_piece_by_piece"),
      number("piece_by_piece_copy_then_hash"), 100 * number("of_memcpy"), number("memcpy"), 100 * number("of_ceiling"),
      number("ceiling_copy_past_cache"));
  return 0;
}
