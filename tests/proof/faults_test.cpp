// SPDX-License-Identifier: Apache-2.0
// Every operation on a file fails, with every error, once and for ever; and the system calls below come back short or
// interrupted. Whatever fails, what was acknowledged stays, nothing partial is seen, nothing leaks, and a retry works.
#include <cerrno>
#include <filesystem>
#include <optional>

#include <dlfcn.h>
#include <unistd.h>

#include "tests/proof/workloads.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/model_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

// The system's own reading and writing, as this program calls it: short and interrupted as the test wants it.
namespace {

struct ShortCalls {
  bool on = false;
  uint64_t calls = 0;
  // Every third call is interrupted, every other one moves at most 700 bytes.
  template <class Call>
  ssize_t run(size_t count, Call call) {
    if (!on) return call(count);
    if (++calls % 3 == 0) {
      errno = EINTR;
      return -1;
    }
    return call(calls % 3 == 1 ? std::min<size_t>(count, 700) : count);
  }
} short_calls;

}  // namespace

extern "C" {
ssize_t pread(int fd, void* bytes, size_t count, off_t offset) {
  static const auto real = reinterpret_cast<ssize_t (*)(int, void*, size_t, off_t)>(::dlsym(RTLD_NEXT, "pread"));
  return short_calls.run(count, [&](size_t some) { return real(fd, bytes, some, offset); });
}
ssize_t pwrite(int fd, const void* bytes, size_t count, off_t offset) {
  static const auto real = reinterpret_cast<ssize_t (*)(int, const void*, size_t, off_t)>(::dlsym(RTLD_NEXT, "pwrite"));
  return short_calls.run(count, [&](size_t some) { return real(fd, bytes, some, offset); });
}
}

namespace torpor::proof {
namespace {

size_t open_descriptors() {
  return static_cast<size_t>(
      std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator()));
}

TEST(Faults, EveryFileOperationFailsWithEveryError) {
  const size_t descriptors = open_descriptors();
  uint64_t injections = 0;
  for (const Workload& workload : workloads()) {
    const Variant& variant = variants()[2];  // the one with most to do
    for (const bool for_ever : {false, true}) {
      for (const int native : {EIO, ENOSPC, EDQUOT, EROFS, EACCES, ENOENT, EINTR}) {
        for (uint64_t n = 1;; ++n) {
          // A failing call does not reach the file system below: most errors do without the real one, which costs more.
          const bool real = native == EIO || native == ENOSPC;
          std::optional<test::TemporaryDirectory> temporary;
          if (real) temporary.emplace(test::in_memory());
          const std::string directory = real ? *temporary / "store" : "/disk/store";
          test::ModelFileSystem model;
          test::FaultyFileSystem file_system(real ? linux_file_system() : model);
          file_system.plan.set(test::Fault::kError, n, native, for_ever);
          Promise promise;
          const Status done = workload.run(
              {file_system, directory, [&](Word word, uint64_t generation) { promise.hear(word, generation); }},
              variant);
          const bool fired = file_system.plan.fired();
          file_system.plan.clear();
          if (!done) {
            EXPECT_FALSE(done.error().what.empty());
            EXPECT_FALSE(done.error().next_step.empty()) << done.error().to_string();
          }
          const std::string problem = broken_promise(file_system, directory, variant, promise);
          ASSERT_EQ(problem, "") << workload.name << ", call " << n << ", errno " << native
                                 << (for_ever ? ", for ever" : ", once");
          if (!fired) break;
          ++injections;
        }
      }
    }
  }
  std::printf("proof: %lu injected faults, 0 broken promises\n", static_cast<unsigned long>(injections));
  EXPECT_GE(injections, 10'000u);
  EXPECT_EQ(open_descriptors(), descriptors);
}

TEST(Faults, ShortAndInterruptedSystemCallsChangeNothing) {
  for (const Workload& workload : workloads()) {
    for (const Variant& variant : variants()) {
      const test::TemporaryDirectory temporary(test::in_memory());
      const std::string directory = temporary / "store";
      test::FaultyFileSystem file_system;  // for its plain files, whose calls pass through here
      Promise promise;
      short_calls.on = true;
      const Status done = workload.run(
          {file_system, directory, [&](Word word, uint64_t generation) { promise.hear(word, generation); }}, variant);
      const std::string problem = broken_promise(file_system, directory, variant, promise);
      short_calls.on = false;
      EXPECT_SUCCEEDS(done);
      EXPECT_EQ(problem, "") << workload.name << ", " << variant.name;
    }
  }
  std::printf("proof: %lu short or interrupted system calls, 0 broken promises\n",
              static_cast<unsigned long>(short_calls.calls));
  EXPECT_GT(short_calls.calls, 5'000u);
}

}  // namespace
}  // namespace torpor::proof
