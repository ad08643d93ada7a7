// SPDX-License-Identifier: Apache-2.0
#include "remote/open_store.h"

#include <fmt/core.h>

#include "remote/curl.h"
#include "remote/directory_store.h"
#include "remote/s3_store.h"

namespace torpor::remote {

Result<std::unique_ptr<ObjectStore>> open_object_store(FileSystem& file_system, const std::string& url,
                                                       std::function<bool()> stop,
                                                       std::function<double()> seconds_left) {
  if (url.starts_with("s3://")) {
    TORPOR_RETURN_IF_ERROR(begin_curl());  // before a role is asked
    TORPOR_ASSIGN_OR_RETURN(S3Settings settings, s3_settings(url));
    return make_s3_store(url, std::move(settings), std::move(stop), {.seconds_left = std::move(seconds_left)});
  }
  if (url.starts_with("file:///")) return open_directory_store(file_system, url.substr(7));
  return Error{.code = Code::kInvalidArgument,
               .what = fmt::format("{} is not the URL of a store", url),
               .next_step = "write s3://BUCKET/PREFIX or file:///ABSOLUTE/PATH"};
}

}  // namespace torpor::remote
