// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/verify.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <thread>
#include <unordered_map>

#include <fmt/core.h>

#include "base/mutex.h"
#include "base/page_buffer.h"
#include "base/units.h"
#include "checkpoint/checkpoint_set.h"
#include "checkpoint/prefix_hash.h"
#include "checkpoint/state_sections.h"

namespace torpor {
namespace {

constexpr uint64_t kBatchBytes = 8 * kMiB;  // of one thread at a time; a disk needs many operations at once
constexpr size_t kBatchChunks = 256;
constexpr uint64_t kLargestChunk = kGiB;  // writers make chunks of a few MiB at most; a whole chunk is read into memory

Error damage(std::string what) {
  return Error{
      .code = Code::kCorruption, .what = std::move(what), .next_step = "use another checkpoint, or torpor repair"};
}

// Reads all chunks of one rank with several threads and checks their digests.
class ChunkCheck {
 public:
  ChunkCheck(DiskTier& tier, const RankRefs& rank, Verification& found) : tier_(tier), rank_(rank), found_(found) {
    for (const SavedChunk& chunk : rank.records) order_.push_back(&chunk);
    // In the order on disk.
    std::sort(order_.begin(), order_.end(), [](const SavedChunk* a, const SavedChunk* b) {
      return std::pair(a->file, a->offset) < std::pair(b->file, b->offset);
    });
  }

  Status run(int threads) {
    std::vector<std::thread> helpers;
    const auto work = [this] {
      Status done = try_catch([this] { return this->work(); });
      const MutexLock lock(mutex_);
      if (!done && result_) result_ = std::move(done);  // a copy could throw
    };
    helpers.reserve(static_cast<size_t>(threads));
    for (int i = 1; i < threads; ++i) {
      try {
        helpers.emplace_back(work);
      } catch (const std::exception&) {
        break;  // fewer threads suffice
      }
    }
    work();
    for (std::thread& helper : helpers) helper.join();
    const MutexLock lock(mutex_);
    return std::move(result_);
  }

 private:
  std::vector<const SavedChunk*> next() {
    const MutexLock lock(mutex_);
    std::vector<const SavedChunk*> batch;
    uint64_t bytes = 0;
    while (result_ && at_ < order_.size() && batch.size() < kBatchChunks &&
           (batch.empty() || bytes + order_[at_]->bytes <= kBatchBytes)) {
      bytes += order_[at_]->bytes;
      batch.push_back(order_[at_++]);
    }
    return batch;
  }

  Status work() {
    PageBuffer memory;
    for (std::vector<const SavedChunk*> batch = next(); !batch.empty(); batch = next()) {
      std::vector<SavedChunk> chunks;
      uint64_t bytes = 0;
      for (const SavedChunk* chunk : batch) {
        if (chunk->bytes > kLargestChunk) {
          report(*chunk, damage(fmt::format("{} says that it has {} bytes", chunk->key.to_string(), chunk->bytes)));
          continue;
        }
        chunks.push_back(*chunk);
        bytes += align_up(chunk->bytes, kPage);
      }
      const std::span<std::byte> room = memory.room(bytes);
      if (room.size() < bytes)
        return Error{.code = Code::kResourceExhausted, .what = "no memory", .next_step = "free some"};
      TORPOR_RETURN_IF_ERROR(check(chunks, room));
    }
    return ok();
  }

  Status check(std::vector<SavedChunk>& chunks, std::span<std::byte> memory) {
    std::vector<RecordPart> parts;
    for (SavedChunk& chunk : chunks) {
      parts.push_back({&chunk, memory.first(chunk.bytes), ok()});
      memory = memory.subspan(align_up(chunk.bytes, kPage));
    }
    tier_.get(parts);
    for (const RecordPart& part : parts) {
      if (!part.status && part.status.error().code == Code::kAborted) return part.status.error();
      if (!part.status) {
        report(*part.chunk, part.status.error());
      } else if (digest_of(part.bytes) != part.chunk->digest) {
        report(*part.chunk,
               damage(fmt::format("rank {}: {} does not match its digest", rank_.rank, part.chunk->key.to_string())));
      }
      const MutexLock lock(mutex_);
      found_.chunks += 1;
      found_.bytes += part.chunk->stored_bytes;
    }
    return ok();
  }

  void report(const SavedChunk& chunk, Error problem) {
    const MutexLock lock(mutex_);
    found_.problems.push_back(std::move(problem));
    if (chunk.key.kind == ChunkKind::kKvBlock) {
      found_.bad_blocks.push_back(static_cast<int32_t>(chunk.key.index));
    } else {
      found_.bad_chunks.push_back(chunk.key.to_string());
    }
  }

  DiskTier& tier_;
  const RankRefs& rank_;
  std::vector<const SavedChunk*> order_;
  Mutex mutex_;
  Verification& found_ TORPOR_GUARDED_BY(mutex_);
  Status result_ TORPOR_GUARDED_BY(mutex_);
  size_t at_ TORPOR_GUARDED_BY(mutex_) = 0;
};

// Check that every rank has saved every block of the state.
void check_blocks(const std::vector<RankRefs>& ranks, const KvSnapshot& kv, Verification& found) {
  for (const RankRefs& rank : ranks) {
    std::set<uint64_t> saved;
    for (const SavedChunk& chunk : rank.records) {
      if (chunk.key.kind == ChunkKind::kKvBlock) saved.insert(chunk.key.index);
    }
    for (const KvBlock& block : kv.blocks) {
      if (saved.contains(static_cast<uint64_t>(block.id))) continue;
      found.problems.push_back(
          damage(fmt::format("rank {}: block {} is in use but was not saved", rank.rank, block.id)));
      found.bad_blocks.push_back(block.id);
    }
  }
}

// Checks the hashes of a request against its tokens, and the hashes of its blocks against the request's: a block's hash
// is the request's followed by the group's number.
class HashCheck {
 public:
  // `tokens`: number of further tokens that each hash covers; it divides the block size of every group.
  HashCheck(const PrefixHasher& hasher, size_t tokens, const KvSnapshot& kv, Verification& found)
      : hasher_(hasher), tokens_(tokens), kv_(kv), found_(found) {
    for (const KvBlock& block : kv.blocks) blocks_.emplace(block.id, &block);
  }

  Status check(const RequestState& request) {
    const Value* const others = request.engine.find("other_hash_keys");
    if (others != nullptr && *others == Value{.data = true}) {
      found_.hashes_not_checked = "those of requests with adapters, images or embeddings depend on more than tokens";
      return ok();
    }
    const auto size = static_cast<size_t>(request.block_hash_bytes);
    std::vector<int32_t> tokens = request.prompt_token_ids;
    tokens.insert(tokens.end(), request.output_token_ids.begin(), request.output_token_ids.end());
    const size_t count = size == 0 ? 0 : request.block_hashes.size() / size;
    if (count > tokens.size() / tokens_)
      return wrong(request, fmt::format("{} block hashes for {} tokens", count, tokens.size()));
    Bytes before = hasher_.first();
    for (size_t i = 0; i < count; ++i) {
      const std::optional<Bytes> hash = hasher_.next(before, std::span(tokens).subspan(i * tokens_, tokens_),
                                                     i == 0 ? request.cache_salt : std::nullopt);
      if (!hash) {
        found_.hashes_not_checked = "blocks of so many tokens are not recomputed here";
        return ok();
      }
      const auto stored = std::span(request.block_hashes).subspan(i * size, size);
      if (!std::equal(stored.begin(), stored.end(), hash->begin(), hash->end()))
        return wrong(request, fmt::format("the hash of block {} does not follow from its tokens", i));
      before = *hash;
      ++found_.hashes;
    }
    return check_tables(request, count, size);
  }

 private:
  Status check_tables(const RequestState& request, size_t count, size_t size) {
    for (uint32_t group = 0; group < kv_.groups.size(); ++group) {
      const size_t block_hashes = static_cast<size_t>(kv_.groups[group].block_size) / tokens_;
      for (const KvTable& table : kv_.groups[group].tables) {
        if (table.request != request.id) continue;
        for (size_t i = 0; i < table.blocks.size(); ++i) {
          const auto block = blocks_.find(table.blocks[i]);
          if (block == blocks_.end() || block->second->hash.empty()) continue;
          // Index of the block's last hash in the chain. If blocks are larger than the tokens of a hash, they may be
          // cached in part.
          const size_t last = (block_hashes == 1 ? i + 1 : covered(*block->second)) - 1;
          if (last >= count)
            return wrong(request, fmt::format("block {} carries a hash beyond its full blocks", table.blocks[i]));
          Bytes key(request.block_hashes.begin() + static_cast<std::ptrdiff_t>(last * size),
                    request.block_hashes.begin() + static_cast<std::ptrdiff_t>((last + 1) * size));
          for (int shift = 24; shift >= 0; shift -= 8) key.push_back(static_cast<uint8_t>(group >> shift));
          if (key != block->second->hash)
            return wrong(request, fmt::format("block {} carries another hash than its tokens have", table.blocks[i]));
        }
      }
    }
    return ok();
  }
  // Return how many hashes of the chain the block covers. The caller subtracts 1, so 0 becomes an index that is too
  // large.
  size_t covered(const KvBlock& block) const { return static_cast<size_t>(std::max(block.hash_tokens, 0)) / tokens_; }
  static Error wrong(const RequestState& request, std::string what) {
    return damage(fmt::format("request {}: {}", request.id, what));
  }

  const PrefixHasher& hasher_;
  const size_t tokens_;
  const KvSnapshot& kv_;
  Verification& found_;
  std::unordered_map<int32_t, const KvBlock*> blocks_;
};

// Return the number of tokens that each hash of a chain covers: the engine's own value, or the block size if there is
// only one. 0: unknown.
size_t tokens_of_a_hash(const EngineCheckpoint& engine) {
  const std::vector<KvGroup>& groups = engine.state.kv.groups;
  if (groups.empty()) return 0;
  int32_t tokens = groups.front().block_size;
  const auto stated = engine.fingerprint.find("prefix_hash_tokens");
  if (stated != engine.fingerprint.end()) {
    const char* end = stated->second.data() + stated->second.size();
    const auto parsed = std::from_chars(stated->second.data(), end, tokens);
    if (parsed.ec != std::errc() || parsed.ptr != end || tokens <= 0) return 0;
  }
  const bool fits = std::all_of(groups.begin(), groups.end(), [&](const KvGroup& group) {
    return stated == engine.fingerprint.end() ? group.block_size == tokens : group.block_size % tokens == 0;
  });
  return fits ? static_cast<size_t>(tokens) : 0;
}

void check_hashes(const EngineCheckpoint& engine, Verification& found) {
  const KvSnapshot& kv = engine.state.kv;
  const std::vector<RequestState>& requests = engine.state.scheduler.requests;
  if (std::all_of(kv.blocks.begin(), kv.blocks.end(), [](const KvBlock& block) { return block.hash.empty(); }) &&
      std::all_of(requests.begin(), requests.end(), [](const RequestState& r) { return r.block_hashes.empty(); }))
    return;
  const auto described = engine.fingerprint.find("prefix_hash");
  const std::unique_ptr<PrefixHasher> hasher =
      described == engine.fingerprint.end() ? nullptr : PrefixHasher::of(described->second);
  const size_t tokens = tokens_of_a_hash(engine);
  if (hasher == nullptr) {
    found.hashes_not_checked = "this tool does not know how the engine hashes prefixes";
  } else if (tokens == 0) {
    found.hashes_not_checked = "the groups have blocks of different sizes";
  } else {
    HashCheck check(*hasher, tokens, kv, found);
    for (const RequestState& request : requests) {
      if (const Status right = check.check(request); !right) found.problems.push_back(right.error());
    }
  }
}

Status check_state(const Checkpoint& checkpoint, const std::vector<RankRefs>& ranks, Verification& found) {
  found.sections = checkpoint.manifest().sections.size();
  for (const SectionInfo& info : checkpoint.manifest().sections) found.bytes += info.stored_bytes;
  if (is_set(checkpoint.manifest())) {
    if (const auto sections = checkpoint.read_sections(); !sections) found.problems.push_back(sections.error());
    found.hashes_not_checked = "it is a set: verify the checkpoint of each rank";
    return ok();
  }
  const Result<EngineCheckpoint> state = checkpoint.read_state();
  if (!state) {
    if (state.error().code == Code::kResourceExhausted) return state.error();
    found.problems.push_back(state.error());
    return ok();
  }
  const KvSnapshot& kv = state->state.kv;
  for (const KvGroup& group : kv.groups) {
    for (const KvTable& table : group.tables) found.table_entries += table.blocks.size();
  }
  for (const KvBlock& block : kv.blocks) found.references += static_cast<uint64_t>(std::max(block.ref_count, 0));
  if (Status valid = state->state.validate(); !valid) {
    found.problems.push_back(valid.error());
    return ok();
  }
  check_blocks(ranks, kv, found);
  check_hashes(*state, found);
  return ok();
}

// Return the refs of the ranks whose refs are intact; without refs nothing says what a rank saved.
Result<std::vector<RankRefs>> read_refs(const Checkpoint& checkpoint, Verification& found) {
  std::vector<RankRefs> ranks;
  for (const RankSummary& rank : checkpoint.manifest().ranks) {
    Result<RankRefs> refs = checkpoint.refs(rank);
    if (refs) {
      found.bytes += rank.refs_bytes;
      ranks.push_back(std::move(*refs));
    } else if (refs.error().code == Code::kResourceExhausted) {
      return refs.error();
    } else {
      found.problems.push_back(refs.error());
      found.bad_ranks.push_back(rank.rank);
    }
  }
  return ranks;
}

Status check_contents(const Checkpoint& checkpoint, const RankRefs& rank,
                      const std::shared_ptr<ProgressMeter>& progress, int threads, Verification& found) {
  const Result<std::unique_ptr<DiskTier>> tier =
      checkpoint.open_rank(*checkpoint.manifest().find_rank(rank.rank), progress);
  if (tier) return ChunkCheck(**tier, rank, found).run(threads);
  found.problems.push_back(tier.error());
  for (const SavedChunk& chunk : rank.records) {
    if (chunk.key.kind == ChunkKind::kKvBlock) {
      found.bad_blocks.push_back(static_cast<int32_t>(chunk.key.index));
    } else {
      found.bad_chunks.push_back(chunk.key.to_string());
    }
  }
  return ok();
}

}  // namespace

Result<Verification> verify(const Checkpoint& checkpoint, const VerifyOptions& options) {
  return try_catch([&]() -> Result<Verification> {
    Verification found;
    // Twice as many as cores: some read while others compute digests.
    const int threads = options.threads > 0
                            ? options.threads
                            : static_cast<int>(std::clamp(2 * std::thread::hardware_concurrency(), 2u, 16u));
    TORPOR_ASSIGN_OR_RETURN(const std::vector<RankRefs> ranks, read_refs(checkpoint, found));
    uint64_t total = 0;
    for (const RankRefs& rank : ranks) {
      for (const SavedChunk& chunk : rank.records) total += chunk.bytes;
    }
    const auto progress = std::make_shared<ProgressMeter>(options.progress, "verifying", total);
    for (const RankRefs& rank : ranks) {
      if (options.contents) TORPOR_RETURN_IF_ERROR(check_contents(checkpoint, rank, progress, threads, found));
    }
    TORPOR_RETURN_IF_ERROR(check_state(checkpoint, ranks, found));
    std::sort(found.bad_blocks.begin(), found.bad_blocks.end());
    found.bad_blocks.erase(std::unique(found.bad_blocks.begin(), found.bad_blocks.end()), found.bad_blocks.end());
    return found;
  });
}

}  // namespace torpor
