// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "base/file_system.h"
#include "base/page_buffer.h"
#include "base/units.h"
#include "tests/support/disk_reads.h"
#include "tests/support/groups.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace {

// Where an open with O_DIRECT finds a file of another process, and fails; empty: as usual.
std::string direct_open_meets;

bool renames_have_flags = true;  // false: as on NFS

}  // namespace

// The system's own, as this program calls it.
extern "C" int renameat2(int from, const char* old_name, int to, const char* new_name, unsigned flags) noexcept {
  if (renames_have_flags || flags == 0)
    return static_cast<int>(::syscall(SYS_renameat2, from, old_name, to, new_name, flags));
  errno = EINVAL;
  return -1;
}

extern "C" long syscall(long number, ...) noexcept {
  using Call = long (*)(long, ...);
  static const auto real = reinterpret_cast<Call>(::dlsym(RTLD_NEXT, "syscall"));
  va_list list;
  va_start(list, number);
  long given[6];
  for (long& value : given) value = va_arg(list, long);
  va_end(list);
  if (number == SYS_openat2 && !direct_open_meets.empty() &&
      (reinterpret_cast<const open_how*>(given[2])->flags & O_DIRECT) != 0) {  // NOLINT(performance-no-int-to-ptr)
    std::ofstream(std::exchange(direct_open_meets, {})) << "not yours";
    errno = EINVAL;
    return -1;
  }
  return real(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}

namespace torpor {
namespace {

using test::value_of;

class LinuxFileSystem : public ::testing::Test {
 protected:
  std::unique_ptr<Directory> open() { return value_of(linux_file_system().open_directory(temporary_.path(), false)); }
  static std::span<const std::byte> bytes(std::string_view text) { return std::as_bytes(std::span(text)); }
  mode_t mode(const std::string& name) {
    struct stat info {};
    EXPECT_EQ(::stat((temporary_ / name).c_str(), &info), 0);
    return info.st_mode & 0777;
  }
  test::TemporaryDirectory temporary_;
};

TEST_F(LinuxFileSystem, WritesAndReadsBack) {
  const auto directory = open();
  const auto file = value_of(directory->create_file("f"));
  ASSERT_SUCCEEDS(file->pwrite(bytes("hello world"), 0));
  ASSERT_SUCCEEDS(file->pwrite(bytes("W"), 6));
  ASSERT_SUCCEEDS(file->sync());
  ASSERT_SUCCEEDS(directory->sync());
  EXPECT_EQ(value_of(file->size()), 11u);
  std::string read(5, '\0');
  ASSERT_SUCCEEDS(value_of(directory->open_file("f"))->pread(std::as_writable_bytes(std::span(read)), 6));
  EXPECT_EQ(read, "World");
}

// Direct I/O reads up to the end and calls the rest, which begins in the middle of a block, a wrong argument.
TEST_F(LinuxFileSystem, AFileThatEndsTooEarlyIsDamagedHoweverItIsRead) {
  const auto directory = open();
  constexpr uint64_t kThere = 2 * kPage + 100;
  const std::string content(kThere, 'x');
  {
    const auto written = value_of(directory->create_file("f"));
    ASSERT_SUCCEEDS(written->pwrite(bytes(content), 0));
    ASSERT_SUCCEEDS(written->sync());
  }
  for (const FileIo wish : {FileIo::kFastest, FileIo::kCached, FileIo::kPlain}) {
    const auto file = value_of(directory->open_file("f", wish));
    PageBuffer buffer;
    std::vector<FilePart> parts = {{0, buffer.room(4 * kPage).first(4 * kPage), ok()}};
    file->pread_all(parts);
    EXPECT_FAILS(parts[0].status, Code::kCorruption, "ends too early") << file->io();
    EXPECT_FAILS(file->pread(parts[0].bytes, 0), Code::kCorruption, "ends too early") << file->io();
  }
}

TEST_F(LinuxFileSystem, FilesAreForTheirOwnerOnly) {
  const mode_t before = ::umask(0);
  const auto directory = open();
  ASSERT_SUCCEEDS(directory->create_file("f"));
  ASSERT_SUCCEEDS(directory->create_directory("d"));
  ASSERT_SUCCEEDS(linux_file_system().open_directory(temporary_ / "a/b", true));
  ::umask(before);
  EXPECT_EQ(mode("f"), 0600u);
  EXPECT_EQ(mode("d"), 0700u);
  EXPECT_EQ(mode("a/b"), 0700u);
}

// As kubelet leaves a volume at each start of a pod that has an fsGroup.
TEST_F(LinuxFileSystem, AGroupOfThisProcessMayWrite) {
  const auto use = [&]() -> Status {
    TORPOR_ASSIGN_OR_RETURN(const auto root, linux_file_system().open_directory(temporary_.path(), false));
    TORPOR_ASSIGN_OR_RETURN(const auto below, root->open_directory("d"));
    for (Directory* each : {root.get(), below.get()}) {
      TORPOR_ASSIGN_OR_RETURN(const auto file, each->open_file("f", FileIo::kPlain));
      std::string content(5, '\0');
      TORPOR_RETURN_IF_ERROR(file->pread(std::as_writable_bytes(std::span(content)), 0));
      EXPECT_EQ(content, "hello");
    }
    TORPOR_ASSIGN_OR_RETURN(const auto slots, below->open_slots("f", FileIo::kPlain));
    TORPOR_RETURN_IF_ERROR(slots->pwrite(bytes("hello"), 0));
    TORPOR_RETURN_IF_ERROR(root->lock("LOCK"));
    return ok();
  };
  const auto root = open();
  const auto below = value_of(root->create_directory("d"));
  for (Directory* each : {root.get(), below.get()})
    ASSERT_SUCCEEDS(value_of(each->create_file("f"))->pwrite(bytes("hello"), 0));
  const auto own = test::own_group();
  for (int mount = 0; mount < 2; ++mount) {
    test::give_to_group(temporary_.path(), own);
    EXPECT_SUCCEEDS(use());
  }
  if (::geteuid() == 0) {
    test::give_to_group(temporary_.path(), test::kForeignGroup);
    EXPECT_FAILS(use(), Code::kFailedPrecondition, "not in its group 4711");
    const test::InGroup member(test::kForeignGroup);
    EXPECT_SUCCEEDS(use());
  }
  test::give_to_group(temporary_.path(), own);
  for (const char* name : {"", "/f", "/d", "/d/f"}) {
    const std::string path = temporary_.path() + name;
    const mode_t before = mode(name);
    ASSERT_EQ(::chmod(path.c_str(), before | S_IWOTH), 0);
    EXPECT_FAILS(use(), Code::kFailedPrecondition, "chmod go-w") << path;
    ASSERT_EQ(::chmod(path.c_str(), before), 0);
  }
}

// The bits of the group are then the most that anybody in the list may do.
TEST_F(LinuxFileSystem, AnAccessControlListIsNoGroup) {
  const auto directory = open();
  ASSERT_SUCCEEDS(directory->create_file("f"));
  const std::string path = temporary_ / "f";
  struct Entry {
    uint16_t tag, permissions;
    uint32_t id;
  };
  struct {
    uint32_t version = 2;
    Entry owner{0x01, 6, ~0u}, another{0x02, 6, 12345}, group{0x04, 0, ~0u}, mask{0x10, 6, ~0u}, others{0x20, 0, ~0u};
  } const list;
  if (::setxattr(path.c_str(), "system.posix_acl_access", &list, sizeof list, 0) != 0)
    GTEST_SKIP() << "no access control lists here: " << std::strerror(errno);
  EXPECT_EQ(mode("f"), 0660u);
  EXPECT_FAILS(directory->open_file("f"), Code::kFailedPrecondition, "access control list");
}

TEST_F(LinuxFileSystem, NoSymbolicLinkIsFollowed) {
  std::ofstream(temporary_ / "secret") << "secret";
  ASSERT_EQ(::symlink("secret", (temporary_ / "link").c_str()), 0);
  ASSERT_EQ(::symlink("/", (temporary_ / "root").c_str()), 0);
  const auto directory = open();
  EXPECT_FALSE(directory->open_file("link").has_value());
  EXPECT_FALSE(directory->create_file("link").has_value());
  EXPECT_FALSE(directory->open_directory("root").has_value());
}

TEST_F(LinuxFileSystem, NamesAreSingleComponents) {
  const auto directory = open();
  for (const char* name : {"", ".", "..", "a/b", "/etc"}) {
    EXPECT_FAILS(directory->create_file(name), Code::kInvalidArgument) << name;
    EXPECT_FAILS(directory->open_file(name), Code::kInvalidArgument) << name;
    EXPECT_FAILS(directory->remove_tree(name), Code::kInvalidArgument) << name;
    EXPECT_FAILS(directory->rename_new(name, "x"), Code::kInvalidArgument) << name;
  }
}

TEST_F(LinuxFileSystem, AShortFileIsCorruptionThatNamesIt) {
  const auto directory = open();
  const auto file = value_of(directory->create_file("short"));
  ASSERT_SUCCEEDS(file->pwrite(bytes("abc"), 0));
  std::string read(10, '\0');
  EXPECT_FAILS(file->pread(std::as_writable_bytes(std::span(read)), 0), Code::kCorruption, "short");
}

TEST_F(LinuxFileSystem, RenameNeverReplaces) {
  const auto directory = open();
  for (const bool have_flags : {true, false}) {
    SCOPED_TRACE(have_flags ? "as on a disk" : "as on NFS");
    renames_have_flags = have_flags;
    ASSERT_SUCCEEDS(directory->create_directory("a"));
    ASSERT_SUCCEEDS(directory->create_directory("b"));
    EXPECT_FALSE(directory->rename_new("a", "b").has_value());
    ASSERT_SUCCEEDS(directory->rename_new("a", "c"));
    EXPECT_FAILS(directory->open_directory("a"), Code::kNotFound);
    EXPECT_FAILS(directory->rename_new("a", "d"), Code::kNotFound);
    ASSERT_SUCCEEDS(value_of(directory->create_file("f"))->pwrite(bytes("first"), 0));
    ASSERT_SUCCEEDS(value_of(directory->create_file("g"))->pwrite(bytes("other"), 0));
    EXPECT_FALSE(directory->rename_new("f", "g").has_value());
    EXPECT_FALSE(directory->rename_new("f", "b").has_value());
    ASSERT_SUCCEEDS(directory->rename_new("f", "h"));
    EXPECT_FAILS(directory->open_file("f"), Code::kNotFound);
    EXPECT_EQ(value_of(value_of(directory->open_file("h"))->size()), 5u);
    for (const char* name : {"b", "c", "g", "h"}) ASSERT_SUCCEEDS(directory->remove_tree(name));
  }
  renames_have_flags = true;
}

TEST_F(LinuxFileSystem, CreatingWhatExistsFails) {
  const auto directory = open();
  ASSERT_SUCCEEDS(directory->create_file("f"));
  EXPECT_FALSE(directory->create_file("f").has_value());
  ASSERT_SUCCEEDS(directory->create_directory("d"));
  EXPECT_FALSE(directory->create_directory("d").has_value());
}

TEST_F(LinuxFileSystem, RemovingATreeLeavesWhatItsLinksPointTo) {
  std::ofstream(temporary_ / "kept") << "kept";
  ::mkdir((temporary_ / "tree").c_str(), 0700);
  ::mkdir((temporary_ / "tree/sub").c_str(), 0700);
  std::ofstream(temporary_ / "tree/sub/file") << "x";
  ASSERT_EQ(::symlink((temporary_ / "kept").c_str(), (temporary_ / "tree/link").c_str()), 0);
  ASSERT_EQ(::symlink(temporary_.path().c_str(), (temporary_ / "tree/up").c_str()), 0);
  const auto directory = open();
  ASSERT_SUCCEEDS(directory->remove_tree("tree"));
  EXPECT_EQ(::access((temporary_ / "tree").c_str(), F_OK), -1);
  EXPECT_EQ(::access((temporary_ / "kept").c_str(), F_OK), 0);
}

TEST_F(LinuxFileSystem, ALockHasOneHolderUntilItIsLetGo) {
  const auto directory = open();
  auto lock = value_of(directory->lock("LOCK"));
  EXPECT_FAILS(open()->lock("LOCK"), Code::kUnavailable);
  lock.reset();
  EXPECT_SUCCEEDS(open()->lock("LOCK"));
}

TEST_F(LinuxFileSystem, ListsSortedWithKinds) {
  const auto directory = open();
  ASSERT_SUCCEEDS(directory->create_file("b"));
  ASSERT_SUCCEEDS(directory->create_directory("a"));
  ASSERT_EQ(::symlink("b", (temporary_ / "c").c_str()), 0);
  const auto entries = value_of(directory->list());
  ASSERT_EQ(entries.size(), 3u);
  EXPECT_EQ(entries[0].name, "a");
  EXPECT_EQ(entries[0].kind, EntryKind::kDirectory);
  EXPECT_EQ(entries[1].kind, EntryKind::kFile);
  EXPECT_EQ(entries[2].kind, EntryKind::kOther);
}

// Many parts at once, through whatever the system has, and through plain calls; in an order of their own.
TEST_F(LinuxFileSystem, SlotsAreWrittenAndReadManyAtOnce) {
  constexpr size_t kSlot = 8192;
  constexpr size_t kSlots = 150;  // more than go at the same time
  for (const FileIo wish : {FileIo::kFastest, FileIo::kPlain}) {
    const auto file = value_of(open()->open_slots(wish == FileIo::kPlain ? "plain" : "fastest", wish));
    SCOPED_TRACE(file->io());
    EXPECT_EQ(file->io() == "plain", wish == FileIo::kPlain);
    const std::unique_ptr<std::byte, void (*)(void*)> memory(
        static_cast<std::byte*>(std::aligned_alloc(4096, kSlot * kSlots)), std::free);
    std::vector<FilePart> parts;
    for (size_t i = 0; i < kSlots; ++i) {
      const std::span<std::byte> slot(memory.get() + i * kSlot, kSlot);
      std::fill(slot.begin(), slot.end(), static_cast<std::byte>(i));
      parts.push_back({(kSlots - 1 - i) * kSlot, slot, ok()});
    }
    file->pwrite_all(parts);
    for (const FilePart& part : parts) EXPECT_SUCCEEDS(part.status);
    EXPECT_EQ(value_of(file->size()), kSlot * kSlots);
    std::memset(memory.get(), 0, kSlot * kSlots);
    file->pread_all(parts);
    for (size_t i = 0; i < kSlots; ++i) {
      EXPECT_SUCCEEDS(parts[i].status);
      EXPECT_EQ(parts[i].bytes[kSlot - 1], static_cast<std::byte>(i));
    }
    parts[3].offset = kSlots * kSlot;  // behind the end
    file->pread_all(parts);
    EXPECT_FAILS(parts[3].status, Code::kCorruption, "ends too early");
    EXPECT_SUCCEEDS(parts[4].status);
  }
}

// What is cached comes from there, the rest from the disk, once; who wishes for the disk gets it.
TEST_F(LinuxFileSystem, WhatIsCachedIsNotReadFromTheDiskUnlessThatIsWished) {
  constexpr size_t kSize = 4 * kMiB;
  const auto directory = open();
  const std::unique_ptr<std::byte, void (*)(void*)> memory(static_cast<std::byte*>(std::aligned_alloc(kPage, kSize)),
                                                           std::free);
  const std::span<std::byte> room(memory.get(), kSize);
  std::vector<std::byte> content(kSize);
  for (size_t i = 0; i < kSize; ++i) content[i] = static_cast<std::byte>(i * 31 + i / kPage * 7);
  const auto written = value_of(directory->create_file("file"));
  constexpr size_t kWrite = 64 * kKiB;  // what the kernel keeps, and forgets, at once is not larger
  for (size_t at = 0; at < kSize; at += kWrite)
    ASSERT_SUCCEEDS(written->pwrite(std::span(content).subspan(at, kWrite), at));
  ASSERT_SUCCEEDS(written->sync());
  // In two parts, in an order of their own. What it had from the disk.
  const auto read = [&](FileIo wish) {
    std::fill(room.begin(), room.end(), std::byte{});
    const auto file = value_of(directory->open_file("file", wish));
    std::vector<FilePart> parts = {{kSize / 4, room.subspan(kSize / 4), ok()}, {0, room.first(kSize / 4), ok()}};
    const uint64_t before = test::read_from_disk();
    file->pread_all(parts);
    const uint64_t from_disk = test::read_from_disk() - before;
    for (const FilePart& part : parts) EXPECT_SUCCEEDS(part.status);
    EXPECT_TRUE(std::equal(room.begin(), room.end(), content.begin()));
    return from_disk;
  };
  const bool direct = value_of(directory->open_file("file", FileIo::kFastest))->io().ends_with("direct");
  EXPECT_EQ(read(FileIo::kFastest), direct ? kSize : 0);
  EXPECT_EQ(read(FileIo::kCached), 0);
  ASSERT_TRUE(test::forget_cached(temporary_ / "file", 5 * kMiB / 2,
                                  kMiB / 4));  // the middle of a piece: its first half is cached
  const uint64_t gap = read(FileIo::kCached);
  EXPECT_EQ(gap > 0, direct);
  EXPECT_LT(gap, kMiB);
  ASSERT_TRUE(test::forget_cached(temporary_ / "file"));
  EXPECT_EQ(read(FileIo::kCached), direct ? kSize : 0);  // nothing is read ahead
  EXPECT_EQ(read(FileIo::kCached), direct ? kSize : 0);  // and nothing is cached by it
}

// A file system without direct I/O refuses it after it has made the file; meanwhile another process puts its own there.
TEST_F(LinuxFileSystem, AFileThatIsToBeNewIsNeverOneOfSomebodyElse) {
  const auto directory = open();
  direct_open_meets = temporary_ / "new";
  const Result<std::unique_ptr<File>> made = directory->create_file("new", FileIo::kFastest);
  const bool met = std::exchange(direct_open_meets, {}).empty();
  if (made) {
    EXPECT_FALSE(met);
    EXPECT_EQ(value_of((*made)->size()), 0u);
  }
}

TEST_F(LinuxFileSystem, HoweverADirectoryIsNamedItsPathEndsWithItsName) {
  const std::string one = temporary_ / "one";
  ASSERT_SUCCEEDS(linux_file_system().open_directory(one, true));
  const std::string name = boost::filesystem::path(temporary_.path()).filename().string();
  for (const std::string& path : {one, one + "/", one + "//", one + "/.", one + "/./", temporary_.path() + "/./one",
                                  one + "/../../" + name + "/one"})
    EXPECT_EQ(value_of(linux_file_system().open_directory(path, false))->path(), one) << path;
  EXPECT_EQ(value_of(linux_file_system().open_directory(temporary_ / "made/of/it/", true))->path(),
            temporary_ / "made/of/it");
  const boost::filesystem::path before = boost::filesystem::current_path();
  boost::filesystem::current_path(one);
  EXPECT_EQ(value_of(linux_file_system().open_directory(".", false))->path(), one);
  boost::filesystem::current_path(before);
  EXPECT_EQ(plain_path("/"), "/");
  EXPECT_EQ(plain_path("/."), "/");
}

TEST_F(LinuxFileSystem, AMissingDirectoryIsNotFound) {
  EXPECT_FAILS(linux_file_system().open_directory(temporary_ / "none", false), Code::kNotFound);
}

}  // namespace
}  // namespace torpor
