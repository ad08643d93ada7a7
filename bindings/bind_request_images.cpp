// SPDX-License-Identifier: Apache-2.0
// RequestImages for Python, with EngineHooks that call a Python object.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bind_errors.h"
#include "bindings/bind_subjects.h"
#include "bindings/bind_values.h"
#include "bindings/checkpoint_options.h"
#include "bindings/module_files.h"
#include "bindings/python_hooks.h"
#include "engine/forks.h"
#include "engine/request_images.h"
#include "engine/stored_images.h"

namespace py = pybind11;

namespace torpor {
namespace {

// The hooks, and the images that refer to them.
struct BoundImages {
  PythonHooks hooks;
  RequestImages images;
  StoredImages stored;

  BoundImages(py::object object, std::string directory, CheckpointManagerOptions options)
      : hooks(std::move(object)),
        images(hooks),
        stored(hooks, images, module_files(), std::move(directory), std::move(options)) {}
  ~BoundImages() {
    const py::gil_scoped_release others_go_on;  // files are closed
    stored.close();
  }
  BoundImages(const BoundImages&) = delete;
  BoundImages& operator=(const BoundImages&) = delete;
};

std::unique_ptr<BoundImages> make_images(py::object hooks, const py::dict& dict) {
  DictReader in(dict, "RequestImages options");
  std::optional<std::string> directory;
  in.read_if_given("directory", directory);
  CheckpointManagerOptions options = checkpoint_options_from(in);
  in.finish();
  value_or_raise(options.validate());
  return std::make_unique<BoundImages>(std::move(hooks), directory.value_or(""), std::move(options));
}

// Entries: `requests`: request id -> number of output tokens. `tokens`: number of tokens that have KV, over all
// requests. `bytes`: over all ranks. `path`: of an image that is on disk alone, else "".
py::dict summary_of(const BoundImages& self, const std::string& id, const RequestImages::Image& image) {
  py::dict requests;
  int64_t tokens = 0;
  for (const RequestImages::Request& request : image.requests) {
    requests[py::str(request.state.id)] = request.state.output_token_ids.size();
    tokens += request.state.num_computed_tokens;
  }
  py::dict out;
  out["id"] = id;
  out["requests"] = requests;
  out["bytes"] = image.bytes;
  out["tokens"] = tokens;
  out["resuming"] = image.resuming;
  out["path"] = self.stored.path_of(id);
  return out;
}

py::list requests_of(const RequestImages::Image& image) {
  py::list requests;
  for (const RequestImages::Request& request : image.requests) requests.append(torpor::to_python(request.state));
  return requests;
}

// Return an image of another engine in the form of describe_checkpoint() and read_checkpoint(). `ended`: positions of
// its requests that have ended.
py::dict described(BoundImages& self, const std::string& path) {
  const StoredImages::Opened opened = value_or_raise(without_lock([&] { return self.stored.open(path); }));
  const Checkpoint& checkpoint = opened.image->checkpoint();
  py::dict out;
  out["name"] = opened.image->name();
  out["path"] = checkpoint.path();
  out["generation"] = checkpoint.manifest().generation;
  const SealId& seal = checkpoint.manifest().id;
  out["id"] = py::bytes(reinterpret_cast<const char*>(seal.data()), seal.size());
  out["ended"] = opened.image->ended();
  const py::dict values = torpor::to_python(opened.state);
  out["fingerprint"] = values["fingerprint"];
  out["state"] = values;
  return out;
}

py::object bytes_or_none(const std::optional<Bytes>& bytes) {
  return bytes ? py::object(torpor::to_python(*bytes)) : py::object(py::none());
}

}  // namespace

void bind_request_images(py::module_& module) {
  py::class_<BoundImages>(module, "RequestImages",
                          "Requests that left a live engine, as values and KV in host memory of each rank.")
      .def(py::init(&make_images), py::arg("hooks"), py::arg("options") = py::dict(),
           "`options`: how images are written to disk, and \"directory\", that of checkpoints.")
      .def(
          "extract",
          [](BoundImages& self, const std::string& id, const py::list& requests,
             const std::vector<std::vector<int32_t>>& tables, int32_t block_tokens) {
            std::vector<RequestState> states;
            for (const py::handle request : requests) states.push_back(request_state_from(request));
            const RequestImages::Image* const image = value_or_raise(
                without_lock([&] { return self.images.extract(id, std::move(states), tables, block_tokens); }));
            return summary_of(self, id, *image);
          },
          py::arg("id"), py::arg("requests"), py::arg("tables"), py::arg("block_tokens"),
          "Copies the KV of requests of an engine that stands still into a new image, verified. Returns its summary.")
      .def(
          "read",
          [](BoundImages& self, const std::string& id, const py::list& requests,
             const std::vector<std::vector<int32_t>>& tables, int32_t block_tokens, const py::dict& checkpoint) {
            std::vector<RequestState> states;
            for (const py::handle request : requests) states.push_back(request_state_from(request));
            RequestImages::StoredBlocks stored;
            DictReader in(checkpoint, "checkpoint");
            py::bytes seal;
            in.read("path", stored.directory);
            in.read("generation", stored.generation);
            in.read("id", seal);
            in.finish();
            const std::string_view given = seal;
            if (given.size() != stored.id.size())
              raise(Error{.code = Code::kInvalidArgument, .what = "that is not the id of a checkpoint"});
            std::copy(given.begin(), given.end(), stored.id.begin());
            const RequestImages::Image* const image =
                value_or_raise(without_lock([&]() -> Result<const RequestImages::Image*> {
                  auto read = self.images.read(id, std::move(states), tables, block_tokens, stored);
                  if (!read) return self.stored.meaning_of(id, std::move(read).error());
                  return read;
                }));
            return summary_of(self, id, *image);
          },
          py::arg("id"), py::arg("requests"), py::arg("tables"), py::arg("block_tokens"), py::arg("checkpoint"),
          "The same of requests of a checkpoint: its path, generation and id, as describe_checkpoint() gives them.")
      .def(
          "verify",
          [](BoundImages& self, const std::string& id) {
            const RequestImages::Image* const image =
                value_or_raise(without_lock([&] { return self.images.verify(id); }));
            return requests_of(*image);
          },
          py::arg("id"), "Has every rank compare the image with its digests. Returns its requests.")
      .def(
          "begin", [](BoundImages& self, const std::string& id) { value_or_raise(self.images.begin(id)); },
          py::arg("id"), "The requests of the image are on their way into the engine.")
      .def(
          "admit_order",
          [](const BoundImages& self, const std::string& request, const std::vector<int32_t>& blocks) {
            return torpor::to_python(value_or_raise(self.images.admit_order(request, blocks)));
          },
          py::arg("request"), py::arg("blocks"),
          "The order to all ranks that brings the KV of a request into its blocks, which are in token order.")
      .def(
          "release",
          [](BoundImages& self, const std::string& request) { return bytes_or_none(self.images.release(request)); },
          py::arg("request"),
          "A request has its KV, or has ended. Returns the order that frees its image if it was the last, or None.")
      .def(
          "store",
          [](BoundImages& self, const std::string& id, const py::dict& fingerprint, const py::handle& outputs) {
            Fingerprint fields = fingerprint_from(fingerprint);
            Value value = value_from(outputs);
            return value_or_raise(
                without_lock([&] { return self.stored.store(id, std::move(fields), std::move(value)); }));
          },
          py::arg("id"), py::arg("fingerprint"), py::arg("outputs"),
          "Writes the image to disk, durable, then frees its host memory. Returns its path.")
      .def(
          "read_back",
          [](BoundImages& self, const std::string& id) {
            return requests_of(*value_or_raise(without_lock([&] { return self.stored.read_back(id); })));
          },
          py::arg("id"), "As verify(); an image on disk is read into host memory, and held. Returns its requests.")
      .def("open", &described, py::arg("path"),
           "Holds an image of another engine. Returns where it lies, its state, and which of its requests have ended.")
      .def(
          "take",
          [](BoundImages& self, const std::string& id) {
            value_or_raise(without_lock([&] { return self.stored.take(id); }));
          },
          py::arg("id"),
          "The image that is held is this engine's alone, and its files go. Raises NotFound if another was first.")
      .def(
          "put_back",
          [](BoundImages& self, const std::string& id) { without_lock([&] { return self.stored.put_back(id), 0; }); },
          py::arg("id"), "Lets go of an image that is held: it is on disk as before.")
      .def(
          "end",
          [](BoundImages& self, const std::string& request) {
            return bytes_or_none(without_lock([&] { return self.stored.release(request); }));
          },
          py::arg("request"), "As release(), of a request that has ended: its image on disk goes with the last one.")
      .def(
          "forget", [](BoundImages& self, const std::string& id) { return self.stored.forget(id); }, py::arg("id"),
          "Another engine has taken the image. Returns its requests, which are no more here.")
      .def("summaries", [](const BoundImages& self) {
        py::list out;
        for (const auto& [id, image] : self.images.images()) out.append(summary_of(self, id, image));
        return out;
      });
  module.def(
      "check_image_name", [](const std::string& name) { value_or_raise(ImageStore::check_name(name)); },
      py::arg("name"), "Raises InvalidArgument if an image on disk cannot have this id.");
  module.def(
      "claim_image",
      [](const std::string& path, const std::optional<std::string>& key_file) {
        value_or_raise(without_lock([&]() -> Status {
          TORPOR_ASSIGN_OR_RETURN(HeldImage held, HeldImage::hold(module_files(), path, key_from(key_file)));
          return held.take();
        }));
      },
      py::arg("path"), py::arg("key_file"),
      "Delete an image on disk, so that no engine takes it any more. Raises NotFound if there is none, or another "
      "engine "
      "has taken it; Busy while another process reads it.");
  module.def(
      "plan_fork",
      [](const py::dict& parent, std::optional<int64_t> at, int64_t children, int64_t free_blocks) {
        ForkedRequest request;
        DictReader in(parent, "parent");
        in.read("prompt_tokens", request.prompt_tokens);
        in.read("output_tokens", request.output_tokens);
        in.read("computed_tokens", request.computed_tokens);
        in.read("blocks", request.blocks);
        in.read("block_tokens", request.block_tokens);
        in.finish();
        const ForkPlan plan = value_or_raise(plan_fork(request, at, children, free_blocks));
        py::dict out;
        out["output_tokens"] = plan.output_tokens;
        out["computed_tokens"] = plan.computed_tokens;
        out["shared_blocks"] = plan.shared_blocks;
        out["own_blocks"] = plan.own_blocks;
        out["copied_block"] = plan.copied_block;
        return out;
      },
      py::arg("parent"), py::arg("at"), py::arg("children"), py::arg("free_blocks"),
      "Returns how many of its parent's blocks each child of a fork shares, and how many it needs besides.");
  module.def(
      "copy_blocks",
      [](py::object hooks, int32_t from, const std::vector<int32_t>& to) {
        PythonHooks own(std::move(hooks));
        return value_or_raise(without_lock([&] { return copy_blocks(own, from, to); }));
      },
      py::arg("hooks"), py::arg("source"), py::arg("targets"),
      "Has every rank copy one KV block into others, within its device. Returns the bytes, of all ranks.");
  module.def(
      "check_portable",
      [](const py::dict& checkpoint, const py::dict& engine) {
        value_or_raise(compare_portable(fingerprint_from(checkpoint), fingerprint_from(engine)));
      },
      py::arg("checkpoint"), py::arg("engine"),
      "Raises Incompatible, naming each field, where requests of a checkpoint cannot go on with their KV in an "
      "engine.");
  module.def(
      "check_same_engine",
      [](const py::dict& checkpoint, const py::dict& engine) {
        value_or_raise(compare_fingerprints(fingerprint_from(checkpoint), fingerprint_from(engine)));
      },
      py::arg("checkpoint"), py::arg("engine"),
      "Raises Incompatible, naming each field, where an engine is another one than a checkpoint's.");
  module.def(
      "admit_error",
      [](const py::bytes& reply) -> std::optional<std::string> {
        const Result<orders::Admit::Reply> decoded = decode_reply<orders::Admit>(bytes_from(reply, "a reply"));
        if (decoded) return std::nullopt;
        return decoded.error().to_string();
      },
      py::arg("reply"), "Why a rank could not admit a request, by its reply to RequestImages.admit_order(); or None.");
}

}  // namespace torpor
