// SPDX-License-Identifier: Apache-2.0
// A server's data in an object store, for Python: its owner, its newest checkpoint and its answers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>

#include "base/digest.h"
#include "base/seal.h"
#include "bindings/bind_errors.h"
#include "bindings/bind_subjects.h"
#include "bindings/bind_values.h"
#include "bindings/module_files.h"
#include "checkpoint/engine_checkpoint.h"
#include "remote/answer_copies.h"
#include "remote/checkpoint_copies.h"
#include "remote/open_store.h"
#include "remote/ownership.h"
#include "remote/store_leases.h"

namespace py = pybind11;

namespace torpor {
namespace {

// Limits the time of an operation that asks the store for the owner. If a renewal hangs, there must be time for
// another one within its term; and a process that ends must not wait long for a store that is gone. One operation at a
// time.
class OperationLimit {
 public:
  explicit OperationLimit(std::chrono::nanoseconds length) : length_(length) {}
  void begin() { until_ = system_clock().now() + length_; }
  double seconds_left() const { return seconds_between(system_clock().now(), until_); }

 private:
  const std::chrono::nanoseconds length_;
  std::atomic<std::chrono::nanoseconds> until_{};
};

constexpr int kOperationsPerTerm = 3;

struct RemoteHome {
  std::shared_ptr<std::atomic<bool>> stopped;  // true: what `store` copies ends with kAborted
  std::unique_ptr<remote::ObjectStore> store;  // without a time limit, for copies
  std::shared_ptr<OperationLimit> limit;
  std::unique_ptr<remote::ObjectStore> records;
  std::shared_ptr<const Key> key;
  std::string holder;
  remote::Ownership ownership;
  std::unique_ptr<remote::KeptLease> sending{};  // from send() until publish(): nothing names yet what was sent

  RemoteHome(std::shared_ptr<std::atomic<bool>> stopped, std::unique_ptr<remote::ObjectStore> store,
             std::shared_ptr<OperationLimit> limit, std::unique_ptr<remote::ObjectStore> records,
             std::shared_ptr<const Key> key, std::string holder, std::chrono::milliseconds term, std::string address)
      : stopped(std::move(stopped)),
        store(std::move(store)),
        limit(std::move(limit)),
        records(std::move(records)),
        key(std::move(key)),
        holder(std::move(holder)),
        ownership(*this->records, system_clock(), this->holder, term, std::move(address)) {}
};

// Run an operation that asks the store for the owner.
template <class Work>
auto within_limit(RemoteHome& self, Work work) {
  return value_or_raise(without_lock([&] {
    self.limit->begin();
    return work(self.ownership);
  }));
}

std::unique_ptr<RemoteHome> open_home(const std::string& url, double term_seconds,
                                      const std::optional<std::string>& key_file, const std::string& address) {
  if (!address.empty() && !remote::is_address(address)) {
    value_or_raise(Status(Error{.code = Code::kInvalidArgument,
                                .what = "the address at which clients find this server is none",
                                .next_step = "write http://HOST:PORT or https://HOST"}));
  }
  std::shared_ptr<const Key> key = key_from(key_file);
  const std::chrono::milliseconds term(static_cast<int64_t>(term_seconds * 1000));
  auto limit = std::make_shared<OperationLimit>(term / kOperationsPerTerm);
  auto stopped = std::make_shared<std::atomic<bool>>(false);
  std::unique_ptr<remote::ObjectStore> store = value_or_raise(without_lock(
      [&] { return remote::open_object_store(module_files(), url, [stopped] { return stopped->load(); }); }));
  std::unique_ptr<remote::ObjectStore> records = value_or_raise(without_lock(
      [&] { return remote::open_object_store(module_files(), url, {}, [limit] { return limit->seconds_left(); }); }));
  return std::make_unique<RemoteHome>(std::move(stopped), std::move(store), std::move(limit), std::move(records),
                                      std::move(key), hex(random_seal_id()), term, address);
}

struct Sent {
  remote::CopyReport checkpoint;
  std::string answers;
};

// Send both; no server goes on from them before publish() names both in one write.
Result<Sent> send(RemoteHome& self, const std::string& checkpoint, const std::string& answers) {
  return try_catch([&]() -> Result<Sent> {
    Sent sent;
    TORPOR_ASSIGN_OR_RETURN(const Checkpoint opened, open_checkpoint(module_files(), checkpoint, self.key));
    self.sending.reset();
    TORPOR_ASSIGN_OR_RETURN(remote::StoreLease begun, remote::StoreLease::begin(*self.store, remote::LeaseKind::kPush,
                                                                                system_clock(), remote::kPushPatience));
    auto sending = std::make_unique<remote::KeptLease>(std::move(begun), *self.store);
    TORPOR_ASSIGN_OR_RETURN(sent.checkpoint, remote::push(module_files(), opened, *self.store, {.key = self.key}));
    TORPOR_ASSIGN_OR_RETURN(sent.answers, remote::push_answers(module_files(), answers, *self.store));
    self.sending = std::move(sending);
    return sent;
  });
}

Status publish(RemoteHome& self, const Sent& sent) {
  const std::unique_ptr<remote::KeptLease> sending = std::move(self.sending);
  if (sending) TORPOR_RETURN_IF_ERROR(sending->check());
  self.limit->begin();
  Status published = self.ownership.publish(sent.checkpoint.name, sent.answers);
  if (!published && sending) sending->leave();  // it is unknown whether the write takes effect
  return published;
}

// Return the path of the checkpoint; empty: there is none.
Result<std::string> fetch(RemoteHome& self, const std::string& directory, const Fingerprint& engine) {
  const remote::OwnerRecord newest = self.ownership.newest();
  const Result<remote::CopyReport> report = remote::pull(module_files(), *self.store, newest.checkpoint, directory,
                                                         {.key = self.key, .accept = [&](const Manifest& manifest) {
                                                            return compare_fingerprints(manifest.fingerprint, engine);
                                                          }});
  if (!report && report.error().code == Code::kNotFound && newest.checkpoint.empty()) return std::string();
  if (!report) return report.error();
  if (!newest.answers.empty())
    TORPOR_RETURN_IF_ERROR(remote::pull_answers(module_files(), *self.store, newest.answers, directory));
  return report->path;
}

// Return whether there are any answers.
Result<bool> fetch_answers(RemoteHome& self, const std::string& directory) {
  const remote::OwnerRecord newest = self.ownership.newest();
  if (newest.answers.empty()) return false;
  TORPOR_RETURN_IF_ERROR(remote::pull_answers(module_files(), *self.store, newest.answers, directory));
  return true;
}

}  // namespace

void bind_remote(py::module_& module) {
  py::class_<Sent>(module, "SentCheckpoint", "A checkpoint and answers that were copied to an object store.")
      .def_property_readonly("name", [](const Sent& self) { return self.checkpoint.name; })
      .def_property_readonly("bytes", [](const Sent& self) { return self.checkpoint.bytes; })
      .def_property_readonly("moved_bytes", [](const Sent& self) { return self.checkpoint.moved_bytes; });
  py::class_<RemoteHome>(module, "RemoteHome", "What a server has in an object store, and who may go on with it.",
                         py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&open_home), py::arg("url"), py::arg("term_seconds"), py::arg("key_file") = py::none(),
           py::arg("address") = "")
      .def(
          "take", [](RemoteHome& self) { return within_limit(self, [](auto& ownership) { return ownership.take(); }); },
          "Whether this process owns it now; otherwise another one does, or may. This and the next three end within a "
          "third of the term.")
      .def(
          "renew", [](RemoteHome& self) { within_limit(self, [](auto& ownership) { return ownership.renew(); }); },
          "Goes on owning. Raises Aborted: not any more.")
      .def(
          "release", [](RemoteHome& self) { within_limit(self, [](auto& ownership) { return ownership.release(); }); },
          "The next owner need not wait.")
      .def("owns", [](const RemoteHome& self) { return self.ownership.owns(); })
      .def_readonly("holder", &RemoteHome::holder)
      .def_property_readonly(
          "before", [](const RemoteHome& self) { return self.ownership.before(); },
          "The holder from whom this one took over; empty: none.")
      .def(
          "owner_address",
          [](RemoteHome& self) {
            const remote::OwnerRecord newest = value_or_raise(without_lock([&] {
              self.limit->begin();
              return remote::newest_owner(*self.records);
            }));
            return newest.free || newest.holder == self.holder ? std::string() : newest.address;
          },
          "At which another one that owns serves clients; empty: none does, or it did not say.")
      .def_property_readonly("term", [](const RemoteHome& self) { return self.ownership.newest().term; })
      .def(
          "send",
          [](RemoteHome& self, const std::string& checkpoint, const std::string& answers) {
            return value_or_raise(without_lock([&] { return send(self, checkpoint, answers); }));
          },
          py::arg("checkpoint"), py::arg("answers"), "Copies them there; nobody goes on from them yet.")
      .def(
          "publish",
          [](RemoteHome& self, const Sent& sent) { value_or_raise(without_lock([&] { return publish(self, sent); })); },
          py::arg("sent"), "The next owner goes on from these. Raises Aborted: it is another one already.")
      .def(
          "fetch",
          [](RemoteHome& self, const std::string& directory, const Fingerprint& engine) {
            return value_or_raise(without_lock([&] { return fetch(self, directory, engine); }));
          },
          py::arg("directory"), py::arg("engine"),
          "The newest checkpoint and its answers come into the directory; its path, or empty: there is none. Raises "
          "Incompatible for one that does not fit the engine; nothing has come then.")
      .def(
          "fetch_answers",
          [](RemoteHome& self, const std::string& directory) {
            return value_or_raise(without_lock([&] { return fetch_answers(self, directory); }));
          },
          py::arg("directory"), "The newest answers alone come into the directory. False: there are none.")
      .def(
          "stop_copies", [](RemoteHome& self) { *self.stopped = true; },
          "What is sent or fetched now, or later, raises Aborted soon.");
}

}  // namespace torpor
