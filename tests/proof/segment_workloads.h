// SPDX-License-Identifier: Apache-2.0
// What a store of segments does, and what must hold afterwards however it was cut off. Records are made from their
// slots: whoever finds slot n knows its key and its bytes.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "offload/segment_store.h"

namespace torpor::proof {

enum class SegmentWord : char {
  kPut = 'p',     // the slot was put
  kSafe = 's',    // all that was put so far is durable
  kFree = 'f',    // the slot may go from now on
  kLeased = 'l',  // the n-th lease is durable
  kSpace = 'w',   // from now on the other weights count
};

struct SegmentWorld {
  FileSystem& file_system;
  std::string directory;  // the store's; leases go beside it
  std::function<void(SegmentWord, int number)> report;
  std::function<void(const LeasedRecord&)> leased = [](const LeasedRecord&) {};
};

struct SegmentVariant {
  const char* name;
  SegmentStoreOptions options;
};
const std::vector<SegmentVariant>& segment_variants();  // plain, compressed, authenticated, encrypted

struct SegmentWorkload {
  const char* name;
  std::function<Status(const SegmentWorld&, const SegmentVariant&)> run;
};
const std::vector<SegmentWorkload>& segment_workloads();

struct SegmentPromise {
  std::set<StoreSlot> put;
  std::set<StoreSlot> safe;
  std::set<int> leased;
  bool other_space = false;
  void hear(SegmentWord word, int number);
};

// A store that comes now finds all of `must`, only what was put, of each segment no batch without those before it, and
// never wrong bytes; it goes on, and the one after it finds that too. What was leased is there. With other weights
// nothing is found. `leases`: those of a run that was not cut off. Empty: all right.
std::string broken_segment_promise(FileSystem& file_system, const std::string& directory, const SegmentVariant& variant,
                                   const SegmentPromise& promise, const std::set<StoreSlot>& must,
                                   const std::vector<LeasedRecord>& leases);

}  // namespace torpor::proof
