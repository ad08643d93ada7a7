// SPDX-License-Identifier: Apache-2.0
#include "kvcache/key_table.h"

#include <bit>

#include <fmt/core.h>

namespace torpor {
namespace {

uint64_t folded(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

using Words = std::array<uint64_t, 4>;

bool same(const std::array<uint8_t, 32>& a, const std::array<uint8_t, 32>& b) {
  const auto x = std::bit_cast<Words>(a);
  const auto y = std::bit_cast<Words>(b);
  return ((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3])) == 0;
}

}  // namespace

Result<KeyTable> KeyTable::create(size_t keys) {
  KeyTable made;
  // At most two thirds full: a search for a missing key costs five cells, one or two cache lines.
  TORPOR_ASSIGN_OR_RETURN(made.cells_, FlatArray<Cell>::create(keys + keys / 2 + 16));
  TORPOR_ASSIGN_OR_RETURN(made.entries_, FlatArray<Entry>::create(keys));
  return made;
}

// Uses all 32 bytes: an engine's hash may be short, or chosen by the author of the prompts.
uint32_t KeyTable::hash_of(const BlockKey& key) {
  const auto words = std::bit_cast<Words>(key.hash);
  const uint64_t where = uint64_t{key.space} << 8 | key.group;
  const uint64_t mixed = folded(words[0] ^ 0xa0761d6478bd642full, words[1] ^ 0xe7037ed1a0b428dbull ^ where) ^
                         folded(words[2] ^ 0x8ebc6af09c88c6e3ull, words[3] ^ 0x589965cc75374cc3ull);
  return static_cast<uint32_t>(folded(mixed, 0x9e3779b97f4a7c15ull));
}

int32_t KeyTable::find(const BlockKey& key, uint32_t hash) const {
  const uint32_t group_and_space = key.space << 8 | key.group;
  for (int64_t at = home(hash);; at = next(at)) {
    const Cell cell = cells_[at];
    if (cell.entry == 0) return -1;
    if (cell.hash != hash) continue;
    const auto number = static_cast<int32_t>(cell.entry - 1);
    const Entry& entry = entries_[number];
    if (entry.group_and_space == group_and_space && same(entry.hash, key.hash)) return number;
  }
}

void KeyTable::prefetch_entry(uint32_t hash) const {
  for (int64_t at = home(hash);; at = next(at)) {
    const Cell cell = cells_[at];
    if (cell.entry == 0) return;
    if (cell.hash != hash) continue;
    const auto* entry = reinterpret_cast<const std::byte*>(&entries_[cell.entry - 1]);
    __builtin_prefetch(entry);
    __builtin_prefetch(entry + sizeof(Entry) - 1);  // half of the entries lie on two lines
    return;
  }
}

int32_t KeyTable::insert(const BlockKey& key, uint32_t hash) {
  int32_t number = free_;
  if (number >= 0) {
    free_ = static_cast<int32_t>(entries_[number].group_and_space) - 1;
  } else {
    number = fresh_++;
  }
  entries_[number] = {.hash = key.hash, .group_and_space = key.space << 8 | key.group, .refs = {}};
  int64_t at = home(hash);
  while (cells_[at].entry != 0) at = next(at);
  cells_[at] = {hash, static_cast<uint32_t>(number) + 1};
  ++size_;
  return number;
}

// Move the cells behind the erased one up, so that no tombstone is needed.
void KeyTable::erase(int32_t number) {
  const auto size = static_cast<int64_t>(cells_.size());
  int64_t hole = home(hash_of(entries_[number].key()));
  while (cells_[hole].entry != static_cast<uint32_t>(number) + 1) hole = next(hole);
  for (int64_t at = next(hole); cells_[at].entry != 0; at = next(at)) {
    const auto distance = [&](int64_t from) { return at >= from ? at - from : at - from + size; };
    if (distance(home(cells_[at].hash)) < distance(hole)) continue;  // it would move in front of its home
    cells_[hole] = cells_[at];
    hole = at;
  }
  cells_[hole] = {};
  entries_[number] = {.hash = {}, .group_and_space = static_cast<uint32_t>(free_ + 1), .refs = {}};
  free_ = number;
  --size_;
}

Status KeyTable::retire(uint32_t space) {
  return try_catch([&] {
    if (retired_.size() <= space) retired_.resize(space + 1);
    retired_[space] = 1;
    return ok();
  });
}

Status KeyTable::check() const {
  const auto broken = [](std::string what) {
    return Error{.code = Code::kInternal, .what = std::move(what), .next_step = "report this"};
  };
  size_t counted = 0;
  for (size_t at = 0; at < cells_.size(); ++at) {
    const Cell cell = cells_[static_cast<int64_t>(at)];
    if (cell.entry == 0) continue;
    ++counted;
    const auto number = static_cast<int32_t>(cell.entry - 1);
    const BlockKey key = entries_[number].key();
    if (hash_of(key) != cell.hash) return broken(fmt::format("cell {} has another hash than its key", at));
    if (find(key, cell.hash) != number) return broken(fmt::format("the key of cell {} is found elsewhere", at));
    if (entries_[number].empty()) return broken(fmt::format("the key of cell {} is nowhere", at));
  }
  if (counted != size_) return broken(fmt::format("{} keys are counted, {} are there", size_, counted));
  size_t free = 0;
  for (int32_t entry = free_; entry >= 0; entry = static_cast<int32_t>(entries_[entry].group_and_space) - 1) ++free;
  if (free + size_ != static_cast<size_t>(fresh_))
    return broken(fmt::format("{} entries were used, {} are free and {} in use", fresh_, free, size_));
  return ok();
}

}  // namespace torpor
