// SPDX-License-Identifier: Apache-2.0
// A server of RESP in this process: what the store asks of a Redis, and what a real one does rarely.
#pragma once

#include <unistd.h>

#include <atomic>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <fmt/core.h>
#include <gtest/gtest.h>

#include "tests/remote/listener.h"

namespace torpor::test {

class RespPeer {
 public:
  static inline const std::string kReset = "RESET";  // the connection is broken off
  static inline const std::string kStall = "STALL";  // nothing is said any more
  using Words = std::vector<std::string>;
  // The answer to a request, instead of what a Redis says; none: that.
  using Script = std::function<std::string(const Words&)>;

  RespPeer() {
    accepting_ = std::thread([this] { accept_all(); });
  }
  ~RespPeer() {
    ended_ = true;
    ::shutdown(listener_.socket, SHUT_RDWR);
    accepting_.join();
    ::close(listener_.socket);
    hang_up();
    for (Connection& each : connections_) {
      each.thread.join();
      ::close(each.socket);
    }
  }
  RespPeer(const RespPeer&) = delete;
  RespPeer& operator=(const RespPeer&) = delete;

  std::string url() const { return fmt::format("redis://{}", address()); }
  std::string address() const { return fmt::format("127.0.0.1:{}", listener_.port); }
  void script(Script script) {
    const std::lock_guard lock(mutex_);
    script_ = std::move(script);
  }
  void fail(bool failing) {
    failing_ = failing;
    hang_up();
  }
  // Connections that are open end.
  void hang_up() {
    const std::lock_guard lock(mutex_);
    for (const Connection& each : connections_) ::shutdown(each.socket, SHUT_RDWR);
  }
  std::map<std::string, std::string> values() const {
    const std::lock_guard lock(mutex_);
    return values_;
  }
  void set(const std::string& key, std::string value) {
    const std::lock_guard lock(mutex_);
    values_[key] = std::move(value);
  }
  size_t asked(const std::string& command) const {
    const std::lock_guard lock(mutex_);
    const auto found = asked_.find(command);
    return found == asked_.end() ? 0 : found->second;
  }

 private:
  struct Connection {
    int socket = -1;
    std::thread thread;
  };

  void accept_all() {
    while (!ended_) {
      const int socket = ::accept(listener_.socket, nullptr, nullptr);
      if (socket < 0) return;
      const std::lock_guard lock(mutex_);
      connections_.push_back({socket, std::thread([this, socket] { serve(socket); })});
    }
  }

  void serve(int socket) {
    std::string unread;
    const auto more = [&] {
      std::array<char, 1 << 16> some{};
      const ssize_t got = ::recv(socket, some.data(), some.size(), 0);
      if (got <= 0) return false;
      unread.append(some.data(), static_cast<size_t>(got));
      return true;
    };
    const auto line = [&](std::string& into) {
      size_t end = 0;
      while ((end = unread.find("\r\n")) == std::string::npos) {
        if (!more()) return false;
      }
      into = unread.substr(0, end);
      unread.erase(0, end + 2);
      return true;
    };
    std::string head;
    while (line(head)) {
      Words words;
      for (size_t left = std::stoul(head.substr(1)); left > 0; --left) {
        if (!line(head)) return;
        const size_t size = std::stoul(head.substr(1));
        while (unread.size() < size + 2) {
          if (!more()) return;
        }
        words.push_back(unread.substr(0, size));
        unread.erase(0, size + 2);
      }
      const std::string said = failing_ ? kReset : answer(words);
      if (said == kStall) continue;
      if (said == kReset) {
        ::shutdown(socket, SHUT_RDWR);
        return;
      }
      for (size_t at = 0; at < said.size();) {
        const ssize_t sent = ::send(socket, said.data() + at, said.size() - at, MSG_NOSIGNAL);
        if (sent <= 0) return;
        at += static_cast<size_t>(sent);
      }
    }
  }

  std::string answer(const Words& words) {
    const std::lock_guard lock(mutex_);
    ++asked_[words[0]];
    if (script_) {
      if (std::string scripted = script_(words); !scripted.empty()) return scripted;
    }
    const auto found = words.size() > 1 ? values_.find(words[1]) : values_.end();
    const bool there = found != values_.end();
    if (words[0] == "EXISTS") return fmt::format(":{}\r\n", there ? 1 : 0);
    if (words[0] == "GET")
      return there ? fmt::format("${}\r\n{}\r\n", found->second.size(), found->second) : std::string("$-1\r\n");
    if (words[0] == "UNLINK") return fmt::format(":{}\r\n", values_.erase(words[1]));
    if (words[0] == "SET" && there) return "$-1\r\n";
    if (words[0] == "SET") values_[words[1]] = words[2];
    return "+OK\r\n";
  }

  Listener listener_;
  std::atomic<bool> ended_ = false;
  std::atomic<bool> failing_ = false;
  mutable std::mutex mutex_;
  Script script_;
  std::map<std::string, std::string> values_;
  std::map<std::string, size_t> asked_;
  std::list<Connection> connections_;
  std::thread accepting_;
};

}  // namespace torpor::test
