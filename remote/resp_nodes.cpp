// SPDX-License-Identifier: Apache-2.0
#include "remote/resp_nodes.h"

#include <algorithm>
#include <array>
#include <charconv>

#include <fmt/core.h>

namespace torpor::remote {
namespace {
constexpr size_t kMostFailing = 1000;  // a server can name any number of nodes in MOVED replies
}  // namespace

Error error_of(std::string_view words) {
  const std::string_view word = words.substr(0, words.find(' '));
  const auto is = [word](std::initializer_list<std::string_view> any) {
    return std::find(any.begin(), any.end(), word) != any.end();
  };
  Error error{.code = Code::kInternal,
              .what = fmt::format("the remote store says: {}", words.substr(0, 300)),
              .next_step = "look at the server's log"};
  if (is({"LOADING", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "READONLY", "MOVED", "ASK", "BUSY"})) {
    error.code = Code::kUnavailable;
    error.next_step = "try again";
  } else if (is({"NOAUTH", "WRONGPASS", "NOPERM"})) {
    error.code = Code::kUnauthenticated;
    error.next_step = "check the credentials, and what they allow";
  } else if (is({"OOM"})) {
    error.code = Code::kResourceExhausted;
    error.next_step = "give the server memory, or the policy allkeys-lru";
  }
  return error;
}

std::string RespNodes::node_of(std::string_view key) const {
  const MutexLock lock(mutex_);
  if (!slots_.empty()) {
    if (const auto found = slots_.find(cluster_slot(key)); found != slots_.end()) return found->second;
  }
  for (size_t i = 0; i < settings_.nodes.size(); ++i) {
    std::string node = settings_.nodes[(first_ + i) % settings_.nodes.size()].text();
    if (answers(node)) return node;
  }
  for (const auto& [slot, node] : slots_) {
    if (answers(node)) return node;
  }
  return settings_.nodes[first_].text();
}

bool RespNodes::answers(const std::string& node) const {
  const auto found = failing_.find(node);
  return found == failing_.end() || found->second->closed_or_due();
}

bool RespNodes::any_answers() const {
  const MutexLock lock(mutex_);
  for (const Address& node : settings_.nodes) {
    if (answers(node.text())) return true;
  }
  for (const auto& [slot, node] : slots_) {
    if (answers(node)) return true;
  }
  return false;
}

bool RespNodes::may_ask(const std::string& node) {
  const MutexLock lock(mutex_);
  const auto found = failing_.find(node);
  return found == failing_.end() || found->second->may_ask();
}

bool RespNodes::answered(const std::string& node) {
  const MutexLock lock(mutex_);
  const auto found = failing_.find(node);
  if (found == failing_.end()) return false;
  const bool was_open = found->second->succeeded();
  failing_.erase(found);
  return was_open;
}

bool RespNodes::failed(const std::string& node) {
  const MutexLock lock(mutex_);
  if (failing_.size() >= kMostFailing && !failing_.contains(node)) failing_.clear();
  std::unique_ptr<Breaker>& breaker = failing_[node];
  if (breaker == nullptr) breaker = std::make_unique<Breaker>(clock_, breaker_);
  return breaker->failed();
}

void RespNodes::forget(std::string_view key) {
  const MutexLock lock(mutex_);
  slots_.erase(cluster_slot(key));
}

Result<std::unique_ptr<RespConnection>> RespNodes::take(const std::string& node, Deadline until) {
  {
    const MutexLock lock(mutex_);
    std::vector<std::unique_ptr<RespConnection>>& idle = idle_[node];
    if (!idle.empty()) {
      std::unique_ptr<RespConnection> connection = std::move(idle.back());
      idle.pop_back();
      return connection;
    }
  }
  Address address;
  const size_t colon = node.rfind(':');
  address.host = node.substr(0, colon);
  if (address.host.starts_with('[')) address.host = address.host.substr(1, address.host.size() - 2);
  std::from_chars(node.data() + colon + 1, node.data() + node.size(), address.port);
  TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<ByteStream> stream, connect_to(address, trust_.get(), until));
  auto made = std::make_unique<RespConnection>(std::move(stream));
  if (settings_.password.empty()) return made;
  if (settings_.user.empty()) {
    made->queue({"AUTH", settings_.password});
  } else {
    made->queue({"AUTH", settings_.user, settings_.password});
  }
  TORPOR_RETURN_IF_ERROR(made->flush(until));
  TORPOR_ASSIGN_OR_RETURN(const RespReply reply, made->reply(until));
  if (reply.kind == RespReply::Kind::kText) return made;
  Error refused = error_of(reply.text);
  refused.code = refused.code == Code::kInternal ? Code::kUnauthenticated : refused.code;
  return refused;
}

void RespNodes::give(const std::string& node, std::unique_ptr<RespConnection> connection) {
  const MutexLock lock(mutex_);
  idle_[node].push_back(std::move(connection));
}

std::string RespNodes::moved(std::string_view words, const std::string& node) {
  const size_t first = words.find(' ');
  const size_t second = first == std::string_view::npos ? first : words.find(' ', first + 1);
  if (second == std::string_view::npos) return {};
  uint16_t slot = 0;
  const auto [end, problem] = std::from_chars(words.data() + first + 1, words.data() + second, slot);
  std::string named(words.substr(second + 1));
  const size_t colon = named.rfind(':');
  if (problem != std::errc() || end != words.data() + second || slot >= 16384 || colon == std::string::npos) return {};
  if (colon == 0) named = node.substr(0, node.rfind(':')) + named;  // no host: the one that replied
  if (words.starts_with("MOVED")) {
    const MutexLock lock(mutex_);
    slots_[slot] = named;
  }
  return named;
}

void RespNodes::lost(const std::string& node) {
  const MutexLock lock(mutex_);
  std::erase_if(slots_, [&](const auto& each) { return each.second == node; });
  idle_.erase(node);
  if (settings_.nodes[first_].text() == node) first_ = (first_ + 1) % settings_.nodes.size();
}

}  // namespace torpor::remote
