#include "bindings/memory_c_api.h"

#include <fmt/format.h>

#include "base/log.h"
#include "bindings/process_memory.h"

#define TORPOR_EXPORT extern "C" __attribute__((visibility("default")))

namespace torpor {
namespace {

thread_local std::string last_error;

// What `work` returns as a code; nothing is thrown across the C border.
template <class Work>
int code_of(const Work& work) {
  const Status done = catching([&]() -> Status {
    TORPOR_TRY(work());
    return ok();
  });
  if (done) return 0;
  last_error = done.error().to_string();
  return 1;
}

std::string text(const char* tag) { return tag == nullptr ? "" : tag; }

std::vector<std::string> tags(const char* tag) {
  if (text(tag).empty()) return {};
  return {text(tag)};
}

// The scope that torch_memory_saver's setters change, one field at a time.
MemorySaver::Scope& scope() {
  std::vector<MemorySaver::Scope>& scopes = MemorySaver::scopes();
  if (scopes.empty()) scopes.push_back({.active = false});
  return scopes.back();
}

}  // namespace
}  // namespace torpor

using torpor::code_of;
using torpor::memory_saver;
using torpor::MemorySaver;
using torpor::text;

TORPOR_EXPORT void* torpor_torch_malloc(ssize_t bytes, int device, void*) {
  void* found = nullptr;
  code_of([&]() -> torpor::Status {
    if (bytes < 0)
      return torpor::Error{.code = torpor::Code::kInvalidArgument,
                           .what = fmt::format("{} bytes are wanted", bytes),
                           .next_step = "ask for more than 0"};
    TORPOR_ASSIGN(const torpor::DeviceAddress address, memory_saver().allocate(device, static_cast<uint64_t>(bytes)));
    found = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
    return torpor::ok();
  });
  return found;
}

TORPOR_EXPORT void torpor_torch_free(void* address, ssize_t, int device, void*) {
  if (address == nullptr) return;
  const int code =
      code_of([&] { return memory_saver().free(device, reinterpret_cast<torpor::DeviceAddress>(address)); });
  if (code != 0)
    torpor::log().error("memory was not freed: {}", torpor::last_error);  // the caller has no way to hear of it
}

TORPOR_EXPORT int torpor_region_begin(const char* tag, int keep) {
  return code_of([&]() -> torpor::Status {
    if (text(tag).empty())
      return torpor::Error{
          .code = torpor::Code::kInvalidArgument, .what = "a region has no tag", .next_step = "give it one"};
    MemorySaver::scopes().push_back({.tag = text(tag), .keep = keep != 0});
    return torpor::ok();
  });
}

TORPOR_EXPORT int torpor_region_end(void) {
  return code_of([]() -> torpor::Status {
    if (MemorySaver::scopes().empty())
      return torpor::Error{.code = torpor::Code::kFailedPrecondition,
                           .what = "no region was begun in this thread",
                           .next_step = "begin one before its end"};
    MemorySaver::scopes().pop_back();
    return torpor::ok();
  });
}

TORPOR_EXPORT int torpor_sleep(const char* tag) {
  return code_of([&] { return memory_saver().sleep(torpor::tags(tag)); });
}
TORPOR_EXPORT int torpor_wake(const char* tag) {
  return code_of([&] { return memory_saver().wake(torpor::tags(tag)); });
}
TORPOR_EXPORT int torpor_mark_dirty(const char* tag) {
  return code_of([&]() -> torpor::Status {
    memory_saver().mark_dirty(torpor::tags(tag));
    return torpor::ok();
  });
}
TORPOR_EXPORT const char* torpor_last_error(void) { return torpor::last_error.c_str(); }
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
TORPOR_EXPORT void* tms_torch_malloc(ssize_t bytes, int device, void* stream) {
  return torpor_torch_malloc(bytes, device, stream);
}
TORPOR_EXPORT void tms_torch_free(void* address, ssize_t bytes, int device, void* stream) {
  torpor_torch_free(address, bytes, device, stream);
}
