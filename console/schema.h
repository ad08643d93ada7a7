// SPDX-License-Identifier: Apache-2.0
// The meaning of the fields of each type of event, in words: for people, for JSON, and to find events that make no
// sense.
#pragma once

#include <array>
#include <span>
#include <string_view>

#include "base/event.h"

namespace torpor::console {

// Names of the values of `from` and `to`, of `transfer` and `key`, and of the fields `a` and `b`. Empty: no meaning in
// this type. A field with two names holds two numbers (both()).
struct EventSchema {
  std::string_view name;
  std::span<const std::string_view> from;
  std::span<const std::string_view> to;
  std::string_view transfer;
  std::string_view key;
  std::array<std::string_view, 2> a;
  std::array<std::string_view, 2> b;
};

// Return the schema; null: this version does not know the type.
const EventSchema* schema_of(EventType type);
// Return whether the type is known and the values of `from` and `to` have names.
bool is_known(const Event& event);
bool names_a_request(const Event& event);        // false for a copy (`request` is the lane) and for memory (the tag)
std::string_view from_name(const Event& event);  // "": it has no name
std::string_view to_name(const Event& event);

}  // namespace torpor::console
