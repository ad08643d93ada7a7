// SPDX-License-Identifier: Apache-2.0
// SectionReader: decodes the values of named sections. A section is its version (u32), then its values.
#pragma once

#include <algorithm>
#include <set>
#include <span>
#include <string>

#include "checkpoint/archived_values.h"
#include "checkpoint/engine_checkpoint.h"

namespace torpor {

class SectionReader {
 public:
  SectionReader(std::span<const Section> sections, uint32_t version) : sections_(sections), version_(version) {}

  // Decode the values of one section. kCorruption: the section is missing, damaged, or has bytes left over.
  // kIncompatible: it has another version.
  template <class... Values>
  Status take(std::string_view name, Values&... values) {
    const auto wrong = [name](std::string_view what, Code code = Code::kCorruption) {
      return Error{
          .code = code, .what = fmt::format("section {}: {}", name, what), .next_step = "use another checkpoint"};
    };
    const auto found =
        std::find_if(sections_.begin(), sections_.end(), [&](const Section& section) { return section.name == name; });
    if (found == sections_.end()) return wrong("it is missing");
    taken_.insert(found->name);
    try {
      BoundedInput archive(std::as_bytes(std::span(found->bytes)));
      uint32_t version = 0;
      archive(version);
      if (version != version_)
        return wrong(fmt::format("its version is {}, this torpor reads {}", version, version_), Code::kIncompatible);
      archive(values...);
      if (archive.left() != 0) return wrong(fmt::format("{} bytes are left over", archive.left()));
    } catch (const std::exception& problem) {  // Cereal's, and bad_alloc
      return wrong(problem.what());
    }
    return ok();
  }

  bool taken(const std::string& name) const { return taken_.contains(name); }

 private:
  const std::span<const Section> sections_;
  const uint32_t version_;
  std::set<std::string> taken_;
};

}  // namespace torpor
