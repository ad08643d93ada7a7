// SPDX-License-Identifier: Apache-2.0
// Value: a plain tree of data, for state that an engine's adapter saves and torpor does not interpret.
//
// It is copyable and comparable, without pointers or cycles. Wherever a Value comes from outside, its depth is limited
// to kMaxValueDepth. Long lists of whole numbers or reals are packed (IntArray, RealArray), because engines have many
// token ids.
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
using Dict = std::vector<Field>;  // in order of insertion; keys differ

struct Value {
  // The order is part of the checkpoint format (checkpoint/FORMAT.md).
  using Alternatives =
      std::variant<std::monostate, bool, int64_t, double, std::string, Bytes, IntArray, RealArray, List, Dict>;
  // Data has its own copy operations: if a variant's copy throws, libstdc++ (seen in GCC 12) destroys an alternative
  // that was never constructed.
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

  const Value* find(std::string_view key) const;  // returns the entry of a Dict, or nullptr
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

// Not defaulted in the class: there Value is incomplete, and some compilers look into its lists.
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
