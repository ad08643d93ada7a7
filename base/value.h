// Value: a plain tree of data, for what an engine's adapter keeps that torpor does not interpret.
//
// Copyable, comparable, no pointers, no cycles. Depth is limited to kMaxValueDepth wherever a Value comes from outside.
// The whole numbers and reals of long lists are held packed (IntArray, RealArray), as engines have many token ids.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace torpor {

inline constexpr int kMaxValueDepth = 32;

struct Value;
using Bytes = std::vector<uint8_t>;
using IntArray = std::vector<int64_t>;
using RealArray = std::vector<double>;
using List = std::vector<Value>;
using Dict = std::vector<std::pair<std::string, Value>>;  // in the order in which it was filled; keys differ

struct Value {
  // The order is part of the checkpoint format (checkpoint/FORMAT.md).
  using Data = std::variant<std::monostate, bool, int64_t, double, std::string, Bytes, IntArray, RealArray, List, Dict>;
  Data data;

  const Value* find(std::string_view key) const;  // the entry of a Dict, or nullptr
  friend bool operator==(const Value&, const Value&) = default;
};

inline const Value* Value::find(std::string_view key) const {
  if (const auto* dict = std::get_if<Dict>(&data)) {
    for (const auto& [name, value] : *dict) {
      if (name == key) return &value;
    }
  }
  return nullptr;
}

}  // namespace torpor
