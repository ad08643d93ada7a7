// SPDX-License-Identifier: Apache-2.0
// A scripted peer does what servers rarely do. tests/tools/test_remote.py asks real servers.
#include "remote/s3_store.h"

#include "tests/remote/http_peer.h"
#include "tests/support/results.h"

namespace torpor::remote {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Peer : public HttpPeer {
 public:
  using HttpPeer::HttpPeer;
  std::unique_ptr<ObjectStore> store(S3Retries retries = {.attempts = 3, .first_pause_seconds = 0.001},
                                     std::function<bool()> stop = {}) const {
    return make_s3_store("s3://bucket/p",
                         {.bucket = "bucket",
                          .prefix = "p/",
                          .endpoint = endpoint(),
                          .region = "us-east-1",
                          .credentials = {"A", "S", ""}},
                         std::move(stop), retries);
  }
};

std::string refusal(int status, const std::string& code) {
  return answer(
      status, fmt::format("<?xml version=\"1.0\"?><Error><Code>{}</Code><Message>no\x1b[31m</Message></Error>", code));
}
const std::array<std::byte, 3> kBytes = {std::byte{'a'}, std::byte{'b'}, std::byte{'c'}};

TEST(S3Store, AKeyIsCreatedConditionally) {
  Peer peer({answer(200), answer(412)});
  const auto store = peer.store();
  EXPECT_TRUE(test::value_of(store->put_new("x/y", kBytes)));
  EXPECT_FALSE(test::value_of(store->put_new("x/y", kBytes)));
  EXPECT_THAT(peer.asked, ElementsAre("PUT /bucket/p/x/y", "PUT /bucket/p/x/y"));
  EXPECT_THAT(peer.heads[0], HasSubstr("if-none-match: *"));
  EXPECT_THAT(peer.heads[0], HasSubstr("Signature="));
}

TEST(S3Store, WhatPassesIsTriedAgainWithTheWholeBody) {
  Peer peer({refusal(503, "SlowDown"), kReset, answer(200)});
  EXPECT_TRUE(test::value_of(peer.store()->put_new("x", kBytes)));
  EXPECT_EQ(peer.asked.size(), 3u);
  Peer slow({refusal(504, "GatewayTimeout"), refusal(400, "RequestTimeout"), answer(408), answer(200)});
  EXPECT_TRUE(test::value_of(slow.store({.attempts = 4, .first_pause_seconds = 0.001})->put_new("x", kBytes)));
}

TEST(S3Store, ItGivesUpAndSaysWhy) {
  Peer peer({refusal(503, "SlowDown"), refusal(500, "InternalError"), refusal(503, "SlowDown")});
  const auto put = peer.store()->put_new("x", kBytes);
  EXPECT_FAILS(put, Code::kUnavailable, "given up after 3 attempts: PUT x of s3://bucket/p was answered 503 (SlowDown");
  EXPECT_EQ(put.error().to_string().find('\x1b'), std::string::npos);
  Peer slow({refusal(400, "RequestTimeout")});
  EXPECT_FAILS(slow.store({.attempts = 1})->put_new("x", kBytes), Code::kUnavailable, "(try again)");
}

TEST(S3Store, WhatDoesNotPassIsNotTriedAgain) {
  Peer peer({refusal(403, "AccessDenied"), refusal(404, "NoSuchBucket"), refusal(404, "NoSuchKey"),
             refusal(507, "Full"), refusal(301, "PermanentRedirect"), refusal(400, "AuthorizationHeaderMalformed"),
             refusal(400, "ExpiredToken"), refusal(400, "InvalidToken"), answer(400)});
  const auto store = peer.store();
  std::array<std::byte, 8> room{};
  EXPECT_FAILS(store->get("x", room), Code::kUnauthenticated, "AccessDenied");
  EXPECT_FAILS(store->get("x", room), Code::kFailedPrecondition, "bucket");
  EXPECT_FAILS(store->get("x", room), Code::kNotFound);
  EXPECT_FAILS(store->put_new("x", kBytes), Code::kResourceExhausted);
  EXPECT_FAILS(store->put_new("x", kBytes), Code::kFailedPrecondition, "AWS_REGION");
  EXPECT_FAILS(store->put_new("x", kBytes), Code::kFailedPrecondition, "AWS_REGION");
  EXPECT_FAILS(store->get("x", room), Code::kUnauthenticated, "AWS_SESSION_TOKEN");
  EXPECT_FAILS(store->put_new("x", kBytes), Code::kUnauthenticated, "AWS_SESSION_TOKEN");
  EXPECT_FAILS(store->size("x"), Code::kFailedPrecondition, "whether the credentials have expired");
}

TEST(S3Store, HalfAnAnswerIsNoAnswer) {
  Peer peer({answer(200, "ab", 5), answer(200, "abcde")});
  std::array<std::byte, 8> room{};
  EXPECT_EQ(test::value_of(peer.store()->get("x", room)), 5u);
  EXPECT_EQ(room[4], std::byte{'e'});
}

TEST(S3Store, MoreThanThereIsRoomForIsRefused) {
  Peer peer({answer(200, std::string(9, 'x'))});
  std::array<std::byte, 8> room{};
  EXPECT_FAILS(peer.store()->get("x", room), Code::kCorruption, "larger than 8");
}

TEST(S3Store, APartOfAnObjectIsAskedForAndNothingElseIsTaken) {
  Peer peer({answer(206, "cd"), answer(206, "c"), refusal(416, "InvalidRange"), answer(200, std::string(100'000, 'x')),
             answer(200), answer(206, "cde"), refusal(503, "SlowDown"), answer(206, "cd"), refusal(404, "NoSuchKey")});
  const auto store = peer.store();
  std::array<std::byte, 2> room{};
  EXPECT_SUCCEEDS(store->get_range("x", 2, room));
  EXPECT_EQ(room, (std::array{std::byte{'c'}, std::byte{'d'}}));
  EXPECT_FAILS(store->get_range("x", 2, room), Code::kCorruption, "x of s3://bucket/p ends before byte 4");
  EXPECT_FAILS(store->get_range("x", 2, room), Code::kCorruption, "ends before byte 4");
  EXPECT_FAILS(store->get_range("x", 2, room), Code::kUnsupported, "gives no part of an object");
  EXPECT_FAILS(store->get_range("x", 2, room), Code::kUnsupported, "gives no part of an object");
  EXPECT_FAILS(store->get_range("x", 2, room), Code::kCorruption, "larger than 2");
  EXPECT_SUCCEEDS(store->get_range("x", 2, room));
  EXPECT_FAILS(store->get_range("x", 2, room), Code::kNotFound);
  EXPECT_THAT(peer.heads[0], HasSubstr("range: bytes=2-3"));
  EXPECT_THAT(peer.heads[0], HasSubstr("SignedHeaders=host;range;"));
}

TEST(S3Store, OneThatSaysNothingIsLeft) {
  Peer peer({kStall, kStall});
  EXPECT_FAILS(peer.store({.attempts = 2, .first_pause_seconds = 0.001, .stalled_seconds = 1})->size("x"),
               Code::kUnavailable);
}

TEST(S3Store, WhenTheTimeOfACallIsOverNoAttemptGoesOnOrIsBegun) {
  Peer peer({kStall, kStall});
  double left = 0.2;
  const auto store = peer.store({.attempts = 2, .seconds_left = [&] { return left; }});
  const auto size = store->size("x");
  EXPECT_FAILS(size, Code::kUnavailable, "given up after 2 attempts");
  EXPECT_THAT(size.error().what, HasSubstr("timed out after"));  // not: too slow for 30 s
  left = 0;
  EXPECT_FAILS(store->put_new("x", kBytes), Code::kUnavailable, "no time left for PUT x");
  peer.wait_for_all();
  EXPECT_EQ(peer.asked.size(), 2u);
}

TEST(S3Store, TheUserCanStopIt) {
  Peer peer({kStall});
  std::atomic<int> asked = 0;
  EXPECT_FAILS(peer.store({}, [&] { return ++asked > 2; })->size("x"), Code::kAborted);
}

TEST(S3Store, ListsHavePagesAndForeignKeysAreLeftOut) {
  const auto page = [](const std::string& keys, const std::string& rest) {
    return answer(200, "<?xml version=\"1.0\"?><ListBucketResult>" + keys + rest + "</ListBucketResult>");
  };
  const auto key = [](const std::string& name) { return "<Contents><Key>" + name + "</Key></Contents>"; };
  const std::string more = "<IsTruncated>true</IsTruncated><NextContinuationToken>t=/</NextContinuationToken>";
  Peer peer({page(key("p/c/2") + key("q/c/1") + key("p/c/a&amp;b"), more),
             page(key("p/c/1"), "<IsTruncated>false</IsTruncated>"), answer(200, "<html/>"),
             page("", "<IsTruncated>true</IsTruncated>"), page("", more), page("", more)});
  const auto store = peer.store();
  EXPECT_THAT(test::value_of(store->list("c/")), ElementsAre("c/1", "c/2"));
  EXPECT_THAT(peer.asked[1], HasSubstr("continuation-token=t%3D%2F&list-type=2&prefix=p%2Fc%2F"));
  EXPECT_FAILS(store->list("c/"), Code::kCorruption, "S3");
  EXPECT_FAILS(store->list("c/"), Code::kCorruption, "goes on");
  EXPECT_FAILS(store->list("c/"), Code::kCorruption, "again and again");
}

}  // namespace
}  // namespace torpor::remote
