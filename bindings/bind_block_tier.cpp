// SPDX-License-Identifier: Apache-2.0
// A store of torpor's as a secondary tier of vLLM's OffloadingConnector: BlockTier over vLLM's host memory.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/digest.h"
#include "bindings/bind_errors.h"
#include "bindings/bind_subjects.h"
#include "bindings/connector_stores.h"
#include "bindings/dict_reader.h"
#include "bindings/module_files.h"
#include "kvcache/block_tier.h"
#include "offload/background_sync.h"
#include "offload/cache_epoch.h"

namespace py = pybind11;

namespace torpor {
namespace {

constexpr size_t kKeyGroupBytes = 4;  // at the end of vLLM's keys

struct OffloadingTierOptions : ConnectorStoreOptions {
  bool durable = false;
  int threads = 0;
  int64_t wait_ms = 0;
  int32_t remembered_removals = 0;
};

OffloadingTierOptions tier_options_from(const py::dict& dict) {
  DictReader in(dict, "tier options");
  OffloadingTierOptions options;
  read_store_options(in, options);
  in.read("durable", options.durable);
  in.read("threads", options.threads);
  in.read("kv_store_wait_ms", options.wait_ms);
  in.read("remembered_removals", options.remembered_removals);
  in.finish();
  return options;
}

class PyBlockTier {
 public:
  // `memory`: rows of one block each.
  PyBlockTier(const py::memoryview& memory, const std::string& space, const py::dict& dict) : space_(space) {
    view_ = py::buffer(memory).request(true);
    if (view_.ndim != 2 || view_.itemsize != 1 || view_.strides[1] != 1 || view_.strides[0] < view_.shape[1]) {
      DictReader::fail("the memory of a tier", "rows of bytes");
    }
    const OffloadingTierOptions options = tier_options_from(dict);
    directory_ = options.directory;
    tier_ = value_or_raise(without_lock([&] { return open(options); }));
  }
  ~PyBlockTier() {  // without the interpreter's lock
    sync_.reset();
    tier_.reset();
    const py::gil_scoped_acquire lock;
    view_ = {};
  }

  int lookup(const py::bytes& key, const std::string& request) {
    return static_cast<int>(tier().lookup(key_from_bytes(key), request));
  }
  void ask() { tier().ask(); }
  void request_finished(const std::string& request) { tier().request_finished(request); }

  void store(uint64_t job, const std::vector<py::bytes>& keys, const std::vector<int64_t>& rows) {
    BlockTier& to = tier();  // raises with the interpreter's lock
    const auto [blocks, memory] = blocks_of(keys, rows);
    value_or_raise(without_lock([&] { return to.store(job, blocks, memory); }));
  }
  void load(uint64_t job, const std::string& request, const std::vector<py::bytes>& keys,
            const std::vector<int64_t>& rows) {
    BlockTier& to = tier();
    const auto [blocks, memory] = blocks_of(keys, rows);
    value_or_raise(without_lock([&] { return to.load(job, request, blocks, memory); }));
  }
  // [(job, which blocks are good, bytes that moved, seconds), …]
  py::list finished() {
    py::list out;
    for (const TierJobResult& each : tier().finished()) {
      py::list good(each.good.size());
      for (size_t i = 0; i < each.good.size(); ++i) good[i] = static_cast<bool>(each.good[i]);
      out.append(py::make_tuple(each.job, good, each.bytes, each.seconds));
    }
    return out;
  }
  void wait() {
    BlockTier& to = tier();
    without_lock([&] { to.wait(); });
  }

  // Forget all blocks. Later processes find no blocks on disk either, but still those of a shared store.
  void forget() {
    BlockTier& to = tier();
    // A full disk is no error here: vLLM's reset would break off, and leave blocks of old weights elsewhere.
    value_or_raise(without_lock([&] {
      const std::string word = directory_.empty() ? random_cache_epoch() : new_epoch_of(directory_);
      return to.forget(digest_of_text(space_ + word));
    }));
  }

  py::list take_removed() {
    py::list out;
    for (const RemovedBlock& each : tier().take_removed().blocks) {
      std::string key(reinterpret_cast<const char*>(each.key.hash.data()), hash_bytes_);
      for (int shift = 24; shift >= 0; shift -= 8) key.push_back(static_cast<char>(each.key.group >> shift));
      out.append(py::bytes(key));
    }
    return out;
  }
  py::dict stats() const {
    py::dict out;
    const StoreHealth health = tier().health();
    out["blocks"] = tier().blocks();
    out["recovered_blocks"] = tier().recovered();
    out["held_bytes"] = health.held_bytes;
    out["put_bytes"] = health.put_bytes;
    out["got_bytes"] = health.got_bytes;
    out["write_errors"] = health.write_errors;
    out["read_errors"] = health.read_errors;
    out["degraded"] = health.degraded;
    out["reason"] = health.reason;
    out["io"] = health.io;
    return out;
  }

  // Wait for all jobs, make the stored blocks as durable as the store can, and release vLLM's memory.
  void close() {
    const Status safe = without_lock([&]() -> Status {
      sync_.reset();
      if (tier_ == nullptr) return ok();
      tier_->wait();
      const Status synced = tier_->sync();
      tier_.reset();
      return synced;
    });
    view_ = {};
    value_or_raise(safe);
  }

 private:
  Result<std::unique_ptr<BlockTier>> open(const OffloadingTierOptions& options) {
    return try_catch([&]() -> Result<std::unique_ptr<BlockTier>> {
      const auto bytes = static_cast<uint64_t>(view_.shape[1]);
      BlockTierOptions with{.block_bytes = bytes,
                            .remembered_removals = options.remembered_removals,
                            .threads = options.threads,
                            .most_wait = std::chrono::milliseconds(options.wait_ms)};
      std::unique_ptr<SlotStore> store;
      std::string word;
      if (options.kv_store.empty()) {
        TORPOR_ASSIGN_OR_RETURN(DiskBlocks blocks, open_disk_blocks(options, bytes));
        word = epoch_of(directory_);
        with.disk_segments = blocks.segments;
        with.segment_slots = blocks.segment_slots;
        store = std::move(blocks.store);
      } else {
        TORPOR_ASSIGN_OR_RETURN(store, open_shared_blocks(options, bytes));
        with.remote_slots = options.remote_slots;
      }
      TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<BlockTier> made,
                              BlockTier::create(with, std::move(store), digest_of_text(space_ + word), system_clock()));
      if (options.durable) {
        TORPOR_ASSIGN_OR_RETURN(sync_, BackgroundSync::start(made->slot_store(), kBlocksSyncInterval));
      }
      return made;
    });
  }

  BlockTier& tier() const {
    if (tier_ == nullptr) {
      raise(Error{.code = Code::kFailedPrecondition,
                  .what = "the tier is closed",
                  .next_step = "this is a mistake in the calling code"});
    }
    return *tier_;
  }

  BlockKey key_from_bytes(const py::bytes& key) {
    const std::string_view bytes(PyBytes_AS_STRING(key.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(key.ptr())));
    BlockKey made;
    if (bytes.size() <= kKeyGroupBytes || bytes.size() > kKeyGroupBytes + made.hash.size()) {
      DictReader::fail("a key of a KV block",
                       fmt::format("a hash of 1 to {} bytes and a group of {}", made.hash.size(), kKeyGroupBytes));
    }
    hash_bytes_ = bytes.size() - kKeyGroupBytes;
    std::memcpy(made.hash.data(), bytes.data(), hash_bytes_);
    for (size_t i = 0; i < kKeyGroupBytes; ++i)
      made.group = made.group << 8 | static_cast<uint8_t>(bytes[hash_bytes_ + i]);
    return made;
  }

  std::pair<std::vector<BlockKey>, std::vector<std::span<std::byte>>> blocks_of(const std::vector<py::bytes>& keys,
                                                                                const std::vector<int64_t>& rows) {
    if (keys.size() != rows.size()) DictReader::fail("the rows of a job", "one for each key");
    std::vector<BlockKey> made;
    std::vector<std::span<std::byte>> blocks;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (rows[i] < 0 || rows[i] >= view_.shape[0])
        DictReader::fail(fmt::format("row {}", rows[i]), fmt::format("one of {}", view_.shape[0]));
      made.push_back(key_from_bytes(keys[i]));
      blocks.emplace_back(static_cast<std::byte*>(view_.ptr) + rows[i] * view_.strides[0],
                          static_cast<size_t>(view_.shape[1]));
    }
    return {std::move(made), std::move(blocks)};
  }

  const std::string space_;
  py::buffer_info view_;  // vLLM's host memory
  std::string directory_;
  size_t hash_bytes_ = 32;  // of the engine's hashes
  std::unique_ptr<BlockTier> tier_;
  std::unique_ptr<BackgroundSync> sync_;  // of its store; first of these two to end
};

}  // namespace

void bind_block_tier(py::module_& module) {
  py::class_<PyBlockTier>(module, "BlockTier", "A store of KV blocks below the host memory of an engine.",
                          py::release_gil_before_calling_cpp_dtor())
      .def(py::init<const py::memoryview&, const std::string&, const py::dict&>(), py::arg("memory"), py::arg("space"),
           py::arg("options"))
      .def("lookup", &PyBlockTier::lookup, py::arg("key"), py::arg("request"),
           "0: the block is not there; 1: it is; 2: the store is asked.")
      .def("ask", &PyBlockTier::ask, "Send the lookups since the last call to the store.")
      .def("request_finished", &PyBlockTier::request_finished, py::arg("request"))
      .def("store", &PyBlockTier::store, py::arg("job"), py::arg("keys"), py::arg("rows"))
      .def("load", &PyBlockTier::load, py::arg("job"), py::arg("request"), py::arg("keys"), py::arg("rows"))
      .def("finished", &PyBlockTier::finished, "[(job, which of its blocks are good, bytes moved, seconds), …]")
      .def("wait", &PyBlockTier::wait, "Return when no job is under way.")
      .def("forget", &PyBlockTier::forget, "Forget all blocks; blocks on disk for later processes, too.")
      .def("take_removed", &PyBlockTier::take_removed, "Return the keys that were removed since the last call.")
      .def("stats", &PyBlockTier::stats)
      .def("close", &PyBlockTier::close);
}

}  // namespace torpor
