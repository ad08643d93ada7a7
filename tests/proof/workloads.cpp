// SPDX-License-Identifier: Apache-2.0
#include "tests/proof/workloads.h"

#include <fmt/core.h>

#include "base/watched_file_system.h"
#include "checkpoint/rank_writer.h"
#include "checkpoint/repair.h"
#include "checkpoint/verify.h"
#include "tests/support/written_checkpoint.h"

namespace torpor::proof {
namespace {

constexpr int kKeepAll = 1 << 20;

Result<std::unique_ptr<CheckpointManager>> manager_of(const World& world, const Variant& variant,
                                                      Retention retention = {.keep = kKeepAll},
                                                      bool incremental = false) {
  CheckpointManagerOptions options = variant.options;
  options.retention = retention;
  options.incremental = incremental;
  return CheckpointManager::open(world.file_system, world.directory, options);
}

EngineCheckpoint state_of(uint64_t generation) {
  EngineCheckpoint state = test::example_checkpoint();
  state.fingerprint["generation"] = std::to_string(generation);
  return state;
}

Error wrong(const char* what) { return Error{.what = what, .next_step = "mend it"}; }

Status write(const World& world, CheckpointManager& manager, const Variant& variant, uint64_t generation,
             uint64_t changed = 0) {
  const Digest owner = owner_of(test::example_checkpoint().fingerprint);  // of all: one engine that goes on
  TORPOR_ASSIGN_OR_RETURN(const std::string path,
                          test::write_checkpoint(manager, state_of(generation), variant.ranks, changed, owner));
  world.report(Word::kMust, generation);
  return ok();
}

Status first(const World& world, const Variant& variant) {
  TORPOR_ASSIGN_OR_RETURN(const auto manager, manager_of(world, variant));
  return write(world, *manager, variant, 1);
}

Status second(const World& world, const Variant& variant) {
  TORPOR_ASSIGN_OR_RETURN(const auto manager, manager_of(world, variant));
  TORPOR_RETURN_IF_ERROR(write(world, *manager, variant, 1));
  return write(world, *manager, variant, 2);
}

// The second and third link files of those before them, and write a block; then the first two go, and the third stays
// whole. (Where the one before cannot be read, all is written.)
Status incremental(const World& world, const Variant& variant) {
  TORPOR_ASSIGN_OR_RETURN(const auto manager, manager_of(world, variant, {.keep = kKeepAll}, true));
  TORPOR_RETURN_IF_ERROR(write(world, *manager, variant, 1));
  TORPOR_RETURN_IF_ERROR(write(world, *manager, variant, 2, 1));
  TORPOR_RETURN_IF_ERROR(write(world, *manager, variant, 3, 2));
  TORPOR_RETURN_IF_ERROR(manager->woken_from(3));
  TORPOR_ASSIGN_OR_RETURN(const auto frugal, manager_of(world, variant, {.keep = 1}, true));
  for (const uint64_t generation : {1, 2}) world.report(Word::kFree, generation);
  TORPOR_RETURN_IF_ERROR(frugal->collect());
  return ok();
}

// Every record is taken over unread.
Status take_all_over(PendingCheckpoint& pending, int32_t rank) {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<RankWriter> writer, pending.create_rank(rank));
  std::vector<SavedChunk> records;
  for (const KvBlock& block : test::example_checkpoint().state.kv.blocks) {
    const ChunkKey key{.kind = ChunkKind::kKvBlock, .tag = "kv_cache", .index = static_cast<uint64_t>(block.id)};
    TORPOR_ASSIGN_OR_RETURN(SavedChunk record, writer->take_over(key));
    records.push_back(std::move(record));
  }
  TORPOR_ASSIGN_OR_RETURN(RankSummary summary, writer->write_refs(records));
  pending.add_rank(std::move(summary));
  return ok();
}

// The second has all of its memory in files of the first, which then goes.
Status unread(const World& world, const Variant& variant) {
  TORPOR_ASSIGN_OR_RETURN(const auto manager, manager_of(world, variant, {.keep = kKeepAll}, true));
  TORPOR_RETURN_IF_ERROR(write(world, *manager, variant, 1));
  {
    TORPOR_ASSIGN_OR_RETURN(PendingCheckpoint pending, manager->begin(0));
    TORPOR_RETURN_IF_ERROR(pending.write_state(state_of(2)));
    for (int32_t rank = 0; rank < variant.ranks; ++rank) TORPOR_RETURN_IF_ERROR(take_all_over(pending, rank));
    TORPOR_ASSIGN_OR_RETURN(const std::string path, pending.commit());
    world.report(Word::kMust, 2);
  }
  world.report(Word::kFree, 1);
  return manager->remove(1);
}

// All is written again.
Status without_links(const World& world, const Variant& variant) {
  const auto refusing =
      make_watched_file_system(world.file_system, [](const char* call, const std::string& name) -> Status {
        if (std::string_view(call) == "link_new") return system_error(EXDEV, "cannot link " + name);
        return ok();
      });
  const World without{*refusing, world.directory, world.report};
  TORPOR_ASSIGN_OR_RETURN(const auto manager, manager_of(without, variant, {.keep = kKeepAll}, true));
  TORPOR_RETURN_IF_ERROR(write(without, *manager, variant, 1));
  TORPOR_RETURN_IF_ERROR(write(without, *manager, variant, 2));
  world.report(Word::kFree, 1);
  return manager->remove(1);
}

Status collect(const World& world, const Variant& variant) {
  TORPOR_ASSIGN_OR_RETURN(const auto manager, manager_of(world, variant));
  for (uint64_t generation = 1; generation <= 3; ++generation)
    TORPOR_RETURN_IF_ERROR(write(world, *manager, variant, generation));
  world.report(Word::kFree, 1);
  TORPOR_ASSIGN_OR_RETURN(const auto frugal, manager_of(world, variant, {.keep = 1}));
  TORPOR_RETURN_IF_ERROR(frugal->collect());  // the newest was not woken from: the one before it stays
  world.report(Word::kFree, 2);
  return frugal->woken_from(3);
}

Status repair(const World& world, const Variant& variant) {
  TORPOR_ASSIGN_OR_RETURN(const auto manager, manager_of(world, variant));
  TORPOR_RETURN_IF_ERROR(write(world, *manager, variant, 1));
  world.report(Word::kDamaged, 1);
  {
    TORPOR_ASSIGN_OR_RETURN(const auto directory,
                            world.file_system.open_directory(world.directory + "/g-000001", false));
    TORPOR_ASSIGN_OR_RETURN(const auto file, directory->open_slots("chunks-r0", FileIo::kPlain));
    const std::byte wrong[] = {std::byte{0xff}, std::byte{0xee}};
    TORPOR_RETURN_IF_ERROR(
        file->pwrite(wrong, 2 * 4096));  // of the second chunk, which is block 2, of the request "run"
  }
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint, manager->open_generation(1));
  TORPOR_ASSIGN_OR_RETURN(const Verification found, verify(checkpoint, {.threads = 1}));
  TORPOR_ASSIGN_OR_RETURN(const RepairPlan plan, plan_repair(checkpoint, found));
  // Others may have gone with it where their blocks could not be read just then.
  const bool dropped = std::any_of(plan.dropped_requests.begin(), plan.dropped_requests.end(),
                                   [](const DroppedRequest& request) { return request.id == "run"; });
  if (!dropped) return wrong("the repair kept a damaged request");
  TORPOR_RETURN_IF_ERROR(write_repaired(checkpoint, plan, *manager));
  world.report(Word::kMust, 2);
  return ok();
}

Status remove(const World& world, const Variant& variant) {
  TORPOR_ASSIGN_OR_RETURN(const auto manager, manager_of(world, variant));
  TORPOR_RETURN_IF_ERROR(write(world, *manager, variant, 1));
  TORPOR_RETURN_IF_ERROR(write(world, *manager, variant, 2));
  world.report(Word::kFree, 1);
  return manager->remove(1);
}

Status abandon(const World& world, const Variant& variant) {
  TORPOR_ASSIGN_OR_RETURN(const auto manager, manager_of(world, variant));
  TORPOR_RETURN_IF_ERROR(write(world, *manager, variant, 1));
  {
    TORPOR_ASSIGN_OR_RETURN(PendingCheckpoint pending, manager->begin(0));
    TORPOR_RETURN_IF_ERROR(pending.write_state(state_of(2)));
    TORPOR_RETURN_IF_ERROR(test::write_rank(pending, state_of(2).state.kv, 0));
  }
  CheckpointManagerOptions cancelled = variant.options;
  cancelled.progress = [](const Progress& progress) { return progress.phase == "writing the state"; };
  TORPOR_ASSIGN_OR_RETURN(const auto impatient, CheckpointManager::open(world.file_system, world.directory, cancelled));
  const Result<std::string> written = test::write_checkpoint(*impatient, state_of(2), variant.ranks);
  if (written || written.error().code != Code::kAborted)
    return written ? Status(wrong("it was not cancelled")) : Status(written.error());
  return write(world, *manager, variant, 2);
}

// A reader holds the first while the writer goes on and retires it: it reads it whole, or is told that it is gone.
Status with_reader(const World& world, const Variant& variant) {
  TORPOR_ASSIGN_OR_RETURN(const auto manager, manager_of(world, variant));
  TORPOR_RETURN_IF_ERROR(write(world, *manager, variant, 1));
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint reader, manager->open_latest());
  const auto read = [&]() -> Status {
    const Result<EngineCheckpoint> state = reader.read_state();
    if (state && state->fingerprint.at("generation") != "1") return wrong("the reader saw another checkpoint");
    return !state && state.error().code == Code::kCorruption ? Status(state.error()) : ok();
  };
  TORPOR_RETURN_IF_ERROR(read());
  TORPOR_RETURN_IF_ERROR(write(world, *manager, variant, 2));
  TORPOR_RETURN_IF_ERROR(read());
  TORPOR_RETURN_IF_ERROR(manager->woken_from(2));
  world.report(Word::kFree, 1);
  TORPOR_RETURN_IF_ERROR(manager->remove(1));
  TORPOR_RETURN_IF_ERROR(read());
  return write(world, *manager, variant, 3);
}

std::vector<Variant> make_variants() {
  std::array<uint8_t, kKeyBytes> secret{};
  secret.fill(7);
  const auto key = std::make_shared<const Key>(secret);
  std::vector<Variant> all;
  all.push_back({"plain", {}, 1});
  all.push_back({"authenticated", {.key = key}, 1});
  all.push_back({"encrypted", {.key = key, .encrypt = true}, 1});
  all.push_back({"compressed", {.compression = {.level = 1}}, 1});
  all.push_back({"two ranks", {}, 2});
  return all;
}

}  // namespace

const std::vector<Variant>& variants() {
  static const std::vector<Variant> all = make_variants();
  return all;
}

const std::vector<Workload>& workloads() {
  static const std::vector<Workload> all = {{"first commit", first},      {"second generation", second},
                                            {"incremental", incremental}, {"gc", collect},
                                            {"repair", repair},           {"rm", remove},
                                            {"abort", abandon},           {"concurrent reader", with_reader},
                                            {"no links", without_links},  {"unread", unread}};
  return all;
}

void Promise::hear(Word word, uint64_t generation) {
  if (word == Word::kMust) must.insert(generation);
  if (word == Word::kFree) must.erase(generation);
  if (word == Word::kDamaged) damaged.insert(generation), must.erase(generation);
}

std::string broken_promise(FileSystem& file_system, const std::string& directory, const Variant& variant,
                           const Promise& promise) {
  const World world{file_system, directory, [](Word, uint64_t) {}};
  const auto manager = manager_of(world, variant);
  if (!manager) return manager.error().to_string();
  std::set<uint64_t> whole;
  const auto look = [&]() -> std::string {
    const Result<std::vector<CheckpointInfo>> infos = (*manager)->list();
    if (!infos) return promise.must.empty() && infos.error().code == Code::kNotFound ? "" : infos.error().to_string();
    whole.clear();
    for (const CheckpointInfo& info : *infos) {
      const Result<Checkpoint> checkpoint = open_checkpoint(file_system, info.path, variant.options.key);
      if (!checkpoint) return fmt::format("{} is visible, but: {}", info.name, checkpoint.error().to_string());
      const uint64_t generation = checkpoint->manifest().generation;
      if (promise.damaged.contains(generation)) continue;
      const Result<Verification> found = verify(*checkpoint, {.threads = 1});
      if (!found) return found.error().to_string();
      if (!found->problems.empty())
        return fmt::format("{} is visible, but: {}", info.name, found->problems[0].to_string());
      whole.insert(generation);
    }
    for (const uint64_t generation : promise.must) {
      if (!whole.contains(generation))
        return fmt::format("generation {} was acknowledged and is not there", generation);
    }
    return "";
  };
  if (std::string problem = look(); !problem.empty()) return problem;
  // The next writer.
  const Result<std::string> next = test::write_checkpoint(**manager, test::example_checkpoint(), variant.ranks);
  if (!next) return fmt::format("the next writer fails: {}", next.error().to_string());
  if (std::string problem = look(); !problem.empty()) return "after the next writer: " + problem;
  const auto store = file_system.open_directory(directory, false);
  if (!store) return store.error().to_string();
  const Result<std::vector<Entry>> entries = (*store)->list();
  for (const Entry& entry : *entries) {
    if (entry.name != "LOCK" && !entry.name.starts_with("g-")) return fmt::format("{} is left over", entry.name);
  }
  return "";
}

}  // namespace torpor::proof
