// SPDX-License-Identifier: Apache-2.0
#include "kvcache/transfer_plan.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <span>
#include <type_traits>

#include <fmt/core.h>

#include "kvcache/key_table.h"

namespace torpor {
namespace {

static_assert(std::endian::native == std::endian::little, "plans and reports are written as they lie in memory");

constexpr uint32_t kPlanMagic = 0x6e6c7054;    // "Tpln"
constexpr uint32_t kReportMagic = 0x70657254;  // "Trep"
constexpr uint32_t kVersion = 1;

struct PlanHeader {
  uint32_t magic = kPlanMagic;
  uint32_t version = kVersion;
  uint64_t number = 0;
  uint32_t dropped = 0;
  uint32_t jobs = 0;
  uint32_t blocks = 0;
  uint32_t keys = 0;
  uint32_t loading = 0;
  uint32_t zero = 0;
};
struct DroppedEntry {
  uint32_t store = 0;
  int32_t number = 0;
};
struct JobEntry {
  uint64_t id = 0;
  std::array<uint8_t, 4> kind_store_other_priority{};
  uint32_t count = 0;
};
struct NameEntry {
  uint64_t job = 0;
  uint64_t length = 0;
};
struct ReportHeader {
  uint32_t magic = kReportMagic;
  uint32_t version = kVersion;
  int32_t rank = 0;
  uint32_t jobs = 0;
  uint32_t outcomes = 0;
  uint32_t stores = 0;
};
struct JobReportEntry {
  uint64_t id = 0;
  uint32_t count = 0;
  uint16_t code = 0;
  uint16_t cause = 0;  // length in bytes
};
struct StoreEntry {
  uint32_t store = 0;
  uint32_t accepting = 0;
  uint64_t put_bytes = 0;
  uint64_t got_bytes = 0;
  uint64_t write_errors = 0;
  uint64_t read_errors = 0;
};
static_assert(std::has_unique_object_representations_v<PlanHeader>);
static_assert(std::has_unique_object_representations_v<JobEntry>);
static_assert(std::has_unique_object_representations_v<ReportHeader>);
static_assert(std::has_unique_object_representations_v<JobReportEntry>);
static_assert(std::has_unique_object_representations_v<StoreEntry>);
static_assert(std::has_unique_object_representations_v<BlockKey>);

template <class T>
void append(Bytes& bytes, std::span<const T> values) {
  static_assert(std::has_unique_object_representations_v<T>);
  const size_t at = bytes.size();
  bytes.resize(at + values.size_bytes());
  if (!values.empty()) std::memcpy(bytes.data() + at, values.data(), values.size_bytes());
}
template <class T>
void append_one(Bytes& bytes, const T& value) {
  append<T>(bytes, std::span(&value, 1));
}

Error wrong(std::string_view what) {
  return {.code = Code::kCorruption,
          .what = fmt::format("a plan or report of transfers: {}", what),
          .next_step = "run the same version of torpor in all processes"};
}

// Reads values from the front. A value that is missing is an error, before memory is allocated for it.
class Taker {
 public:
  explicit Taker(std::span<const uint8_t> bytes) : rest_(bytes) {}
  template <class T>
  bool take(T& value) {
    if (rest_.size() < sizeof value) return false;
    std::memcpy(&value, rest_.data(), sizeof value);
    rest_ = rest_.subspan(sizeof value);
    return true;
  }
  template <class T>
  bool take(std::vector<T>& values, uint32_t count) {
    const uint64_t size = uint64_t{count} * sizeof(T);
    if (rest_.size() < size) return false;
    values.resize(count);
    if (count > 0) std::memcpy(values.data(), rest_.data(), size);
    rest_ = rest_.subspan(size);
    return true;
  }
  bool take(std::string& text, uint64_t length) {
    if (rest_.size() < length) return false;
    text.assign(rest_.begin(), rest_.begin() + static_cast<std::ptrdiff_t>(length));
    rest_ = rest_.subspan(length);
    return true;
  }
  bool has(uint64_t count, size_t each) const { return count * each <= rest_.size(); }
  bool empty() const { return rest_.empty(); }

 private:
  std::span<const uint8_t> rest_;
};

Status take_jobs(Taker& taker, const PlanHeader& header, TransferPlan& plan) {
  if (!taker.has(header.jobs, sizeof(JobEntry))) return wrong("it ends early");
  plan.jobs.reserve(header.jobs);
  uint64_t blocks = 0;
  uint64_t keys = 0;
  for (uint32_t i = 0; i < header.jobs; ++i) {
    JobEntry entry;
    (void)taker.take(entry);
    const auto [kind, store, other, priority] = entry.kind_store_other_priority;
    PlannedJob job{.id = entry.id,
                   .kind = static_cast<PlanKind>(kind),
                   .store = static_cast<StoreId>(store),
                   .other = static_cast<StoreId>(other),
                   .priority = static_cast<TransferPriority>(priority),
                   .first = static_cast<uint32_t>(blocks),
                   .count = entry.count};
    const bool move = job.kind == PlanKind::kMove;
    const bool within = move && store == other;  // on disk: into another segment
    if (kind > static_cast<uint8_t>(PlanKind::kSkip) || store >= kStores || other >= kStores ||
        priority > static_cast<uint8_t>(TransferPriority::kOffload) || (!move && store != other) ||
        (within && store != static_cast<uint8_t>(StoreId::kDisk)) ||
        (job.kind == PlanKind::kFind && job.store != StoreId::kRemote) || job.id == 0 || job.count == 0)
      return wrong("a job is none");
    blocks += job.count;
    keys += job.keyed() ? job.count : 0;
    if (blocks > header.blocks) return wrong("its jobs have more blocks than it has");
    plan.jobs.push_back(job);
  }
  if (blocks != header.blocks || keys != header.keys) return wrong("its jobs have other blocks or keys than it has");
  return ok();
}

Status take_blocks(Taker& taker, const PlanHeader& header, TransferPlan& plan) {
  if (!taker.take(plan.from, header.blocks) || !taker.take(plan.to, header.blocks) ||
      !taker.take(plan.keys, header.keys))
    return wrong("it ends early");
  const auto negative = [](int32_t number) { return number < 0; };
  if (std::any_of(plan.from.begin(), plan.from.end(), negative) ||
      std::any_of(plan.to.begin(), plan.to.end(), negative))
    return wrong("a block or slot has no number");
  if (!std::all_of(plan.keys.begin(), plan.keys.end(), KeyTable::fits)) return wrong("a key is none");
  return ok();
}

Status take_loading(Taker& taker, const PlanHeader& header, TransferPlan& plan) {
  if (!taker.has(header.loading, sizeof(NameEntry))) return wrong("it ends early");
  plan.loading.reserve(header.loading);
  for (uint32_t i = 0; i < header.loading; ++i) {
    NameEntry entry;
    PlannedLoad load;
    if (!taker.take(entry) || !taker.take(load.request, entry.length)) return wrong("it ends early");
    load.job = entry.job;
    const bool known = std::any_of(plan.jobs.begin(), plan.jobs.end(),
                                   [&](const PlannedJob& job) { return job.id == load.job && job.of_load(); });
    if (!known) return wrong("a request waits for a job that loads nothing");
    plan.loading.push_back(std::move(load));
  }
  return ok();
}

Result<TransferPlan> decode_plan(std::span<const uint8_t> bytes) {
  Taker taker(bytes);
  PlanHeader header;
  if (!taker.take(header) || header.magic != kPlanMagic) return wrong("it is no plan");
  if (header.version != kVersion || header.zero != 0) return wrong("it is of another version");
  TransferPlan plan{.number = header.number};
  if (!taker.has(header.dropped, sizeof(DroppedEntry))) return wrong("it ends early");
  plan.dropped.reserve(header.dropped);
  for (uint32_t i = 0; i < header.dropped; ++i) {
    DroppedEntry entry;
    (void)taker.take(entry);
    if (entry.store > static_cast<uint32_t>(StoreId::kDisk) || entry.number < 0) return wrong("it drops nothing known");
    plan.dropped.push_back({static_cast<StoreId>(entry.store), entry.number});
  }
  TORPOR_RETURN_IF_ERROR(take_jobs(taker, header, plan));
  TORPOR_RETURN_IF_ERROR(take_blocks(taker, header, plan));
  TORPOR_RETURN_IF_ERROR(take_loading(taker, header, plan));
  if (!taker.empty()) return wrong("something follows it");
  return plan;
}

Result<TransferReport> decode_report(std::span<const uint8_t> bytes) {
  Taker taker(bytes);
  ReportHeader header;
  if (!taker.take(header) || header.magic != kReportMagic) return wrong("it is no report");
  if (header.version != kVersion) return wrong("it is of another version");
  if (header.rank < 0) return wrong("it is of no rank");
  TransferReport report{.rank = header.rank};
  if (!taker.has(header.jobs, sizeof(JobReportEntry))) return wrong("it ends early");
  report.jobs.reserve(header.jobs);
  uint64_t outcomes = 0;
  for (uint32_t i = 0; i < header.jobs; ++i) {
    JobReportEntry entry;
    JobReport job;
    if (!taker.take(entry) || !taker.take(job.cause, entry.cause)) return wrong("it ends early");
    if (entry.code > static_cast<uint16_t>(kLastCode) || entry.cause > kMostCauseBytes || entry.id == 0)
      return wrong("a job is none");
    job.id = entry.id;
    job.first = static_cast<uint32_t>(outcomes);
    job.count = entry.count;
    job.code = static_cast<Code>(entry.code);
    outcomes += entry.count;
    if (outcomes > header.outcomes) return wrong("its jobs have more outcomes than it has");
    report.jobs.push_back(std::move(job));
  }
  if (outcomes != header.outcomes || !taker.take(report.outcomes, header.outcomes)) return wrong("it ends early");
  for (const BlockOutcome outcome : report.outcomes) {
    if (static_cast<int>(outcome) >= kBlockOutcomes) return wrong("an outcome is none");
  }
  if (!taker.has(header.stores, sizeof(StoreEntry))) return wrong("it ends early");
  for (uint32_t i = 0; i < header.stores; ++i) {
    StoreEntry entry;
    (void)taker.take(entry);
    if (entry.store >= kStores || entry.accepting > 1) return wrong("a store is none");
    report.stores.push_back({static_cast<StoreId>(entry.store), entry.accepting == 1, entry.put_bytes, entry.got_bytes,
                             entry.write_errors, entry.read_errors});
  }
  if (!taker.empty()) return wrong("something follows it");
  return report;
}

}  // namespace

std::string_view name(PlanKind kind) {
  switch (kind) {
    case PlanKind::kPut: return "put";
    case PlanKind::kGet: return "get";
    case PlanKind::kMove: return "move";
    case PlanKind::kFind: return "find";
    case PlanKind::kSkip: return "skip";
  }
  return "?";
}

void TransferPlan::clear() {
  number = 0;
  dropped.clear();
  jobs.clear();
  from.clear();
  to.clear();
  keys.clear();
  loading.clear();
}

PlannedJob& TransferPlan::add(uint64_t id, PlanKind kind, StoreId store, TransferPriority priority) {
  jobs.push_back({.id = id,
                  .kind = kind,
                  .store = store,
                  .other = store,
                  .priority = priority,
                  .first = static_cast<uint32_t>(from.size())});
  return jobs.back();
}

Bytes TransferPlan::encode() const {
  Bytes bytes;
  bytes.reserve(sizeof(PlanHeader) + dropped.size() * sizeof(DroppedEntry) + jobs.size() * sizeof(JobEntry) +
                (from.size() + to.size()) * sizeof(int32_t) + keys.size() * sizeof(BlockKey) + loading.size() * 64);
  append_one(bytes, PlanHeader{.number = number,
                               .dropped = static_cast<uint32_t>(dropped.size()),
                               .jobs = static_cast<uint32_t>(jobs.size()),
                               .blocks = static_cast<uint32_t>(from.size()),
                               .keys = static_cast<uint32_t>(keys.size()),
                               .loading = static_cast<uint32_t>(loading.size())});
  for (const Dropped& each : dropped) append_one(bytes, DroppedEntry{static_cast<uint32_t>(each.store), each.number});
  for (const PlannedJob& job : jobs) {
    append_one(
        bytes,
        JobEntry{.id = job.id,
                 .kind_store_other_priority = {static_cast<uint8_t>(job.kind), static_cast<uint8_t>(job.store),
                                               static_cast<uint8_t>(job.other), static_cast<uint8_t>(job.priority)},
                 .count = job.count});
  }
  append<int32_t>(bytes, from);
  append<int32_t>(bytes, to);
  append<BlockKey>(bytes, keys);
  for (const PlannedLoad& load : loading) {
    append_one(bytes, NameEntry{.job = load.job, .length = load.request.size()});
    append<char>(bytes, load.request);
  }
  return bytes;
}

Result<TransferPlan> TransferPlan::decode(std::span<const uint8_t> bytes) {
  return try_catch([&] { return decode_plan(bytes); });
}

Bytes TransferReport::encode() const {
  Bytes bytes;
  append_one(bytes, ReportHeader{.rank = rank,
                                 .jobs = static_cast<uint32_t>(jobs.size()),
                                 .outcomes = static_cast<uint32_t>(outcomes.size()),
                                 .stores = static_cast<uint32_t>(stores.size())});
  for (const JobReport& job : jobs) {
    const size_t cause = std::min(job.cause.size(), kMostCauseBytes);
    append_one(bytes, JobReportEntry{.id = job.id,
                                     .count = job.count,
                                     .code = static_cast<uint16_t>(job.code),
                                     .cause = static_cast<uint16_t>(cause)});
    append<char>(bytes, std::string_view(job.cause).substr(0, cause));
  }
  append<BlockOutcome>(bytes, outcomes);
  for (const StoreReport& store : stores) {
    append_one(bytes, StoreEntry{static_cast<uint32_t>(store.store), store.accepting ? 1u : 0u, store.put_bytes,
                                 store.got_bytes, store.write_errors, store.read_errors});
  }
  return bytes;
}

Result<TransferReport> TransferReport::decode(std::span<const uint8_t> bytes) {
  return try_catch([&] { return decode_report(bytes); });
}

}  // namespace torpor
