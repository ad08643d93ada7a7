// SPDX-License-Identifier: Apache-2.0
// http_get(): what an HTTP server answers to one GET. Thread: the caller's. Blocks for at most 30 s.
#pragma once

#include <functional>
#include <string>

#include "base/status.h"

namespace torpor::remote {

struct HttpAnswer {
  long status = 0;
  std::string body;
};

// Ask once; a redirect is not followed. `url`: http:// or https://. `key`: sent as a bearer token, unless it is empty.
// `stop`: looked at while it waits. Errors: kUnsupported without libcurl, kInvalidArgument for no such URL,
// kUnavailable where nobody answers, kCorruption for an answer of more than 8 MiB, kAborted for `stop`.
Result<HttpAnswer> http_get(const std::string& url, const std::string& key, const std::function<bool()>& stop);

}  // namespace torpor::remote
