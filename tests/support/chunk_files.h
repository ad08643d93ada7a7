// SPDX-License-Identifier: Apache-2.0
// open_chunks(): opens one chunk file for reading.
#pragma once

#include "offload/disk_tier.h"

namespace torpor::test {

inline Result<std::unique_ptr<DiskTier>> open_chunks(Directory& directory, std::string_view name, int32_t rank,
                                                     std::shared_ptr<const Seal> seal = nullptr) {
  std::vector<OpenChunkFile> files(1);
  TORPOR_ASSIGN_OR_RETURN(files[0].file, directory.open_file(name, FileIo::kFastest));
  files[0].seal = std::move(seal);
  return DiskTier::open(std::move(files), rank);
}

}  // namespace torpor::test
