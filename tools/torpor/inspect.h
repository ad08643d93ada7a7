// What the inspector knows about a checkpoint, as JSON: the one source of both its --json and its tables (render.h).
// Keys and their meaning: tools/torpor/README.md. Nothing here writes.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "base/file_system.h"
#include "base/status.h"

namespace torpor::inspect {

using Json = nlohmann::ordered_json;  // keys in the order in which they are read

// {"directory", "checkpoints": [{"name", "path", "readable", "problem" | "generation", "created", …}]}, oldest first.
Result<Json> list(FileSystem& file_system, const std::string& directory);
// `path`: a checkpoint, or a directory of checkpoints, of which the latest one is taken.
Result<Json> info(FileSystem& file_system, const std::string& path);
Result<Json> requests(FileSystem& file_system, const std::string& path);
// {"path", "whole", "problems": [{"code", "what", "next_step"}]}: reads every byte.
Result<Json> verify(FileSystem& file_system, const std::string& path);

Json to_json(const Error& error);

}  // namespace torpor::inspect
