// SPDX-License-Identifier: Apache-2.0
// The state of a busy scheduler to bytes and back, C++ values on both sides, beside plain Cereal. Ceiling: copying as
// many bytes.
#include <malloc.h>

#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <span>
#include <sstream>
#include <thread>

#include <CLI/CLI.hpp>
#include <cereal/archives/binary.hpp>
#include <cereal/types/variant.hpp>
#include <nlohmann/json.hpp>

#include "checkpoint/archived_values.h"
#include "checkpoint/state_sections.h"
#include "tools/bench/bench.h"

// The same values through Cereal's own binary archive.
namespace cereal {
inline void save(BinaryOutputArchive&, const std::monostate&) {}
inline void load(BinaryInputArchive&, std::monostate&) {}
}  // namespace cereal
namespace torpor {
inline void save(cereal::BinaryOutputArchive& archive, const Value& value) { archive(value.data); }
inline void load(cereal::BinaryInputArchive& archive, Value& value) { archive(value.data); }
template <class Enum>
void save(cereal::BinaryOutputArchive& archive, const CheckedEnum<Enum>& item) {
  archive(static_cast<uint8_t>(item.value));
}
template <class Enum>
void load(cereal::BinaryInputArchive& archive, CheckedEnum<Enum>& item) {
  uint8_t raw = 0;
  archive(raw);
  item.value = static_cast<Enum>(raw);
}
}  // namespace torpor
#include <cereal/types/vector.hpp>

using namespace torpor;
using namespace torpor::bench;

namespace {

constexpr int32_t kBlock = 16;

// Prompts of 2K to 32K tokens, log-uniform; hashes of 32 bytes a full block; a prefix index with `entries` of them.
CapturedState busy(int running, int waiting, int entries) {
  std::mt19937_64 random(1);
  CapturedState state;
  state.scheduler.policy = "fcfs";
  KvGroup group{.block_size = kBlock};
  int32_t next = 1;
  for (int i = 0; i < running + waiting; ++i) {
    RequestState request{.id = fmt::format("{}-{:08x}", i, random() & 0xffffffff),
                         .status = i < running ? RequestStatus::kRunning : RequestStatus::kWaiting,
                         .max_tokens = 4096};
    request.prompt_token_ids.resize(
        static_cast<size_t>(2048 * std::pow(16.0, static_cast<double>(random() % 10000) / 10000)));
    for (int32_t& token : request.prompt_token_ids) token = static_cast<int32_t>(random() % 128000);
    const size_t full = request.prompt_token_ids.size() / kBlock;
    request.block_hash_bytes = 32;
    request.block_hashes.resize(full * 32);
    for (uint8_t& byte : request.block_hashes) byte = static_cast<uint8_t>(random());
    if (i < running) {
      request.num_computed_tokens = static_cast<int32_t>(full) * kBlock;
      KvTable table{.request = request.id, .num_cached_blocks = static_cast<int32_t>(full)};
      for (size_t b = 0; b < full; ++b) {
        table.blocks.push_back(next);
        const bool indexed = static_cast<int>(state.kv.prefix_index.size()) < entries;
        const Bytes hash = indexed ? Bytes(request.block_hashes.begin() + static_cast<std::ptrdiff_t>(b * 32),
                                           request.block_hashes.begin() + static_cast<std::ptrdiff_t>(b * 32 + 32))
                                   : Bytes{};
        state.kv.blocks.push_back({next, 1, hash, indexed ? static_cast<int32_t>(b + 1) * kBlock : 0});
        if (indexed) state.kv.prefix_index.push_back({hash, {next}});
        ++next;
      }
      group.tables.push_back(std::move(table));
      state.scheduler.running.push_back(request.id);
    } else {
      state.scheduler.waiting.push_back(request.id);
    }
    state.scheduler.requests.push_back(std::move(request));
  }
  state.kv.groups.push_back(std::move(group));
  state.kv.num_blocks = next + 1000;
  for (int32_t id = next; id < next + 1000; ++id) state.kv.free_order.push_back(id);
  return state;
}

template <class Archive>
void all(Archive& archive, CapturedState& state) {
  SchedulerSnapshot& s = state.scheduler;
  KvSnapshot& kv = state.kv;
  archive(s.policy, s.requests, s.running, s.waiting, s.held, s.finished, s.engine, kv.num_blocks, kv.null_block,
          kv.groups, kv.blocks, kv.free_order, kv.prefix_index, kv.extra_hashes, kv.engine, state.workers);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"A busy scheduler's state to bytes and back."};
  int running = 256;
  int waiting = 1000;
  int entries = 50'000;
  int rounds = 7;
  bool as_json = false;
  app.add_option("--running", running, "requests")->capture_default_str()->check(CLI::Range(1, 100'000));
  app.add_option("--waiting", waiting, "requests")->capture_default_str()->check(CLI::Range(0, 100'000));
  app.add_option("--entries", entries, "of the prefix index")->capture_default_str()->check(CLI::Range(0, 10'000'000));
  app.add_option("--rounds", rounds, "measured rounds")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_flag("--json", as_json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);
  ::mallopt(M_MMAP_THRESHOLD, 1 << 30);  // freed memory stays warm, for all that is compared
  ::mallopt(M_TRIM_THRESHOLD, INT32_MAX);
  EngineCheckpoint engine;
  engine.state = busy(running, waiting, entries);
  must(engine.state.validate());
  uint64_t tokens = 0;
  for (const RequestState& request : engine.state.scheduler.requests) tokens += request.prompt_token_ids.size();

  std::map<std::string, std::vector<double>> times;
  uint64_t bytes = 0;
  for (int round = 0; round <= rounds; ++round) {
    const auto time = [&](const char* name, const std::function<void()>& work) {
      const double taken = seconds(work);
      if (round > 0) times[name].push_back(taken);
    };
    std::vector<Section> sections;
    time("encode", [&] { sections = encode(engine); });
    Result<EngineCheckpoint> decoded = Error{};
    time("decode", [&] { decoded = decode(sections); });
    if (!(must(std::move(decoded)).state == engine.state)) return 2;
    bytes = 0;
    for (const Section& section : sections) bytes += section.bytes.size();
    Bytes target(bytes);
    time("copy", [&] {
      uint8_t* at = target.data();
      for (const Section& section : sections) at = std::copy(section.bytes.begin(), section.bytes.end(), at);
    });
    std::ostringstream out;
    time("cereal encode", [&] {
      cereal::BinaryOutputArchive archive(out);
      all(archive, engine.state);
    });
    std::istringstream in(out.str());
    CapturedState again;
    time("cereal decode", [&] {
      cereal::BinaryInputArchive archive(in);
      all(archive, again);
    });
    if (!(again == engine.state)) return 2;
  }
  const auto ms = [&](const char* name) { return 1e3 * median(times[name]); };
  const double both = ms("encode") + ms("decode");
  nlohmann::ordered_json json = {{"requests", running + waiting},
                                 {"tokens", tokens},
                                 {"bytes", bytes},
                                 {"rounds", rounds},
                                 {"unit", "ms, median"},
                                 {"encode", ms("encode")},
                                 {"decode", ms("decode")},
                                 {"cereal_encode", ms("cereal encode")},
                                 {"cereal_decode", ms("cereal decode")},
                                 {"copy", ms("copy")},
                                 {"times_baseline", (ms("cereal encode") + ms("cereal decode")) / both},
                                 {"of_ceiling", 2 * ms("copy") / both}};
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  fmt::print("{} requests, {:.1f} M tokens, {} prefix entries, {:.0f} MB, median of {} rounds\n", running + waiting,
             static_cast<double>(tokens) / 1e6, entries, static_cast<double>(bytes) / 1e6, rounds);
  fmt::print(
      "encode {:.1f} ms, decode {:.1f} ms; plain Cereal {:.1f} and {:.1f}: {:.1f} x; two copies of the bytes {:.1f}: "
      "{:.0f} %\n",
      ms("encode"), ms("decode"), ms("cereal encode"), ms("cereal decode"), json["times_baseline"].get<double>(),
      2 * ms("copy"), 100 * json["of_ceiling"].get<double>());
  return 0;
}
