#include "engine/rank_memory.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include <malloc.h>
#include <unistd.h>

#include <fmt/format.h>

#include "base/units.h"
#include "checkpoint/checkpoint.h"
#include "engine/region_mapper.h"
#include "engine/tags.h"

namespace torpor {
namespace {

constexpr uint64_t kRegionChunk = 4 * kMiB;
// To notice that a tag was written: so many bytes at so many places, a few milliseconds for any size.
constexpr uint64_t kSampleBytes = 64;
constexpr uint64_t kSamplePlaces = 16'384;
constexpr uint64_t kBytesBehindMapping =
    kGiB;  // copied at a time while mapping goes on: enough that filling the pipeline anew does not count

// A line "Name:   1234 kB" of /proc/self/status, in bytes; 0 if it is not there.
uint64_t process_bytes(std::string_view name) {
  std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen("/proc/self/status", "re"), std::fclose);
  if (file == nullptr) return 0;
  char line[256];
  while (std::fgets(line, sizeof line, file.get()) != nullptr) {
    const std::string_view text = line;
    if (text.starts_with(name) && text.substr(name.size()).starts_with(":")) {
      return std::strtoull(line + name.size() + 1, nullptr, 10) * kKiB;
    }
  }
  return 0;
}

// One digest for all content of a tag: over its chunks' keys and digests, in order.
std::string combined_digest(const std::vector<ChunkKey>& keys, const std::vector<Digest>& digests) {
  StreamingDigest all;
  for (size_t i = 0; i < keys.size(); ++i) {
    const std::string key = keys[i].to_string();
    all.update(std::as_bytes(std::span(key)));
    all.update(std::as_bytes(std::span(digests[i].bytes)));
  }
  return all.finish().hex();
}

std::string combined_digest(const std::vector<SavedChunk>& chunks) {
  std::vector<ChunkKey> keys;
  std::vector<Digest> digests;
  for (const SavedChunk& chunk : chunks) {
    keys.push_back(chunk.key);
    digests.push_back(chunk.digest);
  }
  return combined_digest(keys, digests);
}

}  // namespace

RankMemory::RankMemory(std::unique_ptr<DeviceMemory> device, FileSystem& file_system, RankMemoryOptions options)
    : options_(options), file_system_(file_system), process_(::getpid()), device_(std::move(device)) {}

Status RankMemory::same_process() const {
  if (::getpid() == process_) return ok();
  return Error{.code = Code::kFailedPrecondition,
               .what = fmt::format("this memory belongs to process {}, which forked", process_),
               .next_step = "make it in the child, or use spawn"};
}

RankMemory::~RankMemory() {
  if (transfers_ == nullptr || !transfers_->quarantined())
    return;  // members go in reverse: transfers, allocator, arena, device
  // A copy may still run, so nothing that it reads or writes may be unmapped: it is leaked until the process ends.
  for (auto& [tag, backup] : backups_) backup.host.release();
  transfers_.reset();  // its threads end; what a copy may still use it keeps itself
  allocator_.release();
  arena_.release();
  device_.release();
}

Result<std::unique_ptr<RankMemory>> RankMemory::create(std::unique_ptr<DeviceMemory> device, FileSystem& file_system,
                                                       RankMemoryOptions options) {
  const bool other_memory = device->kind() != "host";
  if (!options.keep_backup) options.keep_backup = other_memory;
  if (!options.arena_keep_bytes) options.arena_keep_bytes = other_memory || *options.keep_backup ? UINT64_MAX : 0;
  std::unique_ptr<RankMemory> memory(new RankMemory(std::move(device), file_system, options));
  TORPOR_ASSIGN(memory->arena_, HostArena::create({.budget_bytes = options.arena_budget_bytes,
                                                   .slab_bytes = options.arena_slab_bytes,
                                                   .prefault_threads = options.threads,
                                                   .pin_for = memory->device_.get()}));
  TORPOR_ASSIGN(memory->allocator_, SleepAllocator::create(*memory->device_, {.handle_bytes = options.handle_bytes}));
  TORPOR_ASSIGN(memory->transfers_,
                TransferEngine::create(*memory->device_, *memory->arena_,
                                       {.threads = options.threads, .own_threads = options.own_threads}));
  if (options.arena_prefault_bytes > 0) memory->arena_->prefault_in_background(options.arena_prefault_bytes);
  return memory;
}

Result<DeviceAddress> RankMemory::allocate(std::string_view tag, std::string_view name, uint64_t size_bytes) {
  TORPOR_TRY(same_process());
  const MutexLock lock(mutex_);
  TORPOR_ASSIGN(const DeviceAddress address, allocator_->allocate(tag, name, size_bytes));
  forget_clean(tag);  // the new region is not in it
  return address;
}

Status RankMemory::free(DeviceAddress address) {
  TORPOR_TRY(same_process());
  const MutexLock lock(mutex_);
  const std::optional<RegionInfo> region = allocator_->region_at(address);
  TORPOR_TRY(allocator_->free(address));
  forget_clean(region->tag);
  const auto backup = backups_.find(region->tag);
  if (backup == backups_.end()) return ok();
  std::erase_if(backup->second.chunks, [&](const SavedChunk& chunk) {
    return chunk.key.kind == ChunkKind::kRegion && chunk.key.region == region->name;
  });
  if (backup->second.chunks.empty()) backups_.erase(backup);
  return ok();
}

Status RankMemory::set_kv_layout(std::string tag, KvLayout layout) {
  TORPOR_TRY(layout.validate());
  const MutexLock lock(mutex_);
  // Every piece must lie inside a region of the tag, so that a block number from a file can never reach elsewhere.
  const std::vector<RegionInfo> regions = allocator_->regions_of(tag);
  // Blocks lie at equal distances, so those between the first and the last are inside where both are in one region.
  for (const KvTensor& tensor : layout.tensors) {
    for (uint64_t layer = 0; layer < tensor.layers; ++layer) {
      const uint64_t begin = tensor.address + layer * tensor.layer_stride;
      const uint64_t end = begin + (layout.num_blocks - 1) * tensor.block_stride + tensor.block_bytes;
      const bool inside = std::any_of(regions.begin(), regions.end(), [&](const RegionInfo& region) {
        return begin >= region.address && end <= region.address + region.size_bytes;
      });
      if (!inside) {
        return Error{.code = Code::kInvalidArgument,
                     .what = fmt::format("the KV layout puts {} blocks at {:#x} to {:#x}, outside the regions of {}",
                                         layout.num_blocks, begin, end, tag),
                     .next_step = "give the layout that the engine allocated"};
      }
    }
  }
  kv_tag_ = std::move(tag);
  kv_layout_ = layout.merged();
  return ok();
}

void RankMemory::mark_dirty(std::string_view tag) {
  const MutexLock lock(mutex_);
  note_write(tag);
}

void RankMemory::note_write(std::string_view tag) {
  forget_clean(tag);
  Content& content = contents_[std::string(tag)];
  ++content.writes;
  content.missing = false;
  content.sample.reset();  // taken anew when it is described next
}

// A digest of some bytes all over the tag; none where looking is not cheap. Precondition: it is attached.
std::optional<Digest> RankMemory::sample(const std::string& tag) const {
  if (device_->kind() != "host") return std::nullopt;
  const std::vector<RegionInfo> regions = allocator_->regions_of(tag);
  uint64_t all = 0;
  for (const RegionInfo& region : regions) all += region.size_bytes;
  const uint64_t stride = std::max<uint64_t>(4 * kKiB, all / kSamplePlaces);
  StreamingDigest digest;
  for (const RegionInfo& region : regions) {
    for (uint64_t at = 0; at < region.size_bytes; at += stride) {
      const auto* bytes = reinterpret_cast<const std::byte*>(region.address + at);  // NOLINT(performance-no-int-to-ptr)
      digest.update({bytes, std::min(kSampleBytes, region.size_bytes - at)});
    }
  }
  return digest.finish();
}

// Looks at all tags that have content now. Who wrote without a word is found out, unless every place that is looked at
// was left as it was.
void RankMemory::notice_writes() {
  for (const auto& [tag, state] : allocator_->states()) {
    if (state != RegionState::kAttached || tag == kv_tag_) continue;
    const std::optional<Digest> now = sample(tag);
    const std::optional<Digest> before = contents_[tag].sample;
    if (before && now != before) note_write(tag);
    contents_[tag].sample = now;
  }
}

void RankMemory::forget_clean(std::string_view tag) {
  if (const auto found = backups_.find(tag); found != backups_.end() && found->second.clean) backups_.erase(found);
}

Bytes RankMemory::call(const std::string& method, const Bytes& order) {
  const auto carry_out = [&]() -> Result<Bytes> {
    const MutexLock lock(mutex_);
    TORPOR_TRY(same_process());
    TORPOR_ASSIGN(const RankOrder decoded, decode_order(order));
    TORPOR_ASSIGN(RankReply reply, dispatch(method, decoded));
    fill(reply.ledger);
    return encode_reply(reply);
  };
  Result<Bytes> answer = catching(carry_out);
  if (answer) return std::move(*answer);
  Result<Bytes> failure = catching([&]() -> Result<Bytes> {
    return encode_reply(RankReply{.error = answer.error().within(fmt::format("rank {}", options_.rank))});
  });
  return failure ? std::move(*failure) : Bytes{};
}

Result<RankReply> RankMemory::dispatch(const std::string& method, const RankOrder& order) {
  RankReply reply;
  reply.chunks.rank = options_.rank;
  if (method == "describe") {
    notice_writes();
    reply.bytes_per_block = kv_layout_.bytes_per_block();
    for (const auto& [tag, content] : contents_) {
      reply.writes[tag] = content.writes;
      if (content.missing) reply.without_content.push_back(tag);
    }
  } else if (method == "written") {
    for (const std::string& tag : order.tags) note_write(tag);
  } else if (method == "save") {
    TORPOR_TRY(save(order, reply));
  } else if (method == "cancel_save") {
    if (!order.tags.empty()) TORPOR_TRY(allocator_->cancel_save(order.tags));  // the allocator takes none for all
    for (const std::string& tag : order.tags) {
      if (const auto found = backups_.find(tag); found != backups_.end() && !found->second.clean) backups_.erase(found);
    }
    give_back_unused();
  } else if (method == "detach") {
    (void)transfers_->drain();  // of blocks that an engine moves; what counts is that none is left
    TORPOR_TRY(transfers_->usable());
    for (const RegionInfo& region : allocator_->regions()) {
      if (has_tag(order.tags, region.tag)) reply.bytes += region.reserved_bytes;
    }
    TORPOR_TRY(allocator_->detach(order.tags));
    for (const std::string& tag : order.tags) {
      if (const auto found = backups_.find(tag); found != backups_.end()) found->second.clean = false;
    }
    give_back_unused();
    ::malloc_trim(0);  // what the engine derived from the content was freed just before
  } else if (method == "attach") {
    TORPOR_TRY(allocator_->begin_attach(order.tags));
  } else if (method == "restore") {
    TORPOR_TRY(restore(order, reply));
  } else if (method == "cancel_restore") {
    TORPOR_TRY(allocator_->cancel_restore(order.tags));
    give_back_unused();
  } else if (method == "finish") {
    TORPOR_TRY(finish(order));
  } else if (method == "digest") {
    TORPOR_TRY(digest(order, reply));
  } else if (method == "load_blocks") {
    TORPOR_TRY(load_blocks(order, reply));
  } else if (method == "moved") {
    for (auto& [tag, backup] : backups_) {
      if (backup.host == nullptr) backup.directory = order.directory;
    }
  } else {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("\"{}\" is not an order", method),
                 .next_step = "use the same version of torpor in all processes"};
  }
  return reply;
}

// What cannot be given back now is at the next operation.
void RankMemory::give_back_unused() noexcept {
  (void)catching([this]() -> Status {
    transfers_->release_staging();
    arena_->trim(*options_.arena_keep_bytes);  // what backs up stays
    return ok();
  });
}

Result<std::vector<ChunkPlan>> RankMemory::plans_of(const std::string& tag, const std::vector<int32_t>& blocks) const {
  std::vector<ChunkPlan> plans;
  if (tag == kv_tag_) {
    for (const int32_t block : blocks) {
      if (block < 0 || static_cast<uint32_t>(block) >= kv_layout_.num_blocks) {
        return Error{.code = Code::kIncompatible,
                     .what = fmt::format("KV block {} does not exist, there are {}", block, kv_layout_.num_blocks),
                     .next_step = "start the engine as the one that slept was started"};
      }
      ChunkPlan plan{.key = {.kind = ChunkKind::kKvBlock, .tag = tag, .index = static_cast<uint64_t>(block)}};
      for (const KvPiece& piece : kv_layout_.pieces_of(static_cast<uint32_t>(block)))
        plan.pieces.push_back({piece.address, piece.bytes});
      plans.push_back(std::move(plan));
    }
    return plans;
  }
  for (const RegionInfo& region : allocator_->regions_of(tag)) {
    for (uint64_t offset = 0; offset < region.size_bytes; offset += kRegionChunk) {
      ChunkPlan plan{
          .key = {.kind = ChunkKind::kRegion, .tag = tag, .region = region.name, .index = offset / kRegionChunk}};
      plan.pieces.push_back({region.address + offset, std::min(kRegionChunk, region.size_bytes - offset)});
      plans.push_back(std::move(plan));
    }
  }
  return plans;
}

Result<std::vector<ChunkPlan>> RankMemory::plans_for(const std::vector<SavedChunk>& chunks) const {
  std::vector<ChunkPlan> plans;
  std::string tag;
  std::vector<int32_t> blocks;
  for (const SavedChunk& chunk : chunks) {
    tag = chunk.key.tag;
    if (chunk.key.kind == ChunkKind::kKvBlock)
      blocks.push_back(static_cast<int32_t>(std::min<uint64_t>(chunk.key.index, INT32_MAX)));
  }
  return plans_of(tag, blocks);
}

Status RankMemory::save(const RankOrder& order, RankReply& reply) {
  if (!order.tags.empty()) TORPOR_TRY(allocator_->begin_save(order.tags));
  const Status saved = catching([&]() TORPOR_REQUIRES(mutex_) -> Status {
    if (!order.directory.empty()) return save_to_disk(order, reply);
    for (const std::string& tag : order.tags) {
      if (const auto found = backups_.find(tag);
          found != backups_.end() && found->second.clean && found->second.host != nullptr && tag != kv_tag_)
        continue;
      backups_.erase(tag);
      TORPOR_ASSIGN(const std::vector<ChunkPlan> plans, plans_of(tag, order.blocks));
      Backup backup{.host = std::make_unique<HostTier>(*arena_)};
      Result<std::vector<SavedChunk>> saved =
          catching([&]() TORPOR_REQUIRES(mutex_) { return transfers_->save(plans, *backup.host); });
      if (!saved) {
        if (transfers_->quarantined()) backup.host.release();  // a copy may still write there
        return saved.error();
      }
      backup.chunks = std::move(*saved);
      for (const SavedChunk& chunk : backup.chunks) reply.bytes += chunk.bytes;
      backups_[tag] = std::move(backup);
    }
    return ok();
  });
  if (saved) return ok();
  for (const std::string& tag : order.tags) {
    if (const auto found = backups_.find(tag); found != backups_.end() && !found->second.clean) backups_.erase(found);
  }
  if (!order.tags.empty()) TORPOR_TRY(allocator_->cancel_save(order.tags));
  give_back_unused();
  return saved.error();
}

Status RankMemory::save_to_disk(const RankOrder& order, RankReply& reply) {
  TORPOR_ASSIGN(const std::unique_ptr<Directory> directory, file_system_.open_directory(order.directory, false));
  TORPOR_ASSIGN(ChunkFileOptions writing, chunk_file_options(order.writing, options_.rank, options_.key.get()));
  TORPOR_ASSIGN(const std::unique_ptr<DiskTier> tier,
                DiskTier::create(*directory, chunk_file_name(options_.rank), std::move(writing)));
  std::vector<ChunkPlan> plans;
  for (const std::string& tag : order.tags) {
    TORPOR_ASSIGN(const std::vector<ChunkPlan> more, plans_of(tag, order.blocks));
    plans.insert(plans.end(), more.begin(), more.end());
  }
  TORPOR_ASSIGN(std::vector<SavedChunk> saved, transfers_->save(plans, *tier));
  reply.chunks = finished_rank(order.writing, options_.rank, tier->file_bytes(), std::move(saved));
  for (const std::string& tag : order.tags) {
    Backup backup{.directory = order.directory};
    std::copy_if(reply.chunks.chunks.begin(), reply.chunks.chunks.end(), std::back_inserter(backup.chunks),
                 [&](const SavedChunk& chunk) { return chunk.key.tag == tag; });
    for (const SavedChunk& chunk : backup.chunks) reply.bytes += chunk.bytes;
    backups_[tag] = std::move(backup);
  }
  return ok();
}

Result<std::unique_ptr<DiskTier>> RankMemory::open_chunks(const std::string& directory) const {
  TORPOR_ASSIGN(const Checkpoint checkpoint, open_checkpoint(file_system_, directory, options_.key));
  for (const RankChunks& rank : checkpoint.manifest().ranks) {
    if (rank.rank == options_.rank) return checkpoint.open_rank(rank);
  }
  return Error{.code = Code::kIncompatible,
               .what = fmt::format("the checkpoint has nothing of rank {}", options_.rank),
               .next_step = "start the engine with as many ranks as the one that slept"};
}

Status RankMemory::restore(const RankOrder& order, RankReply& reply) {
  const std::map<std::string, RegionState> states = allocator_->states();
  std::vector<DeviceAddress> regions;  // in the order in which they are copied into
  std::map<std::pair<std::string, std::string>, size_t>
      end_of;  // tag and name -> how many there are up to and with that one
  for (const std::string& tag : order.tags) {
    for (const RegionInfo& region : allocator_->regions_of(tag)) {
      regions.push_back(region.address);
      end_of[{tag, region.name}] = regions.size();
    }
    end_of[{tag, ""}] = regions.size();  // where KV blocks need all of them
  }
  RegionMapper mapper(*allocator_, regions);
  const auto copy_up = [&](const std::vector<SavedChunk>& chunks, const std::vector<ChunkPlan>& plans, Tier& source)
                           TORPOR_REQUIRES(mutex_) -> Status {
    for (size_t first = 0; first < plans.size();) {
      size_t end = first;
      for (uint64_t bytes = 0; end < plans.size() && (bytes < kBytesBehindMapping || mapper.finished()); ++end)
        bytes += plans[end].bytes();
      TORPOR_TRY(mapper.wait(end_of.at({plans[end - 1].key.tag, plans[end - 1].key.region})));
      const std::span<const SavedChunk> saved = std::span(chunks).subspan(std::min(first, chunks.size()));
      TORPOR_TRY(transfers_->restore(saved, std::span(plans).subspan(first, end - first), source));
      first = end;
    }
    return ok();
  };
  for (const std::string& tag : order.tags) {
    const auto found = backups_.find(tag);
    // A tag that never went, as where a detach was undone, has its content.
    const auto state = states.find(tag);
    const bool went =
        state != states.end() && state->second != RegionState::kAttached && state->second != RegionState::kSaving;
    if (found == backups_.end() && tag != kv_tag_ && went) contents_[tag].missing = true;
    const auto content = contents_.find(tag);
    if ((found == backups_.end() && went) || (content != contents_.end() && content->second.missing))
      reply.without_content.push_back(tag);
    if (found == backups_.end()) continue;
    const Backup& backup = found->second;
    TORPOR_ASSIGN(const std::vector<ChunkPlan> plans, plans_for(backup.chunks));
    if (backup.host != nullptr) {
      TORPOR_TRY(copy_up(backup.chunks, plans, *backup.host));
    } else {
      TORPOR_ASSIGN(const std::unique_ptr<DiskTier> tier, open_chunks(backup.directory));
      TORPOR_TRY(copy_up(backup.chunks, plans, *tier));
    }
    for (const SavedChunk& chunk : backup.chunks) reply.bytes += chunk.bytes;
  }
  return mapper.wait(regions.size());
}

// Repeated after an answer that was lost on the way: tags that are attached already stay so.
Status RankMemory::finish(const RankOrder& order) {
  const std::map<std::string, RegionState> states = allocator_->states();
  std::vector<std::string> unfinished;
  for (const std::string& tag : order.tags) {
    const auto state = states.find(tag);
    if (state == states.end() || state->second != RegionState::kAttached) unfinished.push_back(tag);
  }
  // Writes from here on show against what a tag is without content. Looked at first: after the next line nothing fails.
  std::vector<std::pair<Content*, std::optional<Digest>>> without_content;
  for (const std::string& tag : order.tags) {
    if (tag != kv_tag_ && !backups_.contains(tag)) without_content.emplace_back(&contents_[tag], sample(tag));
  }
  if (!unfinished.empty()) TORPOR_TRY(allocator_->finish_restore(unfinished));
  for (const auto& [content, sample] : without_content) content->sample = sample;
  for (const std::string& tag : order.tags) {
    const auto found = backups_.find(tag);
    if (found == backups_.end()) continue;
    if (*options_.keep_backup && order.keep_backup && found->second.host != nullptr && tag != kv_tag_) {
      found->second.clean = true;
    } else {
      backups_.erase(found);
    }
  }
  give_back_unused();
  return ok();
}

Status RankMemory::digest(const RankOrder& order, RankReply& reply) {
  for (const std::string& tag : order.tags) {
    const auto states = allocator_->states();
    const auto state = states.find(tag);
    const auto backup = backups_.find(tag);
    if (state != states.end() && state->second == RegionState::kDetached && backup != backups_.end()) {
      reply.digests[tag] = combined_digest(backup->second.chunks);
      continue;
    }
    TORPOR_ASSIGN(const std::vector<ChunkPlan> plans, plans_of(tag, {}));
    TORPOR_ASSIGN(const std::vector<Digest> digests, transfers_->digests(plans));
    std::vector<ChunkKey> keys;
    for (const ChunkPlan& plan : plans) {
      keys.push_back(plan.key);
      reply.bytes += plan.bytes();
    }
    reply.digests[tag] = combined_digest(keys, digests);
  }
  give_back_unused();
  return ok();
}

Status RankMemory::load_blocks(const RankOrder& order, RankReply& reply) {
  const auto mine = std::find_if(order.chunks.begin(), order.chunks.end(),
                                 [this](const RankChunks& chunks) { return chunks.rank == options_.rank; });
  if (mine == order.chunks.end()) {
    return Error{.code = Code::kIncompatible,
                 .what = fmt::format("the checkpoint has nothing of rank {}", options_.rank),
                 .next_step = "start the engine with as many ranks as the one that slept"};
  }
  std::vector<SavedChunk> blocks;
  std::copy_if(mine->chunks.begin(), mine->chunks.end(), std::back_inserter(blocks),
               [this](const SavedChunk& chunk) TORPOR_REQUIRES(mutex_) {
                 return chunk.key.kind == ChunkKind::kKvBlock && chunk.key.tag == kv_tag_;
               });
  TORPOR_ASSIGN(const std::vector<ChunkPlan> plans, plans_for(blocks));
  TORPOR_ASSIGN(const std::unique_ptr<DiskTier> tier, open_chunks(order.directory));
  TORPOR_TRY(transfers_->restore(blocks, plans, *tier));
  for (const SavedChunk& chunk : blocks) reply.bytes += chunk.bytes;
  give_back_unused();
  return ok();
}

RankLedger RankMemory::ledger() const {
  const MutexLock lock(mutex_);
  RankLedger ledger;
  fill(ledger);
  return ledger;
}

void RankMemory::fill(RankLedger& ledger) const {
  for (const RegionInfo& region : allocator_->regions()) {
    RankLedger::Tag& tag = ledger.tags[region.tag];
    tag.state = name(region.state);
    tag.region_bytes += region.size_bytes;
    if (region.state != RegionState::kDetached) tag.physical_bytes += region.reserved_bytes;
  }
  for (const auto& [tag, backup] : backups_) {
    for (const SavedChunk& chunk : backup.chunks) {
      (backup.host != nullptr ? ledger.tags[tag].backup_host_bytes : ledger.tags[tag].backup_disk_bytes) +=
          chunk.stored_bytes;
    }
  }
  const DeviceMemoryInfo device = device_->info();
  const HostArenaInfo arena = arena_->info();
  ledger.device_physical_bytes = device.physical_bytes;
  ledger.device_capacity_bytes = device.capacity_bytes;
  ledger.device_used_bytes = device.used_bytes.value_or(0);
  ledger.arena_held_bytes = arena.held_bytes;
  ledger.arena_unpinned_bytes = arena.unpinned_bytes;
  ledger.arena_used_bytes = arena.used_bytes;
  ledger.arena_budget_bytes = arena.budget_bytes;
  const OutcomeCounts counts = transfers_->counts();
  for (size_t outcome = 0; outcome < counts.size(); ++outcome) {
    if (counts[outcome] == 0) continue;
    ledger.chunks_by_outcome[std::string(name(static_cast<BlockOutcome>(outcome)))] = counts[outcome];
  }
  ledger.process_resident_bytes = process_bytes("VmRSS");
  ledger.process_resident_region_bytes = device_->resident_bytes().value_or(0);
}

}  // namespace torpor
