// SPDX-License-Identifier: Apache-2.0
#include "console/recording.h"

#include <fcntl.h>
#include <unistd.h>

#include "tests/support/faulty_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::console {
namespace {

using test::value_of;

std::vector<Event> some(uint64_t first, uint64_t count) {
  std::vector<Event> events;
  for (uint64_t i = first; i < first + count; ++i)
    events.push_back({.sequence = i, .time = static_cast<int64_t>(i), .type = EventType::kStep, .a = i * 7});
  return events;
}

class Recording : public testing::Test {
 protected:
  void SetUp() override {
    const auto directory = value_of(linux_file_system().open_directory(temporary_.path(), false));
    const auto writer = value_of(RecordingWriter::create(*directory, "r", this_process("core", 2, system_clock())));
    ASSERT_SUCCEEDS(writer->write(some(1, 3)));
    ends_.push_back(writer->bytes());
    ASSERT_SUCCEEDS(writer->write(some(4, 5)));
    ends_.push_back(writer->bytes());
    ASSERT_SUCCEEDS(writer->sync());
  }
  Result<SourceEvents> read() const {
    return read_recording(*value_of(linux_file_system().open_directory(temporary_.path(), false)), "r.events");
  }
  std::string path() const { return temporary_ / "r.events"; }
  test::TemporaryDirectory temporary_;
  std::vector<uint64_t> ends_;
};

TEST_F(Recording, ComesBackAsItWas) {
  const SourceEvents found = value_of(read());
  EXPECT_EQ(found.source.role, "core");
  EXPECT_EQ(found.source.rank, 2);
  EXPECT_EQ(found.events, some(1, 8));
  EXPECT_EQ(found.damaged, 0u);
}

TEST_F(Recording, CutAnywhereItIsWhatWasWholeBefore) {
  for (uint64_t size = ends_[1]; size-- > 0;) {
    ASSERT_EQ(::truncate(path().c_str(), static_cast<off_t>(size)), 0);
    const Result<SourceEvents> found = read();
    if (size < kEventHeadBytes) {
      EXPECT_FAILS(found, Code::kCorruption) << size;
      size = std::min<uint64_t>(size, 200);  // not every length of the empty head
      continue;
    }
    const uint64_t whole = size < ends_[0] ? kEventHeadBytes : ends_[0];
    EXPECT_EQ(value_of(read()).events, some(1, size < ends_[0] ? 0 : 3)) << size;
    EXPECT_EQ(found->damaged, size - whole);
  }
}

TEST_F(Recording, AChangedBitIsNeverAnEvent) {
  const int file = ::open(path().c_str(), O_RDWR);
  const auto flip = [&](uint64_t bit) {
    char byte = 0;
    ASSERT_EQ(::pread(file, &byte, 1, static_cast<off_t>(bit / 8)), 1);
    byte = static_cast<char>(byte ^ 1 << bit % 8);
    ASSERT_EQ(::pwrite(file, &byte, 1, static_cast<off_t>(bit / 8)), 1);
  };
  for (uint64_t bit = kEventHeadBytes * 8; bit < ends_[1] * 8; ++bit) {
    flip(bit);
    const SourceEvents found = value_of(read());
    EXPECT_EQ(found.events, some(1, bit < ends_[0] * 8 ? 0 : 3)) << bit;
    EXPECT_GT(found.damaged, 0u);
    flip(bit);
  }
  ::close(file);
  EXPECT_EQ(value_of(read()).events.size(), 8u);
}

TEST_F(Recording, APartThatIsWrittenTwiceIsNoSecondPart) {
  const int file = ::open(path().c_str(), O_RDWR);
  std::vector<char> part(ends_[1] - ends_[0]);
  ASSERT_EQ(::pread(file, part.data(), part.size(), static_cast<off_t>(ends_[0])), static_cast<ssize_t>(part.size()));
  ASSERT_EQ(::pwrite(file, part.data(), part.size(), static_cast<off_t>(ends_[1])), static_cast<ssize_t>(part.size()));
  ::close(file);
  const SourceEvents found = value_of(read());
  EXPECT_EQ(found.events, some(1, 8));
  EXPECT_EQ(found.damaged, part.size());
}

// Each call of a file fails once: what was said to be written is there, and nothing else.
TEST(RecordingFailure, WhateverFailsWhatIsThereIsWhole) {
  for (uint64_t n = 1;; ++n) {
    SCOPED_TRACE(n);
    const test::TemporaryDirectory temporary;
    test::FaultyFileSystem files;
    const auto directory = value_of(files.open_directory(temporary.path(), false));
    files.plan.set(test::Fault::kError, n);
    uint64_t written = 0;
    auto writer = RecordingWriter::create(*directory, "r", this_process("core", 0, system_clock()));
    for (uint64_t part = 0; writer && part < 4; ++part) {
      const bool good = (*writer)->write(some(1 + part * 10, 10)).has_value();
      EXPECT_TRUE(!good || written == part) << "written behind a failure";
      written += good ? 1 : 0;
      (void)(*writer)->sync();
    }
    const bool fired = files.plan.fired();
    files.plan.clear();
    if (writer) {
      EXPECT_EQ(value_of(read_recording(*directory, "r.events")).events, some(1, written * 10));
    }
    if (!fired) break;
    ASSERT_LT(n, 100u);
  }
}

}  // namespace
}  // namespace torpor::console
