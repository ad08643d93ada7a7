# SPDX-License-Identifier: Apache-2.0
"""What torpor's options change in the configuration of an engine, as vLLM's own options would.

vLLM finishes its configuration in every process that copies it, so all of this can be done twice.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from torpor.errors import InvalidArgument, Unsupported
from torpor.vllm import connector_options, scheduler, sleep_backend, variables, worker
from torpor.vllm.options import VARIABLES, Options, holds_memory_of


def finish(vllm_config) -> None:
    """Called with each VllmConfig that asks for torpor, after vLLM has decided all else."""
    options = Options.of(vllm_config)
    if not options.enabled:
        return
    variables.refuse_misspelt(VARIABLES)  # at the start alone: a program may set others while its engine sleeps
    refuse_rust_front_end()
    sleep_backend.choose(vllm_config, options)
    _choose_connector(vllm_config, options)
    _register_members(vllm_config.kv_transfer_config)
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
    vllm_config.kv_transfer_config = KVTransferConfig(**_of_torpor(wanted), kv_load_failure_policy="recompute")


def _choose_admitting(vllm_config, options: Options) -> None:
    """The option sessions gives the engine the connector by which requests come back (portable.py): alone, or before
    the engine's own connectors, as the first one inside vLLM's MultiConnector."""
    from vllm.config import KVTransferConfig

    given = vllm_config.kv_transfer_config
    if given is not None and connector_options.admits(given):
        return  # it was here before
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1 and not parallel.data_parallel_external_lb:
        # An engine core of a model without experts does not know that there are others.
        raise Unsupported(
            "sessions: data parallelism", "leave the option sessions out, or use an external load balancer"
        )
    members = [] if given is None or given.kv_connector is None else _members(given)
    if options.connector and options.connector["offload"] != "off":
        if any(each["kv_connector"] != connector_options.CLASS for each in members):
            name = given.kv_connector
            raise InvalidArgument(f"torpor's option offload beside the KV connector {name}", "use one of them")
        members = members or [_of_torpor(options.connector)]
    admitting = {
        "kv_connector": connector_options.ADMIT_CLASS,
        "kv_connector_module_path": connector_options.ADMIT_MODULE,
        # A consumer would delay each free of a block by a step. The ranks wait for the device before they load.
        "kv_role": "kv_producer",
    }
    if not members:
        vllm_config.kv_transfer_config = KVTransferConfig(**admitting, kv_load_failure_policy="recompute")
        return
    beside = {} if given is None else _fields(given, "engine_id", "kv_buffer_device", "kv_port")
    vllm_config.kv_transfer_config = KVTransferConfig(**beside | {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both" if given is None else given.kv_role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [admitting, *members]},
    })  # fmt: skip


def _register_members(given) -> None:
    """Register connectors inside vLLM's MultiConnector that name their module. By that module vLLM makes them, but it
    rebuilds statistics of members by the registry alone, and the front end ends where one is not there."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for each in () if given is None else connector_options.inside(given):
        if module := each.get("kv_connector_module_path"):
            with suppress(ValueError):  # it is registered
                KVConnectorFactory.register_connector(each["kv_connector"], module, each["kv_connector"])


def _of_torpor(wanted: dict) -> dict:
    """torpor's own KV connector, as a member of MultiConnector."""
    return {
        "kv_connector": connector_options.CLASS,
        "kv_connector_module_path": connector_options.MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(wanted),
    }


def _members(given) -> list[dict]:
    """Return the connectors of vLLM's KVTransferConfig, each as MultiConnector takes it."""
    if given.kv_connector == "MultiConnector":
        return [dict(each) for each in given.kv_connector_extra_config.get("connectors", ())]
    names = {each.name for each in fields(given)} - {"engine_id"}  # MultiConnector gives its own to each
    return [_fields(given, *names)]


def _fields(given, *names: str) -> dict:
    return {name: getattr(given, name) for name in names}
