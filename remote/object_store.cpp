// SPDX-License-Identifier: Apache-2.0
#include "remote/object_store.h"

#include <algorithm>

#include <fmt/core.h>

namespace torpor::remote {

Result<std::vector<std::string>> ObjectStore::list(std::string_view prefix) {
  std::vector<std::string> keys;
  bool too_many = false;
  TORPOR_RETURN_IF_ERROR(each_key(prefix, [&](std::string_view key) {
    too_many = keys.size() == kMostKeys;
    if (!too_many) keys.emplace_back(key);
    return !too_many;
  }));
  if (too_many)
    return Error{.code = Code::kResourceExhausted,
                 .what = fmt::format("{} has over {} keys that begin with \"{}\"", url(), kMostKeys, prefix),
                 .next_step = "use another prefix or directory"};
  std::sort(keys.begin(), keys.end());
  return keys;
}

Error ends_too_early(const ObjectStore& store, std::string_view key, uint64_t offset, uint64_t bytes) {
  return Error{.code = Code::kCorruption,
               .what = fmt::format("{} of {} ends before byte {}", key, store.url(), offset + bytes),
               .next_step = "it is not what torpor stored there"};
}

Result<std::vector<std::byte>> get_whole(ObjectStore& store, std::string_view key, uint64_t most) {
  TORPOR_ASSIGN_OR_RETURN(const std::optional<uint64_t> size, store.size(key));
  if (!size)
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("there is no {} in {}", key, store.url()),
                 .next_step = fmt::format("torpor ls {} says what there is", store.url())};
  if (*size > most)
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("{} of {} has {} bytes, more than {}", key, store.url(), *size, most),
                 .next_step = "it is not what torpor stored there"};
  std::vector<std::byte> bytes(*size);
  TORPOR_ASSIGN_OR_RETURN(const uint64_t received, store.get(key, bytes));
  bytes.resize(received);
  return bytes;
}

}  // namespace torpor::remote
