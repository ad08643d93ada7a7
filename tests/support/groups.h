// SPDX-License-Identifier: Apache-2.0
// Groups of files and of this process, as kubelet sets them for a volume with a pod's fsGroup.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <grp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gtest/gtest.h>

namespace torpor::test {

inline constexpr gid_t kForeignGroup = 4711;  // a group that this process is not in

inline gid_t own_group() { return ::getegid(); }

// Give a tree to `group` as kubelet does at each mount: chgrp; files |= 0660; directories |= 02770.
inline void give_to_group(const std::string& root, gid_t group) {
  const auto give = [group](const std::string& path) {
    struct stat info {};
    ASSERT_EQ(::lstat(path.c_str(), &info), 0) << path;
    ASSERT_EQ(::lchown(path.c_str(), static_cast<uid_t>(-1), group), 0) << path;
    const mode_t more = S_ISDIR(info.st_mode) ? 02770 : 0660;
    ASSERT_EQ(::chmod(path.c_str(), (info.st_mode & 07777) | more), 0) << path;
  };
  give(root);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) give(entry.path());
}

// Adds this process to one more group while it exists. Needs root.
class InGroup {
 public:
  explicit InGroup(gid_t group) : before_(static_cast<size_t>(::getgroups(0, nullptr))) {
    EXPECT_GE(::getgroups(static_cast<int>(before_.size()), before_.data()), 0);
    std::vector<gid_t> with = before_;
    with.push_back(group);
    EXPECT_EQ(::setgroups(with.size(), with.data()), 0);
  }
  ~InGroup() { EXPECT_EQ(::setgroups(before_.size(), before_.data()), 0); }
  InGroup(const InGroup&) = delete;
  InGroup& operator=(const InGroup&) = delete;

 private:
  std::vector<gid_t> before_;
};

}  // namespace torpor::test
