// SPDX-License-Identifier: Apache-2.0
#include "base/text.h"

namespace torpor {
namespace {

template <class Part>
std::string joined_parts(std::span<const Part> parts, std::string_view between) {
  std::string all;
  for (const Part& part : parts) {
    if (&part != parts.data()) all += between;
    all += part;
  }
  return all;
}

}  // namespace

std::string joined(std::span<const std::string> parts, std::string_view between) {
  return joined_parts(parts, between);
}
std::string joined(std::span<const std::string_view> parts, std::string_view between) {
  return joined_parts(parts, between);
}

}  // namespace torpor
