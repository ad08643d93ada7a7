// SPDX-License-Identifier: Apache-2.0
// Words in events: parts of 32 bytes that are put together again; the names of requests and of memory's tags.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "base/event.h"

namespace torpor::console {

struct EventText {
  TextKind kind = TextKind::kRequestName;
  uint32_t request = 0;
  uint64_t transfer = 0;
  std::string words;
};

// Of one source. Control characters come out as "?": the words may have been written to change a terminal.
class EventTexts {
 public:
  // The text that is whole with this event, if there is one.
  std::optional<EventText> add(const Event& event);
  // "#7" where no name is known.
  std::string request(uint32_t number) const;
  const std::map<uint32_t, std::string>& requests() const { return names_; }
  std::string tag(uint32_t number) const;  // as it was told last; "#7"

 private:
  struct Part {
    std::string words;
    int next = 0;
  };
  static constexpr size_t kMostNames = 1 << 16;
  std::map<std::tuple<uint8_t, uint32_t, uint64_t>, Part> open_;
  std::map<uint32_t, std::string> names_;
  std::map<uint32_t, std::string> tags_;
};

}  // namespace torpor::console
