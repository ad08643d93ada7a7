// SPDX-License-Identifier: Apache-2.0
// fits: whether a checkpoint may be woken here. Also asked by pull, before it fetches anything.
#include "tools/torpor/fits.h"

#include <algorithm>
#include <charconv>
#include <fstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/free_memory.h"
#include "checkpoint/engine_checkpoint.h"
#include "scheduler_state/block_numbers.h"
#include "tools/torpor/text.h"

namespace torpor::cli {
namespace {

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
  explicit FitCheck(int32_t fewest_blocks) : fewest_blocks_(fewest_blocks) {}
  void field(const std::string& name, const std::string& wanted, const std::string& here, bool fits) {
    checks_.push_back({{"field", name}, {"checkpoint", wanted}, {"here", here}, {"fits", fits}});
    fits_ = fits_ && fits;
  }
  void field(const Fingerprint& wanted, const std::string& name, const std::string& here) {
    const auto found = wanted.find(name);
    const std::string theirs = found == wanted.end() ? "nothing" : found->second;
    if (name == kNumBlocksField) {
      blocks(theirs, here);
    } else {
      field(name, theirs, here, theirs == here);
    }
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
  // Any number that has room for the requests will do.
  void blocks(const std::string& theirs, const std::string& here) {
    int64_t have = 0;
    const bool is_number = std::from_chars(here.data(), here.data() + here.size(), have).ec == std::errc();
    const std::string needs = fewest_blocks_ > 0 ? fmt::format("{}, needs {}", theirs, fewest_blocks_) : theirs;
    field(std::string(kNumBlocksField), needs, here, is_number && have >= std::max(fewest_blocks_, 1));
  }

  const int32_t fewest_blocks_;
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
  TORPOR_ASSIGN_OR_RETURN(const Json config, json_file(directory + "/config.json"));
  if (config.contains("architectures") && config["architectures"].is_array())
    check.field(wanted, "architecture",
                fmt::format("{}", fmt::join(config["architectures"].get<std::vector<std::string>>(), ",")));
  return ok();
}

}  // namespace

void declare_fit(CLI::App& app, Arguments& a) {
  app.add_option("--model", a.model, "a model's directory (its config.json)")->type_name("DIRECTORY");
  app.add_option("--like", a.second, "a JSON file with an engine's fields, as of torpor info --json")
      ->type_name("FILE");
  app.add_option("--field", a.fields, "what the engine will have")->type_name("NAME=VALUE");
  app.add_option("--memory", a.memory_bytes, "bytes that the engine may take; default: what is available")
      ->transform(CLI::AsSizeValue(false));
}

bool asks_for_fit(const Arguments& arguments) {
  return !arguments.model.empty() || !arguments.second.empty() || !arguments.fields.empty() ||
         arguments.memory_bytes != 0;
}

Result<Json> check_fit(const Arguments& arguments, const Manifest& manifest, const std::string& path,
                       int32_t fewest_blocks) {
  const Fingerprint& wanted = manifest.fingerprint;
  FitCheck check(fewest_blocks);
  if (!arguments.model.empty()) TORPOR_RETURN_IF_ERROR(check_model(arguments.model, wanted, check));
  if (!arguments.second.empty()) {
    TORPOR_ASSIGN_OR_RETURN(Json given, json_file(arguments.second));
    if (given.contains("fingerprint") && given["fingerprint"].is_object()) given = given["fingerprint"];
    for (const auto& [name, value] : given.items())
      check.field(wanted, name, value.is_string() ? value.get<std::string>() : value.dump());
    for (const auto& [name, value] : wanted) {
      if (!given.contains(name) && name != kNumBlocksField) check.field(wanted, name, "nothing");
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
  for (const RankSummary& rank : manifest.ranks) {
    for (const auto& [tag, sums] : rank.tags) memory += sums.bytes;
  }
  const uint64_t have = arguments.memory_bytes != 0 ? arguments.memory_bytes : free_memory();
  check.field("memory for what was saved", size_text(memory), size_text(have), have >= memory);
  return std::move(check).result(wanted, path);
}

namespace {

Result<Json> fits(const Context& context) {
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          open_checkpoint(context.file_system, context.arguments.path, context.key));
  const Result<EngineCheckpoint> engine = checkpoint.read_state();  // a set has none
  const int32_t fewest = engine && engine->state.kv.validate() ? fewest_blocks(engine->state.kv) : 0;
  return check_fit(context.arguments, checkpoint.manifest(), checkpoint.path(), fewest);
}

std::string show_fits(const Json& json) {
  std::vector<Row> rows = {{"FIELD", "CHECKPOINT", "HERE", ""}};
  for (const Json& check : json["checks"])
    rows.push_back({cell(check["field"]), cell(check["checkpoint"]), cell(check["here"]),
                    check["fits"] ? good("fits") : bad("DIFFERS")});
  for (const Json& open : json["not_known_here"])
    rows.push_back({cell(open["field"]), cell(open["checkpoint"]), "-", "not known here"});
  const size_t open = json["not_known_here"].size();
  const std::string found =
      !json["fits"] ? bad("does not fit")
      : open == 0   ? good("fits")
                    : fmt::format("nothing differs, but {} fields are not known here: give --like an engine's", open);
  return table(rows) + fmt::format("{}: {}\n", cell(json["path"]), found);
}

}  // namespace

Verb fits_verb() {
  return {.name = "fits",
          .help = "whether it may be woken into a model, a configuration and this machine, field by field",
          .json = "path, fits, checks: [{field, checkpoint, here, fits}], not_known_here: [{field, checkpoint}]",
          .declare =
              [](CLI::App& app, Arguments& a) {
                declare_path(app, a);
                declare_fit(app, a);
              },
          .ask = fits,
          .show = show_fits,
          .exit =
              [](const Json& json) {
                if (!json["fits"]) return kDiffers;
                return json["not_known_here"].empty() ? kFine : kUnknown;
              }};
}

}  // namespace torpor::cli
