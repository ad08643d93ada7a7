// Policies: which blocks are worth offloading. A pipeline asks all of its policies; a block goes if every one agrees.
//
// Threads: evaluate() from the pipeline's deciding thread; the other methods from any.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

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

}  // namespace torpor
