// SPDX-License-Identifier: Apache-2.0
// What every tier must do, run on all.
#include <array>
#include <cstring>
#include <numeric>
#include <thread>

#include "base/units.h"
#include "offload/disk_tier.h"
#include "offload/host_tier.h"
#include "tests/support/chunk_files.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using test::value_of;

enum class Kind : uint8_t { kHost, kPackedHost, kDisk };

class TierContract : public ::testing::TestWithParam<Kind> {
 protected:
  std::unique_ptr<RecordStore> make() {
    if (GetParam() == Kind::kHost) return std::make_unique<HostTier>(*arena_);
    if (GetParam() == Kind::kPackedHost) return std::make_unique<HostTier>(*arena_, Codec::kBf16);
    directory_ = value_of(linux_file_system().open_directory(temporary_.path(), false));
    return value_of(DiskTier::create(*directory_, "chunks", {.rank = 3}));
  }
  // The tier to read from: a disk tier is read by another object, as after a restart.
  std::unique_ptr<RecordStore> reopen(std::unique_ptr<RecordStore> tier) {
    if (GetParam() != Kind::kDisk) return tier;
    tier.reset();
    return value_of(test::open_chunks(*directory_, "chunks", 3));
  }
  static std::vector<std::byte> content(uint64_t index, size_t size) {
    std::vector<std::byte> bytes(size);
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 7 + index);
    for (size_t i = 1; i < size && index % 2 == 0; i += 2) bytes[i] = std::byte{0x3c};  // as bf16 values of one size
    return bytes;
  }
  static Status put(RecordStore& tier, SavedChunk& chunk, std::vector<std::byte> bytes) {
    RecordPart part{&chunk, bytes, ok()};
    tier.put({&part, 1});
    return part.status;
  }
  test::TemporaryDirectory temporary_;
  std::unique_ptr<HostArena> arena_ = value_of(HostArena::create({.slab_bytes = kMiB}));
  std::unique_ptr<Directory> directory_;
};
INSTANTIATE_TEST_SUITE_P(Tiers, TierContract, ::testing::Values(Kind::kHost, Kind::kPackedHost, Kind::kDisk),
                         [](const auto& info) {
                           return info.param == Kind::kHost   ? "Host"
                                  : info.param == Kind::kDisk ? "Disk"
                                                              : "PackedHost";
                         });

TEST_P(TierContract, ChunksOfAnySizePutByManyThreadsComeBack) {
  std::unique_ptr<RecordStore> tier = make();
  constexpr uint64_t kChunks = 64;
  std::vector<SavedChunk> chunks(kChunks);
  const auto size_of = [](uint64_t i) { return 1 + i * 997; };
  uint64_t total = 0;
  for (uint64_t i = 0; i < kChunks; ++i) total += size_of(i);
  ASSERT_SUCCEEDS(tier->prepare(total, kChunks));
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = t; i < kChunks; i += 4) {
        chunks[i].key.index = i;
        chunks[i].bytes = size_of(i);
        EXPECT_SUCCEEDS(put(*tier, chunks[i], content(i, size_of(i))));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_SUCCEEDS(tier->finish());
  tier = reopen(std::move(tier));
  for (uint64_t i = 0; i < kChunks; ++i) {
    std::vector<std::byte> bytes(size_of(i));
    ASSERT_SUCCEEDS(tier->get_one(chunks[i], bytes));
    EXPECT_EQ(bytes, content(i, size_of(i)));
  }
}

TEST_P(TierContract, AChunkThatIsNotThereIsAnError) {
  std::unique_ptr<RecordStore> tier = make();
  ASSERT_SUCCEEDS(tier->finish());
  tier = reopen(std::move(tier));
  std::vector<std::byte> bytes(100);
  for (const uint64_t offset : {uint64_t{1} << 20, UINT64_MAX - 50}) {
    const SavedChunk chunk{.bytes = 100, .offset = offset, .stored_bytes = 100};
    EXPECT_FALSE(tier->get_one(chunk, bytes).has_value()) << offset;
  }
}

TEST(HostTier, BeyondTheBudgetNothingIsTaken) {
  const auto arena = value_of(HostArena::create({.budget_bytes = kMiB, .slab_bytes = kMiB}));
  HostTier tier(*arena);
  EXPECT_FAILS(tier.prepare(2 * kMiB, 1), Code::kResourceExhausted);
  EXPECT_EQ(arena->info().used_bytes, 0u);
}

TEST(HostTier, KeepsOnlyTheNamedChunksAndNothingBorrowed) {
  const auto arena = value_of(HostArena::create({.slab_bytes = kMiB}));
  HostTier tier(*arena);
  const auto put = [&](int value) {
    SavedChunk chunk{.bytes = 100};
    std::memset(value_of(tier.place(chunk)).data(), value, 100);
    return chunk;
  };
  const SavedChunk first = put(1);
  std::vector<SavedChunk> chunks{first, put(2), put(3)};
  tier.keep_only(chunks);  // no others are there
  EXPECT_EQ(arena->info().used_bytes, 3 * kPage);
  EXPECT_EQ(tier.view(chunks[2])[0], std::byte{3});

  const auto lender = std::make_shared<std::array<std::byte, 100>>();
  SavedChunk borrowed;
  tier.borrow(borrowed, *lender, Codec::kNone, lender);
  std::swap(chunks[0], chunks[2]);
  chunks.pop_back();
  tier.keep_only(chunks);
  EXPECT_EQ(arena->info().used_bytes, 2 * kPage);
  EXPECT_EQ(lender.use_count(), 1) << "the tier keeps memory of others alive without need";
  EXPECT_EQ(tier.view(chunks[0])[0], std::byte{3});
  EXPECT_EQ(tier.view(chunks[1])[0], std::byte{2});
  const SavedChunk next = put(4);
  EXPECT_EQ(tier.view(next)[0], std::byte{4});
  EXPECT_EQ(tier.view(chunks[1])[0], std::byte{2});
}

class DiskTierFile : public ::testing::Test {
 protected:
  test::TemporaryDirectory temporary_;
  std::unique_ptr<Directory> directory_ = value_of(linux_file_system().open_directory(temporary_.path(), false));
};

TEST_F(DiskTierFile, AForeignHeaderIsRefused) {
  ASSERT_SUCCEEDS(value_of(DiskTier::create(*directory_, "chunks", {.rank = 3}))->finish());
  EXPECT_SUCCEEDS(test::open_chunks(*directory_, "chunks", 3));
  EXPECT_FAILS(test::open_chunks(*directory_, "chunks", 4), Code::kIncompatible, "rank");
  std::vector<std::byte> noise(4096, std::byte{0x55});
  ASSERT_SUCCEEDS(value_of(directory_->create_file("noise"))->pwrite(noise, 0));
  EXPECT_FAILS(test::open_chunks(*directory_, "noise", 3), Code::kCorruption, "noise");
  ASSERT_SUCCEEDS(directory_->create_file("empty"));
  EXPECT_FAILS(test::open_chunks(*directory_, "empty", 3), Code::kCorruption);
}

TEST_F(DiskTierFile, AFullDiskIsResourceExhausted) {
  test::FaultyFileSystem faulty;
  const auto directory = value_of(faulty.open_directory(temporary_.path(), false));
  const auto tier = value_of(DiskTier::create(*directory, "full", {.rank = 0}));
  faulty.plan.set(test::Fault::kError, 1, ENOSPC);
  SavedChunk chunk{.bytes = 10};
  std::vector<std::byte> bytes(10);
  RecordPart part{&chunk, bytes, ok()};
  tier->put({&part, 1});
  EXPECT_FAILS(part.status, Code::kResourceExhausted);
}

}  // namespace
}  // namespace torpor
