// SPDX-License-Identifier: Apache-2.0
// The word of a namespace: it lasts until the next one, whenever the process ends, and is believed only whole.
#include "offload/cache_epoch.h"

#include "tests/support/faulty_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using namespace test;

class CacheEpoch : public ::testing::Test {
 protected:
  void put(const std::string& name, std::string_view content) {
    const auto directory = value_of(linux_file_system().open_directory(path_, true));
    (void)directory->remove_file(name);
    const auto file = value_of(directory->create_file(name));
    ASSERT_SUCCEEDS(file->pwrite(std::as_bytes(std::span(content)), 0));
  }
  std::string word() { return value_of(cache_epoch(linux_file_system(), path_)); }
  std::string renew() {
    const RenewedEpoch renewed = renew_cache_epoch(linux_file_system(), path_);
    EXPECT_SUCCEEDS(renewed.kept);
    return renewed.word;
  }

  const TemporaryDirectory temporary_;
  const std::string path_ = temporary_ / "offload";
};

TEST_F(CacheEpoch, ItLastsUntilTheNextOne) {
  EXPECT_EQ(word(), "");
  const std::string first = renew();
  EXPECT_EQ(first.size(), kCacheEpochBytes);
  EXPECT_EQ(word(), first);
  const std::string second = renew();
  EXPECT_NE(second, first);
  EXPECT_EQ(word(), second);
  EXPECT_EQ(value_of(value_of(linux_file_system().open_directory(path_, false))->list()).size(), 1u);
}

// Whichever call fails: either word, whole, or an error; and what it is renewed to is another one in any case. The old
// one counts only if no file could be made.
TEST_F(CacheEpoch, WhicheverCallFailsItIsTheOldOneOrTheNew) {
  uint64_t old = 0;
  uint64_t unknown = 0;
  for (uint64_t call = 1, fired = 1; fired != 0; ++call) {
    const std::string before = renew();
    FaultyFileSystem files;
    files.plan.set(Fault::kError, call);
    const RenewedEpoch renewed = renew_cache_epoch(files, path_);
    fired = files.plan.fired() ? 1 : 0;
    EXPECT_NE(renewed.word, before);
    const Result<std::string> now = cache_epoch(linux_file_system(), path_);
    old += now && *now == before ? 1 : 0;
    unknown += now ? 0 : 1;
    EXPECT_TRUE(!renewed.kept || (now && *now == renewed.word)) << "call " << call;
    EXPECT_TRUE(!now || *now == renewed.word || *now == before) << "call " << call;
    files.plan.set(Fault::kError, call);
    const Result<std::string> read = cache_epoch(files, path_);
    EXPECT_TRUE(!read || (now && *read == *now)) << "call " << call;
  }
  EXPECT_EQ(old, 3u);      // of opening and listing the directory, and of making the file
  EXPECT_EQ(unknown, 4u);  // of cutting, writing, syncing and renaming it
}

TEST_F(CacheEpoch, OnAFullDiskNothingOfTheOldOneIsFoundUntilItIsRenewed) {
  const auto fails = [&] {
    FaultyFileSystem files;
    files.plan.set(Fault::kErrorTorn, 5, ENOSPC, true);
    EXPECT_FAILS(renew_cache_epoch(files, path_).kept, Code::kResourceExhausted);
    EXPECT_FAILS(cache_epoch(linux_file_system(), path_), Code::kCorruption, "space-unfinished is not the word");
  };
  fails();  // the first one
  const std::string after = renew();
  EXPECT_EQ(word(), after);
  fails();
  EXPECT_NE(renew(), after);
}

TEST_F(CacheEpoch, OneThatWasNotWrittenWholeDoesNotCount) {
  const std::string before = renew();
  for (const std::string& torn : {std::string(), std::string("0123"), std::string(kCacheEpochBytes, '\0')}) {
    put("space-7", torn);
    EXPECT_EQ(word(), before);
  }
  const std::string after = renew();
  EXPECT_EQ(word(), after);
}

// Nobody knows then what was stored since.
TEST_F(CacheEpoch, HostileBytesAreNoWord) {
  for (const std::string& hostile :
       {std::string(), std::string("../../etc"), std::string(31, 'a'), std::string(33, 'a'), std::string(32, 'g'),
        std::string(32, '\n'), std::string(1 << 20, 'a')}) {
    put("space-1", hostile);
    EXPECT_FAILS(cache_epoch(linux_file_system(), path_), Code::kCorruption, "space-1");
  }
  for (const std::string name : {"space", "space-", "space-01", "space-1x", "space--1", "space-99999999999"})
    put(name, "?");
  put("space-1", std::string(32, 'a'));
  EXPECT_EQ(word(), std::string(32, 'a'));
}

}  // namespace
}  // namespace torpor
