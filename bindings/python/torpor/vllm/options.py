"""What a user may set: `additional_config={"torpor": {...}}` of the engine, or the environment (TORPOR_DIR …)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields

from torpor.errors import InvalidArgument
from torpor.vllm import connector_options
from torpor.vllm.paths import expanded

# Options that name a file or directory.
_PATHS = {"dir", "key_file", "spill_directory", "events_directory", "record_directory"}


@dataclass(frozen=True)
class Options:
    enabled: bool = True
    # Tmpfs directory where each process keeps its last events, for `torpor events`, `record` and `console`; none: none.
    events_directory: str | None = None
    # They name each request's blocks by their keys, for `torpor replay --host-blocks`: an event a block of a prompt.
    events_keys: bool = False
    # A socket beside them for `torpor live` and torpor.console: "read" to look, "control" to stop the engine as well.
    # With data parallelism it is "read": an engine that stands still would hold up the others.
    console: str = "off"
    # Directory below which a console may begin recordings (record.start); without it they are refused.
    record_directory: str | None = None
    # Directory for checkpoints; without it, sleeping to disk is refused.
    dir: str | None = None
    # "packed": linear weights as oneDNN wants them, as in stock vLLM, and packed again on wake. Keeps the plain weights
    # too, to have something to save: costs their size in memory. "plain": never packed; less memory, slower steps.
    cpu_linear: str = "packed"
    # Bytes of cached KV blocks without a request to keep over a sleep, per rank; None: all.
    kv_budget_bytes: int | None = None
    # Most host memory for saved bytes, per rank; 0: no limit.
    arena_budget_bytes: int = 0
    # Of saved bytes in host memory, and of the KV connector's blocks there: "bf16" (weights and KV of that type take
    # three quarters, others as much as without), "none". Sleeps, wakes and loads are slower.
    host_compression: str | None = None
    # Directory for what of a sleep has no room in arena_budget_bytes; without it such a sleep fails.
    # Nothing stays there after the wake.
    spill_directory: str | None = None
    # Most bytes of KV whose copy stays in host memory after a wake, per rank: the next sleep copies only what
    # changed since. They are the first to go where room is needed. None: what there is; on the CPU 0, where host
    # memory is the same memory.
    retain_kv_bytes: int | None = None
    # Host memory for saved bytes that is brought up in the background when the engine starts, per rank: the first sleep
    # is then as fast as later ones. None: on a GPU what that sleep will need, quietly, while half of the machine's
    # memory is free; on the CPU 0, where later sleeps bring it up again, too.
    arena_prefault_bytes: int | None = None
    # Committed checkpoints to keep: how many, how old (seconds), how large together (bytes); None: any age, any size.
    keep_checkpoints: int = 2
    max_age_seconds: int | None = None
    max_total_bytes: int | None = None
    # File with a secret key (32 bytes): checkpoints are authenticated with it, and only such are woken.
    key_file: str | None = None
    # With that key they are made unreadable as well.
    encrypt: bool = False
    # Of saved memory on disk: "bf16" (weights and KV of that type to three quarters, nearly as fast as a copy), "zstd",
    # "none". The level is that of zstd, -100 (fast) to 19, and alone means zstd.
    compression: str | None = None
    compression_level: int | None = None
    # On a GPU: preserve_state and checkpoints too; it switches vLLM's sleep mode on, with torpor's memory. Proved on
    # CPU tensors only: no GPU has run it yet. Without it torpor is vLLM's sleep mode there, and no more: where
    # enable_sleep_mode is given and additional_config names torpor.
    gpu_preserve_state: bool = False
    # Memory that the newest checkpoint has already is linked, not written again; nor read, where known to be unchanged.
    incremental: bool = False
    # "writes": a checkpoint reads weights once, and then only after they were seen to be written, or may have been.
    # "digest": it reads them each time.
    weights_check: str = "writes"
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
        values = {
            f.name: _parse(f.name, os.environ[f"TORPOR_{f.name.upper()}"])
            for f in fields(Options)
            if f"TORPOR_{f.name.upper()}" in VARIABLES & os.environ.keys()
        }
        values |= given
        connector = {name: values.pop(name) for name in connector_options.NAMES if name in values}
        known = {f.name for f in fields(Options)} - {"connector"}
        if unknown := sorted(set(values) - known):
            raise InvalidArgument(
                f"unknown torpor option {', '.join(unknown)}",
                f"the options are {', '.join(sorted({*known, *connector_options.NAMES}))}",
            )
        if connector and "offload" not in connector:
            raise InvalidArgument(f"{', '.join(connector)} without offload", 'set offload to "eager" or "lazy"')
        for name in _PATHS & values.keys():
            values[name] = expanded(values[name])
        options = Options(**values, connector=connector)
        if options.cpu_linear not in ("packed", "plain"):
            raise InvalidArgument(f"cpu_linear is {options.cpu_linear!r}", 'use "packed" or "plain"')
        if options.console not in ("off", "read", "control"):
            raise InvalidArgument(f"console is {options.console!r}", 'use "off", "read" or "control"')
        if options.console != "off" and options.events_directory is None:
            raise InvalidArgument("console without events_directory", "name a directory for events")
        if options.host_compression not in (None, "none", "bf16"):
            raise InvalidArgument(f"host_compression is {options.host_compression!r}", 'use "bf16" or "none"')
        if options.weights_check not in ("writes", "digest"):
            raise InvalidArgument(f"weights_check is {options.weights_check!r}", 'use "writes" or "digest"')
        return options


# Of the environment: each option of Options, for all engines.
VARIABLES = frozenset(f"TORPOR_{f.name.upper()}" for f in fields(Options) if f.name != "connector")


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


def asks_for_torpor(vllm_config) -> bool:
    """Whether an engine's own configuration names torpor, be it with no option."""
    return "torpor" in (vllm_config.additional_config or {})


def has_torpor_backend(vllm_config) -> bool:
    """Whether vLLM's own sleep mode is on and asks for torpor's memory, on a GPU."""
    model = vllm_config.model_config
    return model is not None and model.enable_sleep_mode and model.sleep_mode_backend == "torpor"


def switched_off() -> bool:
    """By TORPOR_ENABLED in the environment: for every engine of this process."""
    return "TORPOR_ENABLED" in os.environ and not _parse("enabled", os.environ["TORPOR_ENABLED"])


def switch(name: str, text: str, default: bool) -> bool:
    """What an environment variable says that switches something on or off; an empty one says nothing."""
    if (word := text.lower()) in ("1", "true", "on", "yes"):
        return True
    if word in ("0", "false", "off", "no"):
        return False
    if not word:
        return default
    raise InvalidArgument(f"{name} is {text!r}", "use 1 or 0")


def _parse(name: str, text: str):
    texts = (
        "dir",
        "cpu_linear",
        "key_file",
        "spill_directory",
        "events_directory",
        "console",
        "record_directory",
        "weights_check",
        "compression",
        "host_compression",
    )
    if name in texts:
        return text
    if name in ("enabled", "encrypt", "incremental", "gpu_preserve_state", "events_keys"):
        return switch(f"TORPOR_{name.upper()}", text, getattr(Options, name))
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"TORPOR_{name.upper()} is {text!r}", "use a whole number") from None
