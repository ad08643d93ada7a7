# SPDX-License-Identifier: Apache-2.0
"""`updating_weights()`: new weights are loaded into an engine that stands still, and its label of them follows."""

from __future__ import annotations

import uuid

from torpor.errors import InvalidArgument, WrongState
from torpor.vllm import connector_sleep, step_outputs

# Methods of vLLM's workers that write no weights, or say so themselves. Of any other it is not known.
_WRITE_NO_WEIGHTS = frozenset({
    "check_health", "compute_weight_checksums", "finish_weight_update", "get_model_inspection", "get_supported_tasks",
    "list_loras", "profile", "release_late_interaction_query_cache", "reload_weights", "synchronize_device",
    "update_max_model_len", "update_weights",
})  # fmt: skip

# These of them write weights: they say so to the rank's memory, but not to the engine core.
_WRITE_AND_SAY_SO = frozenset({"finish_weight_update", "reload_weights", "update_weights"})

_WAIT_UNNAMED = ("weights", "kv_cache")  # each wake that names tags brings back all other tags too

STALE_KV = ("recompute", "keep", "abort")

UPDATING_WEIGHTS = """`with llm.updating_weights(version="17"): …` (`async with` of an AsyncLLM):
    new weights are loaded inside.

    By any way: the model's load_weights(), reload_weights(), or copies into the parameters. At the end they count as
    written, seen or not.

    version: vLLM's label of them from then on; it stands with the tokens that they draw, and in checkpoints. None
        leaves the label.

    The engine must be stopped, after sleep() with any level, or be without requests; the weights must be awake. Raises
    WrongState if not. If the block raises, the label stays, and no request runs before a block has ended well.
    """


def kv_option(kv: str | None, weights_changed: bool) -> str | None:
    """What becomes of KV of other weights. `weights_changed=True` is an older way to say "recompute"."""
    if kv is not None and kv not in STALE_KV:
        raise InvalidArgument(f"kv is {kv!r}", f"use one of {', '.join(STALE_KV)}, or leave it out")
    if weights_changed and kv not in (None, "recompute"):
        raise InvalidArgument(
            f'weights_changed=True means kv="recompute", and kv is {kv!r}', "leave weights_changed out"
        )
    return "recompute" if weights_changed else kv


UNDER_WAY, FAILED = "an update of the weights is under way", "an update of the weights has failed"


class _Update:
    def __init__(self, call, engine, version: str | None):
        if version is not None and not isinstance(version, str):
            raise InvalidArgument(f"the version {version!r} is no string", f"use {str(version)!r}")
        self._call = call
        self._engine = engine
        self._version = version
        self._id = uuid.uuid4().hex

    def _begun(self):
        return self._call(self._engine, "begin_weight_update", {"update": self._id})

    def _ended(self, outcome: str):
        options = {"update": self._id, "outcome": outcome, "version": self._version}
        return self._call(self._engine, "end_weight_update", options)


class Updating(_Update):
    """Of LLM and LLMEngine."""

    def __enter__(self) -> None:
        try:
            self._begun()
        except BaseException:
            self._ended("not begun")  # it was interrupted, and the engine core may have begun
            raise
        step_outputs.of(self._engine).weight_update = UNDER_WAY

    def __exit__(self, kind, *_) -> None:
        step_outputs.of(self._engine).weight_update = FAILED  # also if the engine core cannot end it well
        self._ended("done" if kind is None else "failed")
        if kind is None:
            step_outputs.of(self._engine).weight_update = None


class UpdatingAwaited(_Update):
    """Of AsyncLLM."""

    async def __aenter__(self) -> None:
        try:
            await self._begun()
        except BaseException:
            await self._ended("not begun")  # of several engines some may have
            raise

    async def __aexit__(self, kind, *_) -> None:
        await self._ended("done" if kind is None else "failed")


class Updates:
    """What an engine core knows of them."""

    def __init__(self, side):
        self._side = side
        self._open: str | None = None  # why no request may run
        self._open_before: str | None = None  # the same, before the last begin()
        self._begun: str | None = None  # the update that is under way

    def _set(self, why: str | None) -> None:
        self._open = why
        self._side.hooks.scheduler.torpor_updates_weights = why is not None

    def begin(self, options: dict) -> None:
        if self._begun is not None:
            raise WrongState(UNDER_WAY, "end it first")
        state, core = self._side.controller.state(), self._side.hooks.core
        # Those that came since an update that failed have not begun.
        if state["engine"] == "awake" and core.scheduler.requests and self._open is None:
            raise WrongState("requests run on these weights", "call sleep(level=0), or a deeper one, first")
        if (weights := state["tags"].get("weights", "attached")) != "attached":
            raise WrongState(f"the weights are {weights}", 'call wake_up(tags=["weights"]) first')
        self._open_before, self._begun = self._open, options["update"]
        self._set(UNDER_WAY)
        self._retire_prefix()  # already: a sleep or checkpoint before end() would keep it as one of the new weights

    def end(self, options: dict) -> None:
        """End the update that begin() was called for. Does nothing if that was refused."""
        if options["update"] != self._begun:
            return
        self._begun = None
        if options["outcome"] == "not begun":
            self._set(self._open_before)
            return
        self._set(FAILED)  # unless what follows goes well
        if options["outcome"] == "failed":
            return
        core = self._side.hooks.core
        core.collective_rpc("torpor_mark_dirty", args=("weights",))
        advance_weights_epoch(core)
        self._retire_prefix()
        if options["version"] is not None:
            core.set_weight_version(options["version"])
        self._set(None)

    def _retire_prefix(self) -> None:
        """Let no request find what is cached. A sleeping engine leaves that to the wake: it still has its requests."""
        if not self._side.controller.is_sleeping():
            self._side.hooks.retire_prefix()

    def check_none(self) -> None:
        """Raise WrongState while an update of the weights is open."""
        if self._open is not None:
            raise WrongState(self._open, "end it, or load them in updating_weights() first")

    def check_wake(self, options: dict) -> None:
        """Before a wake after which requests would run."""
        if self._open is None:
            return
        states = self._side.controller.state()["tags"]
        asleep = {tag for tag in _WAIT_UNNAMED if states.get(tag, "attached") != "attached"}
        tags = options.get("tags")
        if tags and not asleep <= set(tags):
            return
        next_step = "load them in updating_weights() first"
        if "weights" in asleep:
            again = "" if "kv_cache" in asleep else 'sleep(tags=["kv_cache"], preserve_state=True), then '
            next_step = f'call {again}wake_up(tags=["weights"]), and load them in updating_weights()'
        raise WrongState(self._open, next_step)


def note_weights_maybe_written(core, method) -> None:
    """Note that `method` of the workers was called, with or without success, and may have written weights. The next
    order tells the workers so."""
    if isinstance(method, str) and (method.startswith("torpor_") or method in _WRITE_NO_WEIGHTS):
        if method in _WRITE_AND_SAY_SO:
            advance_weights_epoch(core)
            invalidate_adapters(core)
            connector_sleep.notice_new_weights(core)
        return
    invalidate_adapters(core)
    advance_weights_epoch(core)
    core.torpor_weights_maybe_written = True
    if (side := connector_sleep.side_of(getattr(core, "scheduler", None))) is not None:
        side.weights_maybe_written = True
    connector_sleep.notice_new_weights(core)


def invalidate_adapters(core) -> None:
    """Note that the content of LoRA adapters may be another one in the workers."""
    if (side := connector_sleep.side_of(getattr(core, "scheduler", None))) is not None:
        side.invalidate_adapters()


def advance_weights_epoch(core) -> None:
    """Begin another epoch of the weights, which may have been written: stored KV may be that of other weights."""
    core.torpor_weights_epochs = getattr(core, "torpor_weights_epochs", 0) + 1


def take_weights_maybe_written(core) -> bool:
    """Return whether the weights may have been written since the last call."""
    maybe_written = getattr(core, "torpor_weights_maybe_written", False)
    core.torpor_weights_maybe_written = False
    return maybe_written
