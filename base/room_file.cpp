#include "base/room_file.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <ctime>

#include <fmt/core.h>

#include "base/linux_file.h"

namespace torpor {
namespace {

constexpr uint64_t kRoomMark = 0x314d4f4f52524f54;  // "TORROOM1"
constexpr const char* kRoomFile = "a file of room";
constexpr long kLookNanoseconds = 50'000'000;  // at processes that end without a word

// Bytes that are locked: one for each side, this one by who made the file.
constexpr int kMaker = 2;

// In Page::is_stopped.
constexpr uint32_t kBySomebody = 1;
constexpr uint32_t by(RoomFile::Side side) { return 2 + static_cast<uint32_t>(side); }

// Of the open file, not of the process: whatever else a process does with the file, it keeps it until this is closed.
struct flock lock_at(int byte) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return lock;
}
bool take_lock(int fd, int byte) {
  struct flock lock = lock_at(byte);
  return ::fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

// The file, in a directory into which nobody but this user can have put it.
Result<Descriptor> open_own(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (!path.starts_with('/') || slash + 1 == path.size()) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("\"{}\" is not the absolute path of {}", path, kRoomFile),
                 .next_step = "give the path as it was made"};
  }
  const std::string folder = path.substr(0, slash + 1);
  TORPOR_ASSIGN(const Descriptor directory,
                guarded(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC), folder));
  struct stat status {};
  if (::fstat(directory.get(), &status) != 0) return system_error(errno, fmt::format("looking at {}", folder));
  if (!is_own(status)) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("{} is not a directory of this user alone", folder),
                 .next_step = "use one of your own engines"};
  }
  const int flags = O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  return guarded(::openat(directory.get(), path.c_str() + slash + 1, flags), fmt::format("opening {}", path));
}

}  // namespace

struct RoomFile::Page {
  std::atomic<uint64_t> mark;
  std::atomic<uint32_t> changes;  // what is waited for
  std::atomic<uint32_t> ended;
  std::atomic<uint32_t> is_stopped;  // 0, or by whom
  std::array<std::atomic<uint32_t>, 2> stages;
  std::array<std::atomic<uint64_t>, 2> sizes;  // ranks of each side
  struct Rank {
    std::atomic<uint64_t> promised, lent, given, taken;
  };
  std::array<Rank, kMostRanks> ranks;
};

RoomFile::RoomFile(std::unique_ptr<SharedPage> page, int locks)
    : shared_(std::move(page)), page_(shared_->as<Page>()), locks_(locks) {}

RoomFile::~RoomFile() { (void)::close(locks_); }

Result<std::unique_ptr<RoomFile>> RoomFile::create(const std::string& path) {
  TORPOR_TRY(SharedPage::create(path, kRoomMark));
  Result<std::unique_ptr<RoomFile>> made = open(path);
  if (made && !take_lock((*made)->locks_, kMaker)) made = system_error(errno, path);
  if (!made) (void)::unlink(path.c_str());
  return made;
}

Result<std::unique_ptr<RoomFile>> RoomFile::open(const std::string& path) {
  return catching([&]() -> Result<std::unique_ptr<RoomFile>> {
    TORPOR_ASSIGN(Descriptor file, open_own(path));
    TORPOR_ASSIGN(std::unique_ptr<SharedPage> page, SharedPage::open(file.get(), path, kRoomMark, kRoomFile));
    std::unique_ptr<RoomFile> opened(new RoomFile(std::move(page), file.get()));
    (void)file.release();
    return opened;
  });
}

RoomFile::Side RoomFile::other() const noexcept { return side_ == Side::kGives ? Side::kTakes : Side::kGives; }

RoomFile::Stage RoomFile::stage(Side side) const noexcept {
  return static_cast<Stage>(page_.stages[static_cast<size_t>(side)].load());
}

// By another one than this object. Where that cannot be told, nobody is taken for gone.
bool RoomFile::held(int byte) const noexcept {
  struct flock lock = lock_at(byte);
  return ::fcntl(locks_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

// The stage is said before the lock goes.
bool RoomFile::ended(Side side) const noexcept {
  const auto between = [&] { return stage(side) == Stage::kHere || stage(side) == Stage::kReady; };
  return between() && !held(static_cast<int>(side)) && between();
}

bool RoomFile::other_ended() const noexcept { return ended(other()); }

bool RoomFile::has_come(Side side) const noexcept { return stage(side) != Stage::kNone; }

bool RoomFile::stopped_or(Side ended_side) noexcept {
  if (page_.is_stopped != 0) return true;
  if (!ended(ended_side)) return false;
  (void)stop(ended_side);
  return true;
}

Error RoomFile::stopped() const {
  for (const Side side : {Side::kGives, Side::kTakes}) {
    if (side_ == side || stopped_by() != side || !ended(side)) continue;
    return {.code = Code::kAborted,
            .what = "the process of the other engine ended",
            .next_step = "start it again, or wake another one"};
  }
  return {.code = Code::kAborted, .what = "the other engine could not be exchanged", .next_step = "see its error"};
}

std::optional<RoomFile::Side> RoomFile::stopped_by() const noexcept {
  const uint32_t whom = page_.is_stopped;
  if (whom == by(Side::kGives)) return Side::kGives;
  if (whom == by(Side::kTakes)) return Side::kTakes;
  return std::nullopt;
}

Status RoomFile::join(Side side, size_t ranks) {
  const auto refuse = [](std::string what, std::string next) {
    return Error{.code = Code::kFailedPrecondition, .what = std::move(what), .next_step = std::move(next)};
  };
  if (side_ || stage(side) != Stage::kNone || !take_lock(locks_, static_cast<int>(side)))
    return refuse("another engine has this side of the exchange", "make a file for each");
  side_ = side;
  page_.sizes[static_cast<size_t>(side)].store(ranks);  // before it looks: of two that come at once, one sees the other
  const uint64_t others = page_.sizes[static_cast<size_t>(other())];
  if (others == 0 || others == ranks) return say(Stage::kHere), ok();
  return refuse(fmt::format("the engines have {} and {} ranks", page_.sizes[0].load(), page_.sizes[1].load()),
                "put one to sleep, then wake the other");
}

void RoomFile::say(Stage stage) noexcept {
  if (!side_) return;
  page_.stages[static_cast<size_t>(*side_)].store(static_cast<uint32_t>(stage));
  tell();
}

Status RoomFile::wait_for(Stage wanted, const std::function<Status()>& go_on) {
  while (true) {
    const uint32_t seen = page_.changes.load(std::memory_order_acquire);
    const bool maker_ended = !held(kMaker);
    const bool over = stopped_or(other());
    const Stage now = stage(other());  // last: whoever ended may have said it before
    if (now == Stage::kDone || (now >= wanted && now != Stage::kFailed && !over)) return ok();
    if (now == Stage::kNone && maker_ended) (void)stop(other());
    if (over || page_.is_stopped != 0 || now == Stage::kFailed) return stopped();
    if (go_on) TORPOR_TRY(go_on());
    wait(seen);
  }
}

bool RoomFile::wait_for_end() noexcept {
  while (true) {
    const uint32_t seen = page_.changes.load(std::memory_order_acquire);
    const bool gone = ended(other());
    const Stage now = stage(other());
    if (now == Stage::kDone) return true;
    if (gone || now == Stage::kNone || now == Stage::kFailed) return false;
    wait(seen);
  }
}

Status RoomFile::check(size_t rank) {
  if (rank < kMostRanks) return ok();
  return Error{.code = Code::kUnsupported,
               .what = fmt::format("engines of more than {} ranks cannot be exchanged", kMostRanks),
               .next_step = "put one to sleep, then wake the other"};
}

void RoomFile::tell() noexcept {
  page_.changes.fetch_add(1, std::memory_order_release);
  (void)::syscall(SYS_futex, &page_.changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void RoomFile::wait(uint32_t seen) const noexcept {
  const timespec until_look{.tv_sec = 0, .tv_nsec = kLookNanoseconds};
  (void)::syscall(SYS_futex, &page_.changes, FUTEX_WAIT, seen, &until_look, nullptr, 0);
}

Status RoomFile::promise(size_t rank, uint64_t bytes) {
  TORPOR_TRY(check(rank));
  page_.ranks[rank].promised.store(bytes);
  return ok();
}

Status RoomFile::need(size_t rank, uint64_t bytes) {
  TORPOR_TRY(check(rank));
  const uint64_t promised = page_.ranks[rank].promised;
  page_.ranks[rank].lent.store(bytes - std::min(bytes, promised));
  return ok();
}

Status RoomFile::give(size_t rank, uint64_t bytes) {
  if (stopped_or(Side::kTakes)) return stopped();
  page_.ranks[rank].given.fetch_add(bytes);
  tell();
  return ok();
}

void RoomFile::end() noexcept {
  page_.ended.store(1);
  tell();
}

bool RoomFile::stop() noexcept { return stop_by(side_ ? by(*side_) : kBySomebody); }

bool RoomFile::stop(Side side) noexcept { return stop_by(by(side)); }

bool RoomFile::stop_by(uint32_t whom) noexcept {
  uint32_t nobody = 0;
  const bool first = page_.is_stopped.compare_exchange_strong(nobody, whom);
  tell();
  return first;
}

uint64_t RoomFile::given(size_t rank) const noexcept { return page_.ranks[rank].given; }

Status RoomFile::take(size_t rank, uint64_t bytes) {
  Page::Rank& own = page_.ranks[rank];
  while (true) {
    const uint32_t seen = page_.changes.load(std::memory_order_acquire);
    const bool ended = page_.ended != 0;
    if (stopped_or(Side::kGives)) return stopped();
    const uint64_t free = own.given + own.lent - own.taken;
    if (free >= bytes) break;
    if (ended) {
      return Error{.code = Code::kResourceExhausted,
                   .what = fmt::format("{} bytes of device memory are needed, and {} are free", bytes, free)};
    }
    wait(seen);
  }
  own.taken.fetch_add(bytes);
  return ok();
}

Result<bool> RoomFile::wait_for_more(size_t rank, uint64_t seen) {
  while (true) {
    const uint32_t changes = page_.changes.load(std::memory_order_acquire);
    const bool ended = page_.ended != 0;
    if (stopped_or(Side::kGives)) return stopped();
    if (page_.ranks[rank].given > seen) return true;
    if (ended) return false;
    wait(changes);
  }
}

}  // namespace torpor
