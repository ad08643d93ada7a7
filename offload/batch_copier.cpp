// SPDX-License-Identifier: Apache-2.0
#include "offload/batch_copier.h"

#include <algorithm>
#include <mutex>
#include <optional>

#include <fmt/core.h>

#include "base/log.h"
#include "base/units.h"

namespace torpor {
namespace {

// Set `error` for the chunks that have no error yet.
void fail_all(std::span<ChunkTransfer> batch, const Error& error) noexcept {
  for (ChunkTransfer& chunk : batch) {
    if (chunk.status) chunk.status = copied(error);
  }
}

Error wrong_bytes(const SavedChunk& saved) {
  return Error{.code = Code::kCorruption,
               .what = fmt::format("the saved bytes of {} do not match their digest {}", saved.key.to_string(),
                                   saved.digest.hex()),
               .next_step = "use another checkpoint"};
}

// A store that ends with this process is the only copy. In place of a damaged checkpoint there may be another one.
void correct_next_steps(std::span<ChunkTransfer> batch, const StoreTraits& store) {
  if (!store.in_memory && !store.temporary) return;
  for (ChunkTransfer& chunk : batch) {
    if (!chunk.status && chunk.status.error().code == Code::kCorruption) chunk.status.error().next_step = kLoadAgain;
  }
}

}  // namespace

Error quarantined_error() {
  return Error{.code = Code::kDevice,
               .what = "an earlier copy was never proven finished; its memory is quarantined",
               .next_step = "end this process; what was saved can be woken in a new one",
               .origin = Origin::kDevice};
}

Status copied(const Error& error) noexcept {
  try {
    return error;
  } catch (...) {
    return Error{.code = error.code, .origin = error.origin, .native = error.native};
  }
}

// A batch under way. The vectors keep their memory for the next batch.
struct BatchCopier::StagingSlot {
  JobKind kind = JobKind::kSave;
  CopyBy copy_by = CopyBy::kEngines;
  RecordStore* store = nullptr;
  RecordStore* source = nullptr;
  std::span<ChunkTransfer> batch;
  HostArena::Span kept;  // from keep_staging(); used for a batch that fits
  HostArena::Span staging;
  std::vector<std::span<std::byte>> host;  // for each chunk
  std::vector<size_t> members;             // the chunks that are copied
  std::vector<Copy> copies;
  std::vector<size_t> first_copy;        // for each member, and the end
  std::vector<StreamingDigest> digests;  // for each member, if the device takes them
  std::vector<RecordPart> parts;
  bool on_stream = false;
  Status enqueued;
  std::optional<EventId> event;
  Error event_error;

  // The store that the bytes are copied from or to directly; null if they need staging memory.
  RecordStore* memory() const { return from() != nullptr && from()->traits().addressable ? from() : nullptr; }
  RecordStore* from() const { return source != nullptr ? source : store; }  // source for kRestore and kMove
  bool in_store() const { return memory() != nullptr; }
  Direction direction() const {
    return kind == JobKind::kRestore ? Direction::kHostToDevice : Direction::kDeviceToHost;
  }
};

BatchCopier::BatchCopier(DeviceMemory& device, HostArena& arena, std::atomic<bool>& quarantined, StreamId stream,
                         std::unique_ptr<StagingSlots> slots)
    : device_(device), arena_(arena), quarantined_(quarantined), stream_(stream), slots_(std::move(slots)) {}

Result<std::unique_ptr<BatchCopier>> BatchCopier::create(DeviceMemory& device, HostArena& arena,
                                                         std::atomic<bool>& quarantined) {
  auto slots = std::make_unique<StagingSlots>();
  TORPOR_ASSIGN_OR_RETURN(const StreamId stream, device.create_stream());
  Result<std::unique_ptr<BatchCopier>> made = try_catch([&]() -> Result<std::unique_ptr<BatchCopier>> {
    return std::unique_ptr<BatchCopier>(new BatchCopier(device, arena, quarantined, stream, std::move(slots)));
  });
  if (!made) (void)device.destroy_stream(stream);
  return made;
}

BatchCopier::~BatchCopier() {
  if (!quarantined_) {
    const Status done = try_catch([&] { return device_.destroy_stream(stream_); });
    if (!done) log().error("stream: {}", done.error());
    return;
  }
  for (StagingSlot& place : *slots_) {
    HostArena::quarantine(std::move(place.kept));
    HostArena::quarantine(std::move(place.staging));
  }
  // Copies that may still be running write these digests. They stay until the process ends, reachable for leak
  // checkers.
  StagingSlots* const kept_slots = slots_.release();
  (void)try_catch([&]() -> Status {
    static std::mutex mutex;
    static auto* const kept = new std::vector<StagingSlots*>();
    const std::lock_guard lock(mutex);
    kept->push_back(kept_slots);
    return ok();
  });
}

Status BatchCopier::usable() const { return quarantined_ ? Status(quarantined_error()) : ok(); }

void BatchCopier::release_staging() {
  if (quarantined_) return;
  for (StagingSlot& place : *slots_) place.staging = {};
}

void BatchCopier::keep_staging(std::array<HostArena::Span, 2> kept) {
  if (quarantined_) return;
  for (size_t i = 0; i < kept.size(); ++i) (*slots_)[i].kept = std::move(kept[i]);
}

uint64_t BatchCopier::kept_staging() const { return slots_->front().kept.bytes().size(); }

bool BatchCopier::begin(const Job& job, std::span<ChunkTransfer> batch) {
  StagingSlot& place = (*slots_)[begun_ % 2];
  place.kind = job.kind;
  place.copy_by = job.copy_by;
  place.store = job.store;
  place.source = job.source;
  place.batch = batch;
  place.on_stream = false;
  place.members.clear();
  const bool moves = job.kind != JobKind::kFind;
  const Status staged = try_catch([&] { return place.in_store() || !moves ? ok() : stage(place); });
  if (!staged && under_way() > 0) return false;
  ++begun_;
  for (ChunkTransfer& chunk : batch) {
    chunk.outcome = BlockOutcome::kFailed;
    chunk.status = ok();
  }
  const Status prepared = try_catch([&]() -> Status {
    TORPOR_RETURN_IF_ERROR(usable());
    TORPOR_RETURN_IF_ERROR(staged);
    if (moves) TORPOR_RETURN_IF_ERROR(prepare(place));
    return job.after == nullptr || place.members.empty() ? ok() : job.after->wait_for(device_);
  });
  if (!prepared) {
    fail_all(batch, prepared.error());
  } else if (!place.members.empty() && job.kind != JobKind::kMove) {
    enqueue(place, place.copies);
  }
  return true;
}

// Allocate staging memory for the chunks, each at a multiple of 4096.
Status BatchCopier::stage(StagingSlot& place) {
  if (quarantined_) return ok();
  uint64_t bytes = 0;
  for (const ChunkTransfer& chunk : place.batch) bytes += align_up(chunk.plan->bytes(), kPage);
  const bool kept = place.kept.bytes().size() >= bytes;
  if (!kept && place.staging.bytes().size() < bytes) {
    place.staging = {};
    if (under_way() == 0) (*slots_)[(begun_ + 1) % 2].staging = {};
    TORPOR_ASSIGN_OR_RETURN(place.staging, arena_.allocate(bytes));
  }
  const std::span<std::byte> room = (kept ? place.kept : place.staging).bytes();
  place.host.clear();
  uint64_t at = 0;
  for (const ChunkTransfer& chunk : place.batch) {
    const uint64_t size = chunk.plan->bytes();
    place.host.push_back(room.subspan(at, size));
    at += align_up(size, kPage);
  }
  return ok();
}

// Do everything up to the list of copies. Set the status of each chunk that cannot be copied.
Status BatchCopier::prepare(StagingSlot& place) {
  take_places(place);
  if (place.kind == JobKind::kRestore || place.kind == JobKind::kMove) {
    if (!place.in_store()) read(place);
    for (size_t i = 0; i < place.batch.size(); ++i) {
      if (place.batch[i].status) place.batch[i].status = check(place, i);
    }
  }
  list_copies(place);
  return ok();
}

// Fill `host` with the addresses of the chunks if their bytes lie in an addressable store, and check their sizes.
void BatchCopier::take_places(StagingSlot& place) {
  const bool up = place.kind == JobKind::kRestore || place.kind == JobKind::kMove;
  if (place.in_store()) place.host.clear();
  for (ChunkTransfer& chunk : place.batch) {
    const uint64_t bytes = chunk.plan->bytes();
    if (!up) chunk.saved = {.key = chunk.plan->key, .bytes = bytes, .offset = static_cast<uint64_t>(chunk.slot)};
    if (chunk.saved.bytes != bytes) {
      chunk.status = Error{.code = Code::kIncompatible,
                           .what = fmt::format("{} was saved with {} bytes, not {}", chunk.plan->key.to_string(),
                                               chunk.saved.bytes, bytes),
                           .next_step = "wake it into the engine configuration that saved it"};
    }
    if (!place.in_store()) continue;
    if (up) {
      place.host.push_back(place.memory()->view(chunk.saved));
      continue;
    }
    const Result<std::span<std::byte>> room = place.store->place(chunk.saved);
    if (!room) chunk.status = room.error();
    place.host.push_back(room ? *room : std::span<std::byte>{});
  }
}

void BatchCopier::read(StagingSlot& place) {
  place.parts.clear();
  for (size_t i = 0; i < place.batch.size(); ++i) {
    ChunkTransfer& chunk = place.batch[i];
    if (chunk.status) place.parts.push_back({&chunk.saved, place.host[i], ok(), chunk.key});
  }
  place.from()->get(place.parts);
  size_t part = 0;
  for (ChunkTransfer& chunk : place.batch) {
    if (chunk.status) chunk.status = std::move(place.parts[part++].status);
  }
}

// Return whether the device takes the digests in the pass of the copy. Bytes read from a disk are checked before they
// are copied.
bool BatchCopier::digested_on_the_way(const StagingSlot& place) const {
  if (place.kind == JobKind::kMove || (place.kind == JobKind::kRestore && !place.in_store())) return false;
  return device_.takes_digests();
}

Status BatchCopier::check(const StagingSlot& place, size_t i) const {
  const SavedChunk& saved = place.batch[i].saved;
  if (place.host[i].size() != saved.bytes) {
    return Error{.code = Code::kInternal,
                 .what = fmt::format("{} is not in the {} tier", saved.key.to_string(), place.from()->traits().kind)};
  }
  if (digested_on_the_way(place) || digest_of(place.host[i]) == saved.digest) return ok();
  return wrong_bytes(saved);
}

void BatchCopier::list_copies(StagingSlot& place) {
  std::vector<size_t> members;
  for (size_t i = 0; i < place.batch.size(); ++i) {
    if (place.batch[i].status) members.push_back(i);
  }
  const bool digests = digested_on_the_way(place);
  place.copies.clear();
  place.first_copy.clear();
  place.digests.clear();
  place.digests.resize(digests ? members.size() : 0);
  for (size_t m = 0; m < members.size(); ++m) {
    place.first_copy.push_back(place.copies.size());
    std::byte* host = place.host[members[m]].data();
    for (const DevicePiece& piece : place.batch[members[m]].plan->pieces) {
      place.copies.push_back({piece.address, host, piece.bytes, digests ? &place.digests[m] : nullptr});
      host += piece.bytes;
    }
  }
  place.first_copy.push_back(place.copies.size());
  place.members = std::move(members);  // last: no copy begins while this is empty
}

// Give the copies to the device. From here on they may be running: only prove() may say that they ended.
void BatchCopier::enqueue(StagingSlot& place, std::span<const Copy> copies) {
  place.on_stream = true;
  place.event.reset();
  place.enqueued = try_catch([&] { return device_.copy_async(stream_, place.direction(), copies, place.copy_by); });
  // Even a refused batch may have begun, so its end is waited for in any case.
  Status recorded = try_catch([&]() -> Status {
    TORPOR_ASSIGN_OR_RETURN(place.event, device_.record(stream_));
    return ok();
  });
  if (!recorded) place.event_error = std::move(recorded).error();
}

DrainResult BatchCopier::prove(StagingSlot& place) {
  DrainResult drained{.drain = Drain::kUnproven};
  Status waited = try_catch([&] {
    if (place.event) {
      drained = device_.wait(*place.event);
    } else {
      drained = device_.drain(stream_);
      if (drained.drain == Drain::kCompleted) drained = {Drain::kDrainedWithError, std::move(place.event_error)};
    }
    return ok();
  });
  if (!waited) {
    drained = {Drain::kUnproven, std::move(waited).error()};
    (void)try_catch([&] {  // if this throws too, the copy stays unproven
      if (device_.drain(stream_).drain == Drain::kCompleted) drained.drain = Drain::kDrainedWithError;
      return ok();
    });
  }
  if (drained.drain == Drain::kUnproven) quarantined_ = true;
  return drained;
}

// Copy one chunk of a batch that failed.
void BatchCopier::copy_alone(StagingSlot& place, size_t member, DrainResult& worst) {
  ChunkTransfer& chunk = place.batch[place.members[member]];
  const size_t first = place.first_copy[member];
  const std::span<const Copy> copies = std::span(place.copies).subspan(first, place.first_copy[member + 1] - first);
  const Status ready = try_catch([&]() -> Status {
    TORPOR_RETURN_IF_ERROR(usable());
    if (!place.digests.empty()) place.digests[member] = StreamingDigest();
    return ok();
  });
  if (!ready) {
    chunk.status = copied(ready.error());
    return;
  }
  enqueue(place, copies);
  DrainResult drained = prove(place);
  if (drained.drain == Drain::kUnproven) chunk.outcome = BlockOutcome::kUnproven;
  if (drained.drain != Drain::kCompleted) {
    chunk.status = copied(drained.error);
  } else if (!place.enqueued) {
    chunk.status = copied(place.enqueued.error());
  } else {
    chunk.status = ok();
  }
  if (drained.drain > worst.drain) worst = std::move(drained);
}

DrainResult BatchCopier::end_copies(StagingSlot& place) {
  DrainResult drained = prove(place);
  if (drained.drain == Drain::kCompleted && place.enqueued) return drained;
  if (drained.drain == Drain::kCompleted) drained = {Drain::kDrainedWithError, std::move(place.enqueued).error()};
  const bool unproven = drained.drain == Drain::kUnproven;
  const Status failed = copied(drained.error);
  for (size_t member = 0; member < place.members.size(); ++member) {
    ChunkTransfer& chunk = place.batch[place.members[member]];
    if (unproven) chunk.outcome = BlockOutcome::kUnproven;
    if (unproven || place.members.size() == 1) {
      chunk.status = copied(failed.error());
    } else {
      copy_alone(place, member, drained);
    }
    if (chunk.status) continue;
    const Status named = try_catch([&]() -> Status {
      return chunk.status.error().within(fmt::format("copying {}", chunk.plan->key.to_string()));
    });
    chunk.status = copied(named.error());
  }
  return drained;
}

// Put the bytes from `host` into the store.
void BatchCopier::put(StagingSlot& place) {
  place.parts.clear();
  for (const size_t member : place.members) {
    ChunkTransfer& chunk = place.batch[member];
    if (!chunk.status) continue;
    if (place.kind == JobKind::kMove) chunk.saved.offset = static_cast<uint64_t>(chunk.slot);
    place.parts.push_back({&chunk.saved, place.host[member], ok(), chunk.key});
  }
  place.store->put(place.parts);
  size_t part = 0;
  for (const size_t member : place.members) {
    if (place.batch[member].status) place.batch[member].status = std::move(place.parts[part++].status);
  }
}

void BatchCopier::find(StagingSlot& place) {
  place.parts.clear();
  for (ChunkTransfer& chunk : place.batch) {
    if (chunk.status) place.parts.push_back({&chunk.saved, {}, ok(), chunk.key});
  }
  if (place.parts.empty()) return;
  place.store->find(place.parts);
  size_t part = 0;
  for (ChunkTransfer& chunk : place.batch) {
    if (chunk.status) chunk.status = std::move(place.parts[part++].status);
  }
}

DrainResult BatchCopier::finish() {
  StagingSlot& place = (*slots_)[finished_ % 2];
  DrainResult drained;
  if (place.on_stream) drained = end_copies(place);
  const Status stored = try_catch([&]() -> Status {
    if (place.kind == JobKind::kMove) put(place);
    if (place.kind == JobKind::kFind) find(place);
    if (!place.on_stream) return ok();
    for (size_t m = 0; m < place.members.size(); ++m) {
      ChunkTransfer& chunk = place.batch[place.members[m]];
      if (!chunk.status) continue;
      if (place.kind == JobKind::kRestore) {
        if (!place.digests.empty() && place.digests[m].finish() != chunk.saved.digest)
          chunk.status = wrong_bytes(chunk.saved);
        continue;
      }
      chunk.saved.digest = place.digests.empty() ? digest_of(place.host[place.members[m]]) : place.digests[m].finish();
    }
    if (place.kind == JobKind::kSave && !place.in_store()) put(place);
    return ok();
  });
  if (!stored) fail_all(place.batch, stored.error());
  (void)try_catch([&]() -> Status {
    if (place.from() != nullptr) correct_next_steps(place.batch, place.from()->traits());
    return ok();
  });
  for (ChunkTransfer& chunk : place.batch) {
    if (chunk.outcome == BlockOutcome::kUnproven) continue;
    chunk.outcome = chunk.status ? BlockOutcome::kTransferred : BlockOutcome::kFailed;
  }
  ++finished_;
  return drained;
}

}  // namespace torpor
