# SPDX-License-Identifier: Apache-2.0
"""A policy of a user's own for the KV connector: which blocks are stored, and which found ones are loaded.

The option `policy` names a class, "module:Class". It has one or both of these methods:

    class Chats:
        def store(self, batch): return [True for key in batch.keys]
        def load(self, batch): return [True for key in batch.keys]

The engine waits for the answer, at most policy_timeout_ms. A class that is late, raises or answers with something else
is bypassed: its blocks are stored and loaded as without it, the case is counted, and the log says so once.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torpor.errors import InvalidArgument
from torpor.vllm.own_class import made

logger = logging.getLogger("vllm.torpor")

_METHODS = ("store", "load")  # by the number of the question (kvcache/block_policy.h)


@dataclass(frozen=True)
class Batch:
    """Blocks that are decided on together.

    request: the id of the request whose blocks they are; None: they belong to several, as with offload="lazy".
    keys: the block's hash, as vLLM and its KV cache events have it; a chain in the order of the prompt, where the
        blocks are one request's.
    groups: the KV cache group of each block; all 0 for a model with one group.
    """

    request: str | None
    keys: list[bytes]
    groups: list[int]


class _Call:
    """One question. All of a user's code runs in run(), which may take any time."""

    def __init__(self, method: Callable, batch: Batch):
        self._method, self._batch = method, batch
        self.ended = threading.Event()
        self.kept: bytes | None = None
        self.why, self.what = "raised", ""  # where there is no answer

    def run(self) -> None:
        name, size = f"{getattr(self._method, '__name__', 'it')}()", len(self._batch.keys)
        try:
            answer = self._method(self._batch)
            if not isinstance(answer, Iterable):
                self.why, self.what = "wrong", f"{name} answered {answer!r:.64}, not a list"
            else:
                kept = list(itertools.islice(answer, size + 1))
                if len(kept) != size:
                    self.why, self.what = "wrong", f"{name} did not answer {size} values, one for each key"
                elif others := [each for each in kept if not isinstance(each, bool)]:
                    self.why, self.what = "wrong", f"{name} answered {others[0]!r:.64} for a key, not True or False"
                else:
                    self.kept = bytes(kept)
        except BaseException as raised:  # whatever a user's code raises is no reason to end this thread
            self.what = f"{name} raised {''.join(traceback.format_exception_only(raised)).strip()}"
        self.ended.set()


class Policy:
    """The user's class in a thread of its own, so that the engine can go on without its answer."""

    def __init__(self, name: str, timeout_seconds: float):
        """Raises InvalidArgument, with the cause, for a class that cannot be made or has neither method."""
        self.name = name
        self.hash_bytes = 0  # of vLLM's hashes, once one is known
        self.counts = dict.fromkeys(("answered", "late", "busy", "wrong", "raised"), 0)
        self._timeout = timeout_seconds
        self._methods = _methods_of(name)
        self._said: set[str] = set()
        self._last: _Call | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        weakref.finalize(self, self._calls.put, None)
        # A daemon: a method that never returns must not keep the process.
        threading.Thread(target=_serve, args=(self._calls,), name="torpor-policy", daemon=True).start()

    def ask(self, question: int, request: str, keys: list[bytes], groups: list[int]) -> bytes | None:
        """Return a byte for each key, 1 for those that are kept. None: there is no answer, and all are kept."""
        method = self._methods.get(_METHODS[question])
        if method is None:
            return None
        if self._last is not None and not self._last.ended.is_set():
            self._bypassed("busy", "a call of it that came too late has not returned")
            return None
        if self.hash_bytes:
            keys = [key[: self.hash_bytes] for key in keys]
        self._last = call = _Call(method, Batch(request or None, keys, groups))
        self._calls.put(call)
        if not call.ended.wait(self._timeout):
            self._bypassed("late", f"{_METHODS[question]}() took more than {self._timeout:g} s")
            return None
        if call.kept is None:
            self._bypassed(call.why, call.what)
            return None
        self.counts["answered"] += 1
        return call.kept

    def _bypassed(self, why: str, what: str) -> None:
        self.counts[why] += 1
        if why not in self._said:
            self._said.add(why)
            logger.warning(
                "the policy %s is bypassed: %s. Blocks are stored and loaded as without it; further cases are counted "
                "in torpor_offload_policy_total",
                self.name,
                what,
            )


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    """Run calls until the Policy is gone."""
    while (call := calls.get()) is not None:
        call.run()
        del call


def _methods_of(name: str) -> dict[str, Callable]:
    policy = made(name, "policy")
    methods = {each: getattr(policy, each) for each in _METHODS if callable(getattr(policy, each, None))}
    if not methods:
        raise InvalidArgument(f"the policy {name} has no method store or load", "give it one of them")
    return methods
