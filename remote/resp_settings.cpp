// SPDX-License-Identifier: Apache-2.0
#include "remote/resp_settings.h"

#include <sys/stat.h>

#include <charconv>
#include <fstream>

#include <fmt/core.h>

#include "remote/block_frame.h"

namespace torpor::remote {
namespace {

constexpr uint16_t kPort = 6379;

Error wrong(std::string what, std::string next_step) {
  return {.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next_step)};
}
Error wrong_url() {  // does not repeat the URL, which may contain a secret
  return wrong("the URL of the remote store is none",
               "write redis://HOST:PORT or rediss://HOST:PORT/NAME, with a name of letters, digits, '.', '_' and '-'; "
               "a password belongs into a file");
}

Result<Address> address_of(std::string_view text) {
  Address address{.port = kPort};
  size_t colon = text.rfind(':');
  if (text.starts_with('[')) {
    const size_t end = text.find(']');
    if (end == std::string_view::npos) return wrong_url();
    address.host = text.substr(1, end - 1);
    if (end + 1 == text.size()) return address;
    colon = end + 1;
    if (text[colon] != ':') return wrong_url();
  } else {
    address.host = text.substr(0, colon);
  }
  if (address.host.empty() || address.host.find_first_of("@?#% ") != std::string::npos) return wrong_url();
  if (colon == std::string_view::npos) return address;
  const char* const end = text.data() + text.size();
  const auto [parsed, problem] = std::from_chars(text.data() + colon + 1, end, address.port);
  if (problem != std::errc() || parsed != end || address.port == 0) return wrong_url();
  return address;
}

Status read_credentials(const std::string& path, RespSettings& settings) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0)
    return wrong(fmt::format("the credentials {} cannot be read", path), "name a file that is there");
  if ((info.st_mode & (S_IRWXG | S_IRWXO)) != 0)
    return wrong(fmt::format("others than its owner may use {}", path), fmt::format("chmod 600 {}", path));
  std::ifstream file(path);
  std::string first;
  std::string second;
  std::string more;
  file >> first >> second >> more;
  if (first.empty() || !more.empty())
    return wrong(fmt::format("{} has no credentials", path), "write one line: PASSWORD, or USER PASSWORD");
  settings.user = second.empty() ? "" : first;
  settings.password = second.empty() ? first : second;
  return ok();
}

}  // namespace

Result<RespSettings> resp_settings(const std::string& url, const std::string& credentials) {
  RespSettings settings;
  const size_t begin = url.find("://");
  const std::string scheme = url.substr(0, begin);
  if (begin == std::string::npos || (scheme != "redis" && scheme != "rediss")) return wrong_url();
  settings.tls = scheme == "rediss";
  const std::string rest = url.substr(begin + 3);
  const size_t slash = rest.find('/');
  if (slash != std::string::npos) settings.name = rest.substr(slash + 1);
  if (!may_begin_keys(settings.name)) return wrong_url();
  std::string_view hosts = std::string_view(rest).substr(0, slash);
  while (true) {
    const size_t comma = hosts.find(',');
    TORPOR_ASSIGN_OR_RETURN(Address address, address_of(hosts.substr(0, comma)));
    settings.nodes.push_back(std::move(address));
    if (comma == std::string_view::npos) break;
    hosts = hosts.substr(comma + 1);
  }
  if (!credentials.empty()) TORPOR_RETURN_IF_ERROR(read_credentials(credentials, settings));
  return settings;
}

}  // namespace torpor::remote
