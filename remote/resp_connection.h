// SPDX-License-Identifier: Apache-2.0
// RespConnection: requests and replies of RESP, the protocol of Redis and Valkey, over a ByteStream. Values go out of
// the caller's memory and come into it: nothing is copied on the way but the last few KiB that were read ahead.
//
// Requests are queued, sent together, and answered in their order. After an error of flush(), reply() or take() the
// connection is of no use: what comes next could be the answer to something else. What the server itself refuses is a
// reply of the kind kError, and changes nothing about the connection. Not thread-safe.
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
  std::string text;    // kText, kError: the server's words
  int64_t number = 0;  // kNumber; kValue: how many bytes follow; kList: how many replies
};

class RespConnection {
 public:
  static constexpr int64_t kMostValueBytes = 512 << 20;  // the protocol's own limit
  static constexpr int64_t kMostListed = 1 << 20;

  explicit RespConnection(std::unique_ptr<ByteStream> stream) : stream_(std::move(stream)) {}

  void queue(std::span<const std::string_view> words);
  void queue(std::initializer_list<std::string_view> words) { queue(std::span(words.begin(), words.size())); }
  // SET key value NX, of a value in two parts. Theirs is the caller's memory, until flush() has returned.
  void queue_set_new(std::string_view key, std::span<const std::byte> head, std::span<const std::byte> body);
  Status flush(Deadline until);

  // The next reply. kCorruption: it is none.
  Result<RespReply> reply(Deadline until);
  // Behind a reply of the kind kValue: as many of its bytes as `room` has. All are to be taken, then end_value().
  Status take(std::span<std::byte> room, Deadline until);
  Status skip(uint64_t bytes, Deadline until);
  Status end_value(Deadline until);

 private:
  struct Piece {
    std::span<const std::byte> outside;  // or
    size_t length = 0;                   // the next so many of text_
  };
  void add_text(std::string_view text);
  void add_outside(std::span<const std::byte> bytes);
  Status fill(Deadline until);
  Result<std::string_view> line(Deadline until);

  const std::unique_ptr<ByteStream> stream_;
  std::string text_;
  std::vector<Piece> pieces_;
  std::vector<std::span<const std::byte>> sent_;
  std::array<std::byte, 16 << 10> read_;  // of them not taken yet: [begin_, end_)
  size_t begin_ = 0;
  size_t end_ = 0;
  std::string line_;
};

// Which of a cluster's 16,384 slots has a key; one without braces.
uint16_t cluster_slot(std::string_view key);

}  // namespace torpor::remote
