// SPDX-License-Identifier: Apache-2.0
// switch: a server hands its requests over to its standby, and ends.
#include <fmt/format.h>

#include "tools/torpor/remote.h"
#include "tools/torpor/text.h"
#include "tools/torpor/verb.h"

namespace torpor::cli {
namespace {

std::string show_switch(const Json& json) {
  std::string text = fmt::format("{} handed {} requests over to {} (process {}) in {:.3f} s; no token for {:.3f} s\n",
                                 cell(json["url"]), cell(json["requests"]), cell(json["to"]), cell(json["process"]),
                                 json["seconds"].get<double>(), json["pause_seconds"].get<double>());
  std::vector<Row> rows = {{"PART", "SECONDS"}};
  for (const auto& [part, seconds] : json["parts"].items())
    rows.push_back({harmless(part), fmt::format("{:.3f}", seconds.get<double>())});
  return text + table(rows);
}

}  // namespace

Verb switch_verb() {
  return {.name = "switch",
          .help =
              "a server hands its requests over to its standby and ends: an upgrade, or other options, without a "
              "dropped request. Until the standby serves, the server can go on",
          .json = "url, to, process, requests, kv, seconds, pause_seconds, parts: {part: seconds}",
          .declare =
              [](CLI::App& app, Arguments& a) {
                app.add_option("server", a.path,
                               "URL of the server, or the directory that it owns; it is asked with the key in "
                               "TORPOR_ADMIN_KEY")
                    ->required();
                app.add_option("--to", a.second, "URL of the standby, as http://127.0.0.1:8001; default: as recorded");
              },
          .ask = switch_server,
          .show = show_switch};
}

}  // namespace torpor::cli
