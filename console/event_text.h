// Words in events: parts of 32 bytes that are put together again, and the names of requests.
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

 private:
  struct Part {
    std::string words;
    int next = 0;
  };
  static constexpr size_t kMostNames = 1 << 16;
  std::map<std::tuple<uint8_t, uint32_t, uint64_t>, Part> open_;
  std::map<uint32_t, std::string> names_;
};

}  // namespace torpor::console
