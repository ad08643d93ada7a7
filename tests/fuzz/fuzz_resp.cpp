// SPDX-License-Identifier: Apache-2.0
// What a server of RESP may say, in pieces of any size: replies are read whole or refused, and a frame that is accepted
// encodes to the same bytes.
#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "remote/block_frame.h"
#include "remote/resp_connection.h"

namespace {

using namespace torpor;
using namespace torpor::remote;

class Said final : public ByteStream {
 public:
  Said(std::span<const std::byte> bytes, size_t piece) : rest_(bytes), piece_(piece) {}
  Result<size_t> read_some(std::span<std::byte> room, Deadline) override {
    const size_t some = std::min({room.size(), rest_.size(), piece_});
    if (some == 0) return Error{.code = Code::kUnavailable};
    std::copy_n(rest_.begin(), some, room.begin());
    rest_ = rest_.subspan(some);
    return some;
  }
  Status write_all(std::span<const std::span<const std::byte>>, Deadline) override { return ok(); }

 private:
  std::span<const std::byte> rest_;
  const size_t piece_;
};

// The next reply, with its value; false: there is none.
bool take_one(RespConnection& connection, bool skip) {
  const Result<RespReply> reply = connection.reply({});
  if (!reply) return false;
  if (reply->kind != RespReply::Kind::kValue) return true;
  const auto size = static_cast<uint64_t>(reply->number);
  if (skip || size > (1 << 20)) return connection.skip(size, {}) && connection.end_value({});
  std::vector<std::byte> value(size);
  if (!connection.take(value, {}) || !connection.end_value({})) return false;
  if (value.size() < kFrameBytes) return true;
  const auto head = std::span(value).first<kFrameBytes>();
  if (const Result<BlockFrame> frame = decode_frame(head)) {
    const FrameBytes again = encode_frame(*frame);
    if (!std::equal(again.begin(), again.end(), head.begin())) std::abort();
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  for (const size_t piece : {size_t{1}, size_t{7}, size_t{1} << 20}) {
    for (const bool skip : {false, true}) {
      RespConnection connection(std::make_unique<Said>(bytes, piece));
      while (take_one(connection, skip)) {}
    }
  }
  return 0;
}
