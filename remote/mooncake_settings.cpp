// SPDX-License-Identifier: Apache-2.0
#include "remote/mooncake_settings.h"

#include <charconv>

#include <fmt/core.h>

#include "remote/block_frame.h"

namespace torpor::remote {
namespace {

constexpr std::string_view kScheme = "mooncake://";

Error wrong(std::string what) {
  return {.code = Code::kInvalidArgument,
          .what = std::move(what),
          .next_step =
              "write mooncake://HOST:PORT/NAME, and of ?protocol=, devices=, metadata=, local=, segment= and "
              "buffer= (in bytes) what is needed, with & between them"};
}

template <class Number>
bool number_from(std::string_view text, Number& number) {
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  return problem == std::errc() && end == text.data() + text.size();
}

Status read_option(std::string_view option, MooncakeSettings& settings) {
  const size_t equals = option.find('=');
  const std::string_view name = option.substr(0, equals);
  const std::string_view value = equals == std::string_view::npos ? "" : option.substr(equals + 1);
  for (const auto& [known, to] : {std::pair("protocol", &settings.protocol), std::pair("devices", &settings.devices),
                                  std::pair("metadata", &settings.metadata), std::pair("local", &settings.local)}) {
    if (name != known) continue;
    if (value.empty()) return wrong(fmt::format("{} is empty in the URL of the Mooncake store", name));
    *to = value;
    return ok();
  }
  for (const auto& [known, to] : {std::pair("segment", &settings.segment), std::pair("buffer", &settings.buffer)}) {
    if (name != known) continue;
    return number_from(value, *to) ? ok() : Status(wrong(fmt::format("{} is {}, not a number of bytes", name, value)));
  }
  return wrong(fmt::format("the URL of the Mooncake store has an option {}, which is none", name));
}

}  // namespace

bool is_mooncake(const std::string& url) { return url.starts_with(kScheme); }

Result<MooncakeSettings> mooncake_settings(const std::string& url) {
  if (!is_mooncake(url)) return wrong("the URL of the Mooncake store is none");
  MooncakeSettings settings;
  std::string_view rest = std::string_view(url).substr(kScheme.size());
  const size_t question = rest.find('?');
  std::string_view options = question == std::string_view::npos ? "" : rest.substr(question + 1);
  rest = rest.substr(0, question);
  const size_t slash = rest.find('/');
  if (slash != std::string_view::npos) settings.name = rest.substr(slash + 1);
  if (!may_begin_keys(settings.name))
    return wrong(
        "the name in the URL of the Mooncake store has other than letters, digits, "
        "'.', '_' and '-', or more than 64");
  rest = rest.substr(0, slash);
  const size_t colon = rest.rfind(':');
  settings.host = rest.substr(0, colon);
  if (settings.host.empty() || settings.host.find_first_of("@#% ") != std::string::npos ||
      colon == std::string_view::npos || !number_from(rest.substr(colon + 1), settings.port) || settings.port == 0)
    return wrong("the URL of the Mooncake store has no host and port of a master");
  while (!options.empty()) {
    const size_t end = options.find('&');
    TORPOR_RETURN_IF_ERROR(read_option(options.substr(0, end), settings));
    options = end == std::string_view::npos ? "" : options.substr(end + 1);
  }
  return settings;
}

}  // namespace torpor::remote
