// SPDX-License-Identifier: Apache-2.0
// ObjectBlockStore: KV blocks in an object store (S3, or a shared directory) that engines share: an engine finds the
// blocks that another engine computed, even if that engine has ended. remote/block_store.h has the base class.
//
// Each put() writes packs: objects of all blocks of the call. Each engine keeps in memory where the blocks of its
// newest namespace are: it lists the packs, reads the indexes, each of which has the heads of many packs, and reads the
// head of each pack that no index names (remote/FORMAT.md). For each kPacksOfAnIndex packs that no index names it
// writes an index. So at its start an engine sends a request for each thousand packs to list them, and one for each
// index. Its memory holds what the store has: it forgets packs and indexes that the list lacks.
//
// A block may lie in several packs, because engines put it at the same time. The newest pack counts, since the others
// expire first.
//
// find() answers from memory. In a new namespace it waits for the first list, within its time. If a block is absent,
// the engine lists the packs again in the background, at most once in each `look_interval`: it finds blocks of other
// engines that much later.
//
// Each engine removes packs and indexes older than `expire`, of all namespaces; a block of a removed pack is a miss. It
// also removes what a put has begun and not ended within an hour.
// Each call has a deadline; after a few failures in a row, also refusals of its credentials or its bucket, the engine
// asks the store nothing for a while (remote/breaker.h). With credentials that may not write it still reads. A process
// does not read a damaged block again; the pack stays, for its other blocks.
//
// Threads: all methods from any; a thread of its own lists the packs.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "remote/block_store.h"
#include "remote/breaker.h"
#include "remote/object_store.h"
#include "remote/pack_format.h"

namespace torpor::remote {

struct ObjectBlockStoreOptions {
  int32_t rank = 0;
  int32_t slots = 0;
  uint64_t record_bytes = 0;
  std::shared_ptr<const Key> key;  // and the two below: see BlockStoreOptions
  bool encrypt = false;
  CompressionOptions compression{.codec = Codec::kNone};
  std::chrono::milliseconds timeout{2000};  // of a call
  std::chrono::seconds expire{0};           // 0: nothing is removed
  std::chrono::milliseconds look_interval{10'000};
  BreakerOptions breaker{};
};

class ObjectBlockStore final : public BlockStore {
 public:
  static constexpr size_t kPacksOfAnIndex = 64;

  // Open a store by its URL (see open_object_store()); this sends no request. `clock` outlives it. kInvalidArgument:
  // the options or the URL are wrong.
  static Result<std::unique_ptr<ObjectBlockStore>> open(const std::string& url, FileSystem& file_system,
                                                        const ObjectBlockStoreOptions& options, const Clock& clock);
  static Result<std::unique_ptr<ObjectBlockStore>> open(std::unique_ptr<ObjectStore> store,
                                                        const ObjectBlockStoreOptions& options, const Clock& clock);
  ~ObjectBlockStore() override;

  bool accepting() const override { return breaker_.closed_or_due(); }
  void open_space(uint32_t space, const Digest& digest) override;
  // List the packs of the newest namespace, write indexes, and remove what has expired, on the caller's thread, after
  // what the background thread has to do.
  Status look();
  size_t known_blocks() const;
  size_t known_objects() const;  // packs and indexes

 private:
  struct Location {
    uint32_t pack = 0;
    uint32_t bytes = 0;
    uint64_t offset = 0;
  };
  struct KnownPack {
    std::string key;               // in the store
    int64_t unix_seconds = 0;      // it was written
    uint64_t look = 0;             // that found it in the list, or that came after its put
    std::vector<Digest> blocks{};  // whose Location is in this pack
  };
  struct Run {  // blocks that lie one after the other in a pack
    std::string key;
    uint32_t pack = 0;
    uint64_t offset = 0;
    uint64_t bytes = 0;
    std::vector<std::pair<Item*, uint32_t>> items{};  // with the bytes of each there
  };
  enum class Looked : uint8_t { kNever, kFailed, kDone };

  ObjectBlockStore(std::unique_ptr<ObjectStore> store, const ObjectBlockStoreOptions& options, const Clock& clock);
  void ending_is(std::shared_ptr<std::atomic<bool>> ending);
  void exchange(std::span<Item> items, Verb verb) override;
  void find_items(std::span<Item> items);
  void put_items(std::span<Item> items);
  Status put_pack(std::span<Item* const> items);
  void get_items(std::span<Item> items);
  std::vector<Run> runs_of(std::span<Item> items);
  void read(Run& run);
  void forget_items(std::span<Item> items);
  void record_answer(const Status& status, bool writes);

  void run();
  Status look_once();
  Status look_at(const Digest& space);
  // Names of packs, without their folder.
  using Names = std::set<std::string, std::less<>>;
  Status read_index(const std::string& folder, const PackName& name, const Names& unknown, const Digest& space);
  Status read_head(const std::string& folder, const std::string& name, const Digest& space);
  bool add_pack(const std::string& folder, const std::string& name, const Digest& space,
                std::span<const PackEntry> entries);
  void add_head(const std::string& folder, std::string name, std::vector<std::byte> head);
  void forget_pack(uint32_t number) TORPOR_REQUIRES(known_);
  void forget_blocks_of(uint32_t number, KnownPack& pack) TORPOR_REQUIRES(known_);
  void bound_blocks() TORPOR_REQUIRES(known_);
  void forget_key(const std::string& key) TORPOR_REQUIRES(known_);  // of a pack or an index
  Status write_indexes();
  Status sweep();
  Status remove_unfinished();
  std::string new_name(uint64_t number) const;  // PackName
  int64_t now_seconds() const { return static_cast<int64_t>(clock_.unix_seconds()); }

  const ObjectBlockStoreOptions options_;
  const std::unique_ptr<ObjectStore> store_;
  Breaker breaker_;

  mutable Mutex known_;  // never held over a call of the store
  CondVar changed_;
  bool over_ TORPOR_GUARDED_BY(known_) = false;
  std::shared_ptr<std::atomic<bool>> ending_ TORPOR_GUARDED_BY(known_);  // set: the store gives up what it does
  // By the digest of a block's key.
  std::unordered_map<Digest, Location, DigestHash> blocks_ TORPOR_GUARDED_BY(known_);
  std::unordered_map<uint32_t, KnownPack> packs_ TORPOR_GUARDED_BY(known_);  // in the store, as far as is known
  std::unordered_map<std::string, uint32_t> pack_numbers_ TORPOR_GUARDED_BY(known_);  // by key
  std::set<std::string, std::less<>> indexes_ TORPOR_GUARDED_BY(known_);              // keys of those read or written
  std::map<std::string, std::vector<IndexedPack>> without_index_ TORPOR_GUARDED_BY(known_);  // by folder
  uint32_t last_pack_ TORPOR_GUARDED_BY(known_) = 0;
  uint64_t look_ TORPOR_GUARDED_BY(known_) = 0;            // number of the last look that began
  std::optional<Digest> space_ TORPOR_GUARDED_BY(known_);  // the newest
  Looked looked_ TORPOR_GUARDED_BY(known_) = Looked::kNever;
  bool wanted_ TORPOR_GUARDED_BY(known_) = false;
  bool looking_ TORPOR_GUARDED_BY(known_) = false;
  std::chrono::nanoseconds looked_at_ TORPOR_GUARDED_BY(known_){};
  std::optional<std::chrono::nanoseconds> swept_at_ TORPOR_GUARDED_BY(known_);
  std::optional<std::chrono::nanoseconds> saw_unfinished_at_ TORPOR_GUARDED_BY(known_);
  Names unfinished_ TORPOR_GUARDED_BY(known_);                   // files that were unfinished then
  std::optional<Error> last_failure_ TORPOR_GUARDED_BY(known_);  // of the last look
  Mutex indexing_;                                               // of write_indexes(); held over its calls of the store
  std::thread thread_;                                           // last: it uses all above
};

}  // namespace torpor::remote
