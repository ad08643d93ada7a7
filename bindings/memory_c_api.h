// SPDX-License-Identifier: Apache-2.0
// The C ABI of torpor's memory, for torch's pluggable allocators, ctypes and other programs. It is exported by the
// Python module's shared library, and by libtorpor_memory.so (bindings/memory_library), which needs no Python.
//
// Threads: any. Failure: nothing here ends the process. A failed call returns a null pointer or a code other than 0,
// and torpor_last_error() says what was wrong.
//
// Environment: TORPOR_MEMORY_DEVICE=host takes memory without a GPU. TORPOR_KEEP_BACKUPS=1 keeps saved bytes after a
// wake: those of the tag "weights" are copied again only after torpor_mark_dirty(); those of other tags are copied
// again unless digests are compared and equal. docs/memory.md has the other variables.
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

// For torch.cuda.memory.CUDAPluggableAllocator(path, "torpor_torch_malloc", "torpor_torch_free"). The memory belongs to
// the innermost scope of this thread.
void* torpor_torch_malloc(ssize_t bytes, int device, void* stream);
void torpor_torch_free(void* address, ssize_t bytes, int device, void* stream);

// Begin and end a scope of this thread. Scopes nest. `keep`: 0: the content is not saved.
int torpor_region_begin(const char* tag, int keep);
int torpor_region_end(void);

// Put a tag to sleep, wake it, or note that its bytes have changed. `tag` null: all tags.
int torpor_sleep(const char* tag);
int torpor_wake(const char* tag);
int torpor_mark_dirty(const char* tag);

// Return the error of the last failure in this thread; "" if there was none. Valid until the next call in this thread.
const char* torpor_last_error(void);

// The names of torch_memory_saver's C ABI, so that its callers can load this library instead. Pausing is a sleep,
// resuming a wake; the tag "" means all tags.
void tms_set_current_tag(const char* tag);
const char* tms_get_current_tag(void);
void tms_set_interesting_region(bool active);
bool tms_get_interesting_region(void);
void tms_set_enable_cpu_backup(bool keep);
bool tms_get_enable_cpu_backup(void);
int tms_pause(const char* tag);  // compares kept backups, as callers do not say what they changed
int tms_resume(const char* tag);
// Fail every allocation that would leave less than `bytes` free. 0: none.
void set_memory_margin_bytes(uint64_t bytes);
// Return a copy of what is saved of paused memory; null if nothing is. Valid until the next tms_pause() or
// tms_resume().
uint8_t* tms_get_cpu_backup_pointer(const uint8_t* address, uint64_t bytes);
// "pinned" is the only backend. Another name changes nothing; torpor_last_error() says why.
void tms_set_cpu_backup_backend(const char* name);
const char* tms_get_cpu_backup_backend(void);
// A backup on disk is not offered. A thread that asks for one fails all allocations until it calls this with false.
void tms_set_enable_disk_backup(bool enable);
bool tms_get_enable_disk_backup(void);
void tms_set_disk_backup_dir(const char* path);
// Call it before the first allocation; TORPOR_KEEP_BACKUPS=1 does the same.
void tms_set_retain_cpu_backup(bool retain);
bool tms_get_retain_cpu_backup(void);
void* tms_torch_malloc(ssize_t bytes, int device, void* stream);
void tms_torch_free(void* address, ssize_t bytes, int device, void* stream);

#ifdef __cplusplus
}
#endif
