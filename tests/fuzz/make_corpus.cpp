// SPDX-License-Identifier: Apache-2.0
// Writes the seed corpus: for each target what the real encoder makes. Run once when the format changes: make_corpus
// DIR.
#include <filesystem>
#include <fstream>

#include "checkpoint/manifest_codec.h"
#include "checkpoint/refs_codec.h"
#include "checkpoint/state_sections.h"
#include "engine/delivery/delivery_log_file.h"
#include "engine/rank_orders.h"
#include "kvcache/transfer_plan.h"
#include "offload/bf16_codec.h"
#include "offload/segment_format.h"
#include "tests/support/example_state.h"

namespace {

void write(const std::filesystem::path& directory, const std::string& target, const torpor::Bytes& bytes,
           std::string_view name = "example") {
  std::filesystem::create_directories(directory / target);
  std::ofstream(directory / target / name, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

// With the number that tells fuzz_orders what it is.
torpor::Bytes numbered(size_t number, torpor::Bytes bytes) {
  bytes.insert(bytes.begin(), static_cast<uint8_t>(number));
  return bytes;
}

template <class Order>
void write_order(const std::filesystem::path& directory, const Order& order, const typename Order::Reply& reply) {
  using namespace torpor;
  static int written = 0;  // several are of one kind
  const Bytes encoded = encode_order(order);
  const std::string name = std::string(order_name(encoded)) + "_" + std::to_string(written++);
  write(directory, "orders", numbered(0, encoded), name);
  write(directory, "orders", numbered(1 + RankOrder(order).index(), encode_reply<Order>(reply)), name + "_answer");
}

void write_orders(const std::filesystem::path& directory, const torpor::RankSummary& saved) {
  using namespace torpor;
  const std::vector<std::string> tags{"weights", "kv_cache"};
  const RankLedger ledger{.tags = {{"weights", {.state = "attached", .region_bytes = 4000}}, {"kv_cache", {}}},
                          .device_capacity_bytes = 1 << 20,
                          .chunks_by_outcome = {{"completed", 3}}};
  write_order(directory, orders::Describe{},
              {.ledger = ledger, .bytes_per_block = 64, .writes = {{"weights", 2}}, .without_content = {"weights"}});
  write_order(directory, orders::Inform{.written = tags}, {});
  write_order(
      directory,
      orders::Save{.tags = tags,
                   .blocks = {1, 2, 7},
                   .directory = "/checkpoints/new",
                   .writing = {.protection = Protection::kEncrypted, .base = "/checkpoints/g-000001", .base_id = {1}}},
      {.bytes = 4000, .saved = saved, .digests = {{"weights", "00ff"}}});
  write_order(directory, orders::Undo{.what = orders::Undo::What::kSave, .tags = tags}, {});
  write_order(directory, orders::Undo{.what = orders::Undo::What::kReleasedPages, .tags = tags}, {});
  write_order(directory, orders::Detach{.tags = tags}, {.ledger = ledger, .bytes = 4096});
  write_order(directory, orders::Restore{.tags = tags}, {.bytes = 4000, .without_content = {"weights"}});
  write_order(directory, orders::Undo{.what = orders::Undo::What::kRestore, .tags = tags}, {});
  write_order(directory, orders::Finish{.tags = tags, .keep_backup = true}, {.ledger = ledger});
  write_order(directory, orders::DigestTags{.tags = tags}, {.bytes = 4000, .digests = {{"weights", "00ff"}}});
  orders::Restore from_checkpoint{.deferred = {3}};
  from_checkpoint.checkpoint = {.directory = "/checkpoints/g-000001", .generation = 1, .numbers = {4, -1}};
  write_order(directory, from_checkpoint, {.bytes = 4000, .deferred_bytes = 64});
  write_order(directory, orders::Extract{.image = "a", .blocks = {1, 2, 7}}, {.bytes = 192});
  write_order(directory,
              orders::ReadImage{
                  .image = "a", .blocks = {1, 2, 7}, .directory = "/checkpoints/g-000001", .generation = 1, .id = {1}},
              {.bytes = 192});
  write_order(directory,
              orders::SaveImage{.image = "a",
                                .directory = "/checkpoints/images/a/s-000001",
                                .writing = {.protection = Protection::kEncrypted}},
              {.bytes = 192, .saved = saved});
  write_order(directory, orders::VerifyImage{.image = "a"}, {.bytes = 192});
  write_order(directory, orders::Admit{.image = "a", .chunks = {0, 2}, .blocks = {5, 6}}, {.bytes = 128});
  write_order(directory, orders::DropImage{.image = "a"}, {.bytes = 192});
  write_order(directory, orders::CopyBlocks{.from = {3, 3}, .to = {8, 9}}, {.bytes = 128});
  write_order(directory, orders::Inform{.committed = "/checkpoints/g-000001"}, {});
  orders::Inform contents;
  contents.contents = {.id = {1}, .blocks = {1, 2, 7}, .versions = {4, 0, 6}, .steps = 9};
  write_order(directory, contents, {});
  write(directory, "orders",
        numbered(1, encode_error({.code = Code::kTimeout, .what = "late", .next_step = "wait", .native = -1})),
        "error_answer");
}

void write_transfers(const std::filesystem::path& directory) {
  using namespace torpor;
  TransferPlan plan{.number = 7, .dropped = {{StoreId::kHost, 3}, {StoreId::kDisk, 1}}};
  plan.add(10, PlanKind::kPut, StoreId::kDisk, TransferPriority::kOffload).count = 1;
  plan.add(11, PlanKind::kGet, StoreId::kHost, TransferPriority::kLoad).count = 2;
  plan.jobs.back().first = 1;
  plan.from = {4, 5, 6};
  plan.to = {0, 1, 9};
  plan.keys = {{.hash = {7}, .group = 1, .space = 1}};
  plan.loading = {{"request", 11}};
  write(directory, "transfers", plan.encode(), "plan");
  const TransferReport report{
      .rank = 1,
      .jobs = {{.id = 10}, {.id = 11, .count = 2, .code = Code::kIo, .cause = "the disk is full"}},
      .outcomes = {BlockOutcome::kTransferred, BlockOutcome::kFailed},
      .stores = {{StoreId::kDisk, false, 1, 2, 3, 4}}};
  write(directory, "transfers", report.encode(), "report");
}

void write_bf16(const std::filesystem::path& directory) {
  using namespace torpor;
  Bytes values;
  for (int i = 0; i < 140; ++i) {  // exponents 120 to 129, two far off, zeros
    const int word = i == 50 || i == 99 ? i << 7 : i % 9 == 0 ? 0 : ((120 + i % 10) << 7) + i;
    values.insert(values.end(), {static_cast<uint8_t>(word), static_cast<uint8_t>(word >> 8)});
  }
  Bytes packed(bf16::compressed_bound(values.size()));
  packed.resize(*bf16::compress_into(std::as_bytes(std::span(values)), std::as_writable_bytes(std::span(packed))));
  const auto promised = static_cast<uint8_t>(values.size());
  values.insert(values.begin(), {0, 0, 1});
  packed.insert(packed.begin(), {promised, 1, 0});
  write(directory, "bf16", values, "values");
  write(directory, "bf16", packed, "stored");
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
  RankRefs refs{.files = {{.name = "chunks-r0", .bytes = 8192}, {.name = "link", .id = {1}, .bytes = 8192}}};
  refs.records = {
      {.key = {.tag = "weights", .region = "w"}, .bytes = 4000, .offset = 4096, .stored_bytes = 4000, .file = 1},
      {.key = {.kind = ChunkKind::kKvBlock, .tag = "kv_cache", .index = 2},
       .bytes = 90,
       .codec = Codec::kZstd,
       .stored_bytes = 50}};
  const Bytes refs_file = encode_refs(refs, {}).file;
  write(directory, "refs", Bytes(refs_file.begin() + 64, refs_file.end()));
  manifest.ranks = {summary_of(refs)};
  manifest.ranks[0].refs = "refs-r0";
  manifest.ranks[0].refs_bytes = refs_file.size();
  write_orders(directory, manifest.ranks[0]);
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
  write_transfers(directory);
  write_bf16(directory);
  write(directory, "archive", {8, 1, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0});
  return 0;
}
