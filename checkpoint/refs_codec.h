// SPDX-License-Identifier: Apache-2.0
// The file refs-rN: a RankRefs as bytes, and back. checkpoint/FORMAT.md has the bytes.
//
// The file has no digest of its own: MANIFEST has its name, its length and its BLAKE2b-256 (keyed if the checkpoint is
// sealed). So nothing of it is read before it is known to be the committed file.
#pragma once

#include <span>
#include <string>

#include "base/seal.h"
#include "base/status.h"
#include "base/value.h"
#include "checkpoint/refs.h"

namespace torpor {

inline constexpr uint64_t kMaxRefsBytes = uint64_t{1} << 30;

std::string refs_file_name(int32_t rank);   // "refs-r0"
std::string chunk_file_name(int32_t rank);  // "chunks-r0"
// "chunks-r0-" and the id of the checkpoint that wrote it
std::string linked_file_name(int32_t rank, const SealId& of);
bool is_plain_name(std::string_view name);  // of one entry of a directory

struct EncodedRefs {
  Bytes file;
  ManifestMac mac{};
};
// `id`: of the checkpoint. `seal`: null, or the checkpoint's.
EncodedRefs encode_refs(const RankRefs& refs, const SealId& id, const Seal* seal = nullptr);

// Decode a refs file. `summary`: its entry in MANIFEST. kCorruption: it is damaged, belongs to another checkpoint or
// rank, or contradicts itself or the summary. Checked: names are unique and plain, no record occurs twice, every record
// lies inside its file, sums are equal.
Result<RankRefs> decode_refs(std::span<const std::byte> file, const RankSummary& summary, const SealId& id,
                             const Seal* seal = nullptr);

// Check that records and files fit each other; the error names `where`.
Status check_records(const RankRefs& refs, std::string_view where);

}  // namespace torpor
