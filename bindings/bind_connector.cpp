// SPDX-License-Identifier: Apache-2.0
// The scheduler's side of vLLM's KV connector (torpor/vllm/connector.py): translates vLLM's objects for
// OffloadScheduler and its decisions back, one call for each hook. connector_hits and connector_offers do the work for
// each block.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>

#include <fmt/core.h>

#include "base/clock.h"
#include "bindings/bind_errors.h"
#include "bindings/bind_subjects.h"
#include "bindings/bind_values.h"
#include "bindings/connector_hits.h"
#include "bindings/connector_offers.h"
#include "bindings/connector_values.h"
#include "bindings/engine_blocks.h"
#include "bindings/engine_prefixes.h"
#include "bindings/hook_guard.h"
#include "bindings/process_events.h"
#include "bindings/python_policy.h"
#include "kvcache/offload_scheduler.h"

namespace py = pybind11;

namespace torpor {
namespace {

constexpr int kMostFailedLoads = 4;    // of one request
constexpr size_t kHostShareAhead = 4;  // requests that wait get at most this part of host memory filled for them

class ConnectorScheduler final : public console::OffloadAccess {
 public:
  using TokensByStore = decltype(CachedTokens::stores);

  // `pool`: vLLM's BlockPool. `groups`: its KV cache groups, as GroupTables takes them. Prefixes are counted in its
  // units.
  ConnectorScheduler(const py::object& pool, const py::list& groups, const py::dict& dict)
      : options_(connector_options_from(dict)),
        block_tokens_(options_.unit_tokens),
        groups_(groups, block_tokens_, options_.stride_tokens, options_.partial_hits),
        blocks_(pool, groups_.block_tokens(), groups_.partial_hits()),
        placement_(make_placement(options_.placement)),
        scheduler_(value_or_raise(
            OffloadScheduler::create(options_.offload, blocks_, *placement_, system_clock(), process_events()))),
        prefixes_(pool, blocks_, block_tokens_),
        residency_(value_or_raise(
            Residency::create(residency_options(options_, groups_), *scheduler_, prefixes_, system_clock()))),
        hits_(groups_, scheduler_->index()),
        asks_(groups_, scheduler_->index()),
        ahead_hits_(groups_, scheduler_->index()),
        offers_(pool, options_, groups_, blocks_, *scheduler_) {
    if (options_.drop_last_block && groups_.whole_hits()) {
      raise(Error{.code = Code::kUnsupported,
                  .what = "drop_last_block with KV cache groups that need whole hits",
                  .next_step = "leave it out"});
    }
    if (options_.offload.events > 0) prefixes_.remember_entered();
    const py::gil_scoped_release others_go_on;  // a call to the previous offload may wait for the interpreter's lock
    serve_offload(*this);
  }
  ~ConnectorScheduler() {
    const py::gil_scoped_release others_go_on;  // a console that uses the offload may wait for the interpreter's lock
    unserve_offload(this);
  }

  // Called in a console's thread.
  Status use(const std::function<Status(OffloadScheduler&)>& work) override {
    return between_hooks([&] { return work(*scheduler_); });
  }
  Result<std::vector<BlockKey>> keys_of(const std::string& id) override {
    if (const Record* const record = known(py::str(id).ptr()); record != nullptr && record->request) {
      try {
        const py::object request = record->request;  // the record may move
        ConnectorHits hits(groups_, scheduler_->index());
        hits.take_all(request, scheduler_->space());
        if (InHook::running != 0) return engine_is_busy();
        return std::vector<BlockKey>(hits.keys().begin(), hits.keys().end());
      } catch (const py::error_already_set& problem) {
        return Error{.code = Code::kInternal, .what = problem.what(), .next_step = "report this"};
      }
    }
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("there is no request {}", id),
                 .next_step = "look at `slots`: it may have ended"};
  }

  // Return how many tokens after the first `computed` ones can be loaded; None: ask again in the next step.
  std::optional<int64_t> match(const py::object& request, int64_t computed) {
    Record& record = record_of(request);
    record.fits_in_step = false;
    // What is on its way for its session is found on the device then.
    if (!record.session.id.empty() && residency_->is_loading(record.session)) return std::nullopt;
    if (is_still_matched(record, request, computed)) return matched_tokens(record);
    if (is_coming(record)) return std::nullopt;
    if (!has_answer(record, request)) return std::nullopt;
    record.begin_again();
    // A request whose load failed has no blocks any more, but is ahead of requests that have. If no block is free, it
    // would wait for theirs, and they wait behind it.
    if (record.failed_loads > 0 && others_have_loaded(record)) return std::nullopt;
    if (record.loading || record.failed_loads >= most_failed_loads() || computed % options_.stride_tokens != 0)
      return 0;
    record.matched_at = static_cast<size_t>(computed / block_tokens_);
    if (options_.offload.counted_keys > 0) {  // all keys are counted, found or not
      hits_.take_all(request, scheduler_->space());
      (void)match(record, hits_.keys().size());
    }
    record.matched = hits_.find(request, record.matched_at, scheduler_->space());
    if (options_.drop_last_block && record.matched > 0) hits_.shorten(--record.matched);
    const bool worth = static_cast<int64_t>(record.matched) * block_tokens_ >= options_.placement.min_prefix_tokens;
    if (policy_ && worth && record.matched > 0) record.matched = wanted_of_hit(record, request);
    if (match(record, worth && record.matched > 0 ? 0 : hits_.keys().size()) == 0) record.matched = 0;
    last_match_ = {.number = record.number, .damaged = damaged(), .whole = hits_.ends_where_it_ends()};
    hits_.take_sources(record.sources);
    return matched_tokens(record);
  }
  // Return whether the load that match() found last can end before the forward pass of the step that is being planned.
  bool fits_in_step() const { return fits_in_step_; }
  // Return the requests whose loads are in the last plan and end within its step.
  std::vector<std::string> take_loads_within_step() { return std::exchange(loads_within_step_, {}); }
  // Return the requests whose loads within a step failed, aborted ones too, and the first block of each that has no
  // valid content.
  std::vector<std::pair<std::string, size_t>> take_failed_within_step() {
    return std::exchange(failed_within_step_, {});
  }

  void know(const py::object& request) { (void)record_of(request); }
  // The request waits. If the step that is planned next does not reach it, what disk and remote store have of it comes
  // into host memory meanwhile.
  void queued(const py::object& request) {
    Record& record = record_of(request);
    if (options_.offload.index.host_slots == 0 ||
        (options_.offload.index.disk_segments == 0 && options_.offload.index.remote_slots == 0))
      return;
    record.ahead = Ahead::kLook;
    ahead_.push_back(record.number);
  }

  // Ask a policy of the user's own about blocks that are to be stored, and about hits.
  void use_policy(const py::object& ask) {
    policy_.emplace(ask);
    scheduler_->use_policy(&*policy_);
  }

  // The request has got blocks for `external` of these tokens; 0: it computes all, or its load is over. `local`: if
  // vLLM counts this look-up as the request's, the tokens that are in its own prefix cache; `other`: those that another
  // connector loads. Return whether the load ends within this step.
  bool allocated(const py::str& id, int64_t external, std::optional<int64_t> local, int64_t other) {
    Record* const record = known(id.ptr());
    if (record == nullptr || record->loading) return false;
    end_ahead(*record);
    if (external > 0) record->found = tokens_by_store(record->sources, external);
    if (local)
      record->cached = {.device = *local, .stores = external > 0 ? record->found : TokensByStore(), .other = other};
    offers_.allocated(record->progress, id.ptr());
    if (external == 0 && record->loaded > 0) {
      take_blocks(*record, id.ptr(), groups_.whole_hits() ? record->matched : record->loaded);
      leave_out_partial(*record, groups_.whole_hits() ? record->matched : record->loaded);
      record->loaded = 0;
      value_or_raise(try_catch([&]() -> Status { return scheduler_->loaded(record->number, few_), ok(); }));
      return false;
    }
    const auto wanted = static_cast<size_t>(external / block_tokens_);
    if (wanted > 0 && wanted != record->matched && groups_.whole_hits()) {
      raise(Error{.code = Code::kInternal,
                  .what = fmt::format("vLLM takes {} of {} tokens that can be loaded", external,
                                      static_cast<int64_t>(record->matched) * block_tokens_),
                  .next_step = "a sliding window or a state needs other blocks then: report this"});
    }
    take_blocks(*record, id.ptr(), wanted);
    const bool within_step = std::exchange(record->fits_in_step, false) && !few_.empty();
    value_or_raise(
        try_catch([&]() -> Status { return (void)scheduler_->allocated(record->number, few_, within_step), ok(); }));
    offers_.took(few_.size());
    record->within_step.clear();
    if (within_step) {
      record->within_step = id.cast<std::string>();
      loads_within_step_.push_back(record->within_step);
      ++all_loads_within_step_;
    }
    record->loading = !few_.empty();
    record->asked = few_.size();
    loading_ += record->loading ? 1 : 0;
    return within_step;
  }

  // `scheduled`: request id -> tokens that it computes in step `step`. `handed`: request id -> blocks, as
  // ConnectorOffers::handed() takes them. Return the plan of this step for all ranks, or None.
  py::object step(uint64_t step, const py::dict& scheduled, bool flush, const py::dict& handed) {
    last_step_ = std::max(last_step_, step);
    if (offers_.looks_at_requests()) look_at(scheduled, step);
    if (groups_.partial_hits()) take_handed(handed, step);
    offers_.end_step(scheduled, step);
    look_ahead();
    return plan(flush, false);
  }

  // `of_device`: plan no other copies, unless one for a session needs them.
  py::object plan(bool flush, bool of_device) {
    Bytes encoded;
    value_or_raise(try_catch([&]() -> Status {
      if (residency_->busy() || residency_->holds()) residency_->advance(last_step_);
      const bool all = !of_device || residency_->busy();
      const TransferPlan& plan = all ? scheduler_->plan_step(flush) : scheduler_->plan_device();
      if (!plan.empty()) encoded = plan.encode();
      return ok();
    }));
    left_in_step_ = options_.sync_load_blocks;
    for (const std::string& id : loads_within_step_) {  // their requests compute on top of them in this step
      const Record* const record = known(py::str(id).ptr());
      if (record != nullptr && scheduler_->load_is_planned(record->number)) continue;
      raise(Error{.code = Code::kResourceExhausted,
                  .what = fmt::format("there is no memory to plan the load of request {}", id),
                  .next_step = "free host memory; the engine goes on in a new process"});
    }
    return encoded.empty() ? py::object(py::none()) : py::object(torpor::to_python(encoded));
  }

  void acknowledge(uint64_t step) {
    value_or_raise(try_catch([&]() -> Status { return scheduler_->acknowledge(step), ok(); }));
  }
  // A request computed in this step on top of blocks that have no valid content: nothing that it filled is offered.
  void fail_step(uint64_t step) {
    value_or_raise(try_catch([&]() -> Status { return scheduler_->fail_step(step), ok(); }));
  }

  // Take reports of ranks. Reports of different ranks may come in any order, those of one rank in theirs.
  void apply(const py::list& reports) {
    for (const py::handle each : reports) {
      const Bytes bytes = bytes_from(each, "a report of transfers");
      value_or_raise(try_catch([&]() -> Status {
        TORPOR_ASSIGN_OR_RETURN(const TransferReport report, TransferReport::decode(bytes));
        return scheduler_->apply(report);
      }));
    }
    end_loads();
  }

  // Offer the blocks that a request which has ended fills in steps that are in flight; they are still there. `step`:
  // the last of these steps. `answered`: vLLM has said how many of its tokens were cached.
  void finished(const py::str& id, uint64_t step, bool answered) {
    Record* const record = known(id.ptr());
    if (record == nullptr) return;
    if (answered && record->cached) scheduler_->count_cached(record->number, *record->cached);
    last_step_ = std::max(last_step_, step);
    end_ahead(*record);
    offers_.finished(record->progress, {record->request.ptr(), id.ptr(), record->priority}, step);
    end_session(*record);
    PyDict_DelItem(numbers_.ptr(), id.ptr());
    record->request = py::object();
    if (scheduler_->finished(record->number)) record->used = false;
  }

  // Begin a new namespace, and return its number. The present content of the engine's blocks is not for it, nor is KV
  // that is computed on top of it.
  uint32_t reset() {
    value_or_raise(try_catch([&]() -> Status { return scheduler_->reset(); }));
    value_or_raise(try_catch([&]() -> Status { return residency_->reset(), ok(); }));
    offers_.reset();
    for (Record& record : records_) record.progress = {.stale = record.used};
    end_loads();
    return scheduler_->space();
  }

  std::vector<Slot> host_slots(const std::vector<int32_t>& blocks, bool keep) {
    std::vector<Slot> slots =
        value_or_raise(try_catch([&]() -> Result<std::vector<Slot>> { return scheduler_->backing(blocks, keep); }));
    if (groups_.partial_hits()) {
      for (size_t i = 0; i < slots.size(); ++i) {  // a slot has what a partial block had when it was copied
        if (slots[i] >= 0 && !blocks_.is_full(blocks[i])) slots[i] = -1;
      }
    }
    return slots;
  }
  void release_host_slots() { scheduler_->release_backing(); }

  void release_all() { blocks_.release_all(); }
  uint32_t space() const { return scheduler_->space(); }
  bool busy() const { return scheduler_->busy() || residency_->busy(); }
  bool device_busy() const { return scheduler_->moves_device() || residency_->busy(); }
  bool under_way() const { return scheduler_->under_way(); }
  int64_t held() const { return blocks_.held(); }
  int64_t loading() const { return loading_; }
  void check() const {
    value_or_raise(scheduler_->check());
    value_or_raise(residency_->check());
  }

  // Carry out a front end's call of a session; session_answer() has what became of it. session_views(): a page of the
  // sessions of one tenant; None: of all.
  py::dict session_call(const py::dict& dict) {
    return answer_to_python(value_or_raise(residency_->call(session_call_from(dict), last_step_)));
  }
  py::dict session_answer(const std::string& tenant, const std::string& action) const {
    return answer_to_python(value_or_raise(residency_->answer(tenant, action)));
  }
  py::dict session_views(const std::optional<std::string>& tenant, const py::object& from) {
    const SessionCursor cursor = cursor_from(from);
    return page_to_python(value_or_raise(
        try_catch([&]() -> Result<SessionPage> { return residency_->list(tenant ? &*tenant : nullptr, cursor); })));
  }
  std::vector<std::string> session_tenants(const std::string& session) const { return residency_->tenants_of(session); }
  bool sessions_are_due() const { return residency_->is_due(); }
  bool sessions_are_loading() const { return residency_->is_loading_any(); }

  py::bytes adopt(const py::list& ranks) {
    std::vector<std::vector<RecoveredBlock>> found;
    for (const py::handle each : ranks) found.push_back(recovered_from(bytes_from(each, "recovered blocks")));
    return torpor::to_python(
        value_or_raise(try_catch([&]() -> Result<Bytes> { return packed(scheduler_->adopt(found)); })));
  }

  // Return the tokens of the request's last load by store: host, disk, remote.
  TokensByStore tokens_of_load(const py::str& id) {
    const Record* const record = known(id.ptr());
    return record == nullptr ? TokensByStore() : record->found;
  }

  py::dict stats() const {
    py::dict all = connector_stats(*scheduler_, *residency_, blocks_.held(), loading_);
    all["loads_within_step"] = all_loads_within_step_;
    return all;
  }
  py::dict take_times() { return times_to_python(scheduler_->take_times()); }
  py::object take_events() { return events_to_python(scheduler_->take_events(), prefixes_.take_entered()); }

 private:
  // What is done for a request that waits: it is looked at after the step that it arrived in; the remote store is
  // asked; its blocks are on their way into host memory.
  enum class Ahead : uint8_t { kNone, kLook, kComing };
  struct Record {
    uint32_t number = 0;
    int32_t priority = 0;
    bool used = false;
    bool loading = false;
    bool fits_in_step = false;  // the load that was matched last
    std::string within_step{};  // the request's id, if the load that is under way ends within its step
    Ahead ahead = Ahead::kNone;
    std::vector<TransferHandle> coming{};
    size_t coming_blocks = 0;
    int failed_loads = 0;
    ConnectorOffers::Progress progress;
    size_t matched_at = 0;
    size_t matched = 0;         // units after those that can be loaded
    size_t asked = 0;           // blocks of all groups that are being loaded
    size_t loaded = 0;          // those of `asked` that are good
    bool remote_asked = false;  // and its answer is waited for, until …
    std::chrono::nanoseconds ask_until{};
    std::vector<StoreId> sources;        // of each matched unit
    TokensByStore found{};               // of its last load
    std::optional<CachedTokens> cached;  // of the look-up that vLLM counts
    struct Wanted {                      // the policy's answer for a hit: it is asked once for each
      size_t at = 0;
      size_t found = 0;
      size_t blocks = 0;
    };
    std::optional<Wanted> wanted;
    py::object request;
    SessionName session;  // without an id: it belongs to none

    void begin_again() {
      progress = {};
      loaded = 0;
    }
  };

  Record* known(PyObject* id) {
    PyObject* const number = PyDict_GetItemWithError(numbers_.ptr(), id);
    return number == nullptr ? nullptr : &records_[static_cast<size_t>(PyLong_AsSize_t(number))];
  }

  // Return whether the remote store has answered. It is asked once for each request, for all blocks that are nowhere
  // else. If it does not answer in time, the request goes on without its blocks.
  bool has_answer(Record& record, const py::object& request) {
    if (options_.offload.index.remote_slots == 0 || record.loading) return true;
    if (std::exchange(record.remote_asked, true))
      return !scheduler_->lookup_pending(record.number) || system_clock().now() >= record.ask_until;
    asks_.take_all(request, scheduler_->space());
    record.ask_until = system_clock().now() + options_.remote_wait;
    return value_or_raise(try_catch(
               [&]() -> Result<size_t> { return scheduler_->begin_lookup(record.number, asks_.keys()); })) == 0;
  }

  // Return the tokens of the hit, and reserve its part of the step's budget if it fits.
  int64_t matched_tokens(Record& record) {
    const bool whole = hits_.ends_where_it_ends();  // one group, all in host memory
    const auto blocks = static_cast<int64_t>(record.matched);
    record.fits_in_step = fits_in_step_ =
        blocks > 0 && whole && blocks <= left_in_step_ && scheduler_->can_load_within_step();
    if (fits_in_step_) left_in_step_ -= blocks;
    return blocks * block_tokens_;
  }

  // ---- requests that wait

  // Return whether blocks of the request are on their way into host memory. Those that the ranks do not work at yet are
  // cancelled: the request's own load is as fast.
  bool is_coming(Record& record) {
    if (record.coming.empty()) return false;
    for (TransferHandle& handle : record.coming) {
      if (handle.status() == TransferStatus::kQueued) handle.cancel();
    }
    scheduler_->sweep();
    std::erase_if(record.coming, [](const TransferHandle& handle) { return handle.status() == TransferStatus::kDone; });
    return !record.coming.empty();
  }
  void end_ahead(Record& record) {
    if (record.ahead == Ahead::kNone) return;
    record.ahead = Ahead::kNone;
    for (TransferHandle& handle : record.coming) handle.cancel();
    record.coming.clear();
    ahead_blocks_ -= std::exchange(record.coming_blocks, 0);
  }
  // Start what is not started for requests that wait, in their order.
  void look_ahead() {
    const size_t most = static_cast<size_t>(options_.offload.index.host_slots) / kHostShareAhead;
    size_t kept = 0;
    size_t at = 0;
    for (; at < ahead_.size() && ahead_blocks_ < most; ++at) {
      Record& record = records_[ahead_[at]];
      if (record.ahead != Ahead::kLook || record.loading) continue;
      if (!asks_ahead(record)) {
        ahead_[kept++] = ahead_[at];
        continue;
      }
      record.ahead = Ahead::kComing;
      ahead_hits_.take_all(record.request, scheduler_->space());
      few_keys_.clear();
      set_hash_bytes(record.request.attr("block_hashes"));
      for (const BlockKey& key : ahead_hits_.keys()) {
        if (few_keys_.size() + ahead_blocks_ >= most) break;
        if (prefixes_.find(key) >= 0) continue;  // the engine has it
        const std::optional<BlockLocations> places = ahead_hits_.find_one(key);
        if (!places && !groups_.whole_hits()) break;  // what lies behind it is of no use
        if (places && places->host < 0) few_keys_.push_back(key);
      }
      if (few_keys_.empty()) continue;
      record.coming = value_or_raise(try_catch(
          [&]() -> Result<std::vector<TransferHandle>> { return scheduler_->bring(few_keys_, StoreId::kHost); }));
      record.coming_blocks = few_keys_.size();
      ahead_blocks_ += few_keys_.size();
    }
    for (; at < ahead_.size(); ++at) {
      if (records_[ahead_[at]].ahead == Ahead::kLook) ahead_[kept++] = ahead_[at];  // else its request is gone
    }
    ahead_.resize(kept);
  }
  void set_hash_bytes(const py::list& hashes) {
    if (!hashes.empty()) prefixes_.set_hash_bytes(py::len(hashes[0]));
  }
  // Return whether the remote store has answered for a request that waits, or has nothing to say.
  bool asks_ahead(Record& record) {
    if (options_.offload.index.remote_slots == 0) return true;
    if (!record.remote_asked) (void)has_answer(record, record.request);
    return !scheduler_->lookup_pending(record.number);
  }

  // Return the priority; vLLM runs lower ones first. A client may choose any number of 64 bits.
  static int32_t priority_of(const py::object& request) {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    const auto given = py::getattr(request, "priority", py::int_(0)).cast<int64_t>();
    return -static_cast<int32_t>(std::clamp(given, -kMost, kMost));
  }
  Record& record_of(const py::object& request) {
    const py::str id = request.attr("request_id");
    if (Record* const record = known(id.ptr())) return *record;
    const int32_t priority = priority_of(request);
    offers_.expect(priority);
    const uint32_t number = scheduler_->begin_request(id.cast<std::string>(), priority);
    if (number >= records_.size()) records_.resize(number + 1);
    records_[number] = {
        .number = number, .priority = priority, .used = true, .request = request, .session = session_of(request)};
    numbers_[id] = py::int_(number);
    if (const SessionName& session = records_[number].session; !session.id.empty()) residency_->begin(session);
    return records_[number];
  }

  static ResidencyOptions residency_options(const ConnectorOptions& options, const GroupTables& groups) {
    ResidencyOptions residency = options.residency;
    residency.groups = static_cast<uint32_t>(groups.size());
    if (groups.size() > 1) residency.no_device = "the KV cache has several groups";
    if (options.lazy) residency.no_device = "offload is lazy, and free blocks may not be stored yet";
    return residency;
  }
  // Return the session that the request names: by vLLM's own field, or by `session_id` of its extra arguments. The
  // tenant is what a server writes there.
  static SessionName session_of(const py::object& request) {
    const auto text = [](const py::object& value) {
      return py::isinstance<py::str>(value) ? value.cast<std::string>() : std::string();
    };
    SessionName name{.id = text(py::getattr(request, "session_id", py::none()))};
    const py::object sampling = py::getattr(request, "sampling_params", py::none());
    const py::object extra = py::getattr(sampling, "extra_args", py::none());
    if (!py::isinstance<py::dict>(extra)) return name;
    if (name.id.empty()) name.id = text(extra.attr("get")("session_id"));
    name.tenant = text(extra.attr("get")("torpor_tenant"));
    return name;
  }
  // Record what a request of a session has computed. What it computed on top of older blocks is found by nobody.
  void end_session(const Record& record) {
    if (record.session.id.empty()) return;
    std::vector<BlockHash> chain;
    const py::list hashes = record.request.attr("block_hashes");
    const auto computed = record.request.attr("num_computed_tokens").cast<int64_t>();
    const auto tokens = record.request.attr("num_tokens").cast<int64_t>() - 1;  // the last one has no KV
    const auto full = static_cast<size_t>(std::max<int64_t>(std::min(computed, tokens), 0) / block_tokens_);
    for (size_t i = 0; i < std::min(full, hashes.size()) && !record.progress.stale; ++i) {
      const auto hash = hashes[i].cast<std::string>();
      BlockHash& padded = chain.emplace_back();
      if (hash.size() > padded.size()) {
        chain.clear();
        break;
      }
      std::copy(hash.begin(), hash.end(), padded.begin());
      prefixes_.set_hash_bytes(hash.size());
    }
    value_or_raise(
        try_catch([&]() -> Status { return residency_->finished(record.session, chain, last_step_), ok(); }));
  }

  // vLLM asks for the head of its waiting queue in each step, until there are blocks for it. Return whether the earlier
  // answer still holds. The blocks that were found are pinned, so they are still there. But there may be more, or
  // nearer ones, or some were found to be damaged meanwhile.
  bool is_still_matched(const Record& record, const py::object& request, int64_t computed) const {
    return record.matched > 0 && !options_.drop_last_block && last_match_.number == record.number &&
           last_match_.whole && last_match_.damaged == damaged() &&
           scheduler_->stage(record.number) == RequestStage::kOnboardStaged &&
           computed == static_cast<int64_t>(record.matched_at) * block_tokens_ &&
           !hits_.has_next(request, record.matched_at + record.matched, scheduler_->space());
  }
  // The number of failed loads after which a request computes its tokens. vLLM takes a load of several groups whole or
  // not at all. Damaged blocks are not found again, so another load brings what lies before them.
  int most_failed_loads() const { return groups_.whole_hits() ? kMostFailedLoads : 1; }
  uint64_t damaged() const {
    uint64_t blocks = 0;
    for (const Way way : {Way::kOnboard, Way::kDemote})
      blocks += scheduler_->queue().counts(way)[static_cast<size_t>(BlockOutcome::kDamaged)];
    return blocks;
  }

  bool others_have_loaded(const Record& record) const {
    return std::any_of(records_.begin(), records_.end(), [&](const Record& each) {
      return each.number != record.number && each.request && (each.loading || each.loaded > 0);
    });
  }

  // Return how many units of the hit in hits_ the policy wants. One that it does not want ends the hit; where a
  // shorter hit would need other blocks, nothing of it is loaded.
  size_t wanted_of_hit(Record& record, const py::object& request) {
    const size_t found = record.matched;
    if (!record.wanted || record.wanted->at != record.matched_at || record.wanted->found != found) {
      const std::span<const BlockKey> keys = hits_.keys();
      std::vector<uint8_t> keep(keys.size(), 1);
      const auto id = request.attr("request_id").cast<std::string>();
      size_t blocks = found;
      if (policy_->choose(PolicyQuestion::kLoad, id, keys, keep)) {
        const auto first = static_cast<size_t>(std::find(keep.begin(), keep.end(), 0) - keep.begin());
        if (first < keep.size()) blocks = groups_.whole_hits() ? 0 : first;
      }
      record.wanted = {.at = record.matched_at, .found = found, .blocks = blocks};
    }
    if (!groups_.whole_hits()) hits_.shorten(record.wanted->blocks);
    return record.wanted->blocks;
  }

  int32_t match(const Record& record, size_t have) {
    return value_or_raise(
        try_catch([&]() -> Result<int32_t> { return scheduler_->match(record.number, hits_.keys(), have); }));
  }

  // `sources`: the store of each unit of a hit, of which the engine takes the first `tokens` tokens.
  TokensByStore tokens_by_store(const std::vector<StoreId>& sources, int64_t tokens) const {
    TokensByStore sums{};
    for (const StoreId source : sources) {
      const int64_t of_unit = std::min(tokens, block_tokens_);
      sums[static_cast<size_t>(source)] += of_unit;
      tokens -= of_unit;
    }
    return sums;
  }

  // Take the engine's blocks for a hit of `units` units after those that it had itself, whose keys are in hits_.
  void take_blocks(const Record& record, PyObject* id, size_t units) {
    few_.clear();
    for (size_t group = 0; group < groups_.size(); ++group) {
      const GroupTables::Table table = groups_.of(group, id);
      const auto [first, end] = groups_.needed(group, record.matched_at, record.matched_at + units);
      for (size_t i = first; i < std::min(end, table.size); ++i) few_.push_back(blocks_.number_of(table[i]));
    }
  }

  // After take_blocks(): set those of few_ to -1 that end behind the load. The request fills these blocks, and vLLM may
  // have entered them as full ones by now, while the loaded slots have the content of a part.
  void leave_out_partial(const Record& record, size_t units) {
    size_t at = 0;
    for (size_t group = 0; group < groups_.size(); ++group) {
      const size_t size = groups_.units(group);
      const auto [first, end] = groups_.needed(group, record.matched_at, record.matched_at + units);
      for (size_t i = first; i < end && at < few_.size(); ++i, ++at) {
        if ((i + 1) * size > record.matched_at + units) few_[at] = -1;
      }
    }
  }

  void look_at(const py::dict& scheduled, uint64_t step) {
    PyObject* id = nullptr;
    PyObject* tokens = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(scheduled.ptr(), &at, &id, &tokens) != 0;) {
      Record* const record = known(id);
      if (record == nullptr) continue;  // the request was never matched
      offers_.computes(record->progress, {record->request.ptr(), id, record->priority}, PyLong_AsLongLong(tokens),
                       step);
    }
  }

  void take_handed(const py::dict& handed, uint64_t step) {
    for (const auto& [id, blocks] : handed) {
      const Record* const record = known(id.ptr());
      if (record == nullptr || !record->request) continue;
      offers_.handed(record->progress, {record->request.ptr(), id.ptr(), record->priority}, blocks.cast<py::list>(),
                     step);
    }
  }

  void end_loads() {
    const std::vector<EndedLoad> loads =
        value_or_raise(try_catch([&]() -> Result<std::vector<EndedLoad>> { return scheduler_->take_loads(); }));
    for (const EndedLoad& load : loads) {
      if (value_or_raise(try_catch([&]() -> Result<bool> { return residency_->loaded(load); }))) continue;
      Record& record = records_[load.request];
      loading_ -= record.loading ? 1 : 0;
      record.loading = false;
      record.loaded = static_cast<size_t>(load.good_blocks);
      const std::string within_step = std::exchange(record.within_step, {});
      const bool good = record.loaded == record.asked;
      if (!good && !within_step.empty()) {
        failed_within_step_.emplace_back(within_step, record.matched_at + record.loaded);
        record.loaded = 0;  // it gives its blocks back
      }
      if (!record.request) {  // aborted meanwhile
        record.used = false;
        continue;
      }
      if (good) {
        if (!within_step.empty()) end_within_step(record);
        continue;
      }
      record.failed_loads = load.cancelled ? kMostFailedLoads : record.failed_loads + 1;
      if (groups_.whole_hits()) record.loaded = 0;  // vLLM takes none of them then
    }
  }

  // A request computes with its loaded blocks already: it is not allocated once more.
  void end_within_step(Record& record) {
    const py::str id = record.request.attr("request_id");
    take_blocks(record, id.ptr(), record.loaded);
    record.loaded = 0;
    value_or_raise(try_catch([&]() -> Status { return scheduler_->loaded(record.number, few_), ok(); }));
  }

  const ConnectorOptions options_;
  const int64_t block_tokens_;  // of a unit
  const GroupTables groups_;
  EngineBlocks blocks_;
  const std::unique_ptr<Placement> placement_;
  std::optional<PythonPolicy> policy_;
  const std::unique_ptr<OffloadScheduler> scheduler_;
  EnginePrefixes prefixes_;
  const std::unique_ptr<Residency> residency_;
  uint64_t last_step_ = 0;  // that the engine began
  ConnectorHits hits_;
  ConnectorHits asks_;
  ConnectorHits ahead_hits_;
  ConnectorOffers offers_;
  struct LastMatch {
    uint32_t number = UINT32_MAX;  // index of the request whose keys hits_ has
    uint64_t damaged = 0;
    bool whole = false;
  };
  LastMatch last_match_;
  py::dict numbers_;                                  // request id -> index in records_
  std::vector<Record> records_;                       // by OffloadScheduler's number
  int64_t loading_ = 0;                               // number of requests
  std::vector<uint32_t> ahead_;                       // requests that wait and are to be looked at, in their order
  size_t ahead_blocks_ = 0;                           // on their way into host memory, or there, for requests that wait
  int64_t left_in_step_ = options_.sync_load_blocks;  // of the budget of the step that is being planned
  bool fits_in_step_ = false;
  uint64_t all_loads_within_step_ = 0;
  std::vector<std::string> loads_within_step_;
  std::vector<std::pair<std::string, size_t>> failed_within_step_;
  std::vector<int32_t> few_;  // buffers of one call; they keep their memory
  std::vector<BlockKey> few_keys_;
};

}  // namespace

void bind_connector(py::module_& module) {
  py::class_<ConnectorScheduler>(module, "ConnectorScheduler",
                                 "What vLLM's scheduler asks of offloading, over its own block pool.")
      .def(py::init<const py::object&, const py::list&, const py::dict&>(), py::arg("pool"), py::arg("groups"),
           py::arg("options"))
      .def("match", py::overload_cast<const py::object&, int64_t>(&ConnectorScheduler::match), py::call_guard<InHook>(),
           py::arg("request"), py::arg("computed"),
           "Tokens behind the first `computed` ones that can be loaded; they are kept until allocated(). None: ask "
           "again.")
      .def(
          "queued", [](ConnectorScheduler& self, const py::object& request) { self.queued(request); },
          py::call_guard<InHook>(), py::arg("request"),
          "The request waits: what only disk and remote store have of it comes into host memory meanwhile.")
      .def_property_readonly("fits_in_step", &ConnectorScheduler::fits_in_step,
                             "Whether the load that match() found last can end within the step.")
      .def("take_loads_within_step", &ConnectorScheduler::take_loads_within_step,
           "Requests whose loads are in the last plan and end before the step's forward pass.")
      .def("take_failed_within_step", &ConnectorScheduler::take_failed_within_step,
           "(request, number of its first block without valid content) for each load within a step that failed.")
      .def("fail_step", &ConnectorScheduler::fail_step, py::call_guard<InHook>(), py::arg("step"),
           "What this step filled is not offered.")
      .def(
          "know", [](ConnectorScheduler& self, const py::object& request) { self.know(request); },
          py::call_guard<InHook>(), py::arg("request"))
      .def("use_policy", &ConnectorScheduler::use_policy, py::arg("ask"),
           "Ask about blocks that are to be stored (0), and about those that were found for a request (1): "
           "ask(question, request, keys, groups) returns a byte for each key, or None for no answer.")
      .def(
          "allocated", &ConnectorScheduler::allocated, py::call_guard<InHook>(), py::arg("id"), py::arg("external"),
          py::arg("local") = py::none(), py::arg("other") = 0,
          "It has blocks for `external` tokens that are loaded. `local`: if vLLM counts this look-up as the request's, "
          "the tokens in its own prefix cache; `other`: those that another connector loads. Returns whether the load "
          "ends within the step.")
      .def(
          "step", &ConnectorScheduler::step, py::call_guard<InHook>(), py::arg("step"), py::arg("scheduled"),
          py::arg("flush") = false, py::arg("handed") = py::dict(),
          "What this step fills is offered; returns what all ranks do next, or None. `handed`: by request, blocks that "
          "vLLM hands over: (group, block, tokens).")
      .def("plan", &ConnectorScheduler::plan, py::call_guard<InHook>(), py::arg("flush"), py::arg("of_device") = false,
           "The same, without a step. of_device: only copies from and to the device, and for sessions.")
      .def("acknowledge", &ConnectorScheduler::acknowledge, py::call_guard<InHook>(), py::arg("step"),
           "The forward pass of this step is over.")
      .def("apply", &ConnectorScheduler::apply, py::call_guard<InHook>(), py::arg("reports"),
           "What became of plans, as the ranks say it.")
      .def("finished", &ConnectorScheduler::finished, py::call_guard<InHook>(), py::arg("id"), py::arg("step"),
           py::arg("answered"),
           "Of a request that still has its blocks; `step` was the last one. `answered`: vLLM has said how many of its "
           "tokens were cached; then they are counted.")
      .def("reset", &ConnectorScheduler::reset, py::call_guard<InHook>(),
           "Nothing is found any more; returns the number of the new namespace.")
      .def("host_slots", &ConnectorScheduler::host_slots, py::call_guard<InHook>(), py::arg("blocks"), py::arg("keep"),
           "Of each of the engine's blocks, the slot in host memory that has its bytes, or -1; with `keep` they stay "
           "so.")
      .def("release_host_slots", &ConnectorScheduler::release_host_slots, py::call_guard<InHook>())
      .def("release_all", &ConnectorScheduler::release_all, py::call_guard<InHook>(),
           "No block of the engine is held any more.")
      .def("adopt", &ConnectorScheduler::adopt, py::call_guard<InHook>(), py::arg("ranks"),
           "What every rank recovered is found from now on; returns what the ranks adopt.")
      .def("tokens_of_load", &ConnectorScheduler::tokens_of_load, py::arg("id"),
           "Tokens of the request's last load by store: host, disk, remote.")
      .def("session_call", &ConnectorScheduler::session_call, py::call_guard<InHook>(), py::arg("call"),
           "Begin a call of a session; returns its answer so far.")
      .def("session_answer", &ConnectorScheduler::session_answer, py::call_guard<InHook>(), py::arg("tenant"),
           py::arg("action"))
      .def("session_views", &ConnectorScheduler::session_views, py::call_guard<InHook>(), py::arg("tenant"),
           py::arg("from_") = py::none(),
           "Next sessions of a tenant; None: of all. `from_`: where the page before says that the next one begins.")
      .def("session_tenants", &ConnectorScheduler::session_tenants, py::call_guard<InHook>(), py::arg("session"),
           "The tenants that have a session of this id.")
      .def_property_readonly("sessions_are_due", &ConnectorScheduler::sessions_are_due,
                             "An idle session is to be demoted in the next step.")
      .def_property_readonly("sessions_are_loading", &ConnectorScheduler::sessions_are_loading,
                             "Blocks of a session are on their way to the device; no request has them.")
      .def("stats", &ConnectorScheduler::stats, py::call_guard<InHook>())
      .def("take_times", &ConnectorScheduler::take_times, py::call_guard<InHook>(),
           "Seconds that each batch took, by way, and each request's load (`load`), since the last call.")
      .def("take_events", &ConnectorScheduler::take_events, py::call_guard<InHook>())
      .def("check", &ConnectorScheduler::check, py::call_guard<InHook>(),
           "For tests: raises if the index or the queue contradict themselves.")
      .def_property_readonly("space", &ConnectorScheduler::space)
      .def_property_readonly("busy", &ConnectorScheduler::busy, "Steps are needed, if only empty ones.")
      .def_property_readonly("device_busy", &ConnectorScheduler::device_busy,
                             "Copies from or to the device, or for sessions, have not ended.")
      .def_property_readonly("under_way", &ConnectorScheduler::under_way)
      .def_property_readonly("held", &ConnectorScheduler::held, "Blocks of the engine.")
      .def_property_readonly("loading", &ConnectorScheduler::loading, "Requests.");
}

}  // namespace torpor
