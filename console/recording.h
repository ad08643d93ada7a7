// SPDX-License-Identifier: Apache-2.0
// A recording: the events of one process in a file. RECORDING.md has the format.
//
// It is written by a process of its own (torpor record), never by an engine: an engine writes to no file, and a
// recording that falls behind says what it missed. What was written when the recording process is killed stays; a loss
// of power takes what was not synced.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/event_ring.h"
#include "base/file_system.h"
#include "console/source_events.h"

namespace torpor::console {

inline constexpr std::string_view kRecordingEnding = ".events";

class RecordingWriter {
 public:
  // A new file, `name` with kRecordingEnding.
  static Result<std::unique_ptr<RecordingWriter>> create(Directory& directory, const std::string& name,
                                                         const EventSource& source);
  // One part of the file. After a failure nothing more is written: what is there is whole.
  Status write(std::span<const Event> events);
  Status sync();
  uint64_t bytes() const { return end_; }

 private:
  RecordingWriter(std::unique_ptr<File> file) : file_(std::move(file)) {}
  std::unique_ptr<File> file_;
  uint64_t end_ = 0;
  Status failed_;
};

// All that is whole. kCorruption: not even its head is; kIncompatible: of another major version of the schema.
Result<SourceEvents> read_recording(const Directory& directory, const std::string& name);

}  // namespace torpor::console
