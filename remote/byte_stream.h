// SPDX-License-Identifier: Apache-2.0
// ByteStream: a connection, over TCP or TLS, whose every call has a deadline. Library: OpenSSL.
//
// Errors: kTimeout: the deadline is over. kUnavailable: refused, reset, ended. kUnauthenticated: a certificate that is
// not trusted. After an error it is of no use any more. Not thread-safe. A name is looked up by the system's resolver,
// which knows no deadline: it has its own.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"

struct ssl_ctx_st;

namespace torpor::remote {

using Deadline = std::chrono::steady_clock::time_point;

class ByteStream {
 public:
  virtual ~ByteStream() = default;
  // At least one byte.
  virtual Result<size_t> read_some(std::span<std::byte> room, Deadline until) = 0;
  // All of them, in their order.
  virtual Status write_all(std::span<const std::span<const std::byte>> pieces, Deadline until) = 0;
};

struct Address {
  std::string host;
  uint16_t port = 0;
  std::string text() const;  // "host:port"
  friend bool operator==(const Address&, const Address&) = default;
};

// Whom TLS trusts. Thread-safe.
class TlsTrust {
 public:
  // `authorities`: a file of certificates; empty: those of the system. kInvalidArgument names the file.
  static Result<std::shared_ptr<const TlsTrust>> of(const std::string& authorities);
  ~TlsTrust();
  TlsTrust(const TlsTrust&) = delete;
  TlsTrust& operator=(const TlsTrust&) = delete;
  ssl_ctx_st* context() const { return context_; }

 private:
  explicit TlsTrust(ssl_ctx_st* context) : context_(context) {}
  ssl_ctx_st* const context_;
};

// `trust`: null: without TLS. It outlives the result.
Result<std::unique_ptr<ByteStream>> connect_to(const Address& address, const TlsTrust* trust, Deadline until);

}  // namespace torpor::remote
