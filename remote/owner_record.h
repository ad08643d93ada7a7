// SPDX-License-Identifier: Apache-2.0
// Who may go on with what was pushed: records under owner/<number>, each written once; the highest one counts.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace torpor::remote {

struct OwnerRecord {
  uint64_t number = 0;        // of its key
  uint64_t term = 0;          // one more with each owner
  std::string holder;         // 32 hexadecimal digits, of one process
  uint64_t milliseconds = 0;  // the holder owns for so long from when it began to write this
  bool free = false;          // given back: the next one need not wait
  std::string checkpoint;     // its name in the store; empty: none was pushed yet
  std::string answers;        // hash of the answers' index that goes with it; empty: none
  std::string address;        // "http://host:port" at which the holder serves clients; empty: it did not say
  friend auto operator<=>(const OwnerRecord&, const OwnerRecord&) = default;
};

inline constexpr std::string_view kOwnerPrefix = "owner/";
inline constexpr uint64_t kMostOwnerBytes = 4096;

// "http://" or "https://", a host, perhaps a port; nothing else that could send a client elsewhere.
bool is_address(std::string_view text);

std::string owner_key(uint64_t number);  // 16 decimal digits: sorted by name they are sorted by number
std::optional<uint64_t> owner_number(std::string_view key);

std::string encode_owner(const OwnerRecord& record);
// kCorruption: no record, or that of another number. kIncompatible: of another format.
Result<OwnerRecord> decode_owner(std::string_view text, uint64_t number);

}  // namespace torpor::remote
