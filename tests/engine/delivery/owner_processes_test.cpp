// SPDX-License-Identifier: Apache-2.0
// The owner of a server's directory as its standby sees it: alive, ended, stopped, silent; and that two processes never
// write the same directory.
#include "engine/delivery/owner_processes.h"

#include <array>
#include <csignal>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <thread>

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/core.h>

#include "base/watched_file_system.h"
#include "checkpoint/checkpoint_manager.h"
#include "checkpoint/read_ahead.h"
#include "tests/engine/delivery/delivery_log_scene.h"
#include "tests/support/written_checkpoint.h"

namespace torpor {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::asked;
using test::DeliveryLogTest;
using test::failed_with;
using test::given;
using test::succeeded;
using test::value_of;

// A child process, which is gone at the latest with its owner.
class Child {
 public:
  explicit Child(const std::function<void(const Child&)>& life) {
    EXPECT_EQ(::pipe(ends_.data()), 0);
    pid_ = ::fork();
    if (pid_ != 0) return;
    life(*this);
    ::_exit(0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    (void)::kill(pid_, SIGKILL);
    (void)wait();
    for (const int end : ends_) (void)::close(end);
  }
  pid_t pid() const { return pid_; }
  void send(char word) const { (void)!::write(ends_[1], &word, 1); }
  char receive() const {
    char word = 0;
    (void)!::read(ends_[0], &word, 1);
    return word;
  }
  // Return all that it has sent. Precondition: it has ended.
  std::string received() {
    (void)::close(std::exchange(ends_[1], -1));
    std::string words;
    for (char word = 0; ::read(ends_[0], &word, 1) == 1;) words += word;
    return words;
  }
  // Until it is stopped or has ended. Return its status.
  int wait(int flags = 0) {
    if (!status_) {
      int status = 0;
      if (::waitpid(pid_, &status, flags) == pid_ && WIFSTOPPED(status)) return status;
      status_ = status;
    }
    return *status_;
  }

 private:
  std::array<int, 2> ends_{};
  pid_t pid_ = 0;
  std::optional<int> status_;
};

class OwnerRecordTest : public DeliveryLogTest {
 protected:
  static constexpr milliseconds kTerm{200};
  OwnerWatch watch() { return {linux_file_system(), system_clock(), directory_.path()}; }
  // One that owns the directory and gives a heartbeat until it is told otherwise by a signal.
  std::unique_ptr<Child> owner(bool beats = true) {
    auto child = std::make_unique<Child>([&](const Child& self) {
      const auto answers = value_of(DeliveryLog::open(linux_file_system(), options()));
      const auto record = value_of(OwnerRecord::begin(linux_file_system(), directory_.path(), kTerm));
      self.send('o');
      while (true) {
        if (beats && !record->beat()) self.send('!');
        ::usleep(5000);
      }
    });
    EXPECT_EQ(child->receive(), 'o');
    return child;
  }
};

TEST_F(OwnerRecordTest, WithoutARecordThereIsNoOwner) {
  OwnerWatch standby = watch();
  EXPECT_EQ(value_of(standby.wait(milliseconds(0))).state, OwnerState::kNone);
  EXPECT_EQ(value_of(standby.wait(milliseconds(0))).why, "no server has named itself as the owner");
}

TEST_F(OwnerRecordTest, AnOwnerThatEndsIsNoticedAtOnceAndMayBeFollowed) {
  const std::unique_ptr<Child> child = owner();
  OwnerWatch standby = watch();
  const OwnerLook look = value_of(standby.wait(2 * kTerm));
  EXPECT_EQ(look.state, OwnerState::kServes) << look.why;
  EXPECT_EQ(look.pid, child->pid());
  ASSERT_EQ(::kill(child->pid(), SIGKILL), 0);
  const OwnerLook end = value_of(standby.wait(seconds(60)));
  EXPECT_EQ(end.state, OwnerState::kEnded);
  EXPECT_EQ(end.why, fmt::format("its server has ended (process {})", child->pid()));
  EXPECT_SUCCEEDS(standby.end_owner(seconds(60)));
  EXPECT_NE(open(), nullptr);
  EXPECT_EQ(value_of(watch().wait(milliseconds(0))).why, "the last owner has ended");
}

TEST_F(OwnerRecordTest, AnOwnerThatCameAndEndedBetweenTwoLooksHasEnded) {
  OwnerWatch standby = watch();
  EXPECT_EQ(value_of(standby.wait(milliseconds(0))).state, OwnerState::kNone);
  const pid_t pid = owner()->pid();  // its end, too
  const OwnerLook look = value_of(standby.wait(milliseconds(0)));
  EXPECT_EQ(look.state, OwnerState::kEnded);
  EXPECT_EQ(look.why, fmt::format("its server has ended (process {})", pid));
  EXPECT_SUCCEEDS(standby.end_owner(seconds(60)));
  EXPECT_EQ(value_of(standby.wait(milliseconds(0))).state, OwnerState::kNone);  // once
}

TEST_F(OwnerRecordTest, AStoppedOwnerKeepsTheLockUntilItIsEnded) {
  const std::unique_ptr<Child> child = owner();
  OwnerWatch standby = watch();
  ASSERT_EQ(value_of(standby.wait(milliseconds(1))).state, OwnerState::kServes);
  ASSERT_EQ(::kill(child->pid(), SIGSTOP), 0);
  const OwnerLook look = value_of(standby.wait(seconds(60)));
  EXPECT_EQ(look.state, OwnerState::kSilent);
  EXPECT_EQ(look.why, fmt::format("its server (process {}) is stopped and gave no heartbeat for 0.2 s", child->pid()));
  EXPECT_TRUE(failed_with(DeliveryLog::open(linux_file_system(), options()), Code::kUnavailable));
  EXPECT_SUCCEEDS(standby.end_owner(seconds(60)));
  EXPECT_EQ(WTERMSIG(child->wait()), SIGKILL);
  EXPECT_NE(open(), nullptr);
}

TEST_F(OwnerRecordTest, AStandbyIsRecordedBesideTheOwnerWithItsAddress) {
  const std::unique_ptr<Child> child = owner();
  OwnerWatch standbys(linux_file_system(), system_clock(), directory_.path(), RecordRole::kStandby);
  EXPECT_EQ(value_of(standbys.wait(milliseconds(0))).why, "no server has named itself as the standby");
  const Child standby([&](const Child& self) {
    const auto record = value_of(OwnerRecord::begin(linux_file_system(), directory_.path(), seconds(60),
                                                    "http://127.0.0.1:8001", RecordRole::kStandby));
    self.send('s');
    while (true) ::pause();
  });
  ASSERT_EQ(standby.receive(), 's');
  const OwnerLook look = value_of(standbys.wait(milliseconds(0)));
  EXPECT_EQ(look.state, OwnerState::kServes) << look.why;
  EXPECT_EQ(look.pid, standby.pid());
  EXPECT_EQ(look.address, "http://127.0.0.1:8001");
  OwnerWatch owners = watch();
  const OwnerLook of_owner = value_of(owners.wait(milliseconds(0)));
  EXPECT_EQ(of_owner.pid, child->pid());
  EXPECT_EQ(of_owner.address, "");  // it has recorded none
  EXPECT_SUCCEEDS(standbys.end_owner(seconds(60)));
  EXPECT_EQ(value_of(owners.wait(milliseconds(0))).state, OwnerState::kServes);
  EXPECT_EQ(value_of(standbys.wait(milliseconds(0))).why, "the last standby has ended");
  EXPECT_TRUE(
      failed_with(OwnerRecord::begin(linux_file_system(), directory_.path(), seconds(60), std::string(257, 'a')),
                  Code::kInvalidArgument, "257 bytes"));
}

TEST_F(OwnerRecordTest, AnAddressThatIsDamagedIsNone) {
  const Child child([&](const Child& self) {
    const auto record = value_of(
        OwnerRecord::begin(linux_file_system(), directory_.path(), seconds(60), "http://h:1", RecordRole::kStandby));
    self.send('s');
    while (true) ::pause();
  });
  ASSERT_EQ(child.receive(), 's');
  const std::string path = directory_ / "answers/STANDBY";
  Bytes bytes = read(path);
  bytes[4096 + 5] ^= 1;
  write(path, bytes);
  OwnerWatch standbys(linux_file_system(), system_clock(), directory_.path(), RecordRole::kStandby);
  const OwnerLook look = value_of(standbys.wait(milliseconds(0)));
  EXPECT_EQ(look.state, OwnerState::kServes) << look.why;
  EXPECT_EQ(look.address, "");
}

TEST_F(OwnerRecordTest, AnOwnerThatGivesNoHeartbeatIsSilent) {
  const std::unique_ptr<Child> child = owner(/*beats=*/false);
  OwnerWatch standby = watch();
  const OwnerLook look = value_of(standby.wait(seconds(60)));
  EXPECT_EQ(look.state, OwnerState::kSilent);
  EXPECT_EQ(look.why, fmt::format("its server (process {}) gave no heartbeat for 0.2 s", child->pid()));
}

// Of a machine that stood still, the standby may be the first that runs again.
TEST_F(OwnerRecordTest, ATimeInWhichTheStandbyDidNotLookIsNoSilence) {
  const std::unique_ptr<Child> child = owner(/*beats=*/false);
  test::TwoClocks clock;
  OwnerWatch standby(linux_file_system(), clock, directory_.path());
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(value_of(standby.wait(milliseconds(0))).state, OwnerState::kServes) << i;
    clock.advance(seconds(100));
  }
  clock.advance(milliseconds(40));
  EXPECT_EQ(value_of(standby.wait(milliseconds(0))).state, OwnerState::kServes);  // a gap of 100 s
  for (int i = 0; i < 4; ++i) {
    clock.advance(milliseconds(40));
    EXPECT_EQ(value_of(standby.wait(milliseconds(0))).state, OwnerState::kServes) << i;
  }
  clock.advance(milliseconds(40));
  EXPECT_EQ(value_of(standby.wait(milliseconds(0))).state, OwnerState::kSilent);
}

TEST_F(OwnerRecordTest, WhatTheOwnerStartedEndsWithIt) {
  const Child child([&](const Child& self) {
    const auto answers = value_of(DeliveryLog::open(linux_file_system(), options()));
    const auto start = [&] {
      if (::fork() != 0) return;
      while (true) ::pause();
    };
    start();
    const auto record = value_of(OwnerRecord::begin(linux_file_system(), directory_.path(), seconds(60)));
    self.send('o');
    start();  // the record does not name it
    self.send('o');
    while (true) ::pause();
  });
  ASSERT_EQ(child.receive(), 'o');
  OwnerWatch standby = watch();
  ASSERT_EQ(value_of(standby.wait(milliseconds(1))).state, OwnerState::kServes);
  ASSERT_EQ(child.receive(), 'o');
  std::vector<Process> started;
  for (const ProcessId& id : descendants_of(child.pid())) started.push_back(value_of(Process::open(id)));
  ASSERT_EQ(started.size(), 2U);
  // The log's lock is held by the copies of its descriptor, too: they must be gone before it is asked for.
  ASSERT_EQ(::kill(started[0].id().pid, SIGKILL), 0);
  EXPECT_EQ(value_of(standby.wait(seconds(60))).state, OwnerState::kEnded);
  EXPECT_SUCCEEDS(standby.end_owner(seconds(60)));
  for (const Process& process : started) EXPECT_TRUE(process.ended());
  EXPECT_NE(open(), nullptr);
}

TEST_F(OwnerRecordTest, AnotherProgramThatTheOwnerRunsForAWhileMayEnd) {
  const Child child([&](const Child& self) {
    const auto answers = value_of(DeliveryLog::open(linux_file_system(), options()));
    std::array<int, 2> starts{};
    if (::pipe2(starts.data(), O_CLOEXEC) != 0) ::_exit(1);
    const pid_t program = ::fork();
    if (program == 0) {
      ::execl("/bin/sleep", "sleep", "600", nullptr);
      ::_exit(1);
    }
    (void)::close(starts[1]);
    char nothing = 0;
    (void)!::read(starts[0], &nothing, 1);  // returns when the program runs: its end of the pipe is closed then
    const auto record = value_of(OwnerRecord::begin(linux_file_system(), directory_.path(), seconds(60)));
    self.send('o');
    while (true) ::pause();
  });
  ASSERT_EQ(child.receive(), 'o');
  OwnerWatch standby = watch();
  ASSERT_EQ(value_of(standby.wait(milliseconds(1))).state, OwnerState::kServes);
  const std::vector<ProcessId> programs = descendants_of(child.pid());
  ASSERT_EQ(programs.size(), 1U);
  ASSERT_EQ(::kill(programs[0].pid, SIGKILL), 0);
  EXPECT_EQ(value_of(standby.wait(milliseconds(50))).state, OwnerState::kServes);
}

TEST_F(OwnerRecordTest, AProcessThatGotTheNumberOfTheOwnerIsLeftAlone) {
  const ProcessId self = value_of(find_process(::getpid()));
  EXPECT_TRUE(failed_with(Process::open({.pid = self.pid, .started = self.started + 1}), Code::kNotFound));
  const Result<Process> same = Process::open(self);
  ASSERT_TRUE(same);
  EXPECT_FALSE(same->ended());
  EXPECT_FALSE(same->stopped());
}

// While a server is killed its first thread may end before the others, which hold its files and locks.
TEST_F(OwnerRecordTest, AProcessWhoseFirstThreadHasEndedLivesUntilItsLastOne) {
  const Child child([](const Child& self) {
    std::thread other([&] {
      self.send('r');
      while (true) ::pause();
    });
    (void)::syscall(SYS_exit, 0);  // of this thread alone
  });
  ASSERT_EQ(child.receive(), 'r');
  const std::string path = fmt::format("/proc/{}/stat", child.pid());
  const auto state = [&] {
    std::ifstream stat(path);
    std::string words((std::istreambuf_iterator<char>(stat)), {});
    return words.at(words.rfind(')') + 2);
  };
  while (state() != 'Z') std::this_thread::yield();
  const Result<ProcessId> id = find_process(child.pid());
  ASSERT_TRUE(succeeded(id));
  const Process process = value_of(Process::open(*id));
  EXPECT_FALSE(process.ended());
  ASSERT_TRUE(succeeded(process.kill()));
  EXPECT_TRUE(wait_for_end(std::span(&process, 1), seconds(60)));
  EXPECT_TRUE(failed_with(find_process(child.pid()), Code::kNotFound));
}

// The page's digest is that of its content, as another program could write it.
TEST_F(OwnerRecordTest, APageWithoutAProcessNamesNobody) {
  const std::unique_ptr<Child> child = owner();
  Bytes page = read(directory_ / "answers/OWNER");
  constexpr size_t kCount = 12, kDigest = 3272;
  const auto digest = [&] { return digest_of(std::as_bytes(std::span(page).first(kDigest))).bytes; };
  ASSERT_EQ(std::memcmp(&page.at(kDigest), digest().data(), 16), 0);
  std::memset(&page.at(kCount), 0, 4);
  std::memcpy(&page.at(kDigest), digest().data(), 16);
  write(directory_ / "answers/OWNER", page);
  EXPECT_EQ(value_of(watch().wait(milliseconds(0))).state, OwnerState::kNone);
}

TEST_F(OwnerRecordTest, ARecordThatIsHalfWrittenNamesNobody) {
  const std::unique_ptr<Child> child = owner();
  Bytes page = read(directory_ / "answers/OWNER");
  page[100] ^= 1;
  write(directory_ / "answers/OWNER", page);
  EXPECT_EQ(value_of(watch().wait(milliseconds(0))).state, OwnerState::kNone);
  page.resize(100);
  write(directory_ / "answers/OWNER", page);
  EXPECT_EQ(value_of(watch().wait(milliseconds(0))).state, OwnerState::kNone);
}

// The owner's life as its files see it: it records, begins a new file of the log, and writes a checkpoint. Each word is
// sent when what it stands for is done.
void write_all(FileSystem& files, const std::string& directory, DeliveryLogOptions options, const Child& self) {
  const auto answers = value_of(DeliveryLog::open(files, std::move(options)));
  const auto record = value_of(OwnerRecord::begin(files, directory, milliseconds(20)));
  EXPECT_SUCCEEDS(answers->start(asked("a")));
  self.send('a');
  EXPECT_SUCCEEDS(answers->step({given("a", 0, {1}, "x")}));
  self.send('x');
  EXPECT_SUCCEEDS(record->beat());
  EXPECT_SUCCEEDS(answers->rotate());
  EXPECT_SUCCEEDS(answers->step({given("a", 1, {2}, "y")}));
  self.send('y');
  EXPECT_SUCCEEDS(answers->sync());
  const auto checkpoints = value_of(CheckpointManager::open(files, directory));
  PendingCheckpoint pending = value_of(checkpoints->begin(0));
  EXPECT_SUCCEEDS(pending.write_state(test::example_checkpoint()));
  EXPECT_SUCCEEDS(pending.commit());
  self.send('c');
  EXPECT_SUCCEEDS(answers->step({given("a", 2, {3}, "z")}));
  self.send('z');
  ::_exit(0);  // with all that it holds
}

// Stopped at any call of a file, in the middle of a record, a new file or a checkpoint, the owner still holds what it
// locked, and its standby gets nothing before it has ended it. Then all is there that was acknowledged.
TEST_F(OwnerRecordTest, AnOwnerThatIsStoppedAtAnyCallOfAFileIsEndedBeforeItsStandbyWrites) {
  int stopped = 0, in_checkpoint = 0;
  for (int call = 1;; ++call) {
    const test::TemporaryDirectory place;
    DeliveryLogOptions log = options();
    log.directory = place / "answers";
    Child child([&](const Child& self) {
      int calls = 0;
      const auto files = make_watched_file_system(linux_file_system(), [&](std::string_view, const std::string&) {
        if (++calls == call) (void)::raise(SIGSTOP);
        return ok();
      });
      write_all(*files, place.path(), log, self);
    });
    const int status = child.wait(WUNTRACED);
    if (!WIFSTOPPED(status)) {
      ASSERT_EQ(status, 0);
      break;
    }
    OwnerWatch standby(linux_file_system(), system_clock(), place.path());
    const OwnerLook look = value_of(standby.wait(seconds(60)));
    if (look.state == OwnerState::kNone) continue;  // it had not named itself yet: nobody takes over from it
    ASSERT_EQ(look.state, OwnerState::kSilent) << call;
    ++stopped;
    ASSERT_TRUE(failed_with(DeliveryLog::open(linux_file_system(), log), Code::kUnavailable)) << call;
    const auto checkpoints = value_of(CheckpointManager::open(linux_file_system(), place.path()));
    if (const auto begun = checkpoints->begin(0); !begun) {
      ASSERT_TRUE(failed_with(begun, Code::kUnavailable)) << call;
      ++in_checkpoint;
    }
    ASSERT_TRUE(succeeded(standby.end_owner(seconds(60)))) << call;
    ASSERT_EQ(WTERMSIG(child.wait()), SIGKILL);
    const std::string received = child.received();
    const auto answers = value_of(DeliveryLog::open(linux_file_system(), log));
    std::string given;
    for (const char word : received) {
      if (word >= 'x') given += word;
    }
    const std::optional<Answer> answer = answers->get("a");
    ASSERT_EQ(answer.has_value() || received.empty(), true) << call;
    const std::string text = answer ? answer->text : "";
    ASSERT_TRUE(text.starts_with(given)) << call << ": " << text << ", " << given;
    ASSERT_TRUE(succeeded(answers->sync()));
    const size_t committed = value_of(checkpoints->list()).size();
    ASSERT_GE(committed, received.find('c') == std::string::npos ? 0U : 1U) << call;
    ASSERT_TRUE(succeeded(checkpoints->begin(0))) << call;
  }
  std::printf(
      "proof: an owner stopped at %d calls of a file, %d of them in a checkpoint: ended before its standby "
      "wrote\n",
      stopped, in_checkpoint);
  EXPECT_GT(stopped, 30);
  EXPECT_GT(in_checkpoint, 10);
}

}  // namespace
}  // namespace torpor
