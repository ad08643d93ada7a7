// SPDX-License-Identifier: Apache-2.0
// live: calls to an engine that runs, through its socket (console/control.h).
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <optional>

#include <fmt/core.h>
#include <boost/filesystem.hpp>

#include "console/control_methods.h"
#include "console/control_server.h"
#include "console/event_files.h"
#include "tools/torpor/text.h"
#include "tools/torpor/verb.h"

namespace torpor::cli {
namespace {

using namespace std::chrono_literals;
using console::ControlClient;
using console::ControlMethod;
using console::ParameterKind;

constexpr std::chrono::milliseconds kPause{20};

Error wrong(std::string what, std::string next_step) {
  return {.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next_step)};
}

// NAME=VALUE, as the method's table has it.
Result<Json> parameters(const ControlMethod& method, const std::vector<std::string>& words) {
  Json params = Json::object();
  for (const std::string& word : words) {
    const size_t at = word.find('=');
    const std::string key = word.substr(0, at);
    const std::string value = at == std::string::npos ? "true" : word.substr(at + 1);
    ParameterKind kind = ParameterKind::kWords;
    for (const console::ControlParameter& each : method.parameters) kind = each.name == key ? each.kind : kind;
    if (kind == ParameterKind::kFlag) {
      if (value != "true" && value != "false") return wrong(fmt::format("{} is {}", key, value), "use true or false");
      params[key] = value == "true";
    } else if (kind == ParameterKind::kNumber) {
      char* end = nullptr;
      params[key] = std::strtod(value.c_str(), &end);
      if (value.empty() || *end != '\0') return wrong(fmt::format("{} is \"{}\"", key, value), "give a number");
    } else {
      params[key] = value;
    }
  }
  TORPOR_RETURN_IF_ERROR(console::check_parameters(method, params));
  return params;
}

Result<Json> request(uint64_t id, const std::vector<std::string>& words) {
  const ControlMethod* const method = console::find_control_method(words.front());
  if (method == nullptr) {
    std::string names;
    for (const std::string_view each : console::control_method_names())
      names += (names.empty() ? "" : ", ") + std::string(each);
    return wrong(fmt::format("there is no method \"{}\"", words.front()), "use one of: " + names);
  }
  TORPOR_ASSIGN_OR_RETURN(Json params, parameters(*method, {words.begin() + 1, words.end()}));
  return Json{{"id", id}, {"method", method->name}, {"params", std::move(params)}};
}

Error error_of(const Json& json) {
  Error error{.code = Code::kInternal, .what = json.value("what", ""), .next_step = json.value("next_step", "")};
  for (int code = 0; code <= static_cast<int>(kLastCode); ++code) {
    if (name(static_cast<Code>(code)) == json.value("code", "")) error.code = static_cast<Code>(code);
  }
  return error;
}

// Where to ask: an engine and, for what only that can do, the server that started it: others may use the same
// directory. A socket that was named is asked everything.
class Clients {
 public:
  explicit Clients(std::string path) : path_(std::move(path)) {}
  Result<ControlClient*> of(const std::string& method) {
    boost::system::error_code problem;
    const bool front = console::find_control_method(method)->place == console::ControlPlace::kFront &&
                       boost::filesystem::is_directory(path_, problem);
    if (front && front_) return &*front_;
    if (!engine_) {
      Result<ControlClient> engine = ControlClient::connect(path_);
      if (engine)
        engine_.emplace(std::move(*engine));
      else if (!front)
        return engine.error();  // a server may be there before its engine is
    }
    if (front) {
      Result<ControlClient> server =
          ControlClient::connect(path_, console::ControlPlace::kFront, engine_ ? engine_->path() : "");
      if (server) {
        front_.emplace(std::move(*server));
        return &*front_;
      }
      if (!engine_) return server.error();
    }
    return &*engine_;  // of what a server does, the engine says who does it
  }
  // Those that there are.
  std::vector<ControlClient*> all() {
    std::vector<ControlClient*> connected;
    if (engine_) connected.push_back(&*engine_);
    if (front_) connected.push_back(&*front_);
    return connected;
  }

 private:
  const std::string path_;
  std::optional<ControlClient> engine_;
  std::optional<ControlClient> front_;
};

Result<Exit> one_call(const Context& context, Clients& clients) {
  TORPOR_ASSIGN_OR_RETURN(Json asked, request(1, context.arguments.call));
  const ControlMethod& method = *console::find_control_method(context.arguments.call.front());
  // The connection ends with this call, and a stop with its connection: it would be over at once.
  for (const console::ControlParameter& each : method.parameters) {
    if (each.name == "stay" && !asked["params"].contains("stay")) asked["params"]["stay"] = true;
  }
  TORPOR_ASSIGN_OR_RETURN(ControlClient* const to, clients.of(asked["method"]));
  ControlClient& client = *to;
  TORPOR_RETURN_IF_ERROR(client.send(asked.dump()));
  while (!context.interrupted()) {
    TORPOR_ASSIGN_OR_RETURN(const std::optional<std::string> line, client.receive(100ms));
    if (!line) continue;
    const Json answer = Json::parse(*line, nullptr, false);
    if (!answer.is_object()) return wrong("the answer is no JSON", "is this a socket of torpor?");
    if (answer.contains("event")) {
      if (!context.write(dump(answer["event"]) + '\n')) return kFine;
      continue;
    }
    if (answer.contains("error")) return error_of(answer["error"]);
    if (asked["method"] == "subscribe") continue;
    return context.write(dump(answer["result"], 2) + '\n') ? kFine : kFailed;
  }
  if (asked["method"] == "subscribe") return kFine;
  return Error{.code = Code::kAborted,
               .what = fmt::format("{} had not been answered", asked["method"].get<std::string>()),
               .next_step = "see what became of it: torpor live snapshot"};
}

// Calls from standard input, a line each, over one connection: what they stop is let go when it ends. Return the exit
// code of the first that failed.
Result<Exit> many_calls(const Context& context, Clients& clients) {
  TORPOR_RETURN_IF_ERROR(clients.of("hello"));  // so that it is said at once where there is none
  Exit exit = kFine;
  const auto note = [&exit](const Error& error) { exit = exit == kFine ? exit_for(error.code) : exit; };
  std::string typed;
  uint64_t id = 0;
  bool more = true;
  uint64_t answered = 0;
  auto wait = kPause;
  while (!context.interrupted() && (more || answered < id)) {
    pollfd polled{STDIN_FILENO, POLLIN, 0};
    if (more && ::poll(&polled, 1, 0) > 0) {
      char bytes[4096];
      const ssize_t got = ::read(STDIN_FILENO, bytes, sizeof bytes);
      more = got > 0;
      if (more)
        typed.append(bytes, static_cast<size_t>(got));
      else if (!typed.empty())
        typed += '\n';  // the last line may have no end
    }
    for (size_t end = 0; (end = typed.find('\n')) != std::string::npos; typed.erase(0, end + 1)) {
      std::vector<std::string> words = CLI::detail::split_up(typed.substr(0, end));
      words.erase(std::find_if(words.begin(), words.end(), [](const auto& word) { return word.starts_with('#'); }),
                  words.end());  // a comment
      if (words.empty()) continue;
      const Result<Json> asked = request(id + 1, words);
      if (!asked) {
        std::cerr << "torpor: " << harmless(asked.error().to_string()) << '\n';
        note(asked.error());
        continue;
      }
      const Result<ControlClient*> client = clients.of((*asked)["method"]);
      if (!client) {
        std::cerr << "torpor: " << harmless(client.error().to_string()) << '\n';
        note(client.error());
        continue;
      }
      ++id;
      TORPOR_RETURN_IF_ERROR((*client)->send(asked->dump()));
    }
    bool came = false;
    for (ControlClient* const client : clients.all()) {
      TORPOR_ASSIGN_OR_RETURN(const std::optional<std::string> line, client->receive(wait));
      if (!line) continue;
      came = true;
      const Json answer = Json::parse(*line, nullptr, false);
      if (answer.contains("id")) ++answered;
      if (answer.contains("error")) note(error_of(answer["error"]));
      if (!context.write(harmless_json(*line) + '\n')) return kFailed;
    }
    wait = came ? 0ms : kPause;  // a silent connection does not hold up the lines of another one
  }
  return exit;
}

Result<Exit> live(const Context& context) {
  const Arguments& arguments = context.arguments;
  Clients clients(arguments.path.empty() ? console::default_event_directory() : arguments.path);
  return arguments.call.empty() ? many_calls(context, clients) : one_call(context, clients);
}

}  // namespace

Verb live_verb() {
  return {.name = "live",
          .help =
              "asks an engine that runs, stops it at a breakpoint, and lets it go: one METHOD, whose stop "
              "stays for its lease, or lines of them from standard input over one connection, whose stops end with it",
          .json = "the method's result; lines of events for subscribe",
          .declare =
              [](CLI::App& app, Arguments& a) {
                app.add_option("call", a.call, "METHOD NAME=VALUE …");
                app.add_option("--engine", a.path,
                               "a directory of events of engines, of which the newest is taken, or a socket; default: "
                               "$XDG_RUNTIME_DIR/torpor, else /dev/shm/torpor-UID");
                std::string methods = "Methods:";
                for (const ControlMethod& method : console::control_methods()) {
                  methods += fmt::format("\n  {:<18} {}{}{}", method.name, method.help,
                                         method.operates ? " (the engine's option console=control)" : "",
                                         method.place == console::ControlPlace::kFront ? " (of a server)" : "");
                  for (const console::ControlParameter& each : method.parameters)
                    methods += fmt::format("\n    {:<16} {}", each.name, each.help);
                }
                app.footer(methods);
              },
          .stream = live};
}

}  // namespace torpor::cli
