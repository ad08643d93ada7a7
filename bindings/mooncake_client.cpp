// SPDX-License-Identifier: Apache-2.0
#include "bindings/mooncake_client.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <fmt/core.h>

#include "base/log.h"
#include "bindings/bind_errors.h"
#include "bindings/interpreter.h"

namespace py = pybind11;

namespace torpor {
namespace {

using remote::MooncakeAnswers;
using remote::MooncakeValue;

constexpr const char* kGlue = "torpor.vllm.mooncake";

// Call Python. An exception is an error; after the interpreter's end nothing is called.
template <class T, class Function>
Result<T> in_python(const Function& function) {
  return try_catch([&]() -> Result<T> {
    if (interpreter_ends()) return Error{.code = Code::kUnavailable, .what = "Python's interpreter is ending"};
    const py::gil_scoped_acquire lock;
    try {
      return function();
    } catch (py::error_already_set& raised) {
      return error_from(raised);
    } catch (const py::cast_error& problem) {
      return Error{.code = Code::kUnavailable,
                   .what = fmt::format("Mooncake's client answers with something else: {}", problem.what()),
                   .next_step = "check the version of Mooncake"};
    }
  });
}

class PythonMooncake final : public remote::MooncakeClient {
 public:
  explicit PythonMooncake(py::object object) : object_(std::move(object)) {}
  ~PythonMooncake() override {
    if (interpreter_ends()) {
      object_.release();
      return;
    }
    const py::gil_scoped_acquire lock;
    for (const uintptr_t each : used_) {
      try {
        object_.attr("unregister_buffer")(each);
      } catch (py::error_already_set& raised) {
        log().warn("KV connector: {}", error_from(raised));
      }
    }
    object_ = {};
  }

  Status use(std::span<std::byte> memory) override {
    const auto at = reinterpret_cast<uintptr_t>(memory.data());
    TORPOR_ASSIGN_OR_RETURN(const int64_t answer, in_python<int64_t>([&]() -> Result<int64_t> {
                              const auto code = object_.attr("register_buffer")(at, memory.size()).cast<int64_t>();
                              if (code == 0) used_.push_back(at);
                              return code;
                            }));
    if (answer == 0) return ok();
    return Error{.code = Code::kUnavailable,
                 .what = fmt::format("Mooncake does not register memory of {} bytes: {}", memory.size(), answer),
                 .next_step = "check the protocol and the devices in the URL"};
  }
  MooncakeAnswers put(std::span<const MooncakeValue> values) override { return move("batch_put_from", values); }
  MooncakeAnswers get(std::span<const MooncakeValue> values) override { return move("batch_get_into", values); }
  MooncakeAnswers exist(std::span<const MooncakeValue> values) override {
    return call([&] { return object_.attr("batch_is_exist")(keys_of(values)); });
  }
  MooncakeAnswers remove(std::span<const MooncakeValue> values, bool force) override {
    return call([&] { return object_.attr("batch_remove")(keys_of(values), force); });
  }

 private:
  static py::list keys_of(std::span<const MooncakeValue> values) {
    py::list keys;
    for (const MooncakeValue& value : values) keys.append(value.key);
    return keys;
  }
  MooncakeAnswers move(const char* method, std::span<const MooncakeValue> values) {
    return call([&] {
      py::list at;
      py::list sizes;
      for (const MooncakeValue& value : values) {
        at.append(reinterpret_cast<uintptr_t>(value.bytes.data()));
        sizes.append(value.bytes.size());
      }
      return object_.attr(method)(keys_of(values), at, sizes);
    });
  }
  template <class Function>
  static MooncakeAnswers call(const Function& function) {
    return in_python<std::vector<int64_t>>([&]() -> MooncakeAnswers {
      const py::object answers = function();
      return answers.cast<std::vector<int64_t>>();
    });
  }

  py::object object_;
  std::vector<uintptr_t> used_;  // under the interpreter's lock
};

}  // namespace

Status mooncake_is_installed() {
  const Result<bool> there = in_python<bool>([]() -> Result<bool> {
    py::module_::import(kGlue).attr("store_class")();
    return true;
  });
  return there ? ok() : Status(there.error());
}

Result<std::shared_ptr<remote::MooncakeClient>> connect_mooncake(const remote::MooncakeSettings& settings) {
  using Client = std::shared_ptr<remote::MooncakeClient>;
  return in_python<Client>([&]() -> Result<Client> {
    const py::object made = py::module_::import(kGlue).attr("connect")(
        settings.host, settings.port, settings.local, settings.metadata, settings.segment, settings.buffer,
        settings.protocol, settings.devices);
    return std::make_shared<PythonMooncake>(made);
  });
}

}  // namespace torpor
