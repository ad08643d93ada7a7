// SPDX-License-Identifier: Apache-2.0
#include "console/event_text.h"

#include <cstring>
#include <tuple>

#include <fmt/core.h>

#include "base/text.h"

namespace torpor::console {

std::optional<EventText> EventTexts::add(const Event& event) {
  if (event.type != EventType::kText) return std::nullopt;
  const auto kind = static_cast<uint8_t>(event.from & ~kLastPart);
  if (open_.size() > kMostNames) open_.clear();
  Part& part = open_[{kind, event.request, event.transfer}];
  if (event.to == 0) part = {};
  if (event.to != part.next) {  // a part is missing
    open_.erase({kind, event.request, event.transfer});
    return std::nullopt;
  }
  char bytes[32];
  std::memcpy(bytes, event.key.bytes.data(), 16);
  std::memcpy(bytes + 16, &event.a, 8);
  std::memcpy(bytes + 24, &event.b, 8);
  for (const char c : bytes) {
    if (c == '\0') break;
    part.words += c;
  }
  ++part.next;
  if ((event.from & kLastPart) == 0) return std::nullopt;
  // Inputs are JSON, which is read again.
  EventText text{static_cast<TextKind>(kind), event.request, event.transfer,
                 static_cast<TextKind>(kind) == TextKind::kInput ? harmless_json(part.words) : harmless(part.words)};
  open_.erase({kind, event.request, event.transfer});
  if (text.kind == TextKind::kRequestName) {
    if (names_.size() > kMostNames) names_.clear();
    names_[text.request] = text.words;
  }
  if (text.kind == TextKind::kTag) {
    if (tags_.size() > kMostNames) tags_.clear();
    tags_[text.request] = text.words;
  }
  return text;
}

std::string EventTexts::tag(uint32_t number) const {
  const auto found = tags_.find(number);
  return found == tags_.end() ? fmt::format("#{}", number) : found->second;
}

std::string EventTexts::request(uint32_t number) const {
  const auto found = names_.find(number);
  return found == names_.end() ? fmt::format("#{}", number) : found->second;
}

}  // namespace torpor::console
