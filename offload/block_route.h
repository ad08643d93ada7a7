// BlockRoute: one way for blocks from a tier into the next, as the pipeline sees it. The pipeline decides which blocks
// go and when; the route knows what a block is and moves its bytes.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/digest.h"
#include "offload/outcome.h"

namespace torpor {

// A block of the source tier, named but not kept.
struct BlockName {
  int32_t id = -1;
  uint64_t generation = 0;  // of its slot: another one means that the block was evicted
  Digest key;               // of its content
  friend bool operator==(const BlockName&, const BlockName&) = default;
};

class BlockRoute {
 public:
  virtual ~BlockRoute() = default;
  virtual std::string_view name() const = 0;  // "device to host"
  // Is the content in the target tier? Called by the deciding thread.
  virtual bool present(const Digest& key) const = 0;
  // Weak to strong: the block is kept from now on. False: it was evicted. After true comes exactly one transfer() with
  // it.
  virtual bool upgrade(const BlockName& block) = 0;
  // Copies upgraded blocks, proves the copies, makes the good ones visible in the target and lets go of all. Fills one
  // outcome a block: kTransferred, kPresent, kNoRoom, kDegraded, kFailed or kUnproven. The failure of one never marks
  // another (I5). Called from one transfer thread at a time, or from as many as max_concurrent_transfers.
  virtual void transfer(std::span<const BlockName> blocks, std::span<BlockOutcome> outcomes) = 0;
};

}  // namespace torpor
