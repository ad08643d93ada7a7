// SPDX-License-Identifier: Apache-2.0
// Text for people out of an answer. Text out of a checkpoint is made harmless first (base/text.h).
#pragma once

#include <string>
#include <vector>

#include "base/text.h"
#include "checkpoint/metadata.h"
#include "tools/torpor/verb.h"

namespace torpor::cli {

using Row = std::vector<std::string>;

std::string cell(const Json& value);  // harmless
// JSON for --json, harmless. Names in a checkpoint may be any bytes; what is no UTF-8 is replaced, so that it is always
// JSON. `indent` -1: in one line.
std::string dump(const Json& json, int indent = -1);
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
