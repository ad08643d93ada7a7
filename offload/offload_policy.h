// Policies: which blocks are worth offloading. A pipeline asks all of its policies; a block goes if every one agrees.
//
// Threads: evaluate() from the pipeline's deciding thread; the other methods from any.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "offload/block_route.h"

namespace torpor {

struct DigestHash {
  size_t operator()(const Digest& digest) const;
};

class OffloadPolicy {
 public:
  virtual ~OffloadPolicy() = default;
  virtual std::string_view name() const = 0;
  // Clears `wanted[i]` (not 0 on entry) for each block that should not go. Looks at `deadline` now and then and returns
  // false when it passed; then no block of this call goes.
  virtual bool evaluate(std::span<const BlockName> blocks, std::span<uint8_t> wanted,
                        std::chrono::nanoseconds deadline) = 0;
};

// Everything goes. What a pipeline without policies does.
std::unique_ptr<OffloadPolicy> make_all_policy();

// What the target tier has already stays away. `route` outlives the policy. (A block on its way is never sent twice,
// whatever the policies say.)
std::unique_ptr<OffloadPolicy> make_presence_policy(const BlockRoute& route);

// A block goes once it was used at least `minimum` times.
class FrequencyPolicy final : public OffloadPolicy {
 public:
  explicit FrequencyPolicy(uint32_t minimum) : minimum_(minimum) {}
  void used(const Digest& key);
  void forget(const Digest& key);  // evicted everywhere
  std::string_view name() const override { return "frequency"; }
  bool evaluate(std::span<const BlockName> blocks, std::span<uint8_t> wanted,
                std::chrono::nanoseconds deadline) override;

 private:
  const uint32_t minimum_;
  Mutex mutex_;
  std::unordered_map<Digest, uint32_t, DigestHash> uses_ TORPOR_GUARDED_BY(mutex_);
};

// A block goes while its retention lasts and is important enough.
class RetentionPolicy final : public OffloadPolicy {
 public:
  RetentionPolicy(int32_t minimum_priority, const Clock& clock) : minimum_(minimum_priority), clock_(clock) {}
  void retain(const Digest& key, int32_t priority, std::chrono::nanoseconds duration);
  std::string_view name() const override { return "retention"; }
  bool evaluate(std::span<const BlockName> blocks, std::span<uint8_t> wanted,
                std::chrono::nanoseconds deadline) override;

 private:
  struct Retention {
    int32_t priority = 0;
    std::chrono::nanoseconds until{};
  };
  const int32_t minimum_;
  const Clock& clock_;
  Mutex mutex_;
  std::unordered_map<Digest, Retention, DigestHash> retained_ TORPOR_GUARDED_BY(mutex_);
};

// Nothing goes while the target tier is fuller than `limit` (0 to 1).
std::unique_ptr<OffloadPolicy> make_watermark_policy(const BlockRoute& route, double limit);

// The caller decides, block by block.
std::unique_ptr<OffloadPolicy> make_predicate_policy(std::function<bool(const BlockName&)> wanted, const Clock& clock);

}  // namespace torpor
