"""The entry point `vllm.general_plugins`. vLLM calls register() in every process, before its classes are built.

What torpor changes in vLLM is in torpor.vllm.patches; torpor.vllm.compat has a guard for each thing that it relies on.
All guards pass or nothing is changed at all: beside a vLLM that torpor does not know, vLLM runs as if torpor were not
there.
"""

from __future__ import annotations

import functools
import logging

from torpor.errors import Error, Unsupported
from torpor.vllm import compat
from torpor.vllm.options import holds_memory_of, switched_off
from torpor.vllm.patching import Patches

__all__ = ["fits", "holds_memory_of", "inactive", "register", "require"]

logger = logging.getLogger("vllm.torpor")  # vLLM sets up what is below its own name

_NOT_ASKED = "vLLM has not loaded its plugins"
_reason: str | None = _NOT_ASKED


def register() -> None:
    """Changes vLLM, all or nothing, once a process. Never raises: vLLM calls it without a net and would end."""
    global _reason
    if _reason is not _NOT_ASKED:
        return
    try:
        if switched_off():
            _reason = "TORPOR_ENABLED switches it off"
            return
        _activate()
        _reason = None
    except Error as problem:
        _reason = str(problem)
    except Exception as problem:  # whatever an unknown vLLM may do
        _reason = f"{type(problem).__name__}: {problem}"
    if _reason is not None:
        _reason = " ".join(_reason.split())  # one line
        logger.warning("torpor is inactive in this process, vLLM runs without it: %s", _reason)


def inactive() -> str | None:
    """Why torpor changed nothing in this process, or None if it is active."""
    return _reason


@functools.cache
def fits(part: str) -> bool:
    """Whether torpor is active and this part of vLLM is as expected; says once in the log if only the part is not."""
    register()
    if _reason is not None:
        return False
    try:
        require(part)
    except Unsupported as problem:
        logger.warning("torpor is inactive in vLLM's %s: %s", part, problem)
        return False
    return True


def require(*parts: str) -> None:
    """For calls of torpor's own: raises Unsupported, saying why, if torpor is inactive or these parts do not fit."""
    register()
    if _reason is not None:
        raise Unsupported(
            f"torpor is inactive: {_reason}", "install the torpor that fits this vLLM, or leave torpor's arguments out"
        )
    import vllm

    compat.check(vllm.__version__, *parts)


def _activate() -> None:
    import vllm
    from vllm.platforms import current_platform

    parts = tuple(
        part for part, here in (("cpu", current_platform.is_cpu()), ("cuda", current_platform.is_cuda())) if here
    )
    if not parts:
        raise Unsupported(f"the platform is {type(current_platform).__name__}", "torpor works on CPUs and NVIDIA GPUs")
    compat.check(vllm.__version__, "engine", *parts)
    from torpor.vllm import patches  # it imports what the guards have just looked at

    made = Patches()
    try:
        patches.install(made, parts)
    except BaseException:
        made.undo()
        raise
