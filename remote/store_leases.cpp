#include "remote/store_leases.h"

#include <thread>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/digest.h"
#include "base/seal.h"

namespace torpor::remote {
namespace {

using Json = nlohmann::ordered_json;
constexpr int kLeaseFormat = 1;
constexpr uint64_t kMostLeaseBytes = 4096;
constexpr std::string_view kPush = "push-";
constexpr std::string_view kRemoval = "removal-";
constexpr std::chrono::milliseconds kLookAgain{500};

double seconds_of(std::chrono::nanoseconds time) { return std::chrono::duration<double>(time).count(); }

// Until when whoever wrote the record counts on it; none: it is gone. One that nobody can read counts.
Result<std::optional<double>> ends_at(ObjectStore& store, const std::string& key, double now) {
  const Result<std::vector<std::byte>> text = get_whole(store, key, kMostLeaseBytes);
  if (!text && text.error().code == Code::kNotFound) return std::optional<double>();
  if (!text) return text.error();
  const Json json = Json::parse(reinterpret_cast<const char*>(text->data()),
                                reinterpret_cast<const char*>(text->data() + text->size()), nullptr, false);
  if (!json.is_object() || !json.contains("until") || !json["until"].is_number()) return std::optional<double>(now);
  return std::optional<double>(json["until"].get<double>());
}

// The key of one that is in the way, empty: none. Those that ended by themselves are removed.
Result<std::string> in_the_way(ObjectStore& store, LeaseKind kind, const std::string& own, const Clock& clock) {
  TORPOR_ASSIGN(const std::vector<std::string> keys, store.list(kLeasePrefix));
  for (const std::string& key : keys) {
    const bool push = std::string_view(key).substr(kLeasePrefix.size()).starts_with(kPush);
    if (key == own || (kind == LeaseKind::kPush && push)) continue;
    const double now = clock.unix_seconds();
    TORPOR_ASSIGN(const std::optional<double> until, ends_at(store, key, now));
    if (!until) continue;
    if (now < *until + seconds_of(kClocksDiffer)) return key;
    TORPOR_TRY(store.remove(key));
  }
  return std::string();
}

}  // namespace

Result<StoreLease> StoreLease::begin(ObjectStore& store, LeaseKind kind, const Clock& clock,
                                     std::chrono::seconds patience) {
  const bool push = kind == LeaseKind::kPush;
  const std::chrono::nanoseconds term = push ? std::chrono::nanoseconds(kPushTerm) : kRemovalTerm;
  const std::chrono::nanoseconds waits_until = clock.now() + patience;
  while (true) {
    const std::string key = fmt::format("{}{}{}", kLeasePrefix, push ? kPush : kRemoval, hex(random_seal_id()));
    StoreLease lease(key, clock.now() + term, clock);
    const std::string text =
        Json{{"torpor_lease", kLeaseFormat}, {"until", clock.unix_seconds() + seconds_of(term)}}.dump();
    TORPOR_TRY(store.put_new(key, std::as_bytes(std::span(text))));
    TORPOR_ASSIGN(const std::string other, in_the_way(store, kind, key, clock));
    if (other.empty()) return lease;
    TORPOR_TRY(lease.end(store));
    if (clock.now() >= waits_until)
      return Error{
          .code = Code::kUnavailable,
          .what = fmt::format("{} is under way in {} ({})",
                              other.find(kPush) == std::string::npos ? "a removal" : "a push", store.url(), other),
          .next_step = "try again later; if whoever began it was killed, remove that object"};
    std::this_thread::sleep_for(kLookAgain);
  }
}

Status StoreLease::check() const {
  if (!over()) return ok();
  return Error{
      .code = Code::kAborted,
      .what = fmt::format("this took longer than {} hours: parts may have been removed meanwhile", kPushTerm.count()),
      .next_step = "start it again: it goes on where it was"};
}

Status StoreLease::end(ObjectStore& store) { return store.remove(key_); }

}  // namespace torpor::remote
