// SPDX-License-Identifier: Apache-2.0
#include "kvcache/block_tier.h"

#include <algorithm>
#include <cstring>
#include <map>

#include <fmt/core.h>

#include "base/log.h"
#include "base/units.h"
#include "offload/batch_copier.h"

namespace torpor {
namespace {

constexpr uint64_t kBatchBytes = 16 * kMiB;
constexpr size_t kBatchBlocks = 40;  // most that one page of a segment describes

Error wrong(std::string what, std::string next_step) {
  return {.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next_step)};
}

}  // namespace

size_t BlockTier::KeyHash::operator()(const BlockKey& key) const {
  uint64_t word = 0;  // of a hash
  std::memcpy(&word, key.hash.data(), sizeof word);
  return static_cast<size_t>(word ^ (uint64_t{key.group} << 32));
}

BlockTier::BlockTier(const BlockTierOptions& options, std::unique_ptr<SlotStore> store, const Clock& clock)
    : options_(options),
      store_(std::move(store)),
      store_id_(store_->traits().shared ? StoreId::kRemote : StoreId::kDisk),
      clock_(clock),
      disk_slots_(options.disk_segments, options.segment_slots, store_->first_slot()) {}

Result<std::unique_ptr<BlockTier>> BlockTier::create(const BlockTierOptions& options, std::unique_ptr<SlotStore> store,
                                                     const Digest& space, const Clock& clock) {
  return try_catch([&]() -> Result<std::unique_ptr<BlockTier>> {
    const StoreTraits& traits = store->traits();
    const bool fits = traits.shared ? options.remote_slots > 0 && options.disk_segments == 0
                                    : options.remote_slots == 0 && options.disk_segments > 0 &&
                                          traits.slots_per_segment == options.segment_slots;
    if (!fits || traits.record_bytes < options.block_bytes || options.block_bytes == 0) {
      return wrong(fmt::format("a tier of {} segments of {} slots, or of {} shared slots, for blocks of {} bytes over "
                               "a store \"{}\"",
                               options.disk_segments, options.segment_slots, options.remote_slots, options.block_bytes,
                               traits.kind),
                   "open the store with the same options");
    }
    if (options.threads < 2) return wrong(fmt::format("a tier with {} threads", options.threads), "use 2 or more");
    std::unique_ptr<BlockTier> made(new BlockTier(options, std::move(store), clock));
    TORPOR_RETURN_IF_ERROR(made->start(space));
    return made;
  });
}

Status BlockTier::start(const Digest& space) {
  TORPOR_ASSIGN_OR_RETURN(index_, BlockIndex::create({.disk_segments = options_.disk_segments,
                                                      .segment_slots = options_.segment_slots,
                                                      .remote_slots = options_.remote_slots,
                                                      .remembered_removals = options_.remembered_removals}));
  store_->open_space(space_, space);
  if (store_->traits().durable) TORPOR_RETURN_IF_ERROR(recover());
  for (int i = 0; i < options_.threads; ++i) threads_.emplace_back([this] { run(); });
  return ok();
}

BlockTier::~BlockTier() {
  {
    const MutexLock lock(mutex_);
    ending_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

// Adopt the newest segments that the index can hold; of a key that was put twice, adopt the newest record.
Status BlockTier::recover() {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<RecoveredSlot> found, store_->recover(space_));
  disk_slots_.note_recovered(found);
  std::map<BlockKey, StoreSlot, BlockKeyLess> newest;
  std::vector<int64_t> segments;  // the oldest first
  for (const RecoveredSlot& each : found) {
    if (each.record.bytes != options_.block_bytes) continue;
    StoreSlot& slot = newest.try_emplace(each.key, each.slot).first->second;
    slot = std::max(slot, each.slot);
    const int64_t segment = each.slot / options_.segment_slots;
    if (segments.empty() || segments.back() != segment) segments.push_back(segment);
  }
  const size_t kept = std::min(segments.size(), static_cast<size_t>(options_.disk_segments) - 1);
  const int64_t first = kept == 0 ? 0 : *(segments.end() - static_cast<std::ptrdiff_t>(kept));
  int64_t open = -1;
  for (const RecoveredSlot& each : found) {
    const int64_t segment = each.slot / options_.segment_slots;
    if (kept == 0 || segment < first || each.record.bytes != options_.block_bytes || newest[each.key] != each.slot)
      continue;
    if (open >= 0 && open != segment) index_->close_segment();
    open = segment;
    const BlockKey key = in_space(each.key);
    const Result<Slot> slot = index_->reserve(StoreId::kDisk, &key);
    if (!slot) continue;
    index_->commit(StoreId::kDisk, *slot);
    index_->unpin(StoreId::kDisk, *slot);
    disk_slots_.adopt(*slot, each.slot);
    ++recovered_;
  }
  index_->close_segment();
  if (const std::vector<SlotRange> ranges = disk_slots_.take_unadopted(); !ranges.empty()) store_->drop(ranges);
  return ok();
}

BlockKey BlockTier::in_space(const BlockKey& key) const {
  BlockKey made = key;
  made.space = space_;
  return made;
}

Slot BlockTier::slot_of_key(const BlockKey& key) const {
  BlockLocations locations;
  index_->find_each({&key, 1}, {&locations, 1});
  return store_id_ == StoreId::kDisk ? locations.disk : locations.remote;
}

// ---- lookups

TierLookup BlockTier::lookup(const BlockKey& named, const std::string& request) {
  const BlockKey key = in_space(named);
  auto known = asked_.find(key);
  if (known == asked_.end()) {
    if (slot_of_key(key) >= 0) return TierLookup::kHit;
    if (store_id_ == StoreId::kDisk) return TierLookup::kMiss;
    known = asked_.try_emplace(key).first;
  }
  Asked& asked = known->second;
  asked_by_[request].insert(key);
  bool& missed = asked.requests[request];
  if (missed) return TierLookup::kMiss;
  if (asked.answer == Answer::kThere) {
    if (slot_of_key(key) >= 0) return TierLookup::kHit;
    asked.answer = Answer::kNotAsked;  // the index has evicted it
  }
  if (asked.answer == Answer::kNotAsked && store_->accepting()) {
    to_ask_.push_back(key);
    asked.answer = Answer::kOpen;
    asked.since = clock_.now();
  }
  if (asked.answer == Answer::kOpen && clock_.now() - asked.since <= options_.most_wait) return TierLookup::kAsking;
  missed = true;
  return TierLookup::kMiss;
}

void BlockTier::ask() {
  if (to_ask_.empty()) return;
  Questions question(1);
  question.front().there.resize(to_ask_.size());
  question.front().keys = std::exchange(to_ask_, {});
  {
    const MutexLock lock(mutex_);
    questions_.splice(questions_.end(), question);
  }
  work_.notify_one();
}

void BlockTier::request_finished(const std::string& request) {
  {
    const MutexLock lock(mutex_);  // its loads mark no block absent from now on
    for (const auto& job : jobs_) job->request_ended = job->request_ended || job->request == request;
    for (const auto& job : over_) job->request_ended = job->request_ended || job->request == request;
  }
  const auto known = asked_by_.find(request);
  if (known == asked_by_.end()) return;
  for (const BlockKey& key : known->second) {
    const auto asked = asked_.find(key);
    if (asked == asked_.end()) continue;
    asked->second.requests.erase(request);
    if (!is_needed(asked->second)) asked_.erase(asked);
  }
  asked_by_.erase(known);
}

void BlockTier::answered(const Question& question) {
  for (size_t i = 0; i < question.keys.size(); ++i) {
    const BlockKey& key = question.keys[i];
    const auto asked = asked_.find(key);
    if (asked == asked_.end()) continue;
    asked->second.answer = Answer::kAbsent;
    if (question.there[i] && key.space == space_) {
      const Result<Slot> slot = index_->reserve(StoreId::kRemote, &key);
      if (slot) index_->commit(StoreId::kRemote, *slot);
      if (slot) index_->unpin(StoreId::kRemote, *slot);
      if (slot || slot_of_key(key) >= 0) asked->second.answer = Answer::kThere;
    }
    if (!is_needed(asked->second)) asked_.erase(asked);
  }
}

// Return whether lookup() needs more than the index: a question is open, the store lacks the block for a request that
// goes on, or the block came after it was a miss for such a request.
bool BlockTier::is_needed(const Asked& asked) const {
  if (asked.answer == Answer::kOpen) return true;
  if (asked.answer == Answer::kAbsent) return !asked.requests.empty();
  return std::any_of(asked.requests.begin(), asked.requests.end(), [](const auto& each) { return each.second; });
}

// Forget that the block was a miss: this tier has put it, and the index knows it now.
void BlockTier::drop_question(const BlockKey& key) {
  const auto asked = asked_.find(key);
  if (asked == asked_.end() || asked->second.answer == Answer::kOpen) return;
  asked_.erase(asked);
}

// ---- jobs

Status BlockTier::store(uint64_t id, std::span<const BlockKey> keys, std::span<const std::span<std::byte>> blocks) {
  return try_catch([&]() -> Status {
    auto job = std::make_unique<TierJob>(TierJob{.id = id, .begun = clock_.now()});
    job->blocks.reserve(keys.size());
    const bool accepting = store_->accepting();
    const Status reserved = try_catch([&]() -> Status {
      for (size_t i = 0; i < keys.size(); ++i) {
        Block& block = job->blocks.emplace_back(Block{.key = in_space(keys[i]), .bytes = blocks[i]});
        if (slot_of_key(block.key) >= 0) {
          block.good = true;
          continue;
        }
        if (!accepting) continue;
        const Result<Slot> slot = index_->reserve(store_id_, &block.key);
        if (slot) block.slot = *slot;
        drop_segments();
        if (slot) {
          block.store_slot = store_id_ == StoreId::kDisk ? disk_slots_.slot_to_write(*slot) : *slot;
        } else {
          block.good = slot.error().code == Code::kFailedPrecondition;  // another job stores it
        }
      }
      return ok();
    });
    if (!reserved) {
      give_back(*job);
      return reserved;
    }
    return submit(std::move(job));
  });
}

Status BlockTier::load(uint64_t id, const std::string& request, std::span<const BlockKey> keys,
                       std::span<const std::span<std::byte>> blocks) {
  return try_catch([&]() -> Status {
    auto job = std::make_unique<TierJob>(TierJob{.id = id, .load = true, .request = request, .begun = clock_.now()});
    job->blocks.reserve(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
      Block& block = job->blocks.emplace_back(Block{.key = in_space(keys[i]), .bytes = blocks[i]});
      block.slot = slot_of_key(block.key);
      if (block.slot < 0) continue;  // evicted meanwhile
      index_->pin(store_id_, block.slot);
      block.store_slot = store_id_ == StoreId::kDisk ? disk_slots_.slot_to_read(block.slot) : block.slot;
    }
    return submit(std::move(job));
  });
}

// Queue the job. On an error, release what the index has reserved or pinned for it.
Status BlockTier::submit(std::unique_ptr<TierJob> job) {
  TierJob& begun = *job;
  std::vector<Piece> pieces;
  const Status made = try_catch([&]() -> Status {
    size_t first = 0;
    uint64_t bytes = 0;
    size_t moved = 0;
    const auto cut = [&](size_t end) {
      if (moved > 0) pieces.push_back({.job = &begun, .first = first, .count = end - first});
      first = end;
      bytes = moved = 0;
    };
    for (size_t i = 0; i < begun.blocks.size(); ++i) {
      if (begun.blocks[i].slot < 0) continue;
      bytes += begun.blocks[i].bytes.size();
      if (++moved == kBatchBlocks || bytes >= kBatchBytes) cut(i + 1);
    }
    cut(begun.blocks.size());
    begun.open = pieces.size();
    const MutexLock lock(mutex_);
    std::list<std::unique_ptr<TierJob>> node;
    node.push_back(std::move(job));
    std::deque<Piece>& queue = begun.load ? loads_ : stores_;
    const size_t before = queue.size();
    try {
      queue.insert(queue.end(), pieces.begin(), pieces.end());
    } catch (...) {
      queue.resize(before);
      job = std::move(node.front());
      throw;
    }
    (pieces.empty() ? over_ : jobs_).splice((pieces.empty() ? over_ : jobs_).end(), node);
    return ok();
  });
  if (made) {
    work_.notify_all();
    return ok();
  }
  give_back(*job);
  return made;
}

// Release what the index has reserved or pinned for a job that does not begin.
void BlockTier::give_back(const TierJob& job) {
  for (const Block& block : job.blocks) {
    if (block.slot < 0) continue;
    job.load ? index_->unpin(store_id_, block.slot) : index_->abandon(store_id_, block.slot, false);
  }
}

// Drop from the store the segments that the index has evicted.
void BlockTier::drop_segments() {
  const std::vector<Dropped> dropped = index_->reports().take_dropped();
  if (dropped.empty()) return;
  std::vector<int64_t> gone;
  for (const Dropped& each : dropped) disk_slots_.release_segment(each.number, gone);
  std::vector<SlotRange> ranges;
  disk_slots_.add_ranges(gone, ranges);
  if (!ranges.empty()) store_->drop(ranges);
}

std::vector<TierJobResult> BlockTier::finished() {
  Questions answers;
  {
    const MutexLock lock(mutex_);
    answers.swap(answers_);
  }
  index_->hide_remote(store_id_ == StoreId::kRemote && !store_->accepting());
  for (const Question& answer : answers) answered(answer);
  // Allocate before jobs are taken: a job that is taken is reported.
  std::list<std::unique_ptr<TierJob>> over;
  std::vector<TierJobResult> results;
  {
    const MutexLock lock(mutex_);
    ended_.reserve(ended_.size() + over_.size());
    results.resize(over_.size());
    auto result = results.begin();
    for (const auto& job : over_) (result++)->good.reserve(job->blocks.size());
    over.swap(over_);
  }
  auto result = results.begin();
  for (const auto& job : over) {
    finish_job(*job, *result);
    ended_.push_back(std::move(*result++));
  }
  return std::exchange(ended_, {});
}

// Precondition: `result` has room for all blocks.
void BlockTier::finish_job(TierJob& job, TierJobResult& result) {
  result.job = job.id;
  result.seconds = seconds_between(job.begun, clock_.now());
  bool disk_failed = false;
  for (Block& block : job.blocks) {
    if (block.slot >= 0) {
      block.good = block.status.has_value();
      if (block.good) result.bytes += block.bytes.size();
      if (job.load) {
        if (!block.good) index_->damaged(store_id_, block.slot);
        index_->unpin(store_id_, block.slot);
      } else if (block.good) {
        index_->commit(store_id_, block.slot);
        index_->unpin(store_id_, block.slot);
        drop_question(block.key);
      } else {
        index_->abandon(store_id_, block.slot, false);
        disk_failed = store_id_ == StoreId::kDisk;
      }
    }
    const bool missed = job.load && !block.good && store_id_ == StoreId::kRemote;
    if (missed && !job.request_ended) remember_absent(block.key, job.request);
    result.good.push_back(block.good);
  }
  if (disk_failed) index_->close_segment();  // its file may take no more
}

// Remember that the store lacks the block: otherwise the request would ask for it and load it again, as it does if
// there is no memory.
void BlockTier::remember_absent(const BlockKey& key, const std::string& request) noexcept {
  (void)try_catch([&]() -> Status {
    asked_by_[request].insert(key);  // first: request_finished() forgets by it
    Asked& asked = asked_.try_emplace(key).first->second;
    asked.requests[request] = true;
    if (asked.answer != Answer::kOpen) asked.answer = Answer::kAbsent;
    return ok();
  });
}

void BlockTier::wait() {
  const MutexLock lock(mutex_);
  while (running_ > 0 || !questions_.empty() || !loads_.empty() || !stores_.empty()) idle_.wait(mutex_);
}

Status BlockTier::forget(const Digest& space) {
  wait();
  ended_ = finished();
  TORPOR_RETURN_IF_ERROR(index_->retire(space_));
  index_->close_segment();  // segments have keys of one space
  asked_.clear();
  asked_by_.clear();
  to_ask_.clear();
  store_->open_space(++space_, space);
  return ok();
}

// ---- threads

void BlockTier::run() {
  MutexLock lock(mutex_);
  while (true) {
    Questions question;  // or else a piece of a job
    Piece piece;
    while (!ending_ && !take(question, piece)) work_.wait(mutex_);
    if (ending_) return;
    ++running_;
    const bool stores = question.empty() && !piece.job->load;
    if (stores) ++storing_;
    lock.unlock();
    if (question.empty()) {
      move(*piece.job, std::span(piece.job->blocks).subspan(piece.first, piece.count));
    } else {
      find(question.front());
    }
    lock.lock();
    --running_;
    if (stores) --storing_;
    if (!question.empty()) {
      answers_.splice(answers_.end(), question);
    } else if (--piece.job->open == 0) {
      const auto at = std::find_if(jobs_.begin(), jobs_.end(), [&](const auto& job) { return job.get() == piece.job; });
      over_.splice(over_.end(), jobs_, at);
    }
    if (stores) work_.notify_one();  // another one may store now
    idle_.notify_all();
  }
}

bool BlockTier::take(Questions& question, Piece& piece) {
  if (!questions_.empty()) {
    question.splice(question.end(), questions_, questions_.begin());
    return true;
  }
  std::deque<Piece>& queue = !loads_.empty() ? loads_ : stores_;
  if (queue.empty() || (loads_.empty() && storing_ + 1 >= options_.threads)) return false;
  piece = queue.front();
  queue.pop_front();
  return true;
}

void BlockTier::move(TierJob& job, std::span<Block> blocks) {
  const Status done = try_catch([&]() -> Status {
    std::vector<SavedChunk> chunks(blocks.size());
    std::vector<RecordPart> parts;
    std::vector<Block*> moved;
    for (size_t i = 0; i < blocks.size(); ++i) {
      Block& block = blocks[i];
      if (block.slot < 0) continue;
      SavedChunk& chunk = chunks[i];
      chunk.bytes = block.bytes.size();
      chunk.offset = static_cast<uint64_t>(block.store_slot);
      if (!job.load) chunk.digest = digest_of(block.bytes);
      parts.push_back({.chunk = &chunk, .bytes = block.bytes, .key = &block.key});
      moved.push_back(&block);
    }
    job.load ? store_->get(parts) : store_->put(parts);
    for (size_t i = 0; i < parts.size(); ++i) {
      moved[i]->status = std::move(parts[i].status);
      if (!job.load || !moved[i]->status) continue;
      if (digest_of(moved[i]->bytes) != parts[i].chunk->digest) {
        moved[i]->status = Error{.code = Code::kCorruption,
                                 .what = fmt::format("a KV block in slot {} is damaged", moved[i]->store_slot),
                                 .next_step = "nothing: it is computed again"};
      }
    }
    return ok();
  });
  bool damaged = false;
  for (Block& block : blocks) {
    if (!done && block.slot >= 0) block.status = copied(done.error());
    if (block.status || block.status.error().code != Code::kCorruption) continue;  // the store logs other errors
    if (!std::exchange(damaged, true)) log().warn("a tier of KV blocks: {}", block.status.error());
  }
}

void BlockTier::find(Question& question) {
  (void)try_catch([&]() -> Status {
    std::vector<SavedChunk> chunks(question.keys.size());
    std::vector<RecordPart> parts;
    for (size_t i = 0; i < chunks.size(); ++i) parts.push_back({.chunk = &chunks[i], .key = &question.keys[i]});
    store_->find(parts);
    for (size_t i = 0; i < parts.size(); ++i) question.there[i] = parts[i].status.has_value();
    return ok();
  });
}

}  // namespace torpor
