// SPDX-License-Identifier: Apache-2.0
// What goes from a store, and what does not: beside pushes that are under way, owners, and whoever dies in the middle.
#include "remote/store_removal.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include <fmt/core.h>

#include "checkpoint/verify.h"
#include "remote/answer_copies.h"
#include "remote/checkpoint_copies.h"
#include "remote/open_store.h"
#include "remote/owner_record.h"
#include "tests/remote/store_in_memory.h"
#include "tests/support/model_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/written_checkpoint.h"

namespace torpor::remote {
namespace {

using test::StoreInMemory;
using test::value_of;

// Monotonic and wall time are one while the machine runs.
class WallClock final : public Clock {
 public:
  std::chrono::nanoseconds now() const override { return now_; }
  double unix_seconds() const override { return std::chrono::duration<double>(now_.load() + slept_.load()).count(); }
  void advance(std::chrono::nanoseconds by) { now_ = now_.load() + by; }
  void suspend(std::chrono::nanoseconds by) { slept_ = slept_.load() + by; }  // the machine: wall time goes on

 private:
  std::atomic<std::chrono::nanoseconds> now_{std::chrono::hours(1000)};
  std::atomic<std::chrono::nanoseconds> slept_{std::chrono::nanoseconds(0)};
};

// Another store, before and after whose calls something happens.
enum class Verb : uint8_t { kPut, kGet, kSize, kRemove, kList };
class Watched final : public ObjectStore {
 private:
  template <class Call>
  auto call(Verb verb, std::string_view key, Call call) -> decltype(call()) {
    if (before) before(verb, key);
    auto result = call();
    if (after) after(verb, key);
    return result;
  }

 public:
  using Happens = std::function<void(Verb verb, std::string_view key)>;
  explicit Watched(ObjectStore& store) : store_(store) {}
  Happens before;
  Happens after;

  Result<bool> put_new(std::string_view key, std::span<const std::byte> bytes) override {
    return call(Verb::kPut, key, [&] { return store_.put_new(key, bytes); });
  }
  Result<uint64_t> get(std::string_view key, std::span<std::byte> room) override {
    return call(Verb::kGet, key, [&] { return store_.get(key, room); });
  }
  Status get_range(std::string_view key, uint64_t offset, std::span<std::byte> room) override {
    return call(Verb::kGet, key, [&] { return store_.get_range(key, offset, room); });
  }
  Result<std::optional<uint64_t>> size(std::string_view key) override {
    return call(Verb::kSize, key, [&] { return store_.size(key); });
  }
  Status remove(std::string_view key) override {
    return call(Verb::kRemove, key, [&] { return store_.remove(key); });
  }
  Status each_key(std::string_view prefix, const std::function<bool(std::string_view key)>& visit) override {
    return call(Verb::kList, prefix, [&] { return store_.each_key(prefix, visit); });
  }
  Status check_exists() override { return store_.check_exists(); }
  const std::string& url() const override { return store_.url(); }

 private:
  ObjectStore& store_;
};

class StoreRemoval : public ::testing::Test {
 protected:
  // Of a directory of its own: it shares no parts but those that are equal.
  std::string pushed(const std::string& directory) {
    if (!system_.open_directory(directory, false)) write(directory);
    return value_of(try_push(directory)).name;
  }
  void write(const std::string& directory) {
    value_of(test::write_checkpoint(*value_of(CheckpointManager::open(system_, directory, {}))));
  }
  Result<CopyReport> try_push(const std::string& directory) {
    return push(system_, value_of(open_checkpoint(system_, directory)), store_,
                {.threads = 1, .clock = &clock_, .patience = std::chrono::seconds(0)});
  }
  // Parts that are named are there.
  void expect_whole() {
    for (const PushedCheckpoint& each : value_of(list_pushed(store_))) {
      ASSERT_TRUE(each.readable);
      for (const IndexedFile& file : each.index.files) {
        for (const std::string& part : file.parts) EXPECT_TRUE(store_.objects.contains(part_key(part))) << each.name;
      }
    }
  }
  size_t count(std::string_view prefix) const {
    return static_cast<size_t>(std::count_if(store_.objects.begin(), store_.objects.end(),
                                             [&](const auto& each) { return each.first.starts_with(prefix); }));
  }
  void own(const std::string& checkpoint, const std::string& answers = "") {
    const OwnerRecord record{.number = 7,
                             .term = 1,
                             .holder = std::string(32, 'a'),
                             .milliseconds = 1000,
                             .checkpoint = checkpoint,
                             .answers = answers};
    put(owner_key(7), encode_owner(record));
  }
  void put(const std::string& key, const std::string& text) {
    const auto bytes = std::as_bytes(std::span(text));
    store_.objects[key].assign(bytes.begin(), bytes.end());
  }

  test::ModelFileSystem system_;
  StoreInMemory store_;
  WallClock clock_;
};

TEST(DirectoryStore, WhatAKilledWriterLeftGoes) {
  const test::TemporaryDirectory folder;
  const auto store = value_of(open_object_store(linux_file_system(), "file://" + folder.path()));
  ASSERT_SUCCEEDS(store->put_new("parts/00/" + std::string(64, '0'), {}));
  const auto parts = value_of(linux_file_system().open_directory(folder / "parts/00", false));
  ASSERT_SUCCEEDS(parts->create_file("unfinished-" + std::string(32, '0') + "-1"));
  WallClock clock;
  EXPECT_EQ(value_of(remove_unnamed(*store, clock, {.dry_run = true})).parts, 2u);
  EXPECT_EQ(value_of(remove_unnamed(*store, clock)).parts, 2u);
  EXPECT_TRUE(value_of(parts->list()).empty());
}

TEST(DirectoryStore, WhatTorporDidNotMakeStays) {
  const test::TemporaryDirectory folder;
  const auto store = value_of(open_object_store(linux_file_system(), "file://" + folder.path()));
  const std::string hash(64, '0');
  const std::vector<std::string> foreign = {"answers/42.txt",
                                            "checkpoints/" + std::string(49, '0'),
                                            "checkpoints/notes.txt",
                                            "parts/00/" + hash + ".bak",
                                            "parts/00/unfinished-notes",
                                            "parts/01/" + hash,
                                            "parts/spare.zip"};
  for (const std::string& key : foreign) ASSERT_SUCCEEDS(store->put_new(key, {}));
  ASSERT_SUCCEEDS(store->put_new("parts/00/" + hash, {}));
  ASSERT_SUCCEEDS(store->put_new("answers/" + hash, {}));
  const RemovalReport report = value_of(remove_unnamed(*store, WallClock(), {.keep = 1}));
  EXPECT_EQ(report.parts, 1u);
  EXPECT_EQ(report.answers, 1u);
  EXPECT_EQ(value_of(store->list("")), foreign);
}

// What a push relies on may be removed before it has its lease.
TEST_F(StoreRemoval, APushOfWhatIsRemovedMeanwhileNamesNoPartsThatAreGone) {
  const std::string name = pushed("/one");
  store_.objects.erase(part_key(value_of(list_pushed(store_)).at(0).index.files[0].parts[0]));
  Watched watched(store_);
  bool removed = false;
  watched.before = [&](Verb verb, std::string_view key) {
    if (removed || verb != Verb::kPut || !key.starts_with(kLeasePrefix)) return;
    removed = true;
    ASSERT_SUCCEEDS(remove_pushed(store_, name, clock_));
    ASSERT_SUCCEEDS(remove_unnamed(store_, clock_));
  };
  const CopyOptions options{.threads = 1, .clock = &clock_, .patience = std::chrono::seconds(0)};
  EXPECT_FAILS(push(system_, value_of(open_checkpoint(system_, "/one")), watched, options), Code::kAborted, "removed");
  EXPECT_TRUE(removed);
  EXPECT_TRUE(value_of(list_pushed(store_)).empty());
  EXPECT_FALSE(value_of(try_push("/one")).was_there);
  expect_whole();
}

TEST_F(StoreRemoval, WhatNoCheckpointNamesGoesAndTheRestStays) {
  const std::string first = pushed("/one");
  const size_t parts_of_one = count("parts/");
  const std::string second = pushed("/two");
  put("parts/00/" + std::string(64, '0'), "of a push that was killed");
  ASSERT_SUCCEEDS(remove_pushed(store_, first, clock_));
  EXPECT_EQ(value_of(list_pushed(store_)).size(), 1u);
  const auto would = value_of(remove_unnamed(store_, clock_, {.dry_run = true}));
  const size_t before = count("parts/");
  EXPECT_GT(would.parts, 1u);
  const auto report = value_of(remove_unnamed(store_, clock_));
  EXPECT_EQ(report.parts, would.parts);
  EXPECT_EQ(report.left, 1u);
  EXPECT_EQ(count("parts/"), before - report.parts);
  EXPECT_LE(count("parts/"), parts_of_one);
  EXPECT_EQ(count(kLeasePrefix), 0u);
  expect_whole();
  value_of(pull(system_, store_, second, "/to", {.threads = 1}));
  EXPECT_FAILS(remove_pushed(store_, first, clock_), Code::kNotFound);
}

TEST_F(StoreRemoval, TheNewestAreKeptAndWhatAnOwnerGoesOnFrom) {
  std::vector<std::string> names;
  for (const char* directory : {"/one", "/two", "/three", "/four"}) names.push_back(pushed(directory));
  std::sort(names.begin(), names.end());
  own(names[1]);
  EXPECT_FAILS(remove_pushed(store_, names[1], clock_), Code::kFailedPrecondition, "goes on from");
  const auto report = value_of(remove_unnamed(store_, clock_, {.keep = 1}));
  EXPECT_EQ(report.checkpoints, (std::vector{names[0], names[2]}));
  EXPECT_EQ(report.left, 2u);
  expect_whole();
  value_of(pull(system_, store_, names[1], "/to", {.threads = 1}));
  EXPECT_EQ(value_of(remove_unnamed(store_, clock_, {.force = true, .keep = 1})).checkpoints, std::vector{names[1]});
  own(names[3]);
  EXPECT_SUCCEEDS(remove_pushed(store_, names[3], clock_, {.force = true}));
  EXPECT_EQ(value_of(list_pushed(store_)).size(), 0u);
}

TEST_F(StoreRemoval, OfTheLogsOfAnswersTheOwnersStays) {
  const std::string name = pushed("/one");
  value_of(system_.open_directory("/answers", true));
  const std::string empty = value_of(push_answers(system_, "/answers", store_));
  const auto directory = value_of(system_.open_directory("/answers", false));
  const auto file = value_of(directory->create_file("answers-000000000001"));
  ASSERT_SUCCEEDS(file->pwrite(std::as_bytes(std::span("what clients were given")), 0));
  const std::string full = value_of(push_answers(system_, "/answers", store_));
  ASSERT_NE(empty, full);
  own(name, full);
  const auto report = value_of(remove_unnamed(store_, clock_));
  EXPECT_EQ(report.answers, 1u);
  EXPECT_EQ(report.parts, 0u);
  ASSERT_SUCCEEDS(pull_answers(system_, store_, full, "/to"));
}

TEST_F(StoreRemoval, WhileAPushIsUnderWayNothingGoesAndTheOtherWayRound) {
  const std::string name = pushed("/one");
  StoreLease pushing = value_of(StoreLease::begin(store_, LeaseKind::kPush, clock_));
  const auto objects = store_.objects.size();
  EXPECT_FAILS(remove_unnamed(store_, clock_, {.keep = 1}), Code::kUnavailable, "a push is under way");
  EXPECT_FAILS(remove_pushed(store_, name, clock_), Code::kUnavailable);
  EXPECT_EQ(store_.objects.size(), objects);
  StoreLease other = value_of(StoreLease::begin(store_, LeaseKind::kPush, clock_));  // pushes do not mind each other
  ASSERT_SUCCEEDS(other.end(store_));
  ASSERT_SUCCEEDS(pushing.end(store_));

  StoreLease removing = value_of(StoreLease::begin(store_, LeaseKind::kRemoval, clock_));
  write("/two");
  EXPECT_FAILS(try_push("/two"), Code::kUnavailable, "a removal is under way");
  EXPECT_FAILS(remove_unnamed(store_, clock_), Code::kUnavailable);
  ASSERT_SUCCEEDS(removing.end(store_));
  EXPECT_SUCCEEDS(try_push("/two"));
  EXPECT_EQ(count(kLeasePrefix), 0u);
}

TEST_F(StoreRemoval, WhoDiedHoldsNobodyUpForLongerThanItsTermAndWhatClocksMayDifferBy) {
  const StoreLease killed = value_of(StoreLease::begin(store_, LeaseKind::kPush, clock_));
  clock_.advance(kPushTerm);
  EXPECT_FAILS(killed.check(), Code::kAborted);  // it was only asleep: it does not go on
  EXPECT_FAILS(remove_unnamed(store_, clock_), Code::kUnavailable);
  clock_.advance(kClocksDiffer);
  EXPECT_SUCCEEDS(remove_unnamed(store_, clock_));
  EXPECT_EQ(count(kLeasePrefix), 0u);
  value_of(StoreLease::begin(store_, LeaseKind::kRemoval, clock_));
  write("/one");
  EXPECT_FAILS(try_push("/one"), Code::kUnavailable);
  clock_.advance(kRemovalTerm + kClocksDiffer);
  EXPECT_SUCCEEDS(try_push("/one"));
}

TEST_F(StoreRemoval, APushOfManyTermsIsLeftAloneAsLongAsItIsRenewed) {
  StoreLease lease = value_of(StoreLease::begin(store_, LeaseKind::kPush, clock_));
  EXPECT_FALSE(lease.due());
  for (int i = 0; i < 20; ++i) {
    clock_.advance(kRenewedAfter);
    ASSERT_TRUE(lease.due());
    ASSERT_SUCCEEDS(lease.renew(store_));
    EXPECT_FALSE(lease.due());
    EXPECT_EQ(count(kLeasePrefix), 2u);  // who listed just before finds one of them
    EXPECT_FAILS(remove_unnamed(store_, clock_), Code::kUnavailable, "a push is under way");
  }
  ASSERT_SUCCEEDS(lease.end(store_));
  EXPECT_EQ(count(kLeasePrefix), 0u);
  EXPECT_SUCCEEDS(remove_unnamed(store_, clock_));

  StoreLease slept = value_of(StoreLease::begin(store_, LeaseKind::kPush, clock_));
  clock_.suspend(kPushTerm);
  EXPECT_FAILS(slept.renew(store_), Code::kAborted, "removed meanwhile");
}

// A removal that listed the records reads them when they have gone: whoever wrote them goes on under other names.
TEST_F(StoreRemoval, ALeaseThatIsRenewedWhileSomebodyLooksIsSeen) {
  StoreLease lease = value_of(StoreLease::begin(store_, LeaseKind::kPush, clock_));
  Watched watched(store_);
  int renewed = 0;
  watched.after = [&](Verb verb, std::string_view key) {
    for (; verb == Verb::kList && key == kLeasePrefix && renewed < 3; ++renewed) ASSERT_SUCCEEDS(lease.renew(store_));
  };
  EXPECT_FAILS(remove_unnamed(watched, clock_), Code::kUnavailable, "a push is under way");
  EXPECT_EQ(renewed, 3);
}

TEST_F(StoreRemoval, AThreadRenewsALeaseAsLongAsItIsKept) {
  const auto leases = [&] { return value_of(store_.list(kLeasePrefix)); };
  {
    const KeptLease kept(value_of(StoreLease::begin(store_, LeaseKind::kPush, clock_)), store_,
                         std::chrono::milliseconds(1));
    for (int i = 0; i < 5; ++i) {
      const auto before = leases();
      clock_.advance(kRenewedAfter);
      while (leases() == before) std::this_thread::yield();
    }
    EXPECT_SUCCEEDS(kept.check());
    EXPECT_FAILS(remove_unnamed(store_, clock_), Code::kUnavailable);
    EXPECT_FALSE(leases().empty());
  }
  EXPECT_TRUE(leases().empty());
  KeptLease(value_of(StoreLease::begin(store_, LeaseKind::kPush, clock_)), store_).leave();
  EXPECT_EQ(leases().size(), 1u);
}

// It was paused just before it made its checkpoint known: parts on which it relied may have gone meanwhile.
TEST_F(StoreRemoval, APushThatStoodStillForItsTermMakesNothingKnown) {
  write("/one");
  const Checkpoint checkpoint = value_of(open_checkpoint(system_, "/one"));
  const CopyOptions options{.threads = 1, .clock = &clock_, .patience = std::chrono::seconds(0)};
  for (const bool after : {false, true}) {
    Watched watched(store_);
    (after ? watched.after : watched.before) = [&](Verb verb, std::string_view key) {
      if (verb == Verb::kPut && key.starts_with(index_key(""))) clock_.suspend(kPushTerm);
    };
    EXPECT_FAILS(push(system_, checkpoint, watched, options), Code::kAborted, "removed meanwhile");
    EXPECT_EQ(value_of(list_pushed(store_)).size(), 0u);
  }
  EXPECT_SUCCEEDS(push(system_, checkpoint, store_, options));
}

TEST_F(StoreRemoval, WhatCannotBeReadNamesWhoKnowsWhatAndNothingGoes) {
  const std::string name = pushed("/one");
  pushed("/two");
  put(index_key(name), "{");
  const auto objects = store_.objects.size();
  EXPECT_FAILS(remove_unnamed(store_, clock_), Code::kCorruption, name);
  EXPECT_EQ(store_.objects.size(), objects);
  ASSERT_SUCCEEDS(remove_pushed(store_, name, clock_));
  EXPECT_SUCCEEDS(remove_unnamed(store_, clock_));
  put(owner_key(8), "{");
  EXPECT_FAILS(remove_unnamed(store_, clock_), Code::kCorruption);
}

// Whatever call fails, before or after it took effect: what is left is whole, and the next removal ends the work.
TEST_F(StoreRemoval, EachCallOfTheStoreFailsOnce) {
  for (const char* directory : {"/one", "/two", "/three"}) pushed(directory);
  const auto start = store_.objects;
  value_of(remove_unnamed(store_, clock_, {.keep = 1}));
  const auto end = store_.objects;
  ASSERT_LT(end.size(), start.size());
  uint64_t failures = 0;
  for (const bool after : {false, true}) {
    for (uint64_t at = 1;; ++at) {
      store_.objects = start;
      store_.calls = 0, store_.failing = at, store_.after = after;
      const bool done = remove_unnamed(store_, clock_, {.keep = 1}).has_value();
      store_.failing = 0;
      expect_whole();
      clock_.advance(kRemovalTerm + kClocksDiffer);
      value_of(remove_unnamed(store_, clock_, {.keep = 1}));
      EXPECT_EQ(store_.objects, end);
      failures += done ? 0 : 1;
      if (done) break;
    }
  }
  EXPECT_GT(failures, 20u);
}

// A push finds parts that no checkpoint names and relies on them: whatever call of it a removal comes before, what both
// leave is whole.
TEST_F(StoreRemoval, ARemovalAtAnyMomentOfAPushBreaksNothing) {
  write("/one");
  const Checkpoint checkpoint = value_of(open_checkpoint(system_, "/one"));
  const CopyOptions options{.threads = 1, .clock = &clock_, .patience = std::chrono::seconds(0)};
  size_t removed = 0;
  size_t refused = 0;
  for (uint64_t at = 1;; ++at) {
    store_.objects.clear();
    value_of(push(system_, checkpoint, store_, options));
    store_.objects.erase(index_key(value_of(list_pushed(store_)).at(0).name));  // its parts are named by nobody
    uint64_t calls = 0;
    Watched watched(store_);
    watched.before = [&](Verb, std::string_view) {
      if (++calls != at) return;
      const auto report = remove_unnamed(store_, clock_);
      removed += report && report->parts > 0 ? 1 : 0;
      refused += report ? 0 : 1;
    };
    EXPECT_SUCCEEDS(push(system_, checkpoint, watched, options));
    EXPECT_EQ(value_of(list_pushed(store_)).size(), 1u);
    expect_whole();
    if (calls < at) break;
  }
  EXPECT_GT(removed, 0u);
  EXPECT_GT(refused, 5u);
}

}  // namespace
}  // namespace torpor::remote
