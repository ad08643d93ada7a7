// SPDX-License-Identifier: Apache-2.0
// cat, extract: the bytes themselves.
#include <algorithm>

#include <fcntl.h>
#include <unistd.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/page_buffer.h"
#include "base/progress.h"
#include "checkpoint/checkpoint.h"
#include "tools/torpor/text.h"

namespace torpor::cli {
namespace {

Result<Json> cat(const Context& context) {
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          open_checkpoint(context.file_system, context.arguments.path, context.key));
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Section> sections, checkpoint.read_sections());
  std::vector<std::string> names;
  for (const Section& section : sections) {
    if (section.name == context.arguments.second)
      return Json{{"path", checkpoint.path()},
                  {"section", section.name},
                  {"bytes", section.bytes.size()},
                  {"content", Json::binary(section.bytes)}};
    names.push_back(section.name);
  }
  return Error{.code = Code::kNotFound,
               .what = fmt::format("there is no section \"{}\"", context.arguments.second),
               .next_step = fmt::format("there are {}", fmt::join(names, ", "))};
}

// Writes all to a file that must not exist yet; what was written of it goes away if that fails.
class NewFile {
 public:
  static Result<NewFile> create(const std::string& path) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
      return system_error(errno, fmt::format("cannot create {}", path), "name a file that does not exist yet");
    return NewFile(fd, path);
  }
  NewFile(NewFile&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)), kept_(other.kept_) {}
  ~NewFile() {
    if (fd_ < 0) return;
    ::close(fd_);
    if (!kept_) ::unlink(path_.c_str());
  }
  Status write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t put = ::write(fd_, bytes.data(), bytes.size());
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) return system_error(errno, fmt::format("cannot write {}", path_));
      bytes = bytes.subspan(static_cast<size_t>(put));
    }
    return ok();
  }
  void keep() { kept_ = true; }

 private:
  NewFile(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_;
  std::string path_;
  bool kept_ = false;
};

// The saved memory whose name begins with what was asked for: "weights", "weights/params", "kv_cache block 17".
Result<Json> extract(const Context& context) {
  const std::string& wanted = context.arguments.second;
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          open_checkpoint(context.file_system, context.arguments.path, context.key));
  const auto matches = [&](const SavedChunk& chunk) {
    return chunk.key.to_string() == wanted || chunk.key.tag == wanted ||
           (chunk.key.kind == ChunkKind::kRegion && fmt::format("{}/{}", chunk.key.tag, chunk.key.region) == wanted);
  };
  uint64_t total = 0;
  for (const RankSummary& rank : checkpoint.manifest().ranks) {
    TORPOR_ASSIGN_OR_RETURN(const RankRefs refs, checkpoint.refs(rank));
    for (const SavedChunk& chunk : refs.records) total += matches(chunk) ? chunk.bytes : 0;
  }
  TORPOR_ASSIGN_OR_RETURN(NewFile file, NewFile::create(context.arguments.output));
  ProgressMeter progress(context.progress, "extracting", total);
  uint64_t bytes = 0;
  Json chunks = Json::array();
  PageBuffer memory;
  for (const RankSummary& rank : checkpoint.manifest().ranks) {
    TORPOR_ASSIGN_OR_RETURN(const RankRefs refs, checkpoint.refs(rank));
    std::unique_ptr<DiskTier> tier;
    for (const SavedChunk& chunk : refs.records) {
      if (!matches(chunk)) continue;
      const std::string name = chunk.key.to_string();
      if (tier == nullptr) {
        TORPOR_ASSIGN_OR_RETURN(tier, checkpoint.open_rank(rank));
      }
      const std::span<std::byte> room = memory.room(chunk.bytes);
      if (room.size() < chunk.bytes)
        return Error{
            .code = Code::kResourceExhausted, .what = fmt::format("no memory for {}", name), .next_step = "free some"};
      const std::span<std::byte> content = room.first(chunk.bytes);
      TORPOR_RETURN_IF_ERROR(tier->get_one(chunk, content));
      if (digest_of(content) != chunk.digest)
        return Error{.code = Code::kCorruption,
                     .what = fmt::format("{} does not match its digest", name),
                     .next_step = "see torpor verify"};
      TORPOR_RETURN_IF_ERROR(file.write(content));
      chunks.push_back({{"rank", rank.rank}, {"name", name}, {"at", bytes}, {"bytes", chunk.bytes}});
      bytes += chunk.bytes;
      TORPOR_RETURN_IF_ERROR(progress.add(chunk.bytes));
    }
  }
  if (chunks.empty())
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("nothing saved is called \"{}\"", wanted),
                 .next_step = "use a tag, TAG/REGION, or \"TAG block N\"; see torpor tree and torpor blocks"};
  file.keep();
  return Json{
      {"path", checkpoint.path()}, {"file", context.arguments.output}, {"bytes", bytes}, {"chunks", std::move(chunks)}};
}

std::string show_extract(const Json& json) {
  return fmt::format("{}: {} from {} chunks\n", cell(json["file"]), size_text(json["bytes"]), json["chunks"].size());
}

}  // namespace

Verb cat_verb() {
  return {.name = "cat",
          .help = "a section's bytes, verified and decompressed, to standard output",
          .json = "path, section, bytes, content: {bytes, subtype}",
          .declare =
              [](CLI::App& app, Arguments& a) {
                declare_path(app, a);
                app.add_option("section", a.second, "its name, see torpor info")->required();
              },
          .ask = cat,
          .show = [](const Json&) { return std::string(); },
          .raw = true};
}
Verb extract_verb() {
  return {.name = "extract",
          .help = "saved memory into a new file: a tag, a region, or one KV block",
          .json = "path, file, bytes, chunks: [{rank, name, at, bytes}]",
          .declare =
              [](CLI::App& app, Arguments& a) {
                declare_path(app, a);
                app.add_option("what", a.second, "a tag, TAG/REGION, or \"TAG block N\"")->required();
                app.add_option("-o,--output", a.output, "the file; must not exist yet")->required()->type_name("FILE");
              },
          .ask = extract,
          .show = show_extract};
}

}  // namespace torpor::cli
