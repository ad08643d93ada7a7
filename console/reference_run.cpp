// SPDX-License-Identifier: Apache-2.0
#include "console/reference_run.h"

#include <algorithm>
#include <thread>

#include <fmt/core.h>

#include "allocator/host_device.h"

namespace torpor::console {
namespace {

using nlohmann::json;
using reference::ReferenceOptions;
using reference::ReferenceRequest;
using std::chrono::milliseconds;

constexpr size_t kMostWords = 8192;  // of EventPort::text()
constexpr uint64_t kMostBytes = uint64_t{1} << 32;

Error damaged(std::string what) {
  return {.code = Code::kCorruption,
          .what = "an input of a reference engine: " + std::move(what),
          .next_step = "it was not written by torpor's reference engine"};
}

json to_json(const RunOptions& run) {
  const ReferenceOptions& of = run.engine;
  const reference::TierOptions& tiers = of.tiers;
  return {{"ranks", run.ranks},
          {"kv_budget_bytes", run.kv_budget_bytes ? json(*run.kv_budget_bytes) : json()},
          {"model", {of.model.layers, of.model.token_bytes, of.model.block_tokens, of.model.vocabulary}},
          {"blocks", run.blocks},
          {"bf16", of.model.bf16},
          {"host_bf16", of.host_compression == Codec::kBf16},
          {"weight_bytes", of.weight_bytes},
          {"weights_seed", of.weights_seed},
          {"num_blocks", of.num_blocks},
          {"token_budget", of.token_budget},
          {"max_running", of.max_running},
          {"by_priority", of.by_priority},
          {"kv_of_step", of.kv_of_step},
          {"regions_per_tag", of.regions_per_tag},
          {"spare_kv_regions", of.spare_kv_regions},
          {"step_tags", of.step_tags},
          {"transfer_threads", of.transfer_threads},
          {"transfers_have_threads", of.transfers_have_threads},
          {"late_job_bytes", of.deferred_job_bytes},
          {"late_thread", of.deferred_thread},
          {"retain_kv_bytes", of.retain_kv_bytes ? json(*of.retain_kv_bytes) : json()},
          {"host_blocks", tiers.host_blocks},
          {"disk_blocks", tiers.disk_blocks},
          {"lazy", tiers.mode == OffloadMode::kLazy},
          {"loads", tiers.loads},
          {"placement",
           {tiers.placement.host, tiers.placement.disk, tiers.placement.presence, tiers.placement.min_uses,
            tiers.placement.min_prefix_tokens}},
          {"counted_keys", tiers.counted_keys},
          {"queue",
           {tiers.offload.max_batch_size, tiers.offload.min_batch_size, tiers.offload.flush_interval.count(),
            tiers.offload.policy_timeout.count(), tiers.offload.sweep_interval.count(),
            tiers.offload.max_concurrent_transfers, tiers.offload.on_deck_batches, tiers.offload.loading_batches,
            tiers.offload.queue_blocks}}};
}

// Throws what the JSON library throws.
RunOptions run_options_from(const json& words) {
  RunOptions run;
  ReferenceOptions& of = run.engine;
  reference::TierOptions& tiers = of.tiers;
  run.ranks = words.at("ranks");
  if (!words.at("kv_budget_bytes").is_null()) run.kv_budget_bytes = words.at("kv_budget_bytes").get<uint64_t>();
  run.blocks = words.value("blocks", false);
  const json& model = words.at("model");
  of.model = {model.at(0), model.at(1), model.at(2), model.at(3), words.value("bf16", false)};
  of.host_compression = words.value("host_bf16", false) ? Codec::kBf16 : Codec::kNone;
  of.weight_bytes = words.at("weight_bytes");
  of.weights_seed = words.at("weights_seed");
  of.num_blocks = words.at("num_blocks");
  of.token_budget = words.at("token_budget");
  of.max_running = words.at("max_running");
  of.by_priority = words.at("by_priority");
  of.kv_of_step = words.at("kv_of_step");
  of.regions_per_tag = words.value("regions_per_tag", of.regions_per_tag);
  of.spare_kv_regions = words.value("spare_kv_regions", of.spare_kv_regions);
  of.step_tags = words.value("step_tags", of.step_tags);
  of.transfer_threads = words.at("transfer_threads");
  of.transfers_have_threads = words.at("transfers_have_threads");
  if (!words.at("retain_kv_bytes").is_null()) of.retain_kv_bytes = words.at("retain_kv_bytes").get<uint64_t>();
  of.deferred_job_bytes = words.value("late_job_bytes", of.deferred_job_bytes);
  of.deferred_thread = words.value("late_thread", of.deferred_thread);
  tiers.host_blocks = words.at("host_blocks");
  tiers.disk_blocks = words.at("disk_blocks");
  tiers.mode = words.at("lazy").get<bool>() ? OffloadMode::kLazy : OffloadMode::kEager;
  tiers.loads = words.at("loads");
  const json& placement = words.at("placement");
  tiers.placement = {.host = placement.at(0),
                     .disk = placement.at(1),
                     .presence = placement.at(2),
                     .min_uses = placement.at(3),
                     .min_prefix_tokens = placement.at(4)};
  tiers.counted_keys = words.at("counted_keys");
  const json& queue = words.at("queue");
  tiers.offload = {.max_batch_size = queue.at(0),
                   .min_batch_size = queue.at(1),
                   .flush_interval = milliseconds(queue.at(2).get<int64_t>()),
                   .policy_timeout = milliseconds(queue.at(3).get<int64_t>()),
                   .sweep_interval = milliseconds(queue.at(4).get<int64_t>()),
                   .max_concurrent_transfers = queue.at(5),
                   .on_deck_batches = queue.at(6),
                   .loading_batches = queue.at(7),
                   .queue_blocks = queue.at(8)};
  return run;
}

// Check that the options fit a small engine: a recording may contain anything, and must not make this allocate more.
Status is_small(const RunOptions& run) {
  const ReferenceOptions& of = run.engine;
  const auto within = [](auto value, int64_t low, int64_t high) {
    return static_cast<int64_t>(value) >= low && static_cast<int64_t>(value) <= high;
  };
  const bool small = within(run.ranks, 1, 16) && within(of.model.layers, 1, 256) &&
                     within(of.model.token_bytes, 16, 65'536) && within(of.model.block_tokens, 1, 4096) &&
                     within(of.model.vocabulary, 2, 1 << 24) && of.weight_bytes <= kMostBytes &&
                     within(of.num_blocks, 1, 1 << 20) && within(of.transfer_threads, 1, 16) &&
                     within(of.tiers.host_blocks, 0, 1 << 20) && within(of.tiers.disk_blocks, 0, 1 << 20) &&
                     within(of.tiers.counted_keys, 0, 1 << 24);
  const uint64_t block =
      uint64_t{of.model.layers} * of.model.token_bytes * static_cast<uint64_t>(of.model.block_tokens);
  const auto blocks = static_cast<uint64_t>(of.num_blocks + of.tiers.host_blocks + of.tiers.disk_blocks);
  if (small && block <= kMostBytes / blocks) return ok();
  return damaged("an engine of a size that it never has");
}

json to_json(const ReferenceRequest& request, int32_t samples) {
  return {{"id", request.id},
          {"prompt", request.prompt},
          {"max_tokens", request.max_tokens},
          {"priority", request.priority},
          {"sampling", static_cast<int>(request.sampling)},
          {"seed", request.seed},
          {"salt", request.salt},
          {"samples", samples}};
}

json to_json(const SleepOptions& options) {
  return {{"level", options.level},
          {"preserve_state", options.preserve_state},
          {"to_disk", options.to_disk},
          {"in_flight", options.in_flight},
          {"discard_on_save_error", options.discard_on_save_error},
          {"weights", static_cast<int>(options.weights)},
          {"tags", options.tags}};
}

// Recordings from before "weights": level 2 always dropped them.
Result<Weights> weights_of(const json& words) {
  if (!words.contains("weights"))
    return words.at("level") == 2 || !words.at("store_weights") ? Weights::kReload : Weights::kStore;
  const int weights = words.at("weights");
  if (weights < 0 || weights > static_cast<int>(Weights::kReload)) return damaged("weights");
  return static_cast<Weights>(weights);
}

Result<std::vector<std::unique_ptr<DeviceMemory>>> host_devices(int ranks) {
  std::vector<std::unique_ptr<DeviceMemory>> devices;
  for (int rank = 0; rank < ranks; ++rank) {
    TORPOR_ASSIGN_OR_RETURN(devices.emplace_back(), make_host_device());
  }
  return devices;
}

}  // namespace

ReferenceRun::ReferenceRun(RunHost host, EventRing& ring, RunClock& clock)
    : host_(std::move(host)), clock_(clock), ring_(ring), port_(ring, clock) {}

Status ReferenceRun::give(InputKind kind, const json& words, uint64_t a, uint64_t b) {
  std::string text;
  if (!words.is_null()) text = words.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > kMostWords) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("an input of {} bytes cannot be recorded", text.size()),
                 .next_step = "use shorter prompts"};
  }
  const uint64_t number = port_.record({.type = EventType::kInput, .from = static_cast<uint8_t>(kind), .a = a, .b = b});
  if (!text.empty()) port_.text(TextKind::kInput, 0, number, text);
  outputs_.clear();
  happened_ = false;
  report_.reset();
  Status done = try_catch([&] { return carry_out(kind, words, a, b); });
  if (!done && done.error().code == Code::kInternal) return damaged(done.error().what);
  return done;
}

Status ReferenceRun::build(const json& words) {
  RunOptions run = run_options_from(words);
  TORPOR_RETURN_IF_ERROR(is_small(run));
  controller_.reset();
  engine_.reset();
  run.engine.tiers.disk_directory = host_.directory + "/tier";
  TORPOR_ASSIGN_OR_RETURN(auto devices, host_.devices ? host_.devices(run.ranks) : host_devices(run.ranks));
  const EventPort port(ring_, clock_, run.blocks);
  TORPOR_ASSIGN_OR_RETURN(
      engine_, reference::ReferenceEngine::create(std::move(devices), host_.files, clock_, run.engine, port));
  controller_ =
      std::make_unique<SleepController>(*engine_, host_.files, clock_,
                                        SleepControllerOptions{.directory = host_.directory + "/checkpoints",
                                                               .kv_budget_bytes = run.kv_budget_bytes,
                                                               .own_threads = run.engine.transfers_have_threads},
                                        port);
  return ok();
}

Status ReferenceRun::carry_out(InputKind kind, const json& words, uint64_t a, uint64_t b) {
  if (kind == InputKind::kEngine) return build(words);
  if (engine_ == nullptr) return damaged("there is no engine yet");
  switch (kind) {
    case InputKind::kRequest: {
      const int sampling = words.at("sampling");
      if (sampling < 0 || sampling > static_cast<int>(reference::Sampling::kUnseeded)) return damaged("sampling");
      const int32_t samples = words.at("samples");
      if (samples > 4096) return damaged("samples");
      return engine_->add({.id = words.at("id"),
                           .prompt = words.at("prompt"),
                           .max_tokens = words.at("max_tokens"),
                           .priority = words.at("priority"),
                           .sampling = static_cast<reference::Sampling>(sampling),
                           .seed = words.at("seed"),
                           .salt = words.at("salt")},
                          samples);
    }
    case InputKind::kAbort: happened_ = engine_->abort(words.at("id")); return ok();
    case InputKind::kStep: outputs_ = engine_->step(); return ok();
    case InputKind::kOffloadStep: happened_ = engine_->step_offload(); return ok();
    case InputKind::kCancel:
      if (a < engine_->offloads().size()) engine_->offloads()[a].cancel();
      return ok();
    case InputKind::kSleep: {
      TORPOR_ASSIGN_OR_RETURN(const Weights weights, weights_of(words));
      report_ = controller_->sleep({.level = words.at("level"),
                                    .preserve_state = words.at("preserve_state"),
                                    .to_disk = words.at("to_disk"),
                                    .in_flight = words.at("in_flight"),
                                    .discard_on_save_error = words.at("discard_on_save_error"),
                                    .weights = weights,
                                    .tags = words.at("tags")});
      return ok();
    }
    case InputKind::kWake: {
      // The host chooses where its checkpoint lies.
      const std::string from = words.at("from_checkpoint");
      if (from.find("..") != std::string::npos) return damaged("a checkpoint elsewhere");
      const int old_kv = words.value("old_kv", 0);
      if (old_kv < 0 || old_kv > static_cast<int>(OldKv::kAbort)) return damaged("old_kv");
      report_ = controller_->wake_up({.tags = words.at("tags"),
                                      .from_checkpoint = from.empty() ? std::string() : host_.directory + from,
                                      .old_kv = static_cast<OldKv>(old_kv),
                                      .early = words.value("early", false)});
      return ok();
    }
    case InputKind::kContinueWake:
      if (a > static_cast<uint64_t>(DeferredWait::kAll)) return damaged("wait");
      progress_ = controller_->continue_wake(static_cast<DeferredWait>(a));
      return ok();
    case InputKind::kCheckpoint: return checkpoint(a);
    case InputKind::kLoadWeights: engine_->load_weights(a); return ok();
    case InputKind::kOther:
      if (host_.other) host_.other(a, b);
      return ok();
    default: return damaged(fmt::format("kind {}", static_cast<int>(kind)));
  }
}

Status ReferenceRun::begin(const RunOptions& options) { return give(InputKind::kEngine, to_json(options)); }

Status ReferenceRun::add(const ReferenceRequest& request, int32_t samples) {
  return give(InputKind::kRequest, to_json(request, samples));
}

bool ReferenceRun::abort(const std::string& id) {
  (void)give(InputKind::kAbort, {{"id", id}});
  return happened_;
}

std::vector<reference::ReferenceOutput> ReferenceRun::step() {
  (void)give(InputKind::kStep, {});
  return std::move(outputs_);
}

bool ReferenceRun::step_offload() {
  (void)give(InputKind::kOffloadStep, {});
  return happened_;
}

void ReferenceRun::cancel(size_t offload) { (void)give(InputKind::kCancel, {}, offload); }

Result<SleepReport> ReferenceRun::sleep(const SleepOptions& options) {
  TORPOR_RETURN_IF_ERROR(give(InputKind::kSleep, to_json(options)));
  return std::move(*report_);
}

Result<SleepReport> ReferenceRun::wake(const WakeOptions& options) {
  std::string from = options.from_checkpoint;
  if (from.starts_with(host_.directory)) from.erase(0, host_.directory.size());
  TORPOR_RETURN_IF_ERROR(give(InputKind::kWake, {{"tags", options.tags},
                                                 {"from_checkpoint", from},
                                                 {"old_kv", static_cast<int>(options.old_kv)},
                                                 {"early", options.early}}));
  return std::move(*report_);
}

Result<WakeProgress> ReferenceRun::continue_wake(DeferredWait wait) {
  TORPOR_RETURN_IF_ERROR(give(InputKind::kContinueWake, {}, static_cast<uint64_t>(wait)));
  return progress_;
}

Status ReferenceRun::checkpoint(uint64_t call) {
  checkpoint_status_ = ok();
  switch (call) {
    case kBegin: checkpoint_status_ = controller_->begin_checkpoint(); return ok();
    case kContinue:
      while (true) {
        Result<CheckpointStage> stage = controller_->continue_checkpoint();
        if (!stage) {
          checkpoint_status_ = stage.error();
          return ok();
        }
        stage_ = *stage;
        const bool under_way = stage_ == CheckpointStage::kCopying || stage_ == CheckpointStage::kWriting;
        if (!under_way || !engine_->memory(0).transfers().own_threads()) return ok();
        std::this_thread::yield();
      }
    case kTake: checkpoint_status_ = controller_->take_checkpoint({}); return ok();
    case kEnd: report_ = controller_->end_checkpoint(); return ok();
    case kCancel: controller_->cancel_checkpoint(); return ok();
    default: return damaged(fmt::format("call {} of a checkpoint", call));
  }
}

Status ReferenceRun::begin_checkpoint() {
  TORPOR_RETURN_IF_ERROR(give(InputKind::kCheckpoint, {}, kBegin));
  return checkpoint_status_;
}

Result<CheckpointStage> ReferenceRun::continue_checkpoint() {
  TORPOR_RETURN_IF_ERROR(give(InputKind::kCheckpoint, {}, kContinue));
  if (!checkpoint_status_) return checkpoint_status_.error();
  return stage_;
}

Status ReferenceRun::take_checkpoint() {
  TORPOR_RETURN_IF_ERROR(give(InputKind::kCheckpoint, {}, kTake));
  return checkpoint_status_;
}

Result<SleepReport> ReferenceRun::end_checkpoint() {
  TORPOR_RETURN_IF_ERROR(give(InputKind::kCheckpoint, {}, kEnd));
  return std::move(*report_);
}

void ReferenceRun::cancel_checkpoint() { (void)give(InputKind::kCheckpoint, {}, kCancel); }

void ReferenceRun::load_weights(uint64_t seed) { (void)give(InputKind::kLoadWeights, {}, seed); }
void ReferenceRun::other(uint64_t a, uint64_t b) { (void)give(InputKind::kOther, {}, a, b); }

}  // namespace torpor::console
