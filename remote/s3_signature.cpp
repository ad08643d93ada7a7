// SPDX-License-Identifier: Apache-2.0
#include "remote/s3_signature.h"

#include <array>
#include <span>

#include <fmt/core.h>
#include <sodium.h>

#include "base/digest.h"

namespace torpor::remote {
namespace {

using Hash = std::array<unsigned char, crypto_auth_hmacsha256_BYTES>;

std::span<const unsigned char> bytes_of(std::string_view text) {
  return {reinterpret_cast<const unsigned char*>(text.data()), text.size()};
}

Hash sha256(std::string_view text) {
  Hash hash;
  crypto_hash_sha256(hash.data(), bytes_of(text).data(), text.size());
  return hash;
}

Hash hmac(std::span<const unsigned char> key, std::string_view text) {
  crypto_auth_hmacsha256_state state;  // takes keys of any length, unlike the one-call function
  crypto_auth_hmacsha256_init(&state, key.data(), key.size());
  crypto_auth_hmacsha256_update(&state, bytes_of(text).data(), text.size());
  Hash hash;
  crypto_auth_hmacsha256_final(&state, hash.data());
  return hash;
}

}  // namespace

std::string percent_encoded(std::string_view text, bool keep_slash) {
  std::string encoded;
  for (const char letter : text) {
    const bool plain = (letter >= 'A' && letter <= 'Z') || (letter >= 'a' && letter <= 'z') ||
                       (letter >= '0' && letter <= '9') || std::string_view("-._~").find(letter) != std::string::npos;
    if (plain || (letter == '/' && keep_slash)) {
      encoded += letter;
    } else {
      encoded += fmt::format("%{:02X}", static_cast<unsigned char>(letter));
    }
  }
  return encoded;
}

std::string encoded_query(const S3Request& request) {
  std::map<std::string, std::string> encoded;  // sorted as it will be signed
  for (const auto& [name, value] : request.query)
    encoded.emplace(percent_encoded(name, false), percent_encoded(value, false));
  std::string query;
  for (const auto& [name, value] : encoded) query += fmt::format("{}{}={}", query.empty() ? "" : "&", name, value);
  return query;
}

std::string utc_moment(std::time_t moment) {
  std::tm utc{};
  ::gmtime_r(&moment, &utc);
  return fmt::format("{:04}{:02}{:02}T{:02}{:02}{:02}Z", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday, utc.tm_hour,
                     utc.tm_min, utc.tm_sec);
}

std::map<std::string, std::string> signed_headers(const S3Request& request, const S3Credentials& credentials,
                                                  std::string_view region, std::time_t now) {
  const std::string moment = utc_moment(now);
  const std::string day = moment.substr(0, moment.find('T'));
  std::map<std::string, std::string> headers = request.headers;
  headers["host"] = request.host;
  headers["x-amz-content-sha256"] = request.payload_sha256;
  headers["x-amz-date"] = moment;
  if (!credentials.session_token.empty()) headers["x-amz-security-token"] = credentials.session_token;

  std::string lines;
  std::string names;
  for (const auto& [name, value] : headers) {
    lines += fmt::format("{}:{}\n", name, value);
    names += fmt::format("{}{}", names.empty() ? "" : ";", name);
  }
  const std::string canonical =
      fmt::format("{}\n{}\n{}\n{}\n{}\n{}", request.method, percent_encoded(request.path, true), encoded_query(request),
                  lines, names, request.payload_sha256);
  const std::string scope = fmt::format("{}/{}/s3/aws4_request", day, region);
  Hash key = hmac(bytes_of("AWS4" + credentials.secret_key), day);
  for (const std::string_view part : {region, std::string_view("s3"), std::string_view("aws4_request")})
    key = hmac(key, part);
  const Hash signature = hmac(key, fmt::format("AWS4-HMAC-SHA256\n{}\n{}\n{}", moment, scope, hex(sha256(canonical))));
  headers["authorization"] = fmt::format("AWS4-HMAC-SHA256 Credential={}/{},SignedHeaders={},Signature={}",
                                         credentials.access_key, scope, names, hex(signature));
  return headers;
}

}  // namespace torpor::remote
