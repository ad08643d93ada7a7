// SPDX-License-Identifier: Apache-2.0
#include "console/recorder.h"

#include <fmt/core.h>

namespace torpor::console {

using std::chrono::steady_clock;

Result<std::unique_ptr<Recorder>> Recorder::create(FileSystem& file_system, std::string from, const std::string& to) {
  TORPOR_ASSIGN_OR_RETURN(auto directory, file_system.open_directory(to, true));
  return std::unique_ptr<Recorder>(new Recorder(std::move(directory), std::move(from)));
}

Status Recorder::look(bool last) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<SourceEvents> news, follower_.poll(last));
  const auto now = steady_clock::now();
  const bool sync = last || now - synced_ >= std::chrono::seconds(1);
  for (const SourceEvents& each : news) {
    Written& written = written_[each.path];
    if (written.writer == nullptr) {
      const EventSource& source = each.source;
      TORPOR_ASSIGN_OR_RETURN(
          written.writer,
          RecordingWriter::create(
              *to_, fmt::format("{}-{}-{}-{}", source.pid, source.process_start, source.role, source.rank), source));
    }
    written.lost = each.lost;
    if (!each.events.empty()) TORPOR_RETURN_IF_ERROR(written.writer->write(each.events));
    if (sync) TORPOR_RETURN_IF_ERROR(written.writer->sync());
    events_ += each.events.size();
  }
  if (sync) synced_ = now;
  return ok();
}

RecorderCounts Recorder::counts() const {
  RecorderCounts counts{.processes = written_.size(), .events = events_};
  for (const auto& [path, written] : written_) {
    counts.lost += written.lost;
    counts.bytes += written.writer == nullptr ? 0 : written.writer->bytes();
  }
  return counts;
}

RecorderThread::RecorderThread(std::unique_ptr<Recorder> recorder, std::chrono::duration<double> seconds,
                               uint64_t bytes)
    : recorder_(std::move(recorder)), seconds_(seconds), bytes_(bytes), thread_([this] { run(); }) {}

void RecorderThread::run() {
  const auto began = steady_clock::now();
  for (bool last = false; !last;) {
    last = stop_.load(std::memory_order_acquire) || (seconds_.count() > 0 && steady_clock::now() - began >= seconds_) ||
           now().first.bytes >= bytes_;
    Status looked = try_catch([&] { return recorder_->look(last); });
    last = last || !looked;
    {
      const MutexLock lock(mutex_);
      counts_ = recorder_->counts();
      if (!looked) status_ = std::move(looked);  // a copy could throw
    }
    if (!last) std::this_thread::sleep_for(Recorder::kPoll);
  }
  ended_.store(true, std::memory_order_release);
}

std::pair<RecorderCounts, Status> RecorderThread::now() const {
  const MutexLock lock(mutex_);
  return {counts_, status_};
}

std::pair<RecorderCounts, Status> RecorderThread::stop() {
  stop_.store(true, std::memory_order_release);
  if (thread_.joinable()) thread_.join();
  return now();
}

}  // namespace torpor::console
