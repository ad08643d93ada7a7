// SPDX-License-Identifier: Apache-2.0
// tree, diff of session images: requests, from which they were forked, their tokens, bytes and digests.
#pragma once

#include <string>

#include "checkpoint/checkpoint.h"
#include "tools/torpor/verb.h"

namespace torpor::cli {

// Return whether the path is DIRECTORY/images, which holds images and no checkpoints.
bool is_directory_of_images(const Context& context, const std::string& path);

// tree: of DIRECTORY/images, or of one image.
Result<Json> tree_of_images(const Context& context);
Result<Json> tree_of_image(const Context& context, const Checkpoint& image);
std::string show_tree_of_images(const Json& json);
Exit exit_of_tree(const Json& json);

// diff: of which at least one is an image.
Result<Json> diff_of_images(const Checkpoint& a, const Checkpoint& b);
std::string show_diff_of_images(const Json& json);

}  // namespace torpor::cli
