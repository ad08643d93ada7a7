// SPDX-License-Identifier: Apache-2.0
// ObjectStore: named bytes on another machine, each written once and removed when no longer needed. The S3 protocol and
// a shared directory offer this.
//
// Keys: words of [A-Za-z0-9._-] with '/' between them. Threads: all methods from any thread; each blocks until its
// answer. Errors: kUnavailable: the store does not answer, or is busy, after all retries. kUnauthenticated: wrong or
// missing credentials, or a certificate that is not trusted. kFailedPrecondition: no such bucket, or it is elsewhere.
// kResourceExhausted: the store is full. kAborted: the user stopped the call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace torpor::remote {

class ObjectStore {
 public:
  virtual ~ObjectStore() = default;
  // Create `key`, whole or not at all. Return false if it exists; it is not changed then.
  virtual Result<bool> put_new(std::string_view key, std::span<const std::byte> bytes) = 0;
  // Read the object into the beginning of `room`. Return its size. kNotFound; kCorruption: the object is larger than
  // `room`.
  virtual Result<uint64_t> get(std::string_view key, std::span<std::byte> room) = 0;
  // Fill `room`, which is not empty, with the object's bytes from `offset` on. kNotFound; kCorruption: the object ends
  // before that.
  virtual Status get_range(std::string_view key, uint64_t offset, std::span<std::byte> room) = 0;
  virtual Result<std::optional<uint64_t>> size(std::string_view key) = 0;  // no value: no such key
  virtual Status remove(std::string_view key) = 0;                         // ok if there is no such key
  // Call `visit` for each key that begins with `prefix`, in any order, until it returns false.
  virtual Status each_key(std::string_view prefix, const std::function<bool(std::string_view key)>& visit) = 0;
  // Call `goes` with the name of each file in `folder` that a put_new() has begun and not ended, and that no key names;
  // if it returns true, remove the file. No two calls of put_new() give such a file the same name, so one that is there
  // for long is of a writer that was killed.
  virtual Status remove_unfinished(std::string_view folder, const std::function<bool(std::string_view name)>& goes) {
    (void)folder, (void)goes;
    return ok();
  }
  // Return the keys that begin with `prefix`, in ascending order. kResourceExhausted: more than kMostKeys.
  Result<std::vector<std::string>> list(std::string_view prefix);
  // Check that the bucket or directory exists. kFailedPrecondition, kNotFound. Callers that only read or remove call
  // this first, because put_new() creates a directory.
  virtual Status check_exists() = 0;
  virtual const std::string& url() const = 0;  // for messages, without credentials
};

inline constexpr size_t kMostKeys = 1'000'000;  // of list()

// Return the error of get_range() if the object has no `bytes` bytes at `offset`.
Error ends_too_early(const ObjectStore& store, std::string_view key, uint64_t offset, uint64_t bytes);
// Read a whole object of at most `most` bytes.
Result<std::vector<std::byte>> get_whole(ObjectStore& store, std::string_view key, uint64_t most);

}  // namespace torpor::remote
