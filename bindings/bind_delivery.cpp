// SPDX-License-Identifier: Apache-2.0
// DeliveryLog for Python: the answers that a server has delivered.
#include <limits>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bind_subjects.h"
#include "bindings/bind_values.h"
#include "bindings/dict_reader.h"
#include "bindings/module_files.h"
#include "engine/delivery/delivery_log.h"

namespace py = pybind11;

namespace torpor {
namespace {

AnswerState state_from(const std::string& text) {
  for (const AnswerState state :
       {AnswerState::kRunning, AnswerState::kFinished, AnswerState::kAborted, AnswerState::kFailed}) {
    if (name(state) == text) return state;
  }
  DictReader::fail("state", "\"running\", \"finished\", \"aborted\" or \"failed\"");
}

py::dict to_python(const Answer& answer) {
  py::dict out;
  out["request"] = torpor::to_python(answer.request);
  out["response"] = answer.response;
  out["tenant"] = answer.tenant;
  out["choice"] = answer.choice;
  out["front"] = torpor::to_python(answer.front);
  out["text"] = answer.text;
  out["text_ends"] = answer.text_ends;
  out["state"] = std::string(name(answer.state));
  out["finish_reason"] = answer.finish_reason;
  out["stop_reason"] = torpor::to_python(answer.stop_reason);
  out["note"] = torpor::to_python(answer.note);
  out["created"] = answer.created;
  out["ended"] = answer.ended;
  return out;
}

py::dict to_python(const AnswerPart& part) {
  py::dict out;
  out["tokens"] = part.tokens;
  out["text"] = part.text;
  out["tokens_end"] = part.tokens_end;
  out["text_end"] = part.text_end;
  out["state"] = std::string(name(part.state));
  out["finish_reason"] = part.finish_reason;
  out["stop_reason"] = torpor::to_python(part.stop_reason);
  out["call"] = part.call;
  return out;
}

OtherEngine other_engine_from(const std::string& word) {
  if (word == "refuse") return OtherEngine::kRefuse;
  if (word == "take_up") return OtherEngine::kTakeUp;
  if (word == "set_aside") return OtherEngine::kSetAside;
  DictReader::fail("other_engine", "\"refuse\", \"take_up\" or \"set_aside\"");
}

DeliveryLogOptions log_options_from(const py::dict& dict) {
  DictReader in(dict, "DeliveryLog options");
  DeliveryLogOptions options{.clock = &system_clock()};
  std::optional<std::string> directory;
  std::optional<std::string> key_file;
  std::string other_engine = "refuse";
  in.read_if_given("directory", directory);
  in.read_if_given("other_engine", other_engine);
  in.read("engine", options.engine);
  in.read_if_given("keep_seconds", options.keep_seconds);
  in.read_if_given("keep_bytes", options.keep_bytes);
  in.read_if_given("file_bytes", options.file_bytes);
  in.read_if_given("key_file", key_file);
  in.read_if_given("encrypt", options.encrypt);
  in.finish();
  options.directory = directory.value_or("");
  options.key = key_from(key_file);
  options.other_engine = other_engine_from(other_engine);
  return options;
}

std::unique_ptr<DeliveryLog> open_log(const py::dict& dict) {
  DeliveryLogOptions options = log_options_from(dict);
  return value_or_raise(without_lock([&] { return DeliveryLog::open(module_files(), std::move(options)); }));
}

uint64_t count_running(const py::dict& dict) {
  DeliveryLogOptions options = log_options_from(dict);
  return value_or_raise(without_lock([&] { return DeliveryLog::count_running(module_files(), std::move(options)); }));
}

Answer answer_from(const py::dict& dict) {
  DictReader in(dict, "answer");
  Answer answer;
  answer.request = request_state_from(in.take("request"));
  in.read("response", answer.response);
  in.read("tenant", answer.tenant);
  in.read("choice", answer.choice);
  in.read_if_given("call", answer.call);
  answer.front = value_from(in.take("front"));
  in.finish();
  return answer;
}

AnswerStep step_from(const py::handle& item) {
  DictReader in(item, "step");
  AnswerStep step;
  std::string state = "running";
  in.read("id", step.id);
  in.read("at", step.at);
  in.read("tokens", step.tokens);
  in.read("text", step.text);
  in.read_if_given("state", state);
  in.read_if_given("finish_reason", step.finish_reason);
  if (in.has("stop_reason")) step.stop_reason = value_from(in.take("stop_reason"));
  if (in.has("note")) step.note = value_from(in.take("note"));
  in.finish();
  step.state = state_from(state);
  return step;
}

std::vector<AnswerStep> steps_from(const py::list& list) {
  std::vector<AnswerStep> steps;
  for (const py::handle item : list) steps.push_back(step_from(item));
  return steps;
}

// --- reading vLLM's own request objects ------------------------------------------------------------------------------

// An attribute of Python objects. Reading it returns null, without an exception, if an object has none.
class Attribute {
 public:
  explicit Attribute(const char* name) : name_(PyUnicode_InternFromString(name)) {}
  py::object of(PyObject* object) const {
    PyObject* const found = PyObject_GetAttr(object, name_);
    if (found == nullptr) PyErr_Clear();
    return py::reinterpret_steal<py::object>(found);
  }

 private:
  PyObject* name_;  // never freed
};

// Append the code points of a str from `from` to `to` as UTF-8. Return false if one cannot be encoded.
bool append_text(PyObject* text, Py_ssize_t from, Py_ssize_t to, std::string& out) {
  if (PyUnicode_IS_COMPACT_ASCII(text)) {
    out.append(reinterpret_cast<const char*>(PyUnicode_1BYTE_DATA(text)) + from, static_cast<size_t>(to - from));
    return true;
  }
  const auto part = py::reinterpret_steal<py::object>(PyUnicode_Substring(text, from, to));
  Py_ssize_t size = 0;
  const char* const bytes = part ? PyUnicode_AsUTF8AndSize(part.ptr(), &size) : nullptr;
  if (bytes == nullptr) return PyErr_Clear(), false;
  out.append(bytes, static_cast<size_t>(size));
  return true;
}

// Read into `step` what a detokenizer has beyond `ends`. Return false if the detokenizer is of an unknown form.
bool read_new(PyObject* detokenizer, const AnswerEnds& ends, AnswerStep& step) {
  static const Attribute token_ids("token_ids"), output_text("output_text"), stop_buffer_length("stop_buffer_length");
  const py::object tokens = token_ids.of(detokenizer);
  const py::object text = output_text.of(detokenizer);
  const py::object held_back = stop_buffer_length.of(detokenizer);
  if (!tokens || !text || !held_back || !PyList_CheckExact(tokens.ptr()) || !PyUnicode_CheckExact(text.ptr()) ||
      !PyLong_CheckExact(held_back.ptr()))
    return false;
  const Py_ssize_t count = PyList_GET_SIZE(tokens.ptr());
  if (count > ends.tokens) step.tokens.reserve(static_cast<size_t>(count - ends.tokens));
  for (Py_ssize_t i = ends.tokens; i < count; ++i) {
    PyObject* const item = PyList_GET_ITEM(tokens.ptr(), i);
    int overflow = 0;
    const long token = PyLong_CheckExact(item) ? PyLong_AsLongAndOverflow(item, &overflow) : -1;
    if (overflow != 0 || token < 0 || token > std::numeric_limits<int32_t>::max()) return false;
    step.tokens.push_back(static_cast<int32_t>(token));
  }
  const Py_ssize_t to = PyUnicode_GET_LENGTH(text.ptr()) - PyLong_AsSsize_t(held_back.ptr());
  return to <= ends.text || append_text(text.ptr(), ends.text, to, step.text);
}

// Record in one record what one step of an engine gave to `states`. Return whether there was anything. `running`: the
// processor's states that have not ended, by id. `step_of`, which returns a step or None, reads a state that has ended,
// whose id is in `others`, or whose detokenizer is not of the type `plain`.
bool step_states(DeliveryLog& log, const py::list& states, const py::dict& running, const py::set& others,
                 const py::handle& plain, const py::function& step_of) {
  static const Attribute request_id("request_id"), detokenizer("detokenizer");
  const size_t count = states.size();
  std::vector<py::object> names(count);
  std::vector<std::string_view> ids(count);
  for (size_t i = 0; i < count; ++i) {
    names[i] = request_id.of(PyList_GET_ITEM(states.ptr(), static_cast<Py_ssize_t>(i)));
    Py_ssize_t size = 0;
    const char* const bytes =
        names[i] && PyUnicode_Check(names[i].ptr()) ? PyUnicode_AsUTF8AndSize(names[i].ptr(), &size) : nullptr;
    if (bytes == nullptr) DictReader::fail("request_id", "a str");
    ids[i] = {bytes, static_cast<size_t>(size)};
  }
  const std::vector<std::optional<AnswerEnds>> ends = log.running_ends(ids);
  std::vector<AnswerStep> steps;
  steps.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    if (!ends[i]) continue;
    const py::object state = states[i];
    const bool runs = PyDict_GetItemWithError(running.ptr(), names[i].ptr()) == state.ptr() &&
                      (PySet_GET_SIZE(others.ptr()) == 0 || PySet_Contains(others.ptr(), names[i].ptr()) == 0);
    const py::object text = runs ? detokenizer.of(state.ptr()) : py::object();
    if (text && reinterpret_cast<PyObject*>(Py_TYPE(text.ptr())) == plain.ptr()) {
      AnswerStep& step = steps.emplace_back();
      if (read_new(text.ptr(), *ends[i], step)) {
        if (step.tokens.empty() && step.text.empty()) {
          steps.pop_back();
        } else {
          step.id = ids[i];
          step.at = ends[i]->tokens;
        }
        continue;
      }
      steps.pop_back();
    }
    if (const py::object step = step_of(state); !step.is_none()) steps.push_back(step_from(step));
  }
  if (steps.empty()) return false;
  value_or_raise(without_lock([&] { return log.step(std::move(steps)); }));
  return true;
}

}  // namespace

void bind_delivery(py::module_& module) {
  // The other methods only read memory, and DeliveryLog holds no lock over it during a file call.
  py::class_<DeliveryLog>(module, "DeliveryLog",
                          "What each request of a server asked and was given, in memory and in a log.",
                          py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&open_log), py::arg("options"))
      .def_static("count_running", &count_running, py::arg("options"),
                  "How many answers still run that an earlier server left. Nothing is written.")
      .def(
          "start",
          [](DeliveryLog& self, const py::dict& dict) {
            Answer answer = answer_from(dict);
            value_or_raise(without_lock([&] { return self.start(std::move(answer)); }));
          },
          py::arg("answer"))
      .def(
          "step",
          [](DeliveryLog& self, const py::list& list) {
            std::vector<AnswerStep> steps = steps_from(list);
            value_or_raise(without_lock([&] { return self.step(std::move(steps)); }));
          },
          py::arg("steps"), "What one engine step gave, all in one record.")
      .def("step_states", &step_states, py::arg("states"), py::arg("running"), py::arg("others"), py::arg("plain"),
           py::arg("step_of"), "step() of what vLLM's states have beyond their record.")
      .def("sync", [](DeliveryLog& self) { value_or_raise(without_lock([&] { return self.sync(); })); })
      .def(
          "rotate", [](DeliveryLog& self) { value_or_raise(without_lock([&] { return self.rotate(); })); },
          "Begin the log anew. Busy: that is being done already.")
      .def("unwritten", &DeliveryLog::unwritten, "Ids of the answers of which the file lacks records.")
      .def("close", &DeliveryLog::close, "Nothing is recorded from now on.")
      .def(
          "hand_over", [](DeliveryLog& self) { value_or_raise(without_lock([&] { return self.hand_over(); })); },
          "Let another server open the log: sync it, release the lock, and record nothing from then on. WrongState: it "
          "lacks records that could not be written.")
      .def(
          "take_back", [](DeliveryLog& self) { value_or_raise(without_lock([&] { return self.take_back(); })); },
          "Own the log again. Busy: another server has it. WrongState: another server went on with an answer.")
      .def("dropped", &DeliveryLog::dropped, "Ended answers that went for keep_bytes.")
      .def("was_dropped", &DeliveryLog::was_dropped, py::arg("response"), py::arg("tenant"))
      .def("find", &DeliveryLog::find, py::arg("response"), py::arg("tenant"),
           "Ids of the choices of a response, in their order.")
      .def(
          "part",
          [](const DeliveryLog& self, const std::string& id, uint32_t from_token, uint32_t from_text) {
            return to_python(value_or_raise(self.part(id, from_token, from_text)));
          },
          py::arg("id"), py::arg("from_token") = 0, py::arg("from_text") = 0)
      .def(
          "position",
          [](const DeliveryLog& self, const std::string& id) { return to_python(value_or_raise(self.position(id))); },
          py::arg("id"), "As part(), without tokens and text.")
      .def(
          "get",
          [](const DeliveryLog& self, const std::string& id) -> py::object {
            const std::optional<Answer> answer = self.get(id);
            return answer ? py::object(to_python(*answer)) : py::none();
          },
          py::arg("id"))
      .def("all",
           [](const DeliveryLog& self) {
             py::list list;
             for (const Answer& answer : self.all()) list.append(to_python(answer));
             return list;
           })
      .def(
          "pack",
          [](const DeliveryLog& self) {
            return torpor::to_python(without_lock([&] { return pack_answers(self.all()); }));
          },
          "For wake_up(answers=…) in the engine's process.")
      .def("counts", [](const DeliveryLog& self) {
        const DeliveryLog::Counts counts = self.counts();
        return py::dict(py::arg("running") = counts.running, py::arg("ended") = counts.ended,
                        py::arg("log_bytes") = counts.log_bytes, py::arg("lost_bytes") = counts.lost_bytes,
                        py::arg("dropped") = counts.dropped, py::arg("of_another") = counts.of_another,
                        py::arg("set_aside") = counts.set_aside, py::arg("discarded") = counts.discarded,
                        py::arg("problem") = counts.problem);
      });
}

}  // namespace torpor
