#include "offload/offload_policy.h"

#include <cstring>

namespace torpor {

size_t DigestHash::operator()(const Digest& digest) const {
  size_t value = 0;
  std::memcpy(&value, digest.bytes.data(), sizeof value);
  return value;
}

namespace {

class PresencePolicy final : public OffloadPolicy {
 public:
  explicit PresencePolicy(const BlockRoute& route) : route_(route) {}
  std::string_view name() const override { return "presence"; }
  bool evaluate(std::span<const BlockName> blocks, std::span<uint8_t> wanted, std::chrono::nanoseconds) override {
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (wanted[i] != 0 && route_.present(blocks[i].key)) wanted[i] = 0;
    }
    return true;
  }

 private:
  const BlockRoute& route_;
};

}  // namespace

std::unique_ptr<OffloadPolicy> make_presence_policy(const BlockRoute& route) {
  return std::make_unique<PresencePolicy>(route);
}

void FrequencyPolicy::used(const Digest& key) {
  const MutexLock lock(mutex_);
  ++uses_[key];
}
void FrequencyPolicy::forget(const Digest& key) {
  const MutexLock lock(mutex_);
  uses_.erase(key);
}
bool FrequencyPolicy::evaluate(std::span<const BlockName> blocks, std::span<uint8_t> wanted, std::chrono::nanoseconds) {
  const MutexLock lock(mutex_);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto found = uses_.find(blocks[i].key);
    if (found == uses_.end() || found->second < minimum_) wanted[i] = 0;
  }
  return true;
}

}  // namespace torpor
