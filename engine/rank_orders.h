// SPDX-License-Identifier: Apache-2.0
// The orders of the controller to the memory of each worker rank, and the replies. Both are bytes, so that they can
// cross processes. A failure is a value in the reply, so that the controller sees the outcome on every rank.
//
// The bytes of an order are its number in RankOrder, then its fields. Both ends have the same version of torpor. Bytes
// are checked while they are decoded (checkpoint/bounded_archive.h).
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

// The memory that a rank holds. All figures are bytes.
struct RankLedger {
  struct Tag {
    std::string state;
    uint64_t region_bytes = 0;    // as allocated
    uint64_t physical_bytes = 0;  // device memory mapped there now
    uint64_t backup_host_bytes = 0;
    uint64_t backup_disk_bytes = 0;
    uint64_t reused_bytes = 0;  // part of the backup that the last sleep found there and did not copy
  };
  std::map<std::string, Tag> tags;
  uint64_t device_physical_bytes = 0;
  uint64_t device_capacity_bytes = 0;  // 0: the device sets no limit
  // Used by all processes, by the device's own count; 0: it has none. The bytes beyond the physical ones are
  // unexplained.
  uint64_t device_used_bytes = 0;
  uint64_t arena_held_bytes = 0;
  uint64_t arena_used_bytes = 0;
  uint64_t arena_budget_bytes = 0;
  uint64_t arena_unpinned_bytes = 0;  // held, but not pinned, as the device refused
  // The number of chunks by outcome, over all that the transfer engine was given since its start: pieces of regions,
  // also those of which only a digest was taken, and KV blocks.
  std::map<std::string, uint64_t> chunks_by_outcome;
  uint64_t process_resident_bytes = 0;         // VmRSS
  uint64_t process_resident_region_bytes = 0;  // the part that is device memory, on the device without a GPU
};

// Each order is all or nothing on its rank, but for these: a Restore, and a Save into a SwapChannel, that fail are
// undone by Undo; a Detach whose memory the device does not release leaves it lost. A rank carries an order out on
// those of its tags that the rank has: other ranks may have other tags. `kName` is for logs. RankSteps::carry_out()
// does the work.
namespace orders {

struct Describe {
  static constexpr std::string_view kName = "describe";
  struct Reply {
    RankLedger ledger;
    uint64_t bytes_per_block = 0;
    uint32_t num_blocks = 0;                      // number of KV blocks
    std::map<std::string, uint64_t> writes;       // tag -> how often a write of it was seen
    std::vector<std::string> without_content;     // tags that came back without content and were not written since
    std::map<std::string, std::string> proven{};  // tag -> digest of its content, if known without reading it
  };
};

// Blocks that Restore has brought from the checkpoint `id`, and that were not written since. `versions`: the content
// versions that the engine uses for them from now on.
struct RestoredContents {
  SealId id{};
  std::vector<int32_t> blocks;
  std::vector<uint64_t> versions;  // as in Save
  uint64_t steps = 0;
};

// Inform a rank of a fact that it cannot know by itself. One of the fields is set.
struct Inform {
  static constexpr std::string_view kName = "inform";
  struct Reply {};
  std::vector<std::string> written;  // tags that were written, so that their backups do not hold any more
  std::string committed;             // path to which the checkpoint under construction was committed
  std::optional<RestoredContents> contents{};
};

// Copy content to its backup, at once or in stages.
struct Save {
  static constexpr std::string_view kName = "save";
  enum class Stage : uint8_t {
    // Save all content, while the engine is stopped.
    kAll,
    // Change nothing. The reply says what kAll would do: into the arena, or, if `writing` names a base, into a
    // checkpoint.
    kPlan,
    // The next stages belong to a checkpoint that is written while the engine serves. Send each when PollSave has said
    // that the background work of the one before has ended. PollSave with `stop` ends the checkpoint.
    //
    // In the background: make the files, and take the digest of the weights if it is not known.
    kOpen,
    // Between two steps of the engine: begin to write, in the background, the blocks that have a version and that the
    // base does not have.
    kPrecopy,
    // While the engine stands still: copy to host memory the blocks that were not copied or have changed, and take the
    // digests of the carried tags. Then, in the background, write these blocks and sync the file. `tags` begins with
    // the tag of the KV cache, and is without the weights.
    kStopAndCopy,
  };
  static constexpr std::array<std::string_view, 5> kStages{"save", "plan_save", "open_save", "precopy",
                                                           "stop_and_copy"};
  struct Reply {
    uint64_t bytes = 0;                              // copied; for kPrecopy: to be written
    uint64_t compacted_bytes = 0;                    // of `bytes`: unchanged, but written again (RankWriter::sparse())
    uint64_t reused_bytes = 0;                       // backed up before, or linked; not read
    uint64_t spilled_bytes = 0;                      // of the copied bytes: in a file, as the arena was full
    RankSummary saved;                               // to disk: for the manifest
    std::map<std::string, std::string> digests;      // of tags without blocks, if known: as DigestTags returns it
    uint64_t digested_bytes = 0;                     // kStopAndCopy: read for the digests
    std::map<std::string, uint64_t> copied_bytes{};  // kPlan: by tag
  };
  Stage stage = Stage::kAll;
  std::vector<std::string> tags;
  std::vector<int32_t> blocks;     // of the KV cache, the most needed first
  std::vector<uint64_t> versions;  // KvBlock::version of each block, or empty
  uint64_t steps = 0;              // KvSnapshot::steps
  std::string directory;           // of the checkpoint under construction; empty: save into the arena
  RankWriting writing;             // to disk: how to write
  bool as_proven = false;          // to disk: as in DigestTags
  // To disk: tags that are not saved. The checkpoint has their content only if the base has it already.
  std::vector<std::string> carried{};
  // Into the arena: for each block the slot of the rank's host store that has its bytes; -1: none has. The store keeps
  // these slots until Finish or Undo. Or empty.
  std::vector<int32_t> host_slots{};
  std::string progress{};  // path of a ProgressFile that counts the copied bytes, and may cancel; or empty
  // Into the arena: path of a SwapChannel, or empty. With it, the memory of what is copied is released to another
  // engine page by page. After a failure the tags are still being saved: send Undo of kReleasedPages.
  std::string channel{};
};

// Ask how far the background work of a stage of Save is. Errors of the stage are this order's errors.
struct PollSave {
  static constexpr std::string_view kName = "poll_save";
  struct Reply {
    bool ended = false;
    Save::Reply saved;  // after kStopAndCopy
  };
  bool wait = false;  // reply when the work has ended
  bool stop = false;  // end the checkpoint now, and forget it
};

// Undo an order, whole or as far as it came. kFailedPrecondition: the tags are in another state; there is nothing to
// undo.
struct Undo {
  static constexpr std::string_view kName = "undo";
  enum class What : uint8_t {
    kSave,
    // Acquire again the pages that Save with a channel released; send kSave after it. Precondition: the other engine
    // has none of that memory any more.
    kReleasedPages,
    kRestore,  // the backups stay
  };
  static constexpr std::array<std::string_view, 3> kWhats{"undo_save", "undo_released_pages", "undo_restore"};
  struct Reply {};
  What what = What::kSave;
  std::vector<std::string> tags;
};

// Release the memory of the tags.
struct Detach {
  static constexpr std::string_view kName = "detach";
  struct Reply {
    RankLedger ledger;
    uint64_t bytes = 0;  // device memory given back
  };
  std::vector<std::string> tags;
};

// A committed checkpoint. Each rank reads its own part of it.
struct CheckpointSource {
  std::string directory;
  // Identify the checkpoint that the controller has opened there. A rank that finds another one refuses.
  uint64_t generation = 0;
  SealId id{};
  // A block's number in the checkpoint -> its number here; -1: it is not loaded. Empty: the numbers are the same.
  std::vector<int32_t> numbers{};
};

// Copy a backup into device memory, and verify it. In the same process, memory is mapped at the same addresses, region
// by region, and filled from the backup. After an error send Undo, as a part may have been restored. In a new process,
// KV blocks of a committed checkpoint are copied into mapped memory. After an error their content is void.
struct Restore {
  static constexpr std::string_view kName = "restore";
  struct Reply {
    uint64_t bytes = 0;                        // copied
    std::vector<std::string> without_content;  // tags that came back without content, as none was saved
    uint64_t deferred_bytes = 0;               // of blocks that are still to come
  };
  std::vector<std::string> tags;  // in the same process
  std::optional<CheckpointSource> checkpoint{};
  std::string progress{};  // as in Save
  // KV blocks, by their numbers here, that are copied after the reply, in this order. Send PollRestore until all have
  // ended.
  std::vector<int32_t> deferred{};
  std::string channel{};  // path of a SwapChannel from which memory is acquired, or empty. Not together with `deferred`
};

// Ask which deferred blocks have ended. May be repeated.
struct PollRestore {
  static constexpr std::string_view kName = "poll_restore";
  struct Reply {
    uint64_t first = 0;  // number of arrivals that were reported before
    std::vector<DeferredArrival> arrivals;
    std::string why;     // why the first lost block was lost; empty: none was
    bool ended = false;  // all were reported before, and their backup is released
  };
  std::vector<uint64_t> seen;  // by rank: the number of arrivals that the controller has received
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
  bool keep_backup = false;  // keep backups, also of KV blocks, as far as the options allow
};

// Take digests of the tags: from the content of attached tags, from the backups of detached ones. With `as_proven` a
// tag is not read if it was read before, or filled by a load, and no write of it was seen since.
struct DigestTags {
  static constexpr std::string_view kName = "digest";
  struct Reply {
    uint64_t bytes = 0;                          // read
    std::map<std::string, std::string> digests;  // by tag
  };
  std::vector<std::string> tags;
  bool as_proven = false;
  // Take only the digest of the weights that the owner has named (RankMemory::name_weights); none if it has named none.
  bool named = false;
};

// Write a file into the directory of a checkpoint under construction, before any rank saves, to show that this rank
// sees the directory (checkpoint/rank_writer.h).
struct WriteTestFile {
  static constexpr std::string_view kName = "write_test_file";
  struct Reply {
    std::string host;  // of this rank
  };
  std::string directory;
};

// Copy KV blocks into a new image in host memory, with a digest of each, and compare them with the device once more.
// The engine is stopped.
struct Extract {
  static constexpr std::string_view kName = "extract";
  struct Reply {
    uint64_t bytes = 0;
  };
  std::string image;            // id that no other image of this rank has
  std::vector<int32_t> blocks;  // in the order of the image
};

// As Extract, but from KV blocks of a committed checkpoint. Each rank reads its own refs there.
struct ReadImage {
  static constexpr std::string_view kName = "read_image";
  struct Reply {
    uint64_t bytes = 0;
  };
  std::string image;
  std::vector<int32_t> blocks;  // by their numbers in the checkpoint
  std::string directory;
  uint64_t generation =
      0;  // of the checkpoint that the engine core has opened there; a rank that finds another one refuses
  SealId id{};
};

// Compare each chunk of an image with its digest. kCorruption names the first damaged chunk.
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
  std::vector<int32_t> blocks;  // the block into which each chunk is copied
};

// Free the host memory of an image. May be repeated.
struct DropImage {
  static constexpr std::string_view kName = "drop_image";
  struct Reply {
    uint64_t bytes = 0;  // 0: there was no such image
  };
  std::string image;
};

// Write the chunks of an image, verified, into a checkpoint under construction. The image stays. A chunk's position in
// the image is its block number in the checkpoint.
struct SaveImage {
  static constexpr std::string_view kName = "save_image";
  struct Reply {
    uint64_t bytes = 0;  // of the chunks
    RankSummary saved;   // for the manifest
  };
  std::string image;
  std::string directory;  // of the checkpoint
  RankWriting writing;    // how to write
};

// Copy KV blocks within the device: each block of `from` into the block of `to` at the same position. Precondition: all
// targets are different, nothing uses them, and none is a source. After an error the content of the targets is void.
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

// Encode and decode orders and replies. `Order` is an alternative of RankOrder.
template <class Order>
Bytes encode_order(const Order& order);
template <class Order>
Bytes encode_reply(const typename Order::Reply& reply);
// Decode the reply to such an order. Errors: the rank's, or kCorruption if the bytes are not such a reply.
template <class Order>
Result<typename Order::Reply> decode_reply(const Bytes& bytes);
Bytes encode_error(const Error& error);  // is sent in place of any reply

// Decode an order. kIncompatible: this version does not know the order. kCorruption: the bytes are not an order.
Result<RankOrder> decode_order(const Bytes& bytes);
// Return the name of the order, or of its stage, for logs and tests. It reads the first two bytes only.
std::string_view order_name(const Bytes& bytes);

}  // namespace torpor
