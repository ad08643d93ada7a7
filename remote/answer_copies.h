// SPDX-License-Identifier: Apache-2.0
// Copies of a server's response log in an ObjectStore. Its files are cut into parts as a checkpoint's are.
//
// Threads: any; each call uses memory for one part.
#pragma once

#include <string>

#include "base/file_system.h"
#include "remote/checkpoint_index.h"
#include "remote/object_store.h"

namespace torpor::remote {

inline constexpr std::string_view kAnswersPrefix = "answers/";
bool is_answers_key(std::string_view key);  // whether push_answers() can have made it

// Return the files of a pushed log, with their parts. `index`: the hash that push_answers() returned. kNotFound: no
// such log. kCorruption: the index is damaged.
Result<std::vector<IndexedFile>> read_answers(ObjectStore& store, const std::string& index);

// Push the log in `directory`, which a server may write to meanwhile: everything recorded before the call is included.
// Return the hash of the index (answers/<hash>). Parts that the store has are not sent again.
Result<std::string> push_answers(FileSystem& file_system, const std::string& directory, ObjectStore& store);

// Pull a log into `answers` of a directory of checkpoints, whole or not at all. A log that was there is kept beside it,
// as answers-before-…. kCorruption: the store has other bytes than were pushed.
Status pull_answers(FileSystem& file_system, ObjectStore& store, const std::string& index,
                    const std::string& directory);

}  // namespace torpor::remote
