// SPDX-License-Identifier: Apache-2.0
// http_get(), http_post(): send one request and return the answer. Thread: the caller's. http_get() blocks for at most
// 30 s, http_post() for at most 10 minutes.
#pragma once

#include <functional>
#include <string>

#include "base/status.h"

namespace torpor::remote {

struct HttpAnswer {
  long status = 0;
  std::string body;
};

// Ask once; neither a redirect nor a proxy is followed. `url`: http:// or https://. `key`: sent as a bearer token,
// unless it is empty. `stop`: called while it waits; true ends the request. kUnsupported: there is no libcurl.
// kInvalidArgument: another kind of URL. kUnavailable: nobody answers. kCorruption: the answer has more than 8 MiB.
// kAborted: `stop` was true.
Result<HttpAnswer> http_get(const std::string& url, const std::string& key, const std::function<bool()>& stop);
// The same with a POST without a body.
Result<HttpAnswer> http_post(const std::string& url, const std::string& key, const std::function<bool()>& stop);

}  // namespace torpor::remote
