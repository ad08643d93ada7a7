// SPDX-License-Identifier: Apache-2.0
#include "engine/rank_memory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include <malloc.h>
#include <unistd.h>

#include <fmt/core.h>

#include "base/free_memory.h"
#include "base/log.h"
#include "base/units.h"
#include "engine/phases.h"
#include "engine/tags.h"

namespace torpor {
namespace {

// Saved pieces are rounded up to pages, which adds at most one byte to this many.
constexpr uint64_t kSlack = 64;

// Whether a sleep or a wake of the region runs.
bool moves(RegionState state) {
  return state == RegionState::kSaving || state == RegionState::kAttaching || state == RegionState::kRestoring;
}

// Return the bytes of a line "Name:   1234 kB" of /proc/self/status; 0 if there is none.
uint64_t process_bytes(std::string_view name) {
  std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen("/proc/self/status", "re"), std::fclose);
  if (file == nullptr) return 0;
  char line[256];
  while (std::fgets(line, sizeof line, file.get()) != nullptr) {
    const std::string_view text = line;
    if (text.starts_with(name) && text.substr(name.size()).starts_with(":"))
      return std::strtoull(line + name.size() + 1, nullptr, 10) * kKiB;
  }
  return 0;
}

}  // namespace

RankMemory::RankMemory(std::unique_ptr<DeviceMemory> device, RankMemoryOptions options)
    : options_(std::move(options)), process_(::getpid()), device_(std::move(device)) {}

RankMemory::~RankMemory() {
  const bool forked = ::getpid() != process_;  // a child has neither the threads nor the device
  if (!forked && (transfers_ == nullptr || !transfers_->quarantined()))
    return;  // members end in reverse order: steps, images, parts, transfers, allocator, arena, device
  if (forked) {
    steps_.release();
    images_.release();
    parts_.release();
    blocking_transfers_.release();
    transfers_.release();
    prefault_.release();
  } else {
    // A copy may still run, so nothing that it reads or writes may be unmapped: leak it until the process ends.
    if (steps_ != nullptr) steps_->abandon();
    steps_.reset();
    if (images_ != nullptr) images_->abandon();
    images_.reset();
    transfers_.reset();  // ends its threads; it keeps what a copy may still use
    prefault_.reset();
  }
  allocator_.release();
  arena_.release();
  device_.release();
}

namespace {

Status packs_host_memory(Codec codec) {
  if (codec == Codec::kNone || codec == Codec::kBf16) return ok();
  return Error{.code = Code::kInvalidArgument,
               .what = fmt::format("host memory cannot be compressed with {}", name(codec)),
               .next_step = "use bf16, or none"};
}

uint64_t staging_of(const RankMemoryOptions& options, uint64_t budget) {
  return std::min(options.spill_staging_bytes, budget / 4);
}

}  // namespace

Result<std::unique_ptr<RankMemory>> RankMemory::create(std::unique_ptr<DeviceMemory> device, FileSystem& file_system,
                                                       RankMemoryOptions options) {
  TORPOR_RETURN_IF_ERROR(packs_host_memory(options.host_compression));
  const bool other_memory = device->kind() != "host";
  if (!options.keep_backup) options.keep_backup = false;
  if (!options.retain_kv_bytes) options.retain_kv_bytes = other_memory ? UINT64_MAX : 0;
  if (!options.arena_keep_bytes) options.arena_keep_bytes = other_memory || *options.keep_backup ? UINT64_MAX : 0;
  if (!options.free_memory) options.free_memory = [] { return memory_before_kill(); };
  std::unique_ptr<RankMemory> memory(new RankMemory(std::move(device), options));
  TORPOR_ASSIGN_OR_RETURN(memory->arena_, HostArena::create({.budget_bytes = options.arena_budget_bytes,
                                                             .slab_bytes = options.arena_slab_bytes,
                                                             .prefault_threads = options.threads,
                                                             .pin_for = memory->device_.get(),
                                                             .huge_pages = options.huge_pages,
                                                             .free_memory = options.free_memory}));
  TORPOR_ASSIGN_OR_RETURN(memory->allocator_,
                          SleepAllocator::create(*memory->device_, {.handle_bytes = options.handle_bytes}));
  TORPOR_ASSIGN_OR_RETURN(memory->transfers_, TransferEngine::create(*memory->device_, *memory->arena_,
                                                                     {.threads = options.threads,
                                                                      .own_threads = options.own_threads,
                                                                      .events = options.events}));
  memory->blocking_transfers_ = std::make_unique<BlockingTransfers>(*memory->transfers_);
  memory->parts_ =
      std::make_unique<RankParts>(RankParts{.device = *memory->device_,
                                            .allocator = *memory->allocator_,
                                            .arena = *memory->arena_,
                                            .transfers = *memory->transfers_,
                                            .blocking_transfers = *memory->blocking_transfers_,
                                            .file_system = file_system,
                                            .rank = options.rank,
                                            .keep_backup = *options.keep_backup,
                                            .arena_keep_bytes = *options.arena_keep_bytes,
                                            .retain_kv_bytes = *options.retain_kv_bytes,
                                            .host_codec = options.host_compression,
                                            .spill_dir = options.spill_dir,
                                            .key = options.key,
                                            .encrypt = options.encrypt,
                                            .spill_staging_bytes = staging_of(options, options.arena_budget_bytes),
                                            .deferred_job_bytes = options.deferred_job_bytes,
                                            .deferred_thread = options.deferred_thread && options.own_threads,
                                            .own_threads = options.own_threads});
  memory->prefault_waiting_ = options.arena_prefault_bytes.value_or(0);
  if (!options.prefault_headroom) options.prefault_headroom = [] { return spare_memory(); };
  memory->prefault_wanted_ = !options.arena_prefault_bytes;
  if (other_memory)
    memory->prefault_ =
        std::make_unique<BackgroundPrefault>(*memory->arena_, std::move(options.prefault_headroom), /*waits=*/true);
  auto images = std::make_unique<RegionImages>(*memory->parts_);
  auto named_weights = std::make_unique<NamedWeights>(*memory->parts_);
  memory->steps_ = std::make_unique<RankSteps>(*memory->parts_, *images, *named_weights, memory->prefault_.get());
  memory->images_ = std::move(images);
  memory->named_weights_ = std::move(named_weights);
  if (!options.prefault_waits) memory->start_prefault();
  return memory;
}

Status RankMemory::apply(const RankMemoryOptions& options) {
  TORPOR_RETURN_IF_ERROR(same_process());
  TORPOR_RETURN_IF_ERROR(packs_host_memory(options.host_compression));
  const MutexLock lock(mutex_);
  if (options.arena_budget_bytes != 0) arena_->set_budget(options.arena_budget_bytes);
  if (options.keep_backup) parts_->keep_backup = *options.keep_backup;
  if (options.arena_keep_bytes) parts_->arena_keep_bytes = *options.arena_keep_bytes;
  if (options.retain_kv_bytes) parts_->retain_kv_bytes = *options.retain_kv_bytes;
  if (options.host_compression != Codec::kNone) parts_->host_codec = options.host_compression;
  parts_->rank = options.rank;
  parts_->spill_dir = options.spill_dir;
  parts_->key = options.key;
  parts_->encrypt = options.encrypt;
  parts_->spill_staging_bytes = staging_of(options, arena_->info().budget_bytes);
  prefault_waiting_ = options.arena_prefault_bytes.value_or(0);
  prefault_wanted_ = !options.arena_prefault_bytes;
  return ok();
}

void RankMemory::start_prefault() {
  if (const uint64_t bytes = prefault_waiting_.exchange(0); bytes > 0) arena_->prefault_in_background(bytes);
  if (prefault_ != nullptr && prefault_wanted_) prefault_->start();
}

void RankMemory::end_prefault() noexcept {
  if (!same_process()) return;
  prefault_waiting_ = 0;
  if (prefault_ != nullptr) {
    prefault_->end();
    prefault_->wait();
  }
  arena_->end_prefault();
}

Error of_another_process(int64_t process) {
  return {.code = Code::kFailedPrecondition,
          .what = fmt::format("this memory belongs to process {}, which forked", process),
          .next_step = "make it in the child, or use spawn"};
}

Status RankMemory::same_process() const { return ::getpid() == process_ ? ok() : of_another_process(process_); }

Result<DeviceAddress> RankMemory::allocate(std::string_view tag, std::string_view name, uint64_t size_bytes) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  TORPOR_ASSIGN_OR_RETURN(const DeviceAddress address, allocator_->allocate(tag, name, size_bytes));
  images_->on_allocated(tag);
  (tag == kKvCacheTag ? kv_bytes_ : other_bytes_) += size_bytes;
  const uint64_t wanted = other_bytes_ + std::min(kv_bytes_, other_bytes_);
  if (prefault_ != nullptr) prefault_->want(wanted + wanted / kSlack);
  return address;
}

void RankMemory::set_foreign(const std::string& tag, bool foreign) {
  if (!same_process()) return;
  const MutexLock lock(mutex_);
  steps_->set_foreign(tag, foreign);
}

Status RankMemory::free(DeviceAddress address) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  free_left();
  return free_now(address);
}

Status RankMemory::free_soon(DeviceAddress address) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  free_left();
  left_.reserve(left_.size() + 1);
  Status freed = free_now(address);
  if (freed || freed.error().code == Code::kNotFound) return freed;
  left_.push_back(address);
  if (freed.error().code == Code::kFailedPrecondition) return ok();
  log().warn("freed memory goes back to the device at the next free, sleep or wake: {}", freed.error());
  return ok();
}

void RankMemory::free_left() noexcept {
  const auto stays = [&](DeviceAddress address) TORPOR_REQUIRES(mutex_) -> Status {
    const std::optional<RegionInfo> region = allocator_->region_at(address);
    if (region && moves(region->state)) return ok();
    const Status freed = free_now(address);
    if (!freed && freed.error().code != Code::kNotFound) return ok();
    return Error{.code = Code::kNotFound, .what = "it is free", .next_step = "forget it"};
  };
  for (size_t i = left_.size(); i-- > 0;) {
    // Without memory to look, it stays with the device: one that is free may belong to a new region by the next time.
    if (try_catch([&]() TORPOR_REQUIRES(mutex_) { return stays(left_[i]); })) continue;
    left_[i] = left_.back();
    left_.pop_back();
  }
}

Status RankMemory::free_now(DeviceAddress address) {
  const std::optional<RegionInfo> region = allocator_->region_at(address);
  if (region) steps_->before_free(*region);
  TORPOR_RETURN_IF_ERROR(allocator_->free(address));
  if (region) forget(*region);  // a trimmed one is forgotten already
  return ok();
}

Result<uint64_t> RankMemory::trim(DeviceAddress address) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  const std::optional<RegionInfo> region = allocator_->region_at(address);
  if (region) steps_->before_free(*region);
  Result<uint64_t> bytes = try_catch([&] { return allocator_->trim(address); });
  if (region && !allocator_->region_at(address)) forget(*region);
  return bytes;
}

void RankMemory::forget(const RegionInfo& region) {
  images_->on_freed(region);
  (region.tag == kKvCacheTag ? kv_bytes_ : other_bytes_) -= region.size_bytes;
  named_weights_->on_freed(region);
}

Status RankMemory::read_saved(DeviceAddress address, std::span<std::byte> out) const {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  for (const RegionInfo& region : allocator_->regions()) {
    if (address < region.address || address - region.address >= region.size_bytes) continue;
    if (out.size() > region.size_bytes - (address - region.address)) break;
    return images_->read_saved(region, address - region.address, out);
  }
  return Error{.code = Code::kNotFound,
               .what = fmt::format("{} bytes at {:#x} are of no region", out.size(), address),
               .next_step = "ask for what was allocated here"};
}

Status RankMemory::set_kv_layout(std::string tag, KvLayout layout) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  TORPOR_RETURN_IF_ERROR(steps_->nothing_deferred());
  TORPOR_RETURN_IF_ERROR(images_->set_kv_layout(std::move(tag), std::move(layout)));
  if (options_.events.on()) {  // so that an engine that never sleeps emits its memory, too
    RankLedger ledger;
    fill(ledger);
  }
  return ok();
}

Result<std::shared_ptr<HostStore>> RankMemory::make_host_store(const HostStoreOptions& options) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  TORPOR_ASSIGN_OR_RETURN(std::shared_ptr<HostStore> store, HostStore::create(*arena_, options));
  if (!store->traits().addressable) {
    const auto slots = static_cast<uint64_t>(options.slots);
    const uint64_t padded = align_up(options.slot_bytes, kPage);
    const uint64_t batch = TransferEngine::most_staging(slots * options.slot_bytes, slots * padded, padded);
    if (Status kept = transfers_->keep_staging(batch); !kept) {
      store.reset();
      steps_->give_back_unused();
      return kept.error();
    }
    steps_->on_packed_store(store, batch);
  }
  images_->set_host_store(store);
  return store;
}

void RankMemory::mark_dirty(std::string_view tag) {
  if (!same_process()) return;
  const MutexLock lock(mutex_);
  images_->note_write(tag);
}

void RankMemory::invalidate_digest(std::string_view tag) {
  if (!same_process()) return;
  const MutexLock lock(mutex_);
  images_->invalidate_digest(tag);
  if (tag == kWeightsTag) named_weights_->invalidate();
}

Status RankMemory::name_weights(std::string label, std::vector<DevicePiece> pieces) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  return named_weights_->set(std::move(label), std::move(pieces));
}

Result<std::string> RankMemory::weights_digest() {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  const orders::DigestTags order{.tags = {kWeightsTag}, .named = named_weights_->any()};
  TORPOR_ASSIGN_OR_RETURN(const orders::DigestTags::Reply reply, steps_->carry_out(order));
  const auto found = reply.digests.find(kWeightsTag);
  return found == reply.digests.end() ? std::string() : found->second;
}

std::optional<std::string> RankMemory::proven_digest(const std::string& tag) {
  if (!same_process()) return std::nullopt;
  const MutexLock lock(mutex_);
  return images_->proven(tag);
}

Result<LoadedTag> RankMemory::load_tag(const StoredTag& stored) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  Result<LoadedTag> loaded =
      try_catch([&]() TORPOR_REQUIRES(mutex_) { return TagLoader(*parts_, *images_).load(stored); });
  steps_->give_back_unused();
  return loaded;
}

RankLedger RankMemory::ledger() const {
  if (!same_process()) return {};
  const MutexLock lock(mutex_);
  RankLedger ledger;
  fill(ledger);
  return ledger;
}

void RankMemory::fill(RankLedger& ledger) const {
  for (const RegionInfo& region : allocator_->regions()) {
    RankLedger::Tag& tag = ledger.tags[region.tag];
    tag.region_bytes += region.size_bytes;
    if (region.state != RegionState::kDetached) tag.physical_bytes += region.reserved_bytes;
  }
  for (const auto& [tag, state] : allocator_->states()) ledger.tags[tag].state = name(state);
  images_->fill(ledger);
  const DeviceMemoryInfo device = device_->info();
  const HostArenaInfo arena = arena_->info();
  ledger.device_physical_bytes = device.physical_bytes;
  ledger.device_capacity_bytes = device.capacity_bytes;
  ledger.device_used_bytes = device.used_bytes.value_or(0);
  ledger.arena_held_bytes = arena.held_bytes;
  ledger.arena_unpinned_bytes = arena.unpinned_bytes;
  ledger.arena_used_bytes = arena.used_bytes;
  ledger.arena_budget_bytes = arena.budget_bytes;
  ledger.process_resident_bytes = process_bytes("VmRSS");
  ledger.process_resident_region_bytes = device_->resident_bytes().value_or(0);
  if (options_.events.on()) publish(ledger);
}

// Emit the device first: with it a reader forgets all earlier values of this rank. Emit nothing of the process as a
// whole: events of a replayed engine must not depend on it.
void RankMemory::publish(const RankLedger& ledger) const noexcept {
  constexpr uint8_t kDevice = 0;
  constexpr uint8_t kHost = 1;
  constexpr uint8_t kDisk = 2;
  const auto part = [&](MemoryPart what, uint8_t where, uint64_t bytes, uint64_t of, uint32_t tag = 0) {
    (void)options_.events.record({.type = EventType::kMemory,
                                  .from = static_cast<uint8_t>(what),
                                  .to = where,
                                  .request = tag,
                                  .transfer = static_cast<uint64_t>(rank()),
                                  .a = bytes,
                                  .b = of});
  };
  part(MemoryPart::kDevice, kDevice, ledger.device_physical_bytes, ledger.device_capacity_bytes);
  if (ledger.device_used_bytes > 0) part(MemoryPart::kAnybody, kDevice, ledger.device_used_bytes, 0);
  part(MemoryPart::kArena, kHost, ledger.arena_used_bytes, ledger.arena_budget_bytes);
  part(MemoryPart::kArenaHeld, kHost, ledger.arena_held_bytes, 0);
  uint32_t number = 0;
  for (const auto& [name, tag] : ledger.tags) {
    options_.events.text(TextKind::kTag, ++number, 0, name);
    part(MemoryPart::kTag, kDevice, tag.physical_bytes, tag.region_bytes, number);
    if (tag.backup_host_bytes > 0) part(MemoryPart::kTag, kHost, tag.backup_host_bytes, 0, number);
    if (tag.backup_disk_bytes > 0) part(MemoryPart::kTag, kDisk, tag.backup_disk_bytes, 0, number);
  }
}

}  // namespace torpor
