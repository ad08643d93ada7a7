// SPDX-License-Identifier: Apache-2.0
// Whoever may leave a step undone (EventPort::may_step, may_go) asks where it holds no lock, of torpor's or anybody's:
// a stop is for seconds. Each lock of this program is counted by the thread that has it.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <map>

#include <fmt/core.h>

#include "console/breakpoints.h"
#include "console/reference_run.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace {

thread_local int locks_of_this_thread = 0;

template <class Call>
Call* next(const char* name) {
  return reinterpret_cast<Call*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" int pthread_mutex_lock(pthread_mutex_t* mutex) {
  static const auto real = next<int(pthread_mutex_t*)>("pthread_mutex_lock");
  const int result = real(mutex);
  locks_of_this_thread += result == 0 ? 1 : 0;
  return result;
}
extern "C" int pthread_mutex_trylock(pthread_mutex_t* mutex) {
  static const auto real = next<int(pthread_mutex_t*)>("pthread_mutex_trylock");
  const int result = real(mutex);
  locks_of_this_thread += result == 0 ? 1 : 0;
  return result;
}
extern "C" int pthread_mutex_unlock(pthread_mutex_t* mutex) {
  static const auto real = next<int(pthread_mutex_t*)>("pthread_mutex_unlock");
  const int result = real(mutex);
  locks_of_this_thread -= result == 0 ? 1 : 0;
  return result;
}

namespace torpor::console {
namespace {

using namespace std::chrono_literals;
using test::value_of;

// Breakpoints that note who asked them, and with how many locks.
class Asked final : public EventWatch {
 public:
  Asked(EventRing& ring, const Clock& clock) : points(ring, clock) {}
  void saw(const Event& event) noexcept override {
    if (locks_of_this_thread > 0) ++published_under_locks;
    points.saw(event);
  }
  void named(uint32_t request, std::string_view name) noexcept override { points.named(request, name); }
  bool may_step() noexcept override {
    ++steps;
    if (locks_of_this_thread > 0) ++under_locks;
    return points.may_step();
  }
  bool may_go(const Event& about) noexcept override {
    ++(about.type == EventType::kRequest ? requests : candidates);
    if (locks_of_this_thread > 0) ++under_locks;
    return points.may_go(about);
  }
  bool holds() const noexcept override { return points.holds(); }
  void operation_begins() noexcept override {
    if (operation_under_locks < locks_of_this_thread) operation_under_locks = locks_of_this_thread;
    points.operation_begins();
  }
  void operation_ended() noexcept override { points.operation_ended(); }

  Breakpoints points;
  std::atomic<int> steps = 0, requests = 0, candidates = 0, under_locks = 0, published_under_locks = 0;
  int operation_under_locks = 0;
};

TEST(Interceptor, IsNeverAskedUnderALock) {
  {
    Mutex mutex;
    const MutexLock lock(mutex);
    ASSERT_EQ(locks_of_this_thread, 1);  // they are counted
  }
  ASSERT_EQ(locks_of_this_thread, 0);
  const test::TemporaryDirectory temporary(test::in_memory());
  const auto ring = value_of(EventRing::in_memory({.role = "core"}, 1 << 14));
  RunClock clock;
  Asked asked(*ring, clock);
  ring->watch(&asked);
  {
    ReferenceRun run({.files = linux_file_system(), .directory = temporary / "run"}, *ring, clock);
    RunOptions options;
    options.engine.num_blocks = 40;
    options.engine.transfers_have_threads = true;
    options.engine.tiers = {.host_blocks = 32, .disk_blocks = 64};
    ASSERT_SUCCEEDS(run.begin(options));
    for (const EventType type : {EventType::kRequest, EventType::kCandidate})
      (void)value_of(asked.points.add({.type = type, .alone = true, .lease = 30ms}, 1));
    (void)value_of(asked.points.add({.type = EventType::kEnded, .lease = 10ms}, 1));
    for (int number = 0; number < 8; ++number)
      ASSERT_SUCCEEDS(run.add({.id = fmt::format("r{}", number),
                               .prompt = std::vector<int32_t>(static_cast<size_t>(20 + 5 * number), number % 3),
                               .max_tokens = 12}));
    for (int step = 0; step < 2000 && !run.engine().idle(); ++step) {
      clock.set(clock.now() + 2ms);
      (void)run.step();
      (void)run.step_offload();
      if (step % 40 != 39) continue;
      ASSERT_SUCCEEDS(run.sleep({.level = 1, .preserve_state = true, .to_disk = step % 80 == 79}));
      ASSERT_SUCCEEDS(run.wake({}));
    }
    EXPECT_TRUE(run.engine().idle());
  }
  ring->watch(nullptr);
  EXPECT_GT(asked.steps, 40);
  EXPECT_GT(asked.requests, 8);
  EXPECT_GT(asked.candidates, 8);
  EXPECT_EQ(asked.under_locks, 0);
  EXPECT_GT(asked.published_under_locks, 0);  // as events are, which is why they are another seam
  EXPECT_EQ(asked.operation_under_locks, 1);  // the operation's own, for which nobody waits
}

}  // namespace
}  // namespace torpor::console
