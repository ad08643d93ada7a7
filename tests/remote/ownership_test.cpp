// SPDX-License-Identifier: Apache-2.0
#include "remote/ownership.h"

#include <atomic>
#include <thread>

#include <gtest/gtest.h>

#include "base/file_system.h"
#include "remote/answer_copies.h"
#include "remote/open_store.h"
#include "tests/remote/store_in_memory.h"
#include "tests/support/manual_clock.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::remote {
namespace {

using namespace std::chrono_literals;
using test::value_of;

std::string holder(char letter) { return std::string(32, letter); }

TEST(Ownership, TheNextOneTakesOverWhenTheFirstIsSilentForATermAndAQuarter) {
  test::StoreInMemory store;
  test::ManualClock clock;
  Ownership first(store, clock, holder('a'), 10s);
  Ownership second(store, clock, holder('b'), 10s);
  EXPECT_TRUE(value_of(first.take()));
  EXPECT_FALSE(value_of(second.take()));
  clock.advance(9s);
  EXPECT_TRUE(first.renew());
  clock.advance(5s);
  EXPECT_FALSE(value_of(second.take()));  // renewed meanwhile: it looks from now on
  ASSERT_TRUE(first.publish("20261123T071500Z-417b8ce1e9819daf92275e733d38256e", std::string(64, '0')));
  EXPECT_FALSE(value_of(second.take()));
  clock.advance(10s);
  EXPECT_FALSE(first.owns());
  EXPECT_FALSE(value_of(second.take()));
  clock.advance(2500ms);
  EXPECT_TRUE(value_of(second.take()));
  EXPECT_EQ(second.before(), holder('a'));
  EXPECT_EQ(second.newest().checkpoint, "20261123T071500Z-417b8ce1e9819daf92275e733d38256e");
  EXPECT_EQ(second.newest().answers, std::string(64, '0'));
  EXPECT_EQ(second.newest().term, 2u);
  EXPECT_EQ(first.publish("late", "").error().code, Code::kAborted);
  EXPECT_EQ(store.objects.size(), 1u);  // older records are gone
}

TEST(Ownership, WhatIsGivenBackIsTakenAtOnce) {
  test::StoreInMemory store;
  test::ManualClock clock;
  Ownership first(store, clock, holder('a'), 10s);
  Ownership second(store, clock, holder('b'), 10s);
  EXPECT_TRUE(value_of(first.take()));
  EXPECT_TRUE(first.release());
  EXPECT_FALSE(first.owns());
  EXPECT_TRUE(value_of(second.take()));
}

TEST(Ownership, WhoWaitsKnowsWhereTheOwnerServesClients) {
  test::StoreInMemory store;
  test::ManualClock clock;
  Ownership first(store, clock, holder('a'), 10s, "http://10.0.0.1:8000");
  Ownership second(store, clock, holder('b'), 10s);
  EXPECT_TRUE(value_of(first.take()));
  EXPECT_FALSE(value_of(second.take()));
  EXPECT_EQ(second.newest().address, "http://10.0.0.1:8000");
  EXPECT_TRUE(first.renew());
  EXPECT_FALSE(value_of(second.take()));
  EXPECT_EQ(second.newest().address, "http://10.0.0.1:8000");
  EXPECT_TRUE(first.release());
  EXPECT_TRUE(value_of(second.take()));
  EXPECT_EQ(second.newest().address, "");
  OwnerRecord record = first.newest();
  for (const char* no : {"ftp://a", "http://", "http://a/b", "http://a?b", "http://a@b", "http://a\r\nb", "a:80"}) {
    record.address = no;
    EXPECT_FALSE(decode_owner(encode_owner(record), record.number)) << no;
  }
}

TEST(Ownership, AStoreThatFailsAtAnyCallLeavesOneOwner) {
  for (const bool after : {false, true}) {
    for (uint64_t failing = 1; failing <= 12; ++failing) {
      test::StoreInMemory store;
      store.failing = failing;
      store.after = after;
      test::ManualClock clock;
      Ownership first(store, clock, holder('a'), 10s);
      Ownership second(store, clock, holder('b'), 10s);
      for (int attempt = 0; attempt < 3 && !first.owns(); ++attempt) (void)first.take();
      ASSERT_TRUE(first.owns()) << failing;
      const std::string name = "20261123T071500Z-417b8ce1e9819daf92275e733d38256e";
      ASSERT_TRUE(first.publish(name, "") || first.publish(name, "")) << failing;
      clock.advance(9s);
      ASSERT_TRUE(first.renew() || first.renew()) << failing;
      (void)second.take();
      EXPECT_FALSE(second.owns());
      clock.advance(20s);
      for (int attempt = 0; attempt < 3 && !second.owns(); ++attempt) {
        (void)second.take();
        clock.advance(13s - 10s * second.owns());
      }
      EXPECT_TRUE(second.owns()) << failing;
      EXPECT_EQ(second.newest().checkpoint, name);
      EXPECT_FALSE(first.owns());
    }
  }
}

TEST(Ownership, ARecordThatIsNoneIsRefused) {
  const OwnerRecord record{.number = 7, .term = 2, .holder = holder('c'), .milliseconds = 30000};
  const std::string text = encode_owner(record);
  EXPECT_EQ(value_of(decode_owner(text, 7)), record);
  EXPECT_EQ(decode_owner(text, 8).error().code, Code::kCorruption);
  for (size_t length = 0; length < text.size(); ++length) EXPECT_FALSE(decode_owner(text.substr(0, length), 7));
  EXPECT_EQ(owner_number(owner_key(7)), 7u);
  EXPECT_EQ(owner_number("owner/7"), std::nullopt);
  OwnerRecord hostile = record;
  hostile.checkpoint = "../../x";
  EXPECT_FALSE(decode_owner(encode_owner(hostile), 7));
}

void write(FileSystem& system, const std::string& directory, const std::string& name, std::string_view text) {
  const auto at = value_of(system.open_directory(directory, true));
  const auto file = value_of(at->open_slots(name, FileIo::kPlain));
  ASSERT_TRUE(file->pwrite(std::as_bytes(std::span(text)), 0));
}

TEST(AnswerCopies, ComeBackWholeAndOthersAreSetAside) {
  const test::TemporaryDirectory folder;
  FileSystem& system = linux_file_system();
  const std::string from = folder.path() + "/from", to = folder.path() + "/to";
  write(system, from, "answers-000000000001", "what was asked");
  write(system, from, "tenants.secret", "a secret of thirty-two bytes ...");
  write(system, from, "LOCK", "");
  write(system, to + "/answers", "answers-000000000009", "of before");
  const auto store = value_of(open_object_store(system, "file://" + folder.path() + "/store"));
  const std::string index = value_of(push_answers(system, from, *store));
  EXPECT_EQ(value_of(push_answers(system, from, *store)), index);
  ASSERT_TRUE(pull_answers(system, *store, index, to));
  const auto target = value_of(system.open_directory(to, false));
  const auto names = [](const Directory& directory) {
    std::vector<std::string> names;
    for (const Entry& entry : value_of(directory.list())) names.push_back(entry.name);
    return names;
  };
  EXPECT_EQ(names(*target), (std::vector<std::string>{"answers", "answers-before-" + index.substr(0, 16)}));
  EXPECT_EQ(names(*value_of(target->open_directory("answers"))),
            (std::vector<std::string>{"answers-000000000001", "tenants.secret"}));
  // Once more, after a log of this host that nobody has yet: both stay.
  for (const char* number : {"-2", "-3"}) {
    write(system, to + "/answers", "answers-000000000007", number);
    ASSERT_TRUE(pull_answers(system, *store, index, to));
    const auto aside = value_of(target->open_directory("answers-before-" + index.substr(0, 16) + number));
    EXPECT_SUCCEEDS(aside->open_file("answers-000000000007"));
  }
  EXPECT_SUCCEEDS(target->open_directory("answers-before-" + index.substr(0, 16)));
  ASSERT_TRUE(store->remove("answers/" + index));
  ASSERT_TRUE(store->remove("answers/" + index));  // gone already
  EXPECT_EQ(pull_answers(system, *store, index, to).error().code, Code::kNotFound);
}

TEST(Ownership, WhoOwnsCanBeAskedFromOtherThreadsMeanwhile) {
  test::StoreInMemory store;
  test::ManualClock clock;
  Ownership first(store, clock, holder('a'), 10s);
  std::atomic<bool> over = false;
  bool whole = true;
  std::thread asking([&] {
    while (!over) {
      const std::string seen = first.newest().holder;
      whole = whole && (seen.empty() || seen == holder('a')) && first.before().empty();
      (void)first.owns();
    }
  });
  EXPECT_TRUE(value_of(first.take()));
  for (int i = 0; i < 50; ++i) {
    EXPECT_TRUE(first.renew());
    EXPECT_TRUE(first.owns());
  }
  EXPECT_TRUE(first.release());
  over = true;
  asking.join();
  EXPECT_TRUE(whole);
  EXPECT_FALSE(first.owns());
}

}  // namespace
}  // namespace torpor::remote
