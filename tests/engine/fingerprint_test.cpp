// SPDX-License-Identifier: Apache-2.0
// The weights in the fingerprint of a checkpoint: right, whoever took the digests, and read at most once.
#include <algorithm>
#include <fstream>

#include <fmt/core.h>

#include "allocator/host_device.h"
#include "tests/support/sleeping_engine.h"

namespace torpor {
namespace {

using namespace test;

class EngineFingerprint : public ::testing::Test {
 protected:
  static constexpr int kRanks = 2;
  SleepingEngine make(uint64_t weights_seed = 1) {
    return SleepingEngine(linux_file_system(), temporary_.path(),
                          {.ranks = kRanks, .weights_seed = weights_seed, .key = key_});
  }
  static void begin(TestEngine& engine) {
    add_example_requests(engine);
    for (int i = 0; i < 6; ++i) engine.step();
  }
  static Fingerprint fingerprint_of(const std::string& checkpoint) {
    return value_of(open_checkpoint(linux_file_system(), checkpoint)).manifest().fingerprint;
  }
  TemporaryDirectory temporary_;
  std::shared_ptr<const Key> key_;  // null: nothing is sealed
};

const std::vector<std::pair<const char*, SleepOptions>>& sleeps_to_disk() {
  static const std::vector<std::pair<const char*, SleepOptions>> all{
      {"weights stored", {.preserve_state = true, .to_disk = true}},
      {"weights stored, without requests", {.to_disk = true, .in_flight = "abort"}},
      {"weights named for reload", {.preserve_state = true, .to_disk = true, .weights = Weights::kReload}},
      {"level 2", {.level = 2, .preserve_state = true, .to_disk = true}},
      {"level 2, as vLLM's", {.level = 2, .to_disk = true, .in_flight = "abort"}},
      {"weights stay", {.preserve_state = true, .to_disk = true, .tags = {"kv_cache"}}},
  };
  return all;
}

TEST_F(EngineFingerprint, OfAnEngineThatSleepsWithoutItsWeightsSaysWhatToDo) {
  SleepingEngine slept = make();
  begin(slept.engine);
  ASSERT_SUCCEEDS(slept.controller.sleep({.preserve_state = true, .weights = Weights::kReload}));
  EXPECT_FAILS(slept.controller.fingerprint(), Code::kFailedPrecondition, "wake the weights first");
}

TEST_F(EngineFingerprint, WeightsAreReadAtMostOnceASave) {
  for (const auto& [name, options] : sleeps_to_disk()) {
    SCOPED_TRACE(name);
    SleepingEngine slept = make();
    begin(slept.engine);
    ASSERT_SUCCEEDS(slept.controller.sleep(options));
    EXPECT_EQ(slept.engine.hashed_bytes(), kRanks * kWeightBytes);
  }
  SleepingEngine serving = make();
  begin(serving.engine);
  ASSERT_SUCCEEDS(serving.controller.checkpoint({}));
  EXPECT_EQ(serving.engine.hashed_bytes(), kRanks * kWeightBytes);
  ASSERT_SUCCEEDS(serving.controller.sleep({.preserve_state = true}));
  EXPECT_EQ(serving.engine.hashed_bytes(), 2 * kRanks * kWeightBytes);  // their backup's
}

TEST_F(EngineFingerprint, AWakeFromDiskReadsThem) {
  std::string path;
  {
    SleepingEngine slept = make();
    begin(slept.engine);
    path = value_of(slept.controller.sleep({.preserve_state = true, .to_disk = true})).checkpoint;
  }
  SleepingEngine woken = make();
  ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path}));
  EXPECT_EQ(woken.engine.hashed_bytes(), kRanks * kWeightBytes);
  SleepingEngine other = make(2);
  EXPECT_FAILS(other.controller.wake_up({.from_checkpoint = path}), Code::kIncompatible, "weights_digest_rank1");
}

// Of a new process that fills its weights from the checkpoint.
class LoadedWeights : public EngineFingerprint {
 protected:
  void SetUp() override { store(); }
  void store() {
    SleepingEngine slept = make();
    begin(slept.engine);
    path_ = value_of(slept.controller.sleep({.preserve_state = true, .to_disk = true})).checkpoint;
    const Manifest manifest = value_of(open_checkpoint(linux_file_system(), path_, key_)).manifest();
    stored_ = {.tag = "weights", .directory = path_, .generation = manifest.generation, .id = manifest.id};
  }
  void load(SleepingEngine& into) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const LoadedTag loaded = value_of(into.engine.memory(rank).load_tag(stored_));
      EXPECT_EQ(loaded.bytes, kWeightBytes);
      EXPECT_EQ(into.engine.memory(rank).proven_digest("weights"), loaded.digest);
    }
    ASSERT_SUCCEEDS(into.engine.rebuild_derived());
  }
  static uint64_t chunks_of(SleepingEngine& engine) {
    uint64_t all = 0;
    for (const auto& [outcome, chunks] : engine.engine.memory().ledger().chunks_by_outcome) all += chunks;
    return all;
  }
  std::string path_;
  StoredTag stored_;
};

TEST_F(LoadedWeights, AreReadOnceAndNotHashedAgainByTheWakeThatFollows) {
  SleepingEngine woken = make(2);
  load(woken);
  const uint64_t loaded = chunks_of(woken);
  const SleepReport report = value_of(woken.controller.wake_up({.from_checkpoint = path_}));
  EXPECT_EQ(woken.engine.hashed_bytes(), 0u);
  EXPECT_EQ(chunks_of(woken) - loaded, static_cast<uint64_t>(report.kept_blocks));
  // What a checkpoint says of them is what was proved, until they are written.
  for (const uint64_t times : {0, 1, 1}) {
    EXPECT_EQ(fingerprint_of(value_of(woken.controller.checkpoint({})).checkpoint),
              value_of(woken.controller.fingerprint()));
    EXPECT_EQ(woken.engine.hashed_bytes(), times * kRanks * kWeightBytes);
    if (times == 0) woken.engine.load_weights(3);
  }
}

TEST_F(EngineFingerprint, WhoWishesItHasWeightsReadForEachCheckpoint) {
  SleepingEngine serving(linux_file_system(), temporary_.path(), {.ranks = kRanks, .always_read_weights = true});
  begin(serving.engine);
  for (const uint64_t times : {1, 2, 3}) {
    ASSERT_SUCCEEDS(serving.controller.checkpoint({}));
    EXPECT_EQ(serving.engine.hashed_bytes(), times * kRanks * kWeightBytes);
  }
}

TEST_F(LoadedWeights, ThatWereWrittenSinceAreReadAgain) {
  for (const bool marks : {true, false}) {
    SleepingEngine woken = make();
    load(woken);
    woken.engine.load_weights(2, marks);
    EXPECT_EQ(woken.engine.memory().proven_digest("weights"), std::nullopt);
    EXPECT_FAILS(woken.controller.wake_up({.from_checkpoint = path_}), Code::kIncompatible, "weights_digest_rank1");
    EXPECT_EQ(woken.engine.hashed_bytes(), kRanks * kWeightBytes);
  }
}

TEST_F(LoadedWeights, AreNotProvedAnyMoreWithAnotherRegionBesideThem) {
  SleepingEngine woken = make();
  load(woken);
  ASSERT_SUCCEEDS(woken.engine.memory().allocate("kv_cache", "another tag's", 4096));
  EXPECT_NE(woken.engine.memory().proven_digest("weights"), std::nullopt);
  const DeviceAddress more = value_of(woken.engine.memory().allocate("weights", "more", 4096));
  EXPECT_EQ(woken.engine.memory().proven_digest("weights"), std::nullopt);
  ASSERT_SUCCEEDS(woken.engine.memory().free(more));
}

TEST_F(LoadedWeights, OfAnotherLayoutAreRefusedBeforeAnythingIsWritten) {
  const auto memory = value_of(RankMemory::create(value_of(make_host_device()), linux_file_system(), {.threads = 1}));
  EXPECT_FAILS(memory->load_tag(stored_), Code::kFailedPrecondition, "weights cannot be filled: it is not there");
  const std::vector<uint64_t> sizes = reference::random_sizes(kWeightBytes, TestEngineOptions{}.regions, 1);
  ASSERT_SUCCEEDS(memory->allocate("weights", "w2", sizes.at(2)));
  ASSERT_SUCCEEDS(memory->allocate("weights", "w1", sizes.at(1)));
  const DeviceAddress address = value_of(memory->allocate("weights", "w", sizes.at(0) + 1));
  EXPECT_FAILS(memory->load_tag(stored_), Code::kIncompatible,
               fmt::format("the region \"w\" has {} bytes there, and {} here", sizes.at(0), sizes.at(0) + 1));
  ASSERT_SUCCEEDS(memory->free(address));
  ASSERT_SUCCEEDS(memory->allocate("weights", "w", sizes.at(0)));
  ASSERT_SUCCEEDS(memory->allocate("weights", "more", kWeightBytes));
  EXPECT_FAILS(memory->load_tag(stored_), Code::kIncompatible, "the region \"more\"");
  for (const RegionInfo& region : memory->allocator().regions()) {
    const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(region.address), region.size_bytes);
    EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; }));
  }
  EXPECT_EQ(memory->proven_digest("weights"), std::nullopt);
}

TEST_F(LoadedWeights, AreNotThereIfTheyWereNotStoredOrTheCheckpointIsAnotherOne) {
  SleepingEngine slept = make();
  begin(slept.engine);
  const std::string without = value_of(slept.controller.checkpoint({})).checkpoint;
  const Manifest manifest = value_of(open_checkpoint(linux_file_system(), without)).manifest();
  StoredTag none{.tag = "weights", .directory = without, .generation = manifest.generation, .id = manifest.id};
  EXPECT_FAILS(slept.engine.memory().load_tag(none), Code::kIncompatible, "has no weights: it was written without");
  none.id[3] ^= 1;
  EXPECT_FAILS(slept.engine.memory().load_tag(none), Code::kIncompatible, "is not the checkpoint that the other");
  const auto third =
      value_of(RankMemory::create(value_of(make_host_device()), linux_file_system(), {.rank = kRanks, .threads = 1}));
  ASSERT_SUCCEEDS(third->allocate("weights", "w", kWeightBytes));
  EXPECT_FAILS(third->load_tag(stored_), Code::kIncompatible, "nothing of rank 2");
}

TEST_F(LoadedWeights, AreUnsealed) {
  key_ = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{1, 2, 3});
  store();
  SleepingEngine woken = make(2);
  load(woken);
  ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path_}));
  EXPECT_EQ(woken.engine.hashed_bytes(), 0u);
  key_ = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{1, 2, 4});
  EXPECT_FAILS(make(2).engine.memory().load_tag(stored_), Code::kUnauthenticated);
}

TEST_F(LoadedWeights, AreRefusedWhereAPieceIsDamaged) {
  const Checkpoint checkpoint = value_of(open_checkpoint(linux_file_system(), path_));
  const RankRefs refs = value_of(checkpoint.refs(checkpoint.manifest().ranks[0]));
  const auto piece = std::find_if(refs.records.begin(), refs.records.end(),
                                  [](const SavedChunk& chunk) { return chunk.key.tag == "weights"; });
  {
    std::fstream file(path_ + "/" + refs.files[0].name, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(piece->offset + 5));
    file.put('\x7f').flush();
    ASSERT_TRUE(file.good());
  }
  SleepingEngine woken = make(2);
  EXPECT_FAILS(woken.engine.memory().load_tag(stored_), Code::kCorruption, "weights");
  EXPECT_EQ(woken.engine.memory().proven_digest("weights"), std::nullopt);
  // Nothing runs on, or is kept of, what came half.
  EXPECT_FAILS(woken.controller.sleep({.to_disk = true, .in_flight = "abort"}), Code::kFailedPrecondition,
               "weights came back without content");
}

TEST_F(EngineFingerprint, ItIsTheSameWhoeverTookTheDigests) {
  SleepingEngine slept = make();
  begin(slept.engine);
  const Fingerprint expected = value_of(slept.controller.fingerprint());
  ASSERT_TRUE(expected.contains("weights_digest_rank0") && expected.contains("weights_digest_rank1"));
  EXPECT_EQ(fingerprint_of(value_of(slept.controller.checkpoint({})).checkpoint), expected);
  for (const auto& [name, options] : sleeps_to_disk()) {
    SCOPED_TRACE(name);
    SleepingEngine one = make();
    begin(one.engine);
    EXPECT_EQ(fingerprint_of(value_of(one.controller.sleep(options)).checkpoint), expected);
  }
  SleepingEngine other = make(2);
  begin(other.engine);
  EXPECT_NE(fingerprint_of(value_of(other.controller.sleep(sleeps_to_disk()[0].second)).checkpoint), expected);
}

// No digest from before is believed.
TEST_F(EngineFingerprint, AfterNewWeightsTheNextCheckpointNamesThem) {
  SleepingEngine slept = make();
  begin(slept.engine);
  const SleepOptions to_disk{.preserve_state = true, .to_disk = true};
  const Fingerprint before = fingerprint_of(value_of(slept.controller.sleep(to_disk)).checkpoint);
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  slept.engine.load_weights(2, /*marks=*/false);
  const std::string after = value_of(slept.controller.sleep(to_disk)).checkpoint;
  EXPECT_NE(fingerprint_of(after), before);
  EXPECT_EQ(fingerprint_of(after), value_of(make(2).controller.fingerprint()));
}

}  // namespace
}  // namespace torpor
