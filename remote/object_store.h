// SPDX-License-Identifier: Apache-2.0
// ObjectStore: named bytes on another machine, each written once, and removed when nobody needs it. What the S3
// protocol offers, and a directory that several machines see.
//
// Keys: words of [A-Za-z0-9._-] with '/' between them. Threads: all methods from any thread; each waits for its answer.
// Errors: kUnavailable: does not answer, or says that it is busy, after all retries. kUnauthenticated: wrong or missing
// credentials, or a certificate that is not trusted. kFailedPrecondition: no such bucket, or not where it was looked
// for. kResourceExhausted: it has no room. kAborted: the user wants it to end.
#pragma once

#include <cstddef>
#include <cstdint>
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
  // Creates `key`, whole or not at all. False: it is there already, and stays as it is.
  virtual Result<bool> put_new(std::string_view key, std::span<const std::byte> bytes) = 0;
  // How many bytes were read into the beginning of `room`. kNotFound; kCorruption: there are more than that.
  virtual Result<uint64_t> get(std::string_view key, std::span<std::byte> room) = 0;
  // Fill `room`, which is not empty, with the bytes of `key` that begin at `offset`. kNotFound; kCorruption: the object
  // ends before that.
  virtual Status get_range(std::string_view key, uint64_t offset, std::span<std::byte> room) = 0;
  virtual Result<std::optional<uint64_t>> size(std::string_view key) = 0;  // no value: there is no such key
  virtual Status remove(std::string_view key) = 0;                         // ok too if there is no such key
  // Keys that begin with `prefix`, in ascending order. kResourceExhausted: more than a million.
  virtual Result<std::vector<std::string>> list(std::string_view prefix) = 0;
  // Whether there is such a bucket or directory at all: kFailedPrecondition, kNotFound. Who only reads or removes asks
  // first, for put_new() makes a directory.
  virtual Status check_exists() = 0;
  virtual const std::string& url() const = 0;  // for messages, without credentials
};

inline constexpr size_t kMostKeys = 1'000'000;

// The error of get_range(): the object has no `bytes` at `offset`.
Error ends_too_early(const ObjectStore& store, std::string_view key, uint64_t offset, uint64_t bytes);
// Reads the object whole; `most` bytes at most.
Result<std::vector<std::byte>> get_whole(ObjectStore& store, std::string_view key, uint64_t most);

}  // namespace torpor::remote
