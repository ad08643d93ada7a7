// What a server has delivered, for Python.
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

std::unique_ptr<DeliveryLog> open_log(const py::dict& dict) {
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
  return value_or_raise(without_lock([&] { return DeliveryLog::open(module_files(), std::move(options)); }));
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

std::vector<AnswerStep> steps_from(const py::list& list) {
  std::vector<AnswerStep> steps;
  for (const py::handle item : list) {
    DictReader in(item, "step");
    AnswerStep& step = steps.emplace_back();
    std::string state = "running";
    in.read("id", step.id);
    in.read("at", step.at);
    in.read("tokens", step.tokens);
    in.read("text", step.text);
    in.read_if_given("state", state);
    in.read_if_given("finish_reason", step.finish_reason);
    if (in.has("stop_reason")) step.stop_reason = value_from(in.take("stop_reason"));
    in.finish();
    step.state = state_from(state);
  }
  return steps;
}

}  // namespace

void bind_delivery(py::module_& module) {
  // The other methods only look into memory, over which DeliveryLog holds no lock while it calls a file.
  py::class_<DeliveryLog>(module, "DeliveryLog",
                          "What each request of a server asked and was given, in memory and in a log.",
                          py::release_gil_before_calling_cpp_dtor())
      .def(py::init(&open_log), py::arg("options"))
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
      .def("sync", [](DeliveryLog& self) { value_or_raise(without_lock([&] { return self.sync(); })); })
      .def("close", &DeliveryLog::close, "Nothing is recorded from now on.")
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
                        py::arg("of_another") = counts.of_another, py::arg("set_aside") = counts.set_aside,
                        py::arg("problem") = counts.problem);
      });
}

}  // namespace torpor
