// SPDX-License-Identifier: Apache-2.0
// The line that shows the progress of long work on a terminal.
#pragma once

#include <cstddef>
#include <string>

#include "base/progress.h"

namespace torpor::cli {

// Return one line of at most `columns` columns: phase, bar, share, bytes, rate and time left. Without a known total it
// has phase, bytes and rate. Where the line is too short, the bar goes first and then the end of the words.
std::string progress_text(const Progress& progress, size_t columns);

}  // namespace torpor::cli
