// SPDX-License-Identifier: Apache-2.0
// Every call of the driver, in turn, fails in a full life of a rank's memory over the fake driver: load, sleep, wake,
// sleep, wake, unload. After each the memory is awake with identical bytes, or asleep with a complete backup, or says
// by name that it is broken; a retry without the fault succeeds; nothing is left behind, and nothing was done to memory
// in use.
#include <cstring>
#include <random>
#include <set>
#include <thread>

#include "allocator/cuda/cuda_device.h"
#include "base/log.h"
#include "base/units.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/long_run.h"
#include "tests/support/rank_call.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::FakeCuda;
using test::value_of;
using Lasting = FakeCuda::Lasting;

constexpr uint64_t kUnit = 8 * kKiB;  // small: what is tried is calls, not bytes
constexpr uint32_t kBlocks = 8;
constexpr uint64_t kBlockBytes = kKiB;
const std::vector<std::string> kTags = {"weights", "kv_cache"};
const std::vector<int32_t> kLive = {1, 4, 6};
constexpr std::byte kImage[16] = {};  // the fake driver loads any; with it the blocks go through the kernel

std::vector<std::byte> content_of(uint64_t seed, uint64_t bytes) {
  std::vector<std::byte> content(align_up(bytes, sizeof seed));
  for (uint64_t at = 0; at < content.size(); at += sizeof seed) {
    seed = seed * 6364136223846793005 + 1442695040888963407;  // Knuth's linear congruential generator
    std::memcpy(content.data() + at, &seed, sizeof seed);
  }
  content.resize(bytes);
  return content;
}

// A rank on a fake GPU: weights of two regions in several pieces of physical memory, and a KV cache.
class Rank {
 public:
  // With 0 threads copies are made by whoever waits for them.
  Rank(FakeCuda& fake, int threads) : fake_(fake), threads_(threads) {}

  Status load() {
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<DeviceMemory> device,
                            make_cuda_device(fake_.driver(), {.gather_below_bytes = kUnit, .gather_image = kImage}));
    device_ = device.get();
    TORPOR_ASSIGN_OR_RETURN(memory_, RankMemory::create(std::move(device), linux_file_system(),
                                                        {.arena_slab_bytes = kUnit,
                                                         .handle_bytes = kUnit,
                                                         .threads = std::max(1, threads_),
                                                         .own_threads = threads_ > 0}));
    TORPOR_ASSIGN_OR_RETURN(const DeviceAddress first, memory_->allocate("weights", "first", 5 * kUnit));
    TORPOR_ASSIGN_OR_RETURN(const DeviceAddress second, memory_->allocate("weights", "second", kUnit + 100));
    TORPOR_ASSIGN_OR_RETURN(const DeviceAddress kv, memory_->allocate("kv_cache", "kv", kBlocks * kBlockBytes));
    regions_ = {{first, content_of(1, 5 * kUnit)},
                {second, content_of(2, kUnit + 100)},
                {kv, content_of(3, kBlocks * kBlockBytes)}};
    TORPOR_RETURN_IF_ERROR(
        memory_->set_kv_layout("kv_cache", KvLayout{.num_blocks = kBlocks,
                                                    .tensors = {{.address = kv,
                                                                 .layers = 1,
                                                                 .layer_stride = kBlocks * kBlockBytes,
                                                                 .block_stride = kBlockBytes,
                                                                 .block_bytes = kBlockBytes}}}));
    for (auto& [address, content] : regions_) TORPOR_RETURN_IF_ERROR(copy(Direction::kHostToDevice, address, content));
    return ok();
  }

  // As the controller does it: what a failed step leaves is undone.
  Status sleep() {
    TORPOR_RETURN_IF_ERROR(call(orders::Save{.tags = kTags, .blocks = kLive}));
    const Status detached = call(orders::Detach{.tags = kTags});
    if (!detached && state() == "saving") (void)call(orders::Undo{.what = orders::Undo::What::kSave, .tags = kTags});
    return detached;
  }
  Status wake() {
    if (const Status restored = call(orders::Restore{.tags = kTags}); !restored) {
      (void)call(orders::Undo{.what = orders::Undo::What::kRestore, .tags = kTags});
      return restored;
    }
    return call(orders::Finish{.tags = kTags, .keep_backup = true});
  }

  // One word for both tags: broken before all others; restoring for what a wake that could not be undone has left.
  std::string state() const {
    std::string found;
    for (const auto& [tag, state] : memory_->states()) {
      if (state == RegionState::kBroken) return "broken";
      const auto word = name(state == RegionState::kAttaching ? RegionState::kRestoring : state);
      found = found.empty() || found == word ? std::string(word) : "mixed";
    }
    return found;
  }
  bool quarantined() { return memory_->transfers().quarantined(); }

  // Weights whole, and the live blocks of the KV cache; all of it if it has not slept yet.
  void expect_identical(bool slept) {
    fake_.pause(true);
    for (size_t i = 0; i < regions_.size(); ++i) {
      std::vector<std::byte> read(regions_[i].second.size());
      const Status done = copy(Direction::kDeviceToHost, regions_[i].first, read);
      EXPECT_TRUE(test::succeeded(done));
      if (i < 2 || !slept) {
        EXPECT_TRUE(read == regions_[i].second) << "region " << i;
        continue;
      }
      for (const int32_t block : kLive) {
        const auto at = static_cast<std::ptrdiff_t>(static_cast<uint64_t>(block) * kBlockBytes);
        EXPECT_TRUE(std::equal(read.begin() + at, read.begin() + at + kBlockBytes, regions_[2].second.begin() + at))
            << "block " << block;
      }
    }
    fake_.pause(false);
  }

 private:
  template <class Order>
  Status call(const Order& order) {
    TORPOR_RETURN_IF_ERROR(test::call_rank(*memory_, order));
    return ok();
  }
  Status copy(Direction direction, DeviceAddress address, std::vector<std::byte>& host) {
    TORPOR_ASSIGN_OR_RETURN(const StreamId stream, device_->create_stream());
    const Copy piece{address, host.data(), host.size()};
    const Status begun = device_->copy_async(stream, direction, {&piece, 1});
    DrainResult drained = device_->drain(stream);
    if (drained.drain == Drain::kUnproven)
      fake_.heal(), drained = device_->drain(stream);  // this host memory is about to go
    const Status ended = device_->destroy_stream(stream);
    TORPOR_RETURN_IF_ERROR(begun);
    if (drained.drain != Drain::kCompleted) return drained.error;
    return ended;
  }

  FakeCuda& fake_;
  const int threads_;
  DeviceMemory* device_ = nullptr;
  std::unique_ptr<RankMemory> memory_;
  std::vector<std::pair<DeviceAddress, std::vector<std::byte>>> regions_;
};

enum class Outcome : uint8_t { kNoMatter, kNotLoaded, kUndoneAwake, kAsleepRetried, kBroken };
constexpr const char* kOutcomes[] = {"went on regardless", "not loaded, said why",
                                     "awake, undone; retry slept and woke", "asleep, backup whole; retry woke",
                                     "broken, refused by name"};

// The whole life; what the fault made of it. `fake` is armed from the first call on.
Outcome live(FakeCuda& fake, int threads) {
  std::optional<Rank> rank(std::in_place, fake, threads);
  if (const Status loaded = rank->load(); !loaded) {
    EXPECT_TRUE(fake.fired()) << loaded.error().to_string();
    EXPECT_NE(loaded.error().next_step, "") << loaded.error().to_string();
    fake.heal();
    rank.reset();
    return Outcome::kNotLoaded;
  }
  bool slept = false;
  for (int round = 0; round < 2; ++round) {
    for (const bool down : {true, false}) {
      const Status done = down ? rank->sleep() : rank->wake();
      if (done) {
        slept = true;
        continue;
      }
      EXPECT_TRUE(fake.fired()) << done.error().to_string();
      EXPECT_NE(done.error().next_step, "") << done.error().to_string();
      fake.heal();
      const std::string state = rank->state();
      if (state == "broken" || rank->quarantined()) {
        const Status again = state == "attached" ? rank->sleep() : rank->wake();
        EXPECT_FALSE(again);
        if (!again) {
          EXPECT_EQ(again.error().code, Code::kDevice) << again.error().to_string();
        }
        return Outcome::kBroken;
      }
      if (state == "attached") {
        rank->expect_identical(slept);
        EXPECT_TRUE(test::succeeded(rank->sleep()));
        EXPECT_TRUE(test::succeeded(rank->wake()));
        rank->expect_identical(true);
        return Outcome::kUndoneAwake;
      }
      EXPECT_TRUE(state == "detached" || state == "restoring") << state;
      EXPECT_TRUE(test::succeeded(rank->wake()));
      rank->expect_identical(true);
      return Outcome::kAsleepRetried;
    }
  }
  rank->expect_identical(true);
  return Outcome::kNoMatter;
}

TEST(CudaFaults, WhicheverCallFailsNothingIsLost) {
  const std::vector<CUresult> codes = {CUDA_ERROR_INVALID_VALUE,
                                       CUDA_ERROR_OUT_OF_MEMORY,
                                       CUDA_ERROR_DEINITIALIZED,
                                       CUDA_ERROR_INVALID_CONTEXT,
                                       CUDA_ERROR_INVALID_HANDLE,
                                       CUDA_ERROR_NOT_PERMITTED,
                                       CUDA_ERROR_NOT_SUPPORTED,
                                       CUDA_ERROR_ILLEGAL_ADDRESS,
                                       CUDA_ERROR_LAUNCH_FAILED,
                                       CUDA_ERROR_ECC_UNCORRECTABLE,
                                       CUDA_ERROR_SYSTEM_NOT_READY,
                                       CUDA_ERROR_UNKNOWN,
                                       CUDA_ERROR_NOT_INITIALIZED,
                                       CUDA_ERROR_CONTEXT_IS_DESTROYED,
                                       CUDA_ERROR_NOT_FOUND,
                                       CUDA_ERROR_NOT_READY,
                                       CUDA_ERROR_LAUNCH_TIMEOUT,
                                       CUDA_ERROR_ASSERT,
                                       CUDA_ERROR_HARDWARE_STACK_ERROR,
                                       CUDA_ERROR_ILLEGAL_STATE,
                                       CUDA_ERROR_OPERATING_SYSTEM,
                                       CUDA_ERROR_TIMEOUT};
  const std::set<CUresult> sticky = {CUDA_ERROR_ILLEGAL_ADDRESS,      CUDA_ERROR_LAUNCH_FAILED,
                                     CUDA_ERROR_LAUNCH_TIMEOUT,       CUDA_ERROR_ECC_UNCORRECTABLE,
                                     CUDA_ERROR_HARDWARE_STACK_ERROR, CUDA_ERROR_ASSERT,
                                     CUDA_ERROR_CONTEXT_IS_DESTROYED};
  uint64_t calls = 0;
  {
    FakeCuda fake({.granularity_bytes = kUnit});
    ASSERT_EQ(live(fake, 1), Outcome::kNoMatter);
    calls = fake.calls();
    EXPECT_GT(fake.counts()["cuLaunchKernel"], 0u);
    EXPECT_GT(fake.counts()["cuMemcpyBatchAsync"] + fake.counts()["cuMemcpyDtoHAsync"], 0u);
    EXPECT_EQ(fake.left(), "");
  }
  log().set_level(LogLevel::kOff);
  std::map<std::pair<Lasting, Outcome>, uint64_t> table;
  uint64_t cases = 0;
  for (const Lasting lasting : {Lasting::kOnce, Lasting::kForever, Lasting::kSticky}) {
    for (uint64_t n = 1; n <= calls; ++n) {
      for (size_t c = 0; c < codes.size(); ++c) {
        if (!test::long_run() && (n + 3 * c) % 4 != 0) continue;  // every fourth code, at each call others
        FakeCuda fake({.granularity_bytes = kUnit, .batched_copies = (n + c) % 4 != 0, .seed = n * 31 + c});
        fake.fail(n, codes[c], lasting);
        const Outcome outcome = live(fake, (n + c) % 3 == 0 ? 1 : 0);  // a thread costs more than all else
        ++table[{lasting, outcome}];
        ++cases;
        // One failure never breaks anything, unless its code says that the context is lost. Nothing is left either,
        // unless the fault lasted while all was taken down.
        if (lasting == Lasting::kOnce && !sticky.contains(codes[c])) {
          EXPECT_NE(outcome, Outcome::kBroken);
          EXPECT_EQ(fake.left(), "");
        } else if (!sticky.contains(codes[c]) &&
                   (outcome == Outcome::kUndoneAwake || outcome == Outcome::kAsleepRetried)) {
          EXPECT_EQ(fake.left(), "");
        }
        const std::vector<std::string> misuses = fake.take_misuses();
        EXPECT_TRUE(misuses.empty()) << misuses[0];
        ASSERT_FALSE(HasFailure()) << "call " << n << " of " << calls << ", " << fake.failed_function()
                                   << " fails with " << codes[c] << ", lasting " << static_cast<int>(lasting);
      }
    }
  }
  std::cout << "proof: driver faults: " << calls << " calls, of " << codes.size()
            << " codes, once, for ever or sticky: " << cases << " cases\n";
  for (const auto& [key, count] : table) {
    const char* const lasting = key.first == Lasting::kOnce      ? "once"
                                : key.first == Lasting::kForever ? "for ever"
                                                                 : "sticky";
    std::cout << "  " << lasting << ": " << kOutcomes[static_cast<size_t>(key.second)] << ": " << count << "\n";
  }
  EXPECT_GE(cases, test::long_run() ? 50'000u : 12'500u);
}

// Random orders, copies of an engine that serves, and faults: the fake writes down whatever touches memory in use.
TEST(CudaFaults, NoMemoryIsTakenAwayReusedOrUnpinnedWhileWorkUsesIt) {
  log().set_level(LogLevel::kOff);
  const uint64_t wanted = test::long_run() ? 10'000'000 : 300'000;
  uint64_t steps = 0;
  uint64_t lives = 0;
  for (uint64_t seed = 1; steps < wanted; ++seed) {
    std::mt19937_64 random(seed);
    FakeCuda fake({.granularity_bytes = kUnit, .batched_copies = seed % 3 != 0, .seed = seed});
    {
      Rank rank(fake, 1 + static_cast<int>(seed % 3));
      ASSERT_SUCCEEDS(rank.load());
      bool slept = false;
      for (int i = 0; i < 20 && rank.state() != "broken" && !rank.quarantined(); ++i) {
        if (random() % 2 == 0)
          fake.fail(1 + random() % 200, random() % 2 == 0 ? CUDA_ERROR_UNKNOWN : CUDA_ERROR_ILLEGAL_ADDRESS,
                    random() % 4 != 0   ? Lasting::kOnce
                    : random() % 2 == 0 ? Lasting::kForever
                                        : Lasting::kSticky);
        const bool awake = rank.state() == "attached";
        if ((awake ? rank.sleep() : rank.wake()) && awake) slept = true;
        steps += fake.calls();
        fake.heal();
      }
      if (rank.state() != "broken" && !rank.quarantined()) {
        if (rank.state() != "attached") {
          ASSERT_SUCCEEDS(rank.wake());
        }
        rank.expect_identical(slept);
      }
      steps += fake.calls();
    }
    ++lives;
    const std::vector<std::string> misuses = fake.take_misuses();
    ASSERT_TRUE(misuses.empty()) << "seed " << seed << ": " << misuses[0];
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
  std::cout << "proof: random sleeps and wakes on a fake GPU: " << steps << " driver calls in " << lives
            << " lives, none touched memory in use\n";
}

}  // namespace
}  // namespace torpor
