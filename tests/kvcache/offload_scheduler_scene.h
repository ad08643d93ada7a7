// SPDX-License-Identifier: Apache-2.0
// The scheduler with workers in one process, step by step; every byte is compared.
#pragma once

#include <memory>

#include "kvcache/offload_scheduler.h"
#include "tests/kvcache/offload_scene.h"
#include "tests/support/temporary_directory.h"

namespace torpor::test {

class OffloadSchedulerTest : public ::testing::TestWithParam<OffloadMode> {
 protected:
  OffloadScene& scene(OffloadSceneOptions options = {}) {
    options.scheduler.mode = GetParam();
    options.scheduler.queue.min_batch_size = 1;
    options.rank.own_threads = GetParam() == OffloadMode::kEager;  // lazily, blocks are written under a copy
    if (options.placement.disk) options.rank.disk_segments = 4, options.rank.segment_slots = 4;
    options.rank.directory = temporary_ / "store";
    scene_ = std::make_unique<OffloadScene>(std::move(options));
    return *scene_;
  }
  bool eager() const { return GetParam() == OffloadMode::kEager; }
  void TearDown() override {
    if (scene_ != nullptr) {
      EXPECT_SUCCEEDS(scene_->scheduler->check());
    }
  }
  TemporaryDirectory temporary_;
  std::unique_ptr<OffloadScene> scene_;
};

}  // namespace torpor::test
