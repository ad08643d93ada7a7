// SPDX-License-Identifier: Apache-2.0
#include "remote/curl.h"

namespace torpor::remote {

Status begin_curl() {
  static const CURLcode begun = curl_global_init(CURL_GLOBAL_DEFAULT);
  if (begun == CURLE_OK) return ok();
  return Error{.code = Code::kUnsupported,
               .what = "an object store needs libcurl, and libcurl.so.4 cannot be loaded",
               .next_step = "install it: the package libcurl4 (Debian, Ubuntu) or libcurl (Fedora, RHEL)"};
}

Result<CurlHandle> new_curl_handle() {
  TORPOR_RETURN_IF_ERROR(begin_curl());
  CurlHandle handle(curl_easy_init());
  if (handle == nullptr)
    return Error{.code = Code::kResourceExhausted, .what = "no memory for a connection", .next_step = "free some"};
  return handle;
}

Status append_line(CurlLines& lines, const std::string& line) {
  curl_slist* const all = curl_slist_append(lines.get(), line.c_str());
  if (all == nullptr)
    return Error{.code = Code::kResourceExhausted, .what = "no memory for a request", .next_step = "free some"};
  (void)lines.release();
  lines.reset(all);
  return ok();
}

void set_up(CURL* handle, const CurlRequest& request) {
  curl_easy_setopt(handle, CURLOPT_URL, request.url.c_str());
  curl_easy_setopt(handle, CURLOPT_HTTPHEADER, request.lines.get());
  curl_easy_setopt(handle, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(handle, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(handle, CURLOPT_ERRORBUFFER, request.words);
  curl_easy_setopt(handle, CURLOPT_WRITEFUNCTION, request.write);
  curl_easy_setopt(handle, CURLOPT_WRITEDATA, request.to);
}

}  // namespace torpor::remote
