// SPDX-License-Identifier: Apache-2.0
// Checkpoint: a committed one, opened for reading: its manifest was whole and, with a key, authentic.
//
// Owner: whoever reads. Threads: all methods from any thread. Nothing here writes.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/file_system.h"
#include "base/progress.h"
#include "base/status.h"
#include "checkpoint/engine_checkpoint.h"
#include "checkpoint/manifest.h"
#include "offload/disk_tier.h"

namespace torpor {

class Checkpoint {
 public:
  const std::string& path() const;
  const Manifest& manifest() const;
  // Verified, unsealed and decompressed. kCorruption names the section.
  Result<std::vector<Section>> read_sections() const;
  // Return what a user attached. Only its section is read. kCorruption: it is damaged, or too large.
  Result<Metadata> read_metadata() const;
  // The sections' values with the fingerprint; not yet validated.
  Result<EngineCheckpoint> read_state() const;
  // What `rank`, one of the manifest's, has where. kCorruption names its refs file.
  Result<RankRefs> refs(const RankSummary& rank) const;
  // For reading its records: opens all of its files. kCorruption when one is missing, has another size or, in version
  // 2, is of another checkpoint. `io` kFastest: from the disk, which is what is to be looked at; kCached: what was
  // written lately, as by a pull, comes from memory.
  Result<std::unique_ptr<DiskTier>> open_rank(const RankSummary& rank,
                                              std::shared_ptr<ProgressMeter> progress = nullptr,
                                              FileIo io = FileIo::kFastest) const;

  struct Impl;
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

 private:
  std::unique_ptr<Impl> impl_;
};

// Fills `room` with what STATE has at `offset`.
using StateReader = std::function<Status(uint64_t offset, std::span<std::byte> room)>;
// Return what a user attached to the checkpoint that MANIFEST is of. `read` is called once, for its section alone, or
// never if there is none. `state`: the name of STATE, for messages. Errors: those of Checkpoint::read_metadata() and
// of `read`.
Result<Metadata> read_metadata(const OpenedManifest& opened, const std::string& state, const StateReader& read);

// `key` null: only checkpoints without a seal can be read. Errors: decode_manifest().
Result<Checkpoint> open_checkpoint_directory(std::unique_ptr<Directory> directory,
                                             std::shared_ptr<const Key> key = nullptr);
// The latest one of a directory of checkpoints. kNotFound if there is none; a damaged newest one is kCorruption.
Result<Checkpoint> open_latest(const Directory& store, std::shared_ptr<const Key> key = nullptr);
// Returns whether an engine with this fingerprint can go on from the checkpoint. kIncompatible names the checkpoint and
// each field that differs. `named`: what it was opened by; if that is a directory of checkpoints, the error also names
// the newest one there that fits.
Status check_fits(FileSystem& file_system, const Checkpoint& checkpoint, const Fingerprint& engine,
                  const std::string& named, const Key* key = nullptr);
// By its own path, or the latest one of a directory of checkpoints.
Result<Checkpoint> open_checkpoint(FileSystem& file_system, const std::string& path,
                                   std::shared_ptr<const Key> key = nullptr);

}  // namespace torpor
