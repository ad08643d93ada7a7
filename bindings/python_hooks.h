// SPDX-License-Identifier: Apache-2.0
// EngineHooks that call a Python object. Owner: the binding of the controller. Threads: any, as EngineHooks.
#pragma once

#include <memory>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bind_values.h"
#include "bindings/dict_reader.h"
#include "bindings/interpreter.h"
#include "bindings/object_versions.h"
#include "engine/engine_hooks.h"

namespace torpor {

// Each hook calls the object's method of the same name, with the interpreter's lock.
class PythonHooks final : public EngineHooks {
 public:
  explicit PythonHooks(pybind11::object object) : object_(std::move(object)) {}

  Result<std::vector<std::string>> unsupported() override { return call<std::vector<std::string>>("unsupported"); }
  Result<int64_t> unfinished_requests() override { return call<int64_t>("unfinished_requests"); }
  Status quiesce(std::optional<double> timeout_seconds) override { return call<void>("quiesce", timeout_seconds); }
  Status resume() override { return call<void>("resume"); }
  Result<CapturedState> capture() override {
    TORPOR_ASSIGN_OR_RETURN(const Moment moment, capture_moment());
    return moment.read();
  }
  // The captured values are not shared with the engine, so they can be translated after the engine has gone on.
  Result<Moment> capture_moment() override {
    return guarded<Moment>([&] {
      const std::shared_ptr<pybind11::dict> captured(
          new pybind11::dict(pybind11::dict(object_.attr("capture")()).attr("copy")()), &forget);
      const pybind11::object versions =
          captured->attr("pop")("versions", pybind11::none());  // none: the engine has no versions
      Moment moment{.kv = {.blocks = block_ids_from(*captured)}};
      if (versions.is_none()) {
        moment.kv.versions.resize(moment.kv.blocks.size());
      } else {
        DictReader in(versions, "capture.versions");
        read_versions(in, moment.kv);
      }
      moment.read = [this, captured, versions = moment.kv.versions, steps = moment.kv.steps] {
        return guarded<CapturedState>([&] {
          CapturedState state = captured_state_from(*captured);
          state.kv.complete_free_order();
          state.kv.steps = steps;
          for (size_t i = 0; i < versions.size(); ++i) state.kv.blocks[i].version = versions[i];
          return state;
        });
      };
      return moment;
    });
  }
  Result<KvContents> kv_contents() override {
    return guarded<KvContents>([&] {
      KvContents contents;
      if (!pybind11::hasattr(object_, "kv_contents")) return contents;
      DictReader in(object_.attr("kv_contents")(), "kv_contents");
      in.read("blocks", contents.blocks);
      read_versions(in, contents);
      return contents;
    });
  }
  Result<std::vector<int32_t>> host_slots(const std::vector<int32_t>& blocks, bool keep) override {
    return guarded<std::vector<int32_t>>([&]() -> std::vector<int32_t> {
      if (!pybind11::hasattr(object_, "host_slots")) return {};
      return object_.attr("host_slots")(blocks, keep).cast<std::vector<int32_t>>();
    });
  }
  Status release_host_slots() override {
    return guarded<void>([&] {
      if (pybind11::hasattr(object_, "release_host_slots")) object_.attr("release_host_slots")();
    });
  }
  Result<Fingerprint> fingerprint() override {
    return guarded<Fingerprint>([&] { return fingerprint_from(object_.attr("fingerprint")()); });
  }
  Status drop_requests(const std::string& mode) override { return call<void>("drop_requests", mode); }
  Status drop_prefix(const std::vector<int32_t>& blocks) override { return call<void>("drop_prefix", blocks); }
  Status retire_prefix() override { return call<void>("retire_prefix"); }
  Status release_derived() override { return call<void>("release_derived"); }
  Status rebuild_derived() override { return call<void>("rebuild_derived"); }
  Status reconnect(const std::vector<WorkerSnapshot>& workers) override {
    return guarded<void>([&] { object_.attr("reconnect")(to_python(workers)); });
  }
  Result<std::vector<FailedRequest>> restore(const EngineCheckpoint& checkpoint) override {
    return guarded<std::vector<FailedRequest>>([&] {
      std::vector<FailedRequest> failed;
      for (const pybind11::handle item : pybind11::list(object_.attr("restore")(to_python(checkpoint)))) {
        failed.push_back({item["id"].cast<std::string>(), item["error"].cast<std::string>()});
      }
      return failed;
    });
  }
  Status forget_restored() override { return call<void>("forget_restored"); }
  HoldsBack holds_back() override {
    const Result<bool> can = guarded<bool>(
        [&] { return pybind11::hasattr(object_, "holds_back") && object_.attr("holds_back")().cast<bool>(); });
    return can && *can ? HoldsBack::kCached : HoldsBack::kNothing;
  }
  Status hold_blocks(const std::vector<int32_t>& blocks) override { return call<void>("hold_blocks", blocks); }
  Result<std::vector<std::string>> release_blocks(const ArrivedBlocks& blocks) override {
    return call<std::vector<std::string>>("release_blocks", blocks.arrived, blocks.lost, blocks.skipped,
                                          blocks.unproven);
  }
  Result<std::vector<Bytes>> call_ranks(const Bytes& order) override {
    return guarded<std::vector<Bytes>>([&] {
      std::vector<Bytes> replies;
      for (const pybind11::handle reply : pybind11::list(object_.attr("call_ranks")(to_python(order))))
        replies.push_back(bytes_from(reply, "the reply of a rank"));
      return replies;
    });
  }

 private:
  // Run `function` with the interpreter's lock. Anything that Python raises, also KeyboardInterrupt, is an error of the
  // hook, so that the controller undoes its steps.
  template <class T, class Function>
  Result<T> guarded(const Function& function) {
    return try_catch([&]() -> Result<T> {
      if (interpreter_ends()) {
        return Error{.code = Code::kUnavailable,
                     .what = "Python's interpreter is ending",
                     .next_step = "wake the last checkpoint in a new process",
                     .origin = Origin::kEngine};
      }
      const pybind11::gil_scoped_acquire lock;
      try {
        if constexpr (std::is_void_v<T>) {
          function();
          return {};
        } else {
          return function();
        }
      } catch (pybind11::error_already_set& raised) {
        return error_from(raised);
      } catch (const std::bad_alloc&) {
        throw;
      } catch (const std::exception& problem) {  // a value of another type than promised
        return Error{.code = Code::kInternal,
                     .what = fmt::format("the engine's adapter: {}", problem.what()),
                     .origin = Origin::kEngine};
      }
    });
  }
  template <class T, class... Arguments>
  Result<T> call(const char* method, const Arguments&... arguments) {
    return guarded<T>([&] {
      const pybind11::object result = object_.attr(method)(arguments...);
      if constexpr (!std::is_void_v<T>) return result.template cast<T>();
    });
  }

  // Fill the versions of `contents.blocks`.
  void read_versions(DictReader& in, KvContents& contents) {
    pybind11::list objects;
    in.read("steps", contents.steps);
    in.read("objects", objects);
    in.finish();
    contents.versions = versions_.give(objects, contents.blocks);
  }
  // Free captured values. Threads: any.
  static void forget(pybind11::dict* values) noexcept {
    if (interpreter_ends()) return;  // the interpreter frees them
    const pybind11::gil_scoped_acquire lock;
    delete values;
  }

  pybind11::object object_;
  ObjectVersions versions_;
};

}  // namespace torpor
