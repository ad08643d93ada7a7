// SPDX-License-Identifier: Apache-2.0
#include "remote/store_removal.h"

#include <algorithm>
#include <unordered_set>

#include <fmt/core.h>

#include "remote/answer_copies.h"
#include "remote/checkpoint_copies.h"
#include "remote/ownership.h"
#include "remote/store_leases.h"

namespace torpor::remote {
namespace {

constexpr std::string_view kParts = "parts/";

Result<std::vector<std::string>> all_parts(ObjectStore& store) {
  std::vector<std::string> parts;
  TORPOR_RETURN_IF_ERROR(store.each_key(kParts, [&](std::string_view key) {
    if (is_part_key(key)) parts.emplace_back(key);
    return true;
  }));
  std::sort(parts.begin(), parts.end());
  return parts;
}

struct Going {
  std::vector<std::string> keys;  // in order of removal
  RemovalReport report;
};

Result<Going> what_goes(ObjectStore& store, const RemovalOptions& options) {
  TORPOR_ASSIGN_OR_RETURN(const OwnerRecord owner, newest_owner(store));
  // List parts before the indexes: a part that is pushed later is not in the list.
  TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> parts, all_parts(store));
  TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> logs, store.list(kAnswersPrefix));
  TORPOR_ASSIGN_OR_RETURN(const std::vector<PushedCheckpoint> pushed, list_pushed(store));
  Going going;
  std::unordered_set<std::string> named;
  for (size_t i = 0; i < pushed.size(); ++i) {
    const PushedCheckpoint& each = pushed[i];
    const bool newest = options.keep == 0 || i + static_cast<size_t>(options.keep) >= pushed.size();
    if (!newest && (options.force || each.name != owner.checkpoint)) {
      going.keys.push_back(index_key(each.name));
      going.report.checkpoints.push_back(each.name);
      continue;
    }
    if (!each.readable) return each.problem.within(fmt::format("what {} names is not known", each.name));
    ++going.report.left;
    for (const IndexedFile& file : each.index.files) {
      for (const std::string& hash : file.parts) named.insert(part_key(hash));
    }
  }
  for (const std::string& key : logs) {
    if (!is_answers_key(key)) continue;
    const std::string hash = key.substr(kAnswersPrefix.size());
    if (hash != owner.answers) {
      going.keys.push_back(key);
      ++going.report.answers;
      continue;
    }
    TORPOR_ASSIGN_OR_RETURN(const std::vector<IndexedFile> files, read_answers(store, hash));
    for (const IndexedFile& file : files) {
      for (const std::string& part : file.parts) named.insert(part_key(part));
    }
  }
  for (const std::string& key : parts) {
    if (named.contains(key)) continue;
    going.keys.push_back(key);
    ++going.report.parts;
  }
  return going;
}

}  // namespace

Status remove_pushed(ObjectStore& store, const std::string& name, const Clock& clock, const RemovalOptions& options) {
  return try_catch([&]() -> Status {
    const std::string key = index_key(name);
    TORPOR_ASSIGN_OR_RETURN(const std::optional<uint64_t> there, store.size(key));
    if (!there)
      return Error{.code = Code::kNotFound,
                   .what = fmt::format("there is no checkpoint {} in {}", name, store.url()),
                   .next_step = "see what there is with torpor ls"};
    const auto refused = [&]() -> Status {
      TORPOR_ASSIGN_OR_RETURN(const OwnerRecord owner, newest_owner(store));
      if (options.force || owner.checkpoint != name) return ok();
      return Error{.code = Code::kFailedPrecondition,
                   .what = fmt::format("a server goes on from {}, or will", name),
                   .next_step = "push a newer one first, or force it"};
    };
    if (options.dry_run) return refused();
    TORPOR_ASSIGN_OR_RETURN(StoreLease lease, StoreLease::begin(store, LeaseKind::kRemoval, clock));
    if (const Status no = refused(); !no) {
      TORPOR_RETURN_IF_ERROR(lease.end(store));
      return no;
    }
    TORPOR_RETURN_IF_ERROR(store.remove(key));
    return lease.end(store);
  });
}

Result<RemovalReport> remove_unnamed(ObjectStore& store, const Clock& clock, const RemovalOptions& options) {
  return try_catch([&]() -> Result<RemovalReport> {
    RemovalReport report;
    while (true) {
      std::optional<StoreLease> lease;
      if (!options.dry_run) {
        TORPOR_ASSIGN_OR_RETURN(lease, StoreLease::begin(store, LeaseKind::kRemoval, clock));
      }
      Result<Going> going = what_goes(store, options);
      for (const std::string_view folder : {"parts", "answers", "checkpoints"}) {
        if (!going) break;
        const Status unfinished = store.remove_unfinished(folder, [&](std::string_view) {
          ++report.parts;
          return !options.dry_run;
        });
        if (!unfinished) going = unfinished.error();
      }
      if (!going) {
        if (lease) (void)lease->end(store);  // nothing was removed
        return going.error();
      }
      report.left = going->report.left;
      size_t gone = 0;
      // After an error the removal may take effect later, so the lease stays, and pushes wait until it expires.
      for (; lease && gone < going->keys.size() && !lease->over(); ++gone)
        TORPOR_RETURN_IF_ERROR(store.remove(going->keys[gone]));
      if (lease) TORPOR_RETURN_IF_ERROR(lease->end(store));
      const bool done = options.dry_run || gone == going->keys.size();
      for (size_t i = 0; i < (options.dry_run ? going->keys.size() : gone); ++i) {
        const std::string& key = going->keys[i];
        if (i < going->report.checkpoints.size()) {
          report.checkpoints.push_back(going->report.checkpoints[i]);
        } else {
          ++(key.starts_with(kParts) ? report.parts : report.answers);
        }
      }
      if (done) return report;
      if (gone == 0)
        return Error{.code = Code::kTimeout,
                     .what = fmt::format("{} did not say what it has in time", store.url()),
                     .next_step = "remove what is under one prefix less"};
    }
  });
}

}  // namespace torpor::remote
