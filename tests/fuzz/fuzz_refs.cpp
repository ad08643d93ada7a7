// SPDX-License-Identifier: Apache-2.0
// refs-rN. MANIFEST says its length, its digest and its sums, which would keep the fuzzer out: so they are made from
// the body, with a right header; what is believed then must lie inside its files. The header is once the fuzzer's too.
#include <cstdlib>
#include <cstring>

#include "checkpoint/archived_values.h"
#include "checkpoint/refs_codec.h"

namespace {

using namespace torpor;

constexpr SealId kId{};
constexpr size_t kHeader = 64;

RankSummary summary_for(const Bytes& file, RankSummary summary) {
  const auto bytes = std::as_bytes(std::span(file));
  const size_t header = std::min(bytes.size(), kHeader);
  summary.refs = "refs-r0";
  summary.refs_bytes = file.size();
  summary.refs_mac = unkeyed_mac(bytes.first(header), bytes.subspan(header));
  return summary;
}

Result<RankRefs> read(const Bytes& file, RankSummary summary) {
  return decode_refs(std::as_bytes(std::span(file)), summary_for(file, std::move(summary)), kId);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const Bytes raw(data, data + size);
  (void)read(raw, {});
  (void)decode_refs(std::as_bytes(std::span(raw)), {}, kId);
  using Body = std::pair<std::vector<LinkedFile>, std::vector<SavedChunk>>;
  const Result<Body> body = from_bytes<Body>(std::as_bytes(std::span(raw)), "refs");
  Bytes file = encode_refs({}, kId).file;
  file.resize(kHeader);
  file.insert(file.end(), raw.begin(), raw.end());
  const uint64_t body_bytes = size;
  std::memcpy(file.data() + 16, &body_bytes, sizeof body_bytes);
  if (!body) {
    if (read(file, {})) std::abort();
    return 0;
  }
  const Result<RankRefs> refs = read(file, summary_of({.files = body->first, .records = body->second}));
  if (!refs) return 0;
  for (const SavedChunk& record : refs->records) {
    const LinkedFile& holder = refs->files.at(record.file);
    if (record.offset > holder.bytes || record.stored_bytes > holder.bytes - record.offset) std::abort();
  }
  if (encode_refs(*refs, kId).file != file) std::abort();
  return 0;
}
