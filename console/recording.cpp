// SPDX-License-Identifier: Apache-2.0
#include "console/recording.h"

#include <algorithm>
#include <cstring>

#include <fmt/core.h>

#include "console/schema.h"

namespace torpor::console {
namespace {

constexpr char kMagic[9] = "TORPOREC";
constexpr size_t kMostOfAPart = 1 << 16;  // events

struct PartHead {
  uint32_t mark = 0;
  uint32_t count = 0;
  uint64_t at = 0;  // where the part begins in the file: a part that was copied elsewhere is invalid
  Digest digest;    // of the preceding fields and the events
};
static_assert(sizeof(PartHead) == 32);
constexpr uint32_t kMark = 0x54525645;  // "EVRT"

Digest digest_of_part(const PartHead& head, std::span<const std::byte> events) {
  StreamingDigest digest;
  digest.update(std::as_bytes(std::span(&head, 1)).first(offsetof(PartHead, digest)));
  digest.update(events);
  return digest.finish();
}

}  // namespace

Result<std::unique_ptr<RecordingWriter>> RecordingWriter::create(Directory& directory, const std::string& name,
                                                                 const EventSource& source) {
  return try_catch([&]() -> Result<std::unique_ptr<RecordingWriter>> {
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<File> file, directory.create_file(name + std::string(kRecordingEnding)));
    std::unique_ptr<RecordingWriter> made(new RecordingWriter(std::move(file)));
    std::vector<std::byte> head(kEventHeadBytes);
    write_event_head(source, kMagic, head.data());
    TORPOR_RETURN_IF_ERROR(made->file_->pwrite(head, 0));
    TORPOR_RETURN_IF_ERROR(made->file_->sync());
    TORPOR_RETURN_IF_ERROR(directory.sync());
    made->end_ = head.size();
    return made;
  });
}

Status RecordingWriter::write(std::span<const Event> events) {
  if (!failed_) return failed_.error();
  while (!events.empty()) {
    const std::span<const Event> part = events.first(std::min(events.size(), kMostOfAPart));
    PartHead head{.mark = kMark, .count = static_cast<uint32_t>(part.size()), .at = end_};
    head.digest = digest_of_part(head, std::as_bytes(part));
    std::vector<std::byte> bytes(sizeof head + part.size_bytes());
    std::memcpy(bytes.data(), &head, sizeof head);
    std::memcpy(bytes.data() + sizeof head, part.data(), part.size_bytes());
    failed_ = file_->pwrite(bytes, end_);
    if (!failed_) return failed_.error();
    end_ += bytes.size();
    events = events.subspan(part.size());
  }
  return ok();
}

Status RecordingWriter::sync() {
  if (!failed_) return failed_.error();
  failed_ = file_->sync();  // final for this file
  return failed_ ? ok() : Status(failed_.error());
}

Result<SourceEvents> read_recording(const Directory& directory, const std::string& name) {
  return try_catch([&]() -> Result<SourceEvents> {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, directory.open_file(name));
    TORPOR_ASSIGN_OR_RETURN(const uint64_t size, file->size());
    std::vector<std::byte> head(std::min<uint64_t>(size, kEventHeadBytes));
    TORPOR_RETURN_IF_ERROR(file->pread(head, 0));
    Result<EventSource> source = read_event_head(kMagic, head);
    if (!source) return source.error().within(file->name());
    SourceEvents read{.source = std::move(*source), .path = directory.path() + "/" + name};
    uint64_t at = kEventHeadBytes;
    uint64_t next = 0;  // sequence
    while (size - at >= sizeof(PartHead)) {
      PartHead part;
      TORPOR_RETURN_IF_ERROR(file->pread(std::as_writable_bytes(std::span(&part, 1)), at));
      const uint64_t bytes = uint64_t{part.count} * sizeof(Event);
      if (part.mark != kMark || part.at != at || part.count == 0 || part.count > kMostOfAPart ||
          bytes > size - at - sizeof part)
        break;
      std::vector<Event> events(part.count);
      TORPOR_RETURN_IF_ERROR(file->pread(std::as_writable_bytes(std::span(events)), at + sizeof part));
      if (digest_of_part(part, std::as_bytes(std::span(events))) != part.digest) break;
      // Some version of torpor wrote an intact part: values that this version does not know are left to its readers.
      bool rising = true;
      for (const Event& event : events) {
        if (event.type == EventType::kLost) {
          read.lost += event.b;
          continue;
        }
        rising = rising && event.sequence > next;
        next = event.sequence;
      }
      if (!rising) break;
      read.events.insert(read.events.end(), events.begin(), events.end());
      at += sizeof part + bytes;
    }
    read.damaged = size - at;
    return read;
  });
}

}  // namespace torpor::console
