#include "kvcache/onboarding.h"

namespace torpor {
namespace {

// The block itself is bad. Other failures (of the device, for want of staging memory) say nothing about it.
bool is_damage(const Error& error) {
  return error.code == Code::kCorruption || error.code == Code::kIo || error.code == Code::kNotFound;
}

// Blocks on their way: however that ends, those whose copy is over go back to their pool; one that is still Inflight
// when its owner goes would never be used again.
class Filling {
 public:
  explicit Filling(std::vector<MutableBlock>& targets) : targets_(targets), filled_(targets.size()) {}
  ~Filling() {
    for (size_t i = 0; i < targets_.size(); ++i) {
      if (!filled_[i]) (void)catching([&] { return targets_[i].compute_done(); });
    }
  }
  Filling(const Filling&) = delete;
  Filling& operator=(const Filling&) = delete;
  Status done(size_t i) {
    filled_[i] = true;
    return targets_[i].compute_done();
  }
  void never_done(size_t i) { filled_[i] = true; }  // its copy was not proven over

 private:
  std::vector<MutableBlock>& targets_;
  std::vector<bool> filled_;
};

}  // namespace

OnboardingInfo Onboarding::info() const {
  const MutexLock lock(mutex_);
  return info_;
}

std::vector<Onboarding::Source> Onboarding::find(std::span<const BlockIdentity> chain) {
  std::vector<Source> sources;
  for (const BlockIdentity& identity : chain) {
    const size_t before = sources.size();
    for (size_t store = 0; store < stores_.size() && sources.size() == before; ++store) {
      BlockRef found = stores_[store]->find(identity);
      if (found) sources.push_back({store, std::move(found), ok()});
    }
    if (sources.size() == before) break;
  }
  return sources;
}

void Onboarding::drop_damaged(const Source& source) {
  stores_[source.store]->drop_damaged(source.block);
  const MutexLock lock(mutex_);
  ++info_.damaged;
}

// Blocks of stores that are not addressable go into the first one, those of a store at once; the sources are those
// blocks then. Left as they are where that store has no room.
void Onboarding::promote(std::vector<Source>& sources) {
  BlockTier& to = *stores_[0];
  for (size_t store = 1; store < stores_.size(); ++store) {
    if (stores_[store]->addressable()) continue;
    std::vector<size_t> members;
    std::vector<MutableBlock> targets;
    std::vector<SavedChunk> chunks;
    std::vector<std::span<std::byte>> places;
    for (size_t i = 0; i < sources.size(); ++i) {
      if (sources[i].store != store) continue;
      Result<std::vector<MutableBlock>> slot = to.pool().allocate(1);
      if (!slot || !begin_filling((*slot)[0], sources[i].block.identity())) break;
      SavedChunk there = to.chunk((*slot)[0].id());
      const Result<std::span<std::byte>> place = to.place(there);
      if (!place) break;
      places.push_back(*place);
      members.push_back(i);
      targets.push_back(std::move((*slot)[0]));
      chunks.push_back(stores_[store]->chunk(sources[i].block.id()));
    }
    std::vector<TierPart> parts;
    for (size_t m = 0; m < members.size(); ++m) parts.push_back({&chunks[m], places[m], ok()});
    stores_[store]->get(parts);
    for (size_t m = 0; m < members.size(); ++m) {
      Source& source = sources[members[m]];
      source.status = std::move(parts[m].status);
      if (source.status && digest_of(places[m]) != chunks[m].digest) {
        source.status = Error{.code = Code::kCorruption,
                              .what = "a KV block on disk does not match its digest",
                              .next_step = "check the disk"};
      }
      if (!targets[m].compute_done() || !source.status) continue;
      to.remember(targets[m].id(), chunks[m].digest);
      Result<BlockRef> promoted = targets[m].register_block();
      if (!promoted) continue;
      source = {0, std::move(*promoted), ok()};
      const MutexLock lock(mutex_);
      ++info_.promoted;
    }
  }
}

Result<std::vector<BlockRef>> Onboarding::onboard(std::span<const BlockIdentity> chain) {
  if (transfers_.quarantined()) return std::vector<BlockRef>{};  // nothing is copied any more
  std::vector<Source> sources = find(chain);
  TORPOR_ASSIGN(std::vector<MutableBlock> targets, device_.allocate(static_cast<int32_t>(sources.size())));
  Filling filling(targets);
  for (size_t i = 0; i < sources.size(); ++i) TORPOR_TRY(begin_filling(targets[i], sources[i].block.identity()));
  if (mode_ == DiskOnboarding::kStaged && stores_[0]->addressable()) promote(sources);
  for (size_t store = 0; store < stores_.size(); ++store) {
    std::vector<ChunkPlan> plans;
    std::vector<size_t> members;
    for (size_t i = 0; i < sources.size(); ++i) {
      if (sources[i].store != store || !sources[i].status) continue;
      plans.push_back(plan_of(layout_, targets[i].id(), stores_[store]->chunk(sources[i].block.id())));
      members.push_back(i);
    }
    if (members.empty()) continue;
    Job job{.kind = JobKind::kRestore, .tier = stores_[store], .urgency = Urgency::kLoad};
    job.chunks.resize(members.size());
    for (size_t m = 0; m < members.size(); ++m) {
      job.chunks[m].plan = &plans[m];
      job.chunks[m].saved = stores_[store]->chunk(sources[members[m]].block.id());
    }
    const Result<JobId> id = transfers_.submit(std::move(job));
    if (!id) {
      for (const size_t member : members) sources[member].status = id.error();
      continue;
    }
    JobResult result = transfers_.wait(*id);
    for (size_t m = 0; m < members.size(); ++m) {
      Source& source = sources[members[m]];
      source.status = std::move(result.chunks[m].status);
      source.unproven = result.chunks[m].outcome == BlockOutcome::kUnproven;
    }
  }

  std::vector<BlockRef> up;
  bool unbroken = true;
  for (size_t i = 0; i < sources.size(); ++i) {
    Source& source = sources[i];
    if (source.unproven) {  // both sides stay out of use
      source.block.never_let_go();
      filling.never_done(i);
      unbroken = false;
      continue;
    }
    if (!source.status && is_damage(source.status.error())) drop_damaged(source);
    TORPOR_TRY(filling.done(i));
    unbroken = unbroken && source.status.has_value();
    if (!unbroken) continue;
    TORPOR_ASSIGN(BlockRef registered, targets[i].register_block());
    up.push_back(std::move(registered));
    const MutexLock lock(mutex_);
    ++info_.onboarded[source.store];
  }
  return up;
}

}  // namespace torpor
