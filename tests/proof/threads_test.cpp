// SPDX-License-Identifier: Apache-2.0
// Every allocation fails in turn, once and for ever, while threads of torpor work and log what fails: an exception that
// left a thread would end the process.
#include <gtest/gtest.h>

#include "kvcache/block_tier.h"
#include "remote/object_block_store.h"
#include "tests/offload/disk_world.h"
#include "tests/proof/failing_calls.h"
#include "tests/remote/store_in_memory.h"

namespace torpor::proof {
namespace {

using namespace test;

// Run `work` until no allocation is left to fail. Return how many did.
template <class Work>
uint64_t fail_each(Work work) {
  uint64_t failed = 0;
  ::testing::internal::CaptureStderr();  // the lines of the log
  for (const bool for_ever : {false, true}) {
    for (uint64_t n = 1; n < 5000; ++n) {
      if (!work(n, for_ever)) break;
      ++failed;
    }
  }
  (void)::testing::internal::GetCapturedStderr();
  return failed;
}

TEST(Threads, OfATierEndNoProcessThoughADamagedBlockCannotBeReported) {
  constexpr int32_t kTierSlots = 4;
  const TemporaryDirectory folder;
  ManualClock clock;
  SegmentStoreOptions options{.record_bytes = kContractRecord, .slots_per_segment = kTierSlots};
  options.budget_bytes = 3 * SegmentStore::most_bytes_of_segment(options);
  std::vector<std::byte> bytes = some_bytes(1, kContractRecord);
  const BlockKey key = some_key(1);
  const std::span<std::byte> block(bytes);
  {
    const auto tier = value_of(BlockTier::create(
        {.block_bytes = kContractRecord, .disk_segments = 2, .segment_slots = kTierSlots},
        value_of(SegmentStore::open(linux_file_system(), folder / "store", options, clock)), digest_of({}), clock));
    ASSERT_SUCCEEDS(tier->store(1, {&key, 1}, {&block, 1}));
    tier->wait();
    ASSERT_EQ(tier->finished().at(0).good, std::vector<bool>(1, true));
  }
  flip(folder / "store/r0/" + segment_name(0), 2 * kPage + 100);
  const uint64_t failed = fail_each([&](uint64_t n, bool for_ever) {
    const auto tier = value_of(BlockTier::create(
        {.block_bytes = kContractRecord, .disk_segments = 2, .segment_slots = kTierSlots},
        value_of(SegmentStore::open(linux_file_system(), folder / "store", options, clock)), digest_of({}), clock));
    allocations.arm(n, for_ever);
    const Status begun = tier->load(1, "r", {&key, 1}, {&block, 1});
    tier->wait();
    const bool fired = allocations.disarm();
    if (begun) {
      EXPECT_EQ(tier->finished().at(0).good, std::vector<bool>(1, false));
    }
    return fired;
  });
  std::printf("proof: %lu failed allocations while a tier loads a damaged block\n", static_cast<unsigned long>(failed));
  EXPECT_GT(failed, 10u);
}

TEST(Threads, OfAnObjectStoreEndNoProcessThoughAFailedListCannotBeReported) {
  for (const Code code : {Code::kUnavailable, Code::kIo}) {
    class Failing final : public remote::ObjectStore {
     public:
      explicit Failing(Code code) : code_(code) {}
      Result<bool> put_new(std::string_view, std::span<const std::byte>) override { return error(); }
      Result<uint64_t> get(std::string_view, std::span<std::byte>) override { return error(); }
      Status get_range(std::string_view, uint64_t, std::span<std::byte>) override { return error(); }
      Result<std::optional<uint64_t>> size(std::string_view) override { return error(); }
      Status remove(std::string_view) override { return error(); }
      Status each_key(std::string_view, const std::function<bool(std::string_view)>&) override { return error(); }
      Status check_exists() override { return error(); }
      const std::string& url() const override { return url_; }

     private:
      Error error() const {
        return {.code = code_, .what = std::string(1500, 'x'), .next_step = "call it again when it is back"};
      }
      const Code code_;
      const std::string url_ = "memory://";
    };
    ManualClock clock;
    const uint64_t failed = fail_each([&](uint64_t n, bool for_ever) {
      const auto store = value_of(remote::ObjectBlockStore::open(std::make_unique<Failing>(code),
                                                                 {.slots = 10,
                                                                  .record_bytes = kContractRecord,
                                                                  .timeout = std::chrono::seconds(20),
                                                                  .breaker = {.failures = 1}},
                                                                 clock));
      const BlockKey key = some_key(1);
      std::vector<StorePart> parts = {{.slot = 0, .key = key}};
      allocations.arm(n, for_ever);
      const Status opened = try_catch([&]() -> Status { return store->open_space(1, {}), ok(); });
      // Returns when the thread has looked.
      if (opened) (void)try_catch([&]() -> Status { return find(*store, parts), ok(); });
      return allocations.disarm();
    });
    std::printf("proof: %lu failed allocations while a list fails\n", static_cast<unsigned long>(failed));
    EXPECT_GT(failed, 5u);
  }
}

}  // namespace
}  // namespace torpor::proof
