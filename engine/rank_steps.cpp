// SPDX-License-Identifier: Apache-2.0
#include "engine/rank_steps.h"

#include <algorithm>

#include <malloc.h>

#include <fmt/core.h>

#include "engine/block_copies.h"
#include "engine/combined_digest.h"
#include "engine/tags.h"

namespace torpor {
namespace {

// While it exists, the caller's ProgressFile counts the bytes of the order's copies, and may cancel them.
class Watched {
 public:
  Watched(BlockingTransfers& transfers, const std::string& progress) : transfers_(transfers) {
    transfers_.watch(ProgressFile::of_caller(progress));
  }
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;
  ~Watched() { transfers_.watch(nullptr); }

 private:
  BlockingTransfers& transfers_;
};

}  // namespace

Result<orders::Describe::Reply> RankSteps::carry_out(const orders::Describe&) {
  orders::Describe::Reply reply;
  images_.describe(reply);
  return reply;
}

Result<orders::Inform::Reply> RankSteps::carry_out(const orders::Inform& order) {
  for (const std::string& tag : order.written) images_.note_write(tag);
  if (!order.committed.empty()) images_.on_moved(order.committed);
  if (const auto& of_checkpoint = order.contents) {
    TORPOR_ASSIGN_OR_RETURN(const std::vector<BlockContent> contents,
                            contents_of(of_checkpoint->blocks, of_checkpoint->versions, of_checkpoint->steps));
    images_.index().checkpoints().note_contents(of_checkpoint->id, of_checkpoint->blocks, contents);
  }
  return orders::Inform::Reply{};
}

Result<orders::Save::Reply> RankSteps::carry_out(const orders::Save& order) {
  using Stage = orders::Save::Stage;
  switch (order.stage) {
    case Stage::kAll: return save_all(order);
    case Stage::kPlan: return saver_.plan(order);
    case Stage::kOpen: return saver_.checkpoint().open(order, named_weights_.watch(writes_of_weights()));
    case Stage::kPrecopy: return saver_.checkpoint().precopy(order);
    case Stage::kStopAndCopy: return stop_and_copy(order);
  }
  return orders::Save::Reply{};
}

// Leave out the tags that this rank does not have. A KV cache that went stays, and makes the save fail: without it the
// blocks of the order would be lost unnoticed.
Result<orders::Save::Reply> RankSteps::save_all(const orders::Save& asked) {
  if (concerns_engine(asked.tags)) TORPOR_RETURN_IF_ERROR(restorer_.nothing_deferred());
  orders::Save order = asked;
  const std::vector<std::string> here = images_.here(asked.tags);
  std::erase_if(order.tags, [&](const std::string& tag) { return !has_tag(here, tag) && !images_.is_kv(tag); });
  TORPOR_ASSIGN_OR_RETURN(orders::Save::Reply saved, save_tags(order));
  // As DigestTags says of such a rank.
  if (has_tag(asked.tags, kWeightsTag) && !has_tag(here, kWeightsTag)) saved.digests[kWeightsTag] = combined_digest({});
  return saved;
}

Result<orders::Save::Reply> RankSteps::save_tags(const orders::Save& order) {
  if (prefault_ != nullptr) prefault_->end();
  const Watched watched(parts_.blocking_transfers, order.progress);
  if (!order.channel.empty()) return save_for_swap(order);
  const bool any = !order.tags.empty();  // with no tag named the allocator would take all
  if (any) TORPOR_RETURN_IF_ERROR(parts_.allocator.begin_save(order.tags));
  Result<orders::Save::Reply> saved = try_catch([&] { return saver_.save(order); });
  if (saved) return saved;
  images_.forget_saved(order.tags);
  if (any) TORPOR_RETURN_IF_ERROR(parts_.allocator.cancel_save(order.tags));
  give_back_unused();
  return saved;
}

// After an error, Undo of kReleasedPages acquires the released pages again, once the other engine has none of them.
Result<orders::Save::Reply> RankSteps::save_for_swap(const orders::Save& order) {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<SwapChannel> channel, SwapChannel::open(order.channel));
  TORPOR_RETURN_IF_ERROR(nothing_moves());
  if (!order.tags.empty()) TORPOR_RETURN_IF_ERROR(parts_.allocator.begin_save(order.tags));
  return try_catch([&] { return saver_.save_for_swap(order, *channel); });
}

Result<orders::Save::Reply> RankSteps::stop_and_copy(const orders::Save& order) {
  TORPOR_ASSIGN_OR_RETURN(orders::Save::Reply reply, saver_.checkpoint().stop_and_copy(order));
  if (std::optional<std::string> digest = saver_.checkpoint().take_named_digest())
    named_weights_.note_watched(std::move(*digest));
  if (const auto weights = reply.digests.find(kWeightsTag); weights != reply.digests.end() && named_weights_.any()) {
    TORPOR_ASSIGN_OR_RETURN(orders::DigestTags::Reply named, digest_named(order.as_proven));
    weights->second = std::move(named.digests.at(kWeightsTag));
    reply.digested_bytes += named.bytes;
  }
  return reply;
}

Result<orders::PollSave::Reply> RankSteps::carry_out(const orders::PollSave& order) {
  TORPOR_ASSIGN_OR_RETURN(orders::PollSave::Reply reply, saver_.checkpoint().poll(order));
  if (order.stop) give_back_unused();
  return reply;
}

Result<orders::Undo::Reply> RankSteps::carry_out(const orders::Undo& order) {
  using What = orders::Undo::What;
  switch (order.what) {
    case What::kReleasedPages: TORPOR_RETURN_IF_ERROR(saver_.reacquire_pages(order.tags)); return orders::Undo::Reply{};
    case What::kSave:
      TORPOR_RETURN_IF_ERROR(cancel_save(order.tags));
      images_.forget_saved(order.tags);
      break;
    case What::kRestore:
      if (concerns_engine(order.tags)) restorer_.cancel_deferred();
      const std::vector<std::string> tags = images_.asleep_of(order.tags);
      Status cancelled;
      if (!tags.empty() || order.tags.empty()) cancelled = parts_.allocator.cancel_restore(tags);
      parts_.transfers.release_staging();
      images_.reserve_staging();  // the next wake needs it
      TORPOR_RETURN_IF_ERROR(cancelled);
      break;
  }
  give_back_unused();
  return orders::Undo::Reply{};
}

// It allocates only if this rank does not have all tags: a save that failed for lack of memory can be undone.
Status RankSteps::cancel_save(const std::vector<std::string>& tags) {
  if (tags.empty()) return ok();  // the allocator would take all
  const Status cancelled = parts_.allocator.cancel_save(tags);
  if (cancelled || cancelled.error().code != Code::kNotFound) return cancelled;
  const std::vector<std::string> here = images_.here(tags);
  return here.empty() ? ok() : parts_.allocator.cancel_save(here);
}

void RankSteps::set_foreign(const std::string& tag, bool foreign) {
  if (foreign)
    foreign_.insert(tag);
  else
    foreign_.erase(tag);
}

// An order without tags is an engine's.
bool RankSteps::concerns_engine(const std::vector<std::string>& tags) const {
  return tags.empty() ||
         std::any_of(tags.begin(), tags.end(), [this](const std::string& tag) { return !foreign_.contains(tag); });
}

// Called before memory of the engine is released.
Status RankSteps::nothing_moves() {
  TORPOR_RETURN_IF_ERROR(restorer_.nothing_deferred());
  saver_.checkpoint().stop();
  // Of KV blocks that the engine offloads; all that counts is that none is left. Others move between stores.
  (void)parts_.transfers.drain(true);
  return parts_.transfers.usable();
}

Result<orders::Detach::Reply> RankSteps::carry_out(const orders::Detach& order) {
  const bool of_engine = concerns_engine(order.tags);
  TORPOR_RETURN_IF_ERROR(of_engine ? nothing_moves() : parts_.transfers.usable());
  orders::Detach::Reply reply;
  const std::vector<std::string> tags = images_.here(order.tags);
  for (const RegionInfo& region : parts_.allocator.regions()) {
    if (has_tag(tags, region.tag)) reply.bytes += region.reserved_bytes;
  }
  std::set<std::string, std::less<>> away(tags.begin(), tags.end());
  const bool any = !tags.empty();  // with no tag named the allocator would take all
  if (Status detached = any ? parts_.allocator.detach(tags) : ok(); !detached) {
    // The device may have kept memory of one tag, which is broken then, and have released that of others.
    std::vector<std::string> gone;
    for (const auto& [tag, state] : parts_.allocator.states()) {
      if (state == RegionState::kDetached && has_tag(tags, tag)) gone.push_back(tag);
    }
    images_.on_detached(gone, {gone.begin(), gone.end()});
    return std::move(detached).error();
  }
  images_.on_detached(tags, std::move(away));
  if (of_engine) {
    saver_.on_detached();
    request_images_.on_detached();
  }
  give_back_unused();
  ::malloc_trim(0);  // the engine has just freed what it derived from the content
  return reply;
}

Result<orders::Restore::Reply> RankSteps::carry_out(const orders::Restore& order) {
  if (!order.checkpoint) return restore_tags(order);
  TORPOR_RETURN_IF_ERROR(restorer_.nothing_deferred());
  const Watched watched(parts_.blocking_transfers, order.progress);
  images_.forget_blocks();
  Result<orders::Restore::Reply> reply = try_catch([&] { return restorer_.load_blocks(order); });
  give_back_unused();
  return reply;
}

Result<orders::Restore::Reply> RankSteps::restore_tags(const orders::Restore& order) {
  const std::map<std::string, RegionState> states = parts_.allocator.states();
  const auto kv = states.find(kKvCacheTag);
  // The deferred blocks are those of a wake that was undone while this rank did not hear of it.
  if (kv != states.end() && kv->second != RegionState::kAttached) restorer_.cancel_deferred();
  if (concerns_engine(order.tags)) TORPOR_RETURN_IF_ERROR(restorer_.nothing_deferred());
  const std::vector<std::string> tags = images_.asleep_of(order.tags);
  if (!tags.empty() || order.tags.empty()) {  // with no tag named the allocator would take all
    if (order.channel.empty()) TORPOR_RETURN_IF_ERROR(has_room_for(tags));
    TORPOR_RETURN_IF_ERROR(parts_.allocator.begin_attach(tags));
  }
  const Watched watched(parts_.blocking_transfers, order.progress);
  return restorer_.restore(order);
}

// Check before anything is copied, as far as the device knows. If other processes take memory meanwhile, a region fails
// later.
Status RankSteps::has_room_for(const std::vector<std::string>& tags) const {
  uint64_t needed = 0;
  for (const RegionInfo& region : parts_.allocator.regions()) {
    const bool comes = region.state == RegionState::kDetached && (tags.empty() || has_tag(tags, region.tag));
    if (comes) needed += region.reserved_bytes;
  }
  const DeviceMemoryInfo device = parts_.device.info();
  const std::optional<uint64_t> free = device.free_bytes();
  if (!free || needed <= *free) return ok();
  return Error{.code = Code::kResourceExhausted,
               .what = fmt::format("{} bytes of device memory are needed to wake, {} of {} are free", needed, *free,
                                   device.capacity_bytes),
               .next_step = "free device memory"};
}

Result<orders::PollRestore::Reply> RankSteps::carry_out(const orders::PollRestore& order) {
  orders::PollRestore::Reply reply = restorer_.poll(order);
  if (reply.ended) give_back_unused();
  return reply;
}

Result<orders::Finish::Reply> RankSteps::carry_out(const orders::Finish& order) {
  orders::Finish::Reply reply;
  TORPOR_RETURN_IF_ERROR(restorer_.finish(order.tags, order.keep_backup));
  give_back_unused();
  return reply;
}

Result<orders::DigestTags::Reply> RankSteps::carry_out(const orders::DigestTags& order) {
  TORPOR_ASSIGN_OR_RETURN(orders::DigestTags::Reply reply,
                          order.named ? digest_named(order.as_proven) : images_.digest(order));
  give_back_unused();
  return reply;
}

Result<orders::WriteTestFile::Reply> RankSteps::carry_out(const orders::WriteTestFile& order) {
  return saver_.checkpoint().write_test_file(order);
}

// Requests that leave and come while the engine serves need its KV cache in place.
Status RankSteps::kv_is_attached() const {
  const std::map<std::string, RegionState> states = parts_.allocator.states();
  const auto kv = states.find(kKvCacheTag);
  if (kv != states.end() && kv->second == RegionState::kAttached) return restorer_.nothing_deferred();
  return Error{
      .code = Code::kFailedPrecondition,
      .what = kv == states.end() ? "this rank has no KV cache" : fmt::format("the KV cache is {}", name(kv->second)),
      .next_step = "wake the engine first"};
}

Result<orders::Extract::Reply> RankSteps::carry_out(const orders::Extract& order) {
  TORPOR_RETURN_IF_ERROR(kv_is_attached());
  Result<orders::Extract::Reply> extracted =
      try_catch([&] { return request_images_.extract(order, images_.chunks().kv_layout()); });
  give_back_unused();
  return extracted;
}

Result<orders::ReadImage::Reply> RankSteps::carry_out(const orders::ReadImage& order) {
  Result<orders::ReadImage::Reply> read =
      try_catch([&] { return request_images_.read(order, images_.chunks().kv_layout()); });
  give_back_unused();
  return read;
}

Result<orders::SaveImage::Reply> RankSteps::carry_out(const orders::SaveImage& order) {
  return try_catch([&] { return request_images_.save(order); });
}

Result<orders::VerifyImage::Reply> RankSteps::carry_out(const orders::VerifyImage& order) {
  return request_images_.verify(order);
}

Result<orders::Admit::Reply> RankSteps::carry_out(const orders::Admit& order) {
  TORPOR_RETURN_IF_ERROR(kv_is_attached());
  Result<orders::Admit::Reply> admitted =
      try_catch([&] { return request_images_.admit(order, images_.chunks().kv_layout()); });
  give_back_unused();
  return admitted;
}

Result<orders::DropImage::Reply> RankSteps::carry_out(const orders::DropImage& order) {
  const orders::DropImage::Reply dropped = request_images_.drop(order);
  give_back_unused();
  return dropped;
}

Result<orders::CopyBlocks::Reply> RankSteps::carry_out(const orders::CopyBlocks& order) {
  TORPOR_RETURN_IF_ERROR(kv_is_attached());
  return try_catch([&] { return copy_blocks_within(parts_.device, images_.chunks().kv_layout(), order); });
}

void RankSteps::before_free(const RegionInfo& region) {
  const bool holds_blocks = images_.chunks().holds_blocks(region);
  if (region.tag == kWeightsTag || holds_blocks) saver_.checkpoint().stop();
  if (holds_blocks) restorer_.end_deferred();
}

void RankSteps::on_packed_store(std::weak_ptr<HostStore> store, uint64_t bytes) {
  packed_store_ = std::move(store);
  packed_store_staging_ = bytes;
}

void RankSteps::give_back_unused() noexcept {
  (void)try_catch([this]() -> Status {
    parts_.transfers.release_staging();
    if (!images_.needs_staging()) {
      parts_.transfers.let_staging_go();
      if (!packed_store_.expired()) (void)parts_.transfers.keep_staging(packed_store_staging_);  // of what was let go
    }
    parts_.arena.trim(parts_.arena_keep_bytes, request_images_.room_for_next());  // what backs up stays
    return ok();
  });
}

Result<orders::DigestTags::Reply> RankSteps::digest_named(bool as_proven) {
  if (!named_weights_.any()) return orders::DigestTags::Reply{};
  // A tag that came back without content was not written; yet its bytes are others.
  as_proven = as_proven && !images_.index().missing(kWeightsTag);
  return named_weights_.digest(as_proven, writes_of_weights());
}

uint64_t RankSteps::writes_of_weights() {
  orders::Describe::Reply described;
  images_.describe(described);
  return described.writes[kWeightsTag];
}

}  // namespace torpor
