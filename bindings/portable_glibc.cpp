// SPDX-License-Identifier: Apache-2.0
// For manylinux_2_28 (cmake/TorporPortable.cmake): functions that this machine's C++ library needs and glibc 2.28
// lacks. They are declared by hand, like in the headers of a newer glibc.
#include <pthread.h>
#include <sys/random.h>

#include <cstdarg>
#include <cstdint>
#include <ctime>

extern "C" {

// glibc 2.32. Shared pointers count without atomics if it is true; false is always right.
char __libc_single_threaded = 0;

// glibc 2.30. It does what libstdc++ does without this function: it waits for the same moment of the realtime clock.
// Callers read their own clock afterwards. So if the machine's clock is set, a wait ends too early or too late, and
// nothing else.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  if (clock == CLOCK_REALTIME) return pthread_cond_timedwait(condition, mutex, until);
  constexpr int64_t kSecond = 1'000'000'000;
  timespec now{};
  timespec real{};
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &real);
  const int64_t left = (until->tv_sec - now.tv_sec) * kSecond + until->tv_nsec - now.tv_nsec;
  const int64_t end = real.tv_nsec + (left > 0 ? left : 0);
  real.tv_sec += end / kSecond;
  real.tv_nsec = end % kSecond;
  return pthread_cond_timedwait(condition, mutex, &real);
}

// glibc 2.36; std::random_device. The kernel's generator gives 4 bytes at once, or does not exist.
uint32_t arc4random() {
  uint32_t value = 0;
  while (getrandom(&value, sizeof value, 0) != sizeof value) {}
  return value;
}

// glibc 2.38, whose headers make C++ call these functions. The older functions, which do not read binary numbers, do
// the work. They are called by their symbols, as their names now mean the new ones.
#if __GLIBC_PREREQ(2, 38)
long before_c23_strtol(const char* text, char** end, int base) __asm__("strtol");
long long before_c23_strtoll(const char* text, char** end, int base) __asm__("strtoll");
unsigned long before_c23_strtoul(const char* text, char** end, int base) __asm__("strtoul");
unsigned long long before_c23_strtoull(const char* text, char** end, int base) __asm__("strtoull");
int before_c23_vsscanf(const char* text, const char* format, va_list into) __asm__("vsscanf");

long __isoc23_strtol(const char* text, char** end, int base) { return before_c23_strtol(text, end, base); }
long long __isoc23_strtoll(const char* text, char** end, int base) { return before_c23_strtoll(text, end, base); }
unsigned long __isoc23_strtoul(const char* text, char** end, int base) { return before_c23_strtoul(text, end, base); }
unsigned long long __isoc23_strtoull(const char* text, char** end, int base) {
  return before_c23_strtoull(text, end, base);
}
int __isoc23_sscanf(const char* text, const char* format, ...) {
  va_list into;
  va_start(into, format);
  const int read = before_c23_vsscanf(text, format, into);
  va_end(into);
  return read;
}
#endif
}
