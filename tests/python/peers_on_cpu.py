# SPDX-License-Identifier: Apache-2.0
"""vLLM's own offloading connectors on a CPU, in whatever process imports this: `kv_connector_module_path`."""

import offloading_on_cpu
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import SimpleCPUOffloadConnector

offloading_on_cpu.install()
offloading_on_cpu.install_simple()


class Simple(SimpleCPUOffloadConnector):
    """vLLM's, on CPU tensors: its copies are made here."""


class Offloading(OffloadingConnector):
    """vLLM's, too."""


def transfers(name: str, host_bytes: int = 64 << 20) -> dict:
    """Return vLLM's kv_transfer_config for one of them."""
    extra = {"cpu_bytes_to_use": host_bytes} | ({"offload_prompt_only": False} if name == "Offloading" else {})
    return {
        "kv_connector": name,
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
