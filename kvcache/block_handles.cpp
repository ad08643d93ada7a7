// SPDX-License-Identifier: Apache-2.0
// BlockPool: its handles BlockRef, WeakBlock and MutableBlock.
#include "kvcache/block_pool.h"

namespace torpor {

BlockRef::BlockRef(const BlockRef& other) : pool_(other.pool_), id_(other.id_) {
  if (pool_ == nullptr) return;
  const MutexLock lock(pool_->mutex_);
  pool_->keep(id_);
}
BlockRef::BlockRef(BlockRef&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)), id_(std::exchange(other.id_, -1)) {}
BlockRef& BlockRef::operator=(BlockRef other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(id_, other.id_);
  return *this;
}
BlockRef::~BlockRef() {
  if (pool_ == nullptr) return;
  const MutexLock lock(pool_->mutex_);
  pool_->drop_reference(id_);
}
// Needs no lock: while a BlockRef keeps a block, only rename() changes its identity.
const BlockIdentity& BlockRef::identity() const TORPOR_NO_THREAD_SAFETY_ANALYSIS { return pool_->slot(id_).identity; }

WeakBlock::WeakBlock(const BlockRef& block) : pool_(block.pool_), id_(block.id_) {
  if (pool_ == nullptr) return;
  const MutexLock lock(pool_->mutex_);
  generation_ = pool_->slot(id_).generation;
}
std::optional<BlockRef> WeakBlock::upgrade() const {
  if (pool_ == nullptr) return std::nullopt;
  const MutexLock lock(pool_->mutex_);
  if (id_ < 0 || id_ >= pool_->options_.num_blocks) return std::nullopt;
  const BlockPool::Slot& slot = pool_->slot(id_);
  if (slot.generation != generation_ || slot.state != BlockState::kRegistered) return std::nullopt;
  pool_->keep(id_);
  return BlockRef(*pool_, id_);
}

MutableBlock::MutableBlock(MutableBlock&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)), id_(std::exchange(other.id_, -1)) {}
MutableBlock& MutableBlock::operator=(MutableBlock&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(id_, other.id_);
  return *this;
}
MutableBlock::~MutableBlock() {
  if (pool_ == nullptr) return;
  const MutexLock lock(pool_->mutex_);
  pool_->end_ownership(id_);
}
BlockState MutableBlock::state() const {
  const MutexLock lock(pool_->mutex_);
  return pool_->slot(id_).state;
}
int32_t MutableBlock::tokens() const {
  const MutexLock lock(pool_->mutex_);
  return static_cast<int32_t>(pool_->slot(id_).identity.tokens.size());
}

Status MutableBlock::initialize(const Digest& parent, uint64_t salt, int32_t group) {
  const MutexLock lock(pool_->mutex_);
  TORPOR_RETURN_IF_ERROR(pool_->move(id_, BlockTrigger::kInitialize));
  pool_->slot(id_).identity = {.parent = parent, .salt = salt, .group = group, .tokens = {}};
  return ok();
}

Result<int32_t> MutableBlock::add_tokens(std::span<const int32_t> tokens, bool more_to_come) {
  const MutexLock lock(pool_->mutex_);
  std::vector<int32_t>& held = pool_->slot(id_).identity.tokens;
  const size_t room = static_cast<size_t>(pool_->options_.block_tokens) - held.size();
  if (tokens.empty() && room > 0)
    return Error{.code = Code::kInvalidArgument, .what = "no tokens were given", .next_step = "add at least one"};
  const size_t taken = std::min(tokens.size(), room);
  TORPOR_RETURN_IF_ERROR(pool_->move(id_, more_to_come ? BlockTrigger::kAddTokens : BlockTrigger::kAddLastTokens));
  held.insert(held.end(), tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(taken));
  return static_cast<int32_t>(taken);
}

Status MutableBlock::schedule_compute() {
  const MutexLock lock(pool_->mutex_);
  return pool_->move(id_, BlockTrigger::kScheduleCompute);
}
Status MutableBlock::cancel_schedule() {
  const MutexLock lock(pool_->mutex_);
  return pool_->move(id_, BlockTrigger::kCancelSchedule);
}
Status MutableBlock::compute_done() {
  const MutexLock lock(pool_->mutex_);
  const bool full = pool_->slot(id_).identity.tokens.size() == static_cast<size_t>(pool_->options_.block_tokens);
  return pool_->move(id_, full ? BlockTrigger::kComputeDoneFull : BlockTrigger::kComputeDone);
}
Status MutableBlock::reset() {
  const MutexLock lock(pool_->mutex_);
  TORPOR_RETURN_IF_ERROR(pool_->move(id_, BlockTrigger::kReset));
  pool_->slot(id_).identity = {};
  return ok();
}

Result<BlockRef> MutableBlock::register_block() {
  const MutexLock lock(pool_->mutex_);
  TORPOR_RETURN_IF_ERROR(pool_->move(id_, BlockTrigger::kRegister));
  pool_->make_registered(id_);
  return BlockRef(*std::exchange(pool_, nullptr), std::exchange(id_, -1));
}

Status begin_filling(MutableBlock& block, const BlockIdentity& identity) {
  TORPOR_RETURN_IF_ERROR(block.initialize(identity.parent, identity.salt, identity.group));
  TORPOR_RETURN_IF_ERROR(block.add_tokens(identity.tokens));
  return block.schedule_compute();
}

}  // namespace torpor
