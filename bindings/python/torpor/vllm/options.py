# SPDX-License-Identifier: Apache-2.0
"""Options of an engine: `additional_config={"torpor": {...}}`, or the environment (TORPOR_CHECKPOINT_DIR …)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

from torpor.errors import InvalidArgument
from torpor.vllm import connector_options
from torpor.vllm.described import BYTES, PATH, SWITCH, TEXT, WHOLE, described, switch, value_of
from torpor.vllm.near_names import meant


@dataclass(frozen=True)
class Options:
    enabled: bool = described(True, SWITCH, "off: vLLM runs without torpor")
    checkpoint_dir: str | None = described(None, PATH, "directory for checkpoints; without it a sleep to disk fails")
    events_dir: str | None = described(
        None, PATH, "directory on tmpfs where each process keeps its last events, for torpor events, record and console"
    )
    events_keys: bool = described(
        False, SWITCH, "events name the KV blocks of each request by their keys, for torpor replay --host-blocks"
    )
    console: str = described(
        "off",
        TEXT,
        "a socket beside the events, for torpor live and torpor.console. read: look only; control: stop the engine as "
        "well. With data parallelism control means read, because a stopped engine would stop the others",
        "off",
        "read",
        "control",
    )
    recordings_dir: str | None = described(
        None, PATH, "directory below which a console may record; without it recordings fail"
    )
    cpu_linear: str = described(
        "packed",
        TEXT,
        "linear weights on the CPU. packed: as vLLM packs them, with the plain ones beside them to save; plain: half "
        "of that memory, slower steps",
        "packed",
        "plain",
    )
    kv_budget_bytes: int | None = described(
        None, BYTES, "most bytes of cached KV blocks without a request that a sleep saves, per rank; none: all"
    )
    arena_budget_bytes: int = described(0, BYTES, "most bytes of host memory for saved memory, per rank; 0: no limit")
    host_compression: str | None = described(
        None,
        TEXT,
        "lossless compression of saved memory in host memory, and of the KV connector's blocks there. bf16: values of "
        "that type take three quarters; sleeps, wakes and loads are slower",
        "none",
        "bf16",
    )
    copy_threads: int | None = described(
        None,
        WHOLE,
        "threads that copy saved memory and take its digests, per rank, and as many that read and write files; 1 to "
        "256; none: as many as the machine has cores, at most 8",
        least=1,
        most=256,
    )
    spill_dir: str | None = described(
        None,
        PATH,
        "directory for saved memory that does not fit into arena_budget_bytes; a wake empties it; without it such a "
        "sleep fails",
    )
    retain_kv_bytes: int | None = described(
        None,
        BYTES,
        "most bytes of KV blocks whose copy stays in host memory after a wake, per rank: the next sleep copies only "
        "what has changed since; none: all on a GPU, 0 on a CPU, where it is the same memory",
    )
    arena_prefault_bytes: int | None = described(
        None,
        BYTES,
        "bytes of host memory to prefault in the background, per rank, for a fast first sleep; none: on a GPU what "
        "that sleep will need, while half of the machine's memory is free; 0 on a CPU",
    )
    retain_checkpoints: int = described(2, WHOLE, "number of checkpoints of this engine to retain in checkpoint_dir")
    retain_checkpoint_seconds: int | None = described(
        None, WHOLE, "torpor deletes older checkpoints, but for the newest; none: it keeps any age"
    )
    retain_checkpoint_bytes: int | None = described(
        None, BYTES, "torpor deletes the oldest checkpoints until the rest fits; none: any size"
    )
    key_file: str | None = described(
        None, PATH, "file with a secret of 32 bytes. It authenticates checkpoints, and only such checkpoints wake"
    )
    encrypt: bool = described(False, SWITCH, "encrypt checkpoints with key_file")
    compression: str | None = described(
        None,
        TEXT,
        "lossless compression of checkpoints. bf16: values of that type take three quarters, nearly as fast as a "
        "copy; zstd; none",
        "none",
        "bf16",
        "zstd",
    )
    compression_level: int | None = described(
        None, WHOLE, "level of zstd, -100 (fast) to 19; given alone, compression is zstd"
    )
    # Proved on CPU tensors only: no GPU has run it yet. Without it torpor is vLLM's sleep mode there, and no more:
    # where enable_sleep_mode is given and additional_config names torpor.
    gpu_preserve_state: bool = described(
        False,
        SWITCH,
        "on a GPU: keep requests over sleeps, and write checkpoints. Turns on vLLM's sleep mode with torpor's memory",
    )
    wake_latest: bool = described(
        False,
        SWITCH,
        "wake_up() without arguments, of an engine that has had no request, takes the newest checkpoint in "
        "checkpoint_dir, where there is one; else only from_checkpoint does",
    )
    incremental: bool = described(
        False, SWITCH, "a checkpoint links memory that the newest one has already, and does not write it again"
    )
    sessions: bool = described(
        False,
        SWITCH,
        "requests can leave the running engine and come back: torpor.hibernate() and torpor.resume(). The engine then "
        "has a KV connector of torpor's, which loads nothing else",
    )
    weights_check: str = described(
        "writes",
        TEXT,
        "when a checkpoint reads the weights again. writes: after a write to them, or one that torpor cannot exclude; "
        "digest: each time",
        "writes",
        "digest",
    )
    # Of the KV connector (connector_options.py), which is switched on by one named `offload`.
    connector: dict = field(default_factory=dict)

    @staticmethod
    def of(vllm_config) -> Options:
        given = (
            (vllm_config.additional_config or {}).get("torpor", {})
            if isinstance(vllm_config.additional_config, dict)
            else {}
        )
        if not isinstance(given, dict):
            raise InvalidArgument(f"additional_config['torpor'] is {given!r}", "give a dict of options")
        values: dict[str, Any] = {
            name: os.environ[variable] for name, variable in _VARIABLES.items() if variable in os.environ
        }
        spelled = {name: _VARIABLES[name] for name in values}
        values |= given
        connector = {name: values.pop(name) for name in connector_options.NAMES if name in values}
        if unknown := sorted(set(values) - _DESCRIBED.keys()):
            known = sorted({*_DESCRIBED, *connector_options.NAMES})
            raise InvalidArgument(
                f"unknown torpor option {', '.join(map(str, unknown))}",
                f"{meant(str(unknown[0]), known)}The options are {', '.join(known)}",
            )
        if connector and "offload" not in connector:
            raise InvalidArgument(f"{', '.join(connector)} without offload", 'set offload to "eager" or "lazy"')
        for name, item in values.items():
            values[name] = value_of(_DESCRIBED[name], item, name if name in given else spelled[name])
        options = Options(**values, connector=connector)
        if options.console != "off" and options.events_dir is None:
            raise InvalidArgument("console without events_dir", "name a directory for events")
        return options


_DESCRIBED = {f.name: f for f in fields(Options) if f.metadata}
# The environment variable of each option: it is for all engines.
_VARIABLES = {name: f"TORPOR_{name.upper()}" for name in _DESCRIBED}
VARIABLES = frozenset(_VARIABLES.values())


def holds_memory_of(vllm_config) -> bool:
    """Whether torpor's controller holds the memory of an engine with this configuration, which vLLM has finished."""
    return _holds(vllm_config, _scheduler_of(vllm_config)) and (not _is_on_gpu() or has_torpor_backend(vllm_config))


def holds_memory_by(args) -> bool:
    """The same of an engine that vLLM has not made yet, by the arguments of its server."""
    backend = getattr(args, "sleep_mode_backend", "cumem")  # an argument since vLLM 0.33
    return _holds(args, getattr(args, "scheduler_cls", None)) and (not _is_on_gpu() or backend in ("cumem", "torpor"))


def _holds(engine, scheduler_cls) -> bool:
    from vllm.platforms import current_platform

    from torpor.vllm.asking import asks

    options = Options.of(engine)
    if not (asks(engine) and options.enabled):
        return False
    if not (current_platform.is_cpu() or (_is_on_gpu() and options.gpu_preserve_state)):
        return False
    if scheduler_cls is None:
        return True
    from torpor.vllm import scheduler  # it imports vLLM's

    return not scheduler.is_foreign(scheduler_cls)


def _is_on_gpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cuda()


def _scheduler_of(vllm_config):
    scheduling = getattr(vllm_config, "scheduler_config", None)
    return getattr(scheduling, "scheduler_cls", None)


def names_torpor(vllm_config) -> bool:
    """Whether an engine's own configuration names torpor, be it with no option."""
    return "torpor" in (vllm_config.additional_config or {})


def has_torpor_backend(vllm_config) -> bool:
    """Whether vLLM's own sleep mode is on and asks for torpor's memory, on a GPU."""
    model = vllm_config.model_config
    return model is not None and model.enable_sleep_mode and model.sleep_mode_backend == "torpor"


def switched_off() -> bool:
    """By TORPOR_ENABLED in the environment: for every engine of this process."""
    return "TORPOR_ENABLED" in os.environ and not switch("TORPOR_ENABLED", os.environ["TORPOR_ENABLED"], True)
