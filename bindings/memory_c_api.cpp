#include "bindings/memory_c_api.h"

#include <cstdlib>
#include <string_view>

#include <fmt/format.h>

#include "allocator/cuda/cuda_device.h"
#include "allocator/host_device.h"
#include "base/log.h"
#include "engine/memory_saver.h"

#define TORPOR_EXPORT extern "C" __attribute__((visibility("default")))

namespace torpor {
namespace {

thread_local std::string last_error;
thread_local std::string last_text;

std::string_view environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Never destroyed: what is below may free memory until the very end of the process.
MemorySaver& saver() {
  static MemorySaver* const made = new MemorySaver(
      [](int ordinal) -> Result<std::unique_ptr<DeviceMemory>> {
        if (environment("TORPOR_MEMORY_DEVICE") == "host") return make_host_device();
        return make_cuda_device({.ordinal = ordinal});
      },
      {.keep_backup = environment("TORPOR_KEEP_BACKUPS") == "1"});
  return *made;
}

// What `work` returns as a code; nothing is thrown across the C border.
template <class Work>
int code_of(const Work& work) {
  const Status done = catching_no_memory([&]() -> Status {
    TORPOR_TRY(work());
    return ok();
  });
  if (done) return 0;
  last_error = done.error().to_string();
  return 1;
}

std::string text(const char* tag) { return tag == nullptr ? "" : tag; }

// The scope that torch_memory_saver's setters change, one field at a time.
MemorySaver::Scope& scope() {
  std::vector<MemorySaver::Scope>& scopes = MemorySaver::scopes();
  if (scopes.empty()) scopes.push_back({.active = false});
  return scopes.back();
}

std::string json(const MemorySaver& memory) {
  std::string out = "{";
  for (const auto& [device, held] : memory.describe()) {
    const auto& [states, ledger] = held;
    std::string tags;
    for (const auto& [tag, state] : states) {
      std::string quoted;
      for (const char c : tag) quoted += c == '"' || c == '\\' || static_cast<unsigned char>(c) < 0x20 ? '?' : c;
      tags += fmt::format("{}\"{}\": \"{}\"", tags.empty() ? "" : ", ", quoted, state);
    }
    out += fmt::format("{}\"{}\": {{\"tags\": {{{}}}, \"physical_bytes\": {}, \"capacity_bytes\": {}, \"used_by_all_bytes\": {}, \"arena_held_bytes\": {}, \"arena_used_bytes\": {}, \"arena_unpinned_bytes\": {}}}",
                       out.size() == 1 ? "" : ", ", device, tags, ledger.device_physical_bytes, ledger.device_capacity_bytes, ledger.device_used_bytes, ledger.arena_held_bytes, ledger.arena_used_bytes, ledger.arena_unpinned_bytes);
  }
  return out + "}";
}

}  // namespace
}  // namespace torpor

using torpor::code_of;
using torpor::MemorySaver;
using torpor::saver;
using torpor::text;

TORPOR_EXPORT void* torpor_torch_malloc(ssize_t bytes, int device, void*) {
  void* found = nullptr;
  code_of([&]() -> torpor::Status {
    if (bytes < 0) return torpor::Error{.code = torpor::Code::kInvalidArgument, .what = fmt::format("{} bytes are wanted", bytes), .next_step = "ask for more than 0"};
    TORPOR_ASSIGN(const torpor::DeviceAddress address, saver().allocate(device, static_cast<uint64_t>(bytes)));
    found = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
    return torpor::ok();
  });
  return found;
}

TORPOR_EXPORT void torpor_torch_free(void* address, ssize_t, int device, void*) {
  if (address == nullptr) return;
  const int code = code_of([&] { return saver().free(device, reinterpret_cast<torpor::DeviceAddress>(address)); });
  if (code != 0) torpor::log().error("memory was not freed: {}", torpor::last_error);  // the caller has no way to hear of it
}

TORPOR_EXPORT int torpor_region_begin(const char* tag, int keep) {
  return code_of([&]() -> torpor::Status {
    if (text(tag).empty()) return torpor::Error{.code = torpor::Code::kInvalidArgument, .what = "a region has no tag", .next_step = "give it one"};
    MemorySaver::scopes().push_back({.tag = text(tag), .keep = keep != 0});
    return torpor::ok();
  });
}

TORPOR_EXPORT int torpor_region_end(void) {
  return code_of([]() -> torpor::Status {
    if (MemorySaver::scopes().empty()) return torpor::Error{.code = torpor::Code::kFailedPrecondition, .what = "no region was begun in this thread", .next_step = "begin one before its end"};
    MemorySaver::scopes().pop_back();
    return torpor::ok();
  });
}

TORPOR_EXPORT int torpor_sleep(const char* tag) {
  return code_of([&] { return saver().sleep(text(tag)); });
}
TORPOR_EXPORT int torpor_wake(const char* tag) {
  return code_of([&] { return saver().wake(text(tag)); });
}
TORPOR_EXPORT int torpor_mark_dirty(const char* tag) {
  return code_of([&]() -> torpor::Status {
    saver().mark_dirty(text(tag));
    return torpor::ok();
  });
}
TORPOR_EXPORT const char* torpor_last_error(void) { return torpor::last_error.c_str(); }
TORPOR_EXPORT const char* torpor_memory_json(void) {
  code_of([]() -> torpor::Status {
    torpor::last_text = torpor::json(saver());
    return torpor::ok();
  });
  return torpor::last_text.c_str();
}

TORPOR_EXPORT void tms_set_current_tag(const char* tag) {
  code_of([&]() -> torpor::Status {
    torpor::scope().tag = text(tag);
    return torpor::ok();
  });
}
TORPOR_EXPORT const char* tms_get_current_tag(void) { return torpor::scope().tag.c_str(); }
TORPOR_EXPORT void tms_set_interesting_region(bool active) { torpor::scope().active = active; }
TORPOR_EXPORT bool tms_get_interesting_region(void) { return torpor::scope().active; }
TORPOR_EXPORT void tms_set_enable_cpu_backup(bool keep) { torpor::scope().keep = keep; }
TORPOR_EXPORT bool tms_get_enable_cpu_backup(void) { return torpor::scope().keep; }
TORPOR_EXPORT int tms_pause(const char* tag) { return torpor_sleep(tag); }
TORPOR_EXPORT int tms_resume(const char* tag) { return torpor_wake(tag); }
TORPOR_EXPORT void* tms_torch_malloc(ssize_t bytes, int device, void* stream) { return torpor_torch_malloc(bytes, device, stream); }
TORPOR_EXPORT void tms_torch_free(void* address, ssize_t bytes, int device, void* stream) { torpor_torch_free(address, bytes, device, stream); }
