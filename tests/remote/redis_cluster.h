// SPDX-License-Identifier: Apache-2.0
// A cluster of three real Redis servers on this machine, in processes that end with the test's.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include <fmt/core.h>

#include "remote/resp_connection.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::test {

class RedisNode {
 public:
  static constexpr std::chrono::seconds kPatience{60};

  explicit RedisNode(std::string folder) : folder_(std::move(folder)) {
    boost::filesystem::create_directories(folder_);
    for (int attempt = 0; attempt < 5 && process_ <= 0; ++attempt) {  // a port that was free may be taken meanwhile
      take_ports();
      start();
    }
  }
  ~RedisNode() { end(SIGKILL); }
  RedisNode(const RedisNode&) = delete;
  RedisNode& operator=(const RedisNode&) = delete;

  // Debian's redis-tools have the server's program under the name of one of its tools, and start no service.
  void start() {
    const std::vector<std::string> words = {"redis-server",
                                            "--port",
                                            std::to_string(port_),
                                            "--cluster-port",
                                            std::to_string(bus_),
                                            "--bind",
                                            "127.0.0.1",
                                            "--dir",
                                            folder_,
                                            "--cluster-enabled",
                                            "yes",
                                            "--cluster-require-full-coverage",
                                            "no",
                                            "--cluster-node-timeout",
                                            "60000",
                                            "--save",
                                            "",
                                            "--appendonly",
                                            "no",
                                            "--logfile",
                                            folder_ + "/log"};
    std::vector<char*> arguments;
    for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    process_ = ::fork();
    if (process_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (const char* program : {"redis-server", "redis-check-rdb"}) ::execvp(program, arguments.data());
      ::_exit(127);
    }
    while (::waitpid(process_, nullptr, WNOHANG) == 0) {
      if (ask({"PING"}) == "PONG") return;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    process_ = 0;
  }
  bool runs() const { return process_ > 0; }
  void end(int signal) {
    if (process_ <= 0) return;
    ::kill(process_, signal);
    ::waitpid(process_, nullptr, 0);
    process_ = 0;
  }
  void signal(int number) const { ::kill(process_, number); }

  std::string address() const { return fmt::format("127.0.0.1:{}", port_); }
  std::string url() const { return "redis://" + address(); }
  int port() const { return port_; }
  int bus() const { return bus_; }
  std::string id() const { return ask({"CLUSTER", "MYID"}); }
  // The last answer, as text; an error with its words.
  std::string ask(std::initializer_list<std::string_view> words) const { return ask_all({std::vector(words)}); }
  std::string ask_all(const std::vector<std::vector<std::string_view>>& requests) const {
    const remote::Deadline until = std::chrono::steady_clock::now() + kPatience;
    auto stream = remote::connect_to({"127.0.0.1", static_cast<uint16_t>(port_)}, nullptr, until);
    if (!stream) return stream.error().to_string();
    remote::RespConnection connection(std::move(*stream));
    for (const auto& request : requests) connection.queue(request);
    if (!connection.flush(until)) return "not sent";
    std::string answer;
    for (size_t i = 0; i < requests.size(); ++i) answer = read(connection, until);
    return answer;
  }

 private:
  static std::string read(remote::RespConnection& connection, remote::Deadline until) {
    const auto reply = connection.reply(until);
    if (!reply) return reply.error().to_string();
    if (reply->kind == remote::RespReply::Kind::kNumber) return std::to_string(reply->number);
    if (reply->kind != remote::RespReply::Kind::kValue) return reply->text;
    std::string value(static_cast<size_t>(reply->number), '\0');
    if (!connection.take(std::as_writable_bytes(std::span(value)), until) || !connection.end_value(until)) return "";
    return value;
  }
  void take_ports() {
    const std::array<int, 2> sockets = {::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0),
                                        ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    for (size_t i = 0; i < sockets.size(); ++i) {
      sockaddr_in address{.sin_family = AF_INET};
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      socklen_t size = sizeof(address);
      EXPECT_EQ(::bind(sockets[i], reinterpret_cast<sockaddr*>(&address), size), 0);
      EXPECT_EQ(::getsockname(sockets[i], reinterpret_cast<sockaddr*>(&address), &size), 0);
      (i == 0 ? port_ : bus_) = ntohs(address.sin_port);
    }
    for (const int each : sockets) ::close(each);
  }

  const std::string folder_;
  pid_t process_ = 0;
  int port_ = 0;
  int bus_ = 0;
};

// Three masters, a third of the slots each.
class RedisCluster {
 public:
  RedisCluster() {
    for (const char* name : {"/a", "/b", "/c"}) nodes_.push_back(std::make_unique<RedisNode>(folder_.path() + name));
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (!nodes_[i]->runs()) {
        ADD_FAILURE() << "no Redis server: install redis-tools";
        return;
      }
      const std::string first = std::to_string(i * kThird);
      const std::string last = std::to_string(i == 2 ? 16383 : (i + 1) * kThird - 1);
      EXPECT_EQ(nodes_[i]->ask({"CLUSTER", "ADDSLOTSRANGE", first, last}), "OK");
      const std::string port = std::to_string(nodes_[i]->port());
      if (i == 0) continue;
      EXPECT_EQ(nodes_[0]->ask({"CLUSTER", "MEET", "127.0.0.1", port, std::to_string(nodes_[i]->bus())}), "OK");
    }
    wait_until_whole();
  }
  RedisNode& node(size_t index) { return *nodes_[index]; }
  static size_t owner_of(std::string_view key) { return std::min<size_t>(remote::cluster_slot(key) / kThird, 2); }

  void wait_until_whole() const {
    const auto until = std::chrono::steady_clock::now() + RedisNode::kPatience;
    for (const auto& node : nodes_) {
      while (true) {
        const std::string info = node->ask({"CLUSTER", "INFO"});
        const auto says = [&](const char* words) { return info.find(words) != std::string::npos; };
        if (says("cluster_state:ok") && says("cluster_slots_ok:16384") && says("cluster_known_nodes:3")) break;
        if (std::chrono::steady_clock::now() > until) {
          ADD_FAILURE() << "the cluster does not come up:\n" << info;
          return;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
    }
  }

 private:
  static constexpr size_t kThird = 5461;
  TemporaryDirectory folder_;
  std::vector<std::unique_ptr<RedisNode>> nodes_;
};

}  // namespace torpor::test
