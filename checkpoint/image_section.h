// SPDX-License-Identifier: Apache-2.0
// The section that marks a checkpoint as an image: requests that left their engine (checkpoint/image_store.h), not a
// whole engine.
#pragma once

#include <string_view>

#include "base/status.h"
#include "checkpoint/engine_checkpoint.h"
#include "checkpoint/manifest.h"

namespace torpor {

Section image_section();  // not required: older readers carry it along
bool is_image(const Manifest& manifest);
// kIncompatible: the checkpoint at `path` is an image, from which no engine can wake.
Status check_is_whole_engine(const Manifest& manifest, std::string_view path);

}  // namespace torpor
