// SPDX-License-Identifier: Apache-2.0
// The rank's side of vLLM's KV connector: OffloadWorker over the memory of the rank.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <deque>

#include "base/clock.h"
#include "base/digest.h"
#include "base/log.h"
#include "base/units.h"
#include "bindings/bind_errors.h"
#include "bindings/bind_subjects.h"
#include "bindings/bind_values.h"
#include "bindings/connector_stores.h"
#include "bindings/connector_values.h"
#include "bindings/dict_reader.h"
#include "bindings/module_files.h"
#include "engine/rank_memory.h"
#include "kvcache/offload_worker.h"
#include "offload/background_sync.h"
#include "offload/host_store.h"

namespace py = pybind11;

namespace torpor {
namespace {

struct WorkerOptions : ConnectorStoreOptions {
  uint64_t host_bytes = 0;
  bool durable = false;
  Codec host_codec = Codec::kNone;
};

WorkerOptions worker_options_from(const py::dict& dict) {
  DictReader in(dict, "connector options");
  WorkerOptions options;
  read_store_options(in, options);
  in.read("host_bytes", options.host_bytes);
  in.read_if_given("durable", options.durable);
  std::optional<std::string> codec;
  in.read_if_given("host_compression", codec);
  in.finish();
  options.host_codec = value_or_raise(CompressionOptions::of(codec, std::nullopt)).codec;
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
    without_lock([&] { worker_->open_space(space, digest_of_text(name), digest_of_text(shared)); });
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

  // Wait until the loads of these requests, which are in plans that run() has got, have ended.
  void finish_loads(const std::vector<std::string>& requests) {
    run_plans();
    if (!plans_.empty()) raise(no_memory_to_begin());
    value_or_raise(without_lock([&] { return worker_->finish_loads(requests); }));
  }
  bool wait_for_report(double seconds) {
    const std::chrono::nanoseconds most(static_cast<int64_t>(seconds * 1e9));
    return without_lock([&] { return worker_->wait_for_report(most); });
  }

  // Return (report or None, request id -> device blocks that were not loaded, for requests whose load is over). If
  // there is no memory for them, return nothing; the next call has all.
  py::tuple poll() {
    run_plans();
    Bytes encoded;
    const Status polled = without_lock([&] {
      return try_catch([&]() -> Status {
        if (report_.empty()) report_ = worker_->poll();
        if (loaded_.empty()) loaded_ = worker_->take_loaded();
        if (!report_.empty()) encoded = report_.encode();
        return memory_.transfers().usable();  // a copy may still write into blocks: no other use is safe
      });
    });
    py::dict finished;
    if (!polled && polled.error().code == Code::kResourceExhausted) return py::make_tuple(py::none(), finished);
    value_or_raise(polled);
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
    if (!plans_.empty()) raise(no_memory_to_begin());
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
  static Error no_memory_to_begin() {
    return {.code = Code::kResourceExhausted,
            .what = "there is no memory to begin transfers that were planned",
            .next_step = "free host memory and call again"};
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
          std::min(HostStore::slots_in(options.host_bytes, bytes, options.host_codec), kMostStoreSlots));
      std::shared_ptr<HostStore> host;
      std::unique_ptr<SlotStore> disk;
      if (options_.host_slots > 0) {
        TORPOR_ASSIGN_OR_RETURN(host, make_host(bytes, options.host_codec));
      }
      if (options.disk_bytes > 0) {
        TORPOR_ASSIGN_OR_RETURN(DiskBlocks blocks, open_disk_blocks(options, bytes));
        options_.disk_segments = blocks.segments;
        options_.segment_slots = blocks.segment_slots;
        disk = std::move(blocks.store);
      }
      std::unique_ptr<SlotStore> remote;
      if (!options.kv_store.empty() && options_.host_slots > 0) {
        TORPOR_ASSIGN_OR_RETURN(remote, open_shared_blocks(options, bytes));
        options_.remote_slots = options.remote_slots;
      }
      SlotStore* const to_sync = options.durable ? disk.get() : nullptr;
      TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<OffloadWorker> made,
                              OffloadWorker::create(options_, layout, memory_.transfers(), std::move(host),
                                                    std::move(disk), std::move(remote)));
      if (to_sync != nullptr) {
        TORPOR_ASSIGN_OR_RETURN(sync_, BackgroundSync::start(*to_sync, kBlocksSyncInterval));
      }
      return made;
    });
  }

  // Make a host store, a smaller one if the arena is too small: the engine serves all the same. Null: the arena has no
  // memory for any.
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

  RankMemory& memory_;
  OffloadWorkerOptions options_;
  std::unique_ptr<OffloadWorker> worker_;
  std::unique_ptr<BackgroundSync> sync_;  // of the disk store, while there is one
  std::deque<py::bytes> plans_;           // not begun yet
  TransferReport report_;                 // not returned yet
  std::vector<LoadedRequest> loaded_;
};

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
      .def("finish_loads", &ConnectorWorker::finish_loads, py::arg("requests"),
           "Returns when the loads of these requests have ended; poll() has what became of them.")
      .def("wait_for_report", &ConnectorWorker::wait_for_report, py::arg("seconds"),
           "Waits until poll() has something, so long at most; returns whether it has.")
      .def("poll", &ConnectorWorker::poll)
      .def("sync", &ConnectorWorker::sync)
      .def("wait", &ConnectorWorker::wait, "Returns when nothing of a plan is under way.")
      .def("close", &ConnectorWorker::close)
      .def("idle", &ConnectorWorker::idle);
  module.def("cache_epoch", &epoch_of, py::call_guard<py::gil_scoped_release>(), py::arg("directory"),
             "The word in the name of the namespace on disk.");
  module.def("renew_cache_epoch", &new_epoch_of, py::call_guard<py::gil_scoped_release>(), py::arg("directory"),
             "Another one; what was stored before is not found.");
}

}  // namespace torpor
