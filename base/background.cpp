// SPDX-License-Identifier: Apache-2.0
#include "base/background.h"

namespace torpor {

void Background::run() noexcept {
  result_ = try_catch(work_);
  running_.store(false, std::memory_order_release);
}

Status Background::begin(std::function<Status()> work) {
  finish();
  result_ = ok();
  work_ = std::move(work);
  if (!own_thread_) return ok();
  running_ = true;
  Status started = try_catch([this]() -> Status {
    thread_ = std::thread([this] { run(); });
    return ok();
  });
  if (started) return started;
  running_ = false;
  work_ = nullptr;
  return started;
}

bool Background::ended() {
  if (running_.load(std::memory_order_acquire)) return false;
  finish();
  return true;
}

void Background::finish() noexcept {
  if (thread_.joinable()) {
    thread_.join();
  } else if (work_ != nullptr) {
    run();
  }
  work_ = nullptr;
}

}  // namespace torpor
