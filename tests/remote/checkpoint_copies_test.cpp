// SPDX-License-Identifier: Apache-2.0
#include "remote/checkpoint_copies.h"

#include <atomic>
#include <map>
#include <random>
#include <thread>

#include <fmt/core.h>

#include "base/mutex.h"
#include "base/units.h"
#include "checkpoint/checkpoint_set.h"
#include "checkpoint/state_sections.h"
#include "checkpoint/verify.h"
#include "remote/open_store.h"
#include "tests/remote/store_in_memory.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/model_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/written_checkpoint.h"

namespace torpor::remote {
namespace {

using test::StoreInMemory;
using test::value_of;

// The model of a file system is one thread's.
Result<CopyReport> push(test::ModelFileSystem& system, const Checkpoint& checkpoint, ObjectStore& store,
                        CopyOptions options = {}) {
  options.threads = 1;
  return push(static_cast<FileSystem&>(system), checkpoint, store, options);
}
Result<CopyReport> pull(test::ModelFileSystem& system, ObjectStore& store, const std::string& name,
                        const std::string& directory, CopyOptions options = {}) {
  options.threads = 1;
  return pull(static_cast<FileSystem&>(system), store, name, directory, options);
}

class CheckpointCopies : public ::testing::Test {
 protected:
  CheckpointCopies() { value_of(test::write_checkpoint(*manager(system_, "/from"))); }

  static std::unique_ptr<CheckpointManager> manager(FileSystem& system, const std::string& directory,
                                                    CheckpointManagerOptions options = {}) {
    options.retention.keep = 9;
    return value_of(CheckpointManager::open(system, directory, std::move(options)));
  }
  Checkpoint newest() { return value_of(manager(system_, "/from")->open_latest()); }
  CopyReport pushed() { return value_of(push(system_, newest(), store_)); }
  static void expect_whole(FileSystem& system, const std::string& path, const Checkpoint& as,
                           std::shared_ptr<const Key> key = nullptr) {
    const Checkpoint copy = value_of(open_checkpoint(system, path, std::move(key)));
    EXPECT_EQ(copy.manifest(), as.manifest());
    EXPECT_EQ(value_of(verify(copy)).problems, std::vector<Error>());
  }
  std::vector<std::byte>& part(const std::string& hash) { return store_.objects.at(part_key(hash)); }
  CheckpointIndex only_index() { return value_of(list_pushed(store_)).at(0).index; }

  test::ModelFileSystem system_;
  StoreInMemory store_;
};

TEST_F(CheckpointCopies, WhatWasPushedIsPulledAsItWas) {
  const CopyReport there = pushed();
  EXPECT_FALSE(there.was_there);
  EXPECT_EQ(there.moved_bytes, there.bytes);
  const CopyReport back = value_of(pull(system_, store_, "", "/to"));
  EXPECT_EQ(back.path, "/to/g-000001");
  EXPECT_EQ(back.name, there.name);
  EXPECT_EQ(back.moved_bytes, there.bytes);
  expect_whole(system_, back.path, newest());
  EXPECT_TRUE(pushed().was_there);
  EXPECT_TRUE(value_of(pull(system_, store_, there.name, "/to")).was_there);
}

TEST_F(CheckpointCopies, ItBecomesTheNewestAndOthersStay) {
  value_of(test::write_checkpoint(*manager(system_, "/to")));
  value_of(test::write_checkpoint(*manager(system_, "/to")));
  pushed();
  EXPECT_EQ(value_of(pull(system_, store_, "", "/to")).path, "/to/g-000003");
  EXPECT_EQ(value_of(manager(system_, "/to")->list()).size(), 3u);
}

// A copy has the number of its place, and its manifest that of the original.
TEST_F(CheckpointCopies, RetentionGoesByWhereACopyLies) {
  const auto write = [&](const std::string& directory, int count) {
    for (int i = 0; i < count; ++i) value_of(test::write_checkpoint(*manager(system_, directory)));
  };
  const auto names = [&] {
    std::vector<std::string> names;
    for (const CheckpointInfo& info : value_of(manager(system_, "/to")->list())) names.push_back(info.name);
    return names;
  };
  write("/from", 2);
  ASSERT_EQ(value_of(pull(system_, store_, pushed().name, "/to")).path, "/to/g-000001");  // the third of /from
  write("/to", 1);
  write("/from", 2);
  ASSERT_EQ(value_of(pull(system_, store_, pushed().name, "/to")).path, "/to/g-000003");  // the fifth
  const auto keeps_one = value_of(CheckpointManager::open(system_, "/to", {.retention = {.keep = 1}}));
  EXPECT_EQ(value_of(keeps_one->collect(/*dry_run=*/true)), std::vector<std::string>{"g-000001"});
  ASSERT_SUCCEEDS(keeps_one->woken_from(3));
  EXPECT_EQ(names(), std::vector<std::string>{"g-000003"});
}

TEST_F(CheckpointCopies, PartsThatTheStoreHasAreNotSentAgain) {
  const uint64_t first = pushed().moved_bytes;
  value_of(test::write_checkpoint(*manager(system_, "/from", {.incremental = true})));  // links all chunks
  const CopyReport second = pushed();
  EXPECT_FALSE(second.was_there);
  EXPECT_LT(second.moved_bytes, first / 2);
  const std::vector<PushedCheckpoint> all = value_of(list_pushed(store_));
  ASSERT_EQ(all.size(), 2u);
  expect_whole(system_, value_of(pull(system_, store_, second.name, "/to")).path, newest());
}

TEST_F(CheckpointCopies, ManyPartsOnManyThreads) {
  const test::TemporaryDirectory directory(test::in_memory());
  FileSystem& system = linux_file_system();
  const auto from = manager(system, directory / "from");
  PendingCheckpoint pending = value_of(from->begin(0));
  ASSERT_SUCCEEDS(pending.write_state(test::example_checkpoint()));
  const std::unique_ptr<RankWriter> writer = value_of(pending.create_rank(0));
  std::vector<SavedChunk> chunks;
  std::mt19937_64 random(1);
  for (uint64_t i = 0; i < 9; ++i) {
    PageBuffer memory;
    const std::span<std::byte> bytes = memory.room(4 * kMiB);
    for (size_t at = 0; at < bytes.size(); at += 4096) bytes[at] = static_cast<std::byte>(random());
    SavedChunk chunk{.key = {.kind = ChunkKind::kRegion, .tag = "weights", .region = "w", .index = i},
                     .bytes = bytes.size(),
                     .digest = digest_of(bytes)};
    RecordPart part{&chunk, bytes, ok()};
    writer->put({&part, 1});
    ASSERT_SUCCEEDS(part.status);
    chunks.push_back(chunk);
  }
  pending.add_rank(value_of(writer->write_refs(chunks)));
  value_of(pending.commit());
  const Checkpoint checkpoint = value_of(from->open_latest());
  const auto store = value_of(open_object_store(system, "file://" + directory / "store"));
  const CopyReport there = value_of(push(system, checkpoint, *store));
  EXPECT_EQ(value_of(list_pushed(*store)).at(0).index.files.back().parts.size(), 3u);
  EXPECT_EQ(value_of(pull(system, *store, there.name, directory / "to", {.threads = 3})).moved_bytes, there.bytes);
  const Checkpoint copy = value_of(open_checkpoint(system, directory / "to"));
  EXPECT_EQ(value_of(copy.refs(copy.manifest().ranks[0])), value_of(checkpoint.refs(checkpoint.manifest().ranks[0])));
}

TEST_F(CheckpointCopies, DamageInTheStoreIsNamedAndNothingIsPlaced) {
  pushed();
  int pulls = 0;
  for (const IndexedFile& file : only_index().files) {
    const auto fails = [&] {
      const std::string target = fmt::format("/to-{}", ++pulls);  // an earlier one may have staged what is damaged now
      EXPECT_FAILS(pull(system_, store_, "", target), Code::kCorruption) << file.name;
      EXPECT_TRUE(value_of(manager(system_, target)->list()).empty());
    };
    std::vector<std::byte>& bytes = part(file.parts[0]);
    bytes[bytes.size() / 2] ^= std::byte{1};
    EXPECT_FAILS(pull(system_, store_, "", "/one", {.threads = 1}), Code::kCorruption, file.name);
    fails();
    bytes[bytes.size() / 2] ^= std::byte{1};
    bytes.push_back({});
    fails();
    bytes.pop_back();
  }
  expect_whole(system_, value_of(pull(system_, store_, "", "/one")).path, newest());
}

// Nothing is overwritten, so a part that is wrong there must go before a push may succeed.
TEST_F(CheckpointCopies, APartOfAnotherSizeIsNotTakenForTheRightOne) {
  pushed();
  const std::string key = part_key(only_index().files[1].parts[0]);
  store_.objects.at(key).pop_back();
  store_.objects.erase(index_key(value_of(list_pushed(store_)).at(0).name));
  EXPECT_FAILS(push(system_, newest(), store_), Code::kCorruption, key);
  EXPECT_TRUE(value_of(list_pushed(store_)).empty());
  store_.objects.erase(key);
  EXPECT_FALSE(pushed().was_there);
}

// What torpor pull says of a damaged part: remove that object and push the checkpoint again.
TEST_F(CheckpointCopies, APartThatIsGoneFromAPushedCheckpointIsSentAgain) {
  const CopyReport first = pushed();
  const auto before = store_.objects;
  for (const IndexedFile& file : only_index().files) {
    const std::string key = part_key(file.parts[0]);
    part(file.parts[0]).front() ^= std::byte{1};
    EXPECT_FAILS(pull(system_, store_, "", "/to"), Code::kCorruption,
                 "remove that object and push the checkpoint again");
    store_.objects.erase(key);
    const CopyReport again = pushed();
    EXPECT_FALSE(again.was_there);
    EXPECT_EQ(again.name, first.name);
    EXPECT_EQ(again.moved_bytes, before.at(key).size());
    EXPECT_EQ(store_.objects, before);
  }
  expect_whole(system_, value_of(pull(system_, store_, "", "/to")).path, newest());
}

TEST_F(CheckpointCopies, APushOfAWholeOneAsksForSizesAlone) {
  const std::string name = pushed().name;
  size_t parts = 0;
  for (const IndexedFile& file : only_index().files) parts += file.parts.size();
  store_.read_whole.clear();
  store_.calls = 0;
  EXPECT_TRUE(pushed().was_there);
  EXPECT_LE(store_.calls, parts + 3);  // the index: its existence, its size, its bytes
  EXPECT_EQ(store_.read_whole, std::vector<std::string>{index_key(name)});
}

TEST_F(CheckpointCopies, WhatIsDamagedHereIsNotSentForWhatIsGoneThere) {
  pushed();
  const IndexedFile last = only_index().files.back();
  store_.objects.erase(part_key(last.parts[0]));
  const auto here = value_of(system_.open_directory(newest().path(), false));
  const auto file = value_of(here->open_slots(last.name, FileIo::kPlain));
  const std::byte other{0x5a};
  ASSERT_SUCCEEDS(file->pwrite({&other, 1}, last.bytes / 2));
  EXPECT_FAILS(push(system_, newest(), store_), Code::kCorruption, last.name);
  ASSERT_SUCCEEDS(file->truncate(last.bytes - 1));
  EXPECT_FAILS(push(system_, newest(), store_), Code::kCorruption, "other files than were pushed");
}

TEST_F(CheckpointCopies, OneThatIsHereButNotWholeIsPulledBesideIt) {
  pushed();
  for (const char* const name : {"STATE", "refs-r0", "chunks-r0"}) {
    const std::string target = fmt::format("/to-{}", name);
    const auto here = value_of(system_.open_directory(value_of(pull(system_, store_, "", target)).path, false));
    const auto file = value_of(here->open_slots(name, FileIo::kPlain));
    ASSERT_SUCCEEDS(file->truncate(value_of(file->size()) - 1));
    const CopyReport again = value_of(pull(system_, store_, "", target));
    EXPECT_EQ(again.path, target + "/g-000002");
    expect_whole(system_, again.path, newest());
    ASSERT_SUCCEEDS(here->remove_file(name));
    EXPECT_TRUE(value_of(pull(system_, store_, "", target)).was_there);
  }
}

TEST_F(CheckpointCopies, AnIndexThatExchangesFilesIsRefused) {
  const CopyReport there = pushed();
  CheckpointIndex index = only_index();
  std::swap(index.files[1].parts, index.files[2].parts);
  std::swap(index.files[1].bytes, index.files[2].bytes);
  const std::string text = encode_index(index);
  store_.objects[index_key(there.name)].assign(reinterpret_cast<const std::byte*>(text.data()),
                                               reinterpret_cast<const std::byte*>(text.data() + text.size()));
  EXPECT_FALSE(pull(system_, store_, "", "/to"));
  EXPECT_TRUE(value_of(manager(system_, "/to")->list()).empty());
}

TEST_F(CheckpointCopies, WhatIsNotWantedIsNotFetched) {
  pushed();
  store_.calls = 0;
  std::string model;
  const Status no = Error{.code = Code::kIncompatible, .what = "another model"};
  EXPECT_FAILS(pull(system_, store_, "", "/to",
                    {.accept =
                         [&](const Manifest& manifest) {
                           model = manifest.fingerprint.at("model");
                           return no;
                         }}),
               Code::kIncompatible, "another model");
  EXPECT_EQ(model, "example");
  EXPECT_EQ(store_.calls, 4u);  // the list, the index's size, the index, MANIFEST
  EXPECT_EQ(system_.find("/to/s-pull-" + only_index().id), -1);
}

TEST_F(CheckpointCopies, SealedOnesNeedTheirKey) {
  const auto key = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{1});
  value_of(test::write_checkpoint(*manager(system_, "/sealed", {.key = key, .encrypt = true})));
  const Checkpoint sealed = value_of(open_checkpoint(system_, "/sealed", key));
  const CopyReport there = value_of(push(system_, sealed, store_));
  EXPECT_FAILS(pull(system_, store_, "", "/to"), Code::kUnauthenticated);
  EXPECT_FAILS(
      pull(system_, store_, "", "/to", {.key = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{2})}),
      Code::kUnauthenticated);
  expect_whole(system_, value_of(pull(system_, store_, there.name, "/to", {.key = key})).path, sealed, key);
}

const Metadata kRun{{"run", "7"}, {"step", "1200"}};

class MetadataInTheStore : public CheckpointCopies {
 protected:
  // Push a checkpoint whose STATE has so many bytes in front of its metadata. Return its index, as the store has it.
  CheckpointIndex push_labelled(const Metadata& metadata = kRun, std::shared_ptr<const Key> key = nullptr,
                                uint64_t in_front = 0) {
    EngineCheckpoint state = test::example_checkpoint();
    state.metadata = metadata;
    std::vector<Section> sections = encode(state);
    std::rotate(sections.begin(), sections.end() - 1, sections.end());
    Bytes filler(in_front);
    std::mt19937_64 random(1);  // so that they cannot be compressed
    std::ranges::generate(filler, [&] { return static_cast<uint8_t>(random()); });
    sections.insert(sections.begin(), {.name = "filler", .bytes = std::move(filler), .required = false});
    PendingCheckpoint pending =
        value_of(manager(system_, "/labelled", {.key = key, .encrypt = key != nullptr})->begin(0));
    EXPECT_SUCCEEDS(pending.write_state(state.fingerprint, std::move(sections)));
    EXPECT_SUCCEEDS(test::write_rank(pending, state.state.kv, 0));
    const Checkpoint checkpoint = value_of(open_checkpoint(system_, value_of(pending.commit()), key));
    store_.objects.clear();
    value_of(push(system_, checkpoint, store_));
    const CheckpointIndex index = only_index();
    store_.read_whole.clear();
    store_.ranged_bytes = 0;
    return index;
  }
};

TEST_F(MetadataInTheStore, IsReadFromManifestAndFromItsSectionAlone) {
  const auto key = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{1});
  for (const auto& seal : {std::shared_ptr<const Key>(), key}) {
    for (const uint64_t in_front : {uint64_t{0}, kPartBytes - 10}) {  // the section lies in one part, and in two
      CheckpointIndex index = push_labelled(kRun, seal, in_front);
      EXPECT_EQ(index.has_metadata, true);
      EXPECT_EQ(value_of(metadata_of(store_, index, seal.get())), kRun);
      EXPECT_EQ(store_.read_whole, std::vector{part_key(index.files[0].parts[0])});
      EXPECT_LT(store_.ranged_bytes, 200u);
      index.has_metadata.reset();  // of a version that did not write it
      EXPECT_EQ(value_of(metadata_of(store_, index, seal.get())), kRun);
    }
  }
}

TEST_F(MetadataInTheStore, WhereTheIndexSaysThatThereIsNoneNothingIsRead) {
  pushed();
  CheckpointIndex index = only_index();
  EXPECT_EQ(index.has_metadata, false);
  store_.calls = 0;
  EXPECT_EQ(value_of(metadata_of(store_, index)), Metadata{});
  EXPECT_EQ(store_.calls, 0u);
  index.has_metadata.reset();
  EXPECT_EQ(value_of(metadata_of(store_, index)), Metadata{});
  EXPECT_EQ(store_.calls, 1u);  // MANIFEST
}

TEST_F(MetadataInTheStore, WhatIsDamagedOrSealedWithAnotherKeyIsNamed) {
  const auto key = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{1});
  EXPECT_FAILS(metadata_of(store_, push_labelled(kRun, key)), Code::kUnauthenticated);
  const CheckpointIndex index = push_labelled();
  std::vector<std::byte>& state = part(index.files[1].parts[0]);
  for (size_t at = 0; at < 30; ++at) {  // the section is the first of STATE
    state[at] ^= std::byte{1};
    EXPECT_FAILS(metadata_of(store_, index), Code::kCorruption, "metadata");
    state[at] ^= std::byte{1};
  }
  state.resize(20);
  EXPECT_FAILS(metadata_of(store_, index), Code::kCorruption, "ends before byte");
  CheckpointIndex shorter = index;
  shorter.files[1].bytes = 20;
  EXPECT_FAILS(metadata_of(store_, shorter), Code::kCorruption, "STATE of memory:// has 20 bytes");
  CheckpointIndex without = index;
  without.files.erase(without.files.begin() + 1);
  EXPECT_FAILS(metadata_of(store_, without), Code::kCorruption, "has no STATE");
  CheckpointIndex other = index;
  other.id = std::string(32, 'a');
  EXPECT_FAILS(metadata_of(store_, other), Code::kCorruption, "MANIFEST is of checkpoint");
  part(index.files[0].parts[0]).back() ^= std::byte{1};
  EXPECT_FAILS(metadata_of(store_, index), Code::kCorruption, "MANIFEST is damaged");
}

TEST_F(CheckpointCopies, SetsNamesAndUrlsThatCannotBeAreNamed) {
  EXPECT_FAILS(pull(system_, store_, "", "/to"), Code::kNotFound, "no checkpoints");
  EXPECT_FAILS(pull(system_, store_, "20250101T000000Z-x", "/to"), Code::kNotFound);
  EXPECT_FAILS(open_object_store(system_, "gs://bucket"), Code::kInvalidArgument, "s3://BUCKET");
  EXPECT_FAILS(open_object_store(system_, "file://relative"), Code::kInvalidArgument);
  const std::string member = rank_directory("/set", 0, 1);
  const std::string path = value_of(test::write_checkpoint(*manager(system_, member)));
  const CommittedSet set = value_of(commit_set(system_, "/set", {}, {path}));
  EXPECT_FAILS(push(system_, value_of(open_checkpoint(system_, set.path)), store_), Code::kUnsupported, "rank");
}

TEST_F(CheckpointCopies, OfSeveralPushersOneCreatesTheIndex) {
  const Checkpoint checkpoint = newest();
  std::atomic<int> created = 0;
  std::vector<std::thread> pushers;
  for (int i = 0; i < 8; ++i) {
    pushers.emplace_back([&] {
      if (!value_of(push(system_, checkpoint, store_, {.threads = 1})).was_there) ++created;
    });
  }
  for (std::thread& pusher : pushers) pusher.join();
  EXPECT_EQ(created, 1);
}

// Whatever call to the store fails: the checkpoint is there whole or not at all, and the next attempt is right.
TEST_F(CheckpointCopies, EachCallOfTheStoreFailsOnce) {
  uint64_t failures = 0;
  for (const bool after : {false, true}) {
    for (uint64_t at = 1;; ++at) {
      store_.objects.clear();
      store_.calls = 0, store_.failing = at, store_.after = after;
      const bool done = push(system_, newest(), store_, {.threads = 1}).has_value();
      store_.failing = 0;
      for (const PushedCheckpoint& each : value_of(list_pushed(store_))) EXPECT_TRUE(each.readable);
      EXPECT_TRUE(push(system_, newest(), store_));
      const std::string target = fmt::format("/to-{}-{}", after, at);
      store_.calls = 0, store_.failing = at;
      const bool pulled = pull(system_, store_, "", target, {.threads = 1}).has_value();
      store_.failing = 0;
      expect_whole(system_, value_of(pull(system_, store_, "", target)).path, newest());
      failures += (done ? 0 : 1) + (pulled ? 0 : 1);
      if (done && pulled) break;
    }
  }
  EXPECT_GT(failures, 30u);
}

// Power goes after any change that a pull makes: the target has the old checkpoint, or the new one too, whole.
TEST_F(CheckpointCopies, APowerCutDuringAPullLeavesNoHalfCheckpoint) {
  pushed();
  value_of(test::write_checkpoint(*manager(system_, "/to")));
  const Checkpoint pushed_one = newest();
  const test::ModelDisk start = system_.disk();
  test::ModelFileSystem system(start);
  value_of(pull(system, store_, "", "/to", {.threads = 1}));
  std::mt19937_64 random(7);
  int with_new = 0;
  for (test::PowerCuts cuts(system.record, start);; cuts.step()) {
    for (int choice = 0; choice < 4; ++choice) {
      test::ModelFileSystem after(cuts.state(choice, random));
      const std::vector<CheckpointInfo> found = value_of(manager(after, "/to")->list());
      ASSERT_GE(found.size(), 1u);
      for (const CheckpointInfo& info : found)
        EXPECT_EQ(value_of(verify(value_of(open_checkpoint(after, info.path)))).problems, std::vector<Error>());
      with_new += found.size() == 2 ? 1 : 0;
      expect_whole(after, value_of(pull(after, store_, "", "/to", {.threads = 1})).path, pushed_one);
    }
    if (cuts.done()) break;
  }
  EXPECT_GE(with_new, 4);
}

TEST_F(CheckpointCopies, EachFileOperationOfAPullFailsOnce) {
  pushed();
  uint64_t failures = 0;
  for (uint64_t at = 1;; ++at) {
    test::ModelFileSystem disk;
    test::FaultyFileSystem system(disk);
    system.plan.set(test::Fault::kError, at, ENOSPC);
    const bool done = pull(system, store_, "", "/to", {.threads = 1}).has_value();
    if (!system.plan.fired()) break;
    system.plan.clear();
    failures += done ? 0 : 1;
    expect_whole(system, value_of(pull(system, store_, "", "/to", {.threads = 1})).path, newest());
  }
  EXPECT_GT(failures, 20u);
}

TEST(DirectoryStore, GivesAPartOfAnObject) {
  test::ModelFileSystem system;
  const auto store = value_of(open_object_store(system, "file:///store"));
  const std::array<std::byte, 3> bytes = {std::byte{1}, std::byte{2}, std::byte{3}};
  value_of(store->put_new("a/b", bytes));
  std::array<std::byte, 2> room{};
  EXPECT_SUCCEEDS(store->get_range("a/b", 1, room));
  EXPECT_EQ(room, (std::array{std::byte{2}, std::byte{3}}));
  for (const uint64_t offset : {uint64_t{2}, uint64_t{3}, uint64_t{4}, UINT64_MAX})
    EXPECT_FAILS(store->get_range("a/b", offset, room), Code::kCorruption, "a/b of file:///store ends before");
  EXPECT_FAILS(store->get_range("a/c", 0, room), Code::kNotFound);
}

TEST(DirectoryStore, IsMadeByWhatIsPutThereAndByNothingElse) {
  test::ModelFileSystem system;
  const auto store = value_of(open_object_store(system, "file:///typo"));
  EXPECT_FAILS(store->check_exists(), Code::kNotFound, "there is no directory /typo");
  EXPECT_EQ(value_of(store->list("")).size(), 0u);
  EXPECT_EQ(value_of(store->size("leases/a")), std::nullopt);
  EXPECT_FAILS(system.open_directory("/typo", false), Code::kNotFound);
  EXPECT_TRUE(value_of(store->put_new("leases/a", {})));
  EXPECT_SUCCEEDS(store->check_exists());
}

}  // namespace
}  // namespace torpor::remote
