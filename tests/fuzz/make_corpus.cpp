// Writes the seed corpus: for each target what the real encoder makes. Run once when the format changes: make_corpus
// DIR.
#include <filesystem>
#include <fstream>

#include "checkpoint/answers_log.h"
#include "checkpoint/journal.h"
#include "checkpoint/manifest_codec.h"
#include "checkpoint/state_sections.h"
#include "offload/segment_format.h"
#include "tests/support/example_state.h"

namespace {

void write(const std::filesystem::path& directory, const std::string& target, const torpor::Bytes& bytes,
           const std::string& name = "example") {
  std::filesystem::create_directories(directory / target);
  std::ofstream(directory / target / name, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace

int main(int argc, char** argv) {
  using namespace torpor;
  if (argc != 2) return 2;
  const std::filesystem::path directory = argv[1];
  const EngineCheckpoint state = test::example_checkpoint();
  for (const Section& section : encode(state)) write(directory, section.name, section.bytes);
  SchedulerCheckpoint later = state.state;
  later.scheduler.requests[0].output_token_ids.push_back(7);
  later.kv.free_order.push_back(3);
  later.scheduler.requests.push_back(test::example_request("new", RequestStatus::kWaiting, 3, 0, 0));
  Journal journal;
  if (const auto step = step_between(state.state, later)) journal.append(*step);
  write(directory, "journal", journal.section().bytes);
  Manifest manifest{.generation = 3, .creator = "torpor", .fingerprint = state.fingerprint};
  manifest.sections = {{.name = "requests", .stored_bytes = 10, .bytes = 30, .codec = Codec::kZstd}};
  manifest.ranks = {
      {.files = {{.name = "chunks-r0", .bytes = 8192}, {.generation = 1, .name = "chunks-r0", .bytes = 8192}},
       .chunks = {{.key = {.tag = "weights", .region = "w"},
                   .bytes = 4000,
                   .offset = 4096,
                   .stored_bytes = 4000,
                   .file = 1}}}};
  const Bytes file = encode_manifest(manifest);
  write(directory, "manifest", Bytes(file.begin() + 128, file.end()));
  Answer answer{.request = later.scheduler.requests[0]};
  answer.request.output_token_ids.push_back(9);
  write(directory, "answers",
        pack_answers({answer, Answer{.request = {.id = "wait"}, .state = AnswerState::kFinished},
                      Answer{.request = test::example_request("late", RequestStatus::kWaiting, 3, 0, 0)}}));
  const Answer asked{.request = test::example_request("asked", RequestStatus::kWaiting, 3, 0, 0), .response = "r"};
  Answer given{
      .request = test::example_request("given", RequestStatus::kWaiting, 3, 2, 0), .response = "r", .choice = 1};
  given.text = "zw\xc3\xb6lf";
  given.text_ends = {2, 5};
  Bytes log{1};
  for (const Bytes& record :
       {engine_record({{"model", "a"}}), answer_record(asked), answer_record(given), whole_record(),
        steps_record({{.id = "asked", .tokens = {1, 2}, .text = "two"}}),
        steps_record({{.id = "asked", .at = 2, .tokens = {3}, .state = AnswerState::kFinished}})}) {
    log.push_back(static_cast<uint8_t>(record.size() % 256));
    log.push_back(static_cast<uint8_t>(record.size() / 256));
    log.insert(log.end(), record.begin(), record.end());
  }
  write(directory, "answers_log", log);
  const SegmentHeader header{.slots = 64, .id = {1}};
  const SegmentRecord record{.hash = {7}, .position = 3, .offset = 2 * kPage, .stored = 100, .bytes = 100};
  Bytes segment(3 * kPage);
  const std::span<std::byte> pages = std::as_writable_bytes(std::span(segment));
  write_header(pages.first(kPage), header, nullptr);
  write_batch(pages.subspan(kPage, kPage), header, kPage, {&record, 1}, nullptr);
  Bytes beginnings{0};
  for (size_t page = 0; page < 3; ++page)
    beginnings.insert(beginnings.end(), segment.begin() + static_cast<std::ptrdiff_t>(page * kPage),
                      segment.begin() + static_cast<std::ptrdiff_t>(page * kPage + 256));
  write(directory, "segment", beginnings);
  write(directory, "segment",
        {1, 0, 0, 1,  50, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9,  // a batch of one record
         1, 0, 2, 60, 0,  0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 0, 3, 60, 1, 20, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9},
        "records");
  write(directory, "archive", {8, 1, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0});
  return 0;
}
