// SPDX-License-Identifier: Apache-2.0
// A segment file with bytes from the fuzzer, and a store that recovers it. Header and batch pages have digests, which
// would keep the fuzzer out: so the first byte says whether the rest is the beginnings of its pages (256 bytes of
// each), or what stands in pages that get right ones. Whatever is believed must lie within the file and be readable,
// and the next store must believe the same.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <source_location>

#include "base/units.h"
#include "offload/segment_store.h"
#include "tests/support/manual_clock.h"
#include "tests/support/model_file_system.h"

namespace {

using namespace torpor;

constexpr int32_t kSlots = 64;
// Most pages of a file: to allocate more at once maps memory anew, which takes longer than all else.
constexpr size_t kMostPages = 30;

void require(bool held, std::source_location where = std::source_location::current()) {
  if (held) return;
  std::fprintf(stderr, "line %u does not hold\n", static_cast<unsigned>(where.line()));
  std::abort();
}

Bytes pages_of(std::span<const uint8_t> bytes) {
  Bytes file;
  for (; !bytes.empty(); bytes = bytes.subspan(std::min<size_t>(bytes.size(), 256))) {
    file.insert(file.end(), bytes.begin(),
                bytes.begin() + static_cast<std::ptrdiff_t>(std::min<size_t>(bytes.size(), 256)));
    file.resize(align_up(file.size(), kPage));
  }
  return file;
}

// Batches of records as the fuzzer describes them, 16 bytes a record, right but for what it chose.
Bytes made_file(std::span<const uint8_t> bytes) {
  const SegmentHeader header{.slots = kSlots, .id = {1}};
  Bytes file(kPage);
  write_header(std::as_writable_bytes(std::span(file)), header, nullptr);
  while (bytes.size() >= 16 && file.size() < kMostPages / 2 * kPage) {
    const size_t count = std::min<size_t>(bytes[0] % kBatchRecords + 1, bytes.size() / 16);
    const uint64_t offset = file.size();
    uint64_t end = offset + kPage;
    std::vector<SegmentRecord> records;
    for (size_t i = 0; i < count; ++i) {
      const uint8_t* in = bytes.data() + i * 16;
      SegmentRecord record{.group = in[1], .position = in[2], .bytes = in[3] * 16u + 1};
      record.codec = static_cast<Codec>(in[4] % 3);
      record.stored = in[5] < 200 ? record.bytes : in[5] * 37u;
      record.offset = in[6] < 200 ? record_offset(end, record.stored) : in[6] * kPage;
      std::memcpy(record.hash.data(), in + 7, 9);
      end = std::min(record_end(record), kMostPages * kPage);
      records.push_back(record);
    }
    file.resize(std::max(end, offset + kPage));
    write_batch(std::as_writable_bytes(std::span(file)).subspan(offset, kPage), header, offset, records, nullptr);
    bytes = bytes.subspan(count * 16);
  }
  return file;
}

std::vector<RecoveredSlot> recovered(FileSystem& file_system, const Clock& clock) {
  const auto store =
      SegmentStore::open(file_system, "/store", {.record_bytes = kMiB, .slots_per_segment = kSlots}, clock);
  require(store.has_value());
  (*store)->open_space(1, {});
  const auto found = (*store)->recover(1);
  require(found.has_value());
  for (const RecoveredSlot& each : *found) {
    require(each.slot >= 0 && each.slot < kSlots && each.record.stored > 0);
    if (each.record.bytes > kMiB) continue;
    std::vector<std::byte> bytes(each.record.bytes);
    SavedChunk chunk{.offset = static_cast<uint64_t>(each.slot)};
    RecordPart part{.chunk = &chunk, .bytes = bytes};
    (*store)->get({&part, 1});
    require(part.status || part.status.error().code == Code::kCorruption);  // zstd's
    require(part.status || each.record.codec != Codec::kNone);
  }
  require((*store)->health().held_bytes < 1024 * kPage);
  return *found;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int quiet = ::setenv("TORPOR_LOG", "off", 0);
  const test::ManualClock clock;
  test::ModelFileSystem file_system;
  require(quiet == 0);
  if (size == 0 || size > 512 * kPage) return 0;
  const std::span<const uint8_t> rest(data + 1, size - 1);
  const Bytes content = data[0] == 0 ? pages_of(rest) : made_file(rest);
  {
    const auto directory = file_system.open_directory("/store/r0", true);
    const auto file = (*directory)->create_file(segment_name(0));
    require((*file)->pwrite(std::as_bytes(std::span(content)), 0).has_value());
  }
  const std::vector<RecoveredSlot> found = recovered(file_system, clock);
  const std::vector<RecoveredSlot> again = recovered(file_system, clock);
  require(found.size() == again.size());
  for (size_t i = 0; i < found.size(); ++i)
    require(found[i].slot == again[i].slot && found[i].key == again[i].key && found[i].record == again[i].record);
  return 0;
}
