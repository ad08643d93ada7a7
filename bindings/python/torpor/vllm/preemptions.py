# SPDX-License-Identifier: Apache-2.0
"""Requests that vLLM preempts for want of KV blocks keep their KV in host memory: the option `offload_preempted`.

vLLM frees the blocks of such a request and computes its tokens again. Here its KV becomes an image (sessions.py) just
before, and TorporAdmit (portable.py) brings it back when the scheduler finds blocks for the request.
"""

from __future__ import annotations

import logging
import uuid

from vllm.v1.request import Request

from torpor.errors import Error
from torpor.vllm import scheduler_values as values
from torpor.vllm.sessions import Sessions, tokens_with_kv, unsupported

logger = logging.getLogger("vllm.torpor")


class Preemptions:
    """The preempted requests of one EngineSide. The scheduler calls it within a step, while no other is under way."""

    def __init__(self, hooks, sessions: Sessions):
        self._hooks, self._sessions = hooks, sessions
        self._images: dict[str, str] = {}  # of each request that was preempted: its image
        self._logged = ""  # the last problem in the log
        self.offloaded = 0  # preempted requests whose KV went to host memory
        self.recomputed = 0  # preempted requests that vLLM computes again

    def offload(self, request: Request) -> int:
        """Copy the KV of a request that is about to be preempted. Return the number of its tokens that have KV in the
        copy; 0: there is no copy, and the log says why."""
        images, admissions = self._sessions.begun()
        self.images()  # forget those that have their KV again
        computed = tokens_with_kv(request)
        if computed == 0 or request.request_id in admissions.requests or self._is_bound(request):
            self.recomputed += 1
            return 0
        image, block_tokens = f"preempted-{uuid.uuid4().hex}", self._hooks.scheduler.block_size
        (blocks,) = self._hooks.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        state = values.request_to_value(request) | {"num_computed_tokens": computed}
        try:
            images.extract(image, [state], [list(blocks[: -(-computed // block_tokens)])], block_tokens)
            images.begin(image)
        except Error as problem:
            self._log_change(f"a preempted request is computed again: {problem}")
            self.recomputed += 1
            return 0
        self._images[request.request_id] = image
        self.offloaded += 1
        return computed

    def _is_bound(self, request: Request) -> bool:
        found = unsupported(request)
        if found:
            self._log_change(f"a preempted request is computed again: it has {', '.join(found)}")
        return bool(found)

    def _log_change(self, what: str) -> None:
        if what != self._logged:
            self._logged = what
            logger.warning("torpor: %s", what)

    def expect(self, request: Request, computed: int) -> None:
        """Have TorporAdmit bring the KV back. vLLM has preempted the request; `computed`: as offload() returned it."""
        _, admissions = self._sessions.begun()
        admissions.expect_again(request, computed)

    def images(self) -> set[str]:
        """Return the images of preempted requests that do not have their KV again."""
        known = {each["id"] for each in self._sessions.summaries()}
        self._images = {request: image for request, image in self._images.items() if image in known}
        return set(self._images.values())

    def give_up(self, requests: list[str] | None = None) -> None:
        """Have vLLM compute preempted requests again that have no blocks yet: these ones, or all (None).

        Their images do not go where the requests are about to go.
        """
        images, admissions = self._sessions.begun()
        self.images()
        for request_id in list(self._images) if requests is None else requests:
            if request_id not in self._images or not admissions.expects(request_id):
                continue
            del self._images[request_id]
            admissions.withdraw(request_id)
            self._hooks.scheduler.requests[request_id].update_block_hashes()
            self.recomputed += 1
            if (drop := images.release(request_id)) is not None:
                self._hooks.call_ranks(drop)

    def counts(self) -> dict[str, int]:
        return {"offloaded": self.offloaded, "recomputed": self.recomputed}
