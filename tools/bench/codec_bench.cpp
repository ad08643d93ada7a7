// SPDX-License-Identifier: Apache-2.0
// codec_bench: lossless compression of bf16 values on one core, beside zstd and beside a copy of the same bytes.
// The values are random, as weights and KV have them (bf16_values.h).
#include <algorithm>
#include <cstring>
#include <iostream>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "offload/codec.h"
#include "tools/bench/bench.h"
#include "tools/bench/bf16_values.h"

using namespace torpor;
using namespace torpor::bench;

namespace {

struct Arm {
  const char* name;
  CompressionOptions options;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Compression of bf16 values on one core: beside zstd, and beside a copy."};
  uint64_t mib = 64;
  uint64_t chunk_kib = 4096;
  int rounds = 5;
  bool as_json = false;
  app.add_option("--mib", mib, "of values")->capture_default_str()->check(CLI::Range(1, 4096));
  app.add_option("--chunk-kib", chunk_kib, "compressed at once")->capture_default_str()->check(CLI::Range(4, 65536));
  app.add_option("--rounds", rounds, "measured rounds")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_flag("--json", as_json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);
  const uint64_t chunk = chunk_kib * 1024;
  const uint64_t bytes = std::max(mib * kMiB / chunk, uint64_t{1}) * chunk;
  const std::vector<Arm> arms{{"bf16", {.codec = Codec::kBf16}}, {"zstd 1", {.level = 1}}, {"zstd 3", {.level = 3}}};
  nlohmann::ordered_json json{{"bytes", bytes}, {"chunk_bytes", chunk}, {"rounds", rounds}, {"unit", "GB/s, one core"}};
  const WarmMemory values(bytes), packed(compressed_bound(chunk) * (bytes / chunk)), again(bytes);
  for (const bool kv : {false, true}) {
    (kv ? fill_kv : fill_weights)(values.bytes());
    std::map<std::string, std::vector<double>> times;
    std::map<std::string, uint64_t> stored;
    for (int round = 0; round <= rounds; ++round) {
      const auto time = [&](const std::string& name, const std::function<void()>& work) {
        const double taken = seconds(work);
        if (round > 0) times[name].push_back(taken);
      };
      time("copy", [&] {
        for (uint64_t at = 0; at < bytes; at += chunk)
          std::memcpy(again.bytes().data() + at, values.bytes().data() + at, chunk);
      });
      for (const Arm& arm : arms) {
        std::vector<std::span<std::byte>> parts;
        time(std::string(arm.name) + " in", [&] {
          std::byte* at = packed.bytes().data();
          for (uint64_t i = 0; i < bytes; i += chunk) {
            const std::span<std::byte> room(at, compressed_bound(chunk));
            const auto size = compress_into(values.bytes().subspan(i, chunk), room, arm.options);
            if (!size) must(Status(Error{.code = Code::kInternal, .what = std::string(arm.name) + " saved nothing"}));
            parts.emplace_back(at, *size);
            at += *size;
          }
        });
        time(std::string(arm.name) + " out", [&] {
          for (uint64_t i = 0; i < parts.size(); ++i)
            must(decompress(arm.options.codec, parts[i], again.bytes().subspan(i * chunk, chunk)));
        });
        if (!std::ranges::equal(again.bytes(), values.bytes()))
          must(Status(Error{.code = Code::kInternal, .what = std::string(arm.name) + " lost bytes"}));
        stored[arm.name] = 0;
        for (const auto& part : parts) stored[arm.name] += part.size();
      }
    }
    const auto rate = [&](const std::string& name) { return static_cast<double>(bytes) / 1e9 / median(times[name]); };
    auto& table = json[kv ? "kv" : "weights"];
    table["copy"] = rate("copy");
    for (const Arm& arm : arms)
      table[arm.name] = {{"ratio", static_cast<double>(bytes) / static_cast<double>(stored[arm.name])},
                         {"in", rate(std::string(arm.name) + " in")},
                         {"out", rate(std::string(arm.name) + " out")},
                         {"in_of_copy", rate(std::string(arm.name) + " in") / rate("copy")},
                         {"out_of_copy", rate(std::string(arm.name) + " out") / rate("copy")}};
  }
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  fmt::print("{} MiB in pieces of {} KiB, one core, median of {} rounds\n", bytes / kMiB, chunk_kib, rounds);
  for (const char* kind : {"weights", "kv"}) {
    fmt::print("{:<8} a copy {:.1f} GB/s\n", kind, json[kind]["copy"].get<double>());
    for (const Arm& arm : arms) {
      const auto& row = json[kind][arm.name];
      fmt::print("  {:<8} {:.3f} : 1, in {:.2f} and out {:.2f} GB/s\n", arm.name, row["ratio"].get<double>(),
                 row["in"].get<double>(), row["out"].get<double>());
    }
  }
}
