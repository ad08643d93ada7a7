// SPDX-License-Identifier: Apache-2.0
// The file refs-rN: a RankRefs as bytes, and back. The bytes: checkpoint/FORMAT.md.
//
// The file has no digest of its own: MANIFEST names it with its length and its BLAKE2b-256, keyed if the checkpoint is
// sealed, so nothing of it is looked at before it is known to be the one that was committed.
#pragma once

#include <span>
#include <string>

#include "base/seal.h"
#include "base/status.h"
#include "base/value.h"
#include "checkpoint/refs.h"

namespace torpor {

inline constexpr uint64_t kMaxRefsBytes = uint64_t{1} << 30;

std::string refs_file_name(int32_t rank);                      // "refs-r0"
std::string chunk_file_name(int32_t rank);                     // "chunks-r0"
std::string linked_file_name(int32_t rank, const SealId& of);  // "chunks-r0-" and the id of who wrote it
bool is_plain_name(std::string_view name);                     // of one entry of a directory

struct EncodedRefs {
  Bytes file;
  ManifestMac mac{};
};
// `id`: of the checkpoint. `seal`: null, or of the checkpoint.
EncodedRefs encode_refs(const RankRefs& refs, const SealId& id, const Seal* seal = nullptr);

// `summary`: what MANIFEST says of it. kCorruption: damaged, of another checkpoint or rank, or it contradicts itself or
// the summary (names unique and plain, no record twice, every record inside its file, sums equal).
Result<RankRefs> decode_refs(std::span<const std::byte> file, const RankSummary& summary, const SealId& id,
                             const Seal* seal = nullptr);

// Whether records and files fit each other; `where` is named in the error.
Status check_records(const RankRefs& refs, std::string_view where);

}  // namespace torpor
