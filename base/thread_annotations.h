// SPDX-License-Identifier: Apache-2.0
// Macros for the attributes of clang's thread-safety analysis. Write GUARDED_BY at the field that a lock guards, and
// REQUIRES at the function or lambda that needs a lock. Clang checks them wherever it compiles a library, in the
// presets `asan` and `fuzz`. With other compilers the macros are empty. The locks: base/mutex.h.
#pragma once

#if defined(__clang__)
#define TORPOR_THREAD_ATTRIBUTE(attribute) __attribute__((attribute))
#else
#define TORPOR_THREAD_ATTRIBUTE(attribute)
#endif

#define TORPOR_CAPABILITY(name) TORPOR_THREAD_ATTRIBUTE(capability(name))
#define TORPOR_SCOPED_CAPABILITY TORPOR_THREAD_ATTRIBUTE(scoped_lockable)
#define TORPOR_GUARDED_BY(mutex) TORPOR_THREAD_ATTRIBUTE(guarded_by(mutex))
#define TORPOR_PT_GUARDED_BY(mutex) TORPOR_THREAD_ATTRIBUTE(pt_guarded_by(mutex))
#define TORPOR_REQUIRES(...) TORPOR_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define TORPOR_EXCLUDES(...) TORPOR_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define TORPOR_ACQUIRE(...) TORPOR_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define TORPOR_TRY_ACQUIRE(...) TORPOR_THREAD_ATTRIBUTE(try_acquire_capability(__VA_ARGS__))
#define TORPOR_RELEASE(...) TORPOR_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define TORPOR_RETURN_CAPABILITY(mutex) TORPOR_THREAD_ATTRIBUTE(lock_returned(mutex))
// For code that the analysis cannot follow; a comment beside it says why the code is right.
#define TORPOR_NO_THREAD_SAFETY_ANALYSIS TORPOR_THREAD_ATTRIBUTE(no_thread_safety_analysis)
