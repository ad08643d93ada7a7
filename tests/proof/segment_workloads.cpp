// SPDX-License-Identifier: Apache-2.0
#include "tests/proof/segment_workloads.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>

#include <fmt/core.h>

#include "base/units.h"
#include "base/watched_file_system.h"
#include "tests/contract/store_world.h"

namespace torpor::proof {
namespace {

constexpr int32_t kSlots = 4;  // a segment
constexpr uint64_t kBytes = kPage + 700;
constexpr StoreSlot kOfOtherWeights = 100;  // slots from here on belong to them

std::vector<std::byte> bytes_of(StoreSlot slot) {
  std::vector<std::byte> bytes(kBytes);
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = i % 4 == 0 ? static_cast<std::byte>((i * 2654435761u + static_cast<unsigned>(slot) * 977u) >> 9)
                          : static_cast<std::byte>(slot);
  return bytes;
}

BlockKey key_of_slot(StoreSlot slot, uint32_t space) {
  BlockKey key{.group = 1, .space = space};
  std::memset(key.hash.data(), slot + 1, key.hash.size());
  return key;
}

Digest weights(bool other) { return digest_of(std::as_bytes(std::span(&other, 1))); }

class Writer {
 public:
  static Result<Writer> open(const SegmentWorld& world, const SegmentVariant& variant, bool other_space = false) {
    Writer writer(world);
    TORPOR_ASSIGN_OR_RETURN(writer.store_,
                            SegmentStore::open(world.file_system, world.directory, variant.options, system_clock()));
    writer.store_->open_space(1, weights(other_space));
    TORPOR_RETURN_IF_ERROR(writer.store_->recover(1));
    return writer;
  }
  SegmentStore& store() { return *store_; }
  // Slots from `first` on, `count` of them, in batches of two.
  Status put(StoreSlot first, int count, uint32_t space = 1) {
    for (StoreSlot slot = first; slot < first + count; slot += 2) {
      std::vector<std::vector<std::byte>> bytes;
      std::vector<test::StorePart> parts;
      for (StoreSlot each = slot; each < std::min(slot + 2, first + count); ++each) bytes.push_back(bytes_of(each));
      for (size_t i = 0; i < bytes.size(); ++i) {
        const StoreSlot each = slot + static_cast<StoreSlot>(i);
        parts.push_back({.slot = each,
                         .key = key_of_slot(each, space),
                         .record = {.digest = digest_of(bytes[i])},
                         .bytes = bytes[i]});
      }
      test::put(*store_, parts);
      for (const test::StorePart& part : parts) {
        TORPOR_RETURN_IF_ERROR(part.status);
        world_.report(SegmentWord::kPut, part.slot);
      }
    }
    return ok();
  }
  Status sync() {
    TORPOR_RETURN_IF_ERROR(store_->sync());
    world_.report(SegmentWord::kSafe, 0);
    return ok();
  }
  void drop(StoreSlot first, int count) {
    for (StoreSlot slot = first; slot < first + count; ++slot) world_.report(SegmentWord::kFree, slot);
    const SlotRange range{.first = first, .count = count};
    store_->drop({&range, 1});
  }
  Status lease(std::vector<StoreSlot> slots) {
    TORPOR_ASSIGN_OR_RETURN(const auto into, world_.file_system.open_directory(world_.directory + "-kept", true));
    TORPOR_ASSIGN_OR_RETURN(const std::vector<LeasedRecord> leased, store_->lease(slots, *into));
    TORPOR_RETURN_IF_ERROR(into->sync());
    for (const LeasedRecord& each : leased) {
      world_.leased(each);
      world_.report(SegmentWord::kLeased, leases_++);
    }
    return ok();
  }

 private:
  explicit Writer(const SegmentWorld& world) : world_(world) {}
  const SegmentWorld& world_;
  std::unique_ptr<SegmentStore> store_;
  int leases_ = 0;
};

// The third batch is of the next segment; the first one is full, and was cut and synced by itself.
Status append(const SegmentWorld& world, const SegmentVariant& variant) {
  TORPOR_ASSIGN_OR_RETURN(Writer writer, Writer::open(world, variant));
  TORPOR_RETURN_IF_ERROR(writer.put(0, 2));
  TORPOR_RETURN_IF_ERROR(writer.sync());
  TORPOR_RETURN_IF_ERROR(writer.put(2, 5));
  TORPOR_RETURN_IF_ERROR(writer.sync());
  TORPOR_RETURN_IF_ERROR(writer.put(7, 1));
  return writer.put(8, 1);
}

// The second process makes durable what the first one only wrote.
Status restart(const SegmentWorld& world, const SegmentVariant& variant) {
  {
    TORPOR_ASSIGN_OR_RETURN(Writer writer, Writer::open(world, variant));
    TORPOR_RETURN_IF_ERROR(writer.put(0, 3));
  }
  TORPOR_ASSIGN_OR_RETURN(Writer writer, Writer::open(world, variant));
  TORPOR_RETURN_IF_ERROR(writer.sync());
  TORPOR_RETURN_IF_ERROR(writer.put(writer.store().first_slot(), 3));
  return writer.sync();
}

Status drop(const SegmentWorld& world, const SegmentVariant& variant) {
  TORPOR_ASSIGN_OR_RETURN(Writer writer, Writer::open(world, variant));
  TORPOR_RETURN_IF_ERROR(writer.put(0, 6));
  TORPOR_RETURN_IF_ERROR(writer.sync());
  writer.drop(0, kSlots);
  TORPOR_RETURN_IF_ERROR(writer.put(6, 2));
  TORPOR_RETURN_IF_ERROR(writer.sync());
  writer.drop(kSlots, kSlots);
  return writer.put(8, 2);
}

Status lease(const SegmentWorld& world, const SegmentVariant& variant) {
  TORPOR_ASSIGN_OR_RETURN(Writer writer, Writer::open(world, variant));
  TORPOR_RETURN_IF_ERROR(writer.put(0, 6));
  TORPOR_RETURN_IF_ERROR(writer.sync());
  TORPOR_RETURN_IF_ERROR(writer.lease({1, 4}));
  TORPOR_RETURN_IF_ERROR(writer.lease({5, 0}));
  writer.drop(0, kSlots);
  TORPOR_RETURN_IF_ERROR(writer.put(6, 2));
  return writer.sync();
}

Status lease_where_links_are_refused(const SegmentWorld& world, const SegmentVariant& variant) {
  const auto refusing =
      make_watched_file_system(world.file_system, [](const char* call, const std::string& name) -> Status {
        if (std::string_view(call) == "link_new") return system_error(EXDEV, "cannot link " + name);
        return ok();
      });
  return lease({*refusing, world.directory, world.report, world.leased}, variant);
}

Status other_weights(const SegmentWorld& world, const SegmentVariant& variant) {
  {
    TORPOR_ASSIGN_OR_RETURN(Writer writer, Writer::open(world, variant));
    TORPOR_RETURN_IF_ERROR(writer.put(0, 3));
    TORPOR_RETURN_IF_ERROR(writer.sync());
    for (StoreSlot slot = 0; slot < 3; ++slot) world.report(SegmentWord::kFree, slot);
    world.report(SegmentWord::kSpace, 0);
    writer.store().open_space(2, weights(true));
    TORPOR_RETURN_IF_ERROR(writer.put(kOfOtherWeights, 2, 2));
    TORPOR_RETURN_IF_ERROR(writer.sync());
  }
  TORPOR_ASSIGN_OR_RETURN(Writer writer, Writer::open(world, variant, true));
  TORPOR_RETURN_IF_ERROR(writer.put(writer.store().first_slot(), 2));
  return writer.sync();
}

std::vector<SegmentVariant> make_variants() {
  std::array<uint8_t, kKeyBytes> secret{};
  secret.fill(9);
  const auto key = std::make_shared<const Key>(secret);
  SegmentStoreOptions plain{.record_bytes = kBytes, .slots_per_segment = kSlots};
  std::vector<SegmentVariant> all(4, {"plain", plain});
  all[1].name = "compressed";
  all[1].options.compression = {.level = 1};
  all[2].name = "authenticated";
  all[2].options.key = key;
  all[3].name = "encrypted";
  all[3].options.key = key;
  all[3].options.encrypt = true;
  return all;
}

// What a new store finds: {slot -> whether its bytes are right}, or what is wrong with it.
Result<std::map<StoreSlot, bool>> look(SegmentStore& store, const SegmentPromise& promise) {
  std::map<StoreSlot, bool> found;
  TORPOR_ASSIGN_OR_RETURN(const std::vector<RecoveredSlot> recovered, store.recover(1));
  for (const RecoveredSlot& each : recovered) {
    if (each.key != key_of_slot(each.slot, 1)) return Error{.what = fmt::format("slot {} has another key", each.slot)};
    if ((each.slot >= kOfOtherWeights) != promise.other_space)
      return Error{.what = fmt::format("slot {} is of other weights", each.slot)};
    std::vector<std::byte> bytes(kBytes);
    test::StorePart part{.slot = each.slot, .bytes = bytes};
    test::get(store, {&part, 1});
    const bool proven = part.status && digest_of(bytes) == part.record.digest;
    if (proven && bytes != bytes_of(each.slot)) return Error{.what = fmt::format("slot {} has wrong bytes", each.slot)};
    found[each.slot] = proven;
    // Batches are put one after the other: none is found without those before it.
    for (StoreSlot before = each.slot / kSlots * kSlots; before < each.slot; ++before) {
      if (!found.contains(before))
        return Error{.what = fmt::format("slot {} is found, and {} is not", each.slot, before)};
    }
  }
  return found;
}

std::string lost_lease(FileSystem& file_system, const std::string& directory, const SegmentVariant& variant,
                       const LeasedRecord& leased) {
  const auto lost = [&](const Error& error) {
    return fmt::format("lease of slot {}: {}", leased.slot, error.to_string());
  };
  const auto kept = file_system.open_directory(directory + "-kept", false);
  if (!kept) return lost(kept.error());
  const auto file = (*kept)->open_file(leased.file);
  if (!file) return lost(file.error());
  std::vector<std::byte> page(kPage);
  std::vector<std::byte> stored(leased.record.stored);
  std::vector<std::byte> bytes(leased.record.bytes);
  if (const Status read = (*file)->pread(page, 0); !read) return lost(read.error());
  const auto header = read_header(page, variant.options.key.get());
  if (!header) return lost(header.error());
  if (const Status read = (*file)->pread(stored, leased.offset); !read) return lost(read.error());
  const SegmentRecord record{.hash = key_of_slot(leased.slot, 1).hash,
                             .group = 1,
                             .offset = leased.offset,
                             .stored = leased.record.stored,
                             .bytes = leased.record.bytes,
                             .codec = leased.record.codec};
  if (header->seal != nullptr && header->header.id == leased.id) {
    const std::string what =
        fmt::format("{} in group 1 of {} bytes, {}", hex(record.hash), record.bytes, name(record.codec));
    const Status opened =
        header->seal->open(stored, leased.seal, {SealPlace::Kind::kChunk, header->header.rank, record.offset, what});
    if (!opened) return lost(opened.error());
  } else if (variant.options.encrypt) {
    return "";  // of another run: with another id, and so another key
  }
  if (const Status decoded = decompress(record.codec, stored, bytes); !decoded) return lost(decoded.error());
  return bytes == bytes_of(leased.slot) ? "" : fmt::format("lease of slot {}: wrong bytes", leased.slot);
}

}  // namespace

const std::vector<SegmentVariant>& segment_variants() {
  static const std::vector<SegmentVariant> all = make_variants();
  return all;
}

const std::vector<SegmentWorkload>& segment_workloads() {
  static const std::vector<SegmentWorkload> all = {{"append", append},
                                                   {"restart", restart},
                                                   {"drop", drop},
                                                   {"lease", lease},
                                                   {"lease by copy", lease_where_links_are_refused},
                                                   {"other weights", other_weights}};
  return all;
}

void SegmentPromise::hear(SegmentWord word, int number) {
  if (word == SegmentWord::kPut) put.insert(number);
  if (word == SegmentWord::kSafe) safe = put;
  if (word == SegmentWord::kFree) put.erase(number), safe.erase(number);
  if (word == SegmentWord::kLeased) leased.insert(number);
  if (word == SegmentWord::kSpace) other_space = true;
}

std::string broken_segment_promise(FileSystem& file_system, const std::string& directory, const SegmentVariant& variant,
                                   const SegmentPromise& promise, const std::set<StoreSlot>& must,
                                   const std::vector<LeasedRecord>& leases) {
  for (const int number : promise.leased) {
    std::string problem = lost_lease(file_system, directory, variant, leases.at(static_cast<size_t>(number)));
    if (!problem.empty()) return problem;
  }
  std::set<StoreSlot> wanted = must;
  for (const char* who : {"the next store", "the one after it"}) {
    const auto fail = [&](const std::string& what) { return fmt::format("{}: {}", who, what); };
    auto store = SegmentStore::open(file_system, directory, variant.options, system_clock());
    if (!store) return fail(store.error().to_string());
    (*store)->open_space(1, weights(promise.other_space));
    const auto found = look(**store, promise);
    if (!found) return fail(found.error().what);
    for (const StoreSlot slot : wanted) {
      const auto entry = found->find(slot);
      if (entry == found->end() || !entry->second) return fail(fmt::format("slot {} is not there", slot));
    }
    wanted.clear();
    for (const auto& [slot, proven] : *found) {
      if (proven) wanted.insert(slot);
    }
    if ((*store)->first_slot() > 120) continue;  // keys are made of one byte
    const StoreSlot next = std::max((*store)->first_slot(), promise.other_space ? kOfOtherWeights : 0);
    const SegmentWorld world{file_system, directory, [](SegmentWord, int) {}};
    std::vector<std::byte> bytes = bytes_of(next);
    test::StorePart part{
        .slot = next, .key = key_of_slot(next, 1), .record = {.digest = digest_of(bytes)}, .bytes = bytes};
    test::put(**store, {&part, 1});
    if (!part.status) return fail("it cannot go on: " + part.status.error().to_string());
    if (const Status synced = (*store)->sync(); !synced) return fail(synced.error().to_string());
    wanted.insert(next);
  }
  auto stranger = SegmentStore::open(file_system, directory, variant.options, system_clock());
  if (!stranger) return stranger.error().to_string();
  (*stranger)->open_space(1, weights(!promise.other_space));
  const auto theirs = (*stranger)->recover(1);
  if (!theirs) return theirs.error().to_string();
  for (const RecoveredSlot& each : *theirs) {
    if ((each.slot >= kOfOtherWeights) == promise.other_space) return "other weights find what is not theirs";
  }
  return "";
}

}  // namespace torpor::proof
