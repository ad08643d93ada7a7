// SPDX-License-Identifier: Apache-2.0
#include "remote/resp_connection.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include <fmt/core.h>

#include "base/text.h"

namespace torpor::remote {
namespace {

constexpr size_t kMostLineBytes = 4096;
constexpr std::string_view kEnd = "\r\n";

Error none(std::string_view what) {
  return {.code = Code::kCorruption,
          .what = fmt::format("the server's answer is no RESP: {}", what),
          .next_step = "check that the address is that of a Redis or Valkey server, and whether it wants TLS"};
}

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

}  // namespace

uint16_t cluster_slot(std::string_view key) {  // CRC-16/XMODEM
  uint16_t crc = 0;
  for (const char each : key) {
    crc = static_cast<uint16_t>(crc ^ static_cast<uint16_t>(static_cast<uint8_t>(each)) << 8);
    for (int bit = 0; bit < 8; ++bit) crc = static_cast<uint16_t>((crc & 0x8000) != 0 ? crc << 1 ^ 0x1021 : crc << 1);
  }
  return crc % 16384;
}

// ---- requests

void RespConnection::add_text(std::string_view text) {
  text_ += text;
  if (pieces_.empty() || !pieces_.back().outside.empty()) pieces_.push_back({});
  pieces_.back().length += text.size();
}

void RespConnection::add_outside(std::span<const std::byte> bytes) {
  if (!bytes.empty()) pieces_.push_back({.outside = bytes});
}

void RespConnection::queue(std::span<const std::string_view> words) {
  add_text(fmt::format("*{}\r\n", words.size()));
  for (const std::string_view word : words) add_text(fmt::format("${}\r\n{}\r\n", word.size(), word));
}

void RespConnection::queue_set_new(std::string_view key, std::span<const std::byte> head,
                                   std::span<const std::byte> body) {
  add_text(fmt::format("*4\r\n$3\r\nSET\r\n${}\r\n{}\r\n${}\r\n", key.size(), key, head.size() + body.size()));
  add_outside(head);
  add_outside(body);
  add_text("\r\n$2\r\nNX\r\n");
}

Status RespConnection::flush(Deadline until) {
  if (pieces_.empty()) return ok();
  sent_.clear();
  size_t at = 0;
  for (const Piece& piece : pieces_) {
    sent_.push_back(piece.outside.empty() ? bytes_of(std::string_view(text_).substr(at, piece.length)) : piece.outside);
    at += piece.length;
  }
  const Status sent = stream_->write_all(sent_, until);
  text_.clear();
  pieces_.clear();
  return sent;
}

// ---- replies

Status RespConnection::fill(Deadline until) {
  begin_ = end_ = 0;
  TORPOR_ASSIGN_OR_RETURN(end_, stream_->read_some(read_, until));
  return ok();
}

Result<std::string_view> RespConnection::line(Deadline until) {
  line_.clear();
  while (!line_.ends_with(kEnd)) {
    if (begin_ == end_) TORPOR_RETURN_IF_ERROR(fill(until));
    const auto first = read_.begin() + static_cast<std::ptrdiff_t>(begin_);
    const auto last = read_.begin() + static_cast<std::ptrdiff_t>(end_);
    const auto newline = std::find(first, last, std::byte{'\n'});
    const auto some = static_cast<size_t>(newline - first) + (newline == last ? 0 : 1);
    if (line_.size() + some > kMostLineBytes) return none("a line does not end");
    line_.append(reinterpret_cast<const char*>(read_.data()) + begin_, some);
    begin_ += some;
    if (newline != last && !line_.ends_with(kEnd)) return none("a line ends wrongly");
  }
  return std::string_view(line_).substr(0, line_.size() - kEnd.size());
}

Result<RespReply> RespConnection::reply(Deadline until) {
  TORPOR_ASSIGN_OR_RETURN(const std::string_view said, line(until));
  if (said.empty()) return none("an empty line");
  const std::string_view rest = said.substr(1);
  if (said[0] == '+') return RespReply{.kind = RespReply::Kind::kText, .text = std::string(rest)};
  if (said[0] == '-') return RespReply{.kind = RespReply::Kind::kError, .text = harmless(rest)};
  int64_t number = 0;
  const auto [end, wrong] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
  if (wrong != std::errc() || end != rest.data() + rest.size()) return none("a number is none");
  if (said[0] == ':') return RespReply{.kind = RespReply::Kind::kNumber, .number = number};
  const bool value = said[0] == '$';
  if (!value && said[0] != '*') return none("of an unknown kind");
  if (number == -1) return RespReply{};
  if (number < 0 || number > (value ? kMostValueBytes : kMostListed)) return none("a length is none");
  return RespReply{.kind = value ? RespReply::Kind::kValue : RespReply::Kind::kList, .number = number};
}

Status RespConnection::take(std::span<std::byte> room, Deadline until) {
  const size_t ahead = std::min(room.size(), end_ - begin_);
  std::copy_n(read_.begin() + static_cast<std::ptrdiff_t>(begin_), ahead, room.begin());
  begin_ += ahead;
  room = room.subspan(ahead);
  while (room.size() >= read_.size()) {
    TORPOR_ASSIGN_OR_RETURN(const size_t some, stream_->read_some(room, until));
    room = room.subspan(some);
  }
  while (!room.empty()) {
    if (begin_ == end_) TORPOR_RETURN_IF_ERROR(fill(until));
    const size_t some = std::min(room.size(), end_ - begin_);
    std::copy_n(read_.begin() + static_cast<std::ptrdiff_t>(begin_), some, room.begin());
    begin_ += some;
    room = room.subspan(some);
  }
  return ok();
}

Status RespConnection::skip(uint64_t bytes, Deadline until) {
  while (bytes > 0) {
    if (begin_ == end_) TORPOR_RETURN_IF_ERROR(fill(until));
    const size_t some = std::min<uint64_t>(bytes, end_ - begin_);
    begin_ += some;
    bytes -= some;
  }
  return ok();
}

Status RespConnection::end_value(Deadline until) {
  std::array<std::byte, 2> end{};
  TORPOR_RETURN_IF_ERROR(take(end, until));
  if (end[0] != std::byte{'\r'} || end[1] != std::byte{'\n'}) return none("a value is longer than was said");
  return ok();
}

}  // namespace torpor::remote
