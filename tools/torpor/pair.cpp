// SPDX-License-Identifier: Apache-2.0
// torpor pair: the parent of two servers. It holds the socket that clients connect to, starts the servers as
// next_start() says, reads the state of each from a pipe, and waits for whatever has ended.

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/core.h>

#include "base/linux_file.h"
#include "tools/torpor/pair_plan.h"
#include "tools/torpor/verb.h"

namespace torpor::cli {

namespace {

constexpr double kUsefulSeconds = 60;   // a process that ends sooner, and never served or slept, ended early
constexpr double kStandbySeconds = 10;  // for a standby, or a server that failed, to end on SIGTERM
// For an owner to end once the other one has taken over. Its clients have the half of it to read its last words
// (_READING_SECONDS of ending.py).
constexpr double kLeftOverSeconds = 10;
constexpr int kBacklog = 2048;
constexpr int kConfigurationExit = 2;  // of a server whose options are wrong: it will never start

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void print_line(const std::string& what) { fmt::print(stderr, "torpor pair: {}\n", what); }

Error usage(std::string what, std::string next_step) {
  return {.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next_step)};
}

// A server's command line without some of its options.
class Words {
 public:
  explicit Words(std::vector<std::string> words) : words_(std::move(words)) {}
  // Remove "--name VALUE" and "--name=VALUE". Return the last value.
  std::optional<std::string> remove(const std::string& name) {
    std::optional<std::string> value;
    for (size_t i = 0; i < words_.size();) {
      const bool joined = words_[i].starts_with(name + "=");
      if (!joined && words_[i] != name) {
        ++i;
        continue;
      }
      const auto first = words_.begin() + static_cast<std::ptrdiff_t>(i);
      if (joined) value = words_[i].substr(name.size() + 1);
      if (!joined && i + 1 < words_.size()) value = words_[i + 1];
      words_.erase(first, first + std::min<std::ptrdiff_t>(joined ? 1 : 2, words_.end() - first));
    }
    return value;
  }
  const std::vector<std::string>& rest() const { return words_; }

 private:
  std::vector<std::string> words_;
};

Result<int> port_of(const std::string& text) {
  int port = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (problem != std::errc() || end != text.data() + text.size() || port < 1 || port > 65535)
    return usage(fmt::format("the port is \"{}\"", text), "use 1 to 65535");
  return port;
}

// Where clients connect. Both servers have it; the one that serves accepts.
Result<Descriptor> listen_at(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_family = host.find(':') == std::string::npos ? AF_INET : AF_INET6;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int problem =
      ::getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (problem != 0) return usage(fmt::format("the host is \"{}\": {}", host, ::gai_strerror(problem)), "see --host");
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> freed(found, &::freeaddrinfo);
  TORPOR_ASSIGN_OR_RETURN(Descriptor listening,
                          guarded(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0), "no socket"));
  const int yes = 1;
  (void)::setsockopt(listening.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (::bind(listening.get(), found->ai_addr, found->ai_addrlen) != 0 || ::listen(listening.get(), kBacklog) != 0) {
    if (errno == EADDRINUSE)
      return Error{.code = Code::kUnavailable,
                   .what = fmt::format("port {} is in use", port),
                   .next_step = "end what listens there, or choose another --port"};
    return system_error(errno, fmt::format("cannot listen on {}:{}", host, port), "see --host and --port");
  }
  return listening;
}

struct Options {
  std::string python;
  std::vector<std::string> words;  // of a server, without its ports
  std::string directory;
  std::array<int, 2> ports{};
};

class Pair {
 public:
  Pair(Options options, Descriptor listening) : options_(std::move(options)), listening_(std::move(listening)) {}

  Result<Exit> run() {
    // Of a server that is killed the engine's processes come here, as they come to the first process of a container.
    (void)::prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    sigset_t waited;
    ::sigemptyset(&waited);
    for (const int number : {SIGTERM, SIGINT, SIGCHLD}) ::sigaddset(&waited, number);
    ::sigprocmask(SIG_BLOCK, &waited, &before_);
    TORPOR_ASSIGN_OR_RETURN(const Descriptor signals,
                            guarded(::signalfd(-1, &waited, SFD_CLOEXEC | SFD_NONBLOCK), "no signalfd"));
    while (true) {
      if (!ending_ && !ends_with_) {
        if (const std::optional<PairStart> start = next_start(states(), seconds_now())) {
          // The other one may serve: it does not end because this one cannot be started just now.
          if (const Status begun = begin(*start); !begun) {
            print_line(fmt::format("server {} does not start: {}", start->which + 1, begun.error().what));
            servers_[start->which].known.ended_early += 1;
            servers_[start->which].known.ended_at = seconds_now();
          }
        }
        end_failed();
      }
      end_left_over();
      if (ending_ || ends_with_) end_step();
      if ((ending_ || ends_with_) && servers_[0].pid == 0 && servers_[1].pid == 0)
        return static_cast<Exit>(ends_with_.value_or(owner_exit_));
      wait_for_something(signals);
      read_states();
      reap();
    }
  }

 private:
  struct Server {
    PairedServer known;
    pid_t pid = 0;
    bool was_of_use = false;
    double began = 0;
    Descriptor state_pipe;  // the end that is read
    std::string line;
    bool failed = false;      // since it was started
    bool terminated = false;  // SIGTERM was sent
    double terminated_at = 0;
    std::optional<double> left_over_since;
  };

  std::array<PairedServer, 2> states() const { return {servers_[0].known, servers_[1].known}; }

  Status begin(const PairStart& start) {
    Server& server = servers_[start.which];
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) return system_error(errno, "no pipe");
    Descriptor read_end(ends[0]), write_end(ends[1]);
    std::vector<std::string> words = {options_.python, "-m", "torpor.vllm.serve"};
    words.insert(words.end(), options_.words.begin(), options_.words.end());
    const auto add = [&](const char* name, const std::string& value) {
      words.emplace_back(name);
      words.push_back(value);
    };
    add("--port", std::to_string(options_.ports[start.which]));
    add("--torpor-listen-fd", std::to_string(listening_.get()));
    add("--torpor-state-fd", std::to_string(write_end.get()));
    if (start.as_standby) add("--torpor-standby-of", options_.directory);
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    const pid_t parent = ::getpid();
    const pid_t pid = ::fork();
    if (pid < 0) return system_error(errno, "cannot start a server");
    if (pid == 0) {
      ::sigprocmask(SIG_SETMASK, &before_, nullptr);
      (void)::setpgid(0, 0);  // Ctrl-C is the parent's alone, who ends the two in their order
      (void)::prctl(PR_SET_PDEATHSIG, SIGTERM, 0, 0, 0);
      if (::getppid() != parent) ::_exit(1);
      for (const int fd : {listening_.get(), write_end.get()}) (void)::fcntl(fd, F_SETFD, 0);
      ::execvp(arguments[0], arguments.data());
      fmt::print(stderr, "torpor pair: cannot run {}: {}\n", words[0], std::strerror(errno));
      ::_exit(kConfigurationExit);
    }
    (void)::fcntl(read_end.get(), F_SETFL, O_NONBLOCK);
    server.pid = pid;
    server.state_pipe = std::move(read_end);
    server.line.clear();
    server.began = seconds_now();
    server.known.as_standby = start.as_standby;
    server.was_of_use = server.failed = server.terminated = false;
    server.left_over_since.reset();
    server.known.state = ServerState::kStarting;
    server.known.owned = false;
    print_line(fmt::format("server {} starts as {} (process {}, its own port {})", start.which + 1,
                           start.as_standby ? "standby" : "owner", pid, options_.ports[start.which]));
    return ok();
  }

  void wait_for_something(const Descriptor& signals) {
    std::array<pollfd, 3> waited{};
    waited[0] = {.fd = signals.get(), .events = POLLIN, .revents = 0};
    for (size_t i = 0; i < 2; ++i) waited[i + 1] = {.fd = servers_[i].state_pipe.get(), .events = POLLIN, .revents = 0};
    (void)::poll(waited.data(), waited.size(), 500);
    signalfd_siginfo got{};
    while (::read(signals.get(), &got, sizeof got) == sizeof got) {
      if (got.ssi_signo == SIGCHLD) continue;
      if (ending_) {
        for (const Server& server : servers_) {
          if (server.pid != 0) (void)::kill(server.pid, SIGKILL);
        }
      }
      if (!ending_) print_line("ends: the standby first, then the owner with its checkpoint");
      ending_ = true;
    }
  }

  void read_states() {
    for (Server& server : servers_) {
      if (server.state_pipe.get() < 0) continue;
      char piece[256];
      ssize_t got = 0;
      while ((got = ::read(server.state_pipe.get(), piece, sizeof piece)) > 0) {
        server.line.append(piece, static_cast<size_t>(got));
      }
      for (size_t end = 0; (end = server.line.find('\n')) != std::string::npos; server.line.erase(0, end + 1)) {
        const std::optional<ServerState> state = server_state_of(server.line.substr(0, end));
        if (!state) continue;
        server.known.state = *state;
        server.failed = server.failed || *state == ServerState::kFailed;
        server.known.owned = server.known.owned || *state == ServerState::kOwns;
        if (*state == ServerState::kOwns || *state == ServerState::kStandby) {
          server.was_of_use = true;
          server.known.ended_early = 0;
        }
      }
      if (got == 0) server.state_pipe = Descriptor();  // it has ended, or will say no more
    }
  }

  void reap() {
    int status = 0;
    for (pid_t pid = 0; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
      for (size_t i = 0; i < servers_.size(); ++i) {
        if (servers_[i].pid == pid) ended(i, status);
      }
    }
  }

  void ended(size_t which, int status) {
    read_states();  // its last ones
    Server& server = servers_[which];
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    print_line(fmt::format("server {} has ended (process {}, {} {})", which + 1, server.pid,
                           WIFEXITED(status) ? "exit code" : "signal", WIFEXITED(status) ? code : WTERMSIG(status)));
    if (server.known.owned) owner_exit_ = code;
    // While the other one serves this may pass, as a port that is in use for a moment.
    const ServerState others = servers_[1 - which].known.state;
    const bool other_serves = others == ServerState::kOwns || others == ServerState::kTakingOver;
    if (!server.was_of_use && code == kConfigurationExit && !ending_ && !other_serves) {
      print_line("its options are wrong: the pair ends");
      ends_with_ = code;
    }
    if (!server.was_of_use) server.known.ended_early += 1;
    if (server.was_of_use && seconds_now() - server.began > kUsefulSeconds) server.known.ended_early = 0;
    server.known.state = ServerState::kNone;
    server.known.ended_at = seconds_now();
    server.pid = 0;
    server.state_pipe = Descriptor();
  }

  void end_failed() {
    for (Server& server : servers_) {
      if (server.pid == 0) continue;
      const char* const what = server.known.owned ? "owner" : "standby";
      if (is_to_end(server.known) && !server.terminated) {
        print_line(fmt::format("ends the {} that failed (process {}): its log says why", what, server.pid));
        terminate(server);
      } else if (server.terminated && has_had_its_time(server)) {
        print_line(fmt::format("kills the {} that failed (process {}): it does not end", what, server.pid));
        (void)::kill(server.pid, SIGKILL);
        server.terminated_at = seconds_now();
      }
    }
  }

  void end_left_over() {
    for (Server& server : servers_) {
      const Server& other = &server == &servers_[0] ? servers_[1] : servers_[0];
      if (server.pid == 0 || !is_left_over(server.known, other.known)) {
        server.left_over_since.reset();
      } else if (!server.left_over_since) {
        server.left_over_since = seconds_now();
      } else if (seconds_now() - *server.left_over_since > kLeftOverSeconds) {
        print_line(fmt::format("kills the owner before (process {}): it does not end", server.pid));
        (void)::kill(server.pid, SIGKILL);
        server.left_over_since = seconds_now();
      }
    }
  }

  static void terminate(Server& server) {
    (void)::kill(server.pid, SIGTERM);
    server.terminated = true;
    server.terminated_at = seconds_now();
  }
  static bool has_had_its_time(const Server& server) { return seconds_now() - server.terminated_at > kStandbySeconds; }

  // The one that does not own ends first: else it would take over from the one that ends.
  void end_step() {
    for (Server& server : servers_) {
      const Server& other = &server == &servers_[0] ? servers_[1] : servers_[0];
      const bool owns = is_owner(server.known, other.known);
      if (server.pid == 0) continue;
      if (!server.terminated && (!owns || other.pid == 0)) {
        terminate(server);
      } else if (server.terminated && !owns && (other.pid != 0 || server.failed) && has_had_its_time(server)) {
        (void)::kill(server.pid, SIGKILL);
      }
    }
  }

  const Options options_;
  const Descriptor listening_;
  sigset_t before_{};
  std::array<Server, 2> servers_;
  bool ending_ = false;
  std::optional<int> ends_with_;
  int owner_exit_ = 0;
};

Result<Options> options_of(const Context& context, std::string& host, int& port) {
  Words words(context.arguments.call);
  if (words.remove("--uds")) return usage("a pair does not serve on a Unix socket", "leave out --uds, use --port");
  if (words.remove("--torpor-standby-of") || words.remove("--torpor-listen-fd") || words.remove("--torpor-state-fd") ||
      std::getenv("TORPOR_SERVER_STANDBY_OF") != nullptr)
    return usage("which server is the standby is the pair's to say", "leave out --torpor-standby-of and the …-fd");
  Options options{.python = context.arguments.output.empty() ? "python3" : context.arguments.output};
  TORPOR_ASSIGN_OR_RETURN(port, port_of(words.remove("--port").value_or("8000")));
  Words copy = words;
  host = copy.remove("--host").value_or("");
  const char* const from_environment = std::getenv("TORPOR_CHECKPOINT_DIR");
  options.directory =
      copy.remove("--torpor-checkpoint-dir").value_or(from_environment == nullptr ? "" : from_environment);
  if (options.directory.empty())
    return usage("a pair without a directory that both servers share", "name one: --torpor-checkpoint-dir DIR");
  options.words = words.rest();
  options.ports = {port + 1, port + 2};
  if (const std::string& given = context.arguments.second; !given.empty()) {
    const size_t comma = given.find(',');
    if (comma == std::string::npos) return usage(fmt::format("--own-ports is \"{}\"", given), "give two: 8001,8002");
    TORPOR_ASSIGN_OR_RETURN(options.ports[0], port_of(given.substr(0, comma)));
    TORPOR_ASSIGN_OR_RETURN(options.ports[1], port_of(given.substr(comma + 1)));
  }
  if (options.ports[0] == options.ports[1] || options.ports[0] == port || options.ports[1] == port ||
      std::max(options.ports[0], options.ports[1]) > 65535)
    return usage("the ports of the pair and of its servers are not three", "see --port and --own-ports");
  return options;
}

Result<Exit> pair(const Context& context) {
  std::string host;
  int port = 0;
  TORPOR_ASSIGN_OR_RETURN(Options options, options_of(context, host, port));
  TORPOR_ASSIGN_OR_RETURN(Descriptor listening, listen_at(host, port));
  print_line(fmt::format("clients connect to port {}; the servers answer for themselves on {} and {}", port,
                         options.ports[0], options.ports[1]));
  return Pair(std::move(options), std::move(listening)).run();
}

}  // namespace

Verb pair_verb() {
  return {
      .name = "pair",
      .help =
          "runs two servers of one model on one device: one serves, the other one sleeps and takes over when it "
          "ends; whichever ended comes back as the standby. May be the first process of a container",
      .json = "nothing",
      .declare =
          [](CLI::App& app, Arguments& a) {
            app.add_option("--python", a.output, "the Python that has vLLM and torpor (default: python3)")
                ->envname("TORPOR_PYTHON");
            app.add_option("--own-ports", a.second,
                           "ports of the two servers themselves, for probes and metrics, as 8001,8002 (default: "
                           "the two after --port)");
            app.add_option("serve", a.call, "MODEL and options of python -m torpor.vllm.serve, after --")->required();
          },
      .stream = pair};
}

}  // namespace torpor::cli
