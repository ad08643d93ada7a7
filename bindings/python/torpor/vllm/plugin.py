# SPDX-License-Identifier: Apache-2.0
"""The entry point `vllm.general_plugins`. vLLM calls register() in every process, before its classes are built.

register() only watches for an engine that asks for torpor (asking.py). For the first one activate() changes vLLM:
torpor.vllm.patches says what, torpor.vllm.compat has a guard for each thing that torpor relies on. If a guard of the
engine does not pass, activate() changes nothing: vLLM runs as if torpor were not there, but for the memory of its sleep
mode on a GPU, if that fits. Guards of single features switch off those features.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from torpor.errors import Error, Unsupported
from torpor.vllm import asking, compat
from torpor.vllm.options import holds_memory_of, switched_off
from torpor.vllm.patching import Patches

__all__ = ["activate", "check", "fits", "holds_memory_of", "inactive", "register", "require"]

logger = logging.getLogger("vllm.torpor")  # vLLM sets up what is below its own name

_NOT_LOADED = "vLLM has not loaded its plugins"
_NOBODY_ASKED = "no engine of this process has asked for it"
_reason: str | None = _NOT_LOADED
_unknown_fields: list[str] = []  # of vLLM, which a checkpoint would lack
_parts: dict[str, str | None] = {}  # each part that was checked besides the engine's: None, or why it is off
_TIERS = {"portable": "hibernate"}  # parts of the manifest whose tier has another name
# What an engine is without where a tier is off.
_MEANING = {"early_wake": "post-copy wakes", "new_process": "checkpoints and new processes"}


def register() -> None:
    """Watches for engines that ask, once a process. Never raises: vLLM calls it without a net and would end."""
    if _reason is _NOT_LOADED:
        _try_step(_NOBODY_ASKED, asking.watch)


def activate() -> bool:
    """Changes vLLM, all or nothing, once a process, for an engine that asks. Returns whether torpor is active."""
    register()
    if _reason is _NOBODY_ASKED:
        _try_step(None, _change_vllm)
    return _reason is None


def _try_step(reason: str | None, step: Callable[[Patches], None]) -> None:
    """Run `step`, all or nothing, and set what inactive() returns: `reason`, or why the step failed. Never raises."""
    global _reason
    try:
        if switched_off():
            _reason = "TORPOR_ENABLED switches it off"
            return
        _all_or_nothing(step)
        _reason = reason
        return
    except Error as problem:
        text = str(problem)
    except Exception as problem:  # whatever an unknown vLLM may do
        text = f"{type(problem).__name__}: {problem}"
    _reason = " ".join(text.split())  # one line
    logger.warning("torpor is inactive in this process, vLLM runs without it: %s", _reason)


@functools.cache
def memory_fits() -> bool:
    """Return whether torpor, which is inactive, can give vLLM's own sleep mode its memory: on a GPU, where it fits."""
    from vllm.platforms import current_platform

    if activate() or switched_off() or not current_platform.is_cuda():
        return False
    fit = _why_not("memory") is None
    if fit:
        logger.warning("torpor gives vLLM's sleep mode its memory, and keeps no requests over a sleep")
    return fit


def inactive() -> str | None:
    """Why torpor changed nothing in this process, or None if it is active."""
    return _reason


def unknown_fields() -> list[str]:
    """Return the fields of this vLLM that a checkpoint would lack. torpor refuses checkpoints if there is one."""
    return _unknown_fields


def tiers() -> dict[str, str | None]:
    """Return None for each tier that is on in this process, or why it is off. Those that not every engine has, as
    "connector" and "server", are included once they were checked: only then what they need of vLLM is imported."""
    unknown = compat.first_of(_unknown_fields) if _unknown_fields else None
    of_engine = {"memory": _reason, "requests": _reason, "early_wake": _reason, "new_process": _reason or unknown}
    return of_engine | {_TIERS.get(part, part): reason for part, reason in _parts.items()}


@functools.cache
def fits(part: str) -> bool:
    """Whether torpor is active and this part of vLLM is as expected; says once in the log if only the part is not."""
    if not activate():
        return False
    if (reason := _why_not(part)) is not None:
        logger.warning("torpor is inactive in vLLM's %s: %s", part, reason)
    return reason is None


def _why_not(part: str) -> str | None:
    """Return why this vLLM does not fit a part, or None if it does."""
    try:
        check(part)
    except Unsupported as problem:
        return str(problem)
    return None


def check(part: str) -> None:
    """Raise Unsupported if this vLLM does not fit a part. tiers() includes the part from then on."""
    import vllm

    try:
        compat.check(vllm.__version__, part)
    except Unsupported as problem:
        _parts[part] = str(problem)
        raise
    _parts[part] = None


def require(*parts: str) -> None:
    """For calls of torpor's own: raises Unsupported, saying why, if torpor is inactive or these parts do not fit."""
    if not activate():
        raise Unsupported(
            f"torpor is inactive: {_reason}", "install the torpor that fits this vLLM, or leave torpor's arguments out"
        )
    for part in parts:
        check(part)


def _change_vllm(made: Patches) -> None:
    import vllm
    from vllm.platforms import current_platform

    parts = tuple(
        part for part, here in (("cpu", current_platform.is_cpu()), ("cuda", current_platform.is_cuda())) if here
    )
    if not parts:
        raise Unsupported(f"the platform is {type(current_platform).__name__}", "torpor works on CPUs and NVIDIA GPUs")
    unknown = compat.check(vllm.__version__, "engine", *parts)
    from torpor.vllm import patches  # it imports what the guards have just looked at

    patches.install(made, parts)
    _unknown_fields.extend(unknown)
    off = {"early_wake": _why_not("early_wake"), "new_process": compat.first_of(unknown) if unknown else None}
    if any(off.values()):
        logger.warning(
            "torpor keeps requests over sleeps of their process. It is without %s",
            "; ".join(f"{_MEANING[tier]}: {reason}" for tier, reason in off.items() if reason),
        )


def _all_or_nothing(step: Callable[[Patches], None]) -> None:
    made = Patches()
    try:
        step(made)
    except BaseException:
        made.undo()
        raise
