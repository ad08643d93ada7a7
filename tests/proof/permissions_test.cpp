// SPDX-License-Identifier: Apache-2.0
// Who may read and write what is stored: under every umask, with other owners, and with links swapped in.
#include <atomic>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/proof/workloads.h"
#include "tests/support/groups.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/written_checkpoint.h"

namespace torpor::proof {
namespace {

namespace fs = std::filesystem;
using test::value_of;

mode_t mode_of(const fs::path& path) {
  struct stat info {};
  EXPECT_EQ(::lstat(path.c_str(), &info), 0) << path;
  return info.st_mode & 07777;
}

TEST(Permissions, UnderEveryUmaskFilesAre0600AndDirectories0700) {
  uint64_t checked = 0;
  for (mode_t mask = 0; mask < 01000; ++mask) {
    const test::TemporaryDirectory temporary(test::in_memory());
    const mode_t before = ::umask(mask);
    const auto manager =
        CheckpointManager::open(linux_file_system(), temporary / "a/store", {.retention = {.keep = 2}});
    const Result<std::string> written = test::write_checkpoint(**manager);
    const Status woken = (*manager)->woken_from(1);
    ::umask(before);
    ASSERT_SUCCEEDS(written) << mask;
    ASSERT_SUCCEEDS(woken);
    for (const auto& entry : fs::recursive_directory_iterator(temporary / "a")) {
      ASSERT_EQ(mode_of(entry.path()), entry.is_directory() ? 0700u : 0600u)
          << entry.path() << std::oct << ", umask " << mask;
      ++checked;
    }
  }
  std::printf("proof: 512 umasks, %lu files and directories with the right mode\n",
              static_cast<unsigned long>(checked));
}

class Foreign : public ::testing::Test {
 protected:
  void SetUp() override {
    value_of(test::write_checkpoint(*value_of(CheckpointManager::open(linux_file_system(), store_))));
  }
  Status use() {
    TORPOR_RETURN_IF_ERROR(value_of(CheckpointManager::open(linux_file_system(), store_))->list());
    return ok();
  }
  Status read() {
    TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint, open_checkpoint(linux_file_system(), store_ + "/g-000001"));
    TORPOR_RETURN_IF_ERROR(checkpoint.read_state());
    return ok();
  }
  test::TemporaryDirectory temporary_{test::in_memory()};
  std::string store_ = temporary_ / "store";
};

TEST_F(Foreign, WhatOthersMayWriteToIsRefused) {
  for (const char* entry : {"", "/g-000001", "/g-000001/MANIFEST", "/g-000001/STATE"}) {
    const fs::path path = store_ + entry;
    const mode_t before = mode_of(path);
    for (const mode_t more : {020, 002}) {
      if (more == 020 && ::geteuid() != 0) continue;  // only root can give files to a group it is not in
      const gid_t group = more == 020 ? test::kForeignGroup : test::own_group();
      ASSERT_EQ(::chown(path.c_str(), static_cast<uid_t>(-1), group), 0);
      ASSERT_EQ(::chmod(path.c_str(), before | more), 0);
      EXPECT_FAILS(path == store_ ? use() : read(), Code::kFailedPrecondition, "chmod go-w") << path;
      ASSERT_EQ(::chmod(path.c_str(), before), 0);
    }
    EXPECT_SUCCEEDS(read());
  }
  ASSERT_EQ(::chmod(temporary_.path().c_str(), 0777), 0);
  EXPECT_FAILS(use(), Code::kFailedPrecondition, "everybody may write");
  ASSERT_EQ(::chmod(temporary_.path().c_str(), 01777), 0);  // as /tmp: only an owner may rename
  EXPECT_SUCCEEDS(use());
}

// kubelet gives the whole tree to the pod's fsGroup at each mount.
TEST_F(Foreign, AVolumeOfAGroupOfThisProcessGoesOn) {
  const gid_t group = ::geteuid() == 0 ? test::kForeignGroup : test::own_group();
  std::optional<test::InGroup> member;
  if (group == test::kForeignGroup) {
    test::give_to_group(temporary_.path(), group);
    EXPECT_FAILS(use(), Code::kFailedPrecondition, "not in its group");
    member.emplace(group);
  }
  for (int mount = 0; mount < 2; ++mount) {
    test::give_to_group(temporary_.path(), group);
    EXPECT_SUCCEEDS(read());
    const auto manager = value_of(CheckpointManager::open(linux_file_system(), store_, {.retention = {.keep = 4}}));
    ASSERT_SUCCEEDS(test::write_checkpoint(*manager));
    const std::vector<CheckpointInfo> found = value_of(manager->list());
    ASSERT_EQ(found.size(), static_cast<size_t>(mount) + 2);
    for (const CheckpointInfo& each : found) EXPECT_TRUE(each.readable) << each.problem.to_string();
    EXPECT_SUCCEEDS(manager->woken_from(1));
  }
}

TEST_F(Foreign, WhatBelongsToAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  for (const char* entry : {"", "/g-000001", "/g-000001/MANIFEST", "/g-000001/STATE"}) {
    const std::string path = store_ + entry;
    ASSERT_EQ(::chown(path.c_str(), 12345, 12345), 0);
    EXPECT_FAILS(read(), Code::kFailedPrecondition, "12345") << path;
    ASSERT_EQ(::chown(path.c_str(), 0, 0), 0);
  }
  EXPECT_SUCCEEDS(read());
}

// Somebody exchanges entries for links to what lies outside, all the time, while checkpoints are read, removed and
// written.
TEST_F(Foreign, LinksSwappedInMeanwhileLeadNowhere) {
  const std::string outside = temporary_ / "outside";
  fs::create_directory(outside);
  std::ofstream(outside + "/MANIFEST") << "precious";
  std::ofstream(outside + "/STATE") << "precious";
  std::atomic<bool> stop = false;
  std::atomic<uint64_t> swaps = 0;
  std::thread attacker([&] {
    while (!stop) {
      std::error_code ignored;
      for (const char* name : {"/t-g-000001", "/s-000003", "/g-000002"}) {
        fs::create_directory_symlink(outside, store_ + name, ignored);
        fs::rename(store_ + name, store_ + "/moved", ignored);
        fs::remove(store_ + "/moved", ignored);
        for (const char* inner : {"/MANIFEST", "/STATE"}) {
          fs::rename(store_ + "/g-000001" + inner, store_ + "/kept", ignored);
          fs::create_symlink(outside + inner, store_ + "/g-000001" + inner, ignored);
          fs::remove(store_ + "/g-000001" + inner, ignored);
          fs::rename(store_ + "/kept", store_ + "/g-000001" + inner, ignored);
        }
        swaps += 3;
      }
    }
  });
  const int rounds = long_run() ? 20'000 : 1'000;
  for (int i = 0; i < rounds; ++i) {
    const auto manager = value_of(CheckpointManager::open(linux_file_system(), store_, {.retention = {.keep = 2}}));
    (void)manager->list();
    (void)read();
    (void)manager->collect();
    (void)test::write_checkpoint(*manager);
    for (uint64_t generation = 2; generation < 5; ++generation) (void)manager->remove(generation);
  }
  stop = true;
  attacker.join();
  for (const char* name : {"/MANIFEST", "/STATE"}) {
    std::ifstream file(outside + name);
    std::string content;
    file >> content;
    EXPECT_EQ(content, "precious") << name;
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(outside), fs::directory_iterator()), 2);
  std::printf("proof: %lu links swapped in over %d rounds, nothing outside was touched\n",
              static_cast<unsigned long>(swaps), rounds);
}

}  // namespace
}  // namespace torpor::proof
