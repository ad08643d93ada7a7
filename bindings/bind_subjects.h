// SPDX-License-Identifier: Apache-2.0
// One function for each subject of the module torpor._core. core_module.cpp calls them.
#pragma once

#include <pybind11/pybind11.h>

namespace torpor {

void bind_rank_memory(pybind11::module_& module);
void bind_controller(pybind11::module_& module);
void bind_request_images(pybind11::module_& module);
void bind_checkpoint(pybind11::module_& module);
void bind_checkpoint_set(pybind11::module_& module);
void bind_delivery(pybind11::module_& module);
void bind_block_tier(pybind11::module_& module);
void bind_connector(pybind11::module_& module);
void bind_connector_worker(pybind11::module_& module);
void bind_remote(pybind11::module_& module);
void bind_events(pybind11::module_& module);
void bind_memory(pybind11::module_& module);
void bind_owner(pybind11::module_& module);

}  // namespace torpor
