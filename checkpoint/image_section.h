// SPDX-License-Identifier: Apache-2.0
// The section that makes a checkpoint an image: requests that left their engine (checkpoint/image_store.h), and not a
// whole engine.
#pragma once

#include <string_view>

#include "base/status.h"
#include "checkpoint/engine_checkpoint.h"
#include "checkpoint/manifest.h"

namespace torpor {

Section image_section();  // readers of checkpoints carry it along
bool is_image(const Manifest& manifest);
// kIncompatible: the checkpoint at `path` is an image, and no engine wakes from that.
Status check_is_whole_engine(const Manifest& manifest, std::string_view path);

}  // namespace torpor
