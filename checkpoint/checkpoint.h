// SPDX-License-Identifier: Apache-2.0
// Checkpoint: a committed checkpoint, opened for reading. Its manifest is intact and, with a key, authentic.
//
// Owner: the reader. Threads: all methods from any thread. Nothing here writes.
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
  // Return all sections, verified, unsealed and decompressed. kCorruption: the error names the section.
  Result<std::vector<Section>> read_sections() const;
  // Return the metadata that a user attached; reads only its section. kCorruption: it is damaged or too large.
  Result<Metadata> read_metadata() const;
  // Return the values of the sections, with the fingerprint; not yet validated.
  Result<EngineCheckpoint> read_state() const;
  // Return the records of one of the manifest's ranks. kCorruption: the error names the refs file.
  Result<RankRefs> refs(const RankSummary& rank) const;
  // Open all files of a rank, to read its records. kCorruption: a file is missing or has another size. `io` kFastest:
  // read from the disk, to check the disk; kCached: bytes that were written lately, for example by a pull, come from
  // memory.
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

// Fills `room` with the bytes of STATE at `offset`.
using StateReader = std::function<Status(uint64_t offset, std::span<std::byte> room)>;
// Return the metadata of the checkpoint with this MANIFEST. `read` is called once, for that section alone, or never if
// there is none. `state`: the name of STATE for messages. Errors: those of Checkpoint::read_metadata() and of `read`.
Result<Metadata> read_metadata(const OpenedManifest& opened, const std::string& state, const StateReader& read);

// Open the checkpoint in `directory`. `key` null: only unsealed checkpoints can be read. Errors: those of
// decode_manifest().
Result<Checkpoint> open_checkpoint_directory(std::unique_ptr<Directory> directory,
                                             std::shared_ptr<const Key> key = nullptr);
// Open the newest checkpoint of a directory of checkpoints. kNotFound: there is none. kCorruption: the newest is
// damaged.
Result<Checkpoint> open_latest(const Directory& store, std::shared_ptr<const Key> key = nullptr);
// Return whether an engine with this fingerprint can wake from the checkpoint. kIncompatible: the error names the
// checkpoint and each field that differs. `named`: the path by which it was opened; if that is a directory of
// checkpoints, the error also names the newest one there that fits.
Status check_fits(FileSystem& file_system, const Checkpoint& checkpoint, const Fingerprint& engine,
                  const std::string& named, const Key* key = nullptr);
// Open a checkpoint by its own path, or the newest one of a directory of checkpoints.
Result<Checkpoint> open_checkpoint(FileSystem& file_system, const std::string& path,
                                   std::shared_ptr<const Key> key = nullptr);

}  // namespace torpor
