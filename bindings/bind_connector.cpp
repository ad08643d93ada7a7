// The scheduler's side of vLLM's KV connector (torpor/vllm/connector.py): vLLM's objects in, OffloadScheduler's
// decisions out, one call a hook. What is done for each block is done here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <optional>

#include "base/clock.h"
#include "bindings/bind_errors.h"
#include "bindings/bind_subjects.h"
#include "bindings/bind_values.h"
#include "bindings/connector_values.h"
#include "bindings/dict_reader.h"
#include "bindings/engine_blocks.h"
#include "bindings/process_events.h"
#include "kvcache/offload_scheduler.h"

namespace py = pybind11;

namespace torpor {
namespace {

struct ConnectorOptions {
  OffloadSchedulerOptions offload;
  PlacementOptions placement;
  bool lazy = false;
  int32_t watermark = 0;  // lazy: how many of the next blocks to be evicted are looked at
};

ConnectorOptions connector_options_from(const py::dict& dict) {
  DictReader in(dict, "connector options");
  ConnectorOptions options;
  int64_t events = 0;
  in.read("lazy", options.lazy);
  in.read("ranks", options.offload.ranks);
  in.read("block_tokens", options.offload.block_tokens);
  in.read("host_slots", options.offload.index.host_slots);
  in.read("disk_segments", options.offload.index.disk_segments);
  in.read("segment_slots", options.offload.index.segment_slots);
  in.read("device_blocks", options.offload.index.device_blocks);
  in.read("min_uses", options.placement.min_uses);
  in.read("min_prefix_tokens", options.placement.min_prefix_tokens);
  in.read_if_given("watermark", options.watermark);
  in.read_if_given("events", events);
  in.read_if_given("max_batch_size", options.offload.queue.max_batch_size);
  in.read_if_given("min_batch_size", options.offload.queue.min_batch_size);
  in.read_if_given("max_concurrent_transfers", options.offload.queue.max_concurrent_transfers);
  in.read_if_given("on_deck_batches", options.offload.queue.on_deck_batches);
  in.read_if_given("queue_blocks", options.offload.queue.queue_blocks);
  int64_t flush_interval_ms = options.offload.queue.flush_interval.count();
  in.read_if_given("flush_interval_ms", flush_interval_ms);
  in.finish();
  options.offload.queue.flush_interval = std::chrono::milliseconds(flush_interval_ms);
  // Held in both modes: of a short free queue vLLM takes a block before its copy is made.
  options.offload.mode = OffloadMode::kEager;
  options.offload.events = static_cast<size_t>(std::max<int64_t>(events, 0));
  options.placement.host = options.offload.index.host_slots > 0;
  options.placement.disk = options.offload.index.disk_segments > 0;
  if (options.placement.min_uses > 1) options.offload.counted_keys = 1 << 20;
  return options;
}

constexpr size_t kFirstKeys = 8;

class ConnectorScheduler {
 public:
  // `pool`: vLLM's BlockPool. `tables`: its requests' blocks by request id, of the one KV cache group.
  ConnectorScheduler(const py::object& pool, py::dict tables, const py::dict& dict)
      : options_(connector_options_from(dict)),
        block_tokens_(options_.offload.block_tokens),
        blocks_(pool, block_tokens_),
        queue_(pool.attr("free_block_queue")),
        tables_(std::move(tables)),
        placement_(make_placement(options_.placement)),
        scheduler_(value_or_raise(
            OffloadScheduler::create(options_.offload, blocks_, *placement_, system_clock(), process_events()))),
        offered_(static_cast<size_t>(blocks_.size()), Stamp::kNone) {}

  // Tokens behind the first `computed` ones that can be loaded.
  int64_t match(const py::object& request, int64_t computed) {
    Record& record = record_of(request);
    record.offered = 0;
    if (record.loading || record.no_loads || computed % block_tokens_ != 0) return 0;
    record.matched_at = static_cast<size_t>(computed / block_tokens_);
    const bool counts = options_.offload.counted_keys > 0;  // then all keys are told, found or not
    if (counts) {
      keys_.clear();
      (void)take_keys(request, 0, std::numeric_limits<size_t>::max());
    } else {
      find(request, record.matched_at);
    }
    const int32_t found = value_or_raise(catching(
        [&]() -> Result<int32_t> { return scheduler_->match(record.number, keys_, counts ? record.matched_at : 0); }));
    places_.resize(static_cast<size_t>(found));
    if (counts && found > 0)
      (void)scheduler_->index().run(std::span(keys_).subspan(record.matched_at, places_.size()), places_);
    return found * block_tokens_;
  }

  void know(const py::object& request) { (void)record_of(request); }

  // The request has blocks for `external` of them; 0: it computes all, or its load is over.
  void allocated(const py::str& id, int64_t external) {
    Record* const record = known(id.ptr());
    if (record == nullptr || record->loading) return;
    table_of(id.ptr());
    few_.clear();
    if (external == 0 && record->loaded > 0) {
      for (size_t i = record->matched_at; i < record->matched_at + record->loaded && i < table_size_; ++i)
        few_.push_back(number_at(i));
      record->loaded = 0;
      value_or_raise(catching([&]() -> Status { return scheduler_->loaded(record->number, few_), ok(); }));
      return;
    }
    const auto wanted = static_cast<size_t>(external / block_tokens_);
    places_.resize(std::min(places_.size(), wanted));  // of this request: it was matched just now
    for (size_t i = record->matched_at; i < record->matched_at + wanted && i < table_size_; ++i)
      few_.push_back(number_at(i));
    value_or_raise(catching([&]() -> Status { return (void)scheduler_->allocated(record->number, few_), ok(); }));
    taken_ += options_.lazy ? static_cast<int64_t>(few_.size()) : 0;
    record->loading = !few_.empty();
    record->asked = few_.size();
    loading_ += record->loading ? 1 : 0;
  }

  // `scheduled`: how many tokens each request computes in step `step`. Returns the plan of this step for all ranks, or
  // None; `unknown`: ids of requests that were never matched.
  py::object step(uint64_t step, const py::dict& scheduled, bool flush) {
    unknown_ = py::list();
    if (!options_.lazy) {
      PyObject* id = nullptr;
      PyObject* tokens = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(scheduled.ptr(), &at, &id, &tokens) != 0;) {
        if (Record* const record = known(id)) {
          offer(*record, id, PyLong_AsLongLong(tokens), step);
        } else {
          unknown_.append(py::reinterpret_borrow<py::object>(id));
        }
      }
    } else if (taken_ += most_taken(scheduled); taken_ >= options_.watermark / 2) {
      offer_next_to_go();
    }
    return plan(flush);
  }

  py::object plan(bool flush) {
    Bytes encoded;
    value_or_raise(catching([&]() -> Status {
      const TransferPlan& plan = scheduler_->plan_step(flush);
      if (!plan.empty()) encoded = plan.encode();
      return ok();
    }));
    return encoded.empty() ? py::object(py::none()) : py::object(torpor::to_python(encoded));
  }

  void acknowledge(uint64_t step) {
    value_or_raise(catching([&]() -> Status { return scheduler_->acknowledge(step), ok(); }));
  }

  // Reports of ranks, in any order; those of a rank in theirs.
  void apply(const py::list& reports) {
    for (const py::handle each : reports) {
      const Bytes bytes = bytes_from(each, "a report of transfers");
      value_or_raise(catching([&]() -> Status {
        TORPOR_ASSIGN(const TransferReport report, TransferReport::decode(bytes));
        return scheduler_->apply(report);
      }));
    }
    end_loads();
  }

  void finished(const py::str& id) {
    Record* const record = known(id.ptr());
    if (record == nullptr) return;
    PyDict_DelItem(numbers_.ptr(), id.ptr());
    record->request = py::object();
    if (scheduler_->finished(record->number)) record->used = false;
  }

  uint32_t reset() {
    value_or_raise(catching([&]() -> Status { return scheduler_->reset(); }));
    std::fill(offered_.begin(), offered_.end(), Stamp::kNone);
    for (Record& record : records_) record.offered = 0;
    end_loads();
    return scheduler_->space();
  }

  void let_go() { blocks_.let_go(); }
  uint32_t space() const { return scheduler_->space(); }
  bool busy() const { return scheduler_->busy(); }
  bool under_way() const { return scheduler_->under_way(); }
  int64_t held() const { return blocks_.held(); }
  int64_t loading() const { return loading_; }
  py::list unknown() const { return unknown_; }
  void check() const { value_or_raise(scheduler_->check()); }

  py::bytes adopt(const py::list& ranks) {
    std::vector<std::vector<RecoveredBlock>> found;
    for (const py::handle each : ranks) found.push_back(recovered_from(bytes_from(each, "recovered blocks")));
    return torpor::to_python(
        value_or_raise(catching([&]() -> Result<Bytes> { return packed(scheduler_->adopt(found)); })));
  }

  // Tokens that the load which was allocated last takes from disk.
  int64_t tokens_from_disk() const {
    return block_tokens_ *
           std::count_if(places_.begin(), places_.end(), [](const Places& places) { return places.host < 0; });
  }

  py::dict stats() const { return connector_stats(*scheduler_, blocks_.held(), loading_); }
  py::object take_events() { return events_to_python(scheduler_->take_events()); }

 private:
  struct Record {
    uint32_t number = 0;
    bool used = false;
    bool loading = false;
    bool no_loads = false;  // one has failed: it computes
    size_t offered = 0;     // blocks of its table
    size_t matched_at = 0;
    size_t asked = 0;   // blocks that are being loaded
    size_t loaded = 0;  // and are good
    py::object request;
  };

  Record* known(PyObject* id) {
    PyObject* const number = PyDict_GetItemWithError(numbers_.ptr(), id);
    return number == nullptr ? nullptr : &records_[static_cast<size_t>(PyLong_AsSize_t(number))];
  }

  Record& record_of(const py::object& request) {
    const py::str id = request.attr("request_id");
    if (Record* const record = known(id.ptr())) return *record;
    const uint32_t number = scheduler_->begin_request(id.cast<std::string>());
    if (number >= records_.size()) records_.resize(number + 1);
    records_[number] = {.number = number, .used = true, .request = request};
    numbers_[id] = py::int_(number);
    return records_[number];
  }

  // Keys of at most `most` blocks from `first` on, behind those in keys_. Not of the last token's, which is always
  // computed. False: there are no more.
  bool take_keys(const py::object& request, size_t first, size_t most) {
    const py::list hashes = request.attr("block_hashes");
    const auto tokens = request.attr("num_tokens").cast<int64_t>();
    const auto full = static_cast<size_t>(std::max<int64_t>(tokens - 1, 0) / block_tokens_);
    const size_t end = std::min<size_t>(hashes.size(), full);
    size_t i = first;
    for (; i < end && i - first < most; ++i) {
      PyObject* const hash = PyList_GET_ITEM(hashes.ptr(), static_cast<Py_ssize_t>(i));
      if (!PyBytes_Check(hash) || static_cast<size_t>(PyBytes_GET_SIZE(hash)) > BlockKey{}.hash.size()) return false;
      BlockKey& key = keys_.emplace_back();
      key.space = scheduler_->space();
      std::copy_n(PyBytes_AS_STRING(hash), PyBytes_GET_SIZE(hash), key.hash.begin());
    }
    return i < end;
  }

  // Keys from block `first` on and where they are, up to the first that is nowhere. Each is a look at memory that
  // nobody has looked at for long, so few are taken at first.
  void find(const py::object& request, size_t first) {
    keys_.clear();
    places_.clear();
    for (size_t few = kFirstKeys; true; few *= 2) {
      const size_t from = keys_.size();
      const bool more = take_keys(request, first + from, few);
      places_.resize(keys_.size());
      const size_t found = scheduler_->index().run(std::span(keys_).subspan(from), std::span(places_).subspan(from));
      const bool all = from + found == keys_.size();
      keys_.resize(from + found);
      if (!more || !all) return;
    }
  }

  void table_of(PyObject* id) {
    table_ = PyDict_GetItemWithError(tables_.ptr(), id);
    table_size_ = table_ != nullptr && PyList_Check(table_) ? static_cast<size_t>(PyList_GET_SIZE(table_)) : 0;
  }
  PyObject* block_at(size_t i) const { return PyList_GET_ITEM(table_, static_cast<Py_ssize_t>(i)); }
  int32_t number_at(size_t i) const { return blocks_.number_of(block_at(i)); }

  // Those of its blocks that this step fills. vLLM has entered them into the prefix cache already, if their tokens are
  // known; the others come with a later step.
  void offer(Record& record, PyObject* id, int64_t tokens, uint64_t step) {
    static PyObject* const kComputed = PyUnicode_InternFromString("num_computed_tokens");
    PyObject* const computed = PyObject_GetAttr(record.request.ptr(), kComputed);
    if (computed == nullptr) throw py::error_already_set();
    const int64_t all = PyLong_AsLongLong(computed) + tokens;
    Py_DECREF(computed);
    const auto full = static_cast<size_t>(all / block_tokens_);
    if (full <= record.offered) return;
    table_of(id);
    keys_.clear();
    few_.clear();
    const size_t first = record.offered;
    for (size_t i = first; i < std::min(full, table_size_); ++i) {
      BlockKey key{.space = scheduler_->space()};
      if (!blocks_.key_of(block_at(i), key)) break;
      keys_.push_back(key);
      few_.push_back(number_at(i));
    }
    if (keys_.empty()) return;
    OffloadOffer offer{.keys = keys_, .blocks = few_, .after_step = step};
    BlockKey before;
    if (first > 0 && blocks_.key_of(block_at(first - 1), before)) offer.parent = before.hash;
    record.offered = first + keys_.size();
    value_or_raise(catching([&]() -> Status { return (void)scheduler_->offer(offer), ok(); }));
  }

  // Lazy: how many blocks a step takes from the free queue, at most.
  int64_t most_taken(const py::dict& scheduled) const {
    int64_t tokens = 0;
    PyObject* id = nullptr;
    PyObject* count = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(scheduled.ptr(), &at, &id, &count) != 0;) tokens += PyLong_AsLongLong(count);
    return tokens / block_tokens_ + static_cast<int64_t>(scheduled.size());
  }

  // Lazy: the head of vLLM's free queue, which is what it evicts next. Whoever wrote them is done. In a queue that is
  // short, every block that is freed is among the next; in a long one, those that were looked at last a while.
  void offer_next_to_go() {
    keys_.clear();
    few_.clear();
    py::object block = blocks_.next_free(py::object(queue_.attr("fake_free_list_head")).ptr());
    int32_t seen = 0;
    for (; seen < options_.watermark && block && !block.is_none(); ++seen, block = blocks_.next_free(block.ptr())) {
      const int32_t number = blocks_.number_of(block.ptr());
      const Stamp stamp = blocks_.stamp(number);
      if (stamp == Stamp::kNone || offered_[static_cast<size_t>(number)] == stamp) continue;
      BlockKey key{.space = scheduler_->space()};
      if (!blocks_.key_of(block.ptr(), key)) continue;
      offered_[static_cast<size_t>(number)] = stamp;
      keys_.push_back(key);
      few_.push_back(number);
    }
    taken_ = seen < options_.watermark ? options_.watermark : 0;
    if (keys_.empty()) return;
    value_or_raise(
        catching([&]() -> Status { return (void)scheduler_->offer({.keys = keys_, .blocks = few_}), ok(); }));
  }

  void end_loads() {
    const std::vector<EndedLoad> loads =
        value_or_raise(catching([&]() -> Result<std::vector<EndedLoad>> { return scheduler_->take_loads(); }));
    for (const EndedLoad& load : loads) {
      Record& record = records_[load.request];
      loading_ -= record.loading ? 1 : 0;
      record.loading = false;
      if (!record.request) {  // aborted meanwhile
        record.used = false;
        continue;
      }
      record.loaded = static_cast<size_t>(load.good_blocks);
      record.no_loads = record.loaded < record.asked;
    }
  }

  const ConnectorOptions options_;
  const int64_t block_tokens_;
  EngineBlocks blocks_;
  const py::object queue_;
  const py::dict tables_;
  const std::unique_ptr<Placement> placement_;
  const std::unique_ptr<OffloadScheduler> scheduler_;
  py::dict numbers_;                                     // of `records_`, by request id
  std::vector<Record> records_;                          // by OffloadScheduler's number
  std::vector<Stamp> offered_;                           // lazy: by block, what was offered last
  int64_t taken_ = std::numeric_limits<int32_t>::max();  // lazy: blocks, at most, since they were looked at
  int64_t loading_ = 0;                                  // requests
  py::list unknown_;
  // Of one call; they keep their memory.
  std::vector<BlockKey> keys_;
  std::vector<int32_t> few_;
  std::vector<Places> places_;
  PyObject* table_ = nullptr;
  size_t table_size_ = 0;
};

}  // namespace

void bind_connector(py::module_& module) {
  py::class_<ConnectorScheduler>(module, "ConnectorScheduler",
                                 "What vLLM's scheduler asks of offloading, over its own block pool.")
      .def(py::init<const py::object&, py::dict, const py::dict&>(), py::arg("pool"), py::arg("tables"),
           py::arg("options"))
      .def("match", &ConnectorScheduler::match, py::arg("request"), py::arg("computed"),
           "Tokens behind the first `computed` ones that can be loaded; they are kept until allocated().")
      .def(
          "know", [](ConnectorScheduler& self, const py::object& request) { self.know(request); }, py::arg("request"))
      .def("allocated", &ConnectorScheduler::allocated, py::arg("id"), py::arg("external"))
      .def("step", &ConnectorScheduler::step, py::arg("step"), py::arg("scheduled"), py::arg("flush") = false,
           "What this step fills is offered; returns what all ranks do next, or None.")
      .def("plan", &ConnectorScheduler::plan, py::arg("flush"), "The same, without a step.")
      .def("acknowledge", &ConnectorScheduler::acknowledge, py::arg("step"), "The forward pass of this step is over.")
      .def("apply", &ConnectorScheduler::apply, py::arg("reports"), "What became of plans, as the ranks say it.")
      .def("finished", &ConnectorScheduler::finished, py::arg("id"))
      .def("reset", &ConnectorScheduler::reset, "Nothing is found any more; returns the number of the new key space.")
      .def("let_go", &ConnectorScheduler::let_go, "No block of the engine is held any more.")
      .def("adopt", &ConnectorScheduler::adopt, py::arg("ranks"),
           "What every rank recovered is found from now on; returns what the ranks adopt.")
      .def("tokens_from_disk", &ConnectorScheduler::tokens_from_disk)
      .def("stats", &ConnectorScheduler::stats)
      .def("take_events", &ConnectorScheduler::take_events)
      .def("check", &ConnectorScheduler::check, "For tests: raises if the index or the queue contradict themselves.")
      .def_property_readonly("space", &ConnectorScheduler::space)
      .def_property_readonly("busy", &ConnectorScheduler::busy, "Steps are needed, if only empty ones.")
      .def_property_readonly("under_way", &ConnectorScheduler::under_way)
      .def_property_readonly("held", &ConnectorScheduler::held, "Blocks of the engine.")
      .def_property_readonly("loading", &ConnectorScheduler::loading, "Requests.")
      .def_property_readonly("unknown", &ConnectorScheduler::unknown,
                             "Requests of the last step() that were never matched.");
}

}  // namespace torpor
