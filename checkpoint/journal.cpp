#include "checkpoint/journal.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/archived_values.h"

namespace torpor {

template <class Archive>
void serialize(Archive& archive, Queues& v) {
  archive(v.running, v.waiting, v.held, v.finished);
}
template <class Archive>
void serialize(Archive& archive, RequestStep& v) {
  archive(v.id, checked(v.status, RequestStatus::kPreempted), v.output_token_ids, v.block_hashes, v.num_computed_tokens,
          v.num_preemptions);
}
template <class Archive>
void serialize(Archive& archive, TableStep& v) {
  archive(v.group, v.request, v.keep, v.blocks, v.num_cached_blocks, v.removed);
}
template <class Archive>
void serialize(Archive& archive, StateStep& v) {
  archive(v.advanced, v.added, v.removed, v.queues, v.tables, v.blocks, v.free_taken, v.free_appended, v.free_order,
          v.prefix_removed, v.prefix_added, v.prefix_index, v.extra_hashes, v.workers, v.scheduler_engine, v.kv_engine);
}

namespace {

constexpr uint32_t kJournalVersion = 1;

struct StepHead {
  uint32_t bytes = 0;
  Digest digest;  // of the digest before it and the record
};
static_assert(sizeof(StepHead) == 20);

Digest chained(const Digest& before, std::span<const std::byte> record) {
  StreamingDigest digest;
  digest.update(std::as_bytes(std::span(before.bytes)));
  digest.update(record);
  return digest.finish();
}

Error damaged_journal(std::string what) {
  return Error{.code = Code::kCorruption,
               .what = fmt::format("section journal: {}", what),
               .next_step = "use another checkpoint"};
}

std::string_view text(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

// A state and where things are in it. Positions in `requests` are kept until the end, when the removed ones go.
class Replay {
 public:
  explicit Replay(SchedulerCheckpoint& state) : state_(state) {
    for (RequestState& request : state.scheduler.requests) {
      requests_.emplace(request.id, order_.size());
      order_.push_back(std::move(request));
    }
    for (const KvBlock& block : state.kv.blocks) blocks_[block.id] = block;
    for (const KvGroup& group : state.kv.groups) {
      auto& tables = tables_.emplace_back();
      for (size_t i = 0; i < group.tables.size(); ++i) tables.emplace(group.tables[i].request, i);
    }
  }

  Status apply(StateStep& step) {
    for (RequestStep& advanced : step.advanced) TORPOR_TRY(advance(advanced));
    for (const std::string& id : step.removed) {
      const auto found = requests_.find(id);
      if (found == requests_.end()) return damaged_journal(fmt::format("request {} is removed, but is not there", id));
      order_[found->second].reset();
      requests_.erase(found);
    }
    for (RequestState& request : step.added) {
      if (!requests_.emplace(request.id, order_.size()).second)
        return damaged_journal(fmt::format("request {} is added twice", request.id));
      order_.push_back(std::move(request));
    }
    if (step.queues) {
      state_.scheduler.running = std::move(step.queues->running);
      state_.scheduler.waiting = std::move(step.queues->waiting);
      state_.scheduler.held = std::move(step.queues->held);
      state_.scheduler.finished = std::move(step.queues->finished);
    }
    for (TableStep& table : step.tables) TORPOR_TRY(change(table));
    for (KvBlock& block : step.blocks) {
      if (block.ref_count == 0 && block.hash.empty()) {
        blocks_.erase(block.id);
      } else {
        blocks_[block.id] = std::move(block);
      }
    }
    TORPOR_TRY(change_free_order(step));
    change_prefix_index(step);
    if (step.extra_hashes) state_.kv.extra_hashes = std::move(*step.extra_hashes);
    if (step.workers) state_.workers = std::move(*step.workers);
    if (step.scheduler_engine) state_.scheduler.engine = std::move(*step.scheduler_engine);
    if (step.kv_engine) state_.kv.engine = std::move(*step.kv_engine);
    return ok();
  }

  void finish() {
    state_.scheduler.requests.clear();
    for (std::optional<RequestState>& request : order_) {
      if (request) state_.scheduler.requests.push_back(std::move(*request));
    }
    state_.kv.blocks.clear();
    for (auto& [id, block] : blocks_) state_.kv.blocks.push_back(std::move(block));
    for (KvGroup& group : state_.kv.groups) {
      std::erase_if(group.tables, [](const KvTable& table) { return table.request.empty(); });
    }
  }

 private:
  Status advance(RequestStep& step) {
    const auto found = requests_.find(step.id);
    if (found == requests_.end()) return damaged_journal(fmt::format("request {} goes on, but is not there", step.id));
    RequestState& request = *order_[found->second];
    request.status = step.status;
    request.output_token_ids.insert(request.output_token_ids.end(), step.output_token_ids.begin(),
                                    step.output_token_ids.end());
    request.block_hashes.insert(request.block_hashes.end(), step.block_hashes.begin(), step.block_hashes.end());
    request.num_computed_tokens = step.num_computed_tokens;
    request.num_preemptions = step.num_preemptions;
    return ok();
  }

  Status change(TableStep& step) {
    if (step.group >= tables_.size()) return damaged_journal(fmt::format("there is no group {}", step.group));
    std::vector<KvTable>& tables = state_.kv.groups[step.group].tables;
    const auto found = tables_[step.group].find(step.request);
    if (found == tables_[step.group].end()) {
      if (step.removed || step.keep != 0)
        return damaged_journal(fmt::format("request {} has no table to change", step.request));
      tables_[step.group].emplace(step.request, tables.size());
      tables.push_back({step.request, std::move(step.blocks), step.num_cached_blocks});
      return ok();
    }
    KvTable& table = tables[found->second];
    if (step.removed) {
      table = {};
      tables_[step.group].erase(found);
      return ok();
    }
    if (step.keep > table.blocks.size())
      return damaged_journal(
          fmt::format("request {} keeps {} of {} blocks", step.request, step.keep, table.blocks.size()));
    table.blocks.resize(step.keep);
    table.blocks.insert(table.blocks.end(), step.blocks.begin(), step.blocks.end());
    table.num_cached_blocks = step.num_cached_blocks;
    return ok();
  }

  Status change_free_order(StateStep& step) {
    std::vector<int32_t>& order = state_.kv.free_order;
    if (step.free_order) order = std::move(*step.free_order);
    if (step.free_taken > order.size())
      return damaged_journal(fmt::format("{} of {} free blocks are taken", step.free_taken, order.size()));
    order.erase(order.begin(), order.begin() + step.free_taken);
    order.insert(order.end(), step.free_appended.begin(), step.free_appended.end());
    return ok();
  }

  void change_prefix_index(StateStep& step) {
    std::vector<PrefixEntry>& index = state_.kv.prefix_index;
    if (step.prefix_index) index = std::move(*step.prefix_index);
    if (!step.prefix_removed.empty()) {
      std::unordered_set<std::string_view> gone;
      for (const Bytes& hash : step.prefix_removed) gone.insert(text(hash));
      std::erase_if(index, [&](const PrefixEntry& entry) { return gone.contains(text(entry.hash)); });
    }
    std::move(step.prefix_added.begin(), step.prefix_added.end(), std::back_inserter(index));
  }

  SchedulerCheckpoint& state_;
  std::vector<std::optional<RequestState>> order_;
  std::unordered_map<std::string, size_t> requests_;  // in order_
  std::map<int32_t, KvBlock> blocks_;
  std::vector<std::unordered_map<std::string, size_t>> tables_;  // of each group, in its tables
};

// ---- the difference of two states

template <class T>
bool starts_with(const std::vector<T>& whole, const std::vector<T>& beginning) {
  return whole.size() >= beginning.size() && std::equal(beginning.begin(), beginning.end(), whole.begin());
}

template <class T>
std::vector<T> after(const std::vector<T>& whole, size_t count) {
  return {whole.begin() + static_cast<std::ptrdiff_t>(count), whole.end()};
}

// What a RequestStep can say of a request; no value where it must be replaced.
std::optional<RequestStep> advance_between(const RequestState& before, const RequestState& now) {
  if (!starts_with(now.output_token_ids, before.output_token_ids) ||
      !starts_with(now.block_hashes, before.block_hashes))
    return std::nullopt;
  RequestState same = before;
  same.status = now.status;
  same.output_token_ids = now.output_token_ids;
  same.block_hashes = now.block_hashes;
  same.num_computed_tokens = now.num_computed_tokens;
  same.num_preemptions = now.num_preemptions;
  if (!(same == now)) return std::nullopt;
  return RequestStep{now.id,
                     now.status,
                     after(now.output_token_ids, before.output_token_ids.size()),
                     after(now.block_hashes, before.block_hashes.size()),
                     now.num_computed_tokens,
                     now.num_preemptions};
}

void requests_between(const SchedulerSnapshot& before, const SchedulerSnapshot& now, StateStep& step) {
  std::unordered_map<std::string_view, const RequestState*> old;
  for (const RequestState& request : before.requests) old.emplace(request.id, &request);
  std::unordered_set<std::string_view> kept;
  bool appending = false;  // once one is new, all after it are: the order is the engine's own
  for (const RequestState& request : now.requests) {
    const auto found = old.find(request.id);
    const std::optional<RequestStep> advanced =
        found == old.end() || appending ? std::nullopt : advance_between(*found->second, request);
    if (!advanced) {
      appending = true;
      step.added.push_back(request);
      continue;
    }
    kept.insert(request.id);
    if (!(*found->second == request)) step.advanced.push_back(*advanced);
  }
  for (const RequestState& request : before.requests) {
    if (!kept.contains(request.id)) step.removed.push_back(request.id);
  }
  const Queues was{before.running, before.waiting, before.held, before.finished};
  const Queues is{now.running, now.waiting, now.held, now.finished};
  if (!(was == is)) step.queues = is;
}

void tables_between(uint32_t group, const KvGroup& before, const KvGroup& now, StateStep& step) {
  std::unordered_map<std::string_view, const KvTable*> old;
  for (const KvTable& table : before.tables) old.emplace(table.request, &table);
  std::unordered_set<std::string_view> kept;
  bool appending = false;
  std::vector<TableStep> changed;
  for (const KvTable& table : now.tables) {
    const auto found = old.find(table.request);
    if (found == old.end() || appending) {
      appending = true;
      changed.push_back({group, table.request, 0, table.blocks, table.num_cached_blocks, false});
      continue;
    }
    kept.insert(table.request);
    if (*found->second == table) continue;
    const std::vector<int32_t>& was = found->second->blocks;
    const auto keep = static_cast<size_t>(
        std::mismatch(was.begin(), was.end(), table.blocks.begin(), table.blocks.end()).first - was.begin());
    changed.push_back(
        {group, table.request, static_cast<uint32_t>(keep), after(table.blocks, keep), table.num_cached_blocks, false});
  }
  for (const KvTable& table : before.tables) {
    if (!kept.contains(table.request))
      step.tables.push_back({.group = group, .request = table.request, .removed = true});
  }
  std::move(changed.begin(), changed.end(), std::back_inserter(step.tables));
}

void blocks_between(const KvSnapshot& before, const KvSnapshot& now, StateStep& step) {
  std::unordered_map<int32_t, const KvBlock*> old;
  for (const KvBlock& block : before.blocks) old.emplace(block.id, &block);
  for (const KvBlock& block : now.blocks) {
    const auto found = old.find(block.id);
    if (found == old.end() || !(*found->second == block)) step.blocks.push_back(block);
    if (found != old.end()) old.erase(found);
  }
  std::vector<int32_t> gone;
  for (const auto& [id, block] : old) gone.push_back(id);
  std::sort(gone.begin(), gone.end());
  for (const int32_t id : gone) step.blocks.push_back({.id = id});
}

void free_order_between(const std::vector<int32_t>& before, const std::vector<int32_t>& now, StateStep& step) {
  // The front that was taken ends where the first block of the new order stood.
  const auto start = now.empty() ? before.end() : std::find(before.begin(), before.end(), now.front());
  const auto left = static_cast<size_t>(before.end() - start);
  if (left <= now.size() && std::equal(start, before.end(), now.begin())) {
    step.free_taken = static_cast<uint32_t>(start - before.begin());
    step.free_appended = after(now, left);
  } else {
    step.free_order = now;
  }
}

void prefix_index_between(const std::vector<PrefixEntry>& before, const std::vector<PrefixEntry>& now,
                          StateStep& step) {
  size_t next = 0;  // in `now`; entries that stay come first and in their old order
  for (const PrefixEntry& entry : before) {
    if (next < now.size() && now[next] == entry) {
      ++next;
    } else {
      step.prefix_removed.push_back(entry.hash);
    }
  }
  step.prefix_added = after(now, next);
}

}  // namespace

Journal::Journal() : bytes_(to_bytes(kJournalVersion)) {}

void Journal::append(const StateStep& step) {
  const size_t begin = bytes_.size();
  bytes_.resize(begin + sizeof(StepHead));
  BoundedOutput archive(bytes_);
  archive(step);
  const auto record = std::as_bytes(std::span(bytes_)).subspan(begin + sizeof(StepHead));
  last_ = chained(last_, record);
  const StepHead head{static_cast<uint32_t>(record.size()), last_};
  std::memcpy(bytes_.data() + begin, &head, sizeof head);
  ++steps_;
}

Result<StateStep> step_between(const SchedulerCheckpoint& before, const SchedulerCheckpoint& now) {
  const KvSnapshot& was = before.kv;
  const KvSnapshot& is = now.kv;
  const bool same_groups = std::equal(was.groups.begin(), was.groups.end(), is.groups.begin(), is.groups.end(),
                                      [](const KvGroup& a, const KvGroup& b) { return a.block_size == b.block_size; });
  if (before.scheduler.policy != now.scheduler.policy || was.num_blocks != is.num_blocks ||
      was.null_block != is.null_block || !same_groups) {
    return Error{.code = Code::kUnsupported,
                 .what = "the two states are not of one engine",
                 .next_step = "begin a new base state"};
  }
  StateStep step;
  requests_between(before.scheduler, now.scheduler, step);
  for (uint32_t group = 0; group < is.groups.size(); ++group)
    tables_between(group, was.groups[group], is.groups[group], step);
  blocks_between(was, is, step);
  free_order_between(was.free_order, is.free_order, step);
  prefix_index_between(was.prefix_index, is.prefix_index, step);
  if (!(was.extra_hashes == is.extra_hashes)) step.extra_hashes = is.extra_hashes;
  if (!(before.workers == now.workers)) step.workers = now.workers;
  if (!(before.scheduler.engine == now.scheduler.engine)) step.scheduler_engine = now.scheduler.engine;
  if (!(was.engine == is.engine)) step.kv_engine = is.engine;
  return step;
}

Status replay_journal(std::span<const std::byte> section, SchedulerCheckpoint& state) {
  uint32_t version = 0;
  if (section.size() < sizeof version) return damaged_journal("it is too short");
  std::memcpy(&version, section.data(), sizeof version);
  if (version != kJournalVersion) {
    return Error{
        .code = Code::kIncompatible,
        .what = fmt::format("section journal: its version is {}, this torpor reads {}", version, kJournalVersion),
        .next_step = "use the version of torpor that wrote it, or a newer one"};
  }
  section = section.subspan(sizeof version);
  Replay replay(state);
  Digest last;
  for (uint64_t number = 0; !section.empty(); ++number) {
    StepHead head;
    if (section.size() < sizeof head) return damaged_journal(fmt::format("record {} is cut off", number));
    std::memcpy(&head, section.data(), sizeof head);
    if (section.size() - sizeof head < head.bytes) return damaged_journal(fmt::format("record {} is cut off", number));
    const std::span<const std::byte> record = section.subspan(sizeof head, head.bytes);
    last = chained(last, record);
    if (last != head.digest) return damaged_journal(fmt::format("record {} does not match its digest", number));
    TORPOR_ASSIGN(StateStep step, from_bytes<StateStep>(record, fmt::format("section journal: record {}", number)));
    TORPOR_TRY(replay.apply(step));
    section = section.subspan(sizeof head + head.bytes);
  }
  replay.finish();
  return ok();
}

}  // namespace torpor
