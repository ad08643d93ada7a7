// SPDX-License-Identifier: Apache-2.0
// What the fields of each type of event mean, in words: for people, for JSON, and to know which events make sense.
#pragma once

#include <array>
#include <span>
#include <string_view>

#include "base/event.h"

namespace torpor::console {

// Names of the values of `from` and `to`, of a number that stands for something, and of the fields. Empty: it has no
// meaning in this type. A field with two names holds two numbers (both()).
struct EventSchema {
  std::string_view name;
  std::span<const std::string_view> from;
  std::span<const std::string_view> to;
  std::string_view transfer;
  std::string_view key;
  std::array<std::string_view, 2> a;
  std::array<std::string_view, 2> b;
};

// Null for a type that this version does not know.
const EventSchema* schema_of(EventType type);
// A type that is known, with values of `from` and `to` that have a name.
bool is_known(const Event& event);
bool names_a_request(const Event& event);        // of a copy `request` is the lane, of memory the tag
std::string_view from_name(const Event& event);  // "" where it has none
std::string_view to_name(const Event& event);

}  // namespace torpor::console
