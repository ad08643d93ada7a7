// SPDX-License-Identifier: Apache-2.0
#include "remote/http_get.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "remote/curl.h"

namespace torpor::remote {
namespace {

constexpr size_t kMostGetBytes = 8 << 20;
constexpr long kMostGetSeconds = 30;
constexpr long kMostPostSeconds = 600;

struct GetExchange {
  HttpAnswer answer{};
  bool too_large = false;
  const std::function<bool()>* stop = nullptr;
  bool stopped = false;

  static size_t write(char* from, size_t size, size_t count, void* self_pointer) {
    auto& self = *static_cast<GetExchange*>(self_pointer);
    self.too_large = self.answer.body.size() + size * count > kMostGetBytes;
    if (self.too_large) return 0;
    self.answer.body.append(from, size * count);
    return size * count;
  }
  static int progress(void* self_pointer, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
    auto& self = *static_cast<GetExchange*>(self_pointer);
    self.stopped = *self.stop && (*self.stop)();
    return self.stopped ? 1 : 0;
  }
};

Result<HttpAnswer> ask(const std::string& url, const std::string& key, const std::function<bool()>& stop, bool posts) {
  const auto is_control = [](char letter) { return static_cast<unsigned char>(letter) <= ' ' || letter == '\x7f'; };
  if (std::any_of(key.begin(), key.end(), is_control))
    return Error{.code = Code::kInvalidArgument,
                 .what = "the key has blanks or control characters",
                 .next_step = "give it as the server has it"};
  GetExchange exchange{.stop = &stop};
  TORPOR_ASSIGN_OR_RETURN(const CurlHandle handle, new_curl_handle());
  CurlLines lines;
  if (!key.empty()) TORPOR_RETURN_IF_ERROR(append_line(lines, fmt::format("Authorization: Bearer {}", key)));
  std::array<char, CURL_ERROR_SIZE> words{};
  CURL* const curl = handle.get();
  curl_easy_setopt(curl, CURLOPT_NOPROXY, "*");  // a proxy of the environment would get the key
  set_up(curl, {.url = url, .lines = lines, .words = words.data(), .write = &GetExchange::write, .to = &exchange});
  curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, (posts ? kMostPostSeconds : kMostGetSeconds) * 1000);
  if (posts) curl_easy_setopt(curl, CURLOPT_POSTFIELDS, "");
  curl_easy_setopt(curl, CURLOPT_NOPROGRESS, 0L);
  curl_easy_setopt(curl, CURLOPT_XFERINFOFUNCTION, &GetExchange::progress);
  curl_easy_setopt(curl, CURLOPT_XFERINFODATA, &exchange);
  const CURLcode code = curl_easy_perform(curl);
  if (exchange.stopped) return Error{.code = Code::kAborted, .what = "stopped", .next_step = "start it again"};
  if (exchange.too_large)
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("{} answers more than {} bytes", url, kMostGetBytes),
                 .next_step = "see whether it is a server of torpor"};
  const char* const said = curl_words(code, words.data());
  if (code == CURLE_URL_MALFORMAT || code == CURLE_UNSUPPORTED_PROTOCOL)
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("{}: {}", url, said),
                 .next_step = "give that of a server, like http://127.0.0.1:8000"};
  if (code != CURLE_OK)
    return Error{.code = Code::kUnavailable,
                 .what = fmt::format("{}: {}", url, said),
                 .next_step = "see whether the server runs, and where"};
  curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &exchange.answer.status);
  return std::move(exchange.answer);
}

}  // namespace

Result<HttpAnswer> http_get(const std::string& url, const std::string& key, const std::function<bool()>& stop) {
  return ask(url, key, stop, false);
}

Result<HttpAnswer> http_post(const std::string& url, const std::string& key, const std::function<bool()>& stop) {
  return ask(url, key, stop, true);
}

}  // namespace torpor::remote
