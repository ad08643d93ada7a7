// SPDX-License-Identifier: Apache-2.0
// Segments that a checkpoint keeps.
#include <fmt/core.h>

#include "tests/offload/disk_world.h"

namespace torpor {
namespace {

using namespace test;

std::vector<std::byte> bytes_at(const std::string& path, uint64_t offset, uint64_t size) {
  std::vector<std::byte> bytes(size);
  std::ifstream file(path, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(offset));
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
  EXPECT_TRUE(file.good());
  return bytes;
}

class Leases : public ::testing::TestWithParam<int> {
 protected:
  // An errno of link(), or 0: there are links.
  void refuse() {
    if (GetParam() != 0) world_.files.plan.set(Fault::kError, 1, GetParam());
  }
  std::unique_ptr<Directory> into(const std::string& name = "") {
    return value_of(world_.files.open_directory(target_.path() + name, true));
  }
  void expect_there(const LeasedRecord& leased, uint64_t seed) {
    EXPECT_EQ(bytes_at(target_ / leased.file, leased.offset, leased.record.stored), some_bytes(seed, kContractRecord));
  }
  DiskWorld world_;
  TemporaryDirectory target_;
};
INSTANTIATE_TEST_SUITE_P(Links, Leases, ::testing::Values(0, EPERM, EXDEV, EMLINK, EOPNOTSUPP), [](const auto& info) {
  return info.param == 0 ? std::string("Linked") : fmt::format("Copied{}", info.param);
});

TEST_P(Leases, WhatWasLeasedOutlivesTheSegmentAndTheStore) {
  put_batches(world_.store(), 0, 20, 5);
  ASSERT_SUCCEEDS(world_.store().sync());
  const auto directory = into();
  refuse();
  const StoreSlot first[] = {0, 1, 6};
  const auto one = value_of(world_.store().lease(first, *directory));
  world_.files.plan.clear();
  const StoreSlot second[] = {9, 2, 17};  // of the same segment, and of another one
  if (GetParam() != 0) world_.files.plan.set(Fault::kError, 1, EEXIST);
  const auto two = value_of(world_.store().lease(second, *directory));
  world_.files.plan.clear();
  EXPECT_EQ(one[0].file, "seg-r3-000000");
  EXPECT_EQ(two[2].file, "seg-r3-000001");
  EXPECT_EQ(one[0].id, two[0].id);
  const bool linked = GetParam() == 0;
  struct stat info {};
  ASSERT_EQ(::stat((target_ / one[0].file).c_str(), &info), 0);
  EXPECT_EQ(info.st_nlink, linked ? 2u : 1u);
  EXPECT_EQ(world_.store().health().copied_bytes > 0, !linked);
  const SlotRange all{.first = 0, .count = 2 * kSlots};
  world_.store().drop({&all, 1});
  world_.open();
  EXPECT_EQ(recovered_by(world_.store()), std::set<StoreSlot>{});
  for (size_t i = 0; i < 3; ++i) {
    expect_there(one[i], static_cast<uint64_t>(first[i]));
    expect_there(two[i], static_cast<uint64_t>(second[i]));
  }
}

TEST_P(Leases, OnlyWhatIsDurableIsLeased) {
  put_batches(world_.store(), 0, 2, 2);
  const auto directory = into();
  const StoreSlot both[] = {0, 2};
  EXPECT_FAILS(world_.store().lease({both, 1}, *directory), Code::kFailedPrecondition, "not synced");
  ASSERT_SUCCEEDS(world_.store().sync());
  put_batches(world_.store(), 2, 2, 2);
  EXPECT_FAILS(world_.store().lease(both, *directory), Code::kFailedPrecondition, "slot 2");
  refuse();
  EXPECT_SUCCEEDS(world_.store().lease({both, 1}, *directory));
  world_.files.plan.clear();
  const StoreSlot missing[] = {12};
  EXPECT_FAILS(world_.store().lease(missing, *directory), Code::kNotFound);
  const StoreSlot wrong[] = {-1};
  EXPECT_FAILS(world_.store().lease(wrong, *directory), Code::kNotFound);
  // What a restart found may be in no more than the system's memory.
  world_.open();
  EXPECT_EQ(recovered_by(world_.store()).size(), 4u);
  const auto fresh = into("/other");
  EXPECT_FAILS(world_.store().lease(both, *fresh), Code::kFailedPrecondition, "not synced");
  ASSERT_SUCCEEDS(world_.store().sync());
  EXPECT_SUCCEEDS(world_.store().lease(both, *fresh));
}

TEST(LeasesOfOthers, AFileThatSomebodyElsePutThereIsNotTakenForTheSegment) {
  DiskWorld world;
  put_batches(world.store(), 0, 2, 2);
  ASSERT_SUCCEEDS(world.store().sync());
  const TemporaryDirectory target;
  const auto into = value_of(world.files.open_directory(target.path(), false));
  const std::vector<std::byte> noise(2 * kPage, std::byte{5});
  ASSERT_SUCCEEDS(value_of(into->create_file("seg-r3-000000"))->pwrite(noise, 0));
  const StoreSlot slot[] = {0};
  EXPECT_FALSE(world.store().lease(slot, *into).has_value());
  EXPECT_EQ(bytes_at(target / "seg-r3-000000", 0, 2 * kPage), noise);
}

}  // namespace
}  // namespace torpor
