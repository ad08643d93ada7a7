// SPDX-License-Identifier: Apache-2.0
// Texts in events: joins their parts of 32 bytes again, and keeps the names of requests and of memory tags.
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

// Texts of one source, harmless (base/text.h): one may have been written to change a terminal.
class EventTexts {
 public:
  // Add an event. Return the text that it completes, if any.
  std::optional<EventText> add(const Event& event);
  // Return the name of a request; "#7" if it is unknown.
  std::string request(uint32_t number) const;
  const std::map<uint32_t, std::string>& requests() const { return names_; }
  std::string tag(uint32_t number) const;  // the last recorded name; "#7" if it is unknown

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
