// SPDX-License-Identifier: Apache-2.0
// A recording: the events of one process in a file. RECORDING.md has the format.
//
// A process of its own (torpor record) writes it, never an engine: an engine writes no file. A recording that falls
// behind says which events it missed. If the recording process is killed, everything that it wrote stays. A loss of
// power loses what was not synced.
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
  // Make a new file, `name` with kRecordingEnding.
  static Result<std::unique_ptr<RecordingWriter>> create(Directory& directory, const std::string& name,
                                                         const EventSource& source);
  // Write one part of the file. After a failure all further calls fail, so the file stays intact.
  Status write(std::span<const Event> events);
  Status sync();
  uint64_t bytes() const { return end_; }

 private:
  RecordingWriter(std::unique_ptr<File> file) : file_(std::move(file)) {}
  std::unique_ptr<File> file_;
  uint64_t end_ = 0;
  Status failed_;
};

// Read all intact parts. kCorruption: even the head is damaged. kIncompatible: it has another major version of the
// schema.
Result<SourceEvents> read_recording(const Directory& directory, const std::string& name);

}  // namespace torpor::console
