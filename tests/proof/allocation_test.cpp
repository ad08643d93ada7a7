// SPDX-License-Identifier: Apache-2.0
// Every allocation fails in turn, once and for ever, while a state is encoded, written, read and decoded: an error
// comes back, nothing ends the process, nothing leaks, and the same call works afterwards.
#include <cstdlib>
#include <new>
#include <set>

#include "checkpoint/state_sections.h"
#include "checkpoint/verify.h"
#include "engine/reference/reference_engine.h"
#include "kvcache/block_pool.h"
#include "kvcache/block_tier.h"
#include "tests/kvcache/offload_rank.h"
#include "tests/support/example_state.h"
#include "tests/support/model_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/written_checkpoint.h"

namespace {

struct {
  bool armed = false;
  bool for_ever = false;
  uint64_t at = 0;
  uint64_t count = 0;
  int64_t live = 0;
} allocations;

void* allocate(std::size_t size) {
  if (allocations.armed) {
    ++allocations.count;
    if (allocations.count == allocations.at || (allocations.for_ever && allocations.count > allocations.at))
      throw std::bad_alloc();
  }
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  ++allocations.live;
  return memory;
}

void release(void* memory) noexcept {
  if (memory != nullptr) --allocations.live;
  std::free(memory);
}

}  // namespace

void* operator new(std::size_t size) { return allocate(size); }
void* operator new[](std::size_t size) { return allocate(size); }
void operator delete(void* memory) noexcept { release(memory); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { release(memory); }

namespace torpor::proof {
namespace {

// Runs `work` until no allocation is left to fail; returns how many did.
template <class Work>
uint64_t fail_each(const char* what, Work work) {
  uint64_t failed = 0;
  for (const bool for_ever : {false, true}) {
    for (uint64_t n = 1;; ++n) {
      const int64_t live = allocations.live;
      allocations = {.armed = true, .for_ever = for_ever, .at = n, .count = 0, .live = live};
      bool right = false;
      Code code{};
      {
        const auto result = work();
        allocations.armed = false;
        right = result.has_value();
        if (!right) code = result.error().code;
      }
      const bool fired = allocations.count >= n;
      // In some places want of memory means "not stored better", not failure; a wrong result is never given.
      if (!right) {
        EXPECT_TRUE(fired && (code == Code::kResourceExhausted || code == Code::kCorruption))
            << what << ", allocation " << n << ": " << name(code);
      }
      EXPECT_EQ(allocations.live, live) << what << ", allocation " << n << " leaks";
      if (!fired) break;
      ++failed;
    }
  }
  EXPECT_SUCCEEDS(work());
  return failed;
}

TEST(Allocation, EveryOneFailsInEncodeAndDecode) {
  const EngineCheckpoint state = test::example_checkpoint();
  const std::vector<Section> sections = encode(state);
  uint64_t failed = fail_each("encode", [&] {
    return try_catch([&]() -> Status {
      const std::vector<Section> encoded = encode(state);
      return encoded == sections ? ok() : Status(Error{.code = Code::kInternal});
    });
  });
  failed += fail_each("decode", [&] {
    return try_catch([&]() -> Status {
      TORPOR_ASSIGN_OR_RETURN(const EngineCheckpoint decoded, decode(sections));
      return decoded.state == state.state ? ok() : Status(Error{.code = Code::kInternal});
    });
  });
  std::printf("proof: %lu failed allocations in encode and decode, 0 leaks\n", static_cast<unsigned long>(failed));
  EXPECT_GT(failed, 140u);
}

// Writing changes what is there, so each try begins with a new disk; the memory of the disk itself is not counted. An
// incremental one is the second there.
uint64_t fail_each_write(const EngineCheckpoint& state, bool incremental) {
  uint64_t written = 0;
  for (const bool for_ever : {false, true}) {
    for (uint64_t n = 1;; ++n) {
      test::ModelFileSystem disk;
      const CheckpointManagerOptions options{.incremental = incremental};
      Result<std::string> path = Error{};
      {
        const auto writer = test::value_of(CheckpointManager::open(disk, "/store", options));
        if (incremental) {
          EXPECT_SUCCEEDS(test::write_checkpoint(*writer, state));
        }
        allocations = {.armed = true, .for_ever = for_ever, .at = n, .count = 0, .live = allocations.live};
        path = try_catch([&] { return test::write_checkpoint(*writer, state, 1, /*changed=*/2); });
        allocations.armed = false;
      }
      const bool fired = allocations.count >= n;
      EXPECT_TRUE(path || fired);
      // Whatever failed: nothing partial is visible, and the next writer works.
      const auto next = test::value_of(CheckpointManager::open(disk, "/store", options));
      const Result<std::vector<CheckpointInfo>> infos = next->list();
      size_t whole = 0;
      if (infos) {
        for (const CheckpointInfo& info : *infos) {
          const Checkpoint checkpoint = test::value_of(open_checkpoint(disk, info.path));
          whole += test::value_of(verify(checkpoint, {.threads = 1})).problems.empty() ? 1 : 0;
        }
        EXPECT_EQ(whole, infos->size()) << n;
      }
      EXPECT_GE(whole, (path ? 1u : 0u) + (incremental ? 1u : 0u)) << n;
      EXPECT_SUCCEEDS(test::write_checkpoint(*next));
      if (!fired || ::testing::Test::HasFailure()) break;
      ++written;
    }
  }
  return written;
}

TEST(Allocation, EveryOneFailsWhileWritingAndReading) {
  test::ModelFileSystem system;
  const auto manager = test::value_of(CheckpointManager::open(system, "/store", {}));
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager));
  const EngineCheckpoint state = test::example_checkpoint();
  const uint64_t failed = fail_each("read", [&]() -> Status {
    return try_catch([&]() -> Status {
      TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint, manager->open_latest());
      TORPOR_ASSIGN_OR_RETURN(const EngineCheckpoint read, checkpoint.read_state());
      TORPOR_ASSIGN_OR_RETURN(const Verification found, verify(checkpoint, {.threads = 1}));
      return found.problems.empty() && read == state ? ok() : Status(Error{.code = Code::kCorruption});
    });
  });
  EXPECT_GT(failed, 200u);
  const uint64_t written = fail_each_write(state, /*incremental=*/false) + fail_each_write(state, /*incremental=*/true);
  std::printf("proof: %lu failed allocations in reading, %lu in writing, 0 leaks\n", static_cast<unsigned long>(failed),
              static_cast<unsigned long>(written));
  EXPECT_GT(written, 700u);
}

// Whatever failed, the pool is as unused as it was, and takes the same snapshot afterwards.
TEST(Allocation, EveryOneFailsInTheRestoreOfABlockPool) {
  constexpr int32_t kBlocks = 300;  // 100 registered and held, 100 registered and free, 50 owned, 50 empty
  BlockPoolSnapshot snapshot;
  for (int32_t id = 0; id < 200; ++id)
    snapshot.registered.push_back({.id = id, .identity = {.salt = static_cast<uint64_t>(id), .tokens = {id, 1, 2, 3}}});
  for (int32_t id = 250; id < kBlocks; ++id) snapshot.free_order.push_back(id);
  for (int32_t id = 100; id < 200; ++id) snapshot.free_order.push_back(id);
  uint64_t failed = 0;
  for (const EvictionPolicy policy : {EvictionPolicy::kLru, EvictionPolicy::kLfu, EvictionPolicy::kS3Fifo}) {
    for (const bool for_ever : {false, true}) {
      for (uint64_t n = 1;; ++n) {
        SCOPED_TRACE(testing::Message() << name(policy) << ", allocation " << n << (for_ever ? " and all after" : ""));
        const auto pool = test::value_of(
            BlockPool::create({.num_blocks = kBlocks, .block_tokens = 4, .eviction = policy, .hash = {}}));
        const std::vector<int32_t> before = pool->free_order();
        const int64_t live = allocations.live;
        bool fired = false;
        {
          allocations = {.armed = true, .for_ever = for_ever, .at = n, .count = 0, .live = live};
          const Result<BlockPool::Handles> restored = pool->restore(snapshot);
          allocations.armed = false;
          fired = allocations.count >= n;
          ASSERT_EQ(restored.has_value(), !fired);
          if (restored) break;
          ASSERT_EQ(restored.error().code, Code::kResourceExhausted);
        }
        ASSERT_EQ(allocations.live, live);
        ++failed;
        ASSERT_SUCCEEDS(pool->check());
        ASSERT_EQ(pool->free_order(), before);
        ASSERT_FALSE(pool->contains(snapshot.registered[0].identity));
        if (n % 10 != 1) continue;
        {
          const BlockPool::Handles handles = test::value_of(pool->restore(snapshot));
          ASSERT_SUCCEEDS(pool->check());
          ASSERT_EQ(pool->free_order(), snapshot.free_order);
          ASSERT_EQ(handles.shared.size(), 100u);
          ASSERT_EQ(handles.owned.size(), 50u);
        }
        ASSERT_SUCCEEDS(pool->check());
        ASSERT_EQ(pool->info().free, kBlocks);
      }
    }
  }
  std::printf("proof: %lu failed allocations in the restore of a block pool, 0 leaks\n",
              static_cast<unsigned long>(failed));
  EXPECT_GT(failed, 3000u);
}

// Who lets go of a block is often a destructor: nothing may fail there.
TEST(Allocation, I11BlocksAreLetGoOfAndTakenWithoutMemory) {
  constexpr int32_t kBlocks = 600;
  for (const EvictionPolicy policy :
       {EvictionPolicy::kLru, EvictionPolicy::kFifo, EvictionPolicy::kLfu, EvictionPolicy::kS3Fifo}) {
    SCOPED_TRACE(name(policy));
    const auto pool =
        test::value_of(BlockPool::create({.num_blocks = kBlocks, .block_tokens = 4, .eviction = policy, .hash = {}}));
    BlockPoolSnapshot snapshot;
    for (int32_t id = 0; id < kBlocks / 2; ++id)
      snapshot.registered.push_back({.id = id, .identity = {.tokens = {id, 1, 2, 3}}});
    const std::vector<BlockIdentity> chain{snapshot.registered[0].identity};
    std::optional<BlockPool::Handles> handles = test::value_of(pool->restore(snapshot));
    std::vector<BlockRef> found;
    allocations = {.armed = true, .for_ever = true, .at = 1, .count = 0, .live = allocations.live};
    handles.reset();  // half of them are cached now, half are empty
    allocations.armed = false;
    ASSERT_SUCCEEDS(pool->check());
    ASSERT_EQ(pool->info().cached, kBlocks / 2);
    found = pool->match(chain);
    ASSERT_EQ(found.size(), 1u);
    allocations.armed = true;
    found.clear();
    const int32_t cleared = pool->clear_cached();
    allocations.armed = false;
    EXPECT_EQ(cleared, kBlocks / 2);
    ASSERT_SUCCEEDS(pool->check());
    EXPECT_EQ(pool->info().free, kBlocks);
  }
}

class RankWithDisk {
 public:
  RankWithDisk()
      : rank_({.disk_segments = 2, .segment_slots = 4, .directory = temporary_ / "store", .own_threads = false}) {
    worker().open_space(1, {});
  }
  OffloadWorker& worker() { return rank_.worker(); }

 private:
  const test::TemporaryDirectory temporary_;
  test::OffloadRank rank_;
};

// The n-th allocation of `work` fails, or all from there on. False: it has fewer.
template <class Work>
bool fail_one(uint64_t n, bool for_ever, Work work) {
  allocations = {.armed = true, .for_ever = for_ever, .at = n, .count = 0, .live = 0};
  work();
  allocations.armed = false;
  return allocations.count >= n;
}

// A rank that has no memory for a plan either has done nothing of it, and can run it again, or ends each of its jobs.
TEST(Allocation, OfAPlanOfTransfersNoJobIsLeftOpen) {
  uint64_t failed = 0;
  uint64_t refused = 0;
  for (const bool for_ever : {false, true}) {
    for (uint64_t n = 1;; ++n) {
      SCOPED_TRACE(testing::Message() << "allocation " << n << (for_ever ? " and all after it" : ""));
      RankWithDisk rank;
      OffloadWorker& worker = rank.worker();
      TransferPlan before{.number = 1};
      before.add(9, PlanKind::kPut, StoreId::kHost, TransferPriority::kOffload).count = 2;
      before.from = before.to = {0, 1};
      EXPECT_SUCCEEDS(worker.run(before));
      worker.wait();
      EXPECT_EQ(worker.poll().jobs.size(), 1u);

      TransferPlan plan{.number = 2, .dropped = {{StoreId::kHost, 5}, {StoreId::kDisk, 1}}};
      plan.add(10, PlanKind::kPut, StoreId::kHost, TransferPriority::kOffload).count = 2;
      PlannedJob& get = plan.add(11, PlanKind::kGet, StoreId::kHost, TransferPriority::kLoad);
      get.first = get.count = 2;
      PlannedJob& move = plan.add(12, PlanKind::kMove, StoreId::kHost, TransferPriority::kOffload);
      move.first = 4, move.count = 2, move.other = StoreId::kDisk;
      plan.from = {2, 3, 0, 1, 0, 1};
      plan.to = {2, 3, 8, 9, 0, 1};
      plan.keys = {{.hash = {1}, .space = 1}, {.hash = {2}, .space = 1}};
      plan.loading = {{"request", 11}};
      Status begun;
      const bool fired = fail_one(n, for_ever, [&] { begun = worker.run(plan); });
      if (!begun) {
        EXPECT_EQ(begun.error().code, Code::kResourceExhausted);
        EXPECT_TRUE(worker.idle());
        EXPECT_SUCCEEDS(worker.run(plan));
        ++refused;
      }
      EXPECT_SUCCEEDS(worker.run(plan));  // that changes nothing
      worker.wait();
      const TransferReport report = worker.poll();
      std::set<uint64_t> ended;
      for (const JobReport& job : report.jobs) ended.insert(job.id);
      EXPECT_EQ(report.jobs.size(), 3u);
      EXPECT_EQ(ended, (std::set<uint64_t>{10, 11, 12}));
      const std::vector<LoadedRequest> loaded = worker.take_loaded();
      EXPECT_EQ(loaded.size(), 1u);
      EXPECT_TRUE(worker.idle());
      if (!fired) break;
      ++failed;
    }
  }
  std::printf("proof: %lu failed allocations in plans of transfers, %lu of them before anything was done\n",
              static_cast<unsigned long>(failed), static_cast<unsigned long>(refused));
  EXPECT_GT(failed - refused, 20u);
  EXPECT_GT(refused, 10u);
}

// Whatever a rank has no memory to report, it reports later.
TEST(Allocation, OfWhatEndedNothingIsLost) {
  uint64_t failed = 0;
  for (const bool for_ever : {false, true}) {
    for (uint64_t n = 1;; ++n) {
      SCOPED_TRACE(testing::Message() << "allocation " << n << (for_ever ? " and all after it" : ""));
      RankWithDisk rank;
      OffloadWorker& worker = rank.worker();
      TransferPlan plan{.number = 1};
      plan.add(10, PlanKind::kPut, StoreId::kHost, TransferPriority::kOffload).count = 2;
      PlannedJob& get =
          plan.add(11, PlanKind::kGet, StoreId::kDisk, TransferPriority::kLoad);  // nothing is stored there
      get.first = get.count = 2;
      PlannedJob& put = plan.add(12, PlanKind::kPut, StoreId::kDisk, TransferPriority::kOffload);
      put.first = 4, put.count = 2;
      plan.from = {2, 3, 4, 5, 0, 1};
      plan.to = {2, 3, 8, 9, 0, 1};
      plan.keys = {{.hash = {1}, .space = 1}, {.hash = {2}, .space = 1}};
      plan.loading = {{"request", 11}};
      EXPECT_SUCCEEDS(worker.run(plan));
      worker.wait();
      std::vector<TransferReport> reports(1);
      const bool fired = fail_one(n, for_ever, [&] { reports[0] = worker.poll(); });
      reports.push_back(worker.poll());
      EXPECT_TRUE(worker.idle());
      std::multiset<uint64_t> ended;
      size_t bad = 0;
      for (const TransferReport& report : reports) {
        for (const JobReport& job : report.jobs) {
          ended.insert(job.id);
          bad += job.count;
        }
      }
      EXPECT_EQ(ended, (std::multiset<uint64_t>{10, 11, 12}));
      EXPECT_EQ(bad, 2u);
      const std::vector<LoadedRequest> loaded = worker.take_loaded();
      ASSERT_EQ(loaded.size(), 1u);
      EXPECT_EQ(loaded[0].bad_blocks, (std::vector<int32_t>{8, 9}));
      if (!fired) break;
      ++failed;
    }
  }
  std::printf("proof: %lu failed allocations in reports of transfers\n", static_cast<unsigned long>(failed));
  EXPECT_GT(failed, 10u);
}

// Whatever a tier has no memory to report, it reports later.
TEST(Allocation, OfTheJobsOfATierNoneIsLost) {
  constexpr uint64_t kBytes = 4096;
  uint64_t failed = 0;
  for (const bool for_ever : {false, true}) {
    for (uint64_t n = 1;; ++n) {
      SCOPED_TRACE(testing::Message() << "allocation " << n << (for_ever ? " and all after it" : ""));
      test::SharedBlocks shared;
      test::ManualClock clock;
      const std::unique_ptr<BlockTier> tier = test::value_of(
          BlockTier::create({.block_bytes = kBytes, .remote_slots = 8},
                            std::make_unique<test::SharedStore>(shared, 0, kBytes), digest_of({}), clock));
      std::vector<std::byte> bytes(4 * kBytes);
      const auto row = [&](size_t i) { return std::span(bytes).subspan(i * kBytes, kBytes); };
      for (uint64_t job = 1; job <= 2; ++job) {
        const BlockKey key{.hash = {static_cast<uint8_t>(job)}};
        const std::span<std::byte> stored = row(job - 1);
        EXPECT_SUCCEEDS(tier->store(job, {&key, 1}, {&stored, 1}));
        const BlockKey missing{.hash = {static_cast<uint8_t>(8 + job)}};
        const std::span<std::byte> loaded = row(job + 1);
        EXPECT_SUCCEEDS(tier->load(10 + job, "request", {&missing, 1}, {&loaded, 1}));
      }
      tier->wait();
      std::vector<TierJobResult> results;
      const bool fired =
          fail_one(n, for_ever, [&] { (void)try_catch([&]() -> Status { return results = tier->finished(), ok(); }); });
      for (TierJobResult& late : tier->finished()) results.push_back(std::move(late));
      std::multiset<uint64_t> ended;
      for (const TierJobResult& result : results) {
        ended.insert(result.job);
        EXPECT_EQ(result.good, std::vector<bool>(1, result.job < 10)) << result.job;
      }
      EXPECT_EQ(ended, (std::multiset<uint64_t>{1, 2, 11, 12}));
      EXPECT_SUCCEEDS(tier->check());
      if (!fired) break;
      ++failed;
    }
  }
  std::printf("proof: %lu failed allocations in the results of a tier\n", static_cast<unsigned long>(failed));
  EXPECT_GT(failed, 5u);
}

// A scheduler that has no memory for a plan plans less, and an engine runs one again that a rank had none for: no block
// stays on its way, and every one ends with an outcome.
TEST(Allocation, APlanThatHadNoMemoryIsRunAgain) {
  uint64_t again = 0;
  for (const bool for_ever : {false, true}) {
    for (uint64_t n = 1;; ++n) {
      SCOPED_TRACE(testing::Message() << "allocation " << n << (for_ever ? " and all after it" : ""));
      test::ModelFileSystem files;
      reference::ReferenceOptions options{.num_blocks = 16, .transfers_have_threads = false};
      options.tiers.host_blocks = 16;
      const auto engine = test::value_of(reference::ReferenceEngine::create(
          test::value_of(make_host_device({.defer_copies = true})), files, system_clock(), options));
      ASSERT_SUCCEEDS(engine->add({.id = "a", .prompt = std::vector<int32_t>(32, 7), .max_tokens = 4}));
      while (!engine->idle()) (void)engine->step();
      Status stepped;
      const bool fired = fail_one(
          n, for_ever, [&] { stepped = try_catch([&]() -> Status { return (void)engine->step_offload(), ok(); }); });
      if (!for_ever) {  // without any memory the engine's step may say so
        EXPECT_SUCCEEDS(stepped);
      }
      EXPECT_SUCCEEDS(engine->offload()->check());
      while (engine->step_offload()) {}
      EXPECT_FALSE(engine->offload()->busy());
      EXPECT_TRUE(engine->offloads().empty());
      EXPECT_SUCCEEDS(engine->quiesce({}));
      if (!fired) break;
      ++again;
    }
  }
  std::printf("proof: %lu failed allocations in steps of offloading\n", static_cast<unsigned long>(again));
  EXPECT_GT(again, 10u);
}

}  // namespace
}  // namespace torpor::proof
