// SPDX-License-Identifier: Apache-2.0
#include "console/control_server.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <list>
#include <vector>

#include <fmt/core.h>
#include <boost/filesystem.hpp>

#include "base/log.h"
#include "base/process.h"
#include "console/event_files.h"

namespace torpor::console {
namespace {

using namespace std::chrono_literals;

constexpr int kLookMilliseconds = 20;
constexpr auto kPatience = 30s;  // with a peer that does not read
constexpr size_t kAtOnce = 64 << 10;

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// Return the address through the descriptor of the socket's directory: an address has at most 107 bytes, and no link on
// the path is followed again. `directory` must stay open while the address is used.
Result<sockaddr_un> address_of(const std::string& path, Descriptor& directory) {
  const size_t slash = path.rfind('/');
  const std::string parent = slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1));
  const std::string file = slash == std::string::npos ? path : path.substr(slash + 1);
  directory = Descriptor(::open(parent.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (directory.get() < 0) return system_error(errno, fmt::format("opening {}", parent));
  const std::string reached = fmt::format("/proc/self/fd/{}/{}", directory.get(), file);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (reached.size() >= sizeof address.sun_path) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("the name {} is too long for a socket", file),
                 .next_step = "use a shorter one"};
  }
  reached.copy(address.sun_path, reached.size());
  return address;
}

Result<Descriptor> new_socket() {
  Descriptor made(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (made.get() < 0) return system_error(errno, "making a socket");
  return made;
}

Result<Descriptor> listen_at(const std::string& path) {
  Descriptor directory;
  TORPOR_ASSIGN_OR_RETURN(const sockaddr_un address, address_of(path, directory));
  TORPOR_ASSIGN_OR_RETURN(Descriptor made, new_socket());
  (void)::unlink(path.c_str());  // left by an earlier process with the same pid
  if (::bind(made.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    return system_error(errno, fmt::format("making {}", path));
  // Before anybody can connect, whatever the umask is.
  if (::fchmodat(directory.get(), path.substr(path.rfind('/') + 1).c_str(), 0600, 0) != 0 ||
      ::listen(made.get(), static_cast<int>(kMostPeers)) != 0) {
    const int failed = errno;
    (void)::unlink(path.c_str());
    return system_error(failed, fmt::format("listening at {}", path));
  }
  return made;
}

bool has_started(const EventSource& server, const EventSource& engine) {
  return engine.pid == server.pid || is_descendant_of({.pid = engine.pid, .started = engine.process_start}, server.pid);
}

// Return the socket of the newest engine in this directory; or of the server that started `engine`, another socket
// there. Without `engine`: of the newest server.
Result<std::string> socket_in(const std::string& directory, bool front, const std::string& engine) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<std::unique_ptr<EventRing>> rings, open_rings(directory));
  const auto served =
      std::find_if(rings.begin(), rings.end(), [&](const auto& ring) { return socket_of(ring->path()) == engine; });
  for (const auto& ring : rings) {
    const EventSource& source = ring->source();
    boost::system::error_code problem;
    if ((source.role == kFrontRole) == front && is_alive(source) &&
        boost::filesystem::exists(socket_of(ring->path()), problem) &&
        (engine.empty() || (served != rings.end() && has_started(source, (*served)->source()))))
      return socket_of(ring->path());
  }
  return Error{.code = Code::kNotFound,
               .what = fmt::format("no {} in {} has a socket", front ? "server" : "engine", directory),
               .next_step = "start one with the option console=read or console=control"};
}

}  // namespace

// ---- the server

class ControlServer::Loop {
 public:
  Loop(EventRing& ring, const Clock& clock, ControlRole role, Descriptor listening, Descriptor wake)
      : control_(ring, clock, role), listening_(std::move(listening)), wake_(std::move(wake)) {}

  void run() {
    while (!ended_.load(std::memory_order_acquire)) {
      // If memory is short, drop the peers.
      if (const Status turned = try_catch([&] { return turn(); }); !turned) {
        log().warn("console: {}", turned.error());
        peers_.clear();
        std::this_thread::sleep_for(100ms);
      }
    }
    peers_.clear();
    (void)control_.breakpoints().resume_all();
  }
  void end() {
    ended_.store(true, std::memory_order_release);
    const uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof one);
  }
  Control& control() { return control_; }

 private:
  struct Peer {
    Peer(Control& control, const ControlPeer& who, Descriptor connected)
        : fd(std::move(connected)), session(control, who) {}
    Descriptor fd;
    ControlSession session;
    bool cut = false;  // send the remaining output, then close
    std::chrono::steady_clock::time_point moved = std::chrono::steady_clock::now();
  };

  Status turn() {
    std::vector<pollfd> polled = {{wake_.get(), POLLIN, 0}, {listening_.get(), POLLIN, 0}};
    bool soon = control_.look_at_front() || control_.breakpoints().waits();
    for (Peer& peer : peers_) {
      const bool output = !peer.session.output().empty();
      const bool input = !peer.cut && peer.session.reads();
      polled.push_back({peer.fd.get(), static_cast<int16_t>((input ? POLLIN : 0) | (output ? POLLOUT : 0)), 0});
      soon = soon || peer.session.subscribed() || peer.session.waits() || output;
    }
    const int wait = behind_ ? 0 : soon ? kLookMilliseconds : -1;
    if (::poll(polled.data(), polled.size(), wait) < 0 && errno != EINTR)
      return system_error(errno, "waiting for peers");
    behind_ = false;
    control_.breakpoints().expire();
    auto at = polled.begin() + 2;
    for (auto peer = peers_.begin(); peer != peers_.end(); ++at) {
      peer = serve(*peer, at->revents) ? std::next(peer) : peers_.erase(peer);
    }
    if ((polled[1].revents & POLLIN) != 0) accept_one();
    return ok();
  }

  // Return false if the peer is gone or must be closed.
  bool serve(Peer& peer, int16_t happened) {
    const auto now = std::chrono::steady_clock::now();
    if ((happened & (POLLHUP | POLLERR)) != 0 && (happened & POLLIN) == 0) return false;
    if ((happened & POLLIN) != 0) {
      char bytes[kAtOnce];
      const ssize_t got = ::recv(peer.fd.get(), bytes, sizeof bytes, 0);
      if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return false;
      if (got > 0) peer.cut = !peer.session.receive({bytes, static_cast<size_t>(got)});
    } else if (!peer.cut && peer.session.reads()) {
      peer.cut = !peer.session.receive({});  // input that waited for output to be sent
    }
    if (!peer.cut && peer.session.pump()) behind_ = true;
    std::string& output = peer.session.output();
    if (output.empty()) {
      peer.moved = now;
      return !peer.cut;
    }
    const ssize_t sent = ::send(peer.fd.get(), output.data(), output.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) return false;
    if (sent > 0) {
      output.erase(0, static_cast<size_t>(sent));
      peer.moved = now;
    }
    if (peer.cut && output.empty()) return false;
    return now - peer.moved < kPatience;
  }

  void accept_one() {
    Descriptor connected(::accept4(listening_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (connected.get() < 0) {
      // The connection could not be accepted, for example for want of descriptors, and stays pending. Pause, or this
      // thread would spin.
      if (errno != EAGAIN && errno != EINTR) std::this_thread::sleep_for(kLookMilliseconds * 1ms);
      return;
    }
    ucred who{};
    socklen_t size = sizeof who;
    const bool known = ::getsockopt(connected.get(), SOL_SOCKET, SO_PEERCRED, &who, &size) == 0;
    const ControlPeer peer{.connection = ++connections_, .uid = who.uid, .pid = who.pid};
    if (!known || (who.uid != ::geteuid() && who.uid != 0)) {
      const Error refused{.code = Code::kUnauthenticated, .what = "another user"};
      control_.publish(peer, 0, &refused);
      return;
    }
    if (peers_.size() >= kMostPeers) return;
    peers_.emplace_back(control_, peer, std::move(connected));
  }

  Control control_;
  const Descriptor listening_;
  const Descriptor wake_;
  std::list<Peer> peers_;
  uint64_t connections_ = 0;
  bool behind_ = false;  // some peer has more events to be sent at once
  std::atomic<bool> ended_ = false;
};

Result<std::unique_ptr<ControlServer>> ControlServer::start(EventRing& ring, const Clock& clock, ControlRole role) {
  return try_catch([&]() -> Result<std::unique_ptr<ControlServer>> {
    if (ring.path().empty()) {
      return Error{.code = Code::kFailedPrecondition,
                   .what = "these events are in no file",
                   .next_step = "name a directory for events"};
    }
    const std::string path = socket_of(ring.path());
    TORPOR_ASSIGN_OR_RETURN(Descriptor listening, listen_at(path));
    Descriptor wake(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (wake.get() < 0) return system_error(errno, "making an event descriptor");
    return std::unique_ptr<ControlServer>(
        new ControlServer(path, std::make_unique<Loop>(ring, clock, role, std::move(listening), std::move(wake))));
  });
}

ControlServer::ControlServer(std::string path, std::unique_ptr<Loop> loop)
    : path_(std::move(path)), pid_(::getpid()), loop_(std::move(loop)), thread_([this] { loop_->run(); }) {}

ControlServer::~ControlServer() {
  if (::getpid() != pid_) {  // a forked child: it has neither the thread nor the socket
    thread_.detach();
    (void)loop_.release();
    return;
  }
  loop_->end();
  thread_.join();
  (void)::unlink(path_.c_str());
}

void ControlServer::serve(OffloadAccess* offload) { loop_->control().serve(offload); }
void ControlServer::serve(FrontAccess* front) { loop_->control().serve(front); }
void ControlServer::record_below(std::string directory) { loop_->control().record_below(std::move(directory)); }

// ---- a client

Result<ControlClient> ControlClient::connect(const std::string& path, ControlPlace place, const std::string& engine) {
  return try_catch([&]() -> Result<ControlClient> {
    std::string socket = path;
    boost::system::error_code problem;
    if (boost::filesystem::is_directory(path, problem)) {
      TORPOR_ASSIGN_OR_RETURN(socket, socket_in(path, place == ControlPlace::kFront, engine));
    }
    Descriptor directory;
    TORPOR_ASSIGN_OR_RETURN(const sockaddr_un address, address_of(socket, directory));
    TORPOR_ASSIGN_OR_RETURN(Descriptor made, new_socket());
    if (::connect(made.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      const int failed = errno;
      Error error = system_error(failed, fmt::format("connecting to {}", socket));
      if (failed == ECONNREFUSED || failed == EAGAIN) error.code = Code::kUnavailable;
      return error;
    }
    return ControlClient(made.release(), std::move(socket));
  });
}

ControlClient::ControlClient(ControlClient&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)), input_(std::move(other.input_)) {}

ControlClient::~ControlClient() {
  if (fd_ >= 0) ::close(fd_);
}

Status ControlClient::send(std::string_view line) {
  std::string out(line);
  out += '\n';
  for (size_t at = 0; at < out.size();) {
    const ssize_t sent = ::send(fd_, out.data() + at, out.size() - at, MSG_NOSIGNAL);
    if (sent > 0) {
      at += static_cast<size_t>(sent);
      continue;
    }
    if (errno != EAGAIN && errno != EINTR) return system_error(errno, fmt::format("writing to {}", path_));
    pollfd polled{fd_, POLLOUT, 0};
    if (::poll(&polled, 1, 30'000) == 0) {
      return Error{.code = Code::kTimeout, .what = fmt::format("{} takes nothing", path_), .next_step = "try again"};
    }
  }
  return ok();
}

Result<std::optional<std::string>> ControlClient::receive(std::chrono::milliseconds wait) {
  const auto until = std::chrono::steady_clock::now() + wait;
  while (true) {
    if (const size_t end = input_.find('\n'); end != std::string::npos) {
      std::optional<std::string> line = input_.substr(0, end);
      input_.erase(0, end + 1);
      return line;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    pollfd polled{fd_, POLLIN, 0};
    const int ready = ::poll(&polled, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
    if (ready < 0 && errno != EINTR) return system_error(errno, fmt::format("waiting for {}", path_));
    if (ready <= 0) {
      if (left.count() > 0 && ready < 0) continue;
      return std::optional<std::string>();
    }
    std::string bytes(kAtOnce, '\0');
    const ssize_t got = ::recv(fd_, bytes.data(), bytes.size(), 0);
    if (got > 0) input_.append(bytes, 0, static_cast<size_t>(got));
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
      return Error{.code = Code::kUnavailable,
                   .what = fmt::format("{} has ended the connection", path_),
                   .next_step = "look whether its process is there, and connect again"};
    }
  }
}

}  // namespace torpor::console
