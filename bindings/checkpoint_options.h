// SPDX-License-Identifier: Apache-2.0
// The options of checkpoints from a Python dict: the same entries wherever they are read. Threads: those that hold the
// interpreter's lock.
#pragma once

#include <optional>
#include <string>

#include "bindings/bind_values.h"
#include "bindings/dict_reader.h"
#include "checkpoint/checkpoint_manager.h"

namespace torpor {

inline CheckpointManagerOptions checkpoint_options_from(DictReader& in) {
  CheckpointManagerOptions checkpoints;
  in.read_if_given("retain_checkpoints", checkpoints.retention.keep);
  in.read_if_given("retain_checkpoint_seconds", checkpoints.retention.max_age_seconds);
  in.read_if_given("retain_checkpoint_bytes", checkpoints.retention.max_total_bytes);
  std::optional<std::string> key_file;
  in.read_if_given("key_file", key_file);
  checkpoints.key = key_from(key_file);
  in.read_if_given("encrypt", checkpoints.encrypt);
  in.read_if_given("incremental", checkpoints.incremental);
  std::optional<std::string> codec;
  in.read_if_given("compression", codec);
  std::optional<int> level;
  in.read_if_given("compression_level", level);
  checkpoints.compression = value_or_raise(CompressionOptions::of(codec, level));
  return checkpoints;
}

}  // namespace torpor
