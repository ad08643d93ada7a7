// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/image_section.h"

#include <algorithm>

#include <fmt/core.h>

namespace torpor {
namespace {

constexpr std::string_view kImageSection = "image";
constexpr uint8_t kImageVersion = 1;

}  // namespace

Section image_section() { return {.name = std::string(kImageSection), .bytes = {kImageVersion}, .required = false}; }

bool is_image(const Manifest& manifest) {
  return std::any_of(manifest.sections.begin(), manifest.sections.end(),
                     [](const SectionInfo& section) { return section.name == kImageSection; });
}

Status check_is_whole_engine(const Manifest& manifest, std::string_view path) {
  if (!is_image(manifest)) return ok();
  return Error{.code = Code::kIncompatible,
               .what = fmt::format("{} is an image of hibernated requests", path),
               .next_step = "give the path of the image to torpor.resume()"};
}

}  // namespace torpor
