#include "kvcache/disk_blocks.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>

#include <fmt/format.h>

#include "base/log.h"
#include "base/page_buffer.h"
#include "base/units.h"

namespace torpor {
namespace {

constexpr std::array<char, 8> kMagic = {'T', 'O', 'R', 'P', 'S', 'L', 'O', 'T'};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kEndianness = 0x01020304;
constexpr size_t kHeadersAtOnce = 256;

struct Header {  // then the tokens
  std::array<char, 8> magic = kMagic;
  uint32_t version = kVersion;
  uint32_t endianness = kEndianness;
  Digest header;  // of the page, with zeros here
  Digest owner;
  Digest content;
  Digest parent;
  uint64_t salt = 0;
  uint64_t bytes = 0;
  int32_t slot = 0;
  int32_t group = 0;
  int32_t tokens = 0;
  int32_t unused = 0;
};
static_assert(std::is_trivially_copyable_v<Header> && sizeof(Header) == 112);
constexpr size_t kMostTokens = (kPage - sizeof(Header)) / sizeof(int32_t);

// Zeroed pages at multiples of 4096, as direct I/O wants them.
class Pages {
 public:
  static Result<Pages> take(size_t count) {
    Pages pages;
    const std::span<std::byte> room = pages.buffer_.room(std::max<size_t>(count, 1) * kPage);
    if (room.empty()) {
      return Error{.code = Code::kResourceExhausted,
                   .what = fmt::format("no memory for the headers of {} KV blocks on disk", count),
                   .next_step = "free memory"};
    }
    std::memset(room.data(), 0, room.size());
    pages.data_ = room.data();
    return pages;
  }
  std::span<std::byte> operator[](size_t i) const { return {data_ + i * kPage, kPage}; }

 private:
  PageBuffer buffer_;
  std::byte* data_ = nullptr;
};

constexpr std::array<char, 8> kEpochMagic = {'T', 'O', 'R', 'P', 'E', 'P', 'O', 'C'};
struct EpochRecord {
  std::array<char, 8> magic = kEpochMagic;
  std::array<std::byte, 16> epoch{};
  Digest digest;  // of the two
  Digest right() const { return digest_of({reinterpret_cast<const std::byte*>(this), offsetof(EpochRecord, digest)}); }
};
static_assert(std::is_trivially_copyable_v<EpochRecord> && sizeof(EpochRecord) == 40);

std::array<std::byte, 16> random_bytes() {
  std::array<std::byte, 16> bytes;
  std::random_device source;
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(source());
  return bytes;
}

Digest owner_in_epoch(const Digest& owner, const std::array<std::byte, 16>& epoch) {
  StreamingDigest both;
  both.update(std::as_bytes(std::span(owner.bytes)));
  both.update(epoch);
  return both.finish();
}

void write_header(std::span<std::byte> page, Header header, const std::vector<int32_t>& tokens) {
  header.tokens = static_cast<int32_t>(tokens.size());
  header.header = {};
  std::memcpy(page.data(), &header, sizeof header);
  std::memcpy(page.data() + sizeof header, tokens.data(), tokens.size() * sizeof(int32_t));
  header.header = digest_of(page);
  std::memcpy(page.data(), &header, sizeof header);
}

// No value: this page is no header that anybody may believe.
std::optional<Header> read_header(std::span<std::byte> page) {
  Header header;
  std::memcpy(&header, page.data(), sizeof header);
  if (header.magic != kMagic || header.version != kVersion || header.endianness != kEndianness) return std::nullopt;
  Header blank = header;
  blank.header = {};
  std::memcpy(page.data(), &blank, sizeof blank);
  if (digest_of(page) != header.header) return std::nullopt;
  if (header.tokens < 0 || static_cast<size_t>(header.tokens) > kMostTokens) return std::nullopt;
  return header;
}

}  // namespace

DiskBlocks::DiskBlocks(std::unique_ptr<BlockPool> pool, DiskBlocksOptions options, std::unique_ptr<File> lock,
                       std::unique_ptr<File> file, std::unique_ptr<File> epoch, const Clock& clock)
    : BlockStore(std::move(pool), options.bytes_per_block),
      options_(std::move(options)),
      lock_(std::move(lock)),
      file_(std::move(file)),
      epoch_file_(std::move(epoch)),
      clock_(clock),
      claims_(static_cast<size_t>(options_.pool.num_blocks)) {
  health_.io = file_->io();
}

uint64_t DiskBlocks::stride() const { return kPage + align_up(options_.bytes_per_block, kPage); }

Result<std::unique_ptr<DiskBlocks>> DiskBlocks::open(Directory& directory, DiskBlocksOptions options,
                                                     const Clock& clock, EventSink* sink) {
  TORPOR_TRY(check(options.bytes_per_block));
  if (options.pool.block_tokens > static_cast<int32_t>(kMostTokens)) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("block_tokens is {}", options.pool.block_tokens),
                 .next_step = fmt::format("use {} or less with a disk tier", kMostTokens)};
  }
  TORPOR_ASSIGN(std::unique_ptr<BlockPool> pool, BlockPool::create(options.pool, sink));
  TORPOR_ASSIGN(std::unique_ptr<File> lock, directory.lock("blocks.lock"));
  TORPOR_ASSIGN(std::unique_ptr<File> file, directory.open_slots("blocks", options.io));
  const uint64_t size =
      static_cast<uint64_t>(options.pool.num_blocks) * (kPage + align_up(options.bytes_per_block, kPage));
  TORPOR_TRY(file->preallocate(size));
  TORPOR_TRY(file->truncate(size));
  TORPOR_ASSIGN(std::unique_ptr<File> epoch, directory.open_slots("blocks.epoch", FileIo::kPlain));
  std::unique_ptr<DiskBlocks> blocks(
      new DiskBlocks(std::move(pool), std::move(options), std::move(lock), std::move(file), std::move(epoch), clock));
  TORPOR_TRY(blocks->read_epoch());
  TORPOR_TRY(directory.sync());
  TORPOR_TRY(blocks->recover());
  const DiskBlocksHealth health = blocks->health();
  log().info("KV blocks on disk: {} slots of {} bytes through {}, {} recovered", blocks->options_.pool.num_blocks,
             blocks->stride(), health.io, health.recovered);
  return blocks;
}

// That of the file; a new one where there is none that can be believed.
Status DiskBlocks::read_epoch() {
  TORPOR_ASSIGN(const uint64_t size, epoch_file_->size());
  EpochRecord record;
  if (size >= sizeof record) {
    TORPOR_TRY(epoch_file_->pread({reinterpret_cast<std::byte*>(&record), sizeof record}, 0));
    if (record.magic == kEpochMagic && record.digest == record.right()) {
      const MutexLock lock(mutex_);
      epoch_ = record.epoch;
      owner_ = owner_in_epoch(options_.owner, epoch_);
      epoch_is_durable_ = true;
      return ok();
    }
    log().warn("KV blocks on disk: {} is damaged, all slots count as empty", epoch_file_->name());
  }
  return forget_all(options_.owner);
}

Status DiskBlocks::forget_all(std::optional<Digest> owner) {
  if (!owner) owner = Digest{digest_of(random_bytes())};  // nobody can name it
  {
    const MutexLock lock(mutex_);
    epoch_ = random_bytes();
    owner_ = owner_in_epoch(*owner, epoch_);
    epoch_is_durable_ = false;
  }
  pool().clear_cached();
  Status done = make_epoch_durable();
  if (!done) note(done, true);
  return done;
}

// Before anything is put.
Status DiskBlocks::make_epoch_durable() {
  EpochRecord record;
  {
    const MutexLock lock(mutex_);
    if (epoch_is_durable_) return ok();
    if (epoch_is_lost_) {
      return Error{.code = Code::kIo,
                   .what = fmt::format("{} could not be synced", epoch_file_->name()),
                   .next_step = "check the disk, and restart"};
    }
    record.epoch = epoch_;
  }
  record.digest = record.right();
  TORPOR_TRY(epoch_file_->pwrite({reinterpret_cast<const std::byte*>(&record), sizeof record}, 0));
  const Status synced = epoch_file_->sync();
  const MutexLock lock(mutex_);
  if (!synced) {
    epoch_is_lost_ = true;
  } else if (epoch_ == record.epoch) {
    epoch_is_durable_ = true;
  }
  return synced;
}

// Takes all slots in turn, registers those that can be believed and lets go of the rest.
Status DiskBlocks::recover() {
  TORPOR_ASSIGN(std::vector<MutableBlock> slots, pool().allocate(pool().num_blocks()));
  TORPOR_ASSIGN(const Pages pages, Pages::take(std::min(slots.size(), kHeadersAtOnce)));
  Digest owner;
  {
    const MutexLock lock(mutex_);
    owner = owner_;
  }
  int32_t recovered = 0;
  for (size_t first = 0; first < slots.size(); first += kHeadersAtOnce) {
    const size_t count = std::min(kHeadersAtOnce, slots.size() - first);
    std::vector<FilePart> parts;
    for (size_t i = 0; i < count; ++i) parts.push_back({offset(slots[first + i].id()), pages[i], ok()});
    file_->pread_all(parts);
    for (size_t i = 0; i < count; ++i) {
      note(parts[i].status, false);
      const std::optional<Header> header = parts[i].status ? read_header(pages[i]) : std::nullopt;
      MutableBlock& block = slots[first + i];
      if (!header || header->slot != block.id() || header->owner != owner ||
          header->bytes != options_.bytes_per_block || header->tokens != options_.pool.block_tokens) {
        continue;
      }
      std::vector<int32_t> tokens(static_cast<size_t>(header->tokens));
      std::memcpy(tokens.data(), pages[i].data() + sizeof(Header), tokens.size() * sizeof(int32_t));
      TORPOR_TRY(block.initialize(header->parent, header->salt, header->group));
      TORPOR_TRY(block.add_tokens(tokens));
      TORPOR_TRY(block.schedule_compute());
      TORPOR_TRY(block.compute_done());
      remember(block.id(), header->content);
      TORPOR_TRY(block.register_block());
      ++recovered;
    }
  }
  const MutexLock lock(mutex_);
  health_.recovered = recovered;
  return ok();
}

void DiskBlocks::claim(int32_t slot, const BlockIdentity& identity) { claims_[static_cast<size_t>(slot)] = identity; }

void DiskBlocks::put(std::span<TierPart> parts) {
  const Result<Pages> taken = Pages::take(parts.size());
  Status can = make_epoch_durable();
  if (can && !taken) can = taken.error();
  if (!can) {
    for (TierPart& part : parts) {
      part.status = can;
      note(can, true);
    }
    return;
  }
  const Pages& headers = *taken;
  Digest owner;
  {
    const MutexLock lock(mutex_);
    owner = owner_;
  }
  std::vector<FilePart> writes;
  for (size_t i = 0; i < parts.size(); ++i) {
    SavedChunk& chunk = *parts[i].chunk;
    const auto slot = static_cast<int32_t>(chunk.key.index);
    const BlockIdentity& identity = claims_[chunk.key.index];
    chunk.codec = Codec::kNone;
    chunk.offset = offset(slot) + kPage;
    chunk.stored_bytes = chunk.bytes;
    write_header(headers[i],
                 {.owner = owner,
                  .content = chunk.digest,
                  .parent = identity.parent,
                  .salt = identity.salt,
                  .bytes = chunk.bytes,
                  .slot = slot,
                  .group = identity.group},
                 identity.tokens);
    writes.push_back({offset(slot), headers[i], ok()});
    writes.push_back({chunk.offset, {parts[i].bytes.data(), align_up(chunk.bytes, kPage)}, ok()});
  }
  file_->pwrite_all(writes);
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i].status = writes[2 * i].status ? std::move(writes[2 * i + 1].status) : std::move(writes[2 * i].status);
    note(parts[i].status, true);
  }
}

void DiskBlocks::get(std::span<TierPart> parts) {
  std::vector<FilePart> reads;
  for (const TierPart& part : parts) {
    reads.push_back({offset(static_cast<int32_t>(part.chunk->key.index)) + kPage,
                     {part.bytes.data(), align_up(part.chunk->bytes, kPage)},
                     ok()});
  }
  file_->pread_all(reads);
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i].status = std::move(reads[i].status);
    note(parts[i].status, false);
  }
}

void DiskBlocks::note(const Status& status, bool write) {
  const MutexLock lock(mutex_);
  if (status) {
    if (write) health_.degraded = false;
    return;
  }
  ++(write ? health_.write_errors : health_.read_errors);
  health_.reason = status.error().to_string();
  if (!write) return;  // a block that cannot be read is a miss, others may be well
  if (!health_.degraded)
    log().warn("KV blocks on disk: {}; trying again in {} ms", health_.reason, options_.retry_interval.count());
  health_.degraded = true;
  failed_at_ = clock_.now();
}

bool DiskBlocks::accepting() const {
  const MutexLock lock(mutex_);
  return !health_.degraded || clock_.now() >= failed_at_ + options_.retry_interval;
}

DiskBlocksHealth DiskBlocks::health() const {
  const MutexLock lock(mutex_);
  return health_;
}

}  // namespace torpor
