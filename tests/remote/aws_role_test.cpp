// SPDX-License-Identifier: Apache-2.0
// The services that hand out credentials, played by a scripted peer. AWS itself was not asked.
#include "remote/aws_role.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "remote/s3_store.h"
#include "tests/remote/http_peer.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::remote {
namespace {

using test::value_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

using Variables = std::map<std::string, std::string>;
using Role = std::shared_ptr<AwsRole>;

constexpr std::time_t kNoon = 1'795'780'800;  // 2026-11-27T12:00:00Z
constexpr const char* kOne = "2026-11-27T13:00:00Z";
constexpr std::time_t kHour = 3600;

Environment with(Variables variables) {
  return [variables = std::move(variables)](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  };
}

std::string json(const std::string& key, const std::string& ends = kOne) {
  return answer(
      200, fmt::format(R"({{"AccessKeyId":"{}","SecretAccessKey":"hidden","Token":"session","Expiration":"{}"}})", key,
                       ends));
}
std::string xml(const std::string& key, const std::string& ends = kOne) {
  return answer(200,
                fmt::format("<AssumeRoleWithWebIdentityResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\">"
                            "<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{}</AccessKeyId>"
                            "<SecretAccessKey>hidden</SecretAccessKey><SessionToken>session</SessionToken>"
                            "<Expiration>{}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>"
                            "</AssumeRoleWithWebIdentityResponse>",
                            key, ends));
}

class AwsRoleTest : public ::testing::Test {
 protected:
  void write_token(const std::string& text) { std::ofstream(token_file_) << text << '\n'; }
  Role web(const HttpPeer& sts) {
    return value_of(web_identity(with({{"AWS_WEB_IDENTITY_TOKEN_FILE", token_file_},
                                       {"AWS_ROLE_ARN", "arn:aws:iam::1:role/x"},
                                       {"AWS_ENDPOINT_URL_STS", sts.endpoint()}}),
                                 "us-east-1", ""));
  }
  static Role container(const HttpPeer& agent, Variables more = {}) {
    more["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = agent.endpoint() + "/v1/credentials";
    return value_of(container_role(with(std::move(more)), ""));
  }
  static Role instance(const HttpPeer& metadata) {
    return value_of(instance_role(with({{"AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.endpoint()}})));
  }

  test::TemporaryDirectory temporary_;
  const std::string token_file_ = temporary_ / "token";
};

TEST_F(AwsRoleTest, AWebIdentityIsExchangedAtStsAndAgainBeforeItEnds) {
  HttpPeer sts({xml("A"), xml("B", "2026-11-27T14:00:00.5Z")});
  write_token("ey+first");
  const Role role = web(sts);
  const S3Credentials first = value_of(role->credentials(kNoon));
  EXPECT_EQ(first.access_key, "A");
  EXPECT_EQ(first.secret_key, "hidden");
  EXPECT_EQ(first.session_token, "session");
  write_token("ey+second");
  EXPECT_EQ(value_of(role->credentials(kNoon + kHour - 301)).access_key, "A");
  EXPECT_EQ(value_of(role->credentials(kNoon + kHour - 300)).access_key, "B");
  EXPECT_THAT(sts.asked, ElementsAre("POST /", "POST /"));
  EXPECT_EQ(sts.bodies[0],
            "Action=AssumeRoleWithWebIdentity&RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Fx&RoleSessionName=torpor&"
            "Version=2011-06-15&WebIdentityToken=ey%2Bfirst");
  EXPECT_THAT(sts.bodies[1], HasSubstr("ey%2Bsecond"));
}

TEST_F(AwsRoleTest, WhatStsRefusesIsNamedWithoutTheToken) {
  HttpPeer sts({answer(400, "<ErrorResponse><Error><Code>ExpiredTokenException</Code></Error></ErrorResponse>"),
                answer(403, "\x1b[31m")});
  write_token("very-secret");
  const Role role = web(sts);
  const auto refused = role->credentials(kNoon);
  EXPECT_FAILS(refused, Code::kUnauthenticated, "arn:aws:iam::1:role/x: ExpiredTokenException");
  EXPECT_THAT(refused.error().to_string(), Not(HasSubstr("very-secret")));
  EXPECT_FAILS(role->credentials(kNoon), Code::kUnauthenticated, ": 403");
  write_token("two\nlines");
  EXPECT_FAILS(role->credentials(kNoon), Code::kUnauthenticated, token_file_);
  std::filesystem::remove(token_file_);
  EXPECT_FAILS(role->credentials(kNoon), Code::kUnauthenticated, token_file_);
}

TEST_F(AwsRoleTest, AContainersAgentIsAskedWithItsToken) {
  HttpPeer agent({json("A"), json("B"), json("C")});
  write_token("Basic bearer");
  for (const Variables& more : {Variables{{"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", token_file_}},
                                Variables{{"AWS_CONTAINER_AUTHORIZATION_TOKEN", "Basic given"}}, Variables{}})
    EXPECT_EQ(value_of(container(agent, more)->credentials(kNoon)).session_token, "session");
  EXPECT_THAT(agent.asked, ElementsAre("GET /v1/credentials", "GET /v1/credentials", "GET /v1/credentials"));
  EXPECT_THAT(agent.heads[0], HasSubstr("Authorization: Basic bearer"));
  EXPECT_THAT(agent.heads[1], HasSubstr("Authorization: Basic given"));
  EXPECT_THAT(agent.heads[2], Not(HasSubstr("Authorization")));
}

// A token must not go over the network in the clear.
TEST_F(AwsRoleTest, PlainHttpToAnotherMachineIsRefused) {
  for (const char* url :
       {"http://example.com/", "http://169.254.170.3/", "http://127.0.0.1.example.com/", "ftp://localhost/",
        "http://localhost@example.com/", "https://user:word@example.com/", "nonsense"})
    EXPECT_FAILS(container_role(with({{"AWS_CONTAINER_CREDENTIALS_FULL_URI", url}}), ""), Code::kInvalidArgument,
                 "https");
  EXPECT_FAILS(web_identity(with({{"AWS_WEB_IDENTITY_TOKEN_FILE", token_file_},
                                  {"AWS_ROLE_ARN", "arn"},
                                  {"AWS_ENDPOINT_URL", "http://example.com"}}),
                            "us-east-1", ""),
               Code::kInvalidArgument, "STS cannot be asked at http://example.com");
  for (const char* url :
       {"https://example.com/", "http://169.254.170.23/v1/credentials", "http://[fd00:ec2::23]/v1", "http://[::1]:80/"})
    EXPECT_NE(value_of(container_role(with({{"AWS_CONTAINER_CREDENTIALS_FULL_URI", url}}), "")), nullptr) << url;
  EXPECT_NE(value_of(container_role(with({{"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/v2/x"}}), "")), nullptr);
  EXPECT_FAILS(container_role(with({{"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "@example.com/"}}), ""),
               Code::kInvalidArgument, "https");
  EXPECT_EQ(value_of(container_role(with({}), "")), nullptr);
}

TEST_F(AwsRoleTest, TheInstanceMetadataIsAskedInASession) {
  HttpPeer metadata({answer(200, "session-of-6-hours"), answer(200, "of-gpu-nodes\n"), json("A")});
  EXPECT_EQ(value_of(instance(metadata)->credentials(kNoon)).access_key, "A");
  EXPECT_THAT(metadata.asked, ElementsAre("PUT /latest/api/token", "GET /latest/meta-data/iam/security-credentials/",
                                          "GET /latest/meta-data/iam/security-credentials/of-gpu-nodes"));
  EXPECT_THAT(metadata.heads[0], HasSubstr("X-aws-ec2-metadata-token-ttl-seconds: 21600"));
  for (const size_t i : {1, 2})
    EXPECT_THAT(metadata.heads[i], HasSubstr("X-aws-ec2-metadata-token: session-of-6-hours"));
  EXPECT_EQ(value_of(instance_role(with({{"AWS_EC2_METADATA_DISABLED", "True"}}))), nullptr);
}

TEST_F(AwsRoleTest, AMachineWithoutMetadataOrRoleIsToldWhatToDo) {
  std::string nobody;
  {
    const HttpPeer gone({});
    nobody = gone.endpoint();
  }
  const Role role = value_of(instance_role(with({{"AWS_EC2_METADATA_SERVICE_ENDPOINT", nobody}})));
  EXPECT_FAILS(role->credentials(kNoon), Code::kUnavailable, "no credentials in the environment or a file");
  HttpPeer metadata(
      {answer(503), answer(403), answer(200, "session"), answer(404), answer(200, "session"), answer(200, "a/../b")});
  const auto refused = instance(metadata)->credentials(kNoon);  // as other clouds do there
  EXPECT_FAILS(refused, Code::kUnauthenticated, "answers 403");
  EXPECT_THAT(refused.error().what, HasSubstr("no credentials in the environment or a file"));
  EXPECT_THAT(refused.error().next_step, HasSubstr("AWS_SHARED_CREDENTIALS_FILE"));
  EXPECT_FAILS(instance(metadata)->credentials(kNoon), Code::kUnauthenticated, "names no role");
  EXPECT_FAILS(instance(metadata)->credentials(kNoon), Code::kUnauthenticated, "names no role");
}

TEST_F(AwsRoleTest, LastOnesServeUntilTheyEndWhereTheServiceFails) {
  HttpPeer agent({json("A"), answer(500), kReset, answer(503), answer(403), answer(403), answer(429), json("B")});
  const Role role = container(agent);
  const auto at = [&](std::time_t before) { return role->credentials(kNoon + kHour - before); };
  EXPECT_EQ(value_of(at(kHour)).access_key, "A");
  EXPECT_EQ(value_of(at(200)).access_key, "A");  // three attempts
  EXPECT_EQ(value_of(at(141)).access_key, "A");  // none for a minute
  EXPECT_EQ(value_of(at(140)).access_key, "A");
  EXPECT_EQ(value_of(at(81)).access_key, "A");
  EXPECT_FAILS(at(0), Code::kUnauthenticated, "answers 403");
  EXPECT_EQ(value_of(at(0)).access_key, "B");  // the second attempt
  EXPECT_EQ(agent.asked.size(), 8u);
}

// A service that says nothing gets one attempt where there is no time for more.
TEST_F(AwsRoleTest, ACallTakesAboutAsLongAsItMay) {
  HttpPeer agent({json("A"), kStall, kStall, json("B"), json("C")});
  const Role role = container(agent);
  EXPECT_EQ(value_of(role->credentials(kNoon)).access_key, "A");
  EXPECT_EQ(value_of(role->credentials(kNoon + kHour - 200, 0.3)).access_key, "A");
  EXPECT_EQ(agent.count(), 2u);
  EXPECT_FAILS(role->credentials(kNoon + kHour, 0.3), Code::kUnavailable, "does not answer");
  EXPECT_EQ(agent.count(), 3u);
  EXPECT_EQ(value_of(role->credentials(kNoon + kHour)).access_key, "B");
}

// While one thread asks a service that says nothing, another takes what is still valid; without that it waits no longer
// than it may, or gets the same error.
TEST_F(AwsRoleTest, OneThreadAsksForAll) {
  HttpPeer agent({json("A"), kStall, kStall, kStall});
  const Role role = container(agent);
  EXPECT_EQ(value_of(role->credentials(kNoon)).access_key, "A");
  std::thread renews(
      [&] { EXPECT_FAILS(role->credentials(kNoon + kHour, 2.0), Code::kUnavailable, "does not answer"); });
  agent.wait_for(2);
  EXPECT_EQ(value_of(role->credentials(kNoon + kHour - 200)).access_key, "A");
  EXPECT_FAILS(role->credentials(kNoon + kHour, 0), Code::kUnavailable, "another thread still asks");
  EXPECT_FAILS(role->credentials(kNoon + kHour), Code::kUnavailable, "does not answer");
  renews.join();
  EXPECT_EQ(agent.count(), 2u);
}

TEST_F(AwsRoleTest, AnAnswerThatIsNoneIsRefused) {
  const std::string good =
      R"({"AccessKeyId":"A","SecretAccessKey":"s","Token":"t","Expiration":"2026-11-27T13:00:00Z"})";
  std::deque<std::string> answers;
  for (const char* bad :
       {"", "[]", "{", "null", R"({"AccessKeyId":1})",
        R"({"AccessKeyId":"A","SecretAccessKey":"hidden-key","Token":"t"})",
        R"({"AccessKeyId":"A","SecretAccessKey":"s","Token":"t","Expiration":"tomorrow"})",
        R"({"AccessKeyId":"A\r\nx: y","SecretAccessKey":"s","Token":"t","Expiration":"2026-11-27T13:00:00Z"})",
        R"({"AccessKeyId":"A","SecretAccessKey":"s","Token":"","Expiration":"2026-11-27T13:00:00Z"})"})
    answers.push_back(answer(200, bad));
  const size_t count = answers.size();
  HttpPeer agent(answers);
  const Role role = container(agent);
  for (size_t i = 0; i < count; ++i) {
    const auto refused = role->credentials(kNoon);
    EXPECT_FAILS(refused, Code::kUnauthenticated, "answered without a key");
    EXPECT_THAT(refused.error().to_string(), Not(HasSubstr("hidden-key")));
  }
  const std::string large = answer(200, std::string(65 << 10, ' ') + good);
  HttpPeer endless({large, large, large});
  EXPECT_FAILS(container(endless)->credentials(kNoon), Code::kUnavailable, "does not answer");
}

TEST_F(AwsRoleTest, TheStoreSignsWithThem) {
  HttpPeer agent({json("ROLE", "2999-01-01T00:00:00Z")});
  HttpPeer s3({answer(200), answer(200)});
  const auto store = make_s3_store(
      "s3://bucket",
      {.bucket = "bucket", .prefix = "", .endpoint = s3.endpoint(), .region = "us-east-1", .role = container(agent)});
  const std::array<std::byte, 1> byte{};
  EXPECT_TRUE(value_of(store->put_new("x", byte)));
  EXPECT_TRUE(value_of(store->put_new("y", byte)));
  for (const std::string& head : s3.heads) {
    EXPECT_THAT(head, HasSubstr("Credential=ROLE/"));
    EXPECT_THAT(head, HasSubstr("x-amz-security-token: session"));
  }
}

TEST_F(AwsRoleTest, KeysThenWebIdentityThenTheFileThenTheContainerThenTheMachine) {
  const std::string file = temporary_ / ".aws/credentials";
  Variables variables = {{"HOME", temporary_.path()},    {"AWS_ACCESS_KEY_ID", "A"},
                         {"AWS_SECRET_ACCESS_KEY", "S"}, {"AWS_WEB_IDENTITY_TOKEN_FILE", token_file_},
                         {"AWS_ROLE_ARN", "arn"},        {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/x"}};
  const auto found = [&] { return value_of(s3_settings("s3://bucket", with(variables))); };
  const auto kind = [&] {
    const Role role = found().role;
    if (role == nullptr) return std::string();
    const AwsRole& one = *role;
    return std::string(typeid(one).name());
  };
  EXPECT_EQ(kind(), "");
  EXPECT_EQ(found().credentials.access_key, "A");
  variables.erase("AWS_ACCESS_KEY_ID");
  variables.erase("AWS_SECRET_ACCESS_KEY");
  EXPECT_THAT(kind(), HasSubstr("WebIdentity"));
  variables.erase("AWS_ROLE_ARN");
  EXPECT_FAILS(s3_settings("s3://bucket", with(variables)), Code::kInvalidArgument, "AWS_ROLE_ARN is not");
  variables.erase("AWS_WEB_IDENTITY_TOKEN_FILE");
  EXPECT_THAT(kind(), HasSubstr("ContainerRole"));
  std::filesystem::create_directory(temporary_ / ".aws");
  std::ofstream(file) << "[default]\naws_access_key_id = F\naws_secret_access_key = f\n";
  ASSERT_EQ(::chmod(file.c_str(), 0600), 0);
  EXPECT_EQ(found().credentials.access_key, "F");
  std::filesystem::remove(file);
  for (const char* name : {"AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE"}) {  // who names one wants it
    Variables named = variables;
    named[name] = temporary_ / "none";
    EXPECT_FAILS(s3_settings("s3://bucket", with(named)), Code::kInvalidArgument, "there are no credentials");
  }
  variables.erase("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
  EXPECT_THAT(kind(), HasSubstr("InstanceRole"));
  variables["AWS_EC2_METADATA_DISABLED"] = "true";
  EXPECT_FAILS(s3_settings("s3://bucket", with(variables)), Code::kInvalidArgument, "there are no credentials");
}

}  // namespace
}  // namespace torpor::remote
