// SPDX-License-Identifier: Apache-2.0
// Recorder: writes the events of the rings of a directory into a directory of recordings, one for each process. Used by
// `torpor record` and by record.start of a console.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "console/event_files.h"
#include "console/recording.h"

namespace torpor::console {

struct RecorderCounts {
  uint64_t processes = 0;
  uint64_t events = 0;
  uint64_t lost = 0;
  uint64_t bytes = 0;  // in files
};

// Threads: one.
class Recorder {
 public:
  static constexpr std::chrono::milliseconds kPoll{50};  // between calls of look()
  // Make a recorder from the directory `from` to the directory `to`, which is made if it is missing. `file_system` must
  // outlive the recorder.
  static Result<std::unique_ptr<Recorder>> create(FileSystem& file_system, std::string from, const std::string& to);
  // Write new events, and sync once a second. `last`: sync now, and count events that are still being written as lost.
  Status look(bool last);
  RecorderCounts counts() const;
  bool any_alive() const { return follower_.any_alive(); }

 private:
  Recorder(std::unique_ptr<Directory> to, std::string from) : to_(std::move(to)), follower_(std::move(from), false) {}
  struct Written {
    std::unique_ptr<RecordingWriter> writer;
    uint64_t lost = 0;
  };
  const std::unique_ptr<Directory> to_;
  EventFollower follower_;
  std::map<std::string, Written> written_;  // by the ring's path
  uint64_t events_ = 0;
  std::chrono::steady_clock::time_point synced_ = std::chrono::steady_clock::now();
};

// Runs a Recorder on a thread of its own until stop(), for `seconds` (0: for ever), or until `bytes` bytes are written.
// An error ends it.
class RecorderThread {
 public:
  RecorderThread(std::unique_ptr<Recorder> recorder, std::chrono::duration<double> seconds, uint64_t bytes);
  ~RecorderThread() { (void)stop(); }
  RecorderThread(const RecorderThread&) = delete;
  RecorderThread& operator=(const RecorderThread&) = delete;
  // Stop it and return its result, after the last sync. Further calls return the same.
  std::pair<RecorderCounts, Status> stop();
  std::pair<RecorderCounts, Status> now() const;
  bool runs() const { return !ended_.load(std::memory_order_acquire); }

 private:
  void run();
  const std::unique_ptr<Recorder> recorder_;  // used by the thread
  const std::chrono::duration<double> seconds_;
  const uint64_t bytes_;
  mutable Mutex mutex_;
  RecorderCounts counts_ TORPOR_GUARDED_BY(mutex_);
  Status status_ TORPOR_GUARDED_BY(mutex_);
  std::atomic<bool> stop_ = false;
  std::atomic<bool> ended_ = false;
  std::thread thread_;
};

}  // namespace torpor::console
