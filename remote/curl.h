// SPDX-License-Identifier: Apache-2.0
// Starts libcurl, and sets up a request as all requests of this folder are. Threads: any; one at a time for a handle.
#pragma once

#include <memory>
#include <string>

#include <curl/curl.h>

#include "base/status.h"

namespace torpor::remote {

// Start libcurl, once in a process. kUnsupported: the portable module or inspector does not find it on this machine
// (bindings/portable_system.cpp).
Status begin_curl();

struct CurlDeleter {
  void operator()(CURL* handle) const { curl_easy_cleanup(handle); }
  void operator()(curl_slist* lines) const { curl_slist_free_all(lines); }
};
using CurlHandle = std::unique_ptr<CURL, CurlDeleter>;
using CurlLines = std::unique_ptr<curl_slist, CurlDeleter>;

// Start libcurl and make a handle. kResourceExhausted: there is no memory for one. Also the errors of begin_curl().
Result<CurlHandle> new_curl_handle();
// Append a header line. kResourceExhausted: there is no memory for it.
Status append_line(CurlLines& lines, const std::string& line);

// What all requests set: http and https alone, no signals, the header `lines`, and `words`, of CURL_ERROR_SIZE bytes,
// for libcurl's own description of an error. `write` gets `to` with each part of the answer.
struct CurlRequest {
  const std::string& url;
  const CurlLines& lines;
  char* words;
  size_t (*write)(char* from, size_t size, size_t count, void* to);
  void* to;
};
void set_up(CURL* handle, const CurlRequest& request);

// Return libcurl's description of the error `code`: `words` of the request, or the general one.
inline const char* curl_words(CURLcode code, const char* words) {
  return words[0] != '\0' ? words : curl_easy_strerror(code);
}

}  // namespace torpor::remote
