// SPDX-License-Identifier: Apache-2.0
#include "engine/delivery/owner_processes.h"

#include <algorithm>
#include <array>
#include <cstring>

#include <unistd.h>

#include <fmt/core.h>

#include "base/digest.h"
#include "base/log.h"
#include "checkpoint/store_names.h"

namespace torpor {
namespace {

constexpr std::string_view kOwnerFile = "OWNER";
constexpr std::string_view kStandbyFile = "STANDBY";
constexpr size_t kMostAddressBytes = 256;
constexpr std::array<char, 8> kOwnerMagic = {'T', 'O', 'R', 'P', 'O', 'W', 'N', 'R'};
constexpr uint32_t kOwnerVersion = 1;
constexpr size_t kMostProcesses = 200;
// Looks in a term. If 1/kSuspendedPerTerm of a term passes between two looks, the machine or this process was
// suspended: the earlier looks say nothing about the owner.
constexpr int kLooksPerTerm = 20;
constexpr int kSuspendedPerTerm = 4;

struct OwnerEntry {
  uint64_t started;
  int32_t pid;
  uint32_t unused;
};

// The file, in the byte order of the machine: nobody reads it on another one.
struct OwnerPage {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t count;
  std::array<char, 40> boot;
  uint64_t pid_namespace;
  uint64_t term_ns;
  std::array<OwnerEntry, kMostProcesses> processes;
  std::array<uint8_t, 16> digest;  // of all before it
  uint64_t beats;                  // written alone
};
static_assert(sizeof(OwnerPage) <= 4096 && sizeof(OwnerEntry) == 16);
constexpr size_t kBeforeDigest = offsetof(OwnerPage, digest);
constexpr size_t kBeats = offsetof(OwnerPage, beats);

// Behind the page. Earlier versions of torpor neither write nor read it.
struct AddressPage {
  uint32_t bytes;
  std::array<char, kMostAddressBytes> address;
  std::array<uint8_t, 16> digest;  // of all before it
};
constexpr uint64_t kAddressPlace = 4096;
static_assert(sizeof(OwnerPage) <= kAddressPlace);

Digest digest_of_address(const AddressPage& page) {
  return digest_of(std::as_bytes(std::span(&page, 1)).first(offsetof(AddressPage, digest)));
}

std::string_view file_of(RecordRole role) { return role == RecordRole::kOwner ? kOwnerFile : kStandbyFile; }

std::span<const std::byte> bytes_of(const OwnerPage& page) { return std::as_bytes(std::span(&page, 1)); }

Digest digest_of_page(const OwnerPage& page) { return digest_of(bytes_of(page).first(kBeforeDigest)); }

std::string folder_of(const std::string& directory) { return fmt::format("{}/{}", directory, kAnswersFolder); }

// Return the address behind a page; empty: there is none, or a server writes it now.
Result<std::string> read_address(File& file, uint64_t size) {
  AddressPage page;
  if (size < kAddressPlace + sizeof page) return std::string();
  TORPOR_RETURN_IF_ERROR(file.pread(std::as_writable_bytes(std::span(&page, 1)), kAddressPlace));
  if (page.bytes > kMostAddressBytes || digest_of_address(page).bytes != page.digest) return std::string();
  return std::string(page.address.data(), page.bytes);
}

// Return the page; nothing: there is none, or a server writes it now. `address`: gets the one behind it, unless null.
Result<std::optional<OwnerPage>> read_page(FileSystem& file_system, const std::string& directory, RecordRole role,
                                           std::string* address = nullptr) {
  const Result<std::unique_ptr<Directory>> folder = file_system.open_directory(folder_of(directory), false);
  if (!folder && folder.error().code == Code::kNotFound) return std::nullopt;
  if (!folder) return folder.error();
  const Result<std::unique_ptr<File>> file = (*folder)->open_file(file_of(role));
  if (!file && file.error().code == Code::kNotFound) return std::nullopt;
  if (!file) return file.error();
  TORPOR_ASSIGN_OR_RETURN(const uint64_t size, (*file)->size());
  OwnerPage page;
  if (size < sizeof page) return std::nullopt;
  TORPOR_RETURN_IF_ERROR((*file)->pread(std::as_writable_bytes(std::span(&page, 1)), 0));
  if (page.magic != kOwnerMagic || page.count == 0 || page.count > kMostProcesses ||
      digest_of_page(page).bytes != page.digest)
    return std::nullopt;
  if (page.version != kOwnerVersion)
    return Error{
        .code = Code::kIncompatible,
        .what = fmt::format("{}: version {}, this torpor reads {}", (*file)->name(), page.version, kOwnerVersion),
        .next_step = "start both servers with one version of torpor"};
  if (address != nullptr) {
    TORPOR_ASSIGN_OR_RETURN(*address, read_address(**file, size));
  }
  return page;
}

// Return whether this is multiprocessing's resource tracker: it tidies up after the other processes, and then ends.
bool tidies_up(const ProcessId& process) {
  return command_line(process.pid).find("multiprocessing.resource_tracker") != std::string::npos;
}

// Return whether the process runs another program than the server, as a compiler that a library starts: its end is not
// the end of the engine. The engine's processes run the server's program.
bool is_other_program(const ProcessId& process, const std::string& servers) {
  const std::string program = executable_of(process.pid);
  return !program.empty() && program != servers;
}

}  // namespace

// --- the owner -------------------------------------------------------------------------------------------------------

Result<std::unique_ptr<OwnerRecord>> OwnerRecord::begin(FileSystem& file_system, const std::string& directory,
                                                        std::chrono::nanoseconds term, std::string_view address,
                                                        RecordRole role) {
  if (address.size() > kMostAddressBytes)
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("the address of this server has {} bytes", address.size()),
                 .next_step = fmt::format("give one of at most {}", kMostAddressBytes)};
  return try_catch([&]() -> Result<std::unique_ptr<OwnerRecord>> {
    TORPOR_ASSIGN_OR_RETURN(const ProcessSpace space, this_process_space());
    TORPOR_ASSIGN_OR_RETURN(const ProcessId self, find_process(::getpid()));
    std::vector<ProcessId> processes = descendants_of(self.pid);
    const std::string program = executable_of(self.pid);
    std::erase_if(processes, [&](const ProcessId& one) { return tidies_up(one) || is_other_program(one, program); });
    processes.insert(processes.begin(), self);
    OwnerPage page{.magic = kOwnerMagic, .version = kOwnerVersion, .count = static_cast<uint32_t>(processes.size())};
    if (processes.size() > kMostProcesses || space.boot.size() > page.boot.size())
      return Error{.code = Code::kResourceExhausted,
                   .what = fmt::format("this server has {} processes", processes.size()),
                   .next_step = fmt::format("a server with a standby may have {}", kMostProcesses)};
    std::copy(space.boot.begin(), space.boot.end(), page.boot.begin());
    page.pid_namespace = space.pid_namespace;
    page.term_ns = static_cast<uint64_t>(term.count());
    for (size_t i = 0; i < processes.size(); ++i)
      page.processes[i] = {.started = processes[i].started, .pid = processes[i].pid, .unused = 0};
    page.digest = digest_of_page(page).bytes;
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> folder,
                            file_system.open_directory(folder_of(directory), true));
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<File> file, folder->open_slots(file_of(role), FileIo::kPlain));
    AddressPage behind{.bytes = static_cast<uint32_t>(address.size())};
    std::copy(address.begin(), address.end(), behind.address.begin());
    behind.digest = digest_of_address(behind).bytes;
    TORPOR_RETURN_IF_ERROR(file->pwrite(std::as_bytes(std::span(&behind, 1)), kAddressPlace));
    TORPOR_RETURN_IF_ERROR(file->pwrite(bytes_of(page), 0));
    return std::unique_ptr<OwnerRecord>(new OwnerRecord(std::move(file)));
  });
}

Status OwnerRecord::beat() {
  ++beats_;
  return file_->pwrite(std::as_bytes(std::span(&beats_, 1)), kBeats);
}

// --- the other server ------------------------------------------------------------------------------------------------

Result<OwnerLook> OwnerWatch::wait(std::chrono::nanoseconds patience) {
  return try_catch([&]() -> Result<OwnerLook> {
    const auto until = clock_.now() + patience;
    while (true) {
      if (processes_.empty()) {
        TORPOR_ASSIGN_OR_RETURN(OwnerLook look, find_owner());
        if (look.state != OwnerState::kServes) return look;
      }
      const auto left = std::max(until - clock_.now(), std::chrono::nanoseconds(0));
      if (std::optional<OwnerLook> look = ended(std::min(left, term_ / kLooksPerTerm))) return *std::move(look);
      TORPOR_RETURN_IF_ERROR(see_heartbeat());
      if (std::optional<OwnerLook> look = silent()) return *std::move(look);
      if (clock_.now() >= until)
        return OwnerLook{
            .state = OwnerState::kServes, .pid = processes_.front().id().pid, .why = {}, .address = address_};
    }
  });
}

// Precondition: no owner is known.
Result<OwnerLook> OwnerWatch::find_owner() {
  TORPOR_ASSIGN_OR_RETURN(const std::optional<OwnerPage> page, read_page(file_system_, directory_, role_, &address_));
  const bool is_new = page_ && page && page_->bytes != page->digest;
  page_ = Digest{.bytes = page ? page->digest : std::array<uint8_t, 16>{}};
  const char* const who = role_ == RecordRole::kOwner ? "owner" : "standby";
  const auto none = [](std::string why) {
    return OwnerLook{.state = OwnerState::kNone, .pid = 0, .why = std::move(why), .address = {}};
  };
  if (!page) return none(fmt::format("no server has named itself as the {}", who));
  TORPOR_ASSIGN_OR_RETURN(const ProcessSpace space, this_process_space());
  const ProcessSpace theirs{.boot = std::string(page->boot.data(), ::strnlen(page->boot.data(), page->boot.size())),
                            .pid_namespace = page->pid_namespace};
  if (theirs.boot != space.boot) return none(fmt::format("the last {} ended with its machine", who));
  if (theirs != space)
    return none(
        fmt::format("the last {} ran in another container: both servers share one namespace of processes", who));
  std::vector<Process> processes;
  bool server_ended = false;
  for (size_t i = 0; i < page->count; ++i) {
    Result<Process> process = Process::open({.pid = page->processes[i].pid, .started = page->processes[i].started});
    if (process) {
      processes.push_back(*std::move(process));
    } else if (process.error().code != Code::kNotFound) {
      return process.error();
    } else if (i == 0) {
      server_ended = true;
    }
  }
  if (server_ended && !is_new) return none(fmt::format("the last {} has ended", who));
  processes_ = std::move(processes);
  term_ = std::chrono::nanoseconds(page->term_ns);
  beats_ = page->beats;
  looked_ = beat_at_ = clock_.now();
  stopped_at_.assign(processes_.size(), std::nullopt);
  if (!server_ended)
    return OwnerLook{.state = OwnerState::kServes, .pid = page->processes[0].pid, .why = {}, .address = address_};
  return OwnerLook{.state = OwnerState::kEnded,
                   .pid = page->processes[0].pid,
                   .why = fmt::format("its server has ended (process {})", page->processes[0].pid),
                   .address = {}};
}

std::optional<OwnerLook> OwnerWatch::ended(std::chrono::nanoseconds patience) const {
  const std::optional<size_t> which = wait_for_end(processes_, patience);
  if (!which) return std::nullopt;
  return OwnerLook{.state = OwnerState::kEnded,
                   .pid = processes_.front().id().pid,
                   .why = fmt::format("its {} has ended (process {})", *which == 0 ? "server" : "engine",
                                      processes_[*which].id().pid),
                   .address = {}};
}

Status OwnerWatch::see_heartbeat() {
  const auto now = clock_.now();
  if (now - looked_ > term_ / kSuspendedPerTerm) {
    beat_at_ = now;
    std::fill(stopped_at_.begin(), stopped_at_.end(), std::nullopt);
  }
  looked_ = now;
  TORPOR_ASSIGN_OR_RETURN(const std::optional<OwnerPage> page, read_page(file_system_, directory_, role_));
  if (page && page->beats != beats_) {
    beats_ = page->beats;
    beat_at_ = now;
  }
  for (size_t i = 0; i < processes_.size(); ++i) {
    if (!processes_[i].stopped()) {
      stopped_at_[i].reset();
    } else if (!stopped_at_[i]) {
      stopped_at_[i] = now;
    }
  }
  return ok();
}

std::optional<OwnerLook> OwnerWatch::silent() const {
  const OwnerLook look{
      .state = OwnerState::kSilent, .pid = processes_.front().id().pid, .why = {}, .address = address_};
  const double term = seconds_between({}, term_);
  for (size_t i = 1; i < processes_.size(); ++i) {  // the server has a heartbeat
    if (!stopped_at_[i] || looked_ - *stopped_at_[i] < term_) continue;
    OwnerLook stopped = look;
    stopped.why = fmt::format("its engine (process {}) is stopped for {:g} s", processes_[i].id().pid, term);
    return stopped;
  }
  if (looked_ - beat_at_ < term_) return std::nullopt;
  OwnerLook mute = look;
  mute.why = fmt::format("its server (process {}){} gave no heartbeat for {:g} s", look.pid,
                         stopped_at_[0] ? " is stopped and" : "", term);
  return mute;
}

Status OwnerWatch::end_owner(std::chrono::nanoseconds patience) {
  return try_catch([&]() -> Status {
    const auto until = clock_.now() + patience;
    const size_t known = processes_.size();
    for (size_t i = 0; i < known; ++i) {
      for (const ProcessId& id :
           processes_[i].ended() ? std::vector<ProcessId>() : descendants_of(processes_[i].id().pid)) {
        if (std::any_of(processes_.begin(), processes_.end(), [&](const Process& one) { return one.id() == id; }))
          continue;
        if (tidies_up(id)) continue;
        if (Result<Process> process = Process::open(id)) processes_.push_back(*std::move(process));
      }
    }
    for (const Process& process : processes_) TORPOR_RETURN_IF_ERROR(process.kill());
    for (const Process& process : processes_) {
      const auto left = std::max(until - clock_.now(), std::chrono::nanoseconds(0));
      if (wait_for_end(std::span(&process, 1), left)) continue;
      return Error{.code = Code::kTimeout,
                   .what = fmt::format("process {} of the {} lives on after SIGKILL", process.id().pid,
                                       role_ == RecordRole::kOwner ? "owner" : "standby"),
                   .next_step = "see what it waits for in the kernel: cat /proc/PID/stack"};
    }
    processes_.clear();
    // A process that OWNER does not name, as one that outlived an earlier owner, may hold this lock.
    const Result<std::unique_ptr<Directory>> store = file_system_.open_directory(directory_, false);
    if (!store) return store.error();
    const Result<std::unique_ptr<File>> lock = (*store)->lock(kLockFile);
    if (!lock) return lock.error();
    return ok();
  });
}

}  // namespace torpor
