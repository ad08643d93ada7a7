// SPDX-License-Identifier: Apache-2.0
#include "remote/s3_settings.h"

#include <sys/stat.h>

#include <fstream>
#include <map>

#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::remote {
namespace {

using Variables = std::map<std::string, std::string>;
const Variables kKeys = {{"AWS_ACCESS_KEY_ID", "A"}, {"AWS_SECRET_ACCESS_KEY", "very-secret"}};

Result<S3Settings> settings(const std::string& url, Variables variables) {
  return s3_settings(url, [variables = std::move(variables)](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}
Variables with(Variables variables, const Variables& more) {
  variables.insert(more.begin(), more.end());
  return variables;
}

TEST(S3Settings, AwsIsAskedUnderTheBucketsOwnHost) {
  const S3Settings found = test::value_of(settings("s3://models/a/b", with(kKeys, {{"AWS_REGION", "eu-central-1"}})));
  EXPECT_EQ(found.endpoint, "https://models.s3.eu-central-1.amazonaws.com");
  EXPECT_TRUE(found.bucket_in_host);
  EXPECT_EQ(found.prefix, "a/b/");
  EXPECT_EQ(found.credentials.secret_key, "very-secret");
}

TEST(S3Settings, AnotherServerIsAskedByPath) {
  const S3Settings found =
      test::value_of(settings("s3://models", with(kKeys, {{"AWS_ENDPOINT_URL", "http://127.0.0.1:8333/"}})));
  EXPECT_EQ(found.endpoint, "http://127.0.0.1:8333");
  EXPECT_FALSE(found.bucket_in_host);
  EXPECT_EQ(found.prefix, "");
}

TEST(S3Settings, WhatIsWrongIsNamedAndSecretsAreNot) {
  for (const char* url : {"s3://", "s3:///x", "s3://a b", "s3://bucket/../x", "s3://bucket//x", "http://bucket"})
    EXPECT_FAILS(settings(url, kKeys), Code::kInvalidArgument, "s3://BUCKET");
  for (const char* endpoint : {"127.0.0.1:8333", "ftp://host", "http://user:word@host", "http://host/path"})
    EXPECT_FAILS(settings("s3://b", with(kKeys, {{"AWS_ENDPOINT_URL", endpoint}})), Code::kInvalidArgument,
                 "AWS_ENDPOINT_URL");
  const auto half = settings("s3://b", {{"AWS_SECRET_ACCESS_KEY", "very-secret"}});
  EXPECT_FAILS(half, Code::kInvalidArgument, "AWS_ACCESS_KEY_ID is not");
  EXPECT_EQ(half.error().to_string().find("very-secret"), std::string::npos);
}

TEST(S3Settings, TheCredentialsFileIsReadBySection) {
  const test::TemporaryDirectory directory;
  const std::string path = directory / "credentials";
  std::ofstream(path) << "[default]\naws_access_key_id = D\naws_secret_access_key=d\n\n"
                         "[other]\n# a comment = x\naws_access_key_id=O\naws_secret_access_key = o=/+\n"
                         "aws_session_token = t\n[empty]\n";
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  const Variables file = {{"AWS_SHARED_CREDENTIALS_FILE", path}};
  EXPECT_EQ(test::value_of(settings("s3://b", file)).credentials.access_key, "D");
  const S3Credentials other = test::value_of(settings("s3://b", with(file, {{"AWS_PROFILE", "other"}}))).credentials;
  EXPECT_EQ(other.access_key, "O");
  EXPECT_EQ(other.secret_key, "o=/+");
  EXPECT_EQ(other.session_token, "t");
  EXPECT_FAILS(settings("s3://b", with(file, {{"AWS_PROFILE", "empty"}})), Code::kInvalidArgument, "[empty]");
  ASSERT_EQ(::chmod(path.c_str(), 0640), 0);
  EXPECT_FAILS(settings("s3://b", file), Code::kInvalidArgument, "chmod 600");
  EXPECT_FAILS(settings("s3://b", {{"AWS_SHARED_CREDENTIALS_FILE", directory / "none"}}), Code::kInvalidArgument,
               "there are no credentials");
}

}  // namespace
}  // namespace torpor::remote
