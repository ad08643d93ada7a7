// SPDX-License-Identifier: Apache-2.0
// The orders of the controller to the memory of each worker rank, and what a rank answers. Values in bytes, so that
// they cross processes; a failure is a value in the answer, so that the controller sees the outcome of every rank.
//
// An order is its number in RankOrder, then its fields: both ends are of the same version of torpor. Bytes are hostile
// until decoded (checkpoint/bounded_archive.h).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/status.h"
#include "base/value.h"
#include "checkpoint/rank_writer.h"
#include "engine/late_blocks.h"

namespace torpor {

// What a rank holds, in bytes.
struct RankLedger {
  struct Tag {
    std::string state;
    uint64_t region_bytes = 0;    // as asked for
    uint64_t physical_bytes = 0;  // device memory behind it now
    uint64_t backup_host_bytes = 0;
    uint64_t backup_disk_bytes = 0;
    uint64_t reused_bytes = 0;  // of the backup: what the last sleep found there, and did not copy
  };
  std::map<std::string, Tag> tags;
  uint64_t device_physical_bytes = 0;
  uint64_t device_capacity_bytes = 0;  // 0: no limit of its own
  // By anybody, by the device's own count; 0: it keeps none. Less the physical bytes: the unexplained rest.
  uint64_t device_used_bytes = 0;
  uint64_t arena_held_bytes = 0;
  uint64_t arena_used_bytes = 0;
  uint64_t arena_budget_bytes = 0;
  uint64_t arena_unpinned_bytes = 0;  // held, but the device would not pin it
  // How each chunk that the transfer engine was given since the start ended: pieces of regions, also those of which
  // only a digest was taken, and KV blocks.
  std::map<std::string, uint64_t> chunks_by_outcome;
  uint64_t process_resident_bytes = 0;         // VmRSS
  uint64_t process_resident_region_bytes = 0;  // the part of it that is device memory without a GPU
};

// Each order is all or nothing on its rank; `kName` is for people. RankMemory::carry_out() does the work.
namespace orders {

struct Describe {
  static constexpr std::string_view kName = "describe";
  struct Reply {
    RankLedger ledger;
    uint64_t bytes_per_block = 0;
    uint32_t num_blocks = 0;                      // KV blocks that there are
    std::map<std::string, uint64_t> writes;       // tag -> how often it was seen to have other content
    std::vector<std::string> without_content;     // tags that came back empty and were not written since
    std::map<std::string, std::string> proven{};  // tag -> digest of its content, where that is known without reading
  };
};

// The content of these tags is another one: what is backed up of it does not hold any more.
struct Written {
  static constexpr std::string_view kName = "written";
  struct Reply {};
  std::vector<std::string> tags;
};

// Content -> backup.
struct Save {
  static constexpr std::string_view kName = "save";
  struct Reply {
    uint64_t bytes = 0;                          // copied
    uint64_t compacted_bytes = 0;                // of these: unchanged, see RankWriter::sparse()
    uint64_t reused_bytes = 0;                   // backed up before, or linked, and not read
    uint64_t spilled_bytes = 0;                  // of the copied ones: to a file, for want of room in the arena
    RankSummary saved;                           // to disk: for the manifest
    std::map<std::string, std::string> digests;  // of tags without blocks, where it is known: as DigestTags says it
  };
  std::vector<std::string> tags;
  std::vector<int32_t> blocks;   // of the KV cache, the most needed first
  std::vector<uint64_t> stamps;  // KvBlock::stamp of each of them, or empty
  uint64_t steps = 0;            // KvSnapshot::steps
  std::string directory;         // of the checkpoint under construction; empty: into the arena
  RankWriting writing;           // to disk: how
  bool as_proven = false;        // to disk: as DigestTags
  // To disk: tags that stay as they are; the checkpoint has their content only where the base has it already.
  std::vector<std::string> carried{};
  // Into the arena: of each block, the slot of the rank's host store that has its bytes and keeps them until Finish or
  // CancelSave; -1: none. Or empty.
  std::vector<int32_t> host_slots{};
  std::string progress{};  // path of a ProgressFile that is told what is copied, and may cancel it; or empty
  // Into the arena: path of a SwapChannel, or empty. With it the memory of what is copied goes page by page, for
  // another engine; what fails then leaves the tags saving, and TakeBack follows.
  std::string room{};
};

// What Save into the arena would do now; with a base in `writing`, into a checkpoint. Changes nothing.
struct PlanSave {
  static constexpr std::string_view kName = "plan_save";
  struct Reply {
    std::map<std::string, uint64_t> copied_bytes;  // by tag
    uint64_t reused_bytes = 0;
    uint64_t spilled_bytes = 0;
  };
  Save save;
};

// Undoes Save.
struct CancelSave {
  static constexpr std::string_view kName = "cancel_save";
  struct Reply {};
  std::vector<std::string> tags;
};

// After Save with `room`, before CancelSave, when the other engine has none of it any more: what went is there again.
// Nothing happens where nothing went.
struct TakeBack {
  static constexpr std::string_view kName = "take_back";
  struct Reply {};
  std::vector<std::string> tags;
};

// The memory of the tags goes.
struct Detach {
  static constexpr std::string_view kName = "detach";
  struct Reply {
    RankLedger ledger;
    uint64_t bytes = 0;  // of device memory given back
  };
  std::vector<std::string> tags;
};

// Fresh memory comes under the same addresses, region by region; into what is there goes the backup, verified. Whoever
// gets an error sends CancelRestore: part of the memory may have come.
struct Restore {
  static constexpr std::string_view kName = "restore";
  struct Reply {
    uint64_t bytes = 0;                        // copied
    std::vector<std::string> without_content;  // tags that came back empty: nothing was saved of them
    uint64_t late_bytes = 0;                   // still on their way
  };
  std::vector<std::string> tags;
  std::string progress{};  // as in Save
  // KV blocks that come behind all others, in this order, when the order has been answered already; Arrivals follows.
  std::vector<int32_t> late{};
  std::string room{};  // path of a SwapChannel, or empty: memory is taken as another engine gives it. Without `late`
};

// Undoes Restore; backups stay.
struct CancelRestore {
  static constexpr std::string_view kName = "cancel_restore";
  struct Reply {};
  std::vector<std::string> tags;
};

// Ends a wake; may be repeated.
struct Finish {
  static constexpr std::string_view kName = "finish";
  struct Reply {
    RankLedger ledger;
  };
  std::vector<std::string> tags;
  bool keep_backup = false;  // also of KV blocks, where the options allow it
};

// Reads the content of the tags; of those that are detached, takes the digests of their backups. With `as_proven`, a
// tag that was read before, or filled by a load, and that nobody was seen to write since, is not read.
struct DigestTags {
  static constexpr std::string_view kName = "digest";
  struct Reply {
    uint64_t bytes = 0;                          // read
    std::map<std::string, std::string> digests;  // tag -> of its content
  };
  std::vector<std::string> tags;
  bool as_proven = false;
  // Only of what the owner has named of the weights (RankMemory::name_weights), wherever it lies; nothing of other
  // tags, and where nothing was named.
  bool named = false;
};

// KV blocks of a committed checkpoint -> attached memory, verified. Each rank reads its own refs there.
struct LoadBlocks {
  static constexpr std::string_view kName = "load_blocks";
  struct Reply {
    RankLedger ledger;
    uint64_t bytes = 0;  // copied
    uint64_t late_bytes = 0;
  };
  std::string directory;
  // The checkpoint that the controller has opened there: a rank that finds another one refuses.
  uint64_t generation = 0;
  SealId id{};
  std::string progress{};  // as in Save
  // Of each number that a block has in the checkpoint, the one that it gets, or -1: it stays there. Empty: the same.
  std::vector<int32_t> numbers{};
  std::vector<int32_t> late{};  // as in Restore; by the numbers that they get
};

// What has become of late blocks. May be repeated.
struct Arrivals {
  static constexpr std::string_view kName = "arrivals";
  struct Reply {
    uint64_t first = 0;  // so many were told before
    std::vector<LateArrival> arrivals;
    std::string why;     // the first was lost, if one was
    bool ended = false;  // all were told before, and what they came from is given back
  };
  std::vector<uint64_t> seen;  // of each rank: so many were told
  LateWait wait = LateWait::kNone;
  bool cancel = false;             // what has not begun is lost
  std::vector<int32_t> wanted{};   // they come next
  std::vector<int32_t> skipped{};  // nobody wants them any more
};

// Of blocks that LoadBlocks has brought from the checkpoint `id`, and that nobody has written since: what the engine
// calls their contents from now on.
struct TellContents {
  static constexpr std::string_view kName = "tell_contents";
  struct Reply {};
  SealId id{};
  std::vector<int32_t> blocks;
  std::vector<uint64_t> stamps;  // as in Save
  uint64_t steps = 0;
};

// A checkpoint that is written while the engine serves: OpenBehind, CopyAhead, SaveBehind, each once LookBehind says
// that what the one before has left to be done in the background has ended; LookBehind with `stop` at the end.
//
// Its files are made, in the background; and the digest of weights that are not known is taken.
struct OpenBehind {
  static constexpr std::string_view kName = "open_behind";
  struct Reply {};
  std::string directory;  // of the checkpoint under construction
  RankWriting writing;
  std::string progress{};  // as in Save; of all that is done in the background
};

// Between two steps: of the blocks of `save`, those with a stamp that the base has not are written, in the background.
struct CopyAhead {
  static constexpr std::string_view kName = "copy_ahead";
  struct Reply {
    uint64_t bytes = 0;  // to be written
  };
  Save save;  // as for SaveBehind
};

// While the engine stands still: blocks that were not copied ahead, or are others by now, go to host memory; from there
// into the file in the background, which is then made safe. And DigestTags of the tags that are carried.
struct SaveBehind {
  static constexpr std::string_view kName = "save_behind";
  struct Reply {
    uint64_t bytes = 0;                          // copied now
    uint64_t digested_bytes = 0;                 // read for the digests
    std::map<std::string, std::string> digests;  // tag -> of its content
  };
  Save save;  // the tag with blocks first, without the weights; `directory` and `writing` as in OpenBehind
};

// How far it is; its errors are this order's. `wait`: answers when it has ended.
struct LookBehind {
  static constexpr std::string_view kName = "look_behind";
  struct Reply {
    bool ended = false;
    Save::Reply saved;  // after SaveBehind
  };
  bool wait = false;
  bool stop = false;  // it ends now, and is forgotten
};

// Whether this rank sees the directory of a checkpoint under construction, before any saves (checkpoint/rank_writer.h).
struct LeaveSign {
  static constexpr std::string_view kName = "leave_sign";
  struct Reply {
    std::string host;  // of this rank
  };
  std::string directory;
};

// Copy KV blocks of requests that are about to leave the engine into a new image in host memory
// (engine/rank_images.h). Each gets a digest, and the device's bytes are compared with it once more.
struct Extract {
  static constexpr std::string_view kName = "extract";
  struct Reply {
    uint64_t bytes = 0;
  };
  std::string image;            // its id; no other image of this rank has it
  std::vector<int32_t> blocks;  // the image has them in this order
};

// As Extract, of KV blocks that a committed checkpoint has. Each rank reads its own refs there.
struct ReadImage {
  static constexpr std::string_view kName = "read_image";
  struct Reply {
    uint64_t bytes = 0;
  };
  std::string image;
  std::vector<int32_t> blocks;  // by their numbers in the checkpoint
  std::string directory;
  uint64_t generation =
      0;  // of the checkpoint that the engine core has opened there: a rank that finds another refuses
  SealId id{};
};

// Compare each chunk of an image with its digest. kCorruption names the first that is damaged.
struct VerifyImage {
  static constexpr std::string_view kName = "verify_image";
  struct Reply {
    uint64_t bytes = 0;
  };
  std::string image;
};

// Copy chunks of an image, verified, into KV blocks that nothing uses. The image stays. After an error the content of
// these blocks is void.
struct Admit {
  static constexpr std::string_view kName = "admit";
  struct Reply {
    uint64_t bytes = 0;
  };
  std::string image;
  std::vector<int32_t> chunks;  // positions in the image
  std::vector<int32_t> blocks;  // of each chunk, where it goes
};

// Free the host memory of an image. May be repeated.
struct DropImage {
  static constexpr std::string_view kName = "drop_image";
  struct Reply {
    uint64_t bytes = 0;  // 0: there was none
  };
  std::string image;
};

// The checkpoint under construction was committed to this path.
struct Moved {
  static constexpr std::string_view kName = "moved";
  struct Reply {};
  std::string directory;
};

}  // namespace orders

using RankOrder =
    std::variant<orders::Describe, orders::Written, orders::Save, orders::CancelSave, orders::Detach, orders::Restore,
                 orders::CancelRestore, orders::Finish, orders::DigestTags, orders::LoadBlocks, orders::Moved,
                 orders::PlanSave, orders::TellContents, orders::Arrivals, orders::OpenBehind, orders::CopyAhead,
                 orders::SaveBehind, orders::LookBehind, orders::LeaveSign, orders::TakeBack, orders::Extract,
                 orders::VerifyImage, orders::Admit, orders::DropImage, orders::ReadImage>;

// `Order`: an alternative of RankOrder.
template <class Order>
Bytes encode_order(const Order& order);
template <class Order>
Bytes encode_reply(const typename Order::Reply& reply);
// The rank's error, or one of its own where the bytes are not the answer to such an order.
template <class Order>
Result<typename Order::Reply> decode_reply(const Bytes& bytes);
Bytes encode_error(const Error& error);  // in place of any reply

// kIncompatible: an order that this version does not know. kCorruption: not an order.
Result<RankOrder> decode_order(const Bytes& bytes);
// kName of the order, for logs and tests; nothing else of the bytes is looked at.
std::string_view order_name(const Bytes& bytes);

}  // namespace torpor
