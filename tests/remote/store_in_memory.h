// SPDX-License-Identifier: Apache-2.0
// An ObjectStore that can fail at its n-th call, before or after that took effect.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "remote/object_store.h"

namespace torpor::test {

class StoreInMemory final : public remote::ObjectStore {
 public:
  Result<bool> put_new(std::string_view key, std::span<const std::byte> bytes) override {
    return counted(
        [&]() -> Result<bool> { return objects.try_emplace(std::string(key), bytes.begin(), bytes.end()).second; });
  }
  Result<uint64_t> get(std::string_view key, std::span<std::byte> room) override {
    return counted([&]() -> Result<uint64_t> {
      const auto found = objects.find(std::string(key));
      if (found == objects.end()) return Error{.code = Code::kNotFound, .what = "no " + std::string(key)};
      if (found->second.size() > room.size()) return Error{.code = Code::kCorruption, .what = "larger"};
      std::copy(found->second.begin(), found->second.end(), room.begin());
      read_whole.emplace_back(key);
      return found->second.size();
    });
  }
  Status get_range(std::string_view key, uint64_t offset, std::span<std::byte> room) override {
    return counted([&]() -> Status {
      const auto found = objects.find(std::string(key));
      if (found == objects.end()) return Error{.code = Code::kNotFound, .what = "no " + std::string(key)};
      const std::span<const std::byte> object = found->second;
      if (room.empty()) return Error{.code = Code::kInternal, .what = "no bytes were asked for"};
      if (offset > object.size() || room.size() > object.size() - offset)
        return remote::ends_too_early(*this, key, offset, room.size());
      std::ranges::copy(object.subspan(offset, room.size()), room.begin());
      ranged_bytes += room.size();
      return ok();
    });
  }
  Result<std::optional<uint64_t>> size(std::string_view key) override {
    return counted([&]() -> Result<std::optional<uint64_t>> {
      const auto found = objects.find(std::string(key));
      if (found == objects.end()) return std::optional<uint64_t>();
      return std::optional<uint64_t>(found->second.size());
    });
  }
  // Visits without the lock: a visitor may call the store, as that of a real one may.
  Status each_key(std::string_view prefix, const std::function<bool(std::string_view key)>& visit) override {
    std::vector<std::string> keys;
    TORPOR_RETURN_IF_ERROR(counted([&]() -> Status {
      for (const auto& [key, bytes] : objects) {
        if (key.starts_with(prefix)) keys.push_back(key);
      }
      return ok();
    }));
    for (const std::string& key : keys) {
      if (!visit(key)) break;
    }
    return ok();
  }
  Status remove(std::string_view key) override {
    return counted([&]() -> Status {
      objects.erase(std::string(key));
      return ok();
    });
  }
  Status check_exists() override { return ok(); }
  const std::string& url() const override { return url_; }

  std::map<std::string, std::vector<std::byte>> objects;
  uint64_t calls = 0;
  std::vector<std::string> read_whole;  // keys
  uint64_t ranged_bytes = 0;            // that were read as a part of an object
  uint64_t failing = 0;                 // the number of the call that fails; 0: none
  bool after = false;                   // it took effect all the same

 private:
  template <class Call>
  auto counted(Call call) -> decltype(call()) {
    const MutexLock lock(mutex_);
    const Error failed{.code = Code::kUnavailable, .what = "injected"};
    const bool fails = ++calls == failing;
    if (fails && !after) return failed;
    auto result = call();
    if (fails) return failed;
    return result;
  }
  Mutex mutex_;
  const std::string url_ = "memory://";
};

}  // namespace torpor::test
