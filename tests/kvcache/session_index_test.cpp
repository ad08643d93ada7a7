// SPDX-License-Identifier: Apache-2.0
// The index of sessions beside a simple model, over random calls: the same sessions, prefixes and wanted blocks; and it
// stays within its bounds.
#include "kvcache/session_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "tests/support/long_run.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

BlockHash hash_number(uint64_t number) {
  BlockHash hash{};
  std::memcpy(hash.data(), &number, sizeof number);
  return hash;
}

std::vector<BlockHash> chain_of(const std::vector<uint64_t>& numbers) {
  std::vector<BlockHash> chain;
  for (const uint64_t number : numbers) chain.push_back(hash_number(number));
  return chain;
}

TEST(SessionIndexTest, AContinuationReplacesItsBeginningAndABranchStandsBesideIt) {
  SessionIndex index({});
  const SessionName name{.tenant = "t", .id = "a"};
  Session* session = index.record(name, chain_of({1, 2}));
  ASSERT_NE(session, nullptr);
  EXPECT_EQ(session->prefixes.size(), 1u);
  session = index.record(name, chain_of({1, 2, 3}));  // goes on
  EXPECT_EQ(session->prefixes.size(), 1u);
  EXPECT_EQ(session->blocks(), 3u);
  session = index.record(name, chain_of({1, 2, 4}));  // branches
  EXPECT_EQ(session->prefixes.size(), 2u);
  session = index.record(name, chain_of({1, 2}));  // adds nothing
  EXPECT_EQ(session->blocks(), 6u);
  EXPECT_EQ(session->prefixes.front().back(), hash_number(4));
  EXPECT_SUCCEEDS(index.check());
  EXPECT_EQ(index.find({.tenant = "other", .id = "a"}), nullptr);
}

TEST(SessionIndexTest, ABlockIsWantedWhereTheNearestOfItsSessionsIs) {
  SessionIndex index({});
  Session* const one = index.record({.tenant = "t", .id = "one"}, chain_of({1, 2}));
  Session* const two = index.record({.tenant = "u", .id = "two"}, chain_of({1, 3}));
  index.move_to(*one, Residence::kDisk);
  EXPECT_TRUE(index.wanted(hash_number(1), Residence::kDevice));
  EXPECT_FALSE(index.wanted(hash_number(2), Residence::kHost));
  EXPECT_TRUE(index.wanted(hash_number(2), Residence::kDisk));
  index.move_to(*two, Residence::kHost);
  EXPECT_FALSE(index.wanted(hash_number(1), Residence::kDevice));
  EXPECT_TRUE(index.wanted(hash_number(1), Residence::kHost));
  index.forget(*two);
  EXPECT_FALSE(index.wanted(hash_number(3), Residence::kRemote));
  EXPECT_FALSE(index.wanted(hash_number(1), Residence::kHost));
  EXPECT_SUCCEEDS(index.check());
}

TEST(SessionIndexTest, ATenantThatTakesMoreThanItsShareForgetsItsOwnSessions) {
  SessionIndex index({.sessions = 8, .tenant_share = 0.5});
  (void)index.record({.tenant = "quiet", .id = "q"}, chain_of({100}));
  for (uint64_t i = 0; i < 20; ++i)
    (void)index.record({.tenant = "loud", .id = "s" + std::to_string(i)}, chain_of({i}));
  EXPECT_NE(index.find({.tenant = "quiet", .id = "q"}), nullptr);
  EXPECT_EQ(index.size(), 5u);
  EXPECT_EQ(index.find({.tenant = "loud", .id = "s15"}), nullptr);
  EXPECT_NE(index.find({.tenant = "loud", .id = "s16"}), nullptr);
  EXPECT_EQ(index.take_forgotten().size(), 16u);
}

TEST(SessionIndexTest, ASessionThatHoldsBlocksIsForgottenLast) {
  SessionIndex index({.sessions = 2, .tenant_share = 1});
  index.record({.tenant = "t", .id = "held"}, chain_of({1}))->held = true;
  (void)index.record({.tenant = "t", .id = "b"}, chain_of({2}));
  (void)index.record({.tenant = "t", .id = "c"}, chain_of({3}));
  EXPECT_NE(index.find({.tenant = "t", .id = "held"}), nullptr);
  EXPECT_EQ(index.find({.tenant = "t", .id = "b"}), nullptr);
}

TEST(SessionIndexTest, OptionsNamesAndChainsThatDoNotFitAreRefused) {
  EXPECT_FAILS(SessionIndexOptions{.sessions = 0}.validate(), Code::kInvalidArgument, "sessions");
  EXPECT_FAILS(SessionIndexOptions{.bytes = 10}.validate(), Code::kInvalidArgument, "bytes");
  EXPECT_FAILS(SessionIndexOptions{.tenant_share = 0}.validate(), Code::kInvalidArgument, "tenant_share");
  SessionIndex index({.bytes = 1 << 16, .tenant_share = 1});
  EXPECT_EQ(index.record({.tenant = "t", .id = std::string(257, 'x')}, chain_of({1})), nullptr);
  EXPECT_EQ(index.record({.tenant = "t", .id = "a"}, {}), nullptr);
  std::vector<uint64_t> many(10'000);
  for (size_t i = 0; i < many.size(); ++i) many[i] = i;
  const Session* const session = index.record({.tenant = "t", .id = "a"}, chain_of(many));
  ASSERT_NE(session, nullptr);  // its beginning alone
  EXPECT_LT(session->blocks(), 512u);
  EXPECT_GT(session->blocks(), 400u);
  EXPECT_LE(index.bytes(), 1 << 16);
  EXPECT_SUCCEEDS(index.check());
}

// What SessionIndex promises, as simple as it can be written; without bounds.
struct Model {
  struct Known {
    std::vector<std::vector<uint64_t>> prefixes;
    Residence residence = Residence::kDevice;
  };
  std::map<SessionName, Known> sessions;

  void record(const SessionName& name, const std::vector<uint64_t>& chain) {
    Known& known = sessions[name];
    known.residence = Residence::kDevice;
    const auto begins = [](const std::vector<uint64_t>& all, const std::vector<uint64_t>& with) {
      return with.size() <= all.size() && std::equal(with.begin(), with.end(), all.begin());
    };
    for (const auto& prefix : known.prefixes) {
      if (prefix.size() > chain.size() && begins(prefix, chain)) return;
    }
    std::erase_if(known.prefixes, [&](const auto& prefix) { return begins(chain, prefix); });
    known.prefixes.push_back(chain);
  }
  bool wanted(uint64_t number, Residence residence) const {
    return std::any_of(sessions.begin(), sessions.end(), [&](const auto& each) {
      const Known& known = each.second;
      return known.residence <= residence &&
             std::any_of(known.prefixes.begin(), known.prefixes.end(), [&](const auto& prefix) {
               return std::find(prefix.begin(), prefix.end(), number) != prefix.end();
             });
    });
  }
};

// A block's number is its whole past, as an engine's hashes are.
std::vector<uint64_t> random_chain(std::mt19937& random) {
  std::vector<uint64_t> chain;
  uint64_t past = 0;
  const size_t length = 1 + random() % 5;
  while (chain.size() < length) chain.push_back(past = past * 3 + 1 + random() % 2);
  return chain;
}

TEST(SessionIndexTest, OverRandomCallsItIsAsTheModelSays) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    SessionIndex index({});
    Model model;
    for (int call = 0; call < 200; ++call) {
      const SessionName name{.tenant = std::string(1, static_cast<char>('t' + random() % 2)),
                             .id = std::string(1, static_cast<char>('a' + random() % 4))};
      Session* const known = index.find(name);
      ASSERT_EQ(known != nullptr, model.sessions.contains(name));
      switch (known == nullptr ? 0 : random() % 4) {
        case 3:
          index.forget(*known);
          model.sessions.erase(name);
          break;
        case 2: {
          const auto residence = static_cast<Residence>(random() % kResidences);
          index.move_to(*known, residence);
          model.sessions[name].residence = residence;
          break;
        }
        default: {
          const std::vector<uint64_t> chain = random_chain(random);
          if (model.sessions[name].prefixes.size() == SessionIndex::kMostPrefixes) {
            index.forget(*index.find(name));
            model.sessions.erase(name);
          }
          ASSERT_NE(index.record(name, chain_of(chain)), nullptr);
          model.record(name, chain);
        }
      }
      ASSERT_SUCCEEDS(index.check());
      ASSERT_EQ(index.size(), model.sessions.size());
      for (const auto& [each, known_to_model] : model.sessions) {
        const Session* const session = index.find(each);
        ASSERT_NE(session, nullptr);
        std::vector<std::vector<BlockHash>> expected;
        for (const auto& prefix : known_to_model.prefixes) expected.push_back(chain_of(prefix));
        std::vector<std::vector<BlockHash>> found(session->prefixes.begin(), session->prefixes.end());
        std::sort(expected.begin(), expected.end());
        std::sort(found.begin(), found.end());
        ASSERT_EQ(found, expected);
      }
      for (uint64_t number = 0; number < 250; ++number) {
        for (size_t residence = 0; residence < kResidences; ++residence) {
          const auto at = static_cast<Residence>(residence);
          ASSERT_EQ(index.wanted(hash_number(number), at), model.wanted(number, at)) << number;
        }
      }
    }
    EXPECT_EQ(index.clear().size(), model.sessions.size());
    EXPECT_EQ(index.bytes(), 0);
    EXPECT_SUCCEEDS(index.check());
  }
}

TEST(SessionIndexTest, OverRandomCallsItStaysWithinItsBounds) {
  std::mt19937 random(7);
  const SessionIndexOptions options{.sessions = 12, .bytes = 1 << 16, .tenant_share = 0.5};
  SessionIndex index(options);
  for (int call = 0; call < 2000; ++call) {
    std::vector<uint64_t> chain(1 + random() % 300);
    for (uint64_t& number : chain) number = random();
    const SessionName name{.tenant = std::string(1, static_cast<char>('t' + random() % 3)),
                           .id = std::to_string(random() % 20)};
    Session* const session = index.record(name, chain_of(chain));
    ASSERT_NE(session, nullptr);
    session->held = random() % 4 == 0;
    ASSERT_LE(index.bytes(), options.bytes);
    ASSERT_LE(static_cast<int64_t>(index.size()), options.sessions);
    ASSERT_EQ(index.find(name), session);
    if (call % 50 == 0) {
      ASSERT_SUCCEEDS(index.check());
    }
  }
  EXPECT_GT(index.forgotten(), 0u);
}

}  // namespace
}  // namespace torpor
