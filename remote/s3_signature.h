// SPDX-License-Identifier: Apache-2.0
// The Authorization header of the S3 protocol: AWS Signature Version 4, as the S3 API reference describes it
// ("Authenticating Requests: Using the Authorization Header"). SHA-256 and HMAC are libsodium's. Values and pure
// functions.
//
// libcurl's own signature (CURLOPT_AWS_SIGV4) is not used: version 7.88, which Debian 12 has, signs queries unsorted
// and keys with '=' or '+' wrongly, and servers refuse them.
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
  std::string host;                              // with the port, unless it is the scheme's default
  std::string path;                              // "/bucket/key", not percent-encoded
  std::map<std::string, std::string> query{};    // not percent-encoded
  std::map<std::string, std::string> headers{};  // by name in lower case; all of them are signed
  // In hexadecimal digits. Parts have a digest of their own, so none is computed for the signature.
  std::string payload_sha256 = "UNSIGNED-PAYLOAD";
};

// Replace each byte that S3 does not allow unencoded by %XX. `keep_slash`: '/' stays.
std::string percent_encoded(std::string_view text, bool keep_slash);
std::string encoded_query(const S3Request& request);  // "a=1&b=2", "" without one

std::string utc_moment(std::time_t moment);  // "20261231T235959Z"

// Return the request's headers and those that sign it: host, x-amz-date, x-amz-content-sha256, authorization and, with
// a session token, x-amz-security-token. They are valid for 15 minutes from `now` on.
std::map<std::string, std::string> signed_headers(const S3Request& request, const S3Credentials& credentials,
                                                  std::string_view region, std::time_t now);

}  // namespace torpor::remote
