// SPDX-License-Identifier: Apache-2.0
// Opens an ObjectStore by its URL.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/file_system.h"
#include "remote/object_store.h"

namespace torpor::remote {

// `url`: file:///absolute/path, or s3://bucket/prefix (remote/s3_settings.h). `stop` is called now and then; if it
// returns true, the call ends with kAborted. Empty: never. `seconds_left`: the time left for a call
// (remote/s3_store.h); a shared directory ignores it. kInvalidArgument names what is wrong with the URL or the
// settings. `file_system` outlives the result.
Result<std::unique_ptr<ObjectStore>> open_object_store(FileSystem& file_system, const std::string& url,
                                                       std::function<bool()> stop = {},
                                                       std::function<double()> seconds_left = {});

}  // namespace torpor::remote
