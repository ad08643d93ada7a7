// SPDX-License-Identifier: Apache-2.0
// gpu_check: run on a machine with an NVIDIA GPU; prints each row when it is known, as text or as JSON lines, and
// appends it to a file. Exit code 0: no check failed.
#include <fstream>
#include <iostream>
#include <thread>

#include <CLI/CLI.hpp>

#include "base/units.h"
#include "tools/gpu_check/gpu_check.h"

namespace {

// A row, or the machine.
void print(const nlohmann::ordered_json& row) {
  if (!row.contains("check")) {
    std::cout << row["gpu"].get<std::string>() << ", driver " << row["driver"] << "; at most " << row["seconds"]
              << " s; rates in GB/s, medians" << std::endl;
    for (const auto& note : row["notes"]) std::cout << "note: " << note.get<std::string>() << std::endl;
    return;
  }
  std::cout << row["verdict"].get<std::string>() << "  " << row["check"].get<std::string>();
  for (const auto& [name, value] : row.items()) {
    if (name == "check" || name == "verdict" || name == "loops") continue;
    std::cout << "; " << name << ' ' << value;
  }
  std::cout << std::endl;
  if (!row.contains("loops")) return;
  for (const auto& loop : row["loops"]) std::cout << "        beside a loop: " << loop.dump() << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace torpor;
  CLI::App app{"What torpor does on this machine's GPU: checks, and figures beside the link's own speed."};
  gpu_check::Options options;
  double gib = 8;
  double cycle_gib = 32;
  bool as_json = false;
  app.add_option("--device", options.device, "which GPU")->capture_default_str();
  app.add_option("--gib", gib, "moved in each measurement")->capture_default_str()->check(CLI::Range(0.125, 512.0));
  app.add_option("--cycle-gib", cycle_gib, "asleep and awake in each cycle, at most 80 % of what is free")
      ->capture_default_str()
      ->check(CLI::Range(0.125, 4096.0));
  app.add_option("--cycles", options.cycles, "sleeps and wakes that must not grow")
      ->capture_default_str()
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--rounds", options.rounds, "of each measurement")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_option("--seconds", options.seconds, "no check or round begins later")
      ->capture_default_str()
      ->check(CLI::Range(1.0, 86400.0));
  std::string out;
  app.add_option("--out", out, "file that gets each row as a JSON line when it is known; it may be there already");
  app.add_flag("--json", as_json, "print JSON lines");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& wrong) {
    return app.exit(wrong) == 0 ? 0 : 2;
  }
  options.bytes = static_cast<uint64_t>(gib * static_cast<double>(kGiB)) / kMiB * kMiB;
  options.cycle_bytes = static_cast<uint64_t>(cycle_gib * static_cast<double>(kGiB)) / kMiB * kMiB;
  const Result<const CudaDriver*> driver = cuda_driver();
  if (!driver) {
    std::cerr << "error: " << driver.error().to_string() << '\n';
    return 3;
  }
  gpu_check::ExtraFunctions extra;
  const auto find = [](const char* name, int version, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(cuda_function(name, version));
  };
  find("cuMemHostAlloc", 2020, extra.host_alloc);
  find("cuMemFreeHost", 2000, extra.free_host);
  find("cuMemcpyDtoDAsync", 3020, extra.copy_on_device);
  find("cuStreamBeginCapture", 10010, extra.begin_capture);
  find("cuStreamEndCapture", 10000, extra.end_capture);
  find("cuGraphInstantiateWithFlags", 11040, extra.instantiate);
  find("cuGraphLaunch", 10000, extra.launch);
  find("cuGraphExecDestroy", 10000, extra.destroy_executable);
  find("cuGraphDestroy", 10000, extra.destroy_graph);
  std::ofstream file;
  if (!out.empty()) {
    file.open(out, std::ios::app);
    if (!file) {
      std::cerr << "error: cannot write " << out << '\n';
      return 2;
    }
  }
  const auto on_row = [&](const nlohmann::ordered_json& row) {
    if (as_json) {
      std::cout << row.dump() << std::endl;
    } else {
      print(row);
    }
    if (file.is_open()) file << row.dump() << std::endl;
  };
  try {
    const nlohmann::ordered_json report = gpu_check::run(**driver, extra, options, on_row);
    const nlohmann::ordered_json end = {{"part", "core"}, {"ended", true}, {"passed", report["passed"]}};
    if (as_json) std::cout << end.dump() << std::endl;
    if (file.is_open()) file << end.dump() << std::endl;
    return report["passed"].get<bool>() ? 0 : 1;
  } catch (const std::exception& failed) {
    std::cerr << "error: " << failed.what() << '\n';
    return 3;
  }
}
