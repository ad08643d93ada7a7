// SPDX-License-Identifier: Apache-2.0
#include "remote/s3_settings.h"

#include <sys/stat.h>

#include <cerrno>
#include <fstream>

#include <fmt/core.h>

#include "remote/object_keys.h"

namespace torpor::remote {
namespace {

Error wrong(std::string what, std::string next_step) {
  return Error{.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next_step)};
}

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

// Read section `profile` of a credentials file of AWS's tools: [name], then lines of name = value.
Result<S3Credentials> credentials_in(const std::string& path, const std::string& profile) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0)
    return wrong(fmt::format("there are no credentials: {} cannot be read", path),
                 "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SHARED_CREDENTIALS_FILE");
  if ((info.st_mode & (S_IRWXG | S_IRWXO)) != 0)
    return wrong(fmt::format("others than its owner may use {}", path), fmt::format("chmod 600 {}", path));
  std::ifstream file(path);
  S3Credentials found;
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    line = trimmed(line);
    if (line.starts_with('[')) inside = line == fmt::format("[{}]", profile);
    const size_t equals = line.find('=');
    if (!inside || equals == std::string::npos || line.starts_with('#')) continue;
    const std::string name = trimmed(line.substr(0, equals));
    const std::string value = trimmed(line.substr(equals + 1));
    if (name == "aws_access_key_id") found.access_key = value;
    if (name == "aws_secret_access_key") found.secret_key = value;
    if (name == "aws_session_token") found.session_token = value;
  }
  if (found.access_key.empty() || found.secret_key.empty())
    return wrong(fmt::format("[{}] of {} has no aws_access_key_id and aws_secret_access_key", profile, path),
                 "add them, or choose another section with AWS_PROFILE");
  return found;
}

// Set the credentials, or the role that provides them.
Status who_asks(const Environment& variable, S3Settings& settings) {
  const std::optional<std::string> access_key = variable("AWS_ACCESS_KEY_ID");
  const std::optional<std::string> secret_key = variable("AWS_SECRET_ACCESS_KEY");
  if (access_key && secret_key) {
    settings.credentials = {*access_key, *secret_key, variable("AWS_SESSION_TOKEN").value_or("")};
    return ok();
  }
  if (access_key || secret_key)
    return wrong(fmt::format("{} is set and {} is not", access_key ? "AWS_ACCESS_KEY_ID" : "AWS_SECRET_ACCESS_KEY",
                             access_key ? "AWS_SECRET_ACCESS_KEY" : "AWS_ACCESS_KEY_ID"),
                 "set both or none");
  TORPOR_ASSIGN_OR_RETURN(settings.role, web_identity(variable, settings.region, settings.ca_file));
  if (settings.role != nullptr) return ok();
  const std::optional<std::string> named = variable("AWS_SHARED_CREDENTIALS_FILE");
  const std::string path = named.value_or(variable("HOME").value_or("/root") + "/.aws/credentials");
  const std::optional<std::string> profile = variable("AWS_PROFILE");
  struct stat info {};
  if (!named && !profile && ::stat(path.c_str(), &info) != 0 && errno == ENOENT) {
    TORPOR_ASSIGN_OR_RETURN(settings.role, container_role(variable, settings.ca_file));
    if (settings.role != nullptr) return ok();
    TORPOR_ASSIGN_OR_RETURN(settings.role, instance_role(variable));
    if (settings.role != nullptr) return ok();
  }
  TORPOR_ASSIGN_OR_RETURN(settings.credentials, credentials_in(path, profile.value_or("default")));
  return ok();
}

}  // namespace

Result<S3Settings> s3_settings(const std::string& url, const Environment& variable) {
  constexpr std::string_view kScheme = "s3://";
  S3Settings settings;
  const std::string rest = url.starts_with(kScheme) ? url.substr(kScheme.size()) : "";
  settings.bucket = rest.substr(0, rest.find('/'));
  if (rest.size() > settings.bucket.size()) settings.prefix = rest.substr(settings.bucket.size() + 1);
  if (!settings.prefix.empty() && !settings.prefix.ends_with('/')) settings.prefix += '/';
  if (!is_key(settings.bucket) || (!settings.prefix.empty() && !is_key(settings.prefix + "x")))
    return wrong(fmt::format("{} is not the URL of a bucket", url),
                 "write s3://BUCKET or s3://BUCKET/PREFIX, with letters, digits, '.', '_' and '-'");
  settings.region = variable("AWS_REGION").value_or(variable("AWS_DEFAULT_REGION").value_or("us-east-1"));
  settings.ca_file = variable("AWS_CA_BUNDLE").value_or("");
  settings.endpoint = variable("AWS_ENDPOINT_URL_S3").value_or(variable("AWS_ENDPOINT_URL").value_or(""));
  if (settings.endpoint.empty()) {
    // With one more dot the certificate would not match.
    settings.bucket_in_host = settings.bucket.find('.') == std::string::npos;
    settings.endpoint = fmt::format("https://{}s3.{}.amazonaws.com",
                                    settings.bucket_in_host ? settings.bucket + "." : "", settings.region);
  }
  while (settings.endpoint.ends_with('/')) settings.endpoint.pop_back();
  const size_t scheme_end = settings.endpoint.find("://");
  const std::string scheme = settings.endpoint.substr(0, scheme_end);
  if (scheme_end == std::string::npos || (scheme != "http" && scheme != "https") ||
      settings.endpoint.find_first_of("/?#@ ", scheme_end + 3) != std::string::npos)
    return wrong(fmt::format("the endpoint {} is not a URL of a server", settings.endpoint),
                 "set AWS_ENDPOINT_URL to http://HOST:PORT or https://HOST:PORT");
  TORPOR_RETURN_IF_ERROR(who_asks(variable, settings));
  return settings;
}

}  // namespace torpor::remote
