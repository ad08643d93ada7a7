// SPDX-License-Identifier: Apache-2.0
// What callers ask of a sleep and a wake, and what they are told. The fields for users: docs/vllm.md and
// docs/semantics.md.
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

// One of several engines behind one front end; none sleeps unless all can.
struct DataParallel {
  int rank = 0;
  int size = 1;  // above 1: its checkpoints lie in rank_directory(), and a sleep is held until end_sleep()
};

// What becomes of the weights' content.
enum class Weights : uint8_t {
  kByLevel,  // kStore; at level 2 without preserve_state kReload, as vLLM's level 2
  kStore,    // it is kept, where the rest is
  kReload,   // it is not, and their owner loads them after the wake
};

struct SleepOptions {
  int level = 1;  // 0: only pause; 1 and 2: docs/semantics.md
  bool preserve_state = false;
  bool to_disk = false;                   // not where tags are asleep already
  std::string in_flight = "freeze";       // without preserve_state: "abort" or "recompute"
  bool discard_on_save_error = false;     // keep in host memory what cannot go to disk, drop what has no room there
  Weights weights = Weights::kByLevel;    // said, it wins over the level
  std::vector<std::string> tags;          // empty: all
  std::optional<double> timeout_seconds;  // for the quiesce
  Value outputs;                          // the front end's part of the checkpoint
  Metadata metadata;                      // for the checkpoint; refused without one
  DataParallel data_parallel;
  std::string progress{};  // path of a ProgressFile that is told how far it is, and may cancel it; or empty
  // Path of a SwapChannel, or empty: device memory is given to an engine that wakes with `swap_in_from` of this path,
  // at the same time and perhaps in another process. To host memory, all of it, with preserve_state.
  std::string swap_out_to{};

  // Whether the memory of `tag` goes without a copy.
  bool drops(const std::string& tag) const {
    const bool by_level = level == 2 && !preserve_state;
    const bool no_weights = weights == Weights::kByLevel ? by_level : weights == Weights::kReload;
    return (tag == kWeightsTag && no_weights) || (tag == kKvCacheTag && !preserve_state) ||
           (is_scratch(tag) && swap_out_to.empty());  // what is given page by page is given whole
  }
};

// New weights were loaded: what becomes of KV that the old ones computed, and so of the requests that have it. In no
// case does another request find it.
enum class OldKv : uint8_t {
  kUnsaid,     // none were loaded, or there are no requests
  kRecompute,  // computed again, from the tokens so far
  kKeep,       // running requests go on with it
  kAbort,      // the requests end
};

struct WakeOptions {
  // Empty: all that sleep. Named or not, those that may not wait come with them (engine/tags.h).
  std::vector<std::string> tags;
  std::string from_checkpoint;  // a checkpoint or a directory of checkpoints; for a new, empty engine
  bool discard_on_restore_error = false;
  OldKv old_kv = OldKv::kUnsaid;  // kUnsaid is refused where requests have KV and weights were seen to be written
  bool hold = false;              // restored, but not yet running: end_hold() follows
  bool others_wait = false;       // another data parallel rank has requests: none runs before its weights are loaded
  // The engine runs as soon as the weights and the KV of the requests that run first are back. The rest comes behind
  // it, and continue_wake() is to be called between its steps until nothing is left. Not with `hold`, where weights
  // were written or are to be loaded, nor of an engine that cannot hold blocks back: all is back then.
  bool early = false;
  // Brings the values of the checkpoint to what has happened since, before they are put in; `woken_before`: an engine
  // has gone on from them. With it, `from_checkpoint` may be empty: it is then given the values of the empty engine. A
  // server passes catch_up_with() its answers (engine/delivery/roll_forward.h).
  std::function<Status(SchedulerCheckpoint& state, bool woken_before)> catch_up{};
  std::string progress{};      // as in SleepOptions
  std::string swap_in_from{};  // the other half of SleepOptions::swap_out_to. All tags, and nothing else is asked
};

// Of blocks that come behind the engine: what it wants of them. What is under way already ends first.
struct DeferredWishes {
  std::vector<int32_t> wanted{};   // they come next
  std::vector<int32_t> skipped{};  // their content is not wanted any more
};

struct WakeProgress {  // of blocks that come behind the engine, since the last call
  int64_t arrived = 0;
  int64_t lost = 0;  // damaged, or they could not be read
  int64_t skipped = 0;
  int64_t left = 0;                     // still to come
  std::vector<std::string> recomputed;  // requests that are computed again, for they had a lost one
};

struct Phase {
  std::string name;
  double seconds = 0;
  uint64_t bytes = 0;
  double after = 0;  // seconds from the operation's beginning to the phase's
};

struct SleepReport {  // also of a wake
  bool changed = false;
  bool held = false;  // end_sleep() is to follow
  bool fully_awake = false;
  std::string note;  // why nothing changed, what was discarded, or what to do next
  int level = 0;
  bool preserve_state = false;
  std::string to;          // "host" or "disk"
  std::string checkpoint;  // path, if there is one
  uint64_t checkpoint_bytes = 0;
  std::map<std::string, uint64_t> checkpoint_parts;  // section or tag -> stored bytes
  int64_t requests = 0;
  uint64_t saved_bytes = 0;      // copied
  uint64_t compacted_bytes = 0;  // of these: unchanged, written again so that linked files are half in use
  uint64_t reused_bytes = 0;     // kept without a copy: the one of the last sleep still holds
  uint64_t host_bytes = 0;       // where it lies: in host memory
  uint64_t disk_bytes = 0;       // in the checkpoint, or for want of room in a file that ends with the sleep
  uint64_t freed_bytes = 0;      // device memory
  uint64_t restored_bytes = 0;
  int64_t deferred_blocks = 0;  // that come behind the engine: continue_wake()
  uint64_t deferred_bytes = 0;
  uint64_t unread_bytes = 0;  // of a checkpoint: memory that this engine has itself; only its digest was compared
  int64_t kept_blocks = 0;
  int64_t dropped_blocks = 0;  // cached blocks whose bytes were not kept, or that had no room here
  // Tags that came back without content, or of a sleep, that will: the owner must load them. Where requests were kept,
  // nothing runs before that.
  std::vector<std::string> reload;
  std::vector<FailedRequest> failed_requests;
  Value outputs;      // of a restored checkpoint
  Metadata metadata;  // of the checkpoint that was written or restored
  std::vector<Phase> phases;
  double seconds = 0;
  std::vector<RankLedger> ledgers;  // by rank, at the end
};

struct SwapOptions {
  std::optional<double> timeout_seconds{};  // for the quiesce of the engine that goes
  Value outputs{};                          // as in SleepOptions
  std::string progress{};                   // as in SleepOptions, of the engine that goes
};

struct SwapReport {
  SleepReport slept;
  SleepReport woken;
  double seconds = 0;
};

struct SleepPlan {
  std::map<std::string, uint64_t> save_bytes;  // tag -> bytes that would be copied, all ranks together
  std::map<std::string, uint64_t> free_bytes;  // tag -> device bytes that would be given back
  uint64_t reused_bytes = 0;                   // that would be kept without a copy
  uint64_t host_bytes = 0;                     // that would lie in host memory then, and on disk
  uint64_t disk_bytes = 0;
  int64_t requests = 0;
  int64_t kept_blocks = 0;
  int64_t dropped_blocks = 0;
  std::vector<std::string> problems;  // why it would be refused
};

struct ControllerState {
  std::string engine;  // "awake", "falling asleep", "asleep", "waking", "unrecoverable"
  std::map<std::string, std::string> tags;
  int level = -1;  // of the sleep in force
  std::string checkpoint;
};

}  // namespace torpor
