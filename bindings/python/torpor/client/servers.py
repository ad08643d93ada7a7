# SPDX-License-Identifier: Apache-2.0
"""Which server to ask for an answer, and when to send its request again. No answer is put together from two."""

from __future__ import annotations

import time
from collections.abc import Sequence

NOT_HERE = "it has no such answer"
# A server that may have the answer and does not reply is waited for so long before another one is sent the request.
_PATIENCE_SECONDS = 5.0


class Servers:
    """The first server, and those of `also_at`."""

    def __init__(self, first: str, also_at: Sequence[str], begun: bool):
        """`begun`: the request was sent to the first server before this call."""
        self.base = ""  # the base URL of the one to ask; empty: the first
        self._first = first
        self._also_at = also_at  # its owner may change it meanwhile
        self._may_have_begun = {""} if begun else set[str]()
        self._replies: dict[str, str] = {}  # of each server that was asked since the answer broke off
        self._broke_at = time.monotonic()
        self._only: str | None = None

    @property
    def several(self) -> bool:
        return len(self._all()) > 1

    def sent(self) -> None:
        """The request may have reached the present server."""
        self._may_have_begun.add(self.base)

    def gave(self) -> None:
        """The caller has something of the present server's answer. If another one may have begun an answer, too, that
        is another text: only the present server is asked from now on."""
        if len(self._may_have_begun) > 1:
            self._only = self.base

    def broke(self) -> None:
        """A request or an answer broke off. What servers replied before counts no more."""
        self._replies.clear()
        self._broke_at = time.monotonic()

    def replied(self, what: str) -> None:
        """`what`: NOT_HERE, or why the present server gave no answer when it was asked for it."""
        self._replies[self.base] = what

    def next(self) -> bool:
        """Go on to another server: to one that was not asked since the answer broke off, if there is one. Return
        whether there was."""
        servers = self._all()
        unasked = [each for each in servers if each not in self._replies]
        at = servers.index(self.base) if self.base in servers else -1
        self.base = unasked[0] if unasked else servers[(at + 1) % len(servers)]
        return bool(unasked)

    def may_send_again(self) -> bool:
        """Whether no server has the answer. Then the first one that said so is the present one."""
        servers = self._all()
        if any(each not in self._replies for each in servers):
            return False
        awaited = [each for each in servers if each in self._may_have_begun and self._replies[each] != NOT_HERE]
        if awaited and time.monotonic() - self._broke_at < _PATIENCE_SECONDS:
            return False
        without = [each for each in servers if self._replies[each] == NOT_HERE]
        if without:
            self.base = without[0]
        return bool(without)

    def replies(self) -> str:
        """Return what each server replied, for an error."""
        return "; ".join(f"{base or self._first}: {what}" for base, what in self._replies.items())

    def _all(self) -> list[str]:
        return ["", *self._also_at] if self._only is None else [self._only]
