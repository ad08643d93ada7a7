// SPDX-License-Identifier: Apache-2.0
#include "tools/torpor/images.h"

#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <boost/filesystem.hpp>

#include "checkpoint/image_section.h"
#include "checkpoint/image_store.h"
#include "checkpoint/store_names.h"
#include "checkpoint/verify.h"
#include "scheduler_state/fork_ancestry.h"
#include "tools/torpor/text.h"

namespace torpor::cli {
namespace {

boost::filesystem::path plain(const std::string& path) { return plain_path(path); }

// The name of the image at DIRECTORY/images/NAME/g-000001.
std::string image_name(const Checkpoint& image) { return plain(image.path()).parent_path().filename().string(); }

Json optional_json(const std::optional<int64_t>& value) { return value ? Json(*value) : Json(); }

// Return the blocks of a request, in token order, of all groups.
std::vector<int32_t> table_of(const KvSnapshot& kv, const std::string& id) {
  std::vector<int32_t> blocks;
  for (const KvGroup& group : kv.groups) {
    for (const KvTable& table : group.tables) {
      if (table.request == id) blocks.insert(blocks.end(), table.blocks.begin(), table.blocks.end());
    }
  }
  return blocks;
}

// Return the forks that led to a request; none, and a problem more, if what says so is damaged.
std::vector<ForkStep> forks_of(const RequestState& request, Json& problems) {
  Result<std::vector<ForkStep>> steps = fork_ancestry(request);
  if (steps) return std::move(*steps);
  problems.push_back(cli::to_json(steps.error()));
  return {};
}

// --- tree ---

// Names in the image's directories that no image has.
Result<Json> foreign_files(const Context& context, const Checkpoint& image) {
  std::set<std::string, std::less<>> known = {std::string(kManifestFile), std::string(kStateFile)};
  for (const RankSummary& rank : image.manifest().ranks) {
    known.insert(rank.refs);
    for (const LinkedFile& file : rank.files) known.insert(file.name);
  }
  const boost::filesystem::path place = plain(image.path());
  const std::string own = place.filename().string();
  Json foreign = Json::array();
  TORPOR_ASSIGN_OR_RETURN(const auto directory, context.file_system.open_directory(image.path(), false));
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> files, directory->list());
  for (const Entry& entry : files) {
    if (!known.contains(entry.name) && !is_ended_note(entry.name))
      foreign.push_back(fmt::format("{}/{}", own, entry.name));
  }
  if (place.parent_path().parent_path().filename().string() != kImagesDirectory) return foreign;  // a copy elsewhere
  TORPOR_ASSIGN_OR_RETURN(const auto store, context.file_system.open_directory(place.parent_path().string(), false));
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> beside, store->list());
  for (const Entry& entry : beside) {
    const bool is_own = entry.name == own || entry.name == kLockFile || is_leftover(entry);
    if (!is_own) foreign.push_back(entry.name);
  }
  return foreign;
}

struct SavedBlocks {
  std::map<uint64_t, uint64_t> bytes{};  // by block, of all ranks
  uint64_t all_bytes = 0;
  uint64_t stored_bytes = 0;
};

// Return what is saved of each block. Refs that are damaged are among the problems of the verification.
SavedBlocks saved_blocks(const Checkpoint& image) {
  SavedBlocks saved;
  for (const RankSummary& rank : image.manifest().ranks) {
    const Result<RankRefs> refs = image.refs(rank);
    if (!refs) continue;
    for (const SavedChunk& chunk : refs->records) {
      saved.bytes[chunk.key.index] += chunk.bytes;
      saved.all_bytes += chunk.bytes;
      saved.stored_bytes += chunk.stored_bytes;
    }
  }
  return saved;
}

// Return the blocks that several owners hold.
std::set<int32_t> shared_blocks(const KvSnapshot& kv) {
  std::set<int32_t> shared;
  for (const KvBlock& block : kv.blocks) {
    if (block.ref_count > 1) shared.insert(block.id);
  }
  return shared;
}

Json request_of(const EngineCheckpoint& engine, const RequestState& request, bool ended,
                const std::set<int32_t>& several, const SavedBlocks& saved, const Verification& found, bool read,
                Json& problems) {
  const std::vector<int32_t> blocks = table_of(engine.state.kv, request.id);
  uint64_t bytes = 0;
  size_t shared = 0;
  bool damaged = !blocks.empty() && !found.bad_ranks.empty();
  for (const int32_t block : blocks) {
    const auto of_block = saved.bytes.find(static_cast<uint64_t>(block));
    bytes += of_block == saved.bytes.end() ? 0 : of_block->second;
    shared += several.count(block);
    damaged |= std::binary_search(found.bad_blocks.begin(), found.bad_blocks.end(), block);
  }
  Json forks = Json::array();
  for (const ForkStep& step : forks_of(request, problems))
    forks.push_back({{"request", step.request}, {"at", step.at}});
  return Json{{"id", request.id},
              {"status", name(request.status)},
              {"ended", ended},
              {"prompt_tokens", request.prompt_token_ids.size()},
              {"output_tokens", request.output_token_ids.size()},
              {"computed_tokens", request.num_computed_tokens},
              {"seed", optional_json(request.sampling.seed)},
              {"blocks", blocks.size()},
              {"shared_blocks", shared},
              {"bytes", bytes},
              {"digests", damaged          ? "damaged"
                          : blocks.empty() ? "no KV"
                          : read           ? "whole"
                                           : "not read"},
              {"forked", std::move(forks)}};
}

Result<Json> image_of(const Context& context, const Checkpoint& image) {
  const bool read = !context.arguments.quick;
  TORPOR_ASSIGN_OR_RETURN(
      const Verification found,
      verify(image, {.threads = context.arguments.threads, .contents = read, .progress = context.progress}));
  TORPOR_ASSIGN_OR_RETURN(const auto directory, context.file_system.open_directory(image.path(), false));
  TORPOR_ASSIGN_OR_RETURN(const std::set<int32_t> ended, ended_in(*directory));
  TORPOR_ASSIGN_OR_RETURN(Json foreign, foreign_files(context, image));
  const Manifest& manifest = image.manifest();
  const SavedBlocks saved = saved_blocks(image);
  Json problems = Json::array();
  for (const Error& problem : found.problems) problems.push_back(cli::to_json(problem));
  Json requests = Json::array();
  if (const Result<EngineCheckpoint> engine = image.read_state()) {
    const std::set<int32_t> several = shared_blocks(engine->state.kv);
    int32_t position = 0;
    for (const RequestState& request : engine->state.scheduler.requests) {
      const bool has_ended = ended.contains(position++);
      requests.push_back(request_of(*engine, request, has_ended, several, saved, found, read, problems));
    }
  }
  uint64_t refs_bytes = 0;
  uint64_t own_bytes = 0;
  for (const RankSummary& rank : manifest.ranks) refs_bytes += rank.refs_bytes, own_bytes += rank.own_bytes();
  const char* const digests = !problems.empty() ? "damaged" : read ? "whole" : "not read";
  return Json{{"id", image_name(image)},
              {"path", image.path()},
              {"readable", true},
              {"created", time_text(manifest.created_unix_seconds)},
              {"creator", manifest.creator},
              {"ranks", manifest.ranks.size()},
              {"tier", "disk"},
              {"bytes", manifest.total_bytes()},
              {"state_bytes", manifest.total_bytes() - own_bytes - refs_bytes},
              {"kv_bytes", saved.all_bytes},
              {"kv_stored_bytes", saved.stored_bytes},
              {"digests", digests},
              {"problems", std::move(problems)},
              {"foreign", std::move(foreign)},
              {"requests", std::move(requests)}};
}

Json unreadable(const std::string& name, const std::string& path, const Error& error) {
  Json problems = Json::array();
  problems.push_back(cli::to_json(error));
  return Json{{"id", name}, {"path", path}, {"readable", false}, {"problems", std::move(problems)}};
}

// The requests of all images as trees of forks, with those from which they were forked and which are in none.
class Forest {
 public:
  void add(const Json& image) {
    for (const Json& request : image.value("requests", Json::array())) {
      const std::string id = request["id"];
      Node& node = nodes_[id];
      if (node.detail.is_null()) node.detail = {{"image", image["id"]}, {"seed", request["seed"]}};
      std::string parent;
      const Json* before = nullptr;
      for (const Json& step : request["forked"]) {
        if (before != nullptr) link(step["request"], parent, (*before)["at"]);
        parent = step["request"];
        before = &step;
      }
      if (before != nullptr) link(id, parent, (*before)["at"]);
    }
  }
  // Only trees that some fork made.
  Json trees() const {
    Json roots = Json::array();
    for (const auto& [id, node] : nodes_) {
      if (node.parent.empty() && !node.children.empty()) roots.push_back(tree(id));
    }
    return roots;
  }

 private:
  struct Node {
    std::string parent{};
    std::set<std::string> children{};
    Json at{};
    Json detail{};
  };
  // Values of an image may contradict those of another: the first word counts, and nobody is its own ancestor.
  void link(const std::string& child, const std::string& parent, const Json& at) {
    Node& node = nodes_[child];
    if (!node.parent.empty()) return;
    for (std::string above = parent; !above.empty(); above = nodes_[above].parent) {
      if (above == child) return;
    }
    node.parent = parent;
    node.at = at;
    nodes_[parent].children.insert(child);
  }
  Json tree(const std::string& id) const {
    const Node& node = nodes_.at(id);
    const bool here = !node.detail.is_null();
    Json json = {{"request", id},
                 {"at", node.at},
                 {"image", here ? node.detail["image"] : Json()},
                 {"seed", here ? node.detail["seed"] : Json()},
                 {"children", Json::array()}};
    for (const std::string& child : node.children) json["children"].push_back(tree(child));
    return json;
  }
  std::map<std::string, Node> nodes_;
};

Json answer(const std::string& path, Json images) {
  Forest forest;
  uint64_t bytes = 0;
  for (const Json& image : images) {
    forest.add(image);
    bytes += image.value("bytes", uint64_t{0});
  }
  return Json{{"path", path},
              {"bytes_by_tier", {{"disk", bytes}}},
              {"images", std::move(images)},
              {"forks", forest.trees()},
              {"foreign", Json::array()},
              {"leftovers", Json::array()}};
}

Json node(std::string name, std::string detail) {
  return {{"name", std::move(name)}, {"detail", std::move(detail)}, {"children", Json::array()}};
}

Json fork_node(const Json& fork) {
  std::string detail;
  if (!fork["at"].is_null()) detail += fmt::format("at output token {}, ", cell(fork["at"]));
  if (!fork["seed"].is_null()) detail += fmt::format("seed {}, ", cell(fork["seed"]));
  detail += fork["image"].is_null() ? "in no image here" : fmt::format("image {}", cell(fork["image"]));
  Json made = node(fork["request"], detail);
  for (const Json& child : fork["children"]) made["children"].push_back(fork_node(child));
  return made;
}

Json request_node(const Json& request) {
  std::string detail = fmt::format("{}, {} + {} tokens", cell(request["status"]), cell(request["prompt_tokens"]),
                                   cell(request["output_tokens"]));
  if (!request["seed"].is_null()) detail += fmt::format(", seed {}", cell(request["seed"]));
  if (request["blocks"] != 0)
    detail += fmt::format(", {} blocks ({} shared), {}", cell(request["blocks"]), cell(request["shared_blocks"]),
                          size_text(request["bytes"]));
  detail += fmt::format(", digests: {}", cell(request["digests"]));
  if (request["ended"]) detail += ", ended since";
  return node(request["id"], detail);
}

Json image_node(const Json& image) {
  if (!image["readable"]) return node(image["id"], fmt::format("not readable: {}", cell(image["problems"][0]["what"])));
  Json made = node(image["id"],
                   fmt::format("{} on {}, {} of KV, {}, digests: {}", size_text(image["bytes"]), cell(image["tier"]),
                               size_text(image["kv_bytes"]), cell(image["created"]), cell(image["digests"])));
  for (const Json& request : image["requests"]) made["children"].push_back(request_node(request));
  for (const Json& problem : image["problems"])
    made["children"].push_back(node(fmt::format("{}:", cell(problem["code"])), cell(problem["what"])));
  for (const Json& name : image["foreign"]) made["children"].push_back(node(name, "is no file of an image"));
  return made;
}

void show_branch(const Json& node, const std::string& indent, std::string& text) {
  for (size_t i = 0; i < node["children"].size(); ++i) {
    const Json& child = node["children"][i];
    const bool last = i + 1 == node["children"].size();
    const std::string detail = cell(child["detail"]);
    text += fmt::format("{}{}{}{}{}\n", indent, last ? "└─ " : "├─ ", cell(child["name"]), detail.empty() ? "" : "  ",
                        detail);
    show_branch(child, indent + (last ? "   " : "│  "), text);
  }
}

// --- diff ---

struct Side {
  const Checkpoint& checkpoint;
  EngineCheckpoint engine;
  std::map<std::pair<int32_t, uint64_t>, std::string> digests;  // rank, block -> digest
  std::map<std::string, std::vector<ForkStep>> forks;           // by request
  Json problems = Json::array();
};

Result<Side> read(const Checkpoint& checkpoint) {
  TORPOR_ASSIGN_OR_RETURN(EngineCheckpoint engine, checkpoint.read_state());
  Side side{
      .checkpoint = checkpoint, .engine = std::move(engine), .digests = {}, .forks = {}, .problems = Json::array()};
  for (const RankSummary& rank : checkpoint.manifest().ranks) {
    TORPOR_ASSIGN_OR_RETURN(const RankRefs refs, checkpoint.refs(rank));
    for (const SavedChunk& chunk : refs.records) {
      if (chunk.key.kind == ChunkKind::kKvBlock) side.digests[{rank.rank, chunk.key.index}] = chunk.digest.hex();
    }
  }
  for (const RequestState& request : side.engine.state.scheduler.requests)
    side.forks[request.id] = forks_of(request, side.problems);
  return side;
}

// Return how requests `a` and `b`, of one side each, belong together: "id", "fork" (one was forked from the other),
// "siblings" (both were forked from one request) or "".
std::string relation(const std::string& a, const std::vector<ForkStep>& of_a, const std::string& b,
                     const std::vector<ForkStep>& of_b) {
  const auto has = [](const std::vector<ForkStep>& steps, const std::string& id) {
    return std::any_of(steps.begin(), steps.end(), [&](const ForkStep& step) { return step.request == id; });
  };
  if (a == b) return "id";
  if (has(of_a, b) || has(of_b, a)) return "fork";
  const bool common =
      std::any_of(of_a.begin(), of_a.end(), [&](const ForkStep& step) { return has(of_b, step.request); });
  return common ? "siblings" : "";
}

// Compare two requests token by token, and their blocks by the digests of all ranks.
Json pair_of(const Side& a, const RequestState& left, const Side& b, const RequestState& right, std::string by) {
  const auto tokens = [](const RequestState& request) {
    std::vector<int32_t> all = request.prompt_token_ids;
    all.insert(all.end(), request.output_token_ids.begin(), request.output_token_ids.end());
    return all;
  };
  const std::vector<int32_t> of_left = tokens(left);
  const std::vector<int32_t> of_right = tokens(right);
  const auto differ = std::mismatch(of_left.begin(), of_left.end(), of_right.begin(), of_right.end());
  const std::vector<int32_t> blocks = table_of(a.engine.state.kv, left.id);
  const std::vector<int32_t> others = table_of(b.engine.state.kv, right.id);
  const auto digests = [](const Side& side, int32_t block) {
    std::vector<std::string> all;
    for (const RankSummary& rank : side.checkpoint.manifest().ranks) {
      const auto found = side.digests.find({rank.rank, static_cast<uint64_t>(block)});
      all.push_back(found == side.digests.end() ? "" : found->second);
    }
    return all;
  };
  uint64_t equal = 0;
  for (size_t i = 0; i < std::min(blocks.size(), others.size()); ++i)
    equal += static_cast<uint64_t>(digests(a, blocks[i]) == digests(b, others[i]));
  Json fields = Json::array();
  const auto compare = [&](const char* field, bool same) {
    if (!same) fields.push_back(field);
  };
  compare("status", left.status == right.status);
  compare("tokens", of_left == of_right && left.prompt_token_ids == right.prompt_token_ids);
  compare("computed", left.num_computed_tokens == right.num_computed_tokens);
  compare("max_tokens", left.max_tokens == right.max_tokens);
  compare("sampling", left.sampling == right.sampling);
  if (by == "id" && fields.empty()) {
    RequestState other = right;
    other.block_hashes = left.block_hashes;  // they follow from the tokens
    other.block_hash_bytes = left.block_hash_bytes;
    compare("others", left == other);  // such as its priority, or what the adapter keeps of it
  }
  return {{"a", left.id},
          {"b", right.id},
          {"by", std::move(by)},
          {"common_tokens", differ.first - of_left.begin()},
          {"tokens", {of_left.size(), of_right.size()}},
          {"seeds", {optional_json(left.sampling.seed), optional_json(right.sampling.seed)}},
          {"fields", std::move(fields)},
          {"equal_blocks", equal},
          {"blocks", {blocks.size(), others.size()}}};
}

Json fingerprint_differences(const Fingerprint& a, const Fingerprint& b) {
  Json fields = Json::array();
  std::map<std::string, std::pair<std::string, std::string>> both;
  for (const auto& [field, value] : a) both[field].first = value;
  for (const auto& [field, value] : b) both[field].second = value;
  for (const auto& [field, values] : both) {
    if (values.first != values.second) fields.push_back(field);
  }
  return fields;
}

}  // namespace

bool is_directory_of_images(const Context& context, const std::string& path) {
  if (plain(path).filename().string() != kImagesDirectory) return false;
  const auto directory = context.file_system.open_directory(path, false);
  if (!directory || (*directory)->open_file(kManifestFile)) return false;
  const Result<std::vector<uint64_t>> generations = generations_in(**directory);
  return generations && generations->empty();
}

Result<Json> tree_of_images(const Context& context) {
  const std::string& path = context.arguments.path;
  ImageStore store(context.file_system, plain(path).parent_path().string(), {.key = context.key});
  TORPOR_ASSIGN_OR_RETURN(const std::vector<ImageInfo> found, store.list());
  std::set<std::string, std::less<>> names;
  Json images = Json::array();
  for (const ImageInfo& info : found) {
    names.insert(info.name);
    const Result<Json> entry = [&]() -> Result<Json> {
      if (!info.readable) return info.problem;
      TORPOR_ASSIGN_OR_RETURN(const Checkpoint image, open_checkpoint(context.file_system, info.path, context.key));
      if (!is_image(image.manifest()))
        return Error{.code = Code::kIncompatible,
                     .what = fmt::format("{} is a checkpoint of a whole engine", info.path),
                     .next_step = "wake it: wake_up(from_checkpoint=…)"};
      return image_of(context, image);
    }();
    if (!entry && entry.error().code == Code::kAborted) return entry.error();
    images.push_back(entry ? *entry : unreadable(info.name, info.path, entry.error()));
  }
  Json json = answer(path, std::move(images));
  TORPOR_ASSIGN_OR_RETURN(const auto directory, context.file_system.open_directory(path, false));
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, directory->list());
  TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> left, store.remove_leftovers(/*dry_run=*/true));
  for (const Entry& entry : entries) {
    if (names.contains(entry.name)) continue;
    const bool is_left = std::find(left.begin(), left.end(), entry.name) != left.end();
    json[is_left ? "leftovers" : "foreign"].push_back(entry.name);
  }
  return json;
}

Result<Json> tree_of_image(const Context& context, const Checkpoint& image) {
  Json images = Json::array();
  TORPOR_ASSIGN_OR_RETURN(Json entry, image_of(context, image));
  images.push_back(std::move(entry));
  return answer(context.arguments.path, std::move(images));
}

std::string show_tree_of_images(const Json& json) {
  Json root = node(json["path"], "");
  for (const Json& image : json["images"]) root["children"].push_back(image_node(image));
  if (!json["forks"].empty()) {
    Json forks = node("forks", "");
    for (const Json& fork : json["forks"]) forks["children"].push_back(fork_node(fork));
    root["children"].push_back(std::move(forks));
  }
  for (const Json& name : json["leftovers"])
    root["children"].push_back(node(name, "left of an image that was not completed, or was taken; see torpor gc"));
  for (const Json& name : json["foreign"]) root["children"].push_back(node(name, "is no image"));
  std::string text = fmt::format("{}  {} images, {} on disk\n", cell(json["path"]), json["images"].size(),
                                 size_text(json["bytes_by_tier"]["disk"]));
  show_branch(root, "", text);
  return text;
}

Exit exit_of_tree(const Json& json) {
  if (!json.contains("images")) return json.value("problems", Json::array()).empty() ? kFine : kDamaged;
  for (const Json& image : json["images"]) {
    if (image["problems"].empty()) continue;
    if (image["readable"]) return kDamaged;
    const std::string code = image["problems"][0]["code"];
    for (int each = 0; each <= static_cast<int>(kLastCode); ++each) {
      if (name(static_cast<Code>(each)) == code) return exit_for(static_cast<Code>(each));
    }
  }
  return kFine;
}

Result<Json> diff_of_images(const Checkpoint& a, const Checkpoint& b) {
  TORPOR_ASSIGN_OR_RETURN(const Side left, read(a));
  TORPOR_ASSIGN_OR_RETURN(const Side right, read(b));
  const auto kind = [](const Checkpoint& side) { return is_image(side.manifest()) ? "image" : "checkpoint"; };
  const auto& of_left = left.engine.state.scheduler.requests;
  const auto& of_right = right.engine.state.scheduler.requests;
  Json pairs = Json::array();
  std::set<std::string> paired_left;
  std::set<std::string> paired_right;
  for (const char* const wanted : {"id", "fork", "siblings"}) {
    for (const RequestState& one : of_left) {
      for (const RequestState& other : of_right) {
        const bool again = paired_left.contains(one.id) && paired_right.contains(other.id);
        std::string by = relation(one.id, left.forks.at(one.id), other.id, right.forks.at(other.id));
        if (again || by != wanted) continue;
        pairs.push_back(pair_of(left, one, right, other, std::move(by)));
        paired_left.insert(one.id);
        paired_right.insert(other.id);
      }
    }
  }
  Json removed = Json::array();
  Json added = Json::array();
  for (const RequestState& request : of_left) {
    if (!paired_left.contains(request.id)) removed.push_back(request.id);
  }
  for (const RequestState& request : of_right) {
    if (!paired_right.contains(request.id)) added.push_back(request.id);
  }
  Json fields = fingerprint_differences(left.engine.fingerprint, right.engine.fingerprint);
  const SchedulerSnapshot& queues = left.engine.state.scheduler;
  const SchedulerSnapshot& others = right.engine.state.scheduler;
  const bool same_queues =
      queues.running == others.running && queues.waiting == others.waiting && queues.held == others.held;
  const bool same_samplers = left.engine.state.workers == right.engine.state.workers;
  Json problems = left.problems;
  problems.insert(problems.end(), right.problems.begin(), right.problems.end());
  bool equal = removed.empty() && added.empty() && fields.empty() && problems.empty() && same_queues && same_samplers;
  for (const Json& pair : pairs)
    equal = equal && pair["by"] == "id" && pair["fields"].empty() && pair["blocks"][0] == pair["blocks"][1] &&
            pair["equal_blocks"] == pair["blocks"][0];
  return Json{{"a", a.path()},
              {"b", b.path()},
              {"kinds", {kind(a), kind(b)}},
              {"equal", equal},
              {"fingerprint", std::move(fields)},
              {"same_queues", same_queues},
              {"same_samplers", same_samplers},
              {"problems", std::move(problems)},
              {"removed", std::move(removed)},
              {"added", std::move(added)},
              {"pairs", std::move(pairs)}};
}

std::string show_diff_of_images(const Json& json) {
  std::string text = fmt::format("--- {} ({})\n+++ {} ({})\n", cell(json["a"]), cell(json["kinds"][0]), cell(json["b"]),
                                 cell(json["kinds"][1]));
  for (const Json& field : json["fingerprint"]) text += fmt::format("fingerprint: {} differs\n", cell(field));
  for (const auto& [key, what] : {std::pair("same_queues", "queues"), std::pair("same_samplers", "samplers")})
    text += fmt::format("{}: {}\n", what, json[key] ? "same" : "changed");
  for (const Json& problem : json["problems"])
    text += fmt::format("{} {}\n", bad(fmt::format("{}:", cell(problem["code"]))), cell(problem["what"]));
  for (const Json& id : json["removed"]) text += fmt::format("- {}\n", cell(id));
  for (const Json& id : json["added"]) text += fmt::format("+ {}\n", cell(id));
  std::vector<Row> rows = {{"A", "B", "BY", "TOKENS", "COMMON", "BLOCKS", "EQUAL", "SEEDS", "DIFFERENT"}};
  for (const Json& pair : json["pairs"]) {
    const auto two = [&](const char* key) { return fmt::format("{} {}", cell(pair[key][0]), cell(pair[key][1])); };
    std::vector<std::string> fields;
    for (const Json& field : pair["fields"]) fields.push_back(cell(field));
    rows.push_back({cell(pair["a"]), cell(pair["b"]), cell(pair["by"]), two("tokens"), cell(pair["common_tokens"]),
                    two("blocks"), cell(pair["equal_blocks"]), two("seeds"),
                    fields.empty() ? "-" : fmt::format("{}", fmt::join(fields, " "))});
  }
  return rows.size() > 1 ? text + table(rows) : text;
}

}  // namespace torpor::cli
