// SPDX-License-Identifier: Apache-2.0
// The orders of the controller to the memory of each worker rank, and what a rank answers. Values in bytes, so that
// they cross processes; a failure is a value in the answer, so that the controller sees the outcome of every rank.
//
// An order is its number in RankOrder, then its fields: both ends are of the same version of torpor. Bytes are hostile
// until decoded (checkpoint/bounded_archive.h).
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/status.h"
#include "base/value.h"
#include "checkpoint/rank_writer.h"
#include "engine/deferred_copies.h"

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

// Blocks that Restore has brought from the checkpoint `id`, and that nobody has written since, with the versions that
// the engine gives their contents from now on.
struct RestoredContents {
  SealId id{};
  std::vector<int32_t> blocks;
  std::vector<uint64_t> versions;  // as in Save
  uint64_t steps = 0;
};

// Tell a rank what it cannot know by itself: one of these.
struct Inform {
  static constexpr std::string_view kName = "inform";
  struct Reply {};
  std::vector<std::string> written;  // tags whose content was written: their backups do not hold any more
  std::string committed;             // the checkpoint under construction has this path now
  std::optional<RestoredContents> contents{};
};

// Copy content to its backup, at once or in stages.
struct Save {
  static constexpr std::string_view kName = "save";
  enum class Stage : uint8_t {
    // Save all of it, while the engine stands still.
    kAll,
    // Change nothing. The reply says what kAll would do: into the arena; with a base in `writing`, into a checkpoint.
    kPlan,
    // The stages of a checkpoint while the engine serves. Each begins when PollSave says that what the one before does
    // in the background has ended. PollSave with `stop` ends it.
    //
    // Make the files, and take the digest of weights that are not known, in the background.
    kOpen,
    // Between two steps of the engine: write, in the background, the blocks with a version that the base does not have.
    kPrecopy,
    // While the engine stands still: copy to host memory the blocks that were not copied or have changed, and take the
    // digests of the carried tags. Then write the blocks and sync the file, in the background. `tags` begins with the
    // one that has blocks, and is without the weights.
    kStopAndCopy,
  };
  static constexpr std::array<std::string_view, 5> kStages{"save", "plan_save", "open_save", "precopy",
                                                           "stop_and_copy"};
  struct Reply {
    uint64_t bytes = 0;                              // copied; of kPrecopy, to be written
    uint64_t compacted_bytes = 0;                    // of these: unchanged, see RankWriter::sparse()
    uint64_t reused_bytes = 0;                       // backed up before, or linked, and not read
    uint64_t spilled_bytes = 0;                      // of the copied ones: to a file, for want of room in the arena
    RankSummary saved;                               // to disk: for the manifest
    std::map<std::string, std::string> digests;      // of tags without blocks, where it is known: as DigestTags says it
    uint64_t digested_bytes = 0;                     // of kStopAndCopy: read for the digests
    std::map<std::string, uint64_t> copied_bytes{};  // of kPlan: by tag
  };
  Stage stage = Stage::kAll;
  std::vector<std::string> tags;
  std::vector<int32_t> blocks;     // of the KV cache, the most needed first
  std::vector<uint64_t> versions;  // KvBlock::version of each of them, or empty
  uint64_t steps = 0;              // KvSnapshot::steps
  std::string directory;           // of the checkpoint under construction; empty: into the arena
  RankWriting writing;             // to disk: how
  bool as_proven = false;          // to disk: as DigestTags
  // To disk: tags that stay as they are. The checkpoint has their content only where the base has it already.
  std::vector<std::string> carried{};
  // Into the arena: for each block the slot of the rank's host store that has its bytes, and keeps them until Finish or
  // Undo; -1: no slot has. Or empty.
  std::vector<int32_t> host_slots{};
  std::string progress{};  // path of a ProgressFile that is told what is copied, and may cancel it; or empty
  // Into the arena: path of a SwapChannel, or empty. With it the memory of what is copied is given page by page to
  // another engine. A failure leaves the tags saving: send Undo of kGiving.
  std::string channel{};
};

// Ask how far a stage of Save is in the background. Its errors are this order's.
struct PollSave {
  static constexpr std::string_view kName = "poll_save";
  struct Reply {
    bool ended = false;
    Save::Reply saved;  // after kStopAndCopy
  };
  bool wait = false;  // answer when it has ended
  bool stop = false;  // end it now, and forget it
};

// Undo an order, whole or as far as it came. kFailedPrecondition: the tags are in another state, so that there is
// nothing to undo.
struct Undo {
  static constexpr std::string_view kName = "undo";
  enum class What : uint8_t {
    kSave,
    // Take back the memory that Save with a channel gave, before kSave. The other engine has none of it any more.
    kGiving,
    kRestore,  // the backups stay
  };
  static constexpr std::array<std::string_view, 3> kWhats{"undo_save", "undo_giving", "undo_restore"};
  struct Reply {};
  What what = What::kSave;
  std::vector<std::string> tags;
};

// Release the memory of the tags.
struct Detach {
  static constexpr std::string_view kName = "detach";
  struct Reply {
    RankLedger ledger;
    uint64_t bytes = 0;  // of device memory given back
  };
  std::vector<std::string> tags;
};

// A committed checkpoint, of which each rank reads its own part.
struct CheckpointSource {
  std::string directory;
  // The checkpoint that the controller has opened there. A rank that finds another one refuses.
  uint64_t generation = 0;
  SealId id{};
  // By a block's number in the checkpoint, the number that it gets here; -1: it is not loaded. Empty: the same numbers.
  std::vector<int32_t> numbers{};
};

// Copy a backup into device memory, and verify it. In the same process memory is mapped at the same addresses, region
// by region, and filled from the backup; after an error send Undo, as a part may have been restored. In a new process
// KV blocks of a committed checkpoint fill memory that is mapped; after an error they have no content.
struct Restore {
  static constexpr std::string_view kName = "restore";
  struct Reply {
    uint64_t bytes = 0;                        // copied
    std::vector<std::string> without_content;  // tags that came back empty: nothing was saved of them
    uint64_t deferred_bytes = 0;               // still on their way
  };
  std::vector<std::string> tags;  // of the same process
  std::optional<CheckpointSource> checkpoint{};
  std::string progress{};  // as in Save
  // KV blocks, by the numbers that they get here, that are copied after the order was answered, in this order. Send
  // PollRestore until they have ended.
  std::vector<int32_t> deferred{};
  std::string channel{};  // path of a SwapChannel, from which memory is taken; or empty. Without `deferred`
};

// Ask what has become of deferred blocks. May be repeated.
struct PollRestore {
  static constexpr std::string_view kName = "poll_restore";
  struct Reply {
    uint64_t first = 0;  // so many were told before
    std::vector<DeferredArrival> arrivals;
    std::string why;     // the first was lost, if one was
    bool ended = false;  // all were told before, and what they came from is given back
  };
  std::vector<uint64_t> seen;  // by rank, how many arrivals the controller has
  DeferredWait wait = DeferredWait::kNone;
  bool cancel = false;             // blocks whose copy has not begun are lost
  std::vector<int32_t> wanted{};   // copy these next
  std::vector<int32_t> skipped{};  // do not copy these
};

// End a wake. May be repeated.
struct Finish {
  static constexpr std::string_view kName = "finish";
  struct Reply {
    RankLedger ledger;
  };
  std::vector<std::string> tags;
  bool keep_backup = false;  // also of KV blocks, where the options allow it
};

// Take digests of the tags: of the content of attached tags, of the backups of detached ones. With `as_proven` a tag is
// not read that was read before, or filled by a load, and that nobody was seen to write since.
struct DigestTags {
  static constexpr std::string_view kName = "digest";
  struct Reply {
    uint64_t bytes = 0;                          // read
    std::map<std::string, std::string> digests;  // tag -> of its content
  };
  std::vector<std::string> tags;
  bool as_proven = false;
  // Take only the digest of the weights that the owner has named (RankMemory::name_weights); none where it named
  // nothing.
  bool named = false;
};

// Put a file into the directory of a checkpoint under construction, to show that this rank sees it, before any saves
// (checkpoint/rank_writer.h).
struct WriteTestFile {
  static constexpr std::string_view kName = "write_test_file";
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

// Write the chunks of an image into a checkpoint under construction, verified on the way. The image stays. A chunk is
// the KV block there that has its position in the image as number.
struct SaveImage {
  static constexpr std::string_view kName = "save_image";
  struct Reply {
    uint64_t bytes = 0;  // of the chunks
    RankSummary saved;   // for the manifest
  };
  std::string image;
  std::string directory;  // of the checkpoint
  RankWriting writing;    // how
};

// Copy KV blocks within the device: of each of `from`, all bytes go into the one of `to` at the same place. All targets
// are different, nothing uses them, and none is a source. After an error their content is void.
struct CopyBlocks {
  static constexpr std::string_view kName = "copy_blocks";
  struct Reply {
    uint64_t bytes = 0;
  };
  std::vector<int32_t> from;
  std::vector<int32_t> to;
};

}  // namespace orders

using RankOrder = std::variant<orders::Describe, orders::Inform, orders::Save, orders::PollSave, orders::Undo,
                               orders::Detach, orders::Restore, orders::PollRestore, orders::Finish, orders::DigestTags,
                               orders::WriteTestFile, orders::Extract, orders::ReadImage, orders::VerifyImage,
                               orders::Admit, orders::DropImage, orders::SaveImage, orders::CopyBlocks>;

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
// The name of the order, or of its stage, for logs and tests: by its first two bytes.
std::string_view order_name(const Bytes& bytes);

}  // namespace torpor
