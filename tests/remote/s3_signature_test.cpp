// SPDX-License-Identifier: Apache-2.0
// The examples of the S3 API reference, "Signature Calculations for the Authorization Header".
#include "remote/s3_signature.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace torpor::remote {
namespace {

using ::testing::HasSubstr;

constexpr const char* kEmpty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
constexpr std::time_t kThen = 1369353600;  // 2013-05-24T00:00:00Z
const S3Credentials kCredentials{"AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", ""};

std::string signature_of(S3Request request) {
  request.host = "examplebucket.s3.amazonaws.com";
  return signed_headers(request, kCredentials, "us-east-1", kThen).at("authorization");
}

TEST(S3Signature, GetOfARange) {
  EXPECT_THAT(
      signature_of(
          {.method = "GET", .path = "/test.txt", .headers = {{"range", "bytes=0-9"}}, .payload_sha256 = kEmpty}),
      HasSubstr("SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,"
                "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"));
}

TEST(S3Signature, PutWithAKeyThatIsEncoded) {
  EXPECT_THAT(signature_of({.method = "PUT",
                            .path = "/test$file.text",
                            .headers = {{"date", "Fri, 24 May 2013 00:00:00 GMT"},
                                        {"x-amz-storage-class", "REDUCED_REDUNDANCY"}},
                            .payload_sha256 = "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072"}),
              HasSubstr("Signature=98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"));
}

TEST(S3Signature, QueriesAreSortedAndHaveAValue) {
  EXPECT_THAT(signature_of({.method = "GET", .path = "/", .query = {{"lifecycle", ""}}, .payload_sha256 = kEmpty}),
              HasSubstr("Signature=fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"));
  const S3Request list{
      .method = "GET", .path = "/", .query = {{"prefix", "J"}, {"max-keys", "2"}}, .payload_sha256 = kEmpty};
  EXPECT_EQ(encoded_query(list), "max-keys=2&prefix=J");
  EXPECT_THAT(signature_of(list),
              HasSubstr("Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"));
}

TEST(S3Signature, ASessionTokenIsSigned) {
  S3Credentials credentials = kCredentials;
  credentials.session_token = "token";
  const auto headers = signed_headers({.method = "GET", .host = "h", .path = "/"}, credentials, "us-east-1", kThen);
  EXPECT_EQ(headers.at("x-amz-security-token"), "token");
  EXPECT_THAT(headers.at("authorization"), HasSubstr("x-amz-security-token,Signature="));
}

TEST(S3Signature, WhatIsNotPlainIsEncodedByteByByte) {
  EXPECT_EQ(percent_encoded("a/b+c=\xc3\xa4~", true), "a/b%2Bc%3D%C3%A4~");
  EXPECT_EQ(percent_encoded("a/b", false), "a%2Fb");
}

}  // namespace
}  // namespace torpor::remote
