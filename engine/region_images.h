// SPDX-License-Identifier: Apache-2.0
// RegionImages: the images of a rank's tags. The image of a tag is what is saved of it while its memory is away: chunks
// in the arena, or in a checkpoint's chunk file. With a KV layout one tag is saved block by block, only the blocks that
// are named; every other tag region by region, whole.
//
// An image may be kept after a wake. A clean one is still equal to the content of its attached tag: it is not copied
// again. That of the weights is believed to be until somebody says that they were written, or it is noticed; that of
// any other tag, which anybody writes at any time, only where the content was just read (compare()). Of KV blocks each
// is kept by itself, by its version (engine/content_index.h).
//
// All bytes of a sleep, a wake or a digest go through here. Owner: RankMemory; its lock is held at every call.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "allocator/host_arena.h"
#include "allocator/sleep_allocator.h"
#include "base/file_system.h"
#include "base/swap_channel.h"
#include "checkpoint/checkpoint.h"
#include "engine/content_index.h"
#include "engine/late_blocks.h"
#include "engine/rank_orders.h"
#include "kvcache/kv_layout.h"
#include "offload/disk_tier.h"
#include "offload/host_store.h"
#include "offload/host_tier.h"
#include "offload/transfer_engine.h"

namespace torpor {

class RankRestorer;
class RestoreGate;
class WriteBehind;

// Where the content of a tag is stored.
struct StoredTag {
  std::string tag;
  std::string directory;    // of the checkpoint
  uint64_t generation = 0;  // that it has
  SealId id{};
};
struct LoadedTag {
  uint64_t bytes = 0;
  std::string digest;  // as DigestTags says it
};

class RegionImages {
 public:
  struct Parts {  // all but the key outlive the images
    DeviceMemory& device;
    SleepAllocator& allocator;
    HostArena& arena;
    TransferEngine& transfers;
    FileSystem& file_system;
    int32_t rank = 0;
    bool keep_backup = false;         // of tags without blocks
    uint64_t retain_kv_bytes = 0;     // of blocks: most
    Codec host_codec = Codec::kNone;  // of chunks in the arena
    std::string spill_dir;            // for what has no room in the arena; empty: there is none
    std::shared_ptr<const Key> key;   // of sealed files; null: there is none
    bool encrypt = false;             // what is spilled
    uint64_t spill_staging_bytes = 0;
    uint64_t late_job_bytes = 0;
    bool late_thread = false;
    bool own_threads = true;  // off: a wake maps all regions before it copies
  };
  struct Image {
    std::unique_ptr<HostTier> host;  // null: in a chunk file
    std::string directory;           // of the chunk file
    std::vector<SavedChunk> chunks;
    // With `host`: so many of the first chunks are there, the others in a file without a name.
    size_t in_host = 0;
    std::unique_ptr<Tier> spilled;
    HostArena::Span staging;             // kept free for bringing those back
    std::vector<BlockContent> contents;  // of blocks in the arena: of each chunk
    uint64_t reused_bytes = 0;           // not copied by the sleep that made it
    bool kept = false;                   // since a wake
    bool clean = false;                  // kept, and equal to the content
    uint64_t bytes() const;              // of the content
  };
  using Images = std::map<std::string, Image, std::less<>>;  // by tag

  explicit RegionImages(Parts parts);
  ~RegionImages();

  // From now on `tag` holds KV blocks laid out like this.
  Status set_kv_layout(std::string tag, KvLayout layout);
  const KvLayout& kv_layout() const { return kv_layout_; }  // merged
  // Blocks of this layout, that orders may name by their slots there (orders::Save::host_slots).
  void set_host_store(std::weak_ptr<HostStore> store) { index_.set_host_store(std::move(store)); }

  // The tag's content is another one.
  void note_write(std::string_view tag);
  void invalidate_digest(std::string_view tag);   // it may be
  void describe(orders::Describe::Reply& reply);  // looks for writes that nobody told of
  void on_allocated(std::string_view tag);        // a new region: it is in no image
  void before_free(const RegionInfo& region);     // nothing reads or writes it any more
  void on_freed(const RegionInfo& region);

  // Content -> images. Clean ones in the arena stand as they are. After an error call forget_saved().
  Result<orders::Save::Reply> save(const orders::Save& order);
  Result<orders::LeaveSign::Reply> leave_sign(const orders::LeaveSign& order) const;
  Result<orders::PlanSave::Reply> plan(const orders::Save& order) const;
  void forget_saved(const std::vector<std::string>& tags);  // images that are not kept, the content is there still
  // As save(), into the arena; the memory of what is safe there goes page by page, for another engine
  // (region_images_swap.cpp). After an error the images are as far as they came, for take_back(), then forget_saved().
  Result<orders::Save::Reply> save_giving(const orders::Save& order, SwapChannel& room);
  Status take_back(const std::vector<std::string>& tags);
  // Blocks were written by others than the engine: nobody has their content.
  void forget_blocks() noexcept {
    index_.forget_blocks();
    if (late_ != nullptr) late_->keep = false;
  }
  // Nothing is clean without content. `away`: the same tags; takes no memory.
  void on_detached(const std::vector<std::string>& tags, std::set<std::string, std::less<>> away);
  // Of tags that are to come back: those of which a region is asleep. The regions of the others were freed meanwhile,
  // or all that is there of them was allocated since.
  std::vector<std::string> asleep_of(const std::vector<std::string>& tags) const;
  // Attaches the tags' regions and copies their images up, but for late blocks, which begin to come.
  Result<orders::Restore::Reply> restore(const orders::Restore& order);
  // The tags are awake; one that is already stays so. Without `keep` no image is kept. That of late
  // blocks stays until all have ended and were told.
  Status finish(const std::vector<std::string>& tags, bool keep);

  // Late blocks (region_images_late.cpp).
  orders::Arrivals::Reply arrivals(const orders::Arrivals& order);
  Status nothing_late() const;  // kFailedPrecondition while some are
  void cancel_late() noexcept;  // nothing is written any more; the image stays
  void end_late() noexcept;     // the same, and the image goes

  Result<orders::DigestTags::Reply> digest(const orders::DigestTags& order);
  // KV blocks of a committed checkpoint -> attached memory, but for late ones, which begin to come.
  Result<orders::LoadBlocks::Reply> load_blocks(const orders::LoadBlocks& order);
  // What the engine calls the contents that load_blocks() has brought.
  Status tell_contents(const orders::TellContents& order);
  // What a committed checkpoint has of a tag -> its attached regions, which must be the same. Nothing is written before
  // that is known; a failure after it leaves the tag without content.
  Result<LoadedTag> load_tag(const StoredTag& stored);
  // The digest that load_tag() proved, unless the tag was written since.
  std::optional<std::string> proven(const std::string& tag);

  // A checkpoint that is written while the engine serves (engine/write_behind.h); one at a time.
  Result<orders::OpenBehind::Reply> open_behind(const orders::OpenBehind& order);
  Result<orders::CopyAhead::Reply> copy_ahead(const orders::CopyAhead& order);
  Result<orders::SaveBehind::Reply> save_behind(const orders::SaveBehind& order);
  Result<orders::LookBehind::Reply> look_behind(const orders::LookBehind& order);
  void stop_behind() noexcept;  // nothing reads the tags' memory any more

  void on_moved(const std::string& directory);  // the checkpoint under construction was committed to this path

  // Reads the content of the tags; kept images of another content go, those of the same are clean until distrust().
  Status compare(const std::vector<std::string>& tags);
  void distrust() noexcept;                       // but those of the weights
  const Image* find(std::string_view tag) const;  // null: there is none
  // What was saved of a region, from `offset` on. kNotFound: nothing is, or it does not lie in the arena.
  Status read_saved(const RegionInfo& region, uint64_t offset, std::span<std::byte> out) const;
  bool spills() const { return !parts_.spill_dir.empty(); }  // what has no room in the arena
  // What so many bytes of a tag will take of the arena: where they are packed, about so much.
  uint64_t held_for(std::string_view tag, uint64_t bytes) const;
  bool needs_staging() const;  // kept for a wake (TransferEngine::keep_staging())
  // Takes out the images of these tags, for put_back() or to be dropped. Neither needs memory.
  Images take(const std::vector<std::string>& tags) noexcept;
  void put_back(Images images) noexcept { images_.merge(images); }
  void fill(RankLedger& ledger) const;
  void abandon() noexcept;  // copies may still run: what is in the arena is leaked

 private:
  static constexpr uint64_t kRegionChunk = 4ull << 20;
  struct Portion;

  Result<ChunkKey> key_of(int32_t block) const;
  Result<ChunkPlan> plan_of(int32_t block) const;
  bool holds_blocks(const RegionInfo& region) const;
  Result<bool> is_whole(const std::string& tag) const;
  Result<std::vector<ChunkPlan>> plans_of(const std::string& tag, const std::vector<int32_t>& blocks) const;
  Result<std::vector<ChunkPlan>> plans_for(const std::vector<SavedChunk>& chunks) const;
  Result<orders::Save::Reply> save_to_arena(const orders::Save& order, uint64_t unused);
  Result<std::vector<Portion>> portions_of(const orders::Save& order, bool take) const;
  Status fill_blocks(Portion& portion, const orders::Save& order, bool take) const;
  bool can_borrow(const Portion& portion, const HostPlace& place) const;
  void borrow(Portion& portion, const HostStore::Stored& stored, int32_t block,
              const std::shared_ptr<HostStore>& store) const;
  void place(std::vector<Portion>& portions, uint64_t going, uint64_t coming) const;
  uint64_t staging_for(uint64_t padded_bytes, uint64_t largest) const;
  uint64_t batch_staging(const std::vector<Portion>& portions) const;
  void learn(const std::string& tag, std::span<const SavedChunk> chunks);
  Status spill(Portion& portion);
  Status copy_to_host(Portion& portion);
  void retain(Image& image) noexcept;
  Result<orders::Save::Reply> save_to_disk(const orders::Save& order);
  struct Storing;
  using BaseRecord = std::function<const SavedChunk*(const ChunkKey&)>;  // null: it has none
  Result<orders::PlanSave::Reply> plan_to_disk(const orders::Save& order) const;
  Status look_up(Storing& storing, const BaseRecord& in_base, const orders::Save& order,
                 const std::vector<BlockContent>& contents) const;
  Status look_up_blocks(Storing& storing, const BaseRecord& in_base, const orders::Save& order,
                        const std::vector<BlockContent>& contents) const;
  Status look_up_tag(Storing& storing, const BaseRecord& in_base, const std::string& tag, bool as_proven) const;
  Result<WriteBehind*> behind_of(const orders::Save& save);
  Result<Storing> look_behind(const orders::Save& save, const std::vector<BlockContent>& contents,
                              WriteBehind& behind) const;
  Status carry(Storing& storing, const BaseRecord& in_base, const orders::Save& order) const;
  Result<std::vector<ChunkPlan>> plans_at(const Storing& storing, std::span<const size_t> places) const;
  Status write(Storing& storing, std::span<const size_t> places, RankWriter& writer);
  // That which the controller, or the first rank, has opened at this path.
  Result<Checkpoint> open_same(const std::string& path, uint64_t generation, const SealId& id) const;
  Status fill_tag(const std::string& tag, std::vector<SavedChunk> chunks, Tier& source);
  Result<const RankSummary*> own_summary(const Checkpoint& checkpoint) const;
  struct Giving {  // of a tag: what is to be copied, by address
    std::string tag;
    std::vector<ChunkPlan> plans{};
    std::vector<BlockContent> contents{};  // of these, where they are blocks
  };
  Result<std::vector<Giving>> prepare_giving(const orders::Save& order, orders::Save::Reply& reply);
  Result<std::vector<Giving>> make_room(const orders::Save& order, orders::Save::Reply& reply);
  Result<std::unique_ptr<RestoreGate>> gate_of(const std::vector<std::string>& tags, SwapChannel* channel) const;
  Status restore_image(Image& image, RankRestorer& restorer);
  Result<std::unique_ptr<DiskTier>> open_image(const Image& image) const;
  Status load_all_but_late(const std::vector<SavedChunk>& blocks, const std::vector<int32_t>& late,
                           std::unique_ptr<Tier> tier, orders::LoadBlocks::Reply& reply);
  bool stays_for_late(bool keep) noexcept;
  Status restore_spilled(Image& image, std::span<const SavedChunk> chunks, std::vector<ChunkPlan> plans,
                         RankRestorer& restorer);
  struct Halves {  // of what is saved: copied before the engine runs, and behind it, in the order of need
    std::vector<SavedChunk> first{}, first_spilled{};
    std::vector<SavedChunk> late{}, late_spilled{};
  };
  struct Late {
    std::shared_ptr<Tier> disk{};  // they come from, if it is not an image's
    std::vector<LateBlocks::Part> parts{};
    uint64_t bytes = 0;
    bool of_image = false;
    bool keep = false;                     // the image, as finish() was told
    std::unique_ptr<LateBlocks> blocks{};  // last: it ends first
  };
  static Halves halves_of(std::span<const SavedChunk> chunks, size_t in_host, const std::vector<int32_t>& late);
  Status add_late(Late& late, std::vector<SavedChunk> chunks, Tier& source, uint64_t job_bytes, bool alone) const;
  Result<Late> restore_early(Image& image, const std::vector<int32_t>& late, RankRestorer& restorer);
  uint64_t begin_late(Late late);
  void forget_clean(std::string_view tag);

  const Parts parts_;
  std::string kv_tag_;
  KvLayout kv_layout_;
  Images images_;
  std::set<std::string, std::less<>> away_;  // tags, from the time their memory goes until they are awake
  std::map<std::string, uint64_t, std::less<>> packed_shares_;  // by tag: what its chunks took of the arena, of 1024
  ContentIndex index_;
  std::unique_ptr<Late> late_;           // last: what it copies is in the others
  bool pages_gone_ = false;              // for another engine, and not taken back with their content
  std::unique_ptr<WriteBehind> behind_;  // null: none; last: it reads what all above have
};

}  // namespace torpor
