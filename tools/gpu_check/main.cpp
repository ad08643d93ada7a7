// gpu_check: run on a machine with an NVIDIA GPU; prints a report, or JSON with --json. Exit code 0: all passed.
#include <iostream>
#include <thread>

#include <CLI/CLI.hpp>

#include "base/units.h"
#include "tools/gpu_check/gpu_check.h"

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
  app.add_flag("--json", as_json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);
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
  const nlohmann::ordered_json report = gpu_check::run(**driver, extra, options);
  if (as_json) {
    std::cout << report.dump(2) << '\n';
  } else {
    std::cout << report["gpu"].get<std::string>() << ", driver " << report["driver"] << "; rates in GB/s, medians\n";
    for (const auto& note : report["notes"]) std::cout << "note: " << note.get<std::string>() << '\n';
    for (const auto& row : report["checks"]) {
      std::cout << (row["passed"].get<bool>() ? "passed  " : "FAILED  ") << row["check"].get<std::string>();
      for (const auto& [name, value] : row.items()) {
        if (name == "check" || name == "passed" || name == "loops") continue;
        std::cout << "; " << name << ' ' << value;
      }
      std::cout << '\n';
      if (!row.contains("loops")) continue;
      for (const auto& loop : row["loops"]) std::cout << "        beside a loop: " << loop.dump() << '\n';
    }
  }
  return report["passed"].get<bool>() ? 0 : 1;
}
