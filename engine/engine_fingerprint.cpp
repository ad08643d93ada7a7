// SPDX-License-Identifier: Apache-2.0
#include "engine/engine_fingerprint.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/text.h"

namespace torpor {

Result<Fingerprint> fingerprint_of(const EngineParts& engine, const Described& described, WeightsDigest weights) {
  TORPOR_ASSIGN_OR_RETURN(Fingerprint fields, engine.hooks.fingerprint());
  fields["ranks"] = std::to_string(described.size());
  if (weights != WeightsDigest::kNone && is_tag(described, kWeightsTag)) {
    const bool as_proven = weights == WeightsDigest::kReadOrProven;
    TORPOR_ASSIGN_OR_RETURN(const bool named, add_named_weights(engine, fields, as_proven));
    if (named) return fields;
    TORPOR_ASSIGN_OR_RETURN(const std::vector<orders::DigestTags::Reply> digested,
                            engine.ranks.call(orders::DigestTags{.tags = {kWeightsTag}, .as_proven = as_proven}));
    add_weights(fields, digested);
  }
  return fields;
}

Result<bool> add_named_weights(const EngineParts& engine, Fingerprint& fields, bool as_proven) {
  TORPOR_ASSIGN_OR_RETURN(
      const std::vector<orders::DigestTags::Reply> digested,
      engine.ranks.call(orders::DigestTags{.tags = {kWeightsTag}, .as_proven = as_proven, .named = true}));
  if (std::any_of(digested.begin(), digested.end(), [](const auto& reply) { return reply.digests.empty(); }))
    return false;
  add_weights(fields, digested);
  return true;
}

std::vector<uint64_t> writes_of_weights(const Described& described) {
  std::vector<uint64_t> writes;
  for (const orders::Describe::Reply& reply : described) {
    const auto found = reply.writes.find(kWeightsTag);
    writes.push_back(found == reply.writes.end() ? 0 : found->second);
  }
  return writes;
}

Result<bool> weights_have_digests(const EngineParts& engine, const Described& described,
                                  const std::vector<std::string>& digests) {
  if (digests.empty() || digests.size() != described.size()) return false;
  TORPOR_ASSIGN_OR_RETURN(
      const std::vector<orders::DigestTags::Reply> digested,
      engine.ranks.call(orders::DigestTags{.tags = {kWeightsTag}, .as_proven = !engine.options.always_read_weights}));
  return std::equal(digested.begin(), digested.end(), digests.begin(), digests.end(),
                    [](const auto& reply, const std::string& digest) {
                      const auto found = reply.digests.find(kWeightsTag);
                      return found != reply.digests.end() && found->second == digest;
                    });
}

bool is_without_content(const Described& described, const std::string& tag) {
  return std::any_of(described.begin(), described.end(),
                     [&](const auto& reply) { return has_tag(reply.without_content, tag); });
}

Status all_have_content(const Described& described) {
  for (const orders::Describe::Reply& reply : described) {
    if (reply.without_content.empty()) continue;
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("{} came back without content and were not loaded since",
                                     joined(reply.without_content, ", ")),
                 .next_step = "load them, so that the checkpoint names what its tokens come from"};
  }
  return ok();
}

}  // namespace torpor
