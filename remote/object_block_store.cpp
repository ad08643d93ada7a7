// SPDX-License-Identifier: Apache-2.0
#include "remote/object_block_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/core.h>

#include "base/log.h"
#include "base/units.h"
#include "remote/open_store.h"

namespace torpor::remote {
namespace {

constexpr uint64_t kMostRun = 32 * kMiB;   // of one read
constexpr uint64_t kMostPack = 64 * kMiB;  // of one write
constexpr uint64_t kPutBytes = 16 * kMiB;  // of one put(); a write of so many ends well within the usual deadline
constexpr uint64_t kMostIndex = 64 * kMiB;
constexpr size_t kMostRemovals = 1000;   // of one sweep
constexpr size_t kMostUnindexed = 1024;  // heads that wait for an index; the rest is read pack by pack
constexpr std::chrono::seconds kLookSeconds{30};
constexpr std::chrono::hours kSweepInterval{1};

// The deadline of this thread's call of the store.
thread_local std::chrono::steady_clock::time_point call_ends;
void begin_call(std::chrono::milliseconds length) { call_ends = std::chrono::steady_clock::now() + length; }
double call_seconds_left() {
  return std::chrono::duration<double>(call_ends - std::chrono::steady_clock::now()).count();
}

// Return whether the error is about the whole store, so that its other calls would fail as well; else it is about one
// object.
bool is_about_the_store(const Error& error) {
  return error.code == Code::kUnavailable || error.code == Code::kAborted || error.code == Code::kUnauthenticated ||
         error.code == Code::kFailedPrecondition;
}

BlockStoreOptions block_options(const ObjectBlockStoreOptions& options, const std::string& url) {
  return BlockStoreOptions::of(options, "", url.substr(0, url.find(':')));
}

}  // namespace

ObjectBlockStore::ObjectBlockStore(std::unique_ptr<ObjectStore> store, const ObjectBlockStoreOptions& options,
                                   const Clock& clock)
    : BlockStore(block_options(options, store->url()), clock, kPutBytes),
      options_(options),
      store_(std::move(store)),
      breaker_(clock, options.breaker) {}

Result<std::unique_ptr<ObjectBlockStore>> ObjectBlockStore::open(const std::string& url, FileSystem& file_system,
                                                                 const ObjectBlockStoreOptions& options,
                                                                 const Clock& clock) {
  return try_catch([&]() -> Result<std::unique_ptr<ObjectBlockStore>> {
    const auto ending = std::make_shared<std::atomic<bool>>(false);
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<ObjectStore> store,
                            open_object_store(
                                file_system, url, [ending] { return ending->load(); }, call_seconds_left));
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<ObjectBlockStore> made, open(std::move(store), options, clock));
    made->ending_is(ending);
    return made;
  });
}

Result<std::unique_ptr<ObjectBlockStore>> ObjectBlockStore::open(std::unique_ptr<ObjectStore> store,
                                                                 const ObjectBlockStoreOptions& options,
                                                                 const Clock& clock) {
  return try_catch([&]() -> Result<std::unique_ptr<ObjectBlockStore>> {
    TORPOR_RETURN_IF_ERROR(block_options(options, store->url()).validate());
    if (options.timeout.count() < 1 || options.expire.count() < 0) {
      return Error{.code = Code::kInvalidArgument,
                   .what = fmt::format("an object store for KV blocks with {} ms, which expire after {} s",
                                       options.timeout.count(), options.expire.count()),
                   .next_step = "use 1 ms or more, and 0 s for never"};
    }
    std::unique_ptr<ObjectBlockStore> made(new ObjectBlockStore(std::move(store), options, clock));
    made->thread_ = std::thread([self = made.get()] { self->run(); });
    return made;
  });
}

ObjectBlockStore::~ObjectBlockStore() {
  {
    const MutexLock lock(known_);
    over_ = true;
    if (ending_ != nullptr) *ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void ObjectBlockStore::ending_is(std::shared_ptr<std::atomic<bool>> ending) {
  const MutexLock lock(known_);
  ending_ = std::move(ending);
}

void ObjectBlockStore::open_space(uint32_t space, const Digest& digest) {
  BlockStore::open_space(space, digest);
  {
    const MutexLock lock(known_);
    if (const std::optional<Digest> opened = space_of(space); opened != space_) {
      space_ = opened;
      looked_ = Looked::kNever;
      blocks_.clear();
      packs_.clear();
      pack_numbers_.clear();
      indexes_.clear();
      without_index_.clear();
    }
    wanted_ = true;
  }
  changed_.notify_all();
}

size_t ObjectBlockStore::known_blocks() const {
  const MutexLock lock(known_);
  return blocks_.size();
}

size_t ObjectBlockStore::known_objects() const {
  const MutexLock lock(known_);
  return packs_.size() + indexes_.size();
}

// Report the result of a call to the breaker. An error about one object is an answer, too.
void ObjectBlockStore::record_answer(const Status& status, bool writes) {
  if (!status && writes && status.error().code == Code::kUnauthenticated) return;  // who may not write may still read
  if (status || !is_about_the_store(status.error())) {
    if (breaker_.succeeded()) log().info("KV connector: {} answers again", store_->url());
  } else if (breaker_.failed()) {
    log().warn("KV connector: {} is not asked for a while: {}", store_->url(), status.error());
  }
}

void ObjectBlockStore::exchange(std::span<Item> items, Verb verb) {
  if (items.empty()) return;
  const Status done = try_catch([&]() -> Status {
    switch (verb) {
      case Verb::kFind: find_items(items); break;
      case Verb::kPut: put_items(items); break;
      case Verb::kGet: get_items(items); break;
      case Verb::kRemove: forget_items(items); break;
    }
    return ok();
  });
  if (done) return;
  for (Item& item : items) item.status = done.error();
}

// ---- find

void ObjectBlockStore::find_items(std::span<Item> items) {
  const auto until = std::chrono::steady_clock::now() + options_.timeout;
  MutexLock lock(known_);
  while (looked_ == Looked::kNever && !over_) {
    const auto left = until - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds(0)) break;
    changed_.wait_for(known_, left);
  }
  bool all = true;
  for (Item& item : items) {
    const bool there = blocks_.contains(digest_of_text(item.key));
    all = all && there;
    if (!there)
      item.status = looked_ == Looked::kDone ? missing() : unavailable("what the object store has is not known");
  }
  const bool due = clock_.now() - looked_at_ >= options_.look_interval;
  if (all || looking_ || !due || !breaker_.closed_or_due()) return;
  wanted_ = true;
  changed_.notify_all();
}

// ---- put

void ObjectBlockStore::put_items(std::span<Item> items) {
  std::vector<Item*> absent;
  {
    const MutexLock lock(known_);
    for (Item& item : items) {
      if (!blocks_.contains(digest_of_text(item.key))) absent.push_back(&item);
    }
  }
  for (size_t first = 0; first < absent.size();) {
    size_t end = first;
    uint64_t bytes = 0;
    while (end < absent.size() && end - first < kMostPackBlocks && (bytes == 0 || bytes < kMostPack))
      bytes += kFrameBytes + absent[end++]->body.size();
    const std::span<Item* const> some = std::span(absent).subspan(first, end - first);
    const Status put =
        breaker_.may_ask() ? put_pack(some) : Status(unavailable("the object store is not asked for a while"));
    for (Item* const item : some) item->status = put;
    first = end;
  }
}

std::string ObjectBlockStore::new_name(uint64_t number) const {
  return PackName{.unix_seconds = now_seconds(), .id = torpor::hex(random_seal_id()), .number = number}.text();
}

Status ObjectBlockStore::put_pack(std::span<Item* const> items) {
  std::vector<PackEntry> entries;
  for (const Item* const item : items) {
    entries.push_back(
        {.hash = item->expected.hash, .group = item->expected.group, .bytes = kFrameBytes + item->body.size()});
  }
  const std::vector<std::byte> head = encode_pack_head(entries);
  std::vector<std::byte> object = head;
  object.reserve(entries.back().offset + entries.back().bytes);
  for (const Item* const item : items) {
    object.insert(object.end(), item->head.begin(), item->head.end());
    object.insert(object.end(), item->body.begin(), item->body.end());
  }
  const std::string name = new_name(items.size());
  const Digest& space = items[0]->expected.space;
  const std::string folder = pack_folder(space, options_.rank);
  begin_call(options_.timeout);
  const Result<bool> created = store_->put_new(key_of_pack(folder, name), object);  // false: by its first attempt
  record_answer(created ? ok() : Status(created.error()), true);
  if (!created) {
    const Code code = created.error().code;
    if (code == Code::kResourceExhausted || code == Code::kUnauthenticated) no_room();
    return created.error();
  }
  if (add_pack(folder, name, space, entries)) add_head(folder, name, head);
  return ok();
}

// ---- get

void ObjectBlockStore::get_items(std::span<Item> items) {
  bool answers = true;
  for (Run& run : runs_of(items)) {
    if (answers && breaker_.may_ask()) {
      read(run);
      // A read that the store did not answer leaves no time for the others.
      const Status& first = run.items[0].first->status;
      answers = first || !is_about_the_store(first.error());
      continue;
    }
    for (const auto& [item, bytes] : run.items) item->status = unavailable("the object store is not asked for a while");
  }
}

std::vector<ObjectBlockStore::Run> ObjectBlockStore::runs_of(std::span<Item> items) {
  struct Placed {
    Location location;
    Item* item;
  };
  std::vector<Placed> placed;
  std::vector<Run> runs;
  const MutexLock lock(known_);
  for (Item& item : items) {
    const auto found = blocks_.find(digest_of_text(item.key));
    if (found == blocks_.end()) {
      item.status = missing();
    } else {
      placed.push_back({found->second, &item});
    }
  }
  std::sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
    return std::pair(a.location.pack, a.location.offset) < std::pair(b.location.pack, b.location.offset);
  });
  for (const Placed& each : placed) {
    const bool goes_on = !runs.empty() && runs.back().pack == each.location.pack &&
                         runs.back().offset + runs.back().bytes == each.location.offset &&
                         runs.back().bytes + each.location.bytes <= kMostRun;
    if (!goes_on)
      runs.push_back(
          {.key = packs_.at(each.location.pack).key, .pack = each.location.pack, .offset = each.location.offset});
    runs.back().bytes += each.location.bytes;
    runs.back().items.emplace_back(each.item, each.location.bytes);
  }
  return runs;
}

void ObjectBlockStore::read(Run& run) {
  std::vector<std::byte> buffer(run.bytes);
  begin_call(options_.timeout);
  const Status came = store_->get_range(run.key, run.offset, buffer);
  record_answer(came, false);
  if (!came) {
    const bool gone = came.error().code == Code::kNotFound;
    if (gone) {
      const MutexLock lock(known_);
      forget_key(run.key);
    }
    for (const auto& [item, bytes] : run.items) item->status = gone ? missing() : came.error();
    return;
  }
  std::span<std::byte> left = buffer;
  for (const auto& [item, bytes] : run.items) {
    const std::span<std::byte> value = left.first(bytes);
    left = left.subspan(bytes);
    FrameBytes head;
    std::memcpy(head.data(), value.data(), head.size());
    const Result<BlockFrame> frame = frame_of(head, value.size() - kFrameBytes, item->expected);
    item->status = frame ? open_value(*item, *frame, head, value.subspan(kFrameBytes)) : Status(frame.error());
  }
}

// Forget the blocks in this process only: the store cannot remove one block of a pack.
void ObjectBlockStore::forget_items(std::span<Item> items) {
  const MutexLock lock(known_);
  for (Item& item : items) {
    blocks_.erase(digest_of_text(item.key));
    item.status = ok();
  }
}

// ---- what is there

// Return whether this engine did not know the pack: a look may find a pack in the list while put_pack() adds it.
bool ObjectBlockStore::add_pack(const std::string& folder, const std::string& name, const Digest& space,
                                std::span<const PackEntry> entries) {
  const std::string key = key_of_pack(folder, name);
  std::vector<std::pair<Digest, Location>> locations;
  for (const PackEntry& entry : entries) {
    if (entry.bytes > kFrameBytes + compressed_bound(options_.record_bytes)) continue;  // no block of this engine's
    const BlockKey block{.hash = entry.hash, .group = entry.group};
    locations.emplace_back(digest_of_text(block_key_text("", space, options_.rank, block)),
                           Location{.bytes = static_cast<uint32_t>(entry.bytes), .offset = entry.offset});
  }
  const std::optional<PackName> parsed = PackName::of(name);
  KnownPack made{.key = key, .unix_seconds = parsed ? parsed->unix_seconds : 0};
  made.blocks.reserve(locations.size());
  const MutexLock lock(known_);
  if (space_ != space) return true;
  if (pack_numbers_.contains(key)) return false;
  const uint32_t number = ++last_pack_;
  KnownPack& pack = packs_.emplace(number, std::move(made)).first->second;
  pack.look = look_;
  const Status numbered = try_catch([&]() TORPOR_REQUIRES(known_) -> Status {
    pack_numbers_.emplace(key, number);
    return ok();
  });
  if (!numbered) {
    packs_.erase(number);  // the next look finds it
    return false;
  }
  for (auto& [block, location] : locations) {
    location.pack = number;
    const auto [known, is_new] = blocks_.try_emplace(block, location);
    if (!is_new) {
      KnownPack& other = packs_.at(known->second.pack);
      if (&other != &pack && other.unix_seconds >= pack.unix_seconds) continue;
      std::erase(other.blocks, block);
      known->second = location;
    }
    pack.blocks.push_back(block);
  }
  bound_blocks();
  return true;
}

// With more blocks than this store has slots: forget those of the oldest packs, the next to expire. Their names stay,
// so that nobody reads these packs again.
void ObjectBlockStore::bound_blocks() {
  const auto most = static_cast<size_t>(options_.slots);
  if (blocks_.size() <= most) return;
  std::vector<std::pair<int64_t, uint32_t>> oldest;
  for (const auto& [number, pack] : packs_) {
    if (!pack.blocks.empty()) oldest.emplace_back(pack.unix_seconds, number);
  }
  std::sort(oldest.begin(), oldest.end());
  for (const auto& [seconds, number] : oldest) {
    if (blocks_.size() <= most - most / 16) return;  // the next packs have room, too
    forget_blocks_of(number, packs_.at(number));
  }
}

void ObjectBlockStore::add_head(const std::string& folder, std::string name, std::vector<std::byte> head) {
  {
    const MutexLock lock(known_);
    std::vector<IndexedPack>& packs = without_index_[folder];
    if (packs.size() >= kMostUnindexed) return;
    packs.push_back({.name = std::move(name), .head = std::move(head)});
    if (packs.size() % kPacksOfAnIndex != 0) return;
    wanted_ = true;
  }
  changed_.notify_all();
}

void ObjectBlockStore::forget_pack(uint32_t number) {
  const auto pack = packs_.find(number);
  if (pack == packs_.end()) return;
  forget_blocks_of(number, pack->second);
  pack_numbers_.erase(pack->second.key);
  packs_.erase(pack);
}

void ObjectBlockStore::forget_blocks_of(uint32_t number, KnownPack& pack) {
  for (const Digest& block : pack.blocks) {
    const auto found = blocks_.find(block);
    if (found != blocks_.end() && found->second.pack == number) blocks_.erase(found);
  }
  pack.blocks = {};
}

void ObjectBlockStore::forget_key(const std::string& key) {
  if (const auto known = pack_numbers_.find(key); known != pack_numbers_.end()) forget_pack(known->second);
  indexes_.erase(key);
}

Status ObjectBlockStore::look() {
  {
    MutexLock lock(known_);
    while (!over_ && (wanted_ || looking_)) changed_.wait(known_);
  }
  return look_once();
}

Status ObjectBlockStore::look_once() {
  std::optional<Digest> space;
  {
    const MutexLock lock(known_);
    space = space_;
  }
  if (!space) return ok();
  if (!breaker_.may_ask())
    return try_catch([]() -> Status { return unavailable("the object store is not asked for a while"); });
  bool writes = false;
  Status looked = try_catch([&]() -> Status {
    TORPOR_RETURN_IF_ERROR(look_at(*space));
    {
      const MutexLock lock(known_);
      if (space == space_) looked_ = Looked::kDone;  // find() need not wait for the rest
    }
    changed_.notify_all();
    writes = true;
    TORPOR_RETURN_IF_ERROR(write_indexes());
    TORPOR_RETURN_IF_ERROR(sweep());
    return remove_unfinished();
  });
  record_answer(looked, writes);
  return looked;
}

Status ObjectBlockStore::look_at(const Digest& space) {
  const std::string folder = pack_folder(space, options_.rank);
  uint64_t look = 0;
  {
    const MutexLock lock(known_);
    look = ++look_;
  }
  std::vector<PackName> indexes;
  Names listed_indexes;
  Names unknown;
  begin_call(kLookSeconds);
  TORPOR_RETURN_IF_ERROR(store_->each_key(folder, [&](std::string_view key) {
    begin_call(kLookSeconds);  // as long as keys come, the list may take longer
    const std::string_view rest = key.substr(folder.size());
    const MutexLock lock(known_);
    if (rest.starts_with(kPacks)) {
      if (const auto known = pack_numbers_.find(std::string(key)); known != pack_numbers_.end()) {
        KnownPack& pack = packs_.at(known->second);
        pack.look = std::max(pack.look, look);
      } else {
        unknown.emplace(rest.substr(kPacks.size()));
      }
    } else if (rest.starts_with(kIndexes)) {
      listed_indexes.emplace(key);
      const std::optional<PackName> name = PackName::of(rest.substr(kIndexes.size()));
      if (name && name->number <= kMostIndex && !indexes_.contains(key)) indexes.push_back(*name);
    }
    return !over_ && space_ == space;
  }));
  {
    const MutexLock lock(known_);
    if (over_ || space_ != space) return ok();
    std::vector<uint32_t> gone;  // a pack that was put since the list began may not be in it
    for (const auto& [number, pack] : packs_) {
      if (pack.look < look && pack.key.starts_with(folder)) gone.push_back(number);
    }
    for (const uint32_t number : gone) forget_pack(number);
    std::erase_if(indexes_,
                  [&](const std::string& key) { return key.starts_with(folder) && !listed_indexes.contains(key); });
  }
  std::sort(indexes.begin(), indexes.end(), [](const PackName& one, const PackName& other) {
    return std::pair(one.unix_seconds, one.id) < std::pair(other.unix_seconds, other.id);
  });
  for (const PackName& name : indexes) TORPOR_RETURN_IF_ERROR(read_index(folder, name, unknown, space));
  for (const std::string& name : unknown) {
    {
      const MutexLock lock(known_);
      if (over_ || space_ != space) return ok();
      if (pack_numbers_.contains(key_of_pack(folder, name))) continue;
    }
    TORPOR_RETURN_IF_ERROR(read_head(folder, name, space));
  }
  return ok();
}

// Read an index. A damaged or removed index is skipped, and not read again. Errors are those of the store.
Status ObjectBlockStore::read_index(const std::string& folder, const PackName& name, const Names& unknown,
                                    const Digest& space) {
  const std::string key = key_of_index(folder, name.text());
  std::vector<std::byte> bytes(name.number);
  begin_call(kLookSeconds);
  const Result<uint64_t> came = store_->get(key, bytes);
  if (!came && came.error().code != Code::kNotFound && came.error().code != Code::kCorruption) return came.error();
  {
    const MutexLock lock(known_);
    indexes_.insert(key);
  }
  if (!came) return ok();
  const Result<std::vector<IndexedPack>> packs = decode_pack_index(std::span(bytes).first(*came));
  if (!packs) return log().warn("KV connector: {} of {}: {}", key, store_->url(), packs.error()), ok();
  for (const IndexedPack& pack : *packs) {
    if (!unknown.contains(pack.name)) continue;
    if (const auto entries = decode_pack_head(pack.head); entries) add_pack(folder, pack.name, space, *entries);
  }
  std::set<std::string> named;  // this engine need not name them, too
  for (const IndexedPack& pack : *packs) named.insert(pack.name);
  const MutexLock lock(known_);
  if (const auto left = without_index_.find(folder); left != without_index_.end())
    std::erase_if(left->second, [&](const IndexedPack& pack) { return named.contains(pack.name); });
  return ok();
}

Status ObjectBlockStore::read_head(const std::string& folder, const std::string& name, const Digest& space) {
  const std::optional<PackName> parsed = PackName::of(name);
  if (!parsed || parsed->number > kMostPackBlocks) return add_pack(folder, name, space, {}), ok();
  std::vector<std::byte> head(pack_head_bytes(parsed->number));
  begin_call(kLookSeconds);
  const Status came = store_->get_range(key_of_pack(folder, name), 0, head);
  if (!came && came.error().code != Code::kNotFound && came.error().code != Code::kCorruption) return came.error();
  const Result<std::vector<PackEntry>> entries = came ? decode_pack_head(head) : came.error();
  if (!entries) {
    if (came) log().warn("KV connector: {} of {}: {}", name, store_->url(), entries.error());
    return add_pack(folder, name, space, {}), ok();
  }
  if (add_pack(folder, name, space, *entries)) add_head(folder, name, std::move(head));
  return ok();
}

// Write an index for each kPacksOfAnIndex packs without one. If the store fails, the packs wait for the next look.
Status ObjectBlockStore::write_indexes() {
  const MutexLock one_at_a_time(indexing_);
  while (true) {
    std::string folder;
    std::vector<IndexedPack> packs;
    {
      const MutexLock lock(known_);
      const auto ready = std::find_if(without_index_.begin(), without_index_.end(),
                                      [](const auto& each) { return each.second.size() >= kPacksOfAnIndex; });
      if (ready == without_index_.end()) return ok();
      folder = ready->first;
      packs.assign(ready->second.begin(), ready->second.begin() + kPacksOfAnIndex);
    }
    const std::vector<std::byte> bytes = encode_pack_index(packs);
    const std::string key = key_of_index(folder, new_name(bytes.size()));
    std::set<std::string> named;
    for (const IndexedPack& pack : packs) named.insert(pack.name);
    begin_call(kLookSeconds);
    TORPOR_ASSIGN_OR_RETURN([[maybe_unused]] const bool made, store_->put_new(key, bytes));
    const MutexLock lock(known_);
    if (const auto left = without_index_.find(folder); left != without_index_.end())
      std::erase_if(left->second, [&](const IndexedPack& pack) { return named.contains(pack.name); });
    indexes_.insert(key);
  }
}

// Remove the expired packs and indexes of all namespaces, as nobody may use the older namespaces any more.
Status ObjectBlockStore::sweep() {
  if (options_.expire.count() == 0) return ok();
  {
    const MutexLock lock(known_);
    if (swept_at_ && clock_.now() - *swept_at_ < kSweepInterval) return ok();
    swept_at_ = clock_.now();
  }
  std::vector<std::string> expired;
  bool more = false;
  begin_call(kLookSeconds);
  TORPOR_RETURN_IF_ERROR(store_->each_key(kAllPacks, [&](std::string_view key) {
    begin_call(kLookSeconds);  // as long as keys come, the list may take longer
    const std::optional<PackName> name = PackName::of(key.substr(key.rfind('/') + 1));
    if (!name || name->unix_seconds + options_.expire.count() >= now_seconds()) return true;
    more = expired.size() == kMostRemovals;
    if (!more) expired.emplace_back(key);
    return !more;
  }));
  if (more) {  // the next look goes on
    const MutexLock lock(known_);
    swept_at_.reset();
  }
  for (const std::string& key : expired) {
    begin_call(kLookSeconds);
    TORPOR_RETURN_IF_ERROR(store_->remove(key));
    const MutexLock lock(known_);
    if (over_) break;
    forget_key(key);
  }
  return ok();
}

// Remove the files that were unfinished an interval ago and still are: no put takes that long. Clocks of machines need
// not agree for that.
Status ObjectBlockStore::remove_unfinished() {
  Names before;
  {
    const MutexLock lock(known_);
    if (saw_unfinished_at_ && clock_.now() - *saw_unfinished_at_ < kSweepInterval) return ok();
    saw_unfinished_at_ = clock_.now();
    before = std::exchange(unfinished_, {});
  }
  Names now;
  begin_call(kLookSeconds);
  TORPOR_RETURN_IF_ERROR(
      store_->remove_unfinished(kAllPacks.substr(0, kAllPacks.size() - 1), [&](std::string_view name) {
        if (before.contains(name)) return true;
        if (now.size() < kMostRemovals) now.emplace(name);
        return false;
      }));
  const MutexLock lock(known_);
  unfinished_ = std::move(now);
  return ok();
}

void ObjectBlockStore::run() {
  MutexLock lock(known_);
  while (true) {
    while (!over_ && !wanted_) changed_.wait(known_);
    if (over_) return;
    wanted_ = false;
    looking_ = true;
    const std::optional<Digest> space = space_;
    lock.unlock();
    Status looked = look_once();
    lock.lock();
    looking_ = false;
    looked_at_ = clock_.now();
    if (space == space_ && (looked || looked_ == Looked::kNever)) looked_ = looked ? Looked::kDone : Looked::kFailed;
    const bool is_new = !looked && looked.error().code != Code::kUnavailable &&  // record_answer() logs that
                        (!last_failure_ || *last_failure_ != looked.error());
    if (is_new) log().warn("KV connector: what {} has is not known: {}", store_->url(), looked.error());
    last_failure_.reset();
    if (!looked) last_failure_ = std::move(looked).error();
    changed_.notify_all();
  }
}

}  // namespace torpor::remote
