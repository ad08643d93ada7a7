// SPDX-License-Identifier: Apache-2.0
// SleepController: weights that are not kept, and weights that are loaded while the engine sleeps.
#include <algorithm>

#include <fmt/core.h>

#include "base/log.h"
#include "base/text.h"
#include "engine/sleep_controller.h"
#include "engine/sleep_in_progress.h"

namespace torpor {
namespace {

bool are_missing(const Described& described, const std::string& tag) {
  return std::any_of(described.begin(), described.end(),
                     [&](const auto& reply) { return has_tag(reply.without_content, tag); });
}

}  // namespace

// Return how often each rank's weights were seen to be written; other tags are no weights, whoever writes them.
std::vector<uint64_t> SleepController::writes_of(const Described& described) {
  std::vector<uint64_t> writes;
  for (const orders::Describe::Reply& reply : described) {
    const auto found = reply.writes.find(kWeightsTag);
    writes.push_back(found == reply.writes.end() ? 0 : found->second);
  }
  return writes;
}

// For a checkpoint.
Status SleepController::has_content(const Described& described) {
  for (const orders::Describe::Reply& reply : described) {
    if (reply.without_content.empty()) continue;
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("{} came back without content and were not loaded since",
                                     joined(reply.without_content, ", ")),
                 .next_step = "load them, so that the checkpoint names what its tokens come from"};
  }
  return ok();
}

// Says of a sleep what its wake will not bring back.
void SleepController::say_what_to_load(FallingAsleep& sleep) {
  SleepReport& report = sleep.report;
  for (const std::string& tag : sleep.tags) {
    if (tag != kKvCacheTag && !is_scratch(tag) && (sleep.options.drops(tag) || are_missing(sleep.described, tag)))
      report.reload.push_back(tag);
  }
  if (report.reload.empty()) return;
  if (!report.note.empty()) report.note += "; ";
  report.note += fmt::format("{} not kept: to be loaded after the wake", joined(report.reload, ", "));
}

// Of each rank, the digest of the weights that the KV of kept requests is of; none where it is not known. Weights that
// go without a copy are read for it, unless the wake will be told what becomes of the KV. It never fails: what is not
// known is asked.
std::vector<std::string> SleepController::weights_of_kv(const FallingAsleep& sleep) noexcept {
  std::vector<std::string> weights;
  const Status found = catching([&]() TORPOR_REQUIRES(operation_mutex_) -> Status {
    const SleepOptions& options = sleep.options;
    const Described& described = sleep.described;
    if (!sleep.preserved && options.level > 0) return ok();
    if (are_missing(described, kWeightsTag) || (sleep.deeper && writes_of(described) != writes_)) return ok();
    std::vector<std::string> known = sleep.saved_weights;
    known.resize(described.size());
    for (size_t rank = 0; rank < known.size(); ++rank) {
      const auto proven = described[rank].proven.find(kWeightsTag);
      if (!known[rank].empty() || proven == described[rank].proven.end() || options_.always_read_weights) continue;
      known[rank] = proven->second;
    }
    if (!has_tag(known, "")) return weights = std::move(known), ok();
    const bool go = options.level > 0 && has_tag(sleep.tags, kWeightsTag) && options.drops(kWeightsTag);
    if (!go || is_told_ || sleep.report.requests == 0) return ok();
    // A checkpoint has just taken the digest.
    const bool as_proven = sleep.to_disk || !options_.always_read_weights;
    TORPOR_ASSIGN(std::vector<orders::DigestTags::Reply> digested,
                  ranks_.call(orders::DigestTags{.tags = {kWeightsTag}, .as_proven = as_proven}));
    for (orders::DigestTags::Reply& reply : digested) weights.push_back(std::move(reply.digests.at(kWeightsTag)));
    return ok();
  });
  if (found) return weights;
  (void)catching([&]() -> Status {
    log().warn("sleep: it will not be noticed that the same weights are loaded again: {}", found.error().to_string());
    return ok();
  });
  return {};
}

// Adds to `report` what must still be loaded. Returns whether other weights were loaded since the engine fell asleep:
// also of the same ones where a word was said about KV, or where it is not known that they are.
Result<bool> SleepController::look_at_weights(const WakeOptions& options, SleepReport& report) {
  const bool said = options.old_kv != OldKv::kUnsaid;
  const bool loaded = report.reload.empty();  // else they are still to be loaded, whatever was said
  if (said && loaded) TORPOR_TRY(ranks_.call(orders::Written{.tags = {kWeightsTag}}));
  TORPOR_ASSIGN(const Described described, ranks_.call(orders::Describe{}));
  for (const orders::Describe::Reply& reply : described) {
    for (const std::string& tag : reply.without_content) {
      if (tag != kKvCacheTag && !has_tag(report.reload, tag)) report.reload.push_back(tag);
    }
  }
  if (writes_of(described) == writes_) return false;
  if (said || !report.reload.empty()) return true;
  TORPOR_ASSIGN(const bool same, are_those_of_kv(described));
  return !same;
}

// Whether the weights, which were written, are the same bytes as before.
Result<bool> SleepController::are_those_of_kv(const Described& described) {
  if (weights_.empty() || weights_.size() != described.size()) return false;
  TORPOR_ASSIGN(const std::vector<orders::DigestTags::Reply> digested,
                ranks_.call(orders::DigestTags{.tags = {kWeightsTag}, .as_proven = !options_.always_read_weights}));
  return std::equal(digested.begin(), digested.end(), weights_.begin(), weights_.end(),
                    [](const auto& reply, const std::string& digest) {
                      const auto found = reply.digests.find(kWeightsTag);
                      return found != reply.digests.end() && found->second == digest;
                    });
}

// Where requests are kept, they wait until what is to be loaded was.
Result<bool> SleepController::waits_for(const std::vector<std::string>& reload, const WakeOptions& options) {
  if (reload.empty() || !preserved_) return false;
  if (options.others_wait) return true;
  TORPOR_ASSIGN(const int64_t requests, hooks_.unfinished_requests());
  return requests > 0;
}

// Of a wake that leaves these without content.
std::string SleepController::warning_of(const std::vector<std::string>& reload, WakeEnd end) {
  std::string warning = joined(reload, ", ");
  switch (end) {
    case WakeEnd::kStillAsleep: return warning + " without content: to be loaded before the rest wakes";
    case WakeEnd::kWaits:
      warning = fmt::format("nothing runs before {} loaded: load what is missing, then call wake_up() again", warning);
      break;
    case WakeEnd::kRuns: warning += " without content: answers are wrong until what is missing is loaded"; break;
  }
  log().warn("wake: {}", warning);
  return warning;
}

}  // namespace torpor
