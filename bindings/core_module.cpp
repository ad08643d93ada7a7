// torpor._core: the C++ library for Python.
#include <pybind11/pybind11.h>

#include "bindings/bind_subjects.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "torpor's C++ core: memory of a rank, the sleep controller, checkpoints.";
  module.attr("__version__") = TORPOR_VERSION;
  torpor::bind_rank_memory(module);
  torpor::bind_controller(module);
  torpor::bind_checkpoint(module);
}
