// SPDX-License-Identifier: Apache-2.0
// requests, show: the saved requests.
#include <algorithm>

#include <fmt/core.h>
#include <fmt/ranges.h>

#include "checkpoint/checkpoint.h"
#include "tools/torpor/text.h"
#include "tools/torpor/tokenizer.h"

namespace torpor::cli {
namespace {

std::string queue_of(const SchedulerSnapshot& scheduler, const std::string& id) {
  const auto holds = [&](const std::vector<std::string>& queue) {
    return std::find(queue.begin(), queue.end(), id) != queue.end();
  };
  return holds(scheduler.running)   ? "running"
         : holds(scheduler.waiting) ? "waiting"
         : holds(scheduler.held)    ? "held"
                                    : "none";
}

// Its blocks by group.
Json blocks_of(const KvSnapshot& kv, const std::string& id) {
  Json groups = Json::array();
  for (const KvGroup& group : kv.groups) {
    const auto table =
        std::find_if(group.tables.begin(), group.tables.end(), [&](const KvTable& each) { return each.request == id; });
    groups.push_back(table == group.tables.end() ? Json::array() : Json(table->blocks));
  }
  return groups;
}

Json sampling_of(const SamplingState& sampling) {
  Json json = {
      {"temperature", sampling.temperature}, {"top_p", sampling.top_p}, {"top_k", sampling.top_k}, {"n", sampling.n}};
  if (sampling.seed) json["seed"] = *sampling.seed;
  if (!sampling.stop.empty()) json["stop"] = sampling.stop;
  if (sampling.logprobs) json["logprobs"] = *sampling.logprobs;
  return json;
}

Json summary(const EngineCheckpoint& engine, const RequestState& request) {
  size_t blocks = 0;
  for (const Json& group : blocks_of(engine.state.kv, request.id)) blocks += group.size();
  return {{"id", request.id},
          {"queue", queue_of(engine.state.scheduler, request.id)},
          {"status", name(request.status)},
          {"prompt_tokens", request.prompt_token_ids.size()},
          {"output_tokens", request.output_token_ids.size()},
          {"max_tokens", request.max_tokens},
          {"computed_tokens", request.num_computed_tokens},
          {"blocks", blocks},
          {"preemptions", request.num_preemptions},
          {"priority", request.priority},
          {"sampling", sampling_of(request.sampling)}};
}

void add_text(Json& json, const Tokenizer& tokenizer, const RequestState& request) {
  json["prompt_text"] = tokenizer.text(request.prompt_token_ids);
  json["output_text"] = tokenizer.text(request.output_token_ids);
}

void declare_text(CLI::App& app, Arguments& a) {
  app.add_option("--text", a.tokenizer, "a tokenizer.json: also shows prompts and outputs as text")->type_name("FILE");
}

Result<Json> requests(const Context& context) {
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          open_checkpoint(context.file_system, context.arguments.path, context.key));
  TORPOR_ASSIGN_OR_RETURN(const EngineCheckpoint engine, checkpoint.read_state());
  std::optional<Tokenizer> tokenizer;
  if (!context.arguments.tokenizer.empty()) {
    TORPOR_ASSIGN_OR_RETURN(tokenizer, Tokenizer::read_file(context.arguments.tokenizer));
  }
  Json list = Json::array();
  for (const RequestState& request : engine.state.scheduler.requests) {
    list.push_back(summary(engine, request));
    if (tokenizer) add_text(list.back(), *tokenizer, request);
  }
  return Json{{"path", checkpoint.path()}, {"requests", std::move(list)}};
}

std::string show_requests(const Json& json) {
  if (json["requests"].empty()) return "no requests\n";
  std::vector<Row> rows = {{"REQUEST", "QUEUE", "STATUS", "PROMPT", "OUTPUT", "MAX", "COMPUTED", "BLOCKS", "SAMPLING"}};
  for (const Json& request : json["requests"]) {
    rows.push_back({cell(request["id"]), cell(request["queue"]), cell(request["status"]),
                    cell(request["prompt_tokens"]), cell(request["output_tokens"]), cell(request["max_tokens"]),
                    cell(request["computed_tokens"]), cell(request["blocks"]), cell(request["sampling"])});
  }
  std::string text = table(rows);
  for (const Json& request : json["requests"]) {
    if (request.contains("prompt_text"))
      text += fmt::format("\n{}\n  prompt: {}\n  output: {}\n", cell(request["id"]), cell(request["prompt_text"]),
                          cell(request["output_text"]));
  }
  return text;
}

// An id, or the only one that begins so.
Result<const RequestState*> find(const SchedulerSnapshot& scheduler, const std::string& wanted) {
  std::vector<const RequestState*> found;
  for (const RequestState& request : scheduler.requests) {
    if (request.id == wanted) return &request;
    if (request.id.starts_with(wanted)) found.push_back(&request);
  }
  if (found.size() == 1) return found[0];
  return Error{.code = Code::kNotFound,
               .what = fmt::format("{} requests begin with \"{}\"", found.size(), wanted),
               .next_step = "see torpor requests"};
}

Result<Json> show(const Context& context) {
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          open_checkpoint(context.file_system, context.arguments.path, context.key));
  TORPOR_ASSIGN_OR_RETURN(const EngineCheckpoint engine, checkpoint.read_state());
  TORPOR_ASSIGN_OR_RETURN(const RequestState* const request, find(engine.state.scheduler, context.arguments.second));
  Json json = {{"path", checkpoint.path()}};
  json.update(summary(engine, *request));
  json["arrived"] = time_text(request->arrival_time);
  json["cache_salt"] = request->cache_salt ? Json(*request->cache_salt) : Json();
  json["blocks_by_group"] = blocks_of(engine.state.kv, request->id);
  Json hashes = Json::array();
  const auto size = static_cast<size_t>(std::max(request->block_hash_bytes, 0));
  for (size_t at = 0; size > 0 && at + size <= request->block_hashes.size(); at += size)
    hashes.push_back(hex(std::span(request->block_hashes).subspan(at, size)));
  json["block_hashes"] = std::move(hashes);
  json["prompt_token_ids"] = request->prompt_token_ids;
  json["output_token_ids"] = request->output_token_ids;
  Json rows = Json::array();
  for (const WorkerSnapshot& worker : engine.state.workers) {
    const auto row = std::find(worker.rows.begin(), worker.rows.end(), request->id);
    const bool own = std::any_of(worker.generators.begin(), worker.generators.end(),
                                 [&](const auto& generator) { return generator.first == request->id; });
    rows.push_back({{"rank", worker.rank},
                    {"row", row == worker.rows.end() ? Json() : Json(row - worker.rows.begin())},
                    {"own_generator", own}});
  }
  json["workers"] = std::move(rows);
  if (!context.arguments.tokenizer.empty()) {
    TORPOR_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::read_file(context.arguments.tokenizer));
    add_text(json, tokenizer, *request);
  }
  return json;
}

std::string show_show(const Json& json) {
  std::string text;
  for (const auto& [key, value] : json.items()) text += fmt::format("{:<18}  {}\n", key, cell(value));
  return text;
}

}  // namespace

Verb requests_verb() {
  return {.name = "requests",
          .help = "its requests: queue, state, tokens, sampling, blocks",
          .json =
              "path, requests: [{id, queue, status, prompt_tokens, output_tokens, max_tokens, computed_tokens, blocks, "
              "preemptions, priority, sampling, prompt_text?, output_text?}]",
          .declare = [](CLI::App& app, Arguments& a) { declare_path(app, a), declare_text(app, a); },
          .ask = requests,
          .show = show_requests};
}
Verb show_verb() {
  return {.name = "show",
          .help = "one request whole: tokens, blocks, hashes, its rows in the workers",
          .json =
              "(as one of requests), arrived, cache_salt, blocks_by_group, block_hashes, prompt_token_ids, "
              "output_token_ids, workers",
          .declare =
              [](CLI::App& app, Arguments& a) {
                declare_path(app, a);
                app.add_option("request", a.second, "its id, or how it begins")->required();
                declare_text(app, a);
              },
          .ask = show,
          .show = show_show};
}

}  // namespace torpor::cli
