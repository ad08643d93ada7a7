// SPDX-License-Identifier: Apache-2.0
// Whoever records is killed at any call of a file, or the power goes: what is left is a beginning of what was told,
// with all that was acknowledged.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <random>

#include "console/recording.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/model_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::console {
namespace {

using test::value_of;

constexpr uint64_t kParts = 4;
constexpr uint64_t kOfAPart = 10;

std::vector<Event> events_of(uint64_t part) {
  std::vector<Event> events;
  for (uint64_t i = part * kOfAPart + 1; i <= (part + 1) * kOfAPart; ++i)
    events.push_back({.sequence = i, .time = static_cast<int64_t>(i), .type = EventType::kStep, .a = i * 7});
  return events;
}

// How many parts were acknowledged; `acknowledged` is called after each.
template <class Acknowledged>
Status record(FileSystem& files, const std::string& path, const Acknowledged& acknowledged) {
  TORPOR_ASSIGN_OR_RETURN(const auto directory, files.open_directory(path, true));
  TORPOR_ASSIGN_OR_RETURN(const auto writer,
                          RecordingWriter::create(*directory, "r", this_process("core", 0, system_clock())));
  for (uint64_t part = 0; part < kParts; ++part) {
    TORPOR_RETURN_IF_ERROR(writer->write(events_of(part)));
    TORPOR_RETURN_IF_ERROR(writer->sync());
    acknowledged(part + 1);
  }
  return ok();
}

// Parts that are there, of which nothing may be wrong; 0: not even a head.
uint64_t parts_in(const Directory& directory) {
  const Result<SourceEvents> found = read_recording(directory, "r.events");
  if (!found) return 0;
  EXPECT_EQ(found->events.size() % kOfAPart, 0u);
  for (size_t i = 0; i < found->events.size(); ++i) EXPECT_EQ(found->events[i], events_of(i / kOfAPart)[i % kOfAPart]);
  return found->events.size() / kOfAPart;
}

TEST(RecordingCrash, KilledAtAnyCallOfAFileABeginningIsThere) {
  void* const memory = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto& acknowledged = *static_cast<std::atomic<uint64_t>*>(memory);
  int kills = 0;
  for (const test::Fault fault : {test::Fault::kKillBefore, test::Fault::kKillAfter, test::Fault::kKillTorn}) {
    for (uint64_t call = 1; call < 100; ++call) {
      SCOPED_TRACE(call);
      const test::TemporaryDirectory temporary(test::in_memory());
      acknowledged = 0;
      const pid_t child = ::fork();
      if (child == 0) {
        test::FaultyFileSystem files;
        files.plan.set(fault, call);
        const Status done = record(files, temporary / "records", [&](uint64_t parts) { acknowledged = parts; });
        ::_exit(!done ? 1 : files.plan.calls < call ? 2 : 0);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      if (WIFEXITED(status)) {
        ASSERT_NE(WEXITSTATUS(status), 1);
        if (WEXITSTATUS(status) == 2) break;  // it makes fewer calls
        continue;                             // what is torn is a write, and this was none
      }
      ++kills;
      const auto directory = linux_file_system().open_directory(temporary / "records", false);
      if (!directory) {
        EXPECT_EQ(acknowledged, 0u);
        continue;
      }
      EXPECT_GE(parts_in(**directory), acknowledged);
    }
  }
  EXPECT_GT(kills, 3 * static_cast<int>(kParts));
  ::munmap(memory, 4096);
}

TEST(RecordingCrash, AfterAPowerCutWhatWasSyncedIsThere) {
  test::ModelFileSystem files;
  std::vector<size_t> synced;  // by parts: how many changes there were
  ASSERT_SUCCEEDS(record(files, "/records", [&](uint64_t) { synced.push_back(files.record.size()); }));
  std::mt19937_64 random(1);
  test::PowerCuts cuts(files.record, test::ModelDisk(1, test::ModelNode{.is_directory = true}));
  int states = 0;
  while (true) {
    const auto least = static_cast<uint64_t>(
        std::count_if(synced.begin(), synced.end(), [&](size_t at) { return at <= cuts.position(); }));
    for (int choice = 0; choice < 20; ++choice, ++states) {
      test::ModelFileSystem after(cuts.state(choice, random));
      const auto directory = after.open_directory("/records", false);
      EXPECT_GE(directory ? parts_in(**directory) : 0, least) << "after " << cuts.position() << " changes";
    }
    if (cuts.done()) break;
    cuts.step();
  }
  EXPECT_EQ(synced.size(), kParts);
  EXPECT_GT(states, 100);
}

}  // namespace
}  // namespace torpor::console
