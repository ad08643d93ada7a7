// SPDX-License-Identifier: Apache-2.0
// The only way from values to bytes and back: Cereal, through archives of torpor's own.
//
// Bytes are hostile until decoded. A length is checked against the remaining bytes before anything is allocated for it.
// Lists grow as their elements arrive, within kMemoryPerByte. A bool is 0 or 1; enums and variants are checked against
// their range, trees against kMaxValueDepth. Bytes left over are an error. Cereal's pointers and polymorphic types are
// not used: with them a file could choose types and addresses.
//
// Layout: little-endian, fixed widths, no padding; a length is 8 bytes; see checkpoint/FORMAT.md.
#pragma once

#include <bit>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>

#include <fmt/core.h>
#include <cereal/cereal.hpp>

#include "base/status.h"
#include "base/value.h"

namespace torpor {

static_assert(std::endian::native == std::endian::little, "the format is the memory of a little-endian machine");

// Most bytes of memory that decoding may take per byte of input: an element of a list may be one byte of input and a
// whole Value in memory.
inline constexpr uint64_t kMemoryPerByte = 64;

// Appends to a buffer. Without a buffer it only counts, so that the buffer can be reserved at its full size.
class BoundedOutput : public cereal::OutputArchive<BoundedOutput, cereal::AllowEmptyClassElision> {
 public:
  BoundedOutput() : OutputArchive(this) {}
  explicit BoundedOutput(Bytes& out) : OutputArchive(this), out_(&out) {}
  void raw(const void* data, size_t size) {
    bytes_ += size;
    if (out_ == nullptr) return;
    const auto* bytes = static_cast<const uint8_t*>(data);
    out_->insert(out_->end(), bytes, bytes + size);
  }
  uint64_t bytes() const { return bytes_; }

 private:
  Bytes* out_ = nullptr;
  uint64_t bytes_ = 0;
};

class BoundedInput : public cereal::InputArchive<BoundedInput, cereal::AllowEmptyClassElision> {
 public:
  explicit BoundedInput(std::span<const std::byte> in)
      : InputArchive(this), in_(in), budget_((in.size() + 1) * kMemoryPerByte) {}
  uint64_t left() const { return in_.size(); }
  void raw(void* data, uint64_t size) {
    if (size > left()) throw cereal::Exception(fmt::format("{} bytes wanted, {} are left", size, left()));
    if (size > 0) std::memcpy(data, in_.data(), size);
    in_ = in_.subspan(size);
  }
  // Return the next `size` bytes in place.
  std::span<const std::byte> take(uint64_t size) {
    expect(size, 1);
    const std::span<const std::byte> bytes = in_.first(size);
    in_ = in_.subspan(size);
    return bytes;
  }
  // Throw unless `count` elements of at least `least` bytes each can follow.
  void expect(uint64_t count, uint64_t least) const {
    if (count > left() / least)
      throw cereal::Exception(fmt::format("a list of {} elements in {} bytes", count, left()));
  }
  // Throw if `bytes` more bytes of memory exceed what the size of the input allows.
  void charge(uint64_t bytes) {
    if (bytes > budget_) throw cereal::Exception("it would take more memory than its size can mean");
    budget_ -= bytes;
  }
  int depth = 0;  // of the Value that is being read

 private:
  std::span<const std::byte> in_;
  uint64_t budget_;
};

// Arithmetic types are stored as their memory; a bool is one byte.
template <class T>
  requires(std::is_arithmetic_v<T> && !std::is_same_v<T, bool>)
void CEREAL_SAVE_FUNCTION_NAME(BoundedOutput& archive, const T& value) {
  archive.raw(&value, sizeof value);
}
template <class T>
  requires(std::is_arithmetic_v<T> && !std::is_same_v<T, bool>)
void CEREAL_LOAD_FUNCTION_NAME(BoundedInput& archive, T& value) {
  archive.raw(&value, sizeof value);
}
inline void CEREAL_SAVE_FUNCTION_NAME(BoundedOutput& archive, const bool& value) {
  const uint8_t byte = value ? 1 : 0;
  archive.raw(&byte, 1);
}
inline void CEREAL_LOAD_FUNCTION_NAME(BoundedInput& archive, bool& value) {
  uint8_t byte = 0;
  archive.raw(&byte, 1);
  if (byte > 1) throw cereal::Exception(fmt::format("{} is not a truth value", byte));
  value = byte == 1;
}

// Names are not stored.
template <class Archive, class T>
  requires(std::is_same_v<Archive, BoundedOutput> || std::is_same_v<Archive, BoundedInput>)
void CEREAL_SERIALIZE_FUNCTION_NAME(Archive& archive, cereal::NameValuePair<T>& pair) {
  archive(pair.value);
}

template <class T>
void CEREAL_SAVE_FUNCTION_NAME(BoundedOutput& archive, const cereal::SizeTag<T>& tag) {
  archive(static_cast<uint64_t>(tag.size));
}
template <class T>
void CEREAL_LOAD_FUNCTION_NAME(BoundedInput& archive, cereal::SizeTag<T>& tag) {
  uint64_t size = 0;
  archive(size);
  archive.expect(size, 1);
  tag.size = static_cast<std::remove_reference_t<T>>(size);
}
template <class T>
void CEREAL_SAVE_FUNCTION_NAME(BoundedOutput& archive, const cereal::BinaryData<T>& data) {
  archive.raw(data.data, data.size);
}
template <class T>
void CEREAL_LOAD_FUNCTION_NAME(BoundedInput& archive, cereal::BinaryData<T>& data) {
  archive.raw(data.data, data.size);
}

// Enums with enumerators from 0 to `last`.
template <class Enum>
struct CheckedEnum {
  Enum& value;
  Enum last;
};
template <class Enum>
CheckedEnum<Enum> checked(Enum& value, Enum last) {
  return {value, last};
}
template <class Enum>
CheckedEnum<const Enum> checked(const Enum& value, Enum last) {
  return {value, last};
}
template <class Enum>
void CEREAL_SAVE_FUNCTION_NAME(BoundedOutput& archive, const CheckedEnum<Enum>& item) {
  archive(static_cast<uint8_t>(item.value));
}
template <class Enum>
void CEREAL_LOAD_FUNCTION_NAME(BoundedInput& archive, CheckedEnum<Enum>& item) {
  uint8_t raw = 0;
  archive(raw);
  if (raw > static_cast<uint8_t>(item.last))
    throw cereal::Exception(fmt::format("{} is not one of {} kinds", raw, static_cast<int>(item.last) + 1));
  item.value = static_cast<Enum>(raw);
}

}  // namespace torpor

CEREAL_REGISTER_ARCHIVE(torpor::BoundedOutput)
CEREAL_REGISTER_ARCHIVE(torpor::BoundedInput)
CEREAL_SETUP_ARCHIVE_TRAITS(torpor::BoundedInput, torpor::BoundedOutput)

// Lists: numbers are read at once, all other elements one by one, so that memory grows no faster than the input.
namespace cereal {

template <class T>
void CEREAL_SAVE_FUNCTION_NAME(torpor::BoundedOutput& archive, const std::vector<T>& list) {
  archive(static_cast<uint64_t>(list.size()));
  if constexpr (std::is_arithmetic_v<T>) {
    archive.raw(list.data(), list.size() * sizeof(T));
  } else {
    for (const T& element : list) archive(element);
  }
}
template <class T>
void CEREAL_LOAD_FUNCTION_NAME(torpor::BoundedInput& archive, std::vector<T>& list) {
  uint64_t size = 0;
  archive(size);
  list.clear();
  if constexpr (sizeof(T) == 1 && std::is_arithmetic_v<T>) {
    const std::span<const std::byte> bytes = archive.take(size);
    list.assign(reinterpret_cast<const T*>(bytes.data()), reinterpret_cast<const T*>(bytes.data()) + size);
  } else if constexpr (std::is_arithmetic_v<T>) {
    archive.expect(size, sizeof(T));
    list.resize(size);
    archive.raw(list.data(), size * sizeof(T));
  } else {
    archive.expect(size, 1);
    for (uint64_t i = 0; i < size; ++i) {
      archive.charge(sizeof(T));
      archive(list.emplace_back());
    }
  }
}

}  // namespace cereal

#include <cereal/types/map.hpp>
#include <cereal/types/optional.hpp>
#include <cereal/types/string.hpp>
#include <cereal/types/utility.hpp>

namespace torpor {

// Encode the values one after the other, after `gap` zero bytes.
template <class... T>
Bytes to_bytes_after(uint64_t gap, const T&... values) {
  BoundedOutput count;
  count(values...);
  Bytes bytes;
  bytes.reserve(gap + count.bytes());
  bytes.resize(gap);
  BoundedOutput archive(bytes);
  archive(values...);
  return bytes;
}

template <class T>
Bytes to_bytes(const T& value) {
  return to_bytes_after(0, value);
}

// Decode a T. kCorruption: `bytes` are not exactly one T; `what` describes them in the error.
template <class T>
Result<T> from_bytes(std::span<const std::byte> bytes, std::string_view what) {
  try {
    BoundedInput archive(bytes);
    T value;
    archive(value);
    if (archive.left() != 0) throw cereal::Exception(fmt::format("{} bytes are left over", archive.left()));
    return value;
  } catch (const std::exception& problem) {  // Cereal's, and bad_alloc
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("{} cannot be decoded: {}", what, problem.what()),
                 .next_step = "use another checkpoint"};
  }
}

}  // namespace torpor
