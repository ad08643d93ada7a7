// SPDX-License-Identifier: Apache-2.0
// Random use of a scheduler with two ranks against a model that knows which computation each block and key stands for:
// what comes up is of one computation, of its key and of the present space, on all ranks the same (S1, S2, S7).
// Requests are admitted, asked for again, preempted, aborted and finished; reports come late, twice, from one rank
// only, or are false; now and then everything stands still, as for a sleep, and cached blocks lose their content. A
// block has its version when its step is begun, and its bytes when that is over.
#include <deque>
#include <random>
#include <set>

#include <fmt/core.h>

#include "tests/kvcache/offload_scene.h"
#include "tests/support/long_run.h"
#include "tests/support/temporary_directory.h"

namespace torpor::test {
namespace {

constexpr int32_t kBlocks = 12;
constexpr uint32_t kKeys = 9;

class OffloadModel {
 public:
  OffloadModel(uint32_t seed, const std::string& directory)
      : random_(seed), lazy_(below(2) == 0), scene_(options(directory)) {}

  void run(int moves) {
    for (int move = 0; move < moves && !HasFailure(); ++move) {
      one_move();
      EXPECT_SUCCEEDS(scene_.scheduler->check());
    }
    finish();
  }
  uint64_t loaded() const { return loaded_; }
  uint64_t preempted() const { return preempted_; }
  uint64_t stood_still() const { return stood_still_; }
  uint64_t transferred() const {
    return scene_.scheduler->queue().counts(Way::kOffload)[static_cast<size_t>(BlockOutcome::kTransferred)];
  }

 private:
  struct Load {
    uint32_t request = 0;
    std::vector<uint32_t> keys;
    std::vector<int32_t> blocks;
    bool finished = false;
  };
  static bool HasFailure() { return ::testing::Test::HasFailure(); }
  uint32_t below(uint32_t n) { return random_() % n; }

  OffloadSceneOptions options(const std::string& directory) {
    OffloadSceneOptions made;
    made.rank = {.blocks = kBlocks, .host_slots = static_cast<int32_t>(3 + below(8)), .own_threads = false};
    made.placement.presence = below(2) == 0;
    made.rank.directory = directory;
    if (below(2) == 0) {
      made.placement.disk = true;
      made.rank.disk_segments = static_cast<int32_t>(2 + below(3));
      made.rank.segment_slots = static_cast<int32_t>(1 + below(4));
    }
    made.scheduler.mode = lazy_ ? OffloadMode::kLazy : OffloadMode::kEager;
    made.scheduler.queue.max_batch_size = static_cast<int32_t>(1 + below(6));
    made.scheduler.queue.min_batch_size = 1;
    made.scheduler.queue.queue_blocks = 24;
    return made;
  }

  bool in_use(int32_t block) const { return loading_.contains(block) || scene_.device.holds(block) > 0; }
  // In the step that is begun next. Often the same again: another computation of what the block had.
  void compute(int32_t block) {
    const auto had = keys_.find(block);
    const uint32_t key = had != keys_.end() && below(3) == 0 ? had->second : below(kKeys);
    keys_[block] = key;
    values_[key].insert(++last_value_);
    scene_.device.write(block);
    writing_[block] = last_value_;
  }
  void end_step(bool failed) {
    for (const auto& [block, value] : std::exchange(writing_, {})) {
      if (failed && below(2) == 0) {
        forget(block);
        continue;
      }
      for (const auto& rank : scene_.ranks) rank->fill(block, value);
      if (failed) forget(block);
    }
    failed ? scene_.scheduler->fail_step(step_ + 1) : scene_.scheduler->acknowledge(step_ + 1);
    ++step_;
  }
  void forget(int32_t block) {
    scene_.device.clear(block);
    keys_.erase(block);
    writing_.erase(block);
  }

  void one_move() {
    const auto block = static_cast<int32_t>(below(kBlocks));
    switch (below(12)) {
      case 0:
      case 1:
      case 2:
        if (!in_use(block)) compute(block);
        break;
      case 3:
      case 4: offer(); break;
      case 5: running_.empty() || below(3) > 0 ? admit() : preempt(); break;
      case 6:
      case 7: send(); break;
      case 8:
      case 9: deliver(below(2)); break;
      case 10:
        if (!handles_.empty()) handles_[below(static_cast<uint32_t>(handles_.size()))].first.cancel();
        end_step(below(6) == 0);
        break;
      default: seldom();
    }
    take_loads();
  }
  void seldom() {
    if (below(4) == 0) scene_.ranks[below(2)]->device().fail_at(1 + below(3));
    if (below(40) == 0) reset();
    if (below(10) == 0) stand_still();
    if (below(4) == 0) send_nonsense(below(2));
    if (!running_.empty() && below(2) == 0) finish_one(below(static_cast<uint32_t>(running_.size())));
    if (loads_.empty() || below(3) > 0) return;
    Load& load = loads_[below(static_cast<uint32_t>(loads_.size()))];
    if (!load.finished) load.finished = !scene_.scheduler->finished(load.request);  // aborted
    EXPECT_TRUE(load.finished);
  }
  void reset() {
    ASSERT_SUCCEEDS(scene_.scheduler->reset());
    for (const auto& rank : scene_.ranks)
      rank->worker().open_space(scene_.scheduler->space(), digest_of(std::as_bytes(std::span(&last_value_, 1))));
    values_.clear();
    for (int32_t block = 0; block < kBlocks; ++block) forget(block);
  }
  void offer() {
    std::vector<uint32_t> keys;
    std::vector<int32_t> blocks;
    for (const auto& [block, key] : keys_) {
      if (scene_.device.version(block) == ContentVersion::kNone || below(3) > 0) continue;
      keys.push_back(key);
      blocks.push_back(block);
    }
    const bool written =
        std::none_of(blocks.begin(), blocks.end(), [&](int32_t block) { return writing_.contains(block); });
    const uint64_t after = !written || below(3) == 0 ? step_ + 1 : 0;
    handles_.emplace_back(scene_.offer(keys, blocks, after, static_cast<int32_t>(below(2))), blocks.size());
  }
  void admit() {
    begin_load({.request = scene_.scheduler->begin_request(fmt::format("r{}", ++requests_)), .keys = some_keys()});
  }
  std::vector<uint32_t> some_keys() {
    std::vector<uint32_t> keys;
    for (uint32_t i = 0; i < 1 + below(3); ++i) keys.push_back(below(kKeys));
    return keys;
  }
  void begin_load(Load load) {
    const size_t have = below(4) == 0 ? below(static_cast<uint32_t>(load.keys.size() + 1)) : 0;
    if (below(4) == 0)
      (void)scene_.scheduler->match(load.request, scene_.keys_of(some_keys()), 0);  // it waited once more
    const int32_t found = scene_.scheduler->match(load.request, scene_.keys_of(load.keys), have);
    load.keys.erase(load.keys.begin(), load.keys.begin() + static_cast<std::ptrdiff_t>(have));
    for (int32_t block = 0; block < kBlocks && static_cast<int32_t>(load.blocks.size()) < found; ++block) {
      if (!in_use(block)) load.blocks.push_back(block);
    }
    TransferHandle handle = scene_.scheduler->allocated(load.request, load.blocks);
    if (load.blocks.empty()) {
      EXPECT_EQ(scene_.scheduler->stage(load.request), RequestStage::kRunning);
      running_.push_back(load.request);
      return;
    }
    for (const int32_t block : load.blocks) {
      forget(block);
      loading_.insert(block);
    }
    handles_.emplace_back(handle, load.blocks.size());
    loads_.push_back(std::move(load));
  }
  // It lost its blocks and is admitted again.
  void preempt() {
    const auto at = running_.begin() + below(static_cast<uint32_t>(running_.size()));
    const uint32_t request = *at;
    running_.erase(at);
    ++preempted_;
    begin_load({.request = request, .keys = some_keys()});
  }
  void finish_one(uint32_t at) {
    EXPECT_TRUE(scene_.scheduler->finished(running_[at]));
    running_.erase(running_.begin() + at);
  }
  // Everything that was planned ends and is reported; what nobody holds is forgotten, as after a wake without its
  // bytes.
  void stand_still() {
    end_step(/*failed=*/false);
    for (size_t rank = 0; rank < 2; ++rank) {
      for (; !plans_[rank].empty(); plans_[rank].pop_front())
        EXPECT_SUCCEEDS(scene_.ranks[rank]->worker().run(plans_[rank].front()));
      EXPECT_SUCCEEDS(scene_.scheduler->apply(scene_.report_of(rank)));
    }
    EXPECT_FALSE(scene_.scheduler->under_way());
    take_loads();
    for (int32_t block = 0; block < kBlocks; ++block) {
      if (!in_use(block) && below(2) > 0) forget(block);
    }
    ++stood_still_;
  }
  // Reports that no rank of this engine can have made change nothing.
  void send_nonsense(uint32_t kind) {
    TransferReport report{.rank = kind == 0 ? 2 : 0};
    report.jobs.push_back({.id = kind == 0 ? 1u : ~uint64_t{0}});
    EXPECT_FAILS(scene_.scheduler->apply(report), Code::kInvalidArgument);
  }
  void send() {
    const TransferPlan& plan = scene_.scheduler->plan_step(below(2) == 0);
    if (plan.empty()) return;
    for (auto& plans : plans_) plans.push_back(plan);
  }
  // One rank takes up what was sent to it, a plan or all, and perhaps reports, perhaps twice.
  void deliver(uint32_t rank) {
    auto& plans = plans_[rank];
    for (uint32_t i = below(4); i > 0 && !plans.empty(); --i) {
      EXPECT_SUCCEEDS(scene_.ranks[rank]->worker().run(plans.front()));
      if (below(4) == 0) {
        EXPECT_SUCCEEDS(scene_.ranks[rank]->worker().run(plans.front()));
      }
      plans.pop_front();
    }
    for (uint32_t i = below(6); i > 0; --i) (void)scene_.ranks[rank]->transfers().pump();
    if (below(2) == 0) return;
    const TransferReport report = scene_.ranks[rank]->worker().poll();
    EXPECT_SUCCEEDS(scene_.scheduler->apply(report));
    last_[rank] = report.empty() ? last_[rank] : report;
    if (below(4) == 0) {
      EXPECT_SUCCEEDS(scene_.scheduler->apply(last_[rank]));
    }
  }
  void take_loads() {
    for (const EndedLoad& ended : scene_.scheduler->take_loads()) {
      const auto load =
          std::find_if(loads_.begin(), loads_.end(), [&](const Load& each) { return each.request == ended.request; });
      ASSERT_NE(load, loads_.end());
      std::vector<int32_t> good;
      for (int32_t i = 0; i < ended.good_blocks; ++i) {
        const int32_t block = load->blocks[static_cast<size_t>(i)];
        const uint32_t key = load->keys[static_cast<size_t>(i)];
        const uint32_t value = scene_.ranks[0]->value(block);
        EXPECT_TRUE(scene_.all_have(block, value)) << "S2: block " << block << " is of two computations";
        EXPECT_TRUE(values_[key].contains(value)) << "S1: block " << block << " is of another key or space";
        scene_.device.write(block);
        keys_[block] = key;
        good.push_back(block);
        ++loaded_;
      }
      for (const int32_t block : load->blocks) loading_.erase(block);
      if (!load->finished) {
        scene_.scheduler->loaded(ended.request, good);
        running_.push_back(ended.request);
      }
      loads_.erase(load);
    }
  }
  void finish() {
    for (const auto& rank : scene_.ranks) rank->device().fail_at(0);
    end_step(/*failed=*/false);
    for (int i = 0; i < 200 && scene_.scheduler->busy(); ++i) {
      send();
      for (size_t rank = 0; rank < 2; ++rank) {
        for (; !plans_[rank].empty(); plans_[rank].pop_front())
          EXPECT_SUCCEEDS(scene_.ranks[rank]->worker().run(plans_[rank].front()));
        EXPECT_SUCCEEDS(scene_.scheduler->apply(scene_.report_of(rank)));
      }
      take_loads();
    }
    while (!running_.empty()) finish_one(0);
    EXPECT_FALSE(scene_.scheduler->busy());
    EXPECT_TRUE(loads_.empty() && loading_.empty());
    for (int32_t block = 0; block < kBlocks; ++block) EXPECT_EQ(scene_.device.holds(block), 0);
    for (const StoreId store : {StoreId::kHost, StoreId::kDisk}) {
      const StoreCounts counts = scene_.scheduler->index().counts(store);
      EXPECT_EQ(counts.reserved + counts.doomed + counts.quarantined, 0) << name(store);
    }
    for (const auto& [handle, blocks] : handles_) {
      uint64_t ended = 0;
      for (const uint64_t count : handle.counts()) ended += count;
      EXPECT_EQ(ended, blocks);  // S12
    }
    EXPECT_SUCCEEDS(scene_.scheduler->check());
  }

  std::mt19937 random_;
  const bool lazy_;
  OffloadScene scene_;
  std::map<int32_t, uint32_t> keys_;               // of the blocks with content
  std::map<int32_t, uint32_t> writing_;            // what the step that is begun writes into blocks
  std::map<uint32_t, std::set<uint32_t>> values_;  // ever computed for a key in this space
  std::set<int32_t> loading_;
  std::vector<Load> loads_;
  std::vector<uint32_t> running_;  // requests
  std::vector<std::pair<TransferHandle, uint64_t>> handles_;
  std::array<std::deque<TransferPlan>, 2> plans_;
  std::array<TransferReport, 2> last_{TransferReport{.rank = 0}, TransferReport{.rank = 1}};
  uint32_t last_value_ = 0;
  uint64_t step_ = 0;
  uint64_t requests_ = 0;
  uint64_t loaded_ = 0;
  uint64_t preempted_ = 0;
  uint64_t stood_still_ = 0;
};

TEST(OffloadModel, S1S2S7S12UnderRandomUseWithTwoRanksWhatComesUpIsRight) {
  const uint32_t seeds = test::long_run() ? 5000 : 20;
  uint64_t loaded = 0;
  uint64_t transferred = 0;
  uint64_t preempted = 0;
  uint64_t stood_still = 0;
  for (uint32_t seed = 0; seed < seeds && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    const TemporaryDirectory temporary;
    OffloadModel model(seed, temporary / "store");
    model.run(600);
    loaded += model.loaded();
    transferred += model.transferred();
    preempted += model.preempted();
    stood_still += model.stood_still();
  }
  EXPECT_GT(loaded, 5 * seeds);
  EXPECT_GT(transferred, 10 * seeds);
  EXPECT_GT(preempted, seeds);
  EXPECT_GT(stood_still, seeds / 2);
  fmt::print("proof: offload model: {} seeds, {} blocks stored, {} loaded, {} preemptions, stood still {} times\n",
             seeds, transferred, loaded, preempted, stood_still);
}

}  // namespace
}  // namespace torpor::test
