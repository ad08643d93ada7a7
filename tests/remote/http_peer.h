// SPDX-License-Identifier: Apache-2.0
// HttpPeer: a scripted server. Each connection is answered with the next of its answers.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include <fmt/core.h>
#include <gtest/gtest.h>

#include "tests/remote/listener.h"

namespace torpor::remote {

inline constexpr const char* kReset = "RESET";  // the connection is broken off
inline constexpr const char* kStall = "STALL";  // nothing is said

class HttpPeer {
 public:
  explicit HttpPeer(std::deque<std::string> answers) : answers_(std::move(answers)) {
    thread_ = std::thread([this] { serve(); });
  }
  ~HttpPeer() {
    ended_ = true;
    ::shutdown(listener_.socket, SHUT_RDWR);
    if (thread_.joinable()) thread_.join();
    ::close(listener_.socket);
    for (const int open : open_) ::close(open);
  }
  // "http://127.0.0.1:PORT"
  std::string endpoint() const { return fmt::format("http://127.0.0.1:{}", listener_.port); }
  // Returns when there was a call for each answer.
  void wait_for_all() { thread_.join(); }
  size_t count() const { return taken_; }  // of connections so far
  void wait_for(size_t count) const {
    for (size_t seen = taken_; seen < count; seen = taken_) taken_.wait(seen);
  }
  // What was asked: first lines, heads and bodies. Read them when all answers were given.
  std::vector<std::string> asked;
  std::vector<std::string> heads;
  std::vector<std::string> bodies;

 private:
  void serve() {
    while (!ended_ && !answers_.empty()) {
      const int connection = ::accept(listener_.socket, nullptr, nullptr);
      if (connection < 0) return;
      ++taken_;
      taken_.notify_all();
      std::string request;
      std::array<char, 4096> some{};
      while (request.find("\r\n\r\n") == std::string::npos) {
        const ssize_t got = ::recv(connection, some.data(), some.size(), 0);
        if (got <= 0) break;
        request.append(some.data(), static_cast<size_t>(got));
      }
      const size_t head = request.find("\r\n\r\n");
      heads.push_back(request.substr(0, head));
      asked.push_back(request.substr(0, request.find(" HTTP/")));
      const size_t length_at = request.find("Content-Length: ");
      size_t left = length_at == std::string::npos ? 0 : std::stoul(request.substr(length_at + 16));
      left -= std::min(left, request.size() - head - 4);
      bodies.push_back(request.substr(std::min(request.size(), head + 4)));
      while (left > 0) {
        const ssize_t got = ::recv(connection, some.data(), std::min(left, some.size()), 0);
        if (got <= 0) break;
        bodies.back().append(some.data(), static_cast<size_t>(got));
        left -= static_cast<size_t>(got);
      }
      const std::string answer = std::move(answers_.front());
      answers_.pop_front();
      if (answer == kStall) {
        open_.push_back(connection);
        continue;
      }
      if (answer == kReset) {
        const linger now{.l_onoff = 1, .l_linger = 0};
        ::setsockopt(connection, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
      } else {
        (void)::send(connection, answer.data(), answer.size(), MSG_NOSIGNAL);
      }
      ::close(connection);
    }
  }

  std::deque<std::string> answers_;
  std::vector<int> open_;
  std::atomic<bool> ended_ = false;
  std::atomic<size_t> taken_ = 0;
  test::Listener listener_;
  std::thread thread_;
};

inline std::string answer(int status, const std::string& content = "", int64_t length = -1) {
  return fmt::format("HTTP/1.1 {} X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}", status,
                     length < 0 ? static_cast<int64_t>(content.size()) : length, content);
}

}  // namespace torpor::remote
