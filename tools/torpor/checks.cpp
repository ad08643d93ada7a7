// verify, diff, fits: whether a checkpoint is whole, how two differ, whether one may be woken here.
#include <algorithm>
#include <fstream>
#include <map>

#include <unistd.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "checkpoint/verify.h"
#include "tools/torpor/text.h"

namespace torpor::cli {
namespace {

Result<Json> verify(const Context& context) {
  Json problems = Json::array();
  std::string path = context.arguments.path;
  Verification found;
  Result<Checkpoint> checkpoint = open_checkpoint(context.file_system, path, context.key);
  if (checkpoint) {
    path = checkpoint->path();
    TORPOR_ASSIGN(found, torpor::verify(*checkpoint, {.threads = context.arguments.threads,
                                                      .contents = !context.arguments.quick,
                                                      .progress = context.progress}));
    for (const Error& error : found.problems) problems.push_back(to_json(error));
  } else if (checkpoint.error().code == Code::kCorruption) {
    problems.push_back(to_json(checkpoint.error()));
  } else {
    return checkpoint.error();
  }
  const bool whole = problems.empty();
  return Json{{"path", path},
              {"whole", whole},
              {"problems", std::move(problems)},
              {"checked",
               {{"bytes", found.bytes},
                {"sections", found.sections},
                {"chunks", found.chunks},
                {"table_entries", found.table_entries},
                {"references", found.references},
                {"hashes", found.hashes}}},
              {"hashes_not_checked", found.hashes_not_checked.empty() ? Json() : Json(found.hashes_not_checked)}};
}

std::string show_verify(const Json& json) {
  const Json& checked = json["checked"];
  std::string text =
      fmt::format("{} sections, {} chunks, {}; {} table entries, {} references, {} prefix hashes recomputed\n",
                  cell(checked["sections"]), cell(checked["chunks"]), size_text(checked["bytes"]),
                  cell(checked["table_entries"]), cell(checked["references"]), cell(checked["hashes"]));
  if (!json["hashes_not_checked"].is_null())
    text += fmt::format("prefix hashes not recomputed: {}\n", cell(json["hashes_not_checked"]));
  if (json["whole"]) return text + fmt::format("{}: {}\n", cell(json["path"]), good("whole"));
  text += fmt::format("{}: {}\n", cell(json["path"]), bad(fmt::format("{} problems", json["problems"].size())));
  for (const Json& problem : json["problems"])
    text += fmt::format("  {}: {}\n", cell(problem["code"]), cell(problem["what"]));
  return text + "next: torpor repair keeps the requests that are whole\n";
}

// ---- diff

struct Read {
  Checkpoint checkpoint;
  EngineCheckpoint engine;
};

Result<Read> read(const Context& context, const std::string& path) {
  TORPOR_ASSIGN(Checkpoint checkpoint, open_checkpoint(context.file_system, path, context.key));
  TORPOR_ASSIGN(EngineCheckpoint engine, checkpoint.read_state());
  return Read{std::move(checkpoint), std::move(engine)};
}

// {"added", "removed", "changed", "same"} of two maps from name to anything comparable.
template <class Map>
Json compare(const Map& a, const Map& b) {
  Json added = Json::array();
  Json removed = Json::array();
  Json changed = Json::array();
  uint64_t same = 0;
  for (const auto& [name, value] : a) {
    const auto other = b.find(name);
    if (other == b.end()) {
      removed.push_back(name);
    } else if (other->second == value) {
      ++same;
    } else {
      changed.push_back(name);
    }
  }
  for (const auto& [name, value] : b) {
    if (!a.contains(name)) added.push_back(name);
  }
  return {
      {"added", std::move(added)}, {"removed", std::move(removed)}, {"changed", std::move(changed)}, {"same", same}};
}

std::map<std::string, RequestState> requests_of(const Read& read) {
  std::map<std::string, RequestState> map;
  for (const RequestState& request : read.engine.state.scheduler.requests) map.emplace(request.id, request);
  return map;
}

Result<std::map<std::string, std::string>> chunks_of(const Read& read) {
  std::map<std::string, std::string> map;
  for (const RankSummary& rank : read.checkpoint.manifest().ranks) {
    TORPOR_ASSIGN(const RankRefs refs, read.checkpoint.refs(rank));
    for (const SavedChunk& chunk : refs.records)
      map.emplace(fmt::format("rank {}: {}", rank.rank, chunk.key.to_string()), chunk.digest.hex());
  }
  return map;
}

Result<Json> diff(const Context& context) {
  TORPOR_ASSIGN(const Read a, read(context, context.arguments.path));
  TORPOR_ASSIGN(const Read b, read(context, context.arguments.second));
  Json json = {{"a", a.checkpoint.path()}, {"b", b.checkpoint.path()}};
  json["fingerprint"] = compare(a.engine.fingerprint, b.engine.fingerprint);
  json["requests"] = compare(requests_of(a), requests_of(b));
  TORPOR_ASSIGN(const auto before_chunks, chunks_of(a));
  TORPOR_ASSIGN(const auto chunks, chunks_of(b));
  json["chunks"] = compare(before_chunks, chunks);
  const SchedulerCheckpoint& before = a.engine.state;
  const SchedulerCheckpoint& now = b.engine.state;
  json["same_queues"] = before.scheduler.running == now.scheduler.running &&
                        before.scheduler.waiting == now.scheduler.waiting &&
                        before.scheduler.held == now.scheduler.held;
  json["same_kv"] = before.kv == now.kv;
  json["same_samplers"] = before.workers == now.workers;
  bool equal = json["same_queues"] && json["same_kv"] && json["same_samplers"];
  for (const char* part : {"fingerprint", "requests", "chunks"})
    equal = equal && json[part]["added"].empty() && json[part]["removed"].empty() && json[part]["changed"].empty();
  json["equal"] = equal;
  return json;
}

std::string show_diff(const Json& json) {
  if (json["equal"]) return "equal\n";
  std::string text = fmt::format("--- {}\n+++ {}\n", cell(json["a"]), cell(json["b"]));
  for (const char* part : {"fingerprint", "requests", "chunks"}) {
    text += fmt::format("{}: {} same\n", part, cell(json[part]["same"]));
    for (const auto& [kind, sign] : {std::pair("removed", '-'), std::pair("added", '+'), std::pair("changed", '~')}) {
      const Json& names = json[part][kind];
      constexpr size_t kMost = 20;
      for (size_t i = 0; i < std::min(names.size(), kMost); ++i) text += fmt::format("  {} {}\n", sign, cell(names[i]));
      if (names.size() > kMost)
        text += fmt::format("  {} … and {} more (--json has all)\n", sign, names.size() - kMost);
    }
  }
  for (const auto& [key, what] : {std::pair("same_queues", "queues"), std::pair("same_kv", "KV bookkeeping"),
                                  std::pair("same_samplers", "samplers")}) {
    text += fmt::format("{}: {}\n", what, json[key] ? "same" : "changed");
  }
  return text;
}

// ---- fits

uint64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string word;
  uint64_t kib = 0;
  while (file >> word) {
    if (word == "MemAvailable:" && file >> kib) return kib * 1024;
  }
  return 0;
}

// As PyTorch names what it compiles for (torch.backends.cpu.get_cpu_capability()).
std::string cpu_capability() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("fma"))
    return "AVX512";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "AVX2";
  return "DEFAULT";
#else
  return "";
#endif
}

class FitCheck {
 public:
  void field(const std::string& name, const std::string& wanted, const std::string& here, bool fits) {
    checks_.push_back({{"field", name}, {"checkpoint", wanted}, {"here", here}, {"fits", fits}});
    fits_ = fits_ && fits;
  }
  void field(const Fingerprint& wanted, const std::string& name, const std::string& here) {
    const auto found = wanted.find(name);
    const std::string theirs = found == wanted.end() ? "nothing" : found->second;
    field(name, theirs, here, theirs == here);
    done_.push_back(name);
  }
  Json result(const Fingerprint& wanted, const std::string& path) && {
    Json open = Json::array();
    for (const auto& [name, value] : wanted) {
      if (std::find(done_.begin(), done_.end(), name) == done_.end())
        open.push_back({{"field", name}, {"checkpoint", value}});
    }
    return {{"path", path}, {"fits", fits_}, {"checks", std::move(checks_)}, {"not_known_here", std::move(open)}};
  }

 private:
  Json checks_ = Json::array();
  std::vector<std::string> done_;
  bool fits_ = true;
};

Result<Json> json_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    return Error{.code = Code::kNotFound, .what = fmt::format("cannot open {}", path), .next_step = "check the path"};
  Json json = Json::parse(file, nullptr, false);
  if (!json.is_object())
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("{} is not a JSON object", path),
                 .next_step = "give another file"};
  return json;
}

// The model's config.json: what it tells by itself of the fingerprint. The dtype is the engine's choice.
Status check_model(const std::string& directory, const Fingerprint& wanted, FitCheck& check) {
  TORPOR_ASSIGN(const Json config, json_file(directory + "/config.json"));
  if (config.contains("architectures") && config["architectures"].is_array())
    check.field(wanted, "architecture",
                fmt::format("{}", fmt::join(config["architectures"].get<std::vector<std::string>>(), ",")));
  return ok();
}

Result<Json> fits(const Context& context) {
  const Arguments& arguments = context.arguments;
  TORPOR_ASSIGN(const Checkpoint checkpoint, open_checkpoint(context.file_system, arguments.path, context.key));
  TORPOR_ASSIGN(const EngineCheckpoint engine, checkpoint.read_state());
  const Fingerprint& wanted = engine.fingerprint;
  FitCheck check;
  if (!arguments.model.empty()) TORPOR_TRY(check_model(arguments.model, wanted, check));
  if (!arguments.second.empty()) {
    TORPOR_ASSIGN(Json given, json_file(arguments.second));
    if (given.contains("fingerprint") && given["fingerprint"].is_object()) given = given["fingerprint"];
    for (const auto& [name, value] : given.items())
      check.field(wanted, name, value.is_string() ? value.get<std::string>() : value.dump());
    for (const auto& [name, value] : wanted) {
      if (!given.contains(name)) check.field(wanted, name, "nothing");
    }
  }
  for (const std::string& field : arguments.fields) {
    const size_t equals = field.find('=');
    if (equals == std::string::npos)
      return Error{.code = Code::kInvalidArgument,
                   .what = fmt::format("--field {} has no =", field),
                   .next_step = "write --field NAME=VALUE"};
    check.field(wanted, field.substr(0, equals), field.substr(equals + 1));
  }
  if (wanted.contains("cpu_capability") && !cpu_capability().empty())
    check.field(wanted, "cpu_capability", cpu_capability());
  uint64_t memory = 0;
  for (const RankSummary& rank : checkpoint.manifest().ranks) {
    for (const auto& [tag, sums] : rank.tags) memory += sums.bytes;
  }
  const uint64_t have = arguments.memory_bytes != 0 ? arguments.memory_bytes : available_memory();
  check.field("memory for what was saved", size_text(memory), size_text(have), have >= memory);
  return std::move(check).result(wanted, checkpoint.path());
}

std::string show_fits(const Json& json) {
  std::vector<Row> rows = {{"FIELD", "CHECKPOINT", "HERE", ""}};
  for (const Json& check : json["checks"])
    rows.push_back({cell(check["field"]), cell(check["checkpoint"]), cell(check["here"]),
                    check["fits"] ? good("fits") : bad("DIFFERS")});
  for (const Json& open : json["not_known_here"])
    rows.push_back({cell(open["field"]), cell(open["checkpoint"]), "-", "not known here"});
  return table(rows) + fmt::format("{}: {}\n", cell(json["path"]),
                                   json["fits"] ? good("nothing speaks against it") : bad("does not fit"));
}

}  // namespace

Verb verify_verb() {
  return {.name = "verify",
          .help = "reads every byte; checks digests, seals, cross-references, reference counts and prefix hashes",
          .json =
              "path, whole, problems: [{code, what, next_step}], checked: {bytes, sections, chunks, table_entries, "
              "references, hashes}, hashes_not_checked",
          .declare =
              [](CLI::App& app, Arguments& a) {
                declare_path(app, a);
                app.add_flag("--quick", a.quick, "the state and the cross-references, not the saved memory");
                app.add_option("--threads", a.threads, "that read and hash")->check(CLI::Range(0, 256));
              },
          .ask = verify,
          .show = show_verify,
          .exit = [](const Json& json) { return json["whole"] ? kFine : kDamaged; }};
}
Verb diff_verb() {
  return {.name = "diff",
          .help = "what differs between two checkpoints",
          .json =
              "a, b, equal, fingerprint, requests, chunks: {added, removed, changed, same}, same_queues, same_kv, "
              "same_samplers",
          .declare =
              [](CLI::App& app, Arguments& a) {
                declare_path(app, a);
                app.add_option("other", a.second, "the other checkpoint")->required();
              },
          .ask = diff,
          .show = show_diff,
          .exit = [](const Json& json) { return json["equal"] ? kFine : kDiffers; }};
}
Verb fits_verb() {
  return {.name = "fits",
          .help = "whether it may be woken into a model, a configuration and this machine, field by field",
          .json = "path, fits, checks: [{field, checkpoint, here, fits}], not_known_here: [{field, checkpoint}]",
          .declare =
              [](CLI::App& app, Arguments& a) {
                declare_path(app, a);
                app.add_option("--model", a.model, "a model's directory (its config.json)")->type_name("DIRECTORY");
                app.add_option("--like", a.second, "a JSON file with an engine's fields, as of torpor info --json")
                    ->type_name("FILE");
                app.add_option("--field", a.fields, "what the engine will have")->type_name("NAME=VALUE");
                app.add_option("--memory", a.memory_bytes, "bytes that the engine may take; default: what is available")
                    ->transform(CLI::AsSizeValue(false));
              },
          .ask = fits,
          .show = show_fits,
          .exit = [](const Json& json) { return json["fits"] ? kFine : kDiffers; }};
}

}  // namespace torpor::cli
