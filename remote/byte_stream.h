// SPDX-License-Identifier: Apache-2.0
// ByteStream: a connection over TCP or TLS. Every call has a deadline. Library: OpenSSL.
//
// Threads: not thread-safe. Errors: kTimeout: the deadline is over. kUnavailable: refused, reset, or ended.
// kUnauthenticated: the certificate is not trusted. After an error the connection is unusable. The system's resolver
// looks names up, with its own time limit.
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
  // Read at least one byte into `room`. Return the number of bytes.
  virtual Result<size_t> read_some(std::span<std::byte> room, Deadline until) = 0;
  // Write all pieces in order.
  virtual Status write_all(std::span<const std::span<const std::byte>> pieces, Deadline until) = 0;
};

struct Address {
  std::string host;
  uint16_t port = 0;
  std::string text() const;  // "host:port"
  friend bool operator==(const Address&, const Address&) = default;
};

// The certificate authorities that TLS trusts. Thread-safe.
class TlsTrust {
 public:
  // `authorities`: a file of certificates; empty: the system's. kInvalidArgument names the file.
  static Result<std::shared_ptr<const TlsTrust>> of(const std::string& authorities);
  ~TlsTrust();
  TlsTrust(const TlsTrust&) = delete;
  TlsTrust& operator=(const TlsTrust&) = delete;
  ssl_ctx_st* context() const { return context_; }

 private:
  explicit TlsTrust(ssl_ctx_st* context) : context_(context) {}
  ssl_ctx_st* const context_;
};

// Connect. `trust` outlives the result; null: no TLS.
Result<std::unique_ptr<ByteStream>> connect_to(const Address& address, const TlsTrust* trust, Deadline until);

}  // namespace torpor::remote
