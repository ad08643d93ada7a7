# SPDX-License-Identifier: Apache-2.0
"""Classes that options of an engine name: a policy, and hooks around calls. A test says what they answer."""

import threading
from typing import ClassVar


class Own:
    """A policy. `mode` is how it answers: keep, none, first, wrong, raise, late."""

    mode: ClassVar[dict] = {"store": "keep", "load": "keep"}
    asked: ClassVar[list] = []
    released = threading.Event()

    def store(self, batch):
        return self.answer("store", batch)

    def load(self, batch):
        return self.answer("load", batch)

    def answer(self, question, batch):
        size, mode = len(batch.keys), self.mode[question]
        self.asked.append([question, batch.request, size, sorted({len(key) for key in batch.keys}), batch.groups])
        if mode == "late":
            self.released.wait()
        if mode == "raise":
            raise RuntimeError("no answer today")
        if mode == "wrong":
            return [1] * size
        return {"none": [False] * size, "first": [True] + [False] * (size - 1)}.get(mode, [True] * size)


class Neither:
    """Not a policy, and no hooks."""


class Broken:
    def __init__(self):
        raise OSError("no table of chats")


class Watch:
    """Hooks: they note calls, and keep the request that `held` names from being admitted."""

    calls: ClassVar[list] = []
    held = ""
    raises = False

    def will_call(self, call):
        self.calls.append(["will", call.point, call.request])
        if self.raises:
            raise RuntimeError("a hook")
        return not (call.point == "admit" and self.held and call.request.startswith(self.held))

    def finished_call(self, call, error):
        self.calls.append(["finished", call.point, call.request, None if error is None else type(error).__name__])
