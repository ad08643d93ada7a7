// SPDX-License-Identifier: Apache-2.0
// Explores every interleaving of the two halves of a swap: each may stand still between any two of its steps for as
// long as it likes, fail at any of them, die, be given up by the other one, or by somebody else. The steps on the word
// that both see are those that engines take (base/swap_handshake.h); memory is some pages of a device that has as many
// as one of them needs.
#include "base/swap_handshake.h"

#include <cstdio>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace torpor {
namespace {

using Side = SwapHandshake::Side;
using Stage = SwapHandshake::Stage;
using Look = SwapHandshake::Look;
using End = SwapHandshake::End;

constexpr int kPages = 2;

enum class At : uint8_t {
  kComes,
  kWaitsForOther,  // who gives: that it came; who takes: that the other one stands still
  kMoves,          // pages
  kChecked,        // who takes: that it is not stopped, and takes a page next
  kSaysReady,
  kWaitsToEnd,  // who gives: that the other one is ready; who takes: that the other one is done
  kLetsGo,
  kSaysDone,
  kWaitsForEnd,
  kCommits,
  kRuns,
  kFailed,      // it undoes its half
  kStopsOther,  // of who gives, before it waits for the other to let go
  kTakesBack,
  kEnded,
};

enum class Says : uint8_t { kNothing, kSwapped, kAsBefore, kAsleep, kLost };

struct Half {
  At at = At::kComes;
  bool dead = false;
  bool awake = false;
  bool all_saved = false;
  int pages = 0;
  Says says = Says::kNothing;
  friend auto operator<=>(const Half&, const Half&) = default;
};

struct World {
  SwapHandshake word{};
  Half gives{.awake = true, .pages = kPages};
  Half takes{};
  int given = 0;
  int taken = 0;
  int faults = 0;
  bool somebody_stopped = false;
  friend auto operator<=>(const World&, const World&) = default;
  int free() const { return kPages - gives.pages - takes.pages; }
};

class Explorer {
 public:
  void explore() {
    reach(World());
    while (!open_.empty() && wrong.empty()) {
      const World* const world = open_.back();
      open_.pop_back();
      from(*world);
    }
  }

  std::string wrong;
  std::set<World> worlds;
  std::set<std::pair<Says, Says>> ends;  // of two that live

 private:
  static constexpr int kMostFaults = 2;

  void reach(World world) {
    check(world);
    const auto [place, is_new] = worlds.insert(std::move(world));
    if (is_new) open_.push_back(&*place);
  }
  template <class Change>
  void go(const World& world, const Change& change) {
    World next = world;
    change(next);
    reach(std::move(next));
  }

  void check(const World& world) {
    const Half& gives = world.gives;
    const Half& takes = world.takes;
    if (gives.pages + takes.pages > kPages) wrong = "both have more than the device";
    if (world.word.stopped() && world.word.committed()) wrong = "it is given up, and for good";
    if (gives.dead || takes.dead) return;
    if (gives.awake && takes.awake) wrong = "both run";
    if (takes.awake && (takes.pages != kPages || gives.pages != 0)) wrong = "it runs without its memory";
    if (gives.says == Says::kAsBefore && !(gives.awake && gives.pages == kPages)) wrong = "it is not as before";
    if (takes.says == Says::kAsBefore && takes.pages != 0) wrong = "it keeps what it does not own";
    if (gives.at != At::kEnded || takes.at != At::kEnded) return;
    ends.emplace(gives.says, takes.says);
    if ((gives.says == Says::kSwapped) && takes.says != Says::kSwapped) wrong = "only one of them has swapped";
    if (takes.says == Says::kSwapped && gives.awake) wrong = "both serve";
    if (!gives.awake && !takes.awake && gives.says != Says::kAsleep && gives.says != Says::kLost)
      wrong = "both are asleep and nobody says so";
  }

  void from(const World& world) {
    if (!world.gives.dead) give(world);
    if (!world.takes.dead) take(world);
    if (!world.somebody_stopped) {
      go(world, [](World& next) {
        next.somebody_stopped = true;
        next.word = next.word.stop(std::nullopt).value_or(next.word);
      });
    }
    if (world.faults == kMostFaults) return;
    for (Half World::*const half : {&World::gives, &World::takes}) {
      if ((world.*half).dead || (world.*half).at == At::kEnded) continue;
      go(world, [&](World& next) {
        ++next.faults;
        (next.*half).dead = true;
        (next.*half).awake = false;
        (next.*half).pages = 0;
      });
    }
  }

  static bool ended(const World& world, Side side) {
    const Half& half = side == Side::kSwapsOut ? world.gives : world.takes;
    const Stage stage = world.word.stage(side);
    return half.dead && (stage == Stage::kHere || stage == Stage::kReady);
  }
  // Its process has ended, and whoever looks stops it for that.
  static World looked(World world, Side at) {
    if (ended(world, at)) world.word = world.word.stop(at).value_or(world.word);
    return world;
  }

  // Who gives may fail by itself wherever it has not let go.
  void fails_by_itself(const World& world, Half World::*half) {
    if (world.faults == kMostFaults) return;
    go(world, [&](World& next) {
      ++next.faults;
      (next.*half).at = half == &World::gives ? At::kStopsOther : At::kFailed;
      (next.*half).all_saved = false;
    });
  }
  void gives_up(World& next, Side side) { next.word = next.word.stop(side, /*for_timeout=*/true).value_or(next.word); }

  void give(const World& world) {
    const auto to = [&](At at) { go(world, [&](World& next) { next.gives.at = at; }); };
    const auto wait = [&](Stage wanted, At then) {
      const World now = looked(world, Side::kSwapsIn);
      switch (now.word.look(Side::kSwapsIn, wanted)) {
        case Look::kThere: return go(now, [&](World& next) { next.gives.at = then; });
        case Look::kOver: return go(now, [&](World& next) { next.gives.at = At::kStopsOther; });
        case Look::kWait: return go(now, [&](World& next) { gives_up(next, Side::kSwapsOut); });
      }
    };
    switch (world.gives.at) {
      case At::kComes:
        go(world, [&](World& next) {
          next.word = next.word.reach(Side::kSwapsOut, Stage::kHere);
          next.gives.at = At::kWaitsForOther;
        });
        return;
      case At::kWaitsForOther: fails_by_itself(world, &World::gives); return wait(Stage::kHere, At::kSaysReady);
      case At::kSaysReady:
        go(world, [&](World& next) {
          next.word = next.word.reach(Side::kSwapsOut, Stage::kReady);
          next.gives.awake = false;  // it stands still
          next.gives.at = At::kMoves;
        });
        return;
      case At::kMoves: {
        fails_by_itself(world, &World::gives);
        const World now = looked(world, Side::kSwapsIn);
        if (now.word.stopped()) return go(now, [&](World& next) { next.gives.at = At::kStopsOther; });
        if (now.gives.pages == 0) {
          return go(now, [&](World& next) {
            next.gives.at = At::kWaitsToEnd;
            next.gives.all_saved = true;
          });
        }
        return go(now, [&](World& next) {
          --next.gives.pages;
          ++next.given;
        });
      }
      case At::kWaitsToEnd: return wait(Stage::kReady, At::kLetsGo);
      case At::kLetsGo: return to(At::kSaysDone);
      case At::kSaysDone:
        go(world, [&](World& next) {
          next.word = next.word.reach(Side::kSwapsOut, Stage::kDone);
          next.gives.at = At::kWaitsForEnd;
        });
        return;
      case At::kStopsOther:
        go(world, [&](World& next) {
          next.word = next.word.stop(Side::kSwapsOut).value_or(next.word);
          next.gives.at = At::kFailed;
        });
        return;
      case At::kFailed:
      case At::kWaitsForEnd: return wait_for_end(world);
      case At::kTakesBack: return take_back(world);
      default: return;
    }
  }

  void wait_for_end(const World& world) {
    const bool done = world.gives.at == At::kWaitsForEnd;
    const auto end_as = [&](const World& now, End end) {
      go(now, [&](World& next) {
        next.gives.at = At::kTakesBack;
        if (!done || (end != End::kRuns && end != End::kMayRun)) return;
        next.gives.says = end == End::kRuns ? Says::kSwapped : Says::kAsleep;
        next.gives.at = At::kEnded;
      });
    };
    if (const End end = world.word.end(); end != End::kNone) return end_as(world, end);
    if (ended(world, Side::kSwapsIn)) return end_as(world, End::kHasNothing);
    World silent = world;
    gives_up(silent, Side::kSwapsOut);
    end_as(silent, silent.word.committed() ? End::kMayRun : End::kMayHold);
  }

  // While it has not let go: what is missing. After that: a wake.
  void take_back(const World& world) {
    const int missing = kPages - world.gives.pages;
    if (world.free() >= missing) {
      return go(world, [](World& next) {
        next.gives.pages = kPages;
        next.gives.awake = true;
        next.gives.says = Says::kAsBefore;
        next.gives.at = At::kEnded;
        next.word = next.word.reach(Side::kSwapsOut, Stage::kFailed);
      });
    }
    go(world, [](World& next) {  // it has waited long enough
      next.gives.says = next.gives.all_saved ? Says::kAsleep : Says::kLost;
      next.gives.at = At::kEnded;
      next.word = next.word.reach(Side::kSwapsOut, Stage::kFailed);
    });
  }

  void take(const World& world) {
    const auto to = [&](const World& now, At at) { go(now, [&](World& next) { next.takes.at = at; }); };
    const auto wait = [&](Stage wanted, At then) {
      const World now = looked(world, Side::kSwapsOut);
      switch (now.word.look(Side::kSwapsOut, wanted)) {
        case Look::kThere: return to(now, then);
        case Look::kOver: return to(now, At::kFailed);
        case Look::kWait: return go(now, [&](World& next) { gives_up(next, Side::kSwapsIn); });
      }
    };
    switch (world.takes.at) {
      case At::kComes:
        go(world, [&](World& next) {
          next.word = next.word.reach(Side::kSwapsIn, Stage::kHere);
          next.takes.at = At::kWaitsForOther;
        });
        return;
      case At::kWaitsForOther: return wait(Stage::kReady, At::kMoves);
      case At::kMoves: {
        fails_by_itself(world, &World::takes);
        const World now = looked(world, Side::kSwapsOut);
        if (now.word.stopped()) return to(now, At::kFailed);
        if (now.takes.pages == kPages) return to(now, At::kSaysReady);
        if (now.given > now.taken) return to(now, At::kChecked);
        return go(now, [&](World& next) { gives_up(next, Side::kSwapsIn); });
      }
      case At::kChecked:  // whatever became of it meanwhile
        if (world.free() == 0) return to(world, At::kFailed);
        return go(world, [&](World& next) {
          ++next.taken;
          ++next.takes.pages;
          next.takes.at = At::kMoves;
        });
      case At::kSaysReady:
        go(world, [&](World& next) {
          next.word = next.word.reach(Side::kSwapsIn, Stage::kReady);
          next.takes.at = At::kWaitsToEnd;
        });
        return;
      case At::kWaitsToEnd: return wait(Stage::kDone, At::kCommits);
      case At::kCommits: {
        fails_by_itself(world, &World::takes);
        const auto committed = world.word.commit();
        if (!committed) return to(world, At::kFailed);
        return go(world, [&](World& next) {
          next.word = *committed;
          next.takes.at = At::kRuns;
        });
      }
      case At::kRuns:
        fails_by_itself(world, &World::takes);
        go(world, [&](World& next) {
          next.takes.awake = true;
          next.takes.at = At::kSaysDone;
        });
        return;
      case At::kSaysDone:
        go(world, [&](World& next) {
          next.word = next.word.reach(Side::kSwapsIn, Stage::kDone);
          next.takes.says = Says::kSwapped;
          next.takes.at = At::kEnded;
        });
        return;
      case At::kFailed:
        go(world, [&](World& next) {
          next.takes.pages = 0;
          next.takes.at = At::kStopsOther;
        });
        return;
      case At::kStopsOther:
        go(world, [&](World& next) {
          next.word = next.word.stop(Side::kSwapsIn).value_or(next.word).reach(Side::kSwapsIn, Stage::kFailed);
          next.takes.says = Says::kAsBefore;
          next.takes.at = At::kEnded;
        });
        return;
      default: return;
    }
  }

  std::vector<const World*> open_;
};

TEST(RoomAgreementTest, WhicheverStopsOrDiesWhenBothComeToOneEndAndSaySo) {
  Explorer explorer;
  explorer.explore();
  EXPECT_EQ(explorer.wrong, "");
  EXPECT_GT(explorer.worlds.size(), 1000u);
  using Ends = std::set<std::pair<Says, Says>>;
  EXPECT_EQ(explorer.ends, (Ends{
                               {Says::kSwapped, Says::kSwapped},
                               {Says::kAsBefore, Says::kAsBefore},
                               {Says::kAsleep, Says::kSwapped},   // it did not hear that the other one runs
                               {Says::kAsleep, Says::kAsBefore},  // the other one let go when nobody waited any more
                               {Says::kLost, Says::kAsBefore},    // … and not all was saved
                           }));
  std::printf("explored %zu worlds\n", explorer.worlds.size());
}

}  // namespace
}  // namespace torpor
