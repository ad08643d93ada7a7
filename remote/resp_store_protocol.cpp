// SPDX-License-Identifier: Apache-2.0
// RespStore: the requests to the server, and the checks of its replies.
#include <algorithm>
#include <random>
#include <thread>

#include <fmt/core.h>

#include "base/log.h"
#include "base/units.h"
#include "remote/resp_store.h"

namespace torpor::remote {
namespace {

constexpr double kFirstPauseSeconds = 0.02;
constexpr int kMostMoves = 5;
constexpr size_t kMostShares = 4;  // of a call's time: a hanging node takes a share from later ones
// Bytes of blocks, at least two blocks: one is sent while the server makes the next.
constexpr uint64_t kAskedAhead = 4 * kMiB;

Error strange(const char* to) {
  return {.code = Code::kCorruption,
          .what = fmt::format("the remote store answers {} with something else", to),
          .next_step = "check that the address is that of a Redis or Valkey server"};
}

void pause_before(int attempt, Deadline until) {
  static thread_local std::minstd_rand random{std::random_device{}()};
  const double longest = kFirstPauseSeconds * static_cast<double>(1 << attempt);
  const std::chrono::duration<double> pause(std::uniform_real_distribution<double>(0, longest)(random));
  std::this_thread::sleep_until(
      std::min(until, std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(pause)));
}

}  // namespace

// Set the status of each item. Follows redirections at once, and retries transient errors.
void RespStore::exchange(std::span<Item> items, Verb verb) {
  if (items.empty()) return;
  const Deadline until = std::chrono::steady_clock::now() + timeout_;
  NodesAsked asked;
  for (int attempt = 0, moves = 0; attempt < attempts_;) {
    std::map<std::string, std::vector<Item*>> by_node;
    for (Item& item : items) {
      if (!item.over) by_node[item.node.empty() ? nodes_.node_of(item.key) : item.node].push_back(&item);
    }
    if (by_node.empty()) break;
    bool moved = false;
    size_t left = by_node.size();
    for (const auto& [node, of_node] : by_node) {
      const Deadline now = std::chrono::steady_clock::now();
      if (now >= until) break;
      const auto share = (until - now) / static_cast<int64_t>(std::min(left--, kMostShares));
      moved = ask_node(node, of_node, verb, now + share, asked) || moved;
    }
    if (moved && ++moves <= kMostMoves) continue;
    for (Item& item : items) item.node.clear();
    if (std::chrono::steady_clock::now() >= until) break;
    if (++attempt < attempts_ && std::any_of(items.begin(), items.end(), [](const Item& item) { return !item.over; }))
      pause_before(attempt, until);
  }
  for (Item& item : items) {
    if (!std::exchange(item.over, true) && item.status) item.status = unavailable("the remote store took too long");
  }
  update_breakers(asked);
}

// Return whether an item must be asked for at another node.
bool RespStore::ask_node(const std::string& node, std::span<Item* const> items, Verb verb, Deadline until,
                         NodesAsked& asked) {
  const auto [at, first] = asked.try_emplace(node);
  NodeAsked& state = at->second;
  for (Item* const item : items) item->node.clear();
  if (first) state.may = nodes_.may_ask(node);
  if (!state.may) {
    for (Item* const item : items) {
      nodes_.forget(item->key);
      item->over = true;
      item->status =
          unavailable(fmt::format("{} of the remote store did not answer; it is not asked for a while", node));
    }
    return false;
  }
  const Status talked = talk(node, items, verb, until);
  if (talked) {
    state.answered = true;
    return std::any_of(items.begin(), items.end(), [](const Item* item) { return !item->node.empty(); });
  }
  nodes_.lost(node);
  state.failure = talked.error();
  Error error = talked.error();
  if (error.code == Code::kCorruption) error.code = Code::kUnavailable;  // of the connection, not of a block
  for (Item* const item : items) {
    if (item->over) continue;
    item->asking = false;
    item->node.clear();
    item->status = error;
    item->over = error.code == Code::kUnauthenticated || error.code == Code::kResourceExhausted;
  }
  return false;
}

void RespStore::update_breakers(const NodesAsked& asked) {
  for (const auto& [node, state] : asked) {
    if (state.answered) {
      if (nodes_.answered(node)) log().info("KV connector: {} of the remote store answers again", node);
    } else if (state.failure && nodes_.failed(node)) {
      log().warn("KV connector: {} of the remote store is not asked for a while: {}", node, *state.failure);
    }
  }
}

// Run `verb` with one node. An error means that replies can no longer be matched to requests: the connection ends.
// Items have a status of their own.
Status RespStore::talk(const std::string& node, std::span<Item* const> items, Verb verb, Deadline until) {
  TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<RespConnection> connection, nodes_.take(node, until));
  if (verb == Verb::kPut) {
    TORPOR_RETURN_IF_ERROR(put_to(*connection, node, items, until));
  } else {
    const std::string_view command = verb == Verb::kGet ? "GET" : verb == Verb::kFind ? "EXISTS" : "UNLINK";
    // A server makes the replies to all requests that it has read in its memory before it sends the first one.
    const size_t ahead = verb == Verb::kGet ? std::max<size_t>(2, kAskedAhead / traits().record_bytes) : items.size();
    for (size_t at = 0, asked = 0; at < items.size(); ++at) {
      const size_t until_here = asked - at > ahead / 2 ? asked : std::min(items.size(), at + ahead);
      for (; asked < until_here; ++asked) {
        if (items[asked]->asking) connection->queue({"ASKING"});
        connection->queue({command, items[asked]->key});
      }
      TORPOR_RETURN_IF_ERROR(connection->flush(until));
      TORPOR_RETURN_IF_ERROR(receive(*connection, node, *items[at], verb, until));
    }
  }
  nodes_.give(node, std::move(connection));
  return ok();
}

// Put the blocks that the server does not have.
Status RespStore::put_to(RespConnection& connection, const std::string& node, std::span<Item* const> items,
                         Deadline until) {
  for (const Item* const item : items) {
    if (item->asking) connection.queue({"ASKING"});
    connection.queue({"EXISTS", item->key});
  }
  TORPOR_RETURN_IF_ERROR(connection.flush(until));
  std::vector<Item*> absent;
  for (Item* const item : items) {
    const bool asking = item->asking;
    TORPOR_RETURN_IF_ERROR(receive(connection, node, *item, Verb::kFind, until));
    if (!item->over || item->status || item->status.error().code != Code::kNotFound) continue;
    item->over = false;
    item->asking = asking;
    absent.push_back(item);
  }
  for (const Item* const item : absent) {
    if (item->asking) connection.queue({"ASKING"});
    connection.queue_set_new(item->key, item->head, item->body);
  }
  TORPOR_RETURN_IF_ERROR(connection.flush(until));
  for (Item* const item : absent) TORPOR_RETURN_IF_ERROR(receive(connection, node, *item, Verb::kPut, until));
  return ok();
}

Status RespStore::receive(RespConnection& connection, const std::string& node, Item& item, Verb verb, Deadline until) {
  using Kind = RespReply::Kind;
  if (std::exchange(item.asking, false)) {
    TORPOR_ASSIGN_OR_RETURN(const RespReply reply, connection.reply(until));
    if (reply.kind != Kind::kText) return strange("ASKING");
  }
  TORPOR_ASSIGN_OR_RETURN(const RespReply reply, connection.reply(until));
  if (reply.kind == Kind::kError) return refused(item, reply.text, node), ok();
  item.status = ok();
  switch (verb) {
    case Verb::kPut:
      if (reply.kind != Kind::kText && reply.kind != Kind::kNothing) return strange("SET");
      break;
    case Verb::kGet:
      if (reply.kind == Kind::kNothing) {
        item.status = missing();
        break;
      }
      if (reply.kind != Kind::kValue) return strange("GET");
      TORPOR_RETURN_IF_ERROR(receive_value(connection, item, static_cast<uint64_t>(reply.number), until));
      break;
    case Verb::kFind:
    case Verb::kRemove:
      if (reply.kind != Kind::kNumber) return strange("EXISTS");
      if (verb == Verb::kFind && reply.number == 0) item.status = missing();
      break;
  }
  item.over = true;  // only now: after a reply that makes no sense it is asked again, or fails
  return ok();
}

// Read the whole value in any case: the bytes behind it are the reply to another request.
Status RespStore::receive_value(RespConnection& connection, Item& item, uint64_t length, Deadline until) {
  if (length < kFrameBytes) {
    item.status = damaged("is too short");
    TORPOR_RETURN_IF_ERROR(connection.skip(length, until));
    return connection.end_value(until);
  }
  FrameBytes head;
  TORPOR_RETURN_IF_ERROR(connection.take(head, until));
  const uint64_t stored = length - kFrameBytes;
  const Result<BlockFrame> frame = frame_of(head, stored, item.expected);
  if (!frame) {
    item.status = frame.error();
    TORPOR_RETURN_IF_ERROR(connection.skip(stored, until));
    return connection.end_value(until);
  }
  std::vector<std::byte> encoded(frame->codec == Codec::kNone ? 0 : stored);
  const std::span<std::byte> room = frame->codec == Codec::kNone ? item.part->bytes : std::span(encoded);
  TORPOR_RETURN_IF_ERROR(connection.take(room, until));
  TORPOR_RETURN_IF_ERROR(connection.end_value(until));
  item.status = open_value(item, *frame, head, room);
  return ok();
}

// Set the item's status from the server's error text. After a transient error the item is not over.
void RespStore::refused(Item& item, const std::string& words, const std::string& node) {
  const Error error = error_of(words);
  item.status = error;
  item.over = error.code != Code::kUnavailable;
  if (words.starts_with("MOVED") || words.starts_with("ASK")) {
    item.node = nodes_.moved(words, node);
    item.asking = words.starts_with("ASK ");
  } else if (words.starts_with("READONLY")) {
    nodes_.lost(node);  // another node is the master now
  }
  if (error.code == Code::kResourceExhausted) no_room();
}

}  // namespace torpor::remote
