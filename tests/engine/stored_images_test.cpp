// SPDX-License-Identifier: Apache-2.0
// Images on disk: whole before their host memory goes, read and verified before their files go, and one engine's.
#include <array>
#include <fstream>

#include <fmt/core.h>
#include <boost/filesystem.hpp>

#include "base/watched_file_system.h"
#include "checkpoint/image_section.h"
#include "engine/stored_images.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/image_engine.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using test::ImageEngine;
using test::value_of;

class StoredImagesTest : public ::testing::Test {
 protected:
  const test::TemporaryDirectory directory_;
  ImageEngine engine_{linux_file_system(), directory_.path()};

  std::string stored(const std::string& id) {
    EXPECT_SUCCEEDS(engine_.extract(id));
    return value_of(engine_.stored.store(id, ImageEngine::fields(), Value{}));
  }
  // The engine takes the image "a", and writes another one of that name.
  static void take_and_store_again(ImageEngine& engine, const std::string& path) {
    ASSERT_SUCCEEDS(engine.open(path));
    ASSERT_SUCCEEDS(engine.stored.take("a"));
    ASSERT_TRUE(engine.brings("a"));
    ASSERT_SUCCEEDS(engine.extract("a"));
    ASSERT_SUCCEEDS(engine.stored.store("a", ImageEngine::fields(), Value{}));
  }
  std::vector<std::string> names() {
    std::vector<std::string> names;
    for (const ImageInfo& info : value_of(ImageStore(linux_file_system(), directory_.path(), {}).list()))
      names.push_back(info.name);
    return names;
  }
  using Names = std::vector<std::string>;
};

TEST_F(StoredImagesTest, LeaveHostMemoryAndComeBackVerified) {
  const std::string path = stored("a");
  EXPECT_EQ(path, directory_ / "images/a");
  EXPECT_EQ(engine_.used(), 0u);
  EXPECT_EQ(engine_.stored.path_of("a"), path);
  EXPECT_EQ(value_of(engine_.stored.store("a", ImageEngine::fields(), Value{})), path);  // again
  EXPECT_EQ(names(), Names{"a"});
  ASSERT_SUCCEEDS(engine_.stored.read_back("a"));
  EXPECT_EQ(names(), Names{"a"});  // until it is taken
  ASSERT_SUCCEEDS(engine_.stored.take("a"));
  EXPECT_EQ(names(), Names{});
  EXPECT_FALSE(boost::filesystem::exists(path));
  EXPECT_EQ(engine_.stored.path_of("a"), "");
  EXPECT_TRUE(engine_.brings("a"));
  EXPECT_EQ(engine_.used(), 0u);
}

TEST_F(StoredImagesTest, ArePutBackAsTheyWere) {
  const std::string path = stored("a");
  ASSERT_SUCCEEDS(engine_.stored.read_back("a"));
  engine_.stored.put_back("a");
  EXPECT_EQ(engine_.used(), 0u);
  EXPECT_EQ(engine_.stored.path_of("a"), path);
  ASSERT_SUCCEEDS(engine_.stored.read_back("a"));
  ASSERT_SUCCEEDS(engine_.stored.take("a"));
  EXPECT_TRUE(engine_.brings("a"));
}

TEST_F(StoredImagesTest, AreAWholeCheckpointOfTheirRequestsAlone) {
  const std::string path = stored("a");
  const HeldImage held = value_of(HeldImage::hold(linux_file_system(), path, nullptr));
  const EngineCheckpoint state = value_of(held.checkpoint().read_state());
  ASSERT_SUCCEEDS(state.state.validate());
  EXPECT_EQ(state.state.scheduler.requests.size(), 2u);
  EXPECT_EQ(state.state.kv.blocks.size(), 3u);  // the block that they share is there once
  EXPECT_EQ(state.fingerprint, ImageEngine::fields());
  EXPECT_FAILS(check_is_whole_engine(held.checkpoint().manifest(), path), Code::kIncompatible,
               "an image of hibernated requests");
}

TEST_F(StoredImagesTest, ComeIntoAnotherEngineThatThenHasThemAlone) {
  const std::string path = stored("a");
  ImageEngine other(linux_file_system(), "");
  ASSERT_SUCCEEDS(other.open(path));
  EXPECT_FAILS(engine_.stored.read_back("a"), Code::kUnavailable, "another engine reads the image");
  EXPECT_FAILS(other.stored.open(path), Code::kUnavailable);
  ASSERT_SUCCEEDS(other.stored.take("a"));
  EXPECT_TRUE(other.brings("a"));
  EXPECT_FAILS(engine_.stored.read_back("a"), Code::kNotFound, "there is no image");
  EXPECT_EQ(engine_.stored.forget("a"), (std::vector<std::string>{"r1", "r2"}));
  EXPECT_TRUE(engine_.images.images().empty());
}

// Also if that one then writes an image of the same name.
TEST_F(StoredImagesTest, AreNotTakenForOthersOfTheirName) {
  const std::string path = stored("a");
  ImageEngine other(linux_file_system(), directory_.path());
  take_and_store_again(other, path);
  EXPECT_FAILS(engine_.stored.read_back("a"), Code::kNotFound, "is another one");
  EXPECT_FALSE(engine_.stored.release("r1"));
  EXPECT_TRUE(engine_.stored.release("r2"));
  ASSERT_SUCCEEDS(other.stored.read_back("a"));
  ASSERT_SUCCEEDS(other.stored.take("a"));
  EXPECT_EQ(value_of(other.images.get("a"))->requests.size(), 2u);
  EXPECT_TRUE(other.brings("a"));
}

// Also if it cannot be read which image it is: at each file call of the engine whose requests end.
TEST_F(StoredImagesTest, AreNotRemovedForOthersOfTheirNameWhileTheyCannotBeRead) {
  bool fired = true;
  for (uint64_t call = 1; fired; ++call) {
    const test::TemporaryDirectory directory;
    test::FaultyFileSystem files;
    ImageEngine one(files, directory.path());
    ASSERT_SUCCEEDS(one.extract("a"));
    const std::string path = value_of(one.stored.store("a", ImageEngine::fields(), Value{}));
    ImageEngine other(linux_file_system(), directory.path());
    take_and_store_again(other, path);
    files.plan.set(test::Fault::kError, call);
    EXPECT_FALSE(one.stored.release("r1"));
    EXPECT_TRUE(one.stored.release("r2"));
    fired = files.plan.fired();
    ASSERT_SUCCEEDS(other.stored.read_back("a")) << "call " << call;
    ASSERT_SUCCEEDS(other.stored.take("a"));
    EXPECT_EQ(value_of(other.images.get("a"))->requests.size(), 2u);
  }
}

// As an engine on another host can, where locks do not reach it. At each file call of the one that reads.
TEST_F(StoredImagesTest, AreGoneAndNotDamagedIfAnotherEngineTakesThemMeanwhile) {
  int gone = 0;
  bool to_the_end = false;
  for (int at = 1; !to_the_end; ++at) {
    const std::string path = stored("a");
    int calls = 0;
    bool taken_by_other = false;
    const auto files = make_watched_file_system(linux_file_system(), [&](const char*, const std::string&) -> Status {
      if (++calls != at || !boost::filesystem::exists(path + "/g-000001")) return ok();
      taken_by_other = true;
      boost::filesystem::remove(path + "/LOCK");
      ImageEngine other(linux_file_system(), "");
      EXPECT_SUCCEEDS(other.open(path));
      EXPECT_SUCCEEDS(other.stored.take("a"));
      return ok();
    });
    ImageEngine reader(*files, "");
    const Result<const RequestImages::Image*> opened = reader.open(path);
    const Status taken = opened ? reader.stored.take("a") : ok();
    to_the_end = opened && taken;
    EXPECT_NE(to_the_end, taken_by_other) << "at call " << at;
    if (!opened) {
      EXPECT_FAILS(opened, Code::kNotFound, "there is no image") << "at call " << at;
      EXPECT_EQ(reader.used(), 0u);
    } else if (!taken) {
      EXPECT_FAILS(taken, Code::kNotFound, "there is no image") << "at call " << at;
    }
    gone += static_cast<int>(!to_the_end);
    EXPECT_FALSE(engine_.stored.forget("a").empty());
  }
  EXPECT_GE(gone, 20);
}

// Where locks do not reach an engine on another host, that one takes an image that this one holds, is killed while it
// removes the files, and a third one writes an image of the same name.
TEST_F(StoredImagesTest, ThatAnEngineHoldsAreNotMistakenForLaterOnesOfTheirName) {
  const std::string path = stored("a");
  ImageEngine holder(linux_file_system(), "");
  ASSERT_SUCCEEDS(holder.open(path));
  ImageEngine third(linux_file_system(), directory_.path());
  ASSERT_SUCCEEDS(third.extract("b"));
  ASSERT_SUCCEEDS(third.stored.store("b", ImageEngine::fields(), Value{}));  // an engine's first one removes leftovers
  EXPECT_EQ(third.stored.forget("b").size(), 2u);
  boost::filesystem::remove_all(path + "/g-000001");
  boost::filesystem::remove(path + "/LOCK");
  ASSERT_SUCCEEDS(third.extract("a"));
  ASSERT_SUCCEEDS(third.stored.store("a", ImageEngine::fields(), Value{}));
  EXPECT_FAILS(holder.stored.take("a"), Code::kNotFound, "there is no image");
  ASSERT_SUCCEEDS(third.stored.read_back("a"));
  ASSERT_SUCCEEDS(third.stored.take("a"));
  EXPECT_TRUE(third.brings("a"));
}

TEST_F(StoredImagesTest, ThatAnotherEngineGivesUpAreStillThisOnes) {
  const std::string path = stored("a");
  {
    ImageEngine other(linux_file_system(), "");
    ASSERT_SUCCEEDS(other.open(path));
  }  // it has ended
  ASSERT_SUCCEEDS(engine_.stored.read_back("a"));
  ASSERT_SUCCEEDS(engine_.stored.take("a"));
  EXPECT_TRUE(engine_.brings("a"));
}

TEST_F(StoredImagesTest, GoWithTheirLastRequestAndNoteThoseThatEndBefore) {
  const std::string path = stored("a");
  EXPECT_FALSE(engine_.stored.release("r1"));
  EXPECT_FALSE(engine_.stored.release("r1"));  // again
  ImageEngine other(linux_file_system(), "");
  const RequestImages::Image* const image = value_of(other.open(path));
  ASSERT_EQ(image->requests.size(), 1u);
  EXPECT_EQ(image->requests[0].state.id, "r2");
  other.stored.put_back("a");
  EXPECT_TRUE(engine_.stored.release("r2"));
  EXPECT_FALSE(boost::filesystem::exists(path));
  EXPECT_FALSE(engine_.stored.release("r2"));
}

// Whoever made the note may have failed to make it durable.
TEST_F(StoredImagesTest, ANoteThatIsThereIsMadeDurableAgain) {
  const std::string path = stored("a");
  const SealId id = value_of(HeldImage::hold(linux_file_system(), path, nullptr)).checkpoint().manifest().id;
  int synced = 0;
  const auto files = make_watched_file_system(linux_file_system(), [&](std::string_view call, const std::string& name) {
    synced += call == "sync" && name.ends_with("g-000001") ? 1 : 0;
    return ok();
  });
  ImageStore store(*files, directory_.path(), {});
  for (const int syncs : {1, 2}) {
    ASSERT_SUCCEEDS(store.note_ended("a", id, 0));
    EXPECT_EQ(synced, syncs);
  }
}

// The position of a request that ends on disk is that among those that were saved.
TEST_F(StoredImagesTest, ForgetWhatEndedBeforeTheyWereStored) {
  ASSERT_SUCCEEDS(engine_.extract("a"));
  EXPECT_FALSE(engine_.stored.release("r1"));
  const std::string path = value_of(engine_.stored.store("a", ImageEngine::fields(), Value{}));
  const HeldImage held = value_of(HeldImage::hold(linux_file_system(), path, nullptr));
  const EngineCheckpoint state = value_of(held.checkpoint().read_state());
  ASSERT_SUCCEEDS(state.state.validate());
  ASSERT_EQ(state.state.scheduler.requests.size(), 1u);
  EXPECT_EQ(state.state.kv.blocks.size(), 2u);
  EXPECT_TRUE(held.ended().empty());
}

// Their engine aborts them while another one reads the image.
TEST_F(StoredImagesTest, WhatEndsWhileAnotherEngineReadsThemIsNotTakenWithThem) {
  for (const bool all : {false, true}) {
    SCOPED_TRACE(all ? "all" : "one");
    const test::TemporaryDirectory folder;
    ImageEngine own(linux_file_system(), folder.path());
    ASSERT_SUCCEEDS(own.extract("a"));
    const std::string path = value_of(own.stored.store("a", ImageEngine::fields(), Value{}));
    ImageEngine other(linux_file_system(), "");
    ASSERT_SUCCEEDS(other.open(path));
    EXPECT_FALSE(own.stored.release("r1"));
    if (all) {
      EXPECT_TRUE(own.stored.release("r2"));
    }
    EXPECT_FAILS(other.stored.take("a"), Code::kUnavailable, "have ended while it was read");
    other.stored.forget("a");
    other.stored.put_back("a");
    const HeldImage again = value_of(HeldImage::hold(linux_file_system(), path, nullptr));
    EXPECT_EQ(again.ended(), (all ? std::set<int32_t>{0, 1} : std::set<int32_t>{0}));
  }
}

TEST_F(StoredImagesTest, AreThereOrNamedWhereverTakingThemFails) {
  int there = 0;
  int named = 0;
  for (const bool all_after : {false, true}) {
    bool fired = true;
    for (uint64_t call = 1; fired; ++call) {
      SCOPED_TRACE(fmt::format("call {}{}", call, all_after ? " and all after it" : ""));
      const test::TemporaryDirectory folder;
      ImageEngine own(linux_file_system(), folder.path());
      ASSERT_SUCCEEDS(own.extract("a"));
      const std::string path = value_of(own.stored.store("a", ImageEngine::fields(), Value{}));
      test::FaultyFileSystem disk;
      Status taken;
      {
        ImageEngine other(disk, "");
        ASSERT_SUCCEEDS(other.open(path));
        disk.plan.set(test::Fault::kError, call, EIO, all_after);
        taken = other.stored.take("a");
        fired = disk.plan.fired();
        disk.plan.clear();
      }
      if (taken) continue;
      if (HeldImage::hold(linux_file_system(), path, nullptr)) {
        ++there;
      } else {
        ++named;
        EXPECT_NE(taken.error().what.find("it lies in " + path), std::string::npos) << taken.error().to_string();
      }
    }
  }
  EXPECT_GT(there, 5);
  EXPECT_GT(named, 0);  // else the test would show nothing
}

TEST_F(StoredImagesTest, StayInHostMemoryWhereTheyCannotBeWritten) {
  ASSERT_SUCCEEDS(engine_.extract("a"));
  const uint64_t used = engine_.used();
  for (const char* const order : {"describe", "write_test_file", "save_image"}) {
    engine_.fails = order;
    EXPECT_FAILS(engine_.stored.store("a", ImageEngine::fields(), Value{}), Code::kDevice);
    engine_.fails.clear();
    EXPECT_EQ(names(), Names{}) << order;
    EXPECT_FALSE(boost::filesystem::exists(directory_ / "images/a")) << order;
    EXPECT_EQ(engine_.stored.path_of("a"), "");
    EXPECT_EQ(engine_.used(), used);
  }
  ASSERT_SUCCEEDS(engine_.images.verify("a"));
}

// A disk that fails from some call on. An image that may have become visible all the same is named by the error:
// another engine could take what this one still has.
TEST_F(StoredImagesTest, AreNotLeftOnDiskUnsaidWhereTheDiskFails) {
  bool left = false;
  for (uint64_t n = 1;; ++n) {
    SCOPED_TRACE(n);
    const test::TemporaryDirectory folder;
    test::FaultyFileSystem disk(linux_file_system());
    ImageEngine engine(disk, folder.path());
    ASSERT_SUCCEEDS(engine.extract("a"));
    disk.plan.set(test::Fault::kError, n, EIO, /*all_after=*/true);
    const Result<std::string> stored = engine.stored.store("a", ImageEngine::fields(), Value{});
    const bool fired = disk.plan.fired();
    disk.plan.clear();
    if (stored || !fired) {
      ASSERT_SUCCEEDS(stored);
      break;
    }
    EXPECT_EQ(engine.stored.path_of("a"), "");
    const std::vector<ImageInfo> there = value_of(ImageStore(linux_file_system(), folder.path(), {}).list());
    if (there.empty()) continue;
    left = true;
    EXPECT_NE(stored.error().what.find("the image may be left at"), std::string::npos) << stored.error().to_string();
  }
  EXPECT_TRUE(left);  // else the test would show nothing
}

TEST_F(StoredImagesTest, AreOnDiskAlsoIfARankCannotFreeItsMemory) {
  engine_.fails = "drop_image";
  stored("a");
  engine_.fails.clear();
  EXPECT_GT(engine_.used(), 0u);
  ASSERT_SUCCEEDS(engine_.stored.read_back("a"));
  ASSERT_SUCCEEDS(engine_.stored.take("a"));
  EXPECT_TRUE(engine_.brings("a"));
  EXPECT_EQ(engine_.used(), 0u);
}

TEST_F(StoredImagesTest, StayOnDiskWhereARankCannotReadThem) {
  stored("a");
  engine_.fails = "read_image";
  EXPECT_FAILS(engine_.stored.read_back("a"), Code::kDevice);
  engine_.fails.clear();
  EXPECT_EQ(engine_.used(), 0u);
  EXPECT_EQ(names(), Names{"a"});
  ASSERT_SUCCEEDS(engine_.stored.read_back("a"));
}

TEST_F(StoredImagesTest, HaveNamesThatAreFilesAndAreTakenOnce) {
  for (const char* const name : {"../a", ".a", "a/b", "ä"}) {
    ASSERT_SUCCEEDS(engine_.extract(name));
    EXPECT_FAILS(engine_.stored.store(name, ImageEngine::fields(), Value{}), Code::kInvalidArgument, "the id");
    for (const char* const request : {"r1", "r2"}) {
      if (const auto drop = engine_.stored.release(request)) {
        ASSERT_SUCCEEDS(engine_.call_ranks(*drop));
      }
    }
  }
  stored("a");
  ImageEngine other(linux_file_system(), directory_.path());
  ASSERT_SUCCEEDS(other.extract("a"));
  EXPECT_FAILS(other.stored.store("a", ImageEngine::fields(), Value{}), Code::kFailedPrecondition, "already");
  EXPECT_EQ(names(), Names{"a"});
  ImageEngine nowhere(linux_file_system(), "");
  ASSERT_SUCCEEDS(nowhere.extract("a"));
  EXPECT_FAILS(nowhere.stored.store("a", ImageEngine::fields(), Value{}), Code::kInvalidArgument, "checkpoint_dir");
}

TEST_F(StoredImagesTest, AreNotReadWhereTheyAreDamaged) {
  const std::string path = stored("a");
  for (const char* const file : {"chunks-r1", "refs-r0", "STATE", "MANIFEST"}) {
    const std::string name = path + "/g-000001/" + file;
    std::fstream stream(name, std::ios::in | std::ios::out | std::ios::binary);
    const auto middle = static_cast<std::streamoff>(
        std::string_view(file) == "chunks-r1" ? 4096 + 99 : boost::filesystem::file_size(name) / 2);
    stream.seekg(middle);
    const auto old = static_cast<char>(stream.get());
    stream.seekp(middle);
    stream.put(static_cast<char>(old ^ 4));
    stream.flush();
    EXPECT_FAILS(engine_.stored.read_back("a"), Code::kCorruption);
    ImageEngine other(linux_file_system(), "");
    EXPECT_FAILS(other.open(path), Code::kCorruption);
    EXPECT_EQ(engine_.used() + other.used(), 0u);
    stream.seekp(middle);
    stream.put(old);
    stream.flush();
  }
  ASSERT_SUCCEEDS(engine_.stored.read_back("a"));
  ASSERT_SUCCEEDS(engine_.stored.take("a"));
  EXPECT_TRUE(engine_.brings("a"));
}

TEST_F(StoredImagesTest, AreNoWholeCheckpoint) {
  const std::string path = stored("a");
  const auto manager = value_of(CheckpointManager::open(linux_file_system(), directory_ / "images/whole"));
  {
    PendingCheckpoint pending = value_of(manager->begin(0));
    const HeldImage held = value_of(HeldImage::hold(linux_file_system(), path, nullptr));
    EngineCheckpoint state = value_of(held.checkpoint().read_state());
    state.carried.clear();
    ASSERT_SUCCEEDS(pending.write_state(state));
    ASSERT_SUCCEEDS(pending.commit());
  }
  EXPECT_FAILS(engine_.stored.open(directory_ / "images/whole"), Code::kIncompatible, "a checkpoint of a whole engine");
  EXPECT_TRUE(boost::filesystem::exists(directory_ / "images/whole/g-000001/MANIFEST"));
}

TEST_F(StoredImagesTest, LeaveNothingBehindThatAKilledWriterBegan) {
  boost::filesystem::create_directories(directory_ / "images/half/s-000001");
  boost::filesystem::create_directories(directory_ / "images/empty");
  for (const char* const name : {"images", "images/half", "images/half/s-000001", "images/empty"})
    boost::filesystem::permissions(directory_ / name, boost::filesystem::owner_all);
  ImageStore store(linux_file_system(), directory_.path(), {});
  EXPECT_EQ(value_of(store.remove_leftovers(/*dry_run=*/true)), (Names{"empty", "half"}));
  EXPECT_TRUE(boost::filesystem::exists(directory_ / "images/half"));
  stored("a");  // the first one of an engine sweeps
  EXPECT_FALSE(boost::filesystem::exists(directory_ / "images/half"));
  EXPECT_EQ(names(), Names{"a"});
  EXPECT_EQ(value_of(store.remove_leftovers()), Names{});
}

TEST_F(StoredImagesTest, AndNothingThatTorporDidNotMake) {
  for (const char* const name : {"taken/t-g-000001", "holiday", "mixed/s-000001", "mixed/mine", ".hidden", "a b"})
    boost::filesystem::create_directories(directory_ / (std::string("images/") + name));
  for (const char* const name : {"taken/LOCK", "taken/t-g-000001/MANIFEST", "holiday/p.jpg", "LOCK"})
    std::ofstream(directory_ / (std::string("images/") + name)) << "bytes";
  ImageStore store(linux_file_system(), directory_.path(), {});
  EXPECT_EQ(value_of(store.remove_leftovers(/*dry_run=*/true)), Names{"taken"});
  EXPECT_EQ(value_of(store.remove_leftovers()), Names{"taken"});
  EXPECT_FALSE(boost::filesystem::exists(directory_ / "images/taken"));
  for (const char* const name : {"holiday/p.jpg", "mixed/s-000001", "mixed/mine", ".hidden", "a b", "LOCK"})
    EXPECT_TRUE(boost::filesystem::exists(directory_ / (std::string("images/") + name))) << name;
  EXPECT_FALSE(boost::filesystem::exists(directory_ / "images/holiday/LOCK"));
  const std::string path = stored("a");
  EXPECT_SUCCEEDS(HeldImage::hold(linux_file_system(), path + "/", nullptr));
}

TEST_F(StoredImagesTest, AreSealedWithTheKeyOfTheirEngine) {
  const auto key = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{1, 2, 3});
  ImageEngine sealed(linux_file_system(), directory_.path(), {.key = key, .encrypt = true});
  ASSERT_SUCCEEDS(sealed.extract("s"));
  const std::string path = value_of(sealed.stored.store("s", ImageEngine::fields(), Value{}));
  EXPECT_FAILS(engine_.open(path), Code::kUnauthenticated);
  ASSERT_SUCCEEDS(sealed.stored.read_back("s"));
  ASSERT_SUCCEEDS(sealed.stored.take("s"));
  EXPECT_TRUE(sealed.brings("s"));
}

}  // namespace
}  // namespace torpor
