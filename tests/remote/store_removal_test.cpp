// What goes from a store, and what does not: beside pushes that are under way, owners, and whoever dies in the middle.
#include "remote/store_removal.h"

#include <algorithm>

#include <fmt/format.h>

#include "checkpoint/verify.h"
#include "remote/answer_copies.h"
#include "remote/checkpoint_copies.h"
#include "remote/owner_record.h"
#include "tests/remote/store_in_memory.h"
#include "tests/support/model_file_system.h"
#include "tests/support/results.h"
#include "tests/support/written_checkpoint.h"

namespace torpor::remote {
namespace {

using test::StoreInMemory;
using test::value_of;

// Monotonic and wall time are one.
class WallClock final : public Clock {
 public:
  std::chrono::nanoseconds now() const override { return now_; }
  double unix_seconds() const override { return std::chrono::duration<double>(now_).count(); }
  void advance(std::chrono::nanoseconds by) { now_ += by; }

 private:
  std::chrono::nanoseconds now_ = std::chrono::hours(1000);
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
  class Between final : public ObjectStore {
   public:
    Between(ObjectStore& store, uint64_t at, std::function<void()> then)
        : store_(store), at_(at), then_(std::move(then)) {}
    Result<bool> put_new(std::string_view key, std::span<const std::byte> bytes) override {
      return step(), store_.put_new(key, bytes);
    }
    Result<uint64_t> get(std::string_view key, std::span<std::byte> room) override {
      return step(), store_.get(key, room);
    }
    Result<std::optional<uint64_t>> size(std::string_view key) override { return step(), store_.size(key); }
    Status remove(std::string_view key) override { return step(), store_.remove(key); }
    Result<std::vector<std::string>> list(std::string_view prefix) override { return step(), store_.list(prefix); }
    const std::string& url() const override { return store_.url(); }
    uint64_t calls = 0;

   private:
    void step() {
      if (++calls == at_) then_();
    }
    ObjectStore& store_;
    const uint64_t at_;
    const std::function<void()> then_;
  };
  write("/one");
  const Checkpoint checkpoint = value_of(open_checkpoint(system_, "/one"));
  const CopyOptions options{.threads = 1, .clock = &clock_, .patience = std::chrono::seconds(0)};
  size_t removed = 0;
  size_t refused = 0;
  for (uint64_t at = 1;; ++at) {
    store_.objects.clear();
    value_of(push(system_, checkpoint, store_, options));
    store_.objects.erase(index_key(value_of(list_pushed(store_)).at(0).name));  // its parts are named by nobody
    Between between(store_, at, [&] {
      const auto report = remove_unnamed(store_, clock_);
      removed += report && report->parts > 0 ? 1 : 0;
      refused += report ? 0 : 1;
    });
    EXPECT_SUCCEEDS(push(system_, checkpoint, between, options));
    EXPECT_EQ(value_of(list_pushed(store_)).size(), 1u);
    expect_whole();
    if (between.calls < at) break;
  }
  EXPECT_GT(removed, 0u);
  EXPECT_GT(refused, 5u);
}

}  // namespace
}  // namespace torpor::remote
