// SPDX-License-Identifier: Apache-2.0
#include "bindings/process_memory.h"

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include <fmt/core.h>

#include "allocator/cuda/cuda_device.h"
#include "allocator/host_device.h"
#include "offload/codec.h"

namespace torpor {
namespace {

std::string_view environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Return the number in the variable `name`; none if it is not set.
Result<std::optional<uint64_t>> number_from_environment(const char* name, const char* next_step) {
  const std::string_view text = environment(name);
  if (text.empty()) return std::optional<uint64_t>();
  uint64_t number = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (failed == std::errc() && end == text.data() + text.size()) return std::optional(number);
  return Error{.code = Code::kInvalidArgument, .what = fmt::format("{} is \"{}\"", name, text), .next_step = next_step};
}

Result<std::optional<uint64_t>> bytes_from_environment(const char* name) {
  return number_from_environment(name, "give a number of bytes");
}

// Return RankMemoryOptions::arena_prefault_bytes. "background" gives none: a background prefault, as in an engine on a
// GPU.
Result<std::optional<uint64_t>> prefault_from_environment() {
  constexpr const char* kName = "TORPOR_ARENA_PREFAULT_BYTES";
  if (environment(kName) == "background") return std::optional<uint64_t>();
  TORPOR_ASSIGN_OR_RETURN(const std::optional<uint64_t> bytes,
                          number_from_environment(kName, "give a number of bytes, or background"));
  return std::optional(bytes.value_or(0));
}

Result<int> threads_from_environment() {
  constexpr const char* kName = "TORPOR_COPY_THREADS";
  constexpr const char* kNextStep = "give a number of threads from 1 to 256";
  TORPOR_ASSIGN_OR_RETURN(const std::optional<uint64_t> threads, number_from_environment(kName, kNextStep));
  if (!threads) return 0;
  if (*threads >= 1 && *threads <= TransferEngineOptions::kMostThreads) return static_cast<int>(*threads);
  return Error{
      .code = Code::kInvalidArgument, .what = fmt::format("{} is {}", kName, *threads), .next_step = kNextStep};
}

struct KeptBackups {
  std::atomic<bool> wanted = environment("TORPOR_KEEP_BACKUPS") == "1";
  std::atomic<bool> fixed = false;  // memory was allocated, so the setting cannot change
};

KeptBackups& kept_backups() {
  static KeptBackups kept;
  return kept;
}

Result<std::unique_ptr<RankMemory>> make_memory(int ordinal) {
  kept_backups().fixed = true;
  TORPOR_ASSIGN_OR_RETURN(const std::optional<uint64_t> budget, bytes_from_environment("TORPOR_ARENA_BUDGET_BYTES"));
  TORPOR_ASSIGN_OR_RETURN(const std::optional<uint64_t> prefault, prefault_from_environment());
  TORPOR_ASSIGN_OR_RETURN(const std::optional<uint64_t> keep, bytes_from_environment("TORPOR_ARENA_KEEP_BYTES"));
  TORPOR_ASSIGN_OR_RETURN(const int threads, threads_from_environment());
  const std::string compression(environment("TORPOR_HOST_COMPRESSION"));
  TORPOR_ASSIGN_OR_RETURN(const CompressionOptions packing,
                          CompressionOptions::of(compression.empty() ? "none" : compression, std::nullopt));
  TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<DeviceMemory> device, make_process_device(ordinal));
  const ProcessParts parts = process_parts();
  return RankMemory::create(std::move(device), parts.file_system,
                            {.rank = ordinal,
                             .arena_budget_bytes = budget.value_or(0),
                             .arena_prefault_bytes = prefault,
                             .arena_keep_bytes = keep,
                             .threads = threads,
                             .keep_backup = backups_kept(),
                             .host_compression = packing.codec,
                             .events = parts.events});
}

// The driver shuts down in an exit function, which it registered when it was initialised. Functions that are registered
// later run before it.
void end_prefault_at_exit() {
  static const int registered = std::atexit([] { memory_saver().end_prefault(); });
  (void)registered;
}

}  // namespace

MemorySaver& memory_saver() {
  static MemorySaver* const made = new MemorySaver(make_memory);
  return *made;
}

Result<std::unique_ptr<DeviceMemory>> make_process_device(int ordinal) {
  TORPOR_ASSIGN_OR_RETURN(const std::optional<uint64_t> gather_below,
                          bytes_from_environment("TORPOR_CUDA_GATHER_BELOW_BYTES"));
  if (environment("TORPOR_MEMORY_DEVICE") == "host") {
    TORPOR_ASSIGN_OR_RETURN(const std::optional<uint64_t> capacity, bytes_from_environment("TORPOR_HOST_DEVICE_BYTES"));
    return make_host_device({.capacity_bytes = capacity.value_or(0),
                             .shared_file = std::string(environment("TORPOR_HOST_DEVICE_SHARED_FILE"))});
  }
  TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<DeviceMemory> device,
                          make_cuda_device({.ordinal = ordinal, .gather_below_bytes = gather_below}));
  end_prefault_at_exit();
  return device;
}

bool backups_kept() { return kept_backups().wanted; }

Status set_backups_kept(bool kept) {
  if (kept == backups_kept()) return ok();
  if (kept_backups().fixed) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = "whether backups are kept cannot change any more: memory was allocated",
                 .next_step = "say it before the first region"};
  }
  kept_backups().wanted = kept;
  return ok();
}

}  // namespace torpor
