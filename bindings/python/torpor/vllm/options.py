# SPDX-License-Identifier: Apache-2.0
"""Options of an engine: `additional_config={"torpor": {...}}`, or the environment (TORPOR_CHECKPOINT_DIR …)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torpor.errors import InvalidArgument
from torpor.vllm import connector_options
from torpor.vllm.described import BYTES, PATH, SWITCH, TEXT, WHOLE, described, switch, value_of
from torpor.vllm.near_names import meant


@dataclass(frozen=True)
class Options:
    enabled: bool = described(
        True,
        SWITCH,
        "off: vLLM runs without torpor",
        details="`TORPOR_ENABLED=0` holds for all engines of the process.",
    )
    checkpoint_dir: str | None = described(
        None,
        PATH,
        "directory for checkpoints; without it a sleep to disk fails",
        details=(
            "A server also keeps its response log there. One server at a time uses the directory. For ranks on "
            "several hosts see [elsewhere.md](elsewhere.md#ranks-on-several-hosts)."
        ),
    )
    events_dir: str | None = described(
        None,
        PATH,
        "directory on tmpfs where each process keeps its last events, for torpor events, record and console",
        details=(
            "Only the user may have access to it. Each process keeps its last 262,144 events there (16 MiB). "
            "Without a directory torpor writes no events. See [console.md](console.md)."
        ),
    )
    events_keys: bool = described(
        False,
        SWITCH,
        "events name the KV blocks of each request by their keys, for torpor replay --host-blocks",
        details="See [console.md](console.md).",
    )
    events_blocks: bool = described(
        False,
        SWITCH,
        "events tell each state of each KV block in host memory and on disk: two or three for a block that is stored",
        details="See [console.md](console.md).",
    )
    record_inputs: bool = described(
        False,
        SWITCH,
        "events have the prompts and answers of all requests, for python -m torpor.vllm.replay. They are private",
        details="The log warns of it at the start. See [console.md](console.md#recordings-that-replay).",
    )
    console: str = described(
        "off",
        TEXT,
        "a socket beside the events, for torpor live and torpor.console. read: look only; control: stop the engine as "
        "well. With data parallelism control means read, because a stopped engine would stop the others",
        "off",
        "read",
        "control",
        details=(
            "Whoever may connect to the socket of `control` may stop the engine. See "
            "[console.md](console.md#stopping-an-engine)."
        ),
    )
    call_hooks: str | None = described(
        None,
        TEXT,
        'class of your own, "module:Class", whose will_call() and finished_call() stand around what the engine does',
        details="See [console.md](console.md#hooks-of-your-own).",
    )
    recordings_dir: str | None = described(
        None,
        PATH,
        "directory below which a console may record; without it recordings fail",
        details="`record.start` of a console begins a recording.",
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
        details=(
            "bf16 packs weights and KV blocks of that type. Memory of another type takes what it took before. "
            "[measurements.md](measurements.md#sleep-and-wake-in-host-memory) has the costs. Each copying thread "
            "holds two pieces of staging memory until the wake; with the KV connector it holds them always. A "
            "piece has 4 MiB, or the size of a KV block if that is larger. Each packed piece takes whole pages, "
            "so KV blocks of a few pages gain little. torpor plans what will not fit into `arena_budget_bytes` by "
            "what the last sleep took, and for the first sleep by a factor of 0.77. If the saved memory takes "
            "more, the sleep fails; with `spill_dir` torpor plans again as if nothing became smaller. If all KV "
            "is bf16, `host_bytes` of the KV connector holds 1.3 times the blocks; otherwise as many as without "
            "compression. A block that becomes little smaller needs an overflow slot of its whole size. There is "
            "one for 384 blocks. If all of them are in use, the block is not stored in host memory: "
            "`torpor_offload_*` counts it, and the log says so once."
        ),
    )
    copy_threads: int | None = described(
        None,
        WHOLE,
        "threads that copy saved memory and take its digests, per rank, and as many that read and write files; 1 to "
        "256; none: as many as the machine has cores, at most 8",
        least=1,
        most=256,
        details=(
            "With several ranks on one machine, the number of cores divided by the number of ranks is a good start."
        ),
    )
    spill_dir: str | None = described(
        None,
        PATH,
        "directory for saved memory that does not fit into arena_budget_bytes; a wake empties it; without it such a "
        "sleep fails",
        details=(
            "The sleep writes what the wake needs last to a file there. A wake needs the weights first, then "
            "running requests by their row, then other requests, then cached blocks by their last use. The file "
            "has no name: nothing remains after the wake, or after the end of the process. With `key_file` it is "
            "sealed."
        ),
    )
    retain_kv_bytes: int | None = described(
        None,
        BYTES,
        "most bytes of KV blocks whose copy stays in host memory after a wake, per rank: the next sleep copies only "
        "what has changed since; none: all on a GPU, 0 on a CPU, where it is the same memory",
        details="torpor frees these copies first if saved memory needs the room.",
    )
    arena_prefault_bytes: int | None = described(
        None,
        BYTES,
        "bytes of host memory to prefault in the background, per rank, for a fast first sleep; none: on a GPU what "
        "that sleep will need, while half of the machine's memory is free; 0 on a CPU",
        details=(
            "On a GPU the prefault begins when the engine has warmed up. Without a value it prefaults the bytes "
            "of the weights, and as many again for the KV cache. A thread of the lowest priority touches the "
            "memory, pins it in pieces of 8 MiB, and rests three quarters of the time. It goes on while half of "
            "the machine's memory stays free, and half of what each control group around the process may use. The "
            "first sleep ends it. On a CPU saved memory is of the engine's own kind and is released after each "
            "wake, so all sleeps are alike."
        ),
    )
    retain_checkpoints: int = described(
        2,
        WHOLE,
        "number of checkpoints of this engine to retain in checkpoint_dir",
        details=(
            "torpor always retains the newest checkpoint and the last one that an engine woke from. Until an engine "
            "woke from the newest, it also retains the one before it. One on which an engine sleeps stays. "
            "Checkpoints of another engine (another model, other weights or other settings) stay. `torpor ls` shows "
            "the owner of each, `torpor gc` counts those of each owner separately, `torpor rm` removes one. torpor "
            "neither counts nor removes a checkpoint that it cannot read, and the log names it once."
        ),
    )
    retain_checkpoint_seconds: int | None = described(
        None, WHOLE, "torpor deletes older checkpoints, but for the newest; none: it keeps any age"
    )
    retain_checkpoint_bytes: int | None = described(
        None,
        BYTES,
        "torpor deletes the oldest checkpoints until the rest fits; none: any size",
        details="A file with several links counts once.",
    )
    key_file: str | None = described(
        None,
        PATH,
        "file with a secret of 32 bytes. It authenticates checkpoints, and only such checkpoints wake",
        details=(
            "Only its owner may have access to it. All processes need the same secret. Make one: `(umask 077; "
            "head -c 32 /dev/urandom > FILE)`."
        ),
    )
    encrypt: bool = described(False, SWITCH, "encrypt checkpoints with key_file", details="Sizes stay readable.")
    compression: str | None = described(
        None,
        TEXT,
        "lossless compression of checkpoints. bf16: values of that type take three quarters, nearly as fast as a "
        "copy; zstd; none",
        "none",
        "bf16",
        "zstd",
        details="With bf16 values of other types stay as they are.",
    )
    compression_level: int | None = described(
        None,
        WHOLE,
        "level of zstd, -100 (fast) to 19; given alone, compression is zstd",
        details="Without a value the level is 1.",
    )
    # Without it torpor is vLLM's sleep mode on a GPU, and no more: where enable_sleep_mode is given and
    # additional_config names torpor.
    gpu_preserve_state: bool = described(
        False,
        SWITCH,
        "on a GPU: keep requests over sleeps, and write checkpoints. Turns on vLLM's sleep mode with torpor's memory",
        details=(
            "On a GPU it is the one option that all of torpor needs. One H100 has run it, eager; with CUDA graphs "
            "answers differed ([limits.md](limits.md#gpus)). See [vllm.md](vllm.md#on-a-gpu). On a CPU it changes "
            "nothing."
        ),
    )
    wake_latest: bool = described(
        False,
        SWITCH,
        "wake_up() without arguments, of an engine that has had no request, takes the newest checkpoint in "
        "checkpoint_dir, where there is one; else only from_checkpoint does",
        details="It is for programs that only know vLLM's own call.",
    )
    incremental: bool = described(
        False,
        SWITCH,
        "a checkpoint links memory that the newest one has already, and does not write it again",
        details=(
            "torpor does not read KV blocks and weights that are known not to have changed. Each checkpoint is "
            "whole by itself, so older ones can be removed. Sometimes torpor writes more: the few records of a "
            "large old file that are still in use."
        ),
    )
    sessions: bool = described(
        False,
        SWITCH,
        "requests can leave the running engine and come back: torpor.hibernate() and torpor.resume(). The engine then "
        "has a KV connector of torpor's, which loads nothing else",
        details="See [sessions.md](sessions.md).",
    )
    offload_preempted: bool = described(
        False,
        SWITCH,
        "a request that is preempted for want of KV blocks keeps its KV in host memory, and is not computed again; "
        "needs sessions",
    )
    weights_check: str = described(
        "writes",
        TEXT,
        "when a checkpoint reads the weights again. writes: after a write to them, or one that torpor cannot exclude; "
        "digest: each time",
        "writes",
        "digest",
        details="See [semantics.md](semantics.md#waking).",
    )
    # Of the KV connector (connector_options.py), which is switched on by one named `offload`.
    connector: dict = field(default_factory=dict)

    @staticmethod
    def check_environment(spelled: Mapping[str, str]) -> None:
        """Check the variables in `spelled`, which says what an error calls each. Raises InvalidArgument."""
        for name, variable in _VARIABLES.items():
            if variable in spelled:
                value_of(_DESCRIBED[name], os.environ[variable], spelled[variable])

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
        if options.record_inputs and options.events_dir is None:
            raise InvalidArgument("record_inputs without events_dir", "name a directory for events")
        if options.offload_preempted and not options.sessions:
            raise InvalidArgument("offload_preempted without sessions", "give the option sessions, too")
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
