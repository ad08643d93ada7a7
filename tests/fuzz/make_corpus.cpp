// Writes the seed corpus: for each target what the real encoder makes. Run once when the format changes: make_corpus
// DIR.
#include <filesystem>
#include <fstream>

#include "checkpoint/manifest_codec.h"
#include "checkpoint/state_sections.h"
#include "engine/delivery/delivery_log_file.h"
#include "tests/support/example_state.h"

namespace {

void write(const std::filesystem::path& directory, const std::string& target, const torpor::Bytes& bytes) {
  std::filesystem::create_directories(directory / target);
  std::ofstream(directory / target / "example", std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace

int main(int argc, char** argv) {
  using namespace torpor;
  if (argc != 2) return 2;
  const std::filesystem::path directory = argv[1];
  const EngineCheckpoint state = test::example_checkpoint();
  for (const Section& section : encode(state)) write(directory, section.name, section.bytes);
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
  Answer answer{.request = state.state.scheduler.requests[0]};
  answer.request.output_token_ids.insert(answer.request.output_token_ids.end(), {7, 9});
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
  write(directory, "delivery_log", log);
  write(directory, "archive", {8, 1, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0});
  return 0;
}
