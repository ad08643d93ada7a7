// SPDX-License-Identifier: Apache-2.0
#include "remote/mooncake_calls.h"

#include <algorithm>

namespace torpor::remote {
namespace {

Error unavailable(std::string what) {
  return {.code = Code::kUnavailable, .what = std::move(what), .next_step = "it is computed instead"};
}
Error too_late(std::string what) {
  return {.code = Code::kTimeout, .what = std::move(what), .next_step = "it is computed instead"};
}

}  // namespace

class MooncakeCalls::Desk {
 public:
  enum class State : uint8_t { kFree, kTaken, kBusy, kDone, kLeft };
  State state = State::kFree;
  PageBuffer memory;
  std::span<std::byte> room;
  bool registered = false;
  Work work;
  Status status;
  bool ended = false;
  std::thread thread;
};

struct MooncakeCalls::Shared {
  using State = Desk::State;

  // Return the client. The first caller connects it; others wait for that.
  Result<std::shared_ptr<MooncakeClient>> connected() {
    {
      MutexLock lock(mutex);
      while (connecting && !ending) changed.wait(mutex);
      if (ending) return unavailable("the remote store is being closed");
      if (client != nullptr) return client;
      connecting = true;
    }
    Result<std::shared_ptr<MooncakeClient>> made =
        try_catch([&]() -> Result<std::shared_ptr<MooncakeClient>> { return connect(); });
    const MutexLock lock(mutex);
    connecting = false;
    if (made) client = *made;
    changed.notify_all();
    return made;
  }

  const MooncakeConnect connect;
  const uint64_t room_bytes;
  Mutex mutex;
  CondVar changed;
  std::vector<std::unique_ptr<Desk>> desks TORPOR_GUARDED_BY(mutex);
  std::shared_ptr<MooncakeClient> client TORPOR_GUARDED_BY(mutex);
  bool connecting TORPOR_GUARDED_BY(mutex) = false;
  bool ending TORPOR_GUARDED_BY(mutex) = false;

  Shared(MooncakeConnect made_by, uint64_t bytes) : connect(std::move(made_by)), room_bytes(bytes) {}
};

MooncakeCalls::MooncakeCalls(MooncakeConnect connect, int threads, uint64_t room_bytes,
                             std::chrono::milliseconds longest_end)
    : shared_(std::make_shared<Shared>(std::move(connect), room_bytes)), longest_end_(longest_end) {
  const MutexLock lock(shared_->mutex);
  for (int i = 0; i < threads; ++i) shared_->desks.push_back(std::make_unique<Desk>());
}

MooncakeCalls::~MooncakeCalls() {
  const Deadline until = std::chrono::steady_clock::now() + longest_end_;
  std::vector<std::thread> ended;
  MutexLock lock(shared_->mutex);
  shared_->ending = true;
  shared_->changed.notify_all();
  for (const std::unique_ptr<Desk>& desk : shared_->desks) {
    if (!desk->thread.joinable()) continue;
    while (!desk->ended && std::chrono::steady_clock::now() < until)
      shared_->changed.wait_for(shared_->mutex, until - std::chrono::steady_clock::now());
    if (desk->ended) {
      ended.push_back(std::move(desk->thread));
    } else {
      desk->thread.detach();
    }
  }
  lock.unlock();
  for (std::thread& thread : ended) thread.join();
}

void MooncakeCalls::serve(const std::shared_ptr<Shared>& shared, Desk& desk) {
  using State = Desk::State;
  while (true) {
    Work work;
    {
      MutexLock lock(shared->mutex);
      while (!desk.work && !shared->ending) shared->changed.wait(shared->mutex);
      if (!desk.work) {
        desk.ended = true;
        shared->changed.notify_all();
        return;
      }
      work = std::exchange(desk.work, nullptr);
    }
    Status status = try_catch([&]() -> Status {
      TORPOR_ASSIGN_OR_RETURN(const std::shared_ptr<MooncakeClient> client, shared->connected());
      if (!desk.registered) TORPOR_RETURN_IF_ERROR(client->use(desk.room));
      desk.registered = true;
      work(*client);
      return ok();
    });
    work = nullptr;
    const MutexLock lock(shared->mutex);
    desk.status = std::move(status);
    desk.state = desk.state == State::kLeft ? State::kFree : State::kDone;
    shared->changed.notify_all();
  }
}

Result<MooncakeCalls::Desk*> MooncakeCalls::take(Deadline until) {
  using State = Desk::State;
  return try_catch([&]() -> Result<Desk*> {
    MutexLock lock(shared_->mutex);
    while (true) {
      size_t left = 0;
      for (const std::unique_ptr<Desk>& each : shared_->desks) {
        Desk& desk = *each;
        left += desk.state == State::kLeft ? 1 : 0;
        if (desk.state != State::kFree) continue;
        desk.room = desk.memory.room(shared_->room_bytes);
        if (desk.room.empty()) {
          return Error{.code = Code::kResourceExhausted,
                       .what = "there is no memory for what goes to the Mooncake store",
                       .next_step = "it is computed instead"};
        }
        if (!desk.thread.joinable()) desk.thread = std::thread([shared = shared_, &desk] { serve(shared, desk); });
        desk.state = State::kTaken;
        return &desk;
      }
      if (left == shared_->desks.size()) return unavailable("the Mooncake store has not answered earlier calls yet");
      const Deadline now = std::chrono::steady_clock::now();
      if (now >= until) return too_late("earlier calls of the Mooncake store took too long");
      shared_->changed.wait_for(shared_->mutex, until - now);
    }
  });
}

std::span<std::byte> MooncakeCalls::room(Desk& desk) const { return desk.room; }

Status MooncakeCalls::run(Desk*& lent, Work work, Deadline until) {
  using State = Desk::State;
  Desk& desk = *lent;
  MutexLock lock(shared_->mutex);
  desk.work = std::move(work);
  desk.state = State::kBusy;
  shared_->changed.notify_all();
  while (desk.state != State::kDone) {
    const Deadline now = std::chrono::steady_clock::now();
    if (now >= until) {
      desk.state = State::kLeft;
      lent = nullptr;
      shared_->changed.notify_all();
      return too_late("the Mooncake store took too long");
    }
    shared_->changed.wait_for(shared_->mutex, until - now);
  }
  desk.state = State::kTaken;
  return desk.status;
}

void MooncakeCalls::give(Desk& desk) {
  const MutexLock lock(shared_->mutex);
  desk.state = Desk::State::kFree;
  shared_->changed.notify_all();
}

}  // namespace torpor::remote
