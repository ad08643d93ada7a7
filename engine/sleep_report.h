// SPDX-License-Identifier: Apache-2.0
// The options and reports of a sleep and a wake. docs/vllm.md and docs/semantics.md explain the fields to users.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/engine_checkpoint.h"
#include "engine/engine_hooks.h"
#include "engine/rank_orders.h"
#include "engine/tags.h"

namespace torpor {

// One of several engines behind one front end. No engine sleeps unless all can.
struct DataParallel {
  int rank = 0;
  int size = 1;  // above 1: its checkpoints lie in rank_directory(), and a sleep is held until end_sleep()
};

// How a sleep treats the content of the weights.
enum class Weights : uint8_t {
  kByLevel,  // kStore, but at level 2 without preserve_state kReload, as in vLLM
  kStore,    // save it where the rest is saved
  kReload,   // do not save it; the owner loads the weights after the wake
};

struct SleepOptions {
  int level = 1;  // 0: pause only; 1 and 2: docs/semantics.md
  bool preserve_state = false;
  bool to_disk = false;                   // fails if tags are asleep already
  std::string in_flight = "freeze";       // without preserve_state: "abort" or "recompute"
  bool discard_on_save_error = false;     // if the disk fails, save to host memory and drop what does not fit
  Weights weights = Weights::kByLevel;    // kStore and kReload override the level
  std::vector<std::string> tags;          // empty: all
  std::optional<double> timeout_seconds;  // of the quiesce
  Value outputs;                          // the front end's part of the checkpoint
  Metadata metadata;                      // of the checkpoint; an error if there is none
  DataParallel data_parallel;
  std::string progress{};  // path of a ProgressFile that shows the progress, and may cancel; or empty
  // Path of a SwapChannel, or empty. Device memory is released to an engine that wakes at the same time with
  // `swap_in_from` of this path, perhaps in another process. Requires a sleep of all tags to host memory, with
  // preserve_state.
  std::string swap_out_to{};

  // Return whether the memory of `tag` is released without a copy.
  bool drops(const std::string& tag) const {
    const bool by_level = level == 2 && !preserve_state;
    const bool no_weights = weights == Weights::kByLevel ? by_level : weights == Weights::kReload;
    return (tag == kWeightsTag && no_weights) || (tag == kKvCacheTag && !preserve_state) ||
           (is_scratch(tag) && swap_out_to.empty());  // a swap releases whole pages, with all that lies in them
  }
};

// If new weights were loaded: what happens to KV that the old weights computed, and so to the requests that have it. No
// other request ever finds this KV.
enum class OldKv : uint8_t {
  kUnsaid,     // not said: no weights were loaded, or there are no requests
  kRecompute,  // compute it again from the tokens so far
  kKeep,       // running requests go on with it
  kAbort,      // end these requests
};

struct WakeOptions {
  // Empty: all that sleep. Tags that cannot wait come with them, named or not (engine/tags.h).
  std::vector<std::string> tags;
  // Path of a checkpoint or a directory of checkpoints; for a new, empty engine. It wakes whole: no tags, no old_kv.
  std::string from_checkpoint;
  bool discard_on_restore_error = false;
  OldKv old_kv = OldKv::kUnsaid;  // kUnsaid is an error if requests have KV and the weights were written
  bool hold = false;              // restore, but do not run: end_hold() follows
  bool others_wait = false;       // another data parallel rank has requests: do not run before its weights are loaded
  // A post-copy wake: the engine runs as soon as the weights and the KV of the requests that run first are back. The
  // rest comes while it runs: call continue_wake() between its steps until nothing is left. All is copied before the
  // engine runs if the weights were written or must be loaded, or if the engine cannot hold blocks back. With `hold`
  // end_hold() is the end of the wake.
  bool early = false;
  // Changes the values of the checkpoint to what has happened since, before the engine gets them. `woken_before`: an
  // engine has gone on from this checkpoint. With this function `from_checkpoint` may be empty; the values are then
  // those of the empty engine. A server passes catch_up_with() with its answers (engine/delivery/roll_forward.h).
  std::function<Status(CapturedState& state, bool woken_before)> catch_up{};
  std::string progress{};      // as in SleepOptions
  std::string swap_in_from{};  // counterpart of SleepOptions::swap_out_to. Set no other option, and wake all tags
};

// The engine's wishes about deferred blocks. Copies under way end first.
struct DeferredWishes {
  std::vector<int32_t> wanted{};   // copy these next
  std::vector<int32_t> skipped{};  // do not copy these
};

struct WakeProgress {  // of deferred blocks, since the last call
  int64_t arrived = 0;
  int64_t lost = 0;  // damaged, or not readable
  int64_t skipped = 0;
  int64_t left = 0;                     // still to come
  std::vector<std::string> recomputed;  // requests that are computed again, as a block of theirs was lost
};

struct Phase {
  std::string name;
  double seconds = 0;
  uint64_t bytes = 0;
  double after = 0;  // seconds from the beginning of the operation to that of the phase
};

struct SleepReport {  // also of a wake
  bool changed = false;
  bool held = false;  // end_sleep() must follow
  bool fully_awake = false;
  std::string note;  // why nothing has changed, what was discarded, or what to do next
  int level = 0;
  bool preserve_state = false;
  std::string to;          // "host" or "disk"
  std::string checkpoint;  // path; empty: none
  uint64_t checkpoint_bytes = 0;
  std::map<std::string, uint64_t> checkpoint_parts;  // section or tag -> stored bytes
  int64_t requests = 0;
  uint64_t saved_bytes = 0;      // copied
  uint64_t compacted_bytes = 0;  // of saved_bytes: unchanged, written again to keep linked files half in use
  uint64_t reused_bytes = 0;     // saved without a copy: the copy of the last sleep still holds
  uint64_t host_bytes = 0;       // saved bytes that lie in host memory
  uint64_t disk_bytes = 0;       // saved bytes in the checkpoint, or in a file that lasts as long as the sleep
  uint64_t freed_bytes = 0;      // of device memory
  uint64_t restored_bytes = 0;
  int64_t deferred_blocks = 0;  // blocks that are still to come: continue_wake()
  uint64_t deferred_bytes = 0;
  uint64_t unread_bytes = 0;  // of a checkpoint: content that this engine has already; only its digest was compared
  int64_t kept_blocks = 0;
  int64_t dropped_blocks = 0;  // cached blocks that were not saved, or that found no place here
  // Tags that came back without content; of a sleep: that will. The owner must load them. If requests were preserved,
  // none runs before that.
  std::vector<std::string> reload;
  std::vector<FailedRequest> failed_requests;
  Value outputs;      // of a restored checkpoint
  Metadata metadata;  // of the checkpoint that was written or restored
  std::vector<Phase> phases;
  double seconds = 0;
  std::vector<RankLedger> ledgers;  // by rank, at the end of the operation
};

struct SwapOptions {
  std::optional<double> timeout_seconds{};  // of the quiesce of the engine that falls asleep
  Value outputs{};                          // as in SleepOptions
  std::string progress{};                   // as in SleepOptions, for the engine that falls asleep
};

struct SwapReport {
  SleepReport slept;
  SleepReport woken;
  double seconds = 0;
};

struct SleepPlan {
  std::map<std::string, uint64_t> save_bytes;  // tag -> bytes that would be copied, over all ranks
  std::map<std::string, uint64_t> free_bytes;  // tag -> device bytes that would be released
  uint64_t reused_bytes = 0;                   // would be saved without a copy
  uint64_t host_bytes = 0;                     // saved bytes that would lie in host memory, and on disk
  uint64_t disk_bytes = 0;
  int64_t requests = 0;
  int64_t kept_blocks = 0;
  int64_t dropped_blocks = 0;
  std::vector<std::string> problems;  // why it would be refused
};

struct ControllerState {
  std::string engine;  // as in kEngineStates
  std::map<std::string, std::string> tags;
  int level = -1;  // of the sleep in force
  std::string checkpoint;
};

}  // namespace torpor
