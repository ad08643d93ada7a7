// SPDX-License-Identifier: Apache-2.0
#include "base/event_ring.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "tests/support/manual_clock.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using test::ManualClock;
using test::value_of;

std::unique_ptr<EventRing> ring_of(uint64_t events) {
  return value_of(EventRing::in_memory(this_process("test", 0, system_clock()), events));
}

std::vector<Event> all_of(const EventRing& ring) {
  std::vector<Event> events;
  EventReader(ring).read(events, true);
  return events;
}

// On tmpfs, where rings may be.
class EventRingFile : public testing::Test {
 protected:
  std::unique_ptr<EventRing> create(uint64_t events) {
    return value_of(EventRing::create(path_, this_process("core", 3, system_clock()), events));
  }
  const test::TemporaryDirectory directory_{"/dev/shm"};
  const std::string path_ = directory_ / "events";
};

TEST(EventRing, APortOfNoRingTellsNothing) {
  const EventPort port;
  EXPECT_EQ(port.record({.type = EventType::kStep}), 0u);
  EXPECT_EQ(port.now(), 0);
  port.text(TextKind::kError, 0, 0, "nobody listens");
}

TEST(EventRing, EventsComeInOrderWithSequenceAndTime) {
  const auto ring = ring_of(8);
  ManualClock clock;
  const EventPort port(*ring, clock);
  EXPECT_EQ(port.record({.type = EventType::kStep, .a = 7}), 1u);
  clock.advance(std::chrono::nanoseconds(4));
  EXPECT_EQ(port.record({.type = EventType::kSlot, .from = 1, .to = 2, .request = 9}), 2u);
  const std::vector<Event> events = all_of(*ring);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0], (Event{.sequence = 1, .time = 1, .type = EventType::kStep, .a = 7}));
  EXPECT_EQ(events[1], (Event{.sequence = 2, .time = 5, .type = EventType::kSlot, .from = 1, .to = 2, .request = 9}));
}

TEST(EventRing, TheNewestGoWhereTheOldestWereAndTheReaderKnowsHowManyItMissed) {
  const auto ring = ring_of(8);
  for (uint64_t i = 1; i <= 20; ++i) (void)ring->record({.type = EventType::kStep, .a = i}, 0);
  const std::vector<Event> events = all_of(*ring);
  ASSERT_EQ(events.size(), 9u);
  EXPECT_EQ(events[0].type, EventType::kLost);
  EXPECT_EQ(events[0].a, 1u);
  EXPECT_EQ(events[0].b, 12u);
  for (uint64_t i = 1; i <= 8; ++i) EXPECT_EQ(events[i].a, 12 + i);
}

TEST(EventRing, AReaderThatKeepsUpMissesNothing) {
  const auto ring = ring_of(8);
  EventReader reader(*ring);
  std::vector<Event> events;
  for (uint64_t i = 1; i <= 40; ++i) {
    (void)ring->record({.type = EventType::kStep, .a = i}, 0);
    if (i % 8 == 0) reader.read(events);
  }
  ASSERT_EQ(events.size(), 40u);
  EXPECT_EQ(reader.lost(), 0u);
  for (uint64_t i = 0; i < 40; ++i) EXPECT_EQ(events[i].a, i + 1);
}

// Many writers and a reader on a ring so small that they overtake each other: what is read is whole and in order, and
// what is not read is counted.
TEST(EventRing, WhatIsReadIsWholeAndWhatIsNotIsCounted) {
  constexpr uint64_t kEach = 20'000;
  for (const uint64_t size : {2u, 64u, 1u << 17}) {
    SCOPED_TRACE(size);
    const auto ring = ring_of(size);
    std::atomic<bool> done = false;
    std::vector<Event> events;
    EventReader reader(*ring);
    std::thread reading([&] {
      while (!done) reader.read(events);
    });
    std::vector<std::thread> writers;
    for (uint64_t writer = 0; writer < 4; ++writer) {
      writers.emplace_back([&, writer] {
        for (uint64_t i = 0; i < kEach; ++i) {
          const uint64_t a = writer << 32 | i;
          (void)ring->record({.type = EventType::kStep, .transfer = a * 3, .a = a, .b = ~a}, static_cast<int64_t>(a));
        }
      });
    }
    for (std::thread& writer : writers) writer.join();
    done = true;
    reading.join();
    reader.read(events, true);
    uint64_t next = 1;
    uint64_t read = 0;
    for (const Event& event : events) {
      if (event.type == EventType::kLost) {
        ASSERT_EQ(event.a, next);
        next += event.b;
        continue;
      }
      ++read;
      ASSERT_EQ(event.sequence, next++);
      ASSERT_EQ(event.b, ~event.a);
      ASSERT_EQ(event.transfer, event.a * 3);
      ASSERT_EQ(static_cast<uint64_t>(event.time), event.a);
    }
    EXPECT_EQ(next, 4 * kEach + 1);
    EXPECT_EQ(read + reader.lost(), 4 * kEach);
    EXPECT_EQ(ring->last_sequence(), 4 * kEach);
    if (size > 4 * kEach) {
      EXPECT_EQ(reader.lost(), 0u);
    }
  }
}

TEST(EventRing, WordsComeBackWhole) {
  const auto ring = ring_of(64);
  const EventPort port(*ring, system_clock());
  const std::string words = "chatcmpl-0123456789abcdef0123456789abcdef-0";
  port.text(TextKind::kRequestName, 5, 0, words);
  const std::vector<Event> events = all_of(*ring);
  ASSERT_EQ(events.size(), 2u);
  std::string back;
  for (const Event& event : events) back += std::string(reinterpret_cast<const char*>(event.key.bytes.data()), 32);
  EXPECT_STREQ(back.c_str(), words.c_str());
  EXPECT_EQ(events[0].from & kLastPart, 0);
  EXPECT_EQ(events[1].from & kLastPart, kLastPart);
  EXPECT_EQ(events[1].to, 1);
}

TEST_F(EventRingFile, LastWordsOfAKilledProcessAreRead) {
  const pid_t child = ::fork();
  if (child == 0) {
    const auto ring = EventRing::create(path_, this_process("core", 3, system_clock()), 64);
    for (uint64_t i = 1; ring && i <= 10; ++i) (void)(*ring)->record({.type = EventType::kStep, .a = i}, 0);
    (void)::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  const auto ring = value_of(EventRing::open(path_));
  EXPECT_EQ(ring->source().role, "core");
  EXPECT_EQ(ring->source().rank, 3);
  EXPECT_EQ(ring->source().pid, child);
  EXPECT_FALSE(is_alive(ring->source()));
  EXPECT_EQ(all_of(*ring).size(), 10u);
  EXPECT_EQ(all_of(*ring).back().a, 10u);
}

TEST_F(EventRingFile, OthersReadItWhileItIsWritten) {
  const auto ring = create(16);
  struct stat status {};
  ASSERT_EQ(::stat(path_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  const auto same = value_of(EventRing::open(path_));
  EXPECT_TRUE(is_alive(same->source()));
  EventReader reader(*same);
  std::vector<Event> events;
  for (uint64_t i = 0; i < 3; ++i) {
    (void)ring->record({.type = EventType::kStep}, 0);
    reader.read(events);
    EXPECT_EQ(events.size(), i + 1);
  }
}

TEST_F(EventRingFile, AForkedChildWritesNothingAndTakesNothingAway) {
  auto ring = create(16);
  (void)ring->record({.type = EventType::kStep}, 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const bool wrote = ring->record({.type = EventType::kStep}, 0) != 0;
    ring.reset();
    ::_exit(wrote ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(all_of(*ring).size(), 1u);
  EXPECT_EQ(::access(path_.c_str(), R_OK), 0);
}

TEST_F(EventRingFile, AnEndingProcessTakesItAway) {
  create(16).reset();
  EXPECT_FAILS(EventRing::open(path_), Code::kNotFound, "events");
}

TEST_F(EventRingFile, AnotherFileIsNoRing) {
  const auto ring = create(16);
  EXPECT_FAILS(EventRing::create(path_, ring->source(), 16), Code::kIo, "events");
  const int file = ::open(path_.c_str(), O_RDWR);
  const auto flip = [&](off_t at) {
    char byte = 0;
    ASSERT_EQ(::pread(file, &byte, 1, at), 1);
    byte = static_cast<char>(byte ^ 1);
    ASSERT_EQ(::pwrite(file, &byte, 1, at), 1);
  };
  for (off_t at = 0; at < 88; ++at) {
    flip(at);
    EXPECT_FAILS(EventRing::open(path_), Code::kCorruption) << at;
    flip(at);
  }
  EXPECT_SUCCEEDS(EventRing::open(path_));
  for (const off_t size : {0, 100, 4096, 4096 + 64, 4096 + 15 * 64}) {
    ASSERT_EQ(::ftruncate(file, size), 0);
    EXPECT_FAILS(EventRing::open(path_), Code::kCorruption) << size;
  }
  ::close(file);
  EXPECT_FAILS(EventRing::open(directory_.path()), Code::kFailedPrecondition, "not a file");
}

}  // namespace
}  // namespace torpor
