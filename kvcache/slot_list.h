// SPDX-License-Identifier: Apache-2.0
// SlotList: a linked list over records that have fields `before` and `after`; each record is in one list at most.
// Allocates nothing. Threads: the owner's.
#pragma once

#include <cstdint>

#include "kvcache/flat_array.h"

namespace torpor {

struct SlotList {
  int32_t first = -1;
  int32_t last = -1;
  int64_t size = 0;

  template <class Record>
  void push_back(FlatArray<Record>& records, int32_t id) {
    records[id].before = last;
    records[id].after = -1;
    (last < 0 ? first : records[last].after) = id;
    last = id;
    ++size;
  }
  template <class Record>
  void remove(FlatArray<Record>& records, int32_t id) {  // precondition: it is in this list
    const int32_t before = records[id].before;
    const int32_t after = records[id].after;
    (before < 0 ? first : records[before].after) = after;
    (after < 0 ? last : records[after].before) = before;
    --size;
  }
};

}  // namespace torpor
