// SPDX-License-Identifier: Apache-2.0
// Text for people out of an answer. Text out of a checkpoint is made harmless first: no control characters.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/metadata.h"
#include "tools/torpor/verb.h"

namespace torpor::cli {

using Row = std::vector<std::string>;

// `text` with control characters as \xNN: it may have been written to change a terminal.
std::string harmless(const std::string& text);
std::string cell(const Json& value);  // harmless
Json metadata_json(const Metadata& metadata);
std::string metadata_text(const Json& metadata);  // "name=value, …", harmless
std::string size_text(const Json& bytes);         // "1.23 GB"
std::string time_text(double unix_seconds);       // "2026-11-20T17:04:12Z"
// Columns as wide as their widest cell; the first row is the heading.
std::string table(const std::vector<Row>& rows);
// Whether headings and problems are coloured; set once by main(). Off unless standard output is a terminal.
void use_colours(bool on);
std::string good(const std::string& text);
std::string bad(const std::string& text);

}  // namespace torpor::cli
