// SPDX-License-Identifier: Apache-2.0
#include "bindings/memory_c_api.h"

#include <list>

#include <fmt/core.h>

#include "base/log.h"
#include "base/mutex.h"
#include "bindings/process_memory.h"

#define TORPOR_EXPORT extern "C" __attribute__((visibility("default")))

namespace torpor {
namespace {

thread_local std::string last_error;

// Return the result of `work` as a code. Nothing is thrown across the C border.
template <class Work>
int code_of(const Work& work) {
  const Status done = try_catch([&]() -> Status {
    TORPOR_RETURN_IF_ERROR(work());
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

void refuse(const std::string& what, const char* next_step) {
  code_of([&]() -> Status { return Error{.code = Code::kUnsupported, .what = what, .next_step = next_step}; });
}

// The copies that tms_get_cpu_backup_pointer() returned.
class ReadBackups {
 public:
  std::byte* add(std::vector<std::byte> read) {
    const MutexLock lock(mutex_);
    return read_.emplace_back(std::move(read)).data();
  }
  void clear() {
    const MutexLock lock(mutex_);
    read_.clear();
  }

 private:
  Mutex mutex_;
  std::list<std::vector<std::byte>> read_ TORPOR_GUARDED_BY(mutex_);
};

ReadBackups& read_backups() {
  static ReadBackups* const made = new ReadBackups;
  return *made;
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
    TORPOR_ASSIGN_OR_RETURN(const torpor::DeviceAddress address,
                            memory_saver().allocate(device, static_cast<uint64_t>(bytes)));
    found = reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
    return torpor::ok();
  });
  return found;
}

TORPOR_EXPORT void torpor_torch_free(void* address, ssize_t, int device, void*) {
  if (address == nullptr) return;
  const int code =
      code_of([&] { return memory_saver().free_soon(device, reinterpret_cast<torpor::DeviceAddress>(address)); });
  if (code != 0)
    torpor::log().error("memory was not freed: {}", torpor::last_error);  // the caller has no way to hear of it
}

TORPOR_EXPORT int torpor_region_begin(const char* tag, int keep) {
  return code_of([&]() -> torpor::Status {
    if (text(tag).empty())
      return torpor::Error{
          .code = torpor::Code::kInvalidArgument, .what = "a region has no tag", .next_step = "give it one"};
    const MemorySaver::Scope scope{.tag = text(tag), .keep = keep != 0};
    TORPOR_RETURN_IF_ERROR(memory_saver().check_owner(scope));
    MemorySaver::scopes().push_back(scope);
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
TORPOR_EXPORT int tms_pause(const char* tag) {
  torpor::read_backups().clear();
  return code_of([&] { return memory_saver().sleep(torpor::tags(tag), {}, torpor::CleanCheck::kDigest); });
}
TORPOR_EXPORT int tms_resume(const char* tag) {
  torpor::read_backups().clear();
  return torpor_wake(tag);
}
TORPOR_EXPORT void set_memory_margin_bytes(uint64_t bytes) { memory_saver().set_margin(bytes); }
TORPOR_EXPORT uint8_t* tms_get_cpu_backup_pointer(const uint8_t* address, uint64_t bytes) {
  uint8_t* found = nullptr;
  code_of([&]() -> torpor::Status {
    std::vector<std::byte> read(bytes);
    TORPOR_RETURN_IF_ERROR(memory_saver().read_saved(reinterpret_cast<torpor::DeviceAddress>(address), read));
    found = reinterpret_cast<uint8_t*>(torpor::read_backups().add(std::move(read)));
    return torpor::ok();
  });
  return found;
}
TORPOR_EXPORT void tms_set_cpu_backup_backend(const char* name) {
  if (text(name) != "pinned")
    torpor::refuse(fmt::format("backups of the kind \"{}\" are not offered", text(name)), "use \"pinned\"");
}
TORPOR_EXPORT const char* tms_get_cpu_backup_backend(void) { return "pinned"; }
TORPOR_EXPORT void tms_set_enable_disk_backup(bool enable) { torpor::scope().on_disk = enable; }
TORPOR_EXPORT bool tms_get_enable_disk_backup(void) { return torpor::scope().on_disk; }
TORPOR_EXPORT void tms_set_disk_backup_dir(const char*) {
  torpor::refuse("backups on disk are not offered", "enable backups in host memory");
}
TORPOR_EXPORT void tms_set_retain_cpu_backup(bool retain) {
  code_of([&] { return torpor::set_backups_kept(retain); });
}
TORPOR_EXPORT bool tms_get_retain_cpu_backup(void) { return torpor::backups_kept(); }
TORPOR_EXPORT void* tms_torch_malloc(ssize_t bytes, int device, void* stream) {
  return torpor_torch_malloc(bytes, device, stream);
}
TORPOR_EXPORT void tms_torch_free(void* address, ssize_t bytes, int device, void* stream) {
  torpor_torch_free(address, bytes, device, stream);
}
