// SPDX-License-Identifier: Apache-2.0
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
struct Field;
using Bytes = std::vector<uint8_t>;
using IntArray = std::vector<int64_t>;
using RealArray = std::vector<double>;
using List = std::vector<Value>;
using Dict = std::vector<Field>;  // in the order in which it was filled; keys differ

struct Value {
  // The order is part of the checkpoint format (checkpoint/FORMAT.md).
  using Alternatives =
      std::variant<std::monostate, bool, int64_t, double, std::string, Bytes, IntArray, RealArray, List, Dict>;
  // Its copies are made aside: when a copy of these throws, libstdc++ (seen in GCC 12) destroys what was never made.
  struct Data : Alternatives {
    using Alternatives::Alternatives;
    using Alternatives::operator=;
    Data() = default;
    Data(const Data& other);
    Data(Data&&) noexcept = default;
    Data& operator=(const Data& other);
    Data& operator=(Data&&) noexcept = default;
  };
  Data data;

  const Value* find(std::string_view key) const;  // the entry of a Dict, or nullptr
  friend bool operator==(const Value& a, const Value& b);
};

struct Field {
  std::string first;
  Value second;
  friend bool operator==(const Field& a, const Field& b) { return a.first == b.first && a.second == b.second; }
};

inline Value::Data::Data(const Data& other)
    : Alternatives(std::visit(
          [](const auto& held) { return Alternatives(std::in_place_type<std::remove_cvref_t<decltype(held)>>, held); },
          static_cast<const Alternatives&>(other))) {}

inline Value::Data& Value::Data::operator=(const Data& other) { return *this = Data(other); }

// Not defaulted inside: there Value is not yet complete, and some compilers look into its lists.
inline bool operator==(const Value& a, const Value& b) { return a.data == b.data; }

inline const Value* Value::find(std::string_view key) const {
  if (const auto* dict = std::get_if<Dict>(&data)) {
    for (const auto& [name, value] : *dict) {
      if (name == key) return &value;
    }
  }
  return nullptr;
}

}  // namespace torpor
