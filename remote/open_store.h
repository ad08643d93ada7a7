// SPDX-License-Identifier: Apache-2.0
// An ObjectStore by its URL.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/file_system.h"
#include "remote/object_store.h"

namespace torpor::remote {

// file:///absolute/path or s3://bucket/prefix (remote/s3_settings.h). `stop` is asked now and then; empty: never stops.
// `seconds_left`: what is left for a call (remote/s3_store.h); a shared directory knows no such limit.
// kInvalidArgument names what is wrong with the URL or the settings.
Result<std::unique_ptr<ObjectStore>> open_object_store(FileSystem& file_system, const std::string& url,
                                                       std::function<bool()> stop = {},
                                                       std::function<double()> seconds_left = {});

}  // namespace torpor::remote
