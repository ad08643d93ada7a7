// SPDX-License-Identifier: Apache-2.0
// Images of hibernated requests on disk: a process that writes one, or takes one, is killed at every call to the file
// system, before it, after it, and in the middle of every write; the power goes after each change; each call fails
// once; and of engines that race for an image, one has it.

#include <cstdio>
#include <random>
#include <set>

#include <fmt/core.h>
#include <boost/filesystem.hpp>

#include "tests/proof/killed_child.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/image_engine.h"
#include "tests/support/long_run.h"
#include "tests/support/model_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::proof {
namespace {

using test::Fault;
using test::ImageEngine;
using test::value_of;

// What a process says of the image "a" while it works.
constexpr char kWhole = 'w';   // it was acknowledged
constexpr char kEnded = 'e';   // that the request r1 has ended was acknowledged
constexpr char kTaking = 't';  // it may be gone from now on
constexpr char kTaken = 'g';   // it is gone

using Work = std::function<Status(FileSystem&, const std::string& directory, const Say&)>;

Status store(ImageEngine& engine, const Say& say) {
  TORPOR_RETURN_IF_ERROR(engine.extract("a"));
  if (const auto stored = engine.stored.store("a", ImageEngine::fields(), Value{}); !stored) {
    // Then it is in host memory as before.
    const bool there = engine.stored.path_of("a").empty() && engine.images.verify("a");
    return there ? stored.error() : Error{.code = Code::kInternal, .what = "the image is lost"};
  }
  say(kWhole, 0);
  return ok();
}

// An engine that takes its own image back.
Status comes_back(FileSystem& files, const std::string& directory, const Say& say) {
  ImageEngine engine(files, directory);
  TORPOR_RETURN_IF_ERROR(store(engine, say));
  TORPOR_RETURN_IF_ERROR(engine.stored.read_back("a"));
  say(kTaking, 0);
  TORPOR_RETURN_IF_ERROR(engine.stored.take("a"));
  say(kTaken, 0);
  return ok();
}

// One request of it ends, then the other.
Status is_aborted(FileSystem& files, const std::string& directory, const Say& say) {
  ImageEngine engine(files, directory);
  TORPOR_RETURN_IF_ERROR(store(engine, say));
  (void)engine.stored.release("r1");
  say(kEnded, 0);
  say(kTaking, 0);
  (void)engine.stored.release("r2");
  say(kTaken, 0);
  return ok();
}

// Another engine takes it, after one of its requests has ended.
Status moves(FileSystem& files, const std::string& directory, const Say& say) {
  ImageEngine source(files, directory);
  TORPOR_RETURN_IF_ERROR(store(source, say));
  (void)source.stored.release("r1");
  say(kEnded, 0);
  ImageEngine target(files, "");
  TORPOR_RETURN_IF_ERROR(target.open(source.stored.path_of("a")));
  say(kTaking, 0);
  TORPOR_RETURN_IF_ERROR(target.stored.take("a"));
  say(kTaken, 0);
  return ok();
}

// What is visible is whole, in each engine that comes then; what must be there is; and when it is gone nothing is left.
// Returns what is wrong, or "".
std::string broken_promise(FileSystem& files, const std::string& directory, const std::set<char>& said) {
  const std::string path = directory + "/images/a";
  ImageEngine engine(files, directory);
  const Result<const RequestImages::Image*> opened = engine.open(path);
  if (!opened && opened.error().code != Code::kNotFound) return opened.error().to_string();
  if (opened && said.contains(kTaken)) return "it was taken, and is there";
  if (!opened && said.contains(kWhole) && !said.contains(kTaking)) return "it was acknowledged, and is not there";
  if (opened) {
    const size_t requests = (*opened)->requests.size();
    if (said.contains(kEnded) && requests != 1) return "a request that has ended came back";
    if (requests < 1 || requests > 2) return "it has no requests";
    if (const Status taken = engine.stored.take("a"); !taken) return taken.error().to_string();
    if (!engine.brings("a")) return "its blocks have other bytes";
  }
  if (const auto swept = ImageStore(files, directory, {}).remove_leftovers(); !swept) return swept.error().to_string();
  if (files.open_directory(path, false)) return "something is left of it";
  const auto again = [&]() -> Status {
    TORPOR_RETURN_IF_ERROR(engine.extract("a"));
    TORPOR_RETURN_IF_ERROR(engine.stored.store("a", ImageEngine::fields(), Value{}));
    TORPOR_RETURN_IF_ERROR(engine.stored.read_back("a"));
    return engine.stored.take("a");
  }();
  return again ? "" : again.error().to_string();
}

struct Life {
  const char* name;
  Work work;
  int least;  // kills, so that a test that shrank by itself fails
};
const Life kLives[] = {{"comes back", comes_back, 230}, {"is aborted", is_aborted, 160}, {"moves", moves, 240}};

class Images : public ::testing::TestWithParam<int> {
 protected:
  const Life& life() const { return kLives[GetParam()]; }
};
INSTANTIATE_TEST_SUITE_P(Lives, Images, ::testing::Range(0, 3), [](const auto& info) {
  std::string name = kLives[info.param].name;
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
});

TEST_P(Images, AreWholeOrNoneWhereverAProcessIsKilled) {
  const char* const memory = test::in_memory();  // a killed process loses nothing that it wrote
  test::FaultyFileSystem whole;
  std::set<uint64_t> writes;
  whole.plan.writes = &writes;
  {
    const test::TemporaryDirectory temporary(memory);
    ASSERT_SUCCEEDS(life().work(whole, temporary / "store", [](char, char) {}));
  }
  int points = 0;
  for (const Fault fault : {Fault::kKillBefore, Fault::kKillAfter, Fault::kKillTorn}) {
    for (uint64_t n = 1; n <= whole.plan.calls; ++n) {
      if (fault == Fault::kKillTorn && !writes.contains(n)) continue;
      const test::TemporaryDirectory temporary(memory);
      const std::string directory = temporary / "store";
      std::set<char> said;
      const Ending ending = run_killed(
          fault, n, [&](FileSystem& files, const Say& say) { return life().work(files, directory, say); },
          [&](char word, char) { said.insert(word); });
      ASSERT_FALSE(ending.failed) << "call " << n;
      test::FaultyFileSystem plain;
      ASSERT_EQ(broken_promise(plain, directory, said), "")
          << "killed at call " << n << ", mode " << static_cast<int>(fault);
      points += static_cast<int>(ending.killed);
    }
  }
  std::printf("proof: an image that %s: killed at %d points, 0 broken promises\n", life().name, points);
  EXPECT_GE(points, life().least);
}

// Each failing call is an error of the call under way, or of none; then the same work is done by whoever is next.
TEST_P(Images, AreWholeOrNoneWhereverAFileOperationFails) {
  int failed = 0;
  uint64_t calls = 0;
  for (const int native : {EIO, ENOSPC}) {
    for (uint64_t n = 1; calls == 0 || n <= calls; ++n) {
      const test::TemporaryDirectory temporary(test::in_memory());
      const std::string directory = temporary / "store";
      std::set<char> said;
      test::FaultyFileSystem files;
      files.plan.set(Fault::kError, n, native);
      const Status done = life().work(files, directory, [&](char word, char) { said.insert(word); });
      if (!files.plan.fired()) {
        calls = n;
        break;
      }
      failed += static_cast<int>(!done);
      ASSERT_TRUE(done || done.error().code != Code::kInternal) << done.error().to_string();
      // Where the note that a request has ended, or the removal, has failed, the log says so: they come back.
      if (done || said.contains(kTaking)) said.erase(kTaken);
      said.erase(kEnded);
      test::FaultyFileSystem plain;
      ASSERT_EQ(broken_promise(plain, directory, said), "") << "call " << n << " failed";
    }
  }
  std::printf("proof: an image that %s: %llu failing file operations, %d errors, 0 broken promises\n", life().name,
              static_cast<unsigned long long>(2 * calls), failed);
  EXPECT_GE(failed, 40);
}

// --- the power goes ---

constexpr const char* kDisk = "/disk/store";
using Ignored = std::function<bool(const test::ModelChange&)>;

std::vector<test::ModelChange> recorded(const Work& work, Ignored ignored = {}) {
  test::ModelFileSystem system;
  system.ignored = std::move(ignored);
  EXPECT_SUCCEEDS(work(system, kDisk, [&](char word, char) { system.note(std::string(1, word), 0); }));
  return std::move(system.record);
}

// Tries `tries` states after every change; returns the first problem.
std::string cut_everywhere(const std::vector<test::ModelChange>& record, int tries, uint64_t seed, uint64_t& states) {
  test::PowerCuts cuts(record, test::ModelDisk(1, {.is_directory = true}));
  std::set<char> said;
  std::mt19937_64 random(seed);
  for (;;) {
    for (int choice = 0; choice < tries; ++choice) {
      test::ModelFileSystem system(cuts.state(choice, random));
      ++states;
      if (std::string problem = broken_promise(system, kDisk, said); !problem.empty())
        return fmt::format("after change {}, choice {}: {}", cuts.position(), choice, problem);
    }
    if (cuts.done()) return "";
    const test::ModelChange& next = record[cuts.position()];
    if (next.kind == test::ModelChange::Kind::kNote) said.insert(next.name[0]);
    cuts.step();
  }
}

TEST_P(Images, AreWholeOrNoneWhereverThePowerGoes) {
  uint64_t states = 0;
  const int tries = test::long_run() ? 200 : 20;
  ASSERT_EQ(cut_everywhere(recorded(life().work), tries, 1, states), "");
  std::printf("proof: an image that %s: %llu states after a power cut, 0 broken promises\n", life().name,
              static_cast<unsigned long long>(states));
  EXPECT_GE(states, 1300u);
}

// Planted mistakes in what is synced are all found, so that the trials can be believed.
TEST(ImagesWithoutASync, AreFoundBroken) {
  using Kind = test::ModelChange::Kind;
  const auto without = [](Kind kind, std::string end) -> Ignored {
    return [kind, end](const test::ModelChange& change) { return change.kind == kind && change.name.ends_with(end); };
  };
  struct Mistake {
    const char* name;
    Ignored ignored;
  };
  const Mistake mistakes[] = {
      {"STATE", without(Kind::kSyncFile, "STATE")},
      {"MANIFEST", without(Kind::kSyncFile, "MANIFEST")},
      {"chunks", without(Kind::kSyncFile, "chunks-r1")},
      {"refs", without(Kind::kSyncFile, "refs-r0")},
      {"the directory under construction", without(Kind::kSyncDirectory, "/s-000001")},
      {"the image's directory", without(Kind::kSyncDirectory, "/images/a")},
      {"the directory of images", without(Kind::kSyncDirectory, "/images")},
      {"the note of a request that has ended", without(Kind::kSyncDirectory, "/g-000001")},
  };
  int found = 0;
  for (const Mistake& mistake : mistakes) {
    std::string problem;
    uint64_t states = 0;
    for (uint64_t seed = 1; problem.empty() && seed <= 20; ++seed)
      problem = cut_everywhere(recorded(moves, mistake.ignored), 4, seed, states);
    EXPECT_NE(problem, "") << "nobody sees that " << mistake.name << " is not synced";
    found += static_cast<int>(!problem.empty());
  }
  std::printf("proof: %d of %zu syncs that are left out are found\n", found, std::size(mistakes));
}

// --- random lives ---

// Three engines, of which each may write an image "a", read it, take it, give it up, abort its requests, or end and
// begin anew; one call a step. After each step what an engine has, and what is on disk, is as it must be.
class RandomLife {
 public:
  RandomLife(std::string directory, uint64_t seed) : directory_(std::move(directory)), random_(seed) {
    for (auto& engine : engines_) engine = std::make_unique<ImageEngine>(linux_file_system(), directory_);
  }

  void step() {
    const size_t number = random_() % std::size(engines_);
    ImageEngine& engine = *engines_[number];
    Own& own = own_[number];
    switch (random_() % 8) {
      case 0:
        if (own.place == Place::kNowhere) {
          ASSERT_SUCCEEDS(engine.extract("a"));
          own = {.place = Place::kMemory, .requests = {"r1", "r2"}};
        }
        break;
      case 1:
      case 2:
        if (own.place == Place::kMemory) store(engine, own);
        break;
      case 3:
        if (own.place == Place::kDisk && !own.holds) read_back(engine, own);
        break;
      case 4:
        if (own.place == Place::kNowhere && !own.holds) open(engine, own);
        break;
      case 5:
        if (own.holds) take(engine, own);
        break;
      case 6:
        if (random_() % 3 == 0) {
          end(number);
        } else if (own.holds) {
          engine.stored.put_back("a");
          disk_.held = own.holds = false;
          if (own.opened) forget(engine, own);
        }
        break;
      default:
        if (own.place == Place::kDisk && !own.holds && !disk_.held) abort(engine, own);
        break;
    }
    ++steps;
    check();
  }
  uint64_t steps = 0;
  uint64_t taken = 0;
  uint64_t lost_races = 0;

 private:
  enum class Place : uint8_t { kNowhere, kMemory, kDisk };
  struct Own {
    Place place = Place::kNowhere;
    bool holds = false;
    bool opened = false;  // it was another engine's
    int image = 0;        // on disk: which one
    std::set<std::string> requests{};
  };
  struct Disk {
    int image = 0;  // 0: none
    bool held = false;
    std::set<std::string> requests{};
  };

  bool is_there(const Own& own) const { return disk_.image != 0 && disk_.image == own.image; }
  void store(ImageEngine& engine, Own& own) {
    const auto stored = engine.stored.store("a", ImageEngine::fields(), Value{});
    ASSERT_EQ(stored.has_value(), disk_.image == 0) << (stored ? "" : stored.error().to_string());
    if (!stored) return;
    disk_ = {.image = ++images_, .held = false, .requests = own.requests};
    own.place = Place::kDisk;
    own.image = images_;
  }
  void read_back(ImageEngine& engine, Own& own) {
    const auto read = engine.stored.read_back("a");
    if (disk_.held) {
      EXPECT_FAILS(read, disk_.image == 0 ? Code::kNotFound : Code::kUnavailable);
    } else if (!is_there(own)) {
      EXPECT_FAILS(read, Code::kNotFound);
      ++lost_races;
      (void)engine.stored.forget("a");
      own = {};
    } else {
      ASSERT_SUCCEEDS(read);
      disk_.held = own.holds = true;
    }
  }
  void open(ImageEngine& engine, Own& own) {
    const auto opened = engine.open(directory_ + "/images/a");
    ASSERT_EQ(opened.has_value(), disk_.image != 0 && !disk_.held) << (opened ? "" : opened.error().to_string());
    if (!opened) return;
    std::set<std::string> requests;
    for (const RequestImages::Request& request : (*opened)->requests) requests.insert(request.state.id);
    ASSERT_EQ(requests, disk_.requests);
    own = {.place = Place::kMemory, .holds = true, .opened = true, .image = disk_.image, .requests = requests};
    disk_.held = true;
  }
  void take(ImageEngine& engine, Own& own) {
    ASSERT_SUCCEEDS(engine.stored.take("a"));
    EXPECT_EQ(value_of(engine.images.get("a"))->requests.size(), own.requests.size());
    EXPECT_TRUE(engine.brings("a"));
    disk_ = {};
    own = {};
    ++taken;
  }
  void abort(ImageEngine& engine, Own& own) {
    const std::string request = *own.requests.begin();
    own.requests.erase(request);
    const bool last = engine.stored.release(request).has_value();
    EXPECT_EQ(last, own.requests.empty());
    if (is_there(own)) {
      disk_.requests.erase(request);
      if (last) disk_ = {};
    }
    if (last) own = {};
  }
  // What it opened is another engine's again.
  void forget(ImageEngine& engine, Own& own) {
    for (const std::string& request : own.requests) {
      if (const std::optional<Bytes> drop = engine.images.release(request)) {
        EXPECT_SUCCEEDS(engine.call_ranks(*drop));
      }
    }
    own = {};
  }
  void end(size_t number) {
    if (own_[number].holds) disk_.held = false;
    own_[number] = {};
    engines_[number].reset();
    engines_[number] = std::make_unique<ImageEngine>(linux_file_system(), directory_);
  }
  void check() {
    for (size_t i = 0; i < std::size(engines_); ++i) {
      const bool in_memory = own_[i].place == Place::kMemory || own_[i].holds;
      ASSERT_EQ(engines_[i]->used() > 0, in_memory) << "step " << steps;
    }
    ASSERT_EQ(boost::filesystem::exists(directory_ + "/images/a"), disk_.image != 0) << "step " << steps;
  }

  const std::string directory_;
  std::mt19937_64 random_;
  std::unique_ptr<ImageEngine> engines_[3];
  Own own_[3];
  Disk disk_;
  int images_ = 0;
};

TEST(ImagesOfRandomLives, HaveOneOwner) {
  uint64_t steps = 0;
  uint64_t taken = 0;
  uint64_t lost = 0;
  for (uint64_t seed = 1; seed <= (test::long_run() ? 1000u : 40u); ++seed) {
    const test::TemporaryDirectory temporary(test::in_memory());
    RandomLife life(temporary.path(), seed);
    for (int i = 0; i < 200; ++i) {
      life.step();
      ASSERT_FALSE(::testing::Test::HasFailure()) << "seed " << seed << ", step " << i;
    }
    steps += life.steps, taken += life.taken, lost += life.lost_races;
  }
  std::printf("proof: %llu steps of engines with an image: taken %llu times, %llu times too late, each had one owner\n",
              static_cast<unsigned long long>(steps), static_cast<unsigned long long>(taken),
              static_cast<unsigned long long>(lost));
  EXPECT_GE(taken, steps / 100);
  EXPECT_GE(lost, 10u);
}

// --- several engines ---

// Several processes open and take one image at the same time; half of the rounds without locks, as where a file system
// has none between hosts.
TEST(ImagesOfSeveralEngines, AreTakenOnce) {
  constexpr int kEngines = 4;
  const int rounds = test::long_run() ? 200 : 24;
  int refused = 0;
  for (int round = 0; round < rounds; ++round) {
    const test::TemporaryDirectory temporary(test::in_memory());
    const std::string path = temporary / "images/a";
    {
      ImageEngine source(linux_file_system(), temporary.path());
      ASSERT_SUCCEEDS(store(source, [](char, char) {}));
    }
    int gate[2];
    ASSERT_EQ(::pipe(gate), 0);
    std::vector<pid_t> children;
    for (int i = 0; i < kEngines; ++i) {
      const pid_t child = ::fork();
      if (child == 0) {
        ::close(gate[1]);
        char byte = 0;
        ImageEngine engine(linux_file_system(), "");
        (void)!::read(gate[0], &byte, 1);  // until all are there
        if (round % 2 == 1) boost::filesystem::remove(path + "/LOCK");
        const Result<const RequestImages::Image*> opened = engine.open(path);
        if (!opened)
          ::_exit(opened.error().code == Code::kNotFound || opened.error().code == Code::kUnavailable ? 2 : 3);
        if (round % 2 == 1) boost::filesystem::remove(path + "/LOCK");
        const Status taken = engine.stored.take("a");
        if (!taken) ::_exit(taken.error().code == Code::kNotFound ? 2 : 3);
        ::_exit(engine.brings("a") ? 0 : 4);
      }
      children.push_back(child);
    }
    ::close(gate[0]);
    ::close(gate[1]);
    int won = 0;
    for (const pid_t child : children) {
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      ASSERT_TRUE(WIFEXITED(status));
      won += static_cast<int>(WEXITSTATUS(status) == 0);
      refused += static_cast<int>(WEXITSTATUS(status) == 2);
      ASSERT_TRUE(WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 2) << WEXITSTATUS(status);
    }
    ASSERT_EQ(won, 1);
    test::FaultyFileSystem files;
    ASSERT_SUCCEEDS(ImageStore(files, temporary.path(), {}).remove_leftovers());
    ASSERT_FALSE(boost::filesystem::exists(path));
  }
  std::printf("proof: %d races of %d engines for an image: each was taken once, %d times it was refused\n", rounds,
              kEngines, refused);
}

}  // namespace
}  // namespace torpor::proof
