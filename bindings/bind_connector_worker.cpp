// SPDX-License-Identifier: Apache-2.0
// The rank's side of vLLM's KV connector: OffloadWorker over the memory of the rank.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <deque>

#include "base/clock.h"
#include "base/log.h"
#include "base/units.h"
#include "bindings/bind_errors.h"
#include "bindings/bind_subjects.h"
#include "bindings/bind_values.h"
#include "bindings/connector_values.h"
#include "bindings/dict_reader.h"
#include "bindings/module_files.h"
#include "engine/rank_memory.h"
#include "kvcache/offload_worker.h"
#include "offload/background_sync.h"
#include "offload/cache_epoch.h"
#include "offload/host_store.h"
#include "offload/segment_store.h"
#ifdef TORPOR_HAS_REMOTE
#include "bindings/mooncake_client.h"
#include "remote/mooncake_store.h"
#include "remote/resp_store.h"
#endif

namespace py = pybind11;

namespace torpor {
namespace {

constexpr int32_t kSegments = 8;  // at least so many, if the disk has room for them
constexpr uint64_t kMostSegmentBytes = 64 * kMiB;
constexpr uint64_t kMostSlots = 1u << 30;
constexpr std::chrono::seconds kLockWait{10};
constexpr std::chrono::seconds kSyncInterval{1};

struct WorkerOptions {
  int32_t rank = 0;
  uint64_t host_bytes = 0;
  uint64_t disk_bytes = 0;
  std::string directory;
  std::shared_ptr<const Key> key;
  bool encrypt = false;
  bool durable = false;
  std::string kv_store;
  std::string kv_store_credentials;
  std::string kv_store_ca;
  int32_t remote_slots = 0;
  int64_t kv_store_timeout_ms = 0;
  CompressionOptions compression{.codec = Codec::kNone};
  Codec host_codec = Codec::kNone;
};

WorkerOptions worker_options_from(const py::dict& dict) {
  DictReader in(dict, "connector options");
  WorkerOptions options;
  std::optional<std::string> directory;
  std::optional<std::string> key_file;
  in.read("rank", options.rank);
  in.read("host_bytes", options.host_bytes);
  in.read("disk_bytes", options.disk_bytes);
  in.read("directory", directory);
  in.read_if_given("key_file", key_file);
  in.read_if_given("encrypt", options.encrypt);
  in.read_if_given("durable", options.durable);
  for (const auto& [name, to] :
       {std::pair("kv_store", &options.kv_store), std::pair("kv_store_credentials", &options.kv_store_credentials),
        std::pair("kv_store_ca", &options.kv_store_ca)}) {
    std::optional<std::string> text;
    in.read_if_given(name, text);
    *to = text.value_or("");
  }
  in.read_if_given("kv_store_blocks", options.remote_slots);
  in.read_if_given("kv_store_timeout_ms", options.kv_store_timeout_ms);
  std::optional<std::string> codec;
  std::optional<std::string> host_codec;
  in.read_if_given("block_compression", codec);
  in.read_if_given("host_compression", host_codec);
  in.finish();
  options.compression = value_or_raise(CompressionOptions::of(codec, std::nullopt));
  options.host_codec = value_or_raise(CompressionOptions::of(host_codec, std::nullopt)).codec;
  options.directory = directory.value_or("");
  options.key = key_from(key_file);
  return options;
}

class ConnectorWorker {
 public:
  // `memory` outlives it, and has a KV layout.
  ConnectorWorker(RankMemory& memory, const py::dict& dict) : memory_(memory) {
    const WorkerOptions options = worker_options_from(dict);
    worker_ = value_or_raise(without_lock([&] { return make(options); }));
  }

  ~ConnectorWorker() {
    const py::gil_scoped_acquire lock;
    plans_.clear();
  }

  py::dict sizes() const {
    py::dict out;
    out["host_slots"] = options_.host_slots;
    out["disk_segments"] = options_.disk_segments;
    out["segment_slots"] = options_.segment_slots;
    out["remote_slots"] = options_.remote_slots;
    out["device_blocks"] = memory_.kv_layout().num_blocks;
    out["block_bytes"] = memory_.kv_layout().bytes_per_block();
    return out;
  }

  // Return the digest of the present weights.
  std::string weights_digest() const {
    return value_or_raise(without_lock([&] { return memory_.weights_digest(); }));
  }

  void open_space(uint32_t space, const std::string& name, const std::string& shared) {
    const auto digest = [](const std::string& text) { return digest_of(std::as_bytes(std::span(text))); };
    without_lock([&] { worker_->open_space(space, digest(name), digest(shared)); });
  }
  py::bytes recover(uint32_t space) {
    return torpor::to_python(packed(value_or_raise(without_lock([&] { return worker_->recover(space); }))));
  }
  void adopt(const py::bytes& blocks) {
    const std::vector<AdoptedBlock> adopted = adopted_from(bytes_from(blocks, "adopted blocks"));
    value_or_raise(without_lock([&] { return try_catch([&]() -> Status { return worker_->adopt(adopted), ok(); }); }));
  }

  // Run a plan. Plans run in their order; if there is no memory for one, a later call runs it.
  void run(const py::bytes& plan) {
    plans_.push_back(plan);
    run_plans();
  }

  // Return (report or None, request id -> device blocks that were not loaded, for requests whose load is over). If
  // there is no memory for them, return nothing; the next call has all.
  py::tuple poll() {
    run_plans();
    Bytes encoded;
    const Status told = without_lock([&] {
      return try_catch([&]() -> Status {
        if (report_.empty()) report_ = worker_->poll();
        if (loaded_.empty()) loaded_ = worker_->take_loaded();
        if (!report_.empty()) encoded = report_.encode();
        return memory_.transfers().usable();  // a copy may still write into blocks: no other use is safe
      });
    });
    py::dict finished;
    if (!told && told.error().code == Code::kResourceExhausted) return py::make_tuple(py::none(), finished);
    value_or_raise(told);
    for (const LoadedRequest& each : loaded_) finished[py::str(each.request)] = py::cast(each.bad_blocks);
    const py::tuple all =
        py::make_tuple(encoded.empty() ? py::object(py::none()) : py::object(torpor::to_python(encoded)), finished);
    report_ = {};
    loaded_.clear();
    return all;
  }

  // Return when what was stored on disk is durable.
  void sync() {
    SlotStore* const disk = worker_->store(StoreId::kDisk);
    if (disk != nullptr) value_or_raise(without_lock([&] { return disk->sync(); }));
  }
  void wait() {
    run_plans();
    if (!plans_.empty())
      value_or_raise(Status(Error{.code = Code::kResourceExhausted,
                                  .what = "there is no memory to begin transfers that were planned",
                                  .next_step = "free host memory and call again"}));
    without_lock([&] { worker_->wait(); });
  }
  void close() {
    plans_.clear();
    without_lock([&] {
      sync_.reset();
      worker_.reset();
    });
  }
  bool idle() const { return plans_.empty() && report_.empty() && loaded_.empty() && worker_->idle(); }

 private:
  void run_plans() {
    while (!plans_.empty()) {
      const Status begun = without_lock([&] {
        return try_catch([&]() -> Status {
          TORPOR_ASSIGN_OR_RETURN(const TransferPlan plan, TransferPlan::decode(view_of(plans_.front())));
          return worker_->run(plan);
        });
      });
      if (!begun && begun.error().code == Code::kResourceExhausted) return;
      plans_.pop_front();
      value_or_raise(begun);
    }
  }
  static std::span<const uint8_t> view_of(const py::bytes& bytes) {
    return {reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(bytes.ptr())),
            static_cast<size_t>(PyBytes_GET_SIZE(bytes.ptr()))};
  }

  Result<std::unique_ptr<OffloadWorker>> make(const WorkerOptions& options) {
    return try_catch([&]() -> Result<std::unique_ptr<OffloadWorker>> {
      const KvLayout& layout = memory_.kv_layout();
      const uint64_t bytes = layout.bytes_per_block();
      if (bytes == 0) {
        return Error{.code = Code::kFailedPrecondition,
                     .what = "where the blocks of the KV cache lie is not known",
                     .next_step = "this is a mistake in the calling code"};
      }
      options_.rank = options.rank;
      options_.host_slots = static_cast<int32_t>(
          std::min(HostStore::slots_in(options.host_bytes, bytes, options.host_codec), kMostSlots));
      std::shared_ptr<HostStore> host;
      std::unique_ptr<SlotStore> disk;
      if (options_.host_slots > 0) {
        TORPOR_ASSIGN_OR_RETURN(host, make_host(bytes, options.host_codec));
      }
      if (options.disk_bytes > 0) {
        TORPOR_ASSIGN_OR_RETURN(disk, open_disk(options, bytes));
      }
      std::unique_ptr<SlotStore> remote;
      if (!options.kv_store.empty() && options_.host_slots > 0) {
        TORPOR_ASSIGN_OR_RETURN(remote, open_remote(options, bytes));
        options_.remote_slots = options.remote_slots;
      }
      SlotStore* const to_sync = options.durable ? disk.get() : nullptr;
      TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<OffloadWorker> made,
                              OffloadWorker::create(options_, layout, memory_.transfers(), std::move(host),
                                                    std::move(disk), std::move(remote)));
      if (to_sync != nullptr) {
        TORPOR_ASSIGN_OR_RETURN(sync_, BackgroundSync::start(*to_sync, kSyncInterval));
      }
      return made;
    });
  }

  // Make a host store, a smaller one if the arena is too small: the engine serves all the same. Null: there is no room
  // at all.
  Result<std::shared_ptr<HostStore>> make_host(uint64_t bytes, Codec codec) {
    const int32_t wanted = options_.host_slots;
    for (; options_.host_slots > 0; options_.host_slots /= 2) {
      Result<std::shared_ptr<HostStore>> made =
          memory_.make_host_store({.slots = options_.host_slots, .slot_bytes = bytes, .codec = codec});
      if (!made && made.error().code == Code::kResourceExhausted) continue;
      if (made && options_.host_slots < wanted)
        log().warn("KV connector: host memory for {} blocks, {} were asked for", options_.host_slots, wanted);
      return made;
    }
    log().warn("KV connector: there is no host memory for blocks, {} were asked for", wanted);
    return std::shared_ptr<HostStore>();
  }

  Result<std::unique_ptr<SlotStore>> open_disk(const WorkerOptions& options, uint64_t bytes) {
    const uint64_t record = align_up(bytes, kPage);
    const uint64_t most = std::max<uint64_t>(kMostSegmentBytes / record, 1);
    const uint64_t slots = std::clamp<uint64_t>(options.disk_bytes / record / kSegments, 1, most);
    SegmentStoreOptions with{.rank = options.rank,
                             .record_bytes = bytes,
                             .slots_per_segment = static_cast<int32_t>(slots),
                             .budget_bytes = options.disk_bytes,
                             .compression = options.compression,
                             .key = options.key,
                             .encrypt = options.encrypt,
                             .lock_wait = kLockWait};
    const uint64_t segments = options.disk_bytes / SegmentStore::most_bytes_of_segment(with);
    if (segments < 3) {
      return Error{.code = Code::kInvalidArgument,
                   .what = fmt::format("disk_bytes is {}, a block has {} bytes", options.disk_bytes, bytes),
                   .next_step = fmt::format("use {} or more", 3 * SegmentStore::most_bytes_of_segment(with))};
    }
    options_.segment_slots = static_cast<int32_t>(slots);
    options_.disk_segments = static_cast<int32_t>(std::min(segments - 1, kMostSlots / slots));  // one more is written
    return SegmentStore::open(module_files(), options.directory + "/store", std::move(with), system_clock());
  }

  static Result<std::unique_ptr<SlotStore>> open_remote([[maybe_unused]] const WorkerOptions& options,
                                                        [[maybe_unused]] uint64_t bytes) {
#ifdef TORPOR_HAS_REMOTE
    if (remote::is_mooncake(options.kv_store)) return open_mooncake(options, bytes);
    return remote::RespStore::open({.url = options.kv_store,
                                    .credentials = options.kv_store_credentials,
                                    .authorities = options.kv_store_ca,
                                    .rank = options.rank,
                                    .slots = options.remote_slots,
                                    .record_bytes = bytes,
                                    .key = options.key,
                                    .encrypt = options.encrypt,
                                    .compression = options.compression,
                                    .timeout = std::chrono::milliseconds(options.kv_store_timeout_ms)},
                                   system_clock());
#else
    return Error{.code = Code::kUnsupported,
                 .what = "a remote store for KV blocks: this build of torpor knows none",
                 .next_step = "install the packages of docs/vllm.md, then build it on this machine: pip install ."};
#endif
  }

#ifdef TORPOR_HAS_REMOTE
  static Result<std::unique_ptr<SlotStore>> open_mooncake(const WorkerOptions& options, uint64_t bytes) {
    if (!options.kv_store_credentials.empty() || !options.kv_store_ca.empty()) {
      return Error{.code = Code::kInvalidArgument,
                   .what = "kv_store_credentials or kv_store_ca with a Mooncake store, which knows neither",
                   .next_step = "leave them out; a key_file of torpor's protects blocks"};
    }
    TORPOR_ASSIGN_OR_RETURN(const remote::MooncakeSettings settings, remote::mooncake_settings(options.kv_store));
    TORPOR_RETURN_IF_ERROR(mooncake_is_installed());
    log().warn("KV connector: a Mooncake store has no TLS and no passwords: {}",
               options.key == nullptr ? "who reaches it can read and forge blocks; give torpor a key_file"
               : options.encrypt      ? "blocks are encrypted with torpor's key"
                                      : "blocks are authenticated with torpor's key, and who reaches it can read them");
    return remote::MooncakeStore::open(
        {.name = settings.name,
         .io = settings.protocol,
         .rank = options.rank,
         .slots = options.remote_slots,
         .record_bytes = bytes,
         .key = options.key,
         .encrypt = options.encrypt,
         .compression = options.compression,
         .timeout = std::chrono::milliseconds(options.kv_store_timeout_ms)},
        [settings] { return connect_mooncake(settings); }, system_clock());
  }
#endif

  RankMemory& memory_;
  OffloadWorkerOptions options_;
  std::unique_ptr<OffloadWorker> worker_;
  std::unique_ptr<BackgroundSync> sync_;  // of the disk store, while there is one
  std::deque<py::bytes> plans_;           // not begun yet
  TransferReport report_;                 // not returned yet
  std::vector<LoadedRequest> loaded_;
};

// Return the cache epoch of a directory. If it cannot be read, return one under which nothing was stored.
std::string word_of(const std::string& directory) {
  const Result<std::string> word = without_lock([&] { return cache_epoch(module_files(), directory); });
  if (word) return *word;
  log().warn("what is on disk is not found again: {}", word.error().to_string());
  return random_cache_epoch();
}

std::string new_word_of(const std::string& directory) {
  RenewedEpoch renewed = without_lock([&] { return renew_cache_epoch(module_files(), directory); });
  if (!renewed.kept) {
    log().warn("after a restart, blocks from before this reset may be found again: {}",
               renewed.kept.error().to_string());
  }
  return std::move(renewed.word);
}

}  // namespace

void bind_connector_worker(py::module_& module) {
  py::class_<ConnectorWorker>(module, "ConnectorWorker", "What one rank does for offloading, over its memory.",
                              py::release_gil_before_calling_cpp_dtor())
      .def(py::init<RankMemory&, const py::dict&>(), py::arg("memory"), py::arg("options"), py::keep_alive<1, 2>())
      .def("sizes", &ConnectorWorker::sizes)
      .def("weights_digest", &ConnectorWorker::weights_digest)
      .def("open_space", &ConnectorWorker::open_space, py::arg("space"), py::arg("name"), py::arg("shared") = "",
           "Keys of this number belong to the namespace with this name from now on; in the remote store, to `shared`.")
      .def("recover", &ConnectorWorker::recover, py::arg("space"))
      .def("adopt", &ConnectorWorker::adopt, py::arg("blocks"))
      .def("run", &ConnectorWorker::run, py::arg("plan"), "Begins a plan; a repeated one changes nothing.")
      .def("poll", &ConnectorWorker::poll)
      .def("sync", &ConnectorWorker::sync)
      .def("wait", &ConnectorWorker::wait, "Returns when nothing of a plan is under way.")
      .def("close", &ConnectorWorker::close)
      .def("idle", &ConnectorWorker::idle);
  module.def("cache_epoch", &word_of, py::arg("directory"), "The word in the name of the namespace on disk.");
  module.def("renew_cache_epoch", &new_word_of, py::arg("directory"),
             "Another one; what was stored before is not found.");
}

}  // namespace torpor
