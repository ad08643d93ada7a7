// SPDX-License-Identifier: Apache-2.0
#include "remote/curl.h"

#include <curl/curl.h>

namespace torpor::remote {

Status begin_curl() {
  static const CURLcode begun = curl_global_init(CURL_GLOBAL_DEFAULT);
  if (begun == CURLE_OK) return ok();
  return Error{.code = Code::kUnsupported,
               .what = "an object store needs libcurl, and libcurl.so.4 cannot be loaded",
               .next_step = "install it: the package libcurl4 (Debian, Ubuntu) or libcurl (Fedora, RHEL)"};
}

}  // namespace torpor::remote
