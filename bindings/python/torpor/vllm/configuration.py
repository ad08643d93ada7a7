# SPDX-License-Identifier: Apache-2.0
"""What torpor's options change in the configuration of an engine, as vLLM's own options would.

vLLM finishes its configuration in every process that copies it, so all of this can be done twice.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torpor.errors import InvalidArgument, Unsupported
from torpor.vllm import connector_options, scheduler, sleep_backend, worker
from torpor.vllm.options import Options, holds_memory_of


def finish(vllm_config) -> None:
    """Called with each VllmConfig that asks for torpor, after vLLM has decided all else."""
    options = Options.of(vllm_config)
    if not options.enabled:
        return
    refuse_rust_front_end()
    sleep_backend.choose(vllm_config, options)
    _choose_connector(vllm_config, options)
    if holds_memory_of(vllm_config):
        scheduler.choose(vllm_config)
        worker.choose(vllm_config)
    else:
        sleep_backend.choose_worker(vllm_config)


def refuse_rust_front_end() -> None:
    """`vllm serve` starts vLLM's Rust front end if this variable says so. It loads no Python routes."""
    serves = Path(sys.argv[0]).name in ("vllm", "main.py") and sys.argv[1:2] == ["serve"]
    if serves and os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise Unsupported("torpor behind vLLM's Rust front end", "unset VLLM_USE_RUST_FRONTEND")


def _choose_connector(vllm_config, options: Options) -> None:
    """torpor's options switch its KV connector on, as vLLM's kv_offloading_size does with others."""
    from vllm.config import KVTransferConfig

    if options.sessions:
        _choose_admitting(vllm_config, options)
        return
    wanted = options.connector
    if not wanted or wanted["offload"] == "off":
        return
    given = vllm_config.kv_transfer_config
    if given is not None and given.kv_connector is not None:
        if connector_options.is_ours(given):
            return  # it was here before
        raise InvalidArgument(
            f"torpor's option offload beside the KV connector {given.kv_connector}", "use one of them"
        )
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector=connector_options.CLASS,
        kv_connector_module_path=connector_options.MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=dict(wanted),
    )


def _choose_admitting(vllm_config, options: Options) -> None:
    """The option sessions gives the engine the connector by which requests come back (portable.py)."""
    from vllm.config import KVTransferConfig

    given = vllm_config.kv_transfer_config
    if given is not None and given.kv_connector == connector_options.ADMIT_CLASS:
        return  # it was here before
    offloads = options.connector and options.connector["offload"] != "off"
    if offloads or (given is not None and given.kv_connector is not None):
        name = connector_options.CLASS if offloads or given is None else given.kv_connector
        raise InvalidArgument(f"torpor's option sessions beside the KV connector {name}", "use one of them")
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector=connector_options.ADMIT_CLASS,
        kv_connector_module_path=connector_options.ADMIT_MODULE,
        # A consumer would delay each free of a block by a step. The ranks wait for the device before they load.
        kv_role="kv_producer",
        kv_load_failure_policy="recompute",
    )
