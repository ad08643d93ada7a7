// SPDX-License-Identifier: Apache-2.0
// The C ABI of torpor's memory, exported by the Python module's shared library and by libtorpor_memory.so
// (bindings/memory_library), which needs no Python; for torch's pluggable allocators, ctypes and other programs.
// Nothing here ends the process: a failure is a null pointer or a code that is not 0, and torpor_last_error() says what
// was wrong.
//
// TORPOR_MEMORY_DEVICE=host in the environment takes memory without a GPU; TORPOR_KEEP_BACKUPS=1 keeps saved bytes
// after a wake: those of the tag "weights" are not copied again until torpor_mark_dirty, others only if they differ
// where digests are compared. The other variables of docs/memory.md hold, too.
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

// torch.cuda.memory.CUDAPluggableAllocator(path, "torpor_torch_malloc", "torpor_torch_free"). In the scope of this
// thread.
void* torpor_torch_malloc(ssize_t bytes, int device, void* stream);
void torpor_torch_free(void* address, ssize_t bytes, int device, void* stream);

// Scopes of this thread; they nest.
int torpor_region_begin(const char* tag, int keep);
int torpor_region_end(void);

// `tag` null: all that are awake, or asleep.
int torpor_sleep(const char* tag);
int torpor_wake(const char* tag);
int torpor_mark_dirty(const char* tag);

// Of the last failure in this thread; "" if there was none. Valid until the next call in this thread.
const char* torpor_last_error(void);

// The names of torch_memory_saver's C ABI, so that its callers can load this library instead. Pausing sleeps, resuming
// wakes; "" as a tag means all.
void tms_set_current_tag(const char* tag);
const char* tms_get_current_tag(void);
void tms_set_interesting_region(bool active);
bool tms_get_interesting_region(void);
void tms_set_enable_cpu_backup(bool keep);
bool tms_get_enable_cpu_backup(void);
int tms_pause(const char* tag);  // compares backups that were kept: its callers do not say what they changed
int tms_resume(const char* tag);
// An allocation that would leave less free fails. 0: none does.
void set_memory_margin_bytes(uint64_t bytes);
// What is saved of memory that is paused; null: nothing is. A copy, until the next tms_pause() or tms_resume().
uint8_t* tms_get_cpu_backup_pointer(const uint8_t* address, uint64_t bytes);
// "pinned"; another one is refused: it stays, and torpor_last_error() says why.
void tms_set_cpu_backup_backend(const char* name);
const char* tms_get_cpu_backup_backend(void);
// Refused as well: a thread that wants one allocates nothing until it takes it back.
void tms_set_enable_disk_backup(bool enable);
bool tms_get_enable_disk_backup(void);
void tms_set_disk_backup_dir(const char* path);
// Before the first allocation only; also TORPOR_KEEP_BACKUPS=1.
void tms_set_retain_cpu_backup(bool retain);
bool tms_get_retain_cpu_backup(void);
void* tms_torch_malloc(ssize_t bytes, int device, void* stream);
void tms_torch_free(void* address, ssize_t bytes, int device, void* stream);

#ifdef __cplusplus
}
#endif
