// SPDX-License-Identifier: Apache-2.0
// The response log of a server on another machine: its files, cut into parts as a checkpoint's are.
#pragma once

#include <string>

#include "base/file_system.h"
#include "remote/checkpoint_index.h"
#include "remote/object_store.h"

namespace torpor::remote {

inline constexpr std::string_view kAnswersPrefix = "answers/";

// The files of a log that was pushed, with their parts. kNotFound, kCorruption.
Result<std::vector<IndexedFile>> read_answers(ObjectStore& store, const std::string& index);

// Of a directory in which a server may write meanwhile: what was recorded before the call is there. Returns the hash of
// the index (answers/<hash>); parts that are there already are not sent again.
Result<std::string> push_answers(FileSystem& file_system, const std::string& directory, ObjectStore& store);

// Into `answers` of a directory of checkpoints: they are there whole or not at all. Others that were there are kept
// beside them, as answers-before-…. kCorruption: something else is stored than was pushed.
Status pull_answers(FileSystem& file_system, ObjectStore& store, const std::string& index,
                    const std::string& directory);

}  // namespace torpor::remote
