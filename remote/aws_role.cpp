// SPDX-License-Identifier: Apache-2.0
#include "remote/aws_role.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <fstream>
#include <thread>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>
#include <pugixml.hpp>

#include "base/log.h"
#include "base/mutex.h"
#include "remote/curl.h"

namespace torpor::remote {
namespace {

constexpr size_t kMostIssuedBytes = 64 << 10;
constexpr size_t kMostTokenBytes = 64 << 10;
constexpr std::time_t kRenewSeconds = 300;  // before they expire
constexpr std::time_t kAskAgainSeconds = 60;
constexpr int kRoleAttempts = 3;
constexpr std::chrono::milliseconds kPause{200};  // before the second attempt; doubles

Error unauthenticated(std::string what, std::string next_step) {
  return Error{.code = Code::kUnauthenticated, .what = std::move(what), .next_step = std::move(next_step)};
}
Error invalid(std::string what, std::string next_step) {
  return Error{.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next_step)};
}

using Until = std::chrono::steady_clock::time_point;

struct Request {
  std::string url;
  Until until;
  std::vector<std::string> headers{};
  const char* method = "GET";
  std::string body{};     // for a POST
  std::string ca_file{};  // empty: the system's
  bool near = false;      // a service of this machine: used without a proxy, and answers at once
};
struct Answer {
  long status = 0;
  std::string text;
};

// Return the URL without path and query, which may be secrets.
std::string place_of(const std::string& url) {
  const size_t host = url.find("://");
  return host == std::string::npos ? "" : url.substr(0, url.find_first_of("/?#", host + 3));
}

size_t append(char* from, size_t size, size_t count, void* to) {
  auto& text = *static_cast<std::string*>(to);
  const size_t some = size * count;
  if (text.size() + some > kMostIssuedBytes) return 0;
  text.append(from, some);
  return some;
}

Result<Answer> ask_once(const Request& request) {
  TORPOR_ASSIGN_OR_RETURN(const CurlHandle handle, new_curl_handle());
  CURL* const curl = handle.get();
  Answer answer;
  std::array<char, CURL_ERROR_SIZE> words{};
  CurlLines lines;
  TORPOR_RETURN_IF_ERROR(append_line(lines, "Expect:"));
  for (const std::string& header : request.headers) TORPOR_RETURN_IF_ERROR(append_line(lines, header));
  set_up(curl, {.url = request.url, .lines = lines, .words = words.data(), .write = &append, .to = &answer.text});
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(request.until - Until::clock::now()).count();
  curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT_MS, request.near ? 1000L : 5000L);
  curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, std::clamp<long>(left, 1, request.near ? 2000 : 10000));  // 0: no limit
  if (request.near) curl_easy_setopt(curl, CURLOPT_NOPROXY, "*");
  if (!request.ca_file.empty()) curl_easy_setopt(curl, CURLOPT_CAINFO, request.ca_file.c_str());
  if (std::string_view(request.method) == "POST") {
    curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request.body.size()));
    curl_easy_setopt(curl, CURLOPT_POSTFIELDS, request.body.c_str());
  } else {
    curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, request.method);
  }
  const CURLcode code = curl_easy_perform(curl);
  curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &answer.status);
  if (code == CURLE_OK) return answer;
  return Error{.code = Code::kUnavailable,
               .what = fmt::format("{} does not answer: {}", place_of(request.url), curl_words(code, words.data())),
               .next_step = "try again"};
}

// Make the request, and retry it after a status that means "try later". An answer of any other status is a value.
Result<Answer> ask(const Request& request) {
  std::optional<Error> error;
  for (int attempt = 0; attempt < kRoleAttempts; ++attempt) {
    if (attempt > 0) {
      const auto pause = kPause * (1 << (attempt - 1));
      if (Until::clock::now() + pause >= request.until) break;
      std::this_thread::sleep_for(pause);
    }
    Result<Answer> answer = ask_once(request);
    if (answer && answer->status != 429 && answer->status < 500) return answer;
    error = answer ? Error{.code = Code::kUnavailable,
                           .what = fmt::format("{} answers {}", place_of(request.url), answer->status),
                           .next_step = "try again"}
                   : std::move(answer).error();
  }
  return *std::move(error);
}

// Return whether the text may be in a header: it is printable ASCII.
bool is_line(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c < '\x7f'; });
}
bool is_word(std::string_view text) { return is_line(text) && text.find(' ') == std::string_view::npos; }

// "2026-12-31T23:59:59Z", perhaps with a fraction.
std::optional<std::time_t> moment_of(const std::string& text) {
  std::tm parts{};
  const char* const rest = ::strptime(text.c_str(), "%Y-%m-%dT%H:%M:%S", &parts);
  if (rest == nullptr || (*rest != 'Z' && *rest != '.')) return std::nullopt;
  return ::timegm(&parts);
}

struct Issued {
  S3Credentials credentials;
  std::time_t ends = 0;
};

Result<Issued> issued(const std::string& url, std::string access_key, std::string secret_key, std::string token,
                      const std::string& expiration) {
  const std::optional<std::time_t> ends = moment_of(expiration);
  if (!is_word(access_key) || !is_word(secret_key) || !is_word(token) || !ends)
    return unauthenticated(fmt::format("{} answered without a key, a token and when they end", place_of(url)),
                           "check that it is AWS's service, and that the machine has a role");
  return Issued{{std::move(access_key), std::move(secret_key), std::move(token)}, *ends};
}

Result<Issued> issued_in_json(const std::string& url, const std::string& text) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto value = [&](const char* name) {
    const auto found = json.is_object() ? json.find(name) : json.end();
    return json.is_object() && found != json.end() && found->is_string() ? found->get<std::string>() : std::string();
  };
  return issued(url, value("AccessKeyId"), value("SecretAccessKey"), value("Token"), value("Expiration"));
}

Error refused(const std::string& url, const Answer& answer, std::string next_step) {
  return unauthenticated(fmt::format("{} refuses credentials: it answers {}", place_of(url), answer.status),
                         std::move(next_step));
}

// Read a bearer token, which the system replaces now and then.
Result<std::string> token_in(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kMostTokenBytes, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(std::max<std::streamsize>(file.gcount(), 0)));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  if (!is_line(text))
    return unauthenticated(fmt::format("{} has no token that can be read", path),
                           "check that the token is mounted, and that this user may read it");
  return text;
}

// Caches credentials until they are to be renewed.
class Renewed : public AwsRole {
 public:
  Result<S3Credentials> credentials(std::time_t now, double seconds) final {
    const Until until = Until::clock::now() + std::chrono::duration_cast<Until::duration>(
                                                  std::chrono::duration<double>(std::clamp(seconds, 0.0, 30.0)));
    {
      const MutexLock lock(mutex_);
      for (uint64_t failures = failures_;;) {
        const bool valid = last_ && now < last_->ends;
        if (valid && (fetching_ || now < last_->ends - kRenewSeconds || now < ask_again_)) return last_->credentials;
        if (failures_ != failures) return failure_;  // the other thread's fetch, which this one waited for
        if (!fetching_) break;
        const auto left = until - Until::clock::now();
        if (left <= Until::duration::zero())
          return Error{.code = Code::kUnavailable,
                       .what = "another thread still asks for credentials",
                       .next_step = "try again"};
        fetched_.wait_for(mutex_, left);
      }
      fetching_ = true;
    }
    Result<Issued> fresh = try_catch([&]() -> Result<Issued> { return fetch(until); });
    const MutexLock lock(mutex_);
    fetching_ = false;
    fetched_.notify_all();
    ask_again_ = now + kAskAgainSeconds;
    if (!fresh) {
      ++failures_;
      failure_ = fresh.error();
    }
    if (fresh) {
      last_ = *std::move(fresh);
    } else if (!last_ || now >= last_->ends) {
      return std::move(fresh).error();
    } else {
      log().warn("credentials that end soon cannot be renewed yet: {}", fresh.error());
    }
    return last_->credentials;
  }

 private:
  virtual Result<Issued> fetch(Until until) = 0;
  Mutex mutex_;
  CondVar fetched_;
  std::optional<Issued> last_ TORPOR_GUARDED_BY(mutex_);
  std::time_t ask_again_ TORPOR_GUARDED_BY(mutex_) = 0;  // while the last credentials are valid
  bool fetching_ TORPOR_GUARDED_BY(mutex_) = false;
  uint64_t failures_ TORPOR_GUARDED_BY(mutex_) = 0;
  Error failure_ TORPOR_GUARDED_BY(mutex_);  // of the last fetch that failed
};

class WebIdentity final : public Renewed {
 public:
  WebIdentity(std::string url, std::string role, std::string session, std::string token_file, std::string ca_file)
      : url_(std::move(url)),
        role_(std::move(role)),
        session_(std::move(session)),
        token_file_(std::move(token_file)),
        ca_file_(std::move(ca_file)) {}

 private:
  Result<Issued> fetch(Until until) override {
    TORPOR_ASSIGN_OR_RETURN(const std::string token, token_in(token_file_));
    S3Request form;
    form.query = {{"Action", "AssumeRoleWithWebIdentity"},
                  {"Version", "2011-06-15"},
                  {"RoleArn", role_},
                  {"RoleSessionName", session_},
                  {"WebIdentityToken", token}};
    TORPOR_ASSIGN_OR_RETURN(const Answer answer, ask({.url = url_,
                                                      .until = until,
                                                      .headers = {"content-type: application/x-www-form-urlencoded"},
                                                      .method = "POST",
                                                      .body = encoded_query(form),
                                                      .ca_file = ca_file_}));
    pugi::xml_document document;
    const bool parsed = static_cast<bool>(document.load_buffer(answer.text.data(), answer.text.size()));
    if (answer.status != 200) {
      std::string code = parsed ? document.child("ErrorResponse").child("Error").child_value("Code") : "";
      if (!is_word(code)) code = fmt::format("{}", answer.status);
      return unauthenticated(fmt::format("{} refuses the role {}: {}", place_of(url_), role_, code.substr(0, 100)),
                             "check AWS_ROLE_ARN, and that the role trusts this identity");
    }
    const pugi::xml_node found = document.child("AssumeRoleWithWebIdentityResponse")
                                     .child("AssumeRoleWithWebIdentityResult")
                                     .child("Credentials");
    return issued(url_, found.child_value("AccessKeyId"), found.child_value("SecretAccessKey"),
                  found.child_value("SessionToken"), found.child_value("Expiration"));
  }

  const std::string url_;
  const std::string role_;
  const std::string session_;
  const std::string token_file_;
  const std::string ca_file_;
};

class ContainerRole final : public Renewed {
 public:
  ContainerRole(std::string url, std::string token, std::string token_file, std::string ca_file)
      : url_(std::move(url)),
        token_(std::move(token)),
        token_file_(std::move(token_file)),
        ca_file_(std::move(ca_file)) {}

 private:
  Result<Issued> fetch(Until until) override {
    Request request{.url = url_, .until = until, .ca_file = ca_file_, .near = url_.starts_with("http://")};
    std::string token = token_;
    if (!token_file_.empty()) {
      TORPOR_ASSIGN_OR_RETURN(token, token_in(token_file_));
    }
    if (!token.empty()) request.headers.push_back("Authorization: " + token);
    TORPOR_ASSIGN_OR_RETURN(const Answer answer, ask(request));
    if (answer.status != 200) return refused(url_, answer, "check the role of this container or pod");
    return issued_in_json(url_, answer.text);
  }

  const std::string url_;
  const std::string token_;
  const std::string token_file_;
  const std::string ca_file_;
};

class InstanceRole final : public Renewed {
 public:
  explicit InstanceRole(std::string endpoint) : endpoint_(std::move(endpoint)) {}

 private:
  Result<Issued> fetch(Until until) override {
    const std::string roles = endpoint_ + "/latest/meta-data/iam/security-credentials/";
    Result<Answer> session = ask({.url = endpoint_ + "/latest/api/token",
                                  .until = until,
                                  .headers = {"X-aws-ec2-metadata-token-ttl-seconds: 21600"},
                                  .method = "PUT",
                                  .near = true});
    // Other clouds have a service at this address too.
    if (!session || session->status != 200 || !is_word(session->text)) {
      Error error = session ? refused(endpoint_, *session, "") : std::move(session).error();
      error.next_step =
          "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SHARED_CREDENTIALS_FILE; on an instance of EC2, "
          "allow "
          "this process the instance metadata, version 2";
      return error.within("no credentials in the environment or a file, nor from the instance metadata");
    }
    const std::vector<std::string> headers = {"X-aws-ec2-metadata-token: " + session->text};
    TORPOR_ASSIGN_OR_RETURN(const Answer names, ask({.url = roles, .until = until, .headers = headers, .near = true}));
    const std::string name = names.text.substr(0, names.text.find('\n'));
    if (names.status != 200 || !is_word(name) || name.find_first_of("/?#%\\") != std::string::npos)
      return unauthenticated(fmt::format("{} names no role of this machine: it answers {}", endpoint_, names.status),
                             "give the machine an instance profile");
    TORPOR_ASSIGN_OR_RETURN(const Answer answer,
                            ask({.url = roles + name, .until = until, .headers = headers, .near = true}));
    if (answer.status != 200) return refused(roles + name, answer, "check the role of this machine");
    return issued_in_json(roles + name, answer.text);
  }

  const std::string endpoint_;
};

std::string without_slash(std::string url) {
  while (url.ends_with('/')) url.pop_back();
  return url;
}

// Return the URL's host, without port and brackets; empty if the scheme is not http or https, or the URL names a user.
std::string host_of(const std::string& url) {
  const std::unique_ptr<CURLU, decltype(&curl_url_cleanup)> parts(curl_url(), &curl_url_cleanup);
  char* user = nullptr;
  char* host = nullptr;
  if (parts == nullptr || !(url.starts_with("http://") || url.starts_with("https://")) ||
      curl_url_set(parts.get(), CURLUPART_URL, url.c_str(), 0) != CURLUE_OK)
    return {};
  if (curl_url_get(parts.get(), CURLUPART_USER, &user, 0) == CURLUE_OK) {
    curl_free(user);
    return {};
  }
  if (curl_url_get(parts.get(), CURLUPART_HOST, &host, 0) != CURLUE_OK) return {};
  std::string found = host;
  curl_free(host);
  if (found.starts_with('[')) found = found.substr(1, found.size() - 2);
  return found;
}

// Return whether a token may be sent to this URL: by https, or to a host that the AWS SDKs accept by plain HTTP (this
// machine, and the agents of ECS and EKS).
bool may_have_token(const std::string& url) {
  const std::string host = host_of(url);
  if (host.empty() || url.starts_with("https://")) return !host.empty();
  return host == "localhost" || host == "127.0.0.1" || host == "::1" || host == "169.254.170.2" ||
         host == "169.254.170.23" || host == "fd00:ec2::23";
}

}  // namespace

Result<std::shared_ptr<AwsRole>> web_identity(const Environment& variable, const std::string& region,
                                              const std::string& ca_file) {
  const std::optional<std::string> token_file = variable("AWS_WEB_IDENTITY_TOKEN_FILE");
  const std::optional<std::string> role = variable("AWS_ROLE_ARN");
  if (!token_file) return std::shared_ptr<AwsRole>();
  if (!role) return invalid("AWS_WEB_IDENTITY_TOKEN_FILE is set and AWS_ROLE_ARN is not", "name the role, too");
  const std::string url =
      variable("AWS_ENDPOINT_URL_STS")
          .value_or(variable("AWS_ENDPOINT_URL").value_or(fmt::format("https://sts.{}.amazonaws.com", region)));
  if (!may_have_token(url))
    return invalid(fmt::format("STS cannot be asked at {}", place_of(url)),
                   "set AWS_ENDPOINT_URL_STS to https://HOST, and AWS_REGION");
  return std::make_shared<WebIdentity>(without_slash(url) + "/", *role,
                                       variable("AWS_ROLE_SESSION_NAME").value_or("torpor"), *token_file, ca_file);
}

Result<std::shared_ptr<AwsRole>> container_role(const Environment& variable, const std::string& ca_file) {
  const std::optional<std::string> path = variable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
  std::optional<std::string> url = variable("AWS_CONTAINER_CREDENTIALS_FULL_URI");
  if (path) url = "http://169.254.170.2" + *path;
  if (!url) return std::shared_ptr<AwsRole>();
  if (!may_have_token(*url)) {
    return path ? invalid("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI is no path", "begin it with '/', without https")
                : invalid(fmt::format("AWS_CONTAINER_CREDENTIALS_FULL_URI is at {}", place_of(*url)),
                          "use https, or http to this machine or an agent of ECS or EKS");
  }
  const std::string token = variable("AWS_CONTAINER_AUTHORIZATION_TOKEN").value_or("");
  if (!token.empty() && !is_line(token))
    return invalid("AWS_CONTAINER_AUTHORIZATION_TOKEN has more than one line", "give it in one");
  return std::make_shared<ContainerRole>(*url, token, variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE").value_or(""),
                                         ca_file);
}

Result<std::shared_ptr<AwsRole>> instance_role(const Environment& variable) {
  std::string disabled = variable("AWS_EC2_METADATA_DISABLED").value_or("");
  for (char& letter : disabled) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  if (disabled == "true") return std::shared_ptr<AwsRole>();
  const std::string endpoint = variable("AWS_EC2_METADATA_SERVICE_ENDPOINT").value_or("http://169.254.169.254");
  if (host_of(endpoint).empty())
    return invalid(fmt::format("AWS_EC2_METADATA_SERVICE_ENDPOINT is {}", endpoint), "write http://HOST");
  return std::make_shared<InstanceRole>(without_slash(endpoint));
}

}  // namespace torpor::remote
