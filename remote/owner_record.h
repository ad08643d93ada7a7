// SPDX-License-Identifier: Apache-2.0
// OwnerRecord: which server owns what was pushed, and may wake from it. Records lie under owner/<number>, each written
// once; the highest number is valid. Values.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace torpor::remote {

struct OwnerRecord {
  uint64_t number = 0;        // as in its key
  uint64_t term = 0;          // one more with each owner
  std::string holder;         // 32 hexadecimal digits, random for each process
  uint64_t milliseconds = 0;  // length of the term, from when the holder began to write this record
  bool free = false;          // released: the next owner need not wait
  std::string checkpoint;     // name in the store; empty: none was pushed yet
  std::string answers;        // hash of the index of its response log; empty: none
  std::string address;        // "http://host:port" at which the holder serves clients; empty: unknown
  friend auto operator<=>(const OwnerRecord&, const OwnerRecord&) = default;
};

inline constexpr std::string_view kOwnerPrefix = "owner/";
inline constexpr uint64_t kMostOwnerBytes = 4096;

// Return whether `text` is "http://" or "https://", a host, and perhaps a port, without anything that could send a
// client elsewhere.
bool is_address(std::string_view text);

std::string owner_key(uint64_t number);  // 16 decimal digits, so names sort by number
std::optional<uint64_t> owner_number(std::string_view key);

std::string encode_owner(const OwnerRecord& record);
// Decode the record of this number. kCorruption: it is not a record, or has another number. kIncompatible: it has
// another format.
Result<OwnerRecord> decode_owner(std::string_view text, uint64_t number);

}  // namespace torpor::remote
