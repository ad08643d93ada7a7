# SPDX-License-Identifier: Apache-2.0
"""Hooks of a user's own around what an engine does: will_call() before it, finished_call() after it.

    class Watch:
        def will_call(self, call): ...
        def finished_call(self, call, error): ...

    torpor.vllm.call_hooks.register(Watch())                      # in the process of the engine
    additional_config={"torpor": {"call_hooks": "module:Watch"}}  # in each process of an engine that has them

They are called in the thread that does it, and in the order in which they were registered. What will_call() returns is
used at the point "admit" alone: False, and the request is not admitted in this step. A hook that raises changes
nothing; the log says so once. Without hooks a call costs one comparison.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torpor.errors import InvalidArgument
from torpor.vllm.options import Options
from torpor.vllm.own_class import made

logger = logging.getLogger("vllm.torpor")

# Of the scheduler's process …
STEP = "step"  # Scheduler.schedule()
ADMIT = "admit"  # a request would be admitted next; asked in each step until it is
MATCH = "match"  # what of a prompt is below the device
ALLOCATE = "allocate"  # a request has its blocks; what was found is loaded
REPORT = "report"  # what the ranks say of their transfers
FINISH = "finish"  # a request has ended
SLEEP, WAKE, CHECKPOINT = "sleep", "wake_up", "checkpoint"
# … and of each rank.
TRANSFER = "transfer"  # the transfers of a step begin
POINTS = (STEP, ADMIT, MATCH, ALLOCATE, REPORT, FINISH, SLEEP, WAKE, CHECKPOINT, TRANSFER)


@dataclass(frozen=True)
class Call:
    """point: one of POINTS. request: the id of the request that it is about, or None."""

    point: str
    request: str | None = None


class CallHooks(Protocol):
    """Both methods, or one of them."""

    def will_call(self, call: Call) -> bool | None: ...

    def finished_call(self, call: Call, error: BaseException | None) -> None: ...


_hooks: list[Any] = []
_named: set[str] = set()  # classes of options that were registered in this process
_said: set[tuple[int, str]] = set()


def register(hooks: CallHooks) -> None:
    """Have this object's methods called from now on. Raises InvalidArgument if it has neither of the two."""
    if not any(callable(getattr(hooks, name, None)) for name in ("will_call", "finished_call")):
        raise InvalidArgument(f"{hooks!r:.64} has no will_call or finished_call", "give it one of them")
    _hooks.append(hooks)


def unregister(hooks: CallHooks) -> None:
    """Nothing, if it is not registered."""
    if hooks in _hooks:
        _hooks.remove(hooks)


def register_named(vllm_config) -> None:
    """Register the class of the option `call_hooks`, once in a process. Raises InvalidArgument, with the cause."""
    name = Options.of(vllm_config).call_hooks
    if name is None or name in _named:
        return
    register(made(name, "call_hooks"))
    _named.add(name)


def around(point: str, request: str | None, function: Callable, *args, **kwargs):
    """Call the function, between the hooks."""
    if not _hooks:
        return function(*args, **kwargs)
    call, error = Call(point, request), None
    _notify("will_call", call)
    try:
        return function(*args, **kwargs)
    except BaseException as raised:
        error = raised
        raise
    finally:
        _notify("finished_call", call, error)


def admits(request: str) -> bool:
    """Return whether no hook keeps this request from being admitted in this step."""
    return not _hooks or not any(answer is False for answer in _notify("will_call", Call(ADMIT, request)))


def _notify(method: str, *args) -> list:
    answers = []
    for hooks in tuple(_hooks):
        function = getattr(hooks, method, None)
        if function is None:
            continue
        try:
            answers.append(function(*args))
        except Exception as raised:
            if (id(hooks), method) not in _said:
                _said.add((id(hooks), method))
                logger.warning("%s.%s() raised %r: it changes nothing", type(hooks).__name__, method, raised)
    return answers
