// SPDX-License-Identifier: Apache-2.0
// RespConnection: requests and replies of RESP, the protocol of Redis and Valkey, over a ByteStream. Values are sent
// from and read into the caller's memory; only the last few KiB that were read ahead are copied.
//
// Requests are queued, sent together, and answered in order. After an error of flush(), reply() or take() the
// connection is unusable: the next bytes could answer another request. A refusal of the server is a reply of kind
// kError, after which the connection is still good. Not thread-safe.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "remote/byte_stream.h"

namespace torpor::remote {

struct RespReply {
  enum class Kind : uint8_t { kText, kError, kNumber, kValue, kNothing, kList };
  Kind kind = Kind::kNothing;
  std::string text;    // kText, kError: the server's text
  int64_t number = 0;  // kNumber; kValue: number of bytes that follow; kList: number of replies that follow
};

class RespConnection {
 public:
  static constexpr int64_t kMostValueBytes = 512 << 20;  // the protocol's limit
  static constexpr int64_t kMostListed = 1 << 20;

  explicit RespConnection(std::unique_ptr<ByteStream> stream) : stream_(std::move(stream)) {}

  void queue(std::span<const std::string_view> words);
  void queue(std::initializer_list<std::string_view> words) { queue(std::span(words.begin(), words.size())); }
  // Queue "SET key value NX" with a value of two parts. Their memory stays valid until flush() returns.
  void queue_set_new(std::string_view key, std::span<const std::byte> head, std::span<const std::byte> body);
  Status flush(Deadline until);

  // Read the next reply. kCorruption: it is not a reply.
  Result<RespReply> reply(Deadline until);
  // After a reply of kind kValue: read the next bytes of the value into `room`, and fill it. Read all bytes, then call
  // end_value().
  Status take(std::span<std::byte> room, Deadline until);
  Status skip(uint64_t bytes, Deadline until);
  Status end_value(Deadline until);

 private:
  struct Piece {
    std::span<const std::byte> outside;  // the caller's memory, or
    size_t length = 0;                   // the next `length` bytes of text_
  };
  void add_text(std::string_view text);
  void add_outside(std::span<const std::byte> bytes);
  Status fill(Deadline until);
  Result<std::string_view> line(Deadline until);

  const std::unique_ptr<ByteStream> stream_;
  std::string text_;
  std::vector<Piece> pieces_;
  std::vector<std::span<const std::byte>> sent_;
  std::array<std::byte, 16 << 10> read_;  // not used yet: [begin_, end_)
  size_t begin_ = 0;
  size_t end_ = 0;
  std::string line_;
};

// Return which of a cluster's 16,384 slots has the key. Precondition: the key has no braces.
uint16_t cluster_slot(std::string_view key);

}  // namespace torpor::remote
