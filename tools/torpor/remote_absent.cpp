// SPDX-License-Identifier: Apache-2.0
// push, pull, and ls of a URL where the inspector was built without libcurl: it says what it lacks.
#include "tools/torpor/remote.h"

namespace torpor::cli {
namespace {

Error lacks_it() {
  return {.code = Code::kUnsupported,
          .what = "this torpor was built without libcurl, by which it would speak to an object store or a server",
          .next_step = "take the one of tools/dev deb, or of a build on this machine"};
}

Verb absent(const char* name) {
  return {.name = name,
          .help = "not in this build: it has no libcurl",
          .json = "",
          .declare = [](CLI::App& app, Arguments&) { app.allow_extras(); },
          .ask = [](const Context&) -> Result<Json> { return lacks_it(); },
          .show = [](const Json&) { return std::string(); }};
}

}  // namespace

Result<Json> sessions_of_server(const Context&) { return lacks_it(); }
Result<Json> switch_server(const Context&) { return lacks_it(); }
bool is_url(const std::string& path) { return path.find("://") != std::string::npos; }
Result<Json> ls_of_store(const Context&) { return lacks_it(); }
std::string show_ls_of_store(const Json&) { return {}; }
Result<Json> gc_of_store(const Context&) { return lacks_it(); }
std::string show_gc_of_store(const Json&) { return {}; }
Result<Json> rm_of_store(const Context&) { return lacks_it(); }
Verb push_verb() { return absent("push"); }
Verb pull_verb() { return absent("pull"); }

}  // namespace torpor::cli
