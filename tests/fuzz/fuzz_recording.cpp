// SPDX-License-Identifier: Apache-2.0
// A recording with bytes from the fuzzer, and everybody who reads one. Head and parts have digests, which would keep
// the fuzzer out: so the first byte says whether the rest is the file, or events that get right ones. Whatever they
// say, they are folded, looked at for lints, and written as lines that are JSON.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "console/engine_view.h"
#include "console/event_export.h"
#include "console/lints.h"
#include "console/recording.h"
#include "tests/support/model_file_system.h"

namespace {

using namespace torpor;

void require(bool held) {
  if (!held) std::abort();
}

Status write_file(Directory& directory, const uint8_t* data, size_t size) {
  const std::span bytes(data, size);
  if (size > 0 && data[0] == 0) {
    TORPOR_ASSIGN_OR_RETURN(const auto file, directory.create_file("r.events"));
    return file->pwrite(std::as_bytes(bytes.subspan(1)), 0);
  }
  TORPOR_ASSIGN_OR_RETURN(
      const auto writer, console::RecordingWriter::create(
                             directory, "r", {.role = "core", .major = kEventSchemaMajor, .minor = kEventSchemaMinor}));
  std::vector<Event> events(size == 0 ? 0 : (size - 1) / sizeof(Event));
  for (size_t i = 0; i < events.size(); ++i) {
    std::memcpy(static_cast<void*>(&events[i]), data + 1 + i * sizeof(Event), sizeof(Event));
    if (size > 0 && data[0] % 2 == 1) events[i].sequence = i + 1;  // else they are mostly no sequence
  }
  return writer->write(events);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  test::ModelFileSystem files;
  const auto directory = files.open_directory("/r", true);
  if (!write_file(**directory, data, size)) return 0;
  const Result<console::SourceEvents> found = console::read_recording(**directory, "r.events");
  if (!found) return 0;
  console::EngineView view;
  console::Lints lints;
  uint64_t before = 0;
  for (const Event& event : found->events) {
    require(event.type == EventType::kLost || event.sequence > before);
    before = std::max(before, event.sequence);
    view.apply(event);
    lints.apply(event);
  }
  (void)lints.findings(view);
  (void)view.to_json().dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  auto writer = console::EventExport::create(console::ExportOptions{});
  (void)writer->write({*found}, console::EventExport::Format::kNdjson, [](std::string_view line) {
    require(nlohmann::json::accept(line));
    return true;
  });
  return 0;
}
