// SPDX-License-Identifier: Apache-2.0
#include "engine/rank_memory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include <malloc.h>
#include <unistd.h>

#include <fmt/core.h>

#include "base/free_memory.h"
#include "base/units.h"
#include "engine/block_copies.h"
#include "engine/phases.h"
#include "engine/tags.h"

namespace torpor {
namespace {

// Saved pieces are rounded up to pages, which adds at most one byte to this many.
constexpr uint64_t kSlack = 64;

// While it exists, the caller's ProgressFile counts the bytes of the order's copies, and may cancel them.
class Watched {
 public:
  Watched(TransferEngine& transfers, const std::string& progress) : transfers_(transfers) {
    transfers_.watch(ProgressFile::of_caller(progress));
  }
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;
  ~Watched() { transfers_.watch(nullptr); }

 private:
  TransferEngine& transfers_;
};

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
    return;  // members end in reverse order: restorer, saver, images, parts, transfers, allocator, arena, device
  if (forked) {
    request_images_.release();
    restorer_.release();
    saver_.release();
    images_.release();
    parts_.release();
    transfers_.release();
    prefault_.release();
  } else {
    // A copy may still run, so nothing that it reads or writes may be unmapped: leak it until the process ends.
    if (request_images_ != nullptr) request_images_->abandon();
    request_images_.reset();
    restorer_.reset();
    saver_.reset();
    if (images_ != nullptr) images_->abandon();
    images_.reset();
    transfers_.reset();  // ends its threads; it keeps what a copy may still use
    prefault_.reset();
  }
  allocator_.release();
  arena_.release();
  device_.release();
}

Result<std::unique_ptr<RankMemory>> RankMemory::create(std::unique_ptr<DeviceMemory> device, FileSystem& file_system,
                                                       RankMemoryOptions options) {
  if (options.host_compression != Codec::kNone && options.host_compression != Codec::kBf16) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("host memory cannot be compressed with {}", name(options.host_compression)),
                 .next_step = "use bf16, or none"};
  }
  const bool other_memory = device->kind() != "host";
  if (!options.keep_backup) options.keep_backup = false;
  if (!options.retain_kv_bytes) options.retain_kv_bytes = other_memory ? UINT64_MAX : 0;
  if (!options.arena_keep_bytes) options.arena_keep_bytes = other_memory || *options.keep_backup ? UINT64_MAX : 0;
  options.spill_staging_bytes = std::min(options.spill_staging_bytes, options.arena_budget_bytes / 4);
  std::unique_ptr<RankMemory> memory(new RankMemory(std::move(device), options));
  TORPOR_ASSIGN_OR_RETURN(memory->arena_, HostArena::create({.budget_bytes = options.arena_budget_bytes,
                                                             .slab_bytes = options.arena_slab_bytes,
                                                             .prefault_threads = options.threads,
                                                             .pin_for = memory->device_.get()}));
  TORPOR_ASSIGN_OR_RETURN(memory->allocator_,
                          SleepAllocator::create(*memory->device_, {.handle_bytes = options.handle_bytes}));
  TORPOR_ASSIGN_OR_RETURN(memory->transfers_, TransferEngine::create(*memory->device_, *memory->arena_,
                                                                     {.threads = options.threads,
                                                                      .own_threads = options.own_threads,
                                                                      .events = options.events}));
  memory->parts_ =
      std::make_unique<RankParts>(RankParts{.device = *memory->device_,
                                            .allocator = *memory->allocator_,
                                            .arena = *memory->arena_,
                                            .transfers = *memory->transfers_,
                                            .file_system = file_system,
                                            .rank = options.rank,
                                            .keep_backup = *options.keep_backup,
                                            .retain_kv_bytes = *options.retain_kv_bytes,
                                            .host_codec = options.host_compression,
                                            .spill_dir = options.spill_dir,
                                            .key = options.key,
                                            .encrypt = options.encrypt,
                                            .spill_staging_bytes = options.spill_staging_bytes,
                                            .deferred_job_bytes = options.deferred_job_bytes,
                                            .deferred_thread = options.deferred_thread && options.own_threads,
                                            .own_threads = options.own_threads});
  auto images = std::make_unique<RegionImages>(*memory->parts_);
  memory->saver_ = std::make_unique<RankSaver>(*memory->parts_, *images);
  memory->restorer_ = std::make_unique<RankRestorer>(*memory->parts_, *images);
  memory->images_ = std::move(images);
  memory->request_images_ = std::make_unique<RankImages>(*memory->parts_);
  memory->prefault_waiting_ = options.arena_prefault_bytes.value_or(0);
  if (!options.prefault_room) options.prefault_room = [] { return spare_memory(); };
  if (!options.arena_prefault_bytes && other_memory)
    memory->prefault_ =
        std::make_unique<BackgroundPrefault>(*memory->arena_, std::move(options.prefault_room), /*waits=*/true);
  if (!options.prefault_waits) memory->start_prefault();
  return memory;
}

void RankMemory::start_prefault() {
  if (const uint64_t bytes = prefault_waiting_.exchange(0); bytes > 0) arena_->prefault_in_background(bytes);
  if (prefault_ != nullptr) prefault_->start();
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

Status RankMemory::same_process() const {
  if (::getpid() == process_) return ok();
  return Error{.code = Code::kFailedPrecondition,
               .what = fmt::format("this memory belongs to process {}, which forked", process_),
               .next_step = "make it in the child, or use spawn"};
}

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

Status RankMemory::set_kv_layout(std::string tag, KvLayout layout) {
  const MutexLock lock(mutex_);
  TORPOR_RETURN_IF_ERROR(restorer_->nothing_deferred());
  TORPOR_RETURN_IF_ERROR(images_->set_kv_layout(std::move(tag), std::move(layout)));
  if (options_.events.on()) {  // so that an engine that never sleeps emits its memory, too
    RankLedger ledger;
    fill(ledger);
  }
  return ok();
}

Result<std::shared_ptr<HostStore>> RankMemory::make_host_store(const HostStoreOptions& options) {
  const MutexLock lock(mutex_);
  TORPOR_ASSIGN_OR_RETURN(std::shared_ptr<HostStore> store, HostStore::create(*arena_, options));
  if (!store->traits().addressable) {
    const auto slots = static_cast<uint64_t>(options.slots);
    const uint64_t padded = align_up(options.slot_bytes, kPage);
    const uint64_t batch = TransferEngine::most_staging(slots * options.slot_bytes, slots * padded, padded);
    if (Status kept = transfers_->keep_staging(batch); !kept) {
      store.reset();
      give_back_unused();
      return kept.error();
    }
    packed_store_ = store;
    packed_store_batch_ = batch;
  }
  images_->set_host_store(store);
  return store;
}

void RankMemory::mark_dirty(std::string_view tag) {
  const MutexLock lock(mutex_);
  images_->note_write(tag);
}

void RankMemory::invalidate_digest(std::string_view tag) {
  const MutexLock lock(mutex_);
  images_->invalidate_digest(tag);
  if (tag == kWeightsTag && named_weights_) named_weights_->digest.clear();
}

Result<LoadedTag> RankMemory::load_tag(const StoredTag& stored) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  Result<LoadedTag> loaded =
      try_catch([&]() TORPOR_REQUIRES(mutex_) { return TagLoader(*parts_, *images_).load(stored); });
  give_back_unused();
  return loaded;
}

Result<orders::Describe::Reply> RankMemory::carry_out(const orders::Describe&) {
  orders::Describe::Reply reply;
  images_->describe(reply);
  return reply;
}

Result<orders::Inform::Reply> RankMemory::carry_out(const orders::Inform& order) {
  for (const std::string& tag : order.written) images_->note_write(tag);
  if (!order.committed.empty()) images_->on_moved(order.committed);
  if (const auto& told = order.contents) {
    TORPOR_ASSIGN_OR_RETURN(const std::vector<BlockContent> contents,
                            contents_of(told->blocks, told->versions, told->steps));
    images_->index().checkpoints().tell_contents(told->id, told->blocks, contents);
  }
  return orders::Inform::Reply{};
}

Result<orders::Save::Reply> RankMemory::carry_out(const orders::Save& order) {
  using Stage = orders::Save::Stage;
  switch (order.stage) {
    case Stage::kAll: return save_all(order);
    case Stage::kPlan: return saver_->plan(order);
    case Stage::kOpen: return saver_->checkpoint().open(order);
    case Stage::kPrecopy: return saver_->checkpoint().precopy(order);
    case Stage::kStopAndCopy: return stop_and_copy(order);
  }
  return orders::Save::Reply{};
}

Result<orders::Save::Reply> RankMemory::save_all(const orders::Save& order) {
  TORPOR_RETURN_IF_ERROR(restorer_->nothing_deferred());
  if (prefault_ != nullptr) prefault_->end();
  const Watched watched(*transfers_, order.progress);
  if (!order.channel.empty()) return save_giving(order);
  const bool any = !order.tags.empty();  // with no tag named the allocator would take all
  if (any) TORPOR_RETURN_IF_ERROR(allocator_->begin_save(order.tags));
  Result<orders::Save::Reply> saved = try_catch([&]() TORPOR_REQUIRES(mutex_) { return saver_->save(order); });
  if (saved) return saved;
  images_->forget_saved(order.tags);
  if (any) TORPOR_RETURN_IF_ERROR(allocator_->cancel_save(order.tags));
  give_back_unused();
  return saved;
}

// After an error, Undo of kGiving takes back what was released, once the other engine has none of it.
Result<orders::Save::Reply> RankMemory::save_giving(const orders::Save& order) {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<SwapChannel> channel, SwapChannel::open(order.channel));
  TORPOR_RETURN_IF_ERROR(nothing_moves());
  TORPOR_RETURN_IF_ERROR(allocator_->begin_save(order.tags));
  return try_catch([&]() TORPOR_REQUIRES(mutex_) { return saver_->save_giving(order, *channel); });
}

Result<orders::Save::Reply> RankMemory::stop_and_copy(const orders::Save& order) {
  TORPOR_ASSIGN_OR_RETURN(orders::Save::Reply reply, saver_->checkpoint().stop_and_copy(order));
  if (const auto weights = reply.digests.find(kWeightsTag); weights != reply.digests.end() && named_weights_) {
    TORPOR_ASSIGN_OR_RETURN(orders::DigestTags::Reply named, digest_named(order.as_proven));
    weights->second = std::move(named.digests.at(kWeightsTag));
    reply.digested_bytes += named.bytes;
  }
  return reply;
}

Result<orders::PollSave::Reply> RankMemory::carry_out(const orders::PollSave& order) {
  TORPOR_ASSIGN_OR_RETURN(orders::PollSave::Reply reply, saver_->checkpoint().poll(order));
  if (order.stop) give_back_unused();
  return reply;
}

Result<orders::Undo::Reply> RankMemory::carry_out(const orders::Undo& order) {
  using What = orders::Undo::What;
  switch (order.what) {
    case What::kGiving: TORPOR_RETURN_IF_ERROR(saver_->take_back(order.tags)); return orders::Undo::Reply{};
    case What::kSave:
      if (!order.tags.empty()) TORPOR_RETURN_IF_ERROR(allocator_->cancel_save(order.tags));
      images_->forget_saved(order.tags);
      break;
    case What::kRestore:
      restorer_->cancel_deferred();
      const std::vector<std::string> tags = images_->asleep_of(order.tags);
      if (!tags.empty() || order.tags.empty()) TORPOR_RETURN_IF_ERROR(allocator_->cancel_restore(tags));
      break;
  }
  give_back_unused();
  return orders::Undo::Reply{};
}

// Called before memory is released.
Status RankMemory::nothing_moves() {
  TORPOR_RETURN_IF_ERROR(restorer_->nothing_deferred());
  saver_->checkpoint().stop();
  (void)transfers_->drain();  // of KV blocks that the engine offloads; all that counts is that none is left
  return transfers_->usable();
}

Result<orders::Detach::Reply> RankMemory::carry_out(const orders::Detach& order) {
  TORPOR_RETURN_IF_ERROR(nothing_moves());
  orders::Detach::Reply reply;
  for (const RegionInfo& region : allocator_->regions()) {
    if (has_tag(order.tags, region.tag)) reply.bytes += region.reserved_bytes;
  }
  std::set<std::string, std::less<>> away(order.tags.begin(), order.tags.end());
  TORPOR_RETURN_IF_ERROR(allocator_->detach(order.tags));
  images_->on_detached(order.tags, std::move(away));
  saver_->on_detached();
  give_back_unused();
  ::malloc_trim(0);  // the engine has just freed what it derived from the content
  return reply;
}

Result<orders::Restore::Reply> RankMemory::carry_out(const orders::Restore& order) {
  if (!order.checkpoint) return restore_tags(order);
  TORPOR_RETURN_IF_ERROR(restorer_->nothing_deferred());
  const Watched watched(*transfers_, order.progress);
  images_->forget_blocks();
  TORPOR_ASSIGN_OR_RETURN(orders::Restore::Reply reply, restorer_->load_blocks(order));
  give_back_unused();
  return reply;
}

Result<orders::Restore::Reply> RankMemory::restore_tags(const orders::Restore& order) {
  const std::map<std::string, RegionState> states = allocator_->states();
  const auto kv = states.find(kKvCacheTag);
  // The deferred blocks are those of a wake that was undone while this rank did not hear of it.
  if (kv != states.end() && kv->second != RegionState::kAttached) restorer_->cancel_deferred();
  TORPOR_RETURN_IF_ERROR(restorer_->nothing_deferred());
  const std::vector<std::string> tags = images_->asleep_of(order.tags);
  if (!tags.empty() || order.tags.empty()) {  // with no tag named the allocator would take all
    if (order.channel.empty()) TORPOR_RETURN_IF_ERROR(has_room_for(tags));
    TORPOR_RETURN_IF_ERROR(allocator_->begin_attach(tags));
  }
  const Watched watched(*transfers_, order.progress);
  return restorer_->restore(order);
}

// Check before anything is copied, as far as the device knows. If other processes take memory meanwhile, a region fails
// later.
Status RankMemory::has_room_for(const std::vector<std::string>& tags) const {
  uint64_t needed = 0;
  for (const RegionInfo& region : allocator_->regions()) {
    const bool comes = region.state == RegionState::kDetached && (tags.empty() || has_tag(tags, region.tag));
    if (comes) needed += region.reserved_bytes;
  }
  const DeviceMemoryInfo device = device_->info();
  const std::optional<uint64_t> free = device.free_bytes();
  if (!free || needed <= *free) return ok();
  return Error{.code = Code::kResourceExhausted,
               .what = fmt::format("{} bytes of device memory are needed to wake, {} of {} are free", needed, *free,
                                   device.capacity_bytes),
               .next_step = "free device memory"};
}

Result<orders::PollRestore::Reply> RankMemory::carry_out(const orders::PollRestore& order) {
  orders::PollRestore::Reply reply = restorer_->poll(order);
  if (reply.ended) give_back_unused();
  return reply;
}

Result<orders::Finish::Reply> RankMemory::carry_out(const orders::Finish& order) {
  orders::Finish::Reply reply;
  TORPOR_RETURN_IF_ERROR(restorer_->finish(order.tags, order.keep_backup));
  give_back_unused();
  return reply;
}

Result<orders::DigestTags::Reply> RankMemory::carry_out(const orders::DigestTags& order) {
  TORPOR_ASSIGN_OR_RETURN(orders::DigestTags::Reply reply,
                          order.named ? digest_named(order.as_proven) : images_->digest(order));
  give_back_unused();
  return reply;
}

Result<orders::WriteTestFile::Reply> RankMemory::carry_out(const orders::WriteTestFile& order) {
  return saver_->checkpoint().write_test_file(order);
}

// Requests that leave and come while the engine serves need its KV cache in place.
Status RankMemory::kv_is_attached() const {
  const std::map<std::string, RegionState> states = allocator_->states();
  const auto kv = states.find(kKvCacheTag);
  if (kv != states.end() && kv->second == RegionState::kAttached) return restorer_->nothing_deferred();
  return Error{
      .code = Code::kFailedPrecondition,
      .what = kv == states.end() ? "this rank has no KV cache" : fmt::format("the KV cache is {}", name(kv->second)),
      .next_step = "wake the engine first"};
}

Result<orders::Extract::Reply> RankMemory::carry_out(const orders::Extract& order) {
  TORPOR_RETURN_IF_ERROR(kv_is_attached());
  Result<orders::Extract::Reply> extracted = try_catch(
      [&]() TORPOR_REQUIRES(mutex_) { return request_images_->extract(order, images_->chunks().kv_layout()); });
  give_back_unused();
  return extracted;
}

Result<orders::ReadImage::Reply> RankMemory::carry_out(const orders::ReadImage& order) {
  Result<orders::ReadImage::Reply> read =
      try_catch([&]() TORPOR_REQUIRES(mutex_) { return request_images_->read(order, images_->chunks().kv_layout()); });
  give_back_unused();
  return read;
}

Result<orders::SaveImage::Reply> RankMemory::carry_out(const orders::SaveImage& order) {
  return try_catch([&]() TORPOR_REQUIRES(mutex_) { return request_images_->save(order); });
}

Result<orders::VerifyImage::Reply> RankMemory::carry_out(const orders::VerifyImage& order) {
  return request_images_->verify(order);
}

Result<orders::Admit::Reply> RankMemory::carry_out(const orders::Admit& order) {
  TORPOR_RETURN_IF_ERROR(kv_is_attached());
  Result<orders::Admit::Reply> admitted =
      try_catch([&]() TORPOR_REQUIRES(mutex_) { return request_images_->admit(order, images_->chunks().kv_layout()); });
  give_back_unused();
  return admitted;
}

Result<orders::DropImage::Reply> RankMemory::carry_out(const orders::DropImage& order) {
  const orders::DropImage::Reply dropped = request_images_->drop(order);
  give_back_unused();
  return dropped;
}

Result<orders::CopyBlocks::Reply> RankMemory::carry_out(const orders::CopyBlocks& order) {
  TORPOR_RETURN_IF_ERROR(kv_is_attached());
  return try_catch(
      [&]() TORPOR_REQUIRES(mutex_) { return copy_blocks_within(*device_, images_->chunks().kv_layout(), order); });
}

// Give unused memory back. If a part cannot be given back now, the next operation tries it again.
void RankMemory::give_back_unused() noexcept {
  (void)try_catch([this]() TORPOR_REQUIRES(mutex_) -> Status {
    transfers_->release_staging();
    if (!images_->needs_staging()) {
      transfers_->let_staging_go();
      if (!packed_store_.expired()) (void)transfers_->keep_staging(packed_store_batch_);  // of what was let go
    }
    arena_->trim(*options_.arena_keep_bytes);  // what backs up stays
    return ok();
  });
}

// --- the ledger ---

RankLedger RankMemory::ledger() const {
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
  if (options_.events.on()) tell(ledger);
}

// Emit the device first: with it a reader forgets all earlier values of this rank. Emit nothing of the process as a
// whole: events of a replayed engine must not depend on it.
void RankMemory::tell(const RankLedger& ledger) const noexcept {
  constexpr uint8_t kDevice = 0;
  constexpr uint8_t kHost = 1;
  constexpr uint8_t kDisk = 2;
  const auto part = [&](MemoryPart what, uint8_t where, uint64_t bytes, uint64_t of, uint32_t tag = 0) {
    (void)options_.events.record({.type = EventType::kMemory,
                                  .from = static_cast<uint8_t>(what),
                                  .to = where,
                                  .request = tag,
                                  .transfer = static_cast<uint64_t>(options_.rank),
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
