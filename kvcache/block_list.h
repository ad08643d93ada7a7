// SPDX-License-Identifier: Apache-2.0
// BlockList: a linked list over the block numbers of a pool; each number is in it at most once. It has space for all of
// them from the beginning, so only the constructor allocates or fails. Threads: the owner's lock guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torpor {

class BlockList {
 public:
  explicit BlockList(int32_t num_blocks) : links_(static_cast<size_t>(num_blocks) + 1), end_(num_blocks) { clear(); }

  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  void push_front(int32_t id) { insert_before(at(end_).after, id); }
  void push_back(int32_t id) { insert_before(end_, id); }
  void remove(int32_t id) {  // precondition: it is in the list
    at(at(id).before).after = at(id).after;
    at(at(id).after).before = at(id).before;
    --size_;
  }
  int32_t pop_front() {  // precondition: not empty
    const int32_t id = at(end_).after;
    remove(id);
    return id;
  }
  void clear() {
    at(end_) = {end_, end_};
    size_ = 0;
  }
  std::vector<int32_t> ids() const {  // front to back
    std::vector<int32_t> ids;
    ids.reserve(size_);
    for (int32_t id = links_.back().after; id != end_; id = links_[static_cast<size_t>(id)].after) ids.push_back(id);
    return ids;
  }

 private:
  struct Link {
    int32_t before = -1;
    int32_t after = -1;
  };
  Link& at(int32_t id) { return links_[static_cast<size_t>(id)]; }
  void insert_before(int32_t next, int32_t id) {
    at(id) = {at(next).before, next};
    at(at(next).before).after = id;
    at(next).before = id;
    ++size_;
  }
  std::vector<Link> links_;  // the last entry is the ring's end: `after` is the front, `before` the back
  int32_t end_;
  size_t size_ = 0;
};

}  // namespace torpor
