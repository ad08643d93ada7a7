// SPDX-License-Identifier: Apache-2.0
#include "base/process.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <csignal>
#include <map>
#include <string_view>

#include <dirent.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fmt/core.h>

namespace torpor {
namespace {

// Return the content of a file of /proc; empty: there is no such file.
std::string content_of(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string content;
  if (file.get() < 0) return content;
  char piece[4096];
  for (ssize_t got = 0; (got = ::read(file.get(), piece, sizeof piece)) > 0;)
    content.append(piece, static_cast<size_t>(got));
  return content;
}

struct About {
  char state = 0;  // 0: there is no such process
  int32_t parent = 0;
  int32_t threads = 0;
  uint64_t started = 0;
};

// /proc/PID/stat: "PID (NAME) STATE PARENT …", the number of threads is the 20th field, the start time the 22nd.
About about(int32_t pid) {
  const std::string content = content_of(fmt::format("/proc/{}/stat", pid));
  std::string_view rest = content;
  rest.remove_prefix(std::min(rest.size(), rest.rfind(')') + 2));  // the name may hold anything
  About found;
  for (int field = 3; field <= 22 && !rest.empty(); ++field) {
    const std::string_view word = rest.substr(0, rest.find(' '));
    if (field == 3) found.state = word.front();
    if (field == 4) std::from_chars(word.data(), word.data() + word.size(), found.parent);
    if (field == 20) std::from_chars(word.data(), word.data() + word.size(), found.threads);
    if (field == 22) std::from_chars(word.data(), word.data() + word.size(), found.started);
    rest.remove_prefix(std::min(rest.size(), word.size() + 1));
  }
  if (found.started == 0) found.state = 0;
  return found;
}

// A process whose first thread has ended (state Z) lives on in its other threads, with its files and locks.
bool lives(const About& process) {
  return process.state != 0 && process.state != 'X' && (process.state != 'Z' || process.threads > 1);
}

Error has_ended(int32_t pid) {
  return {.code = Code::kNotFound, .what = fmt::format("there is no process {}", pid), .next_step = "it has ended"};
}

}  // namespace

Result<ProcessSpace> this_process_space() {
  ProcessSpace space{.boot = content_of("/proc/sys/kernel/random/boot_id")};
  while (!space.boot.empty() && space.boot.back() == '\n') space.boot.pop_back();
  struct stat info {};
  if (space.boot.empty() || ::stat("/proc/self/ns/pid", &info) != 0)
    return system_error(errno, "/proc does not say which machine and which namespace of processes this is",
                        "mount /proc");
  space.pid_namespace = info.st_ino;
  return space;
}

Result<ProcessId> find_process(int32_t pid) {
  const About found = about(pid);
  if (!lives(found)) return has_ended(pid);
  return ProcessId{.pid = pid, .started = found.started};
}

std::vector<ProcessId> descendants_of(int32_t pid) {
  std::multimap<int32_t, ProcessId> children;
  DIR* const all = ::opendir("/proc");
  if (all == nullptr) return {};
  while (const dirent* const entry = ::readdir(all)) {
    const std::string_view name = entry->d_name;
    int32_t number = 0;
    if (std::from_chars(name.data(), name.data() + name.size(), number).ptr != name.data() + name.size()) continue;
    const About found = about(number);
    if (lives(found)) children.emplace(found.parent, ProcessId{.pid = number, .started = found.started});
  }
  (void)::closedir(all);
  std::vector<ProcessId> found;
  for (size_t next = 0; next <= found.size(); ++next) {
    const auto [first, last] = children.equal_range(next == 0 ? pid : found[next - 1].pid);
    for (auto child = first; child != last; ++child) found.push_back(child->second);
  }
  return found;
}

bool is_descendant_of(const ProcessId& process, int32_t ancestor) {
  About found = about(process.pid);
  if (!lives(found) || found.started != process.started) return false;
  // A process is older than those that it has started, so this comes to an end.
  while (found.state != 0 && found.parent > 0) {
    if (found.parent == ancestor) return true;
    found = about(found.parent);
  }
  return false;
}

std::string command_line(int32_t pid) {
  std::string words = content_of(fmt::format("/proc/{}/cmdline", pid));
  std::replace(words.begin(), words.end(), '\0', ' ');
  return words;
}

std::string executable_of(int32_t pid) {
  std::array<char, 4096> path{};
  const ssize_t bytes = ::readlink(fmt::format("/proc/{}/exe", pid).c_str(), path.data(), path.size());
  if (bytes < 0) return {};
  return {path.data(), static_cast<size_t>(bytes)};
}

Result<Process> Process::open(const ProcessId& id) {
  Descriptor fd(static_cast<int>(::syscall(SYS_pidfd_open, id.pid, 0)));
  if (fd.get() < 0 && errno == ESRCH) return has_ended(id.pid);
  if (fd.get() < 0 && errno == ENOSYS)
    return Error{.code = Code::kUnsupported,
                 .what = "this kernel has no file descriptors of processes",
                 .next_step = "use Linux 5.3 or newer",
                 .origin = Origin::kSystem,
                 .native = ENOSYS};
  if (fd.get() < 0) return system_error(errno, fmt::format("cannot open the process {}", id.pid));
  // Read after the pidfd was opened: the number cannot have gone to another process since.
  const About found = about(id.pid);
  Process process(id, std::move(fd));
  if (!lives(found) || found.started != id.started || process.ended()) return has_ended(id.pid);
  return process;
}

bool Process::ended() const { return wait_for_end(std::span(this, 1), std::chrono::nanoseconds(0)).has_value(); }

bool Process::stopped() const {
  const About found = about(id_.pid);
  return found.started == id_.started && (found.state == 'T' || found.state == 't');
}

Status Process::kill() const {
  if (::syscall(SYS_pidfd_send_signal, fd_.get(), SIGKILL, nullptr, 0) == 0 || errno == ESRCH) return ok();
  return system_error(errno, fmt::format("cannot end the process {}", id_.pid));
}

std::optional<size_t> wait_for_end(std::span<const Process> processes, std::chrono::nanoseconds patience) {
  std::vector<pollfd> waited;
  for (const Process& process : processes) waited.push_back({.fd = process.fd_.get(), .events = POLLIN, .revents = 0});
  const auto until = std::chrono::steady_clock::now() + patience;
  while (true) {
    const auto left = std::max(until - std::chrono::steady_clock::now(), std::chrono::steady_clock::duration(0));
    const auto whole =
        std::chrono::ceil<std::chrono::milliseconds>(std::min<std::chrono::nanoseconds>(left, std::chrono::hours(1)));
    if (::poll(waited.data(), waited.size(), static_cast<int>(whole.count())) > 0) {
      for (size_t i = 0; i < waited.size(); ++i) {
        if (waited[i].revents != 0) return i;
      }
    }
    if (std::chrono::steady_clock::now() >= until) return std::nullopt;
  }
}

}  // namespace torpor
