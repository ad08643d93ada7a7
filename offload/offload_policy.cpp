#include "offload/offload_policy.h"

#include <algorithm>
#include <cstring>

namespace torpor {

size_t DigestHash::operator()(const Digest& digest) const {
  size_t value = 0;
  std::memcpy(&value, digest.bytes.data(), sizeof value);
  return value;
}

namespace {

class AllPolicy final : public OffloadPolicy {
 public:
  std::string_view name() const override { return "all"; }
  bool evaluate(std::span<const BlockName>, std::span<uint8_t>, std::chrono::nanoseconds) override { return true; }
};

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

class WatermarkPolicy final : public OffloadPolicy {
 public:
  WatermarkPolicy(const BlockRoute& route, double limit) : route_(route), limit_(limit) {}
  std::string_view name() const override { return "watermark"; }
  bool evaluate(std::span<const BlockName>, std::span<uint8_t> wanted, std::chrono::nanoseconds) override {
    if (route_.fill() > limit_) std::fill(wanted.begin(), wanted.end(), uint8_t{0});
    return true;
  }

 private:
  const BlockRoute& route_;
  const double limit_;
};

class PredicatePolicy final : public OffloadPolicy {
 public:
  PredicatePolicy(std::function<bool(const BlockName&)> wanted, const Clock& clock)
      : wanted_(std::move(wanted)), clock_(clock) {}
  std::string_view name() const override { return "predicate"; }
  bool evaluate(std::span<const BlockName> blocks, std::span<uint8_t> wanted,
                std::chrono::nanoseconds deadline) override {
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (clock_.now() > deadline) return false;
      if (wanted[i] != 0 && !wanted_(blocks[i])) wanted[i] = 0;
    }
    return clock_.now() <= deadline;
  }

 private:
  const std::function<bool(const BlockName&)> wanted_;
  const Clock& clock_;
};

}  // namespace

std::unique_ptr<OffloadPolicy> make_all_policy() { return std::make_unique<AllPolicy>(); }
std::unique_ptr<OffloadPolicy> make_presence_policy(const BlockRoute& route) {
  return std::make_unique<PresencePolicy>(route);
}
std::unique_ptr<OffloadPolicy> make_watermark_policy(const BlockRoute& route, double limit) {
  return std::make_unique<WatermarkPolicy>(route, limit);
}
std::unique_ptr<OffloadPolicy> make_predicate_policy(std::function<bool(const BlockName&)> wanted, const Clock& clock) {
  return std::make_unique<PredicatePolicy>(std::move(wanted), clock);
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

void RetentionPolicy::retain(const Digest& key, int32_t priority, std::chrono::nanoseconds duration) {
  const MutexLock lock(mutex_);
  retained_[key] = {priority, clock_.now() + duration};
}
bool RetentionPolicy::evaluate(std::span<const BlockName> blocks, std::span<uint8_t> wanted, std::chrono::nanoseconds) {
  const std::chrono::nanoseconds now = clock_.now();
  const MutexLock lock(mutex_);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto found = retained_.find(blocks[i].key);
    if (found == retained_.end() || found->second.priority < minimum_) {
      wanted[i] = 0;
    } else if (found->second.until < now) {
      wanted[i] = 0;
      retained_.erase(found);
    }
  }
  return true;
}

}  // namespace torpor
