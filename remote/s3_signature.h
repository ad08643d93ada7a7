// SPDX-License-Identifier: Apache-2.0
// The Authorization header of the S3 protocol: AWS Signature Version 4, as the S3 API reference describes it
// ("Authenticating Requests: Using the Authorization Header"). SHA-256 and HMAC are libsodium's.
//
// Not libcurl's own (CURLOPT_AWS_SIGV4): that of 7.88, which Debian 12 has, signs queries unsorted and keys with '=' or
// '+' wrongly, and servers refuse them.
#pragma once

#include <ctime>
#include <map>
#include <string>
#include <string_view>

namespace torpor::remote {

struct S3Credentials {
  std::string access_key;
  std::string secret_key;
  std::string session_token;  // empty: none
};

struct S3Request {
  std::string method;                            // "GET"
  std::string host;                              // with its port, if that is not the scheme's own
  std::string path;                              // "/bucket/key", not encoded
  std::map<std::string, std::string> query{};    // not encoded
  std::map<std::string, std::string> headers{};  // by name in lower case; all of them are signed
  // In hexadecimal digits. Parts carry a digest of their own, so that no second one is taken for the signature.
  std::string payload_sha256 = "UNSIGNED-PAYLOAD";
};

// All that S3 lets stand as it is stays; of the rest each byte becomes %XX. '/' stays with `keep_slash`.
std::string percent_encoded(std::string_view text, bool keep_slash);
std::string encoded_query(const S3Request& request);  // "a=1&b=2", "" without one

std::string utc_moment(std::time_t moment);  // "20261231T235959Z"

// The request's headers, and those that sign it: host, x-amz-date, x-amz-content-sha256, authorization and, with a
// session, x-amz-security-token. They are right for 15 minutes from `now` on.
std::map<std::string, std::string> signed_headers(const S3Request& request, const S3Credentials& credentials,
                                                  std::string_view region, std::time_t now);

}  // namespace torpor::remote
