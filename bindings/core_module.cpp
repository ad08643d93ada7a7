// SPDX-License-Identifier: Apache-2.0
// torpor._core: the C++ library for Python.
#include <pybind11/pybind11.h>

#include "base/digest.h"
#include "bindings/bind_values.h"

#include "bindings/bind_subjects.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "torpor's C++ core: memory of a rank, the sleep controller, checkpoints.";
  module.attr("__version__") = TORPOR_VERSION;
  module.def(
      "digest",
      [](const pybind11::bytes& bytes) {
        const torpor::Bytes content = torpor::bytes_from(bytes, "digest_of()");
        return torpor::digest_of(std::as_bytes(std::span(content))).hex();
      },
      pybind11::arg("bytes"), "XXH3-128 of `bytes`, in hexadecimal.");
  torpor::bind_rank_memory(module);
  torpor::bind_controller(module);
  torpor::bind_request_images(module);
  torpor::bind_checkpoint(module);
  torpor::bind_checkpoint_set(module);
  torpor::bind_delivery(module);
  torpor::bind_connector(module);
  torpor::bind_connector_worker(module);
  torpor::bind_block_tier(module);
  torpor::bind_memory(module);
  torpor::bind_owner(module);
  torpor::bind_events(module);
#ifdef TORPOR_HAS_REMOTE
  torpor::bind_remote(module);
#endif
}
