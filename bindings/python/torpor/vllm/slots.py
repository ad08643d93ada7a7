"""The requests of vLLM's scheduler as slots, told as events: what `torpor events`, `record` and `console` show.

Looked at after each Scheduler.schedule(), from its output. What only decodes is not looked at: a step in which nothing
else happens costs a few comparisons, however many requests there are. Without the option events_directory: one.
"""

from __future__ import annotations

import logging
import time

from vllm.v1.request import RequestStatus

from torpor import _core
from torpor.errors import Error
from torpor.vllm.options import Options

_LOOK_AT_ALL_EVERY = 64  # steps

logger = logging.getLogger("vllm.torpor")


def begin_events(vllm_config, role: str, rank: int = 0) -> bool:
    """Whether this process tells events. A directory that is of no use is said once, and the engine serves on."""
    if (directory := Options.of(vllm_config).events_directory) is None:
        return False
    try:
        _core.begin_events(directory, role, rank)
    except Error as problem:
        logger.warning("torpor tells no events: %s", problem)
        return False
    return True


class Slots:
    """Of one scheduler."""

    def __init__(self):
        self._slots = _core.Slots()
        self._numbers: dict[str, int] = {}
        self._watched: set[str] = set()  # what may be something else than decoding in the next step
        self._onboarding: set[str] = set()
        self._steps = 0

    @staticmethod
    def of(scheduler) -> Slots | None:
        """None: nobody listens."""
        found = scheduler.torpor_slots
        if found is None:
            found = scheduler.torpor_slots = Slots() if begin_events(scheduler.vllm_config, "core") else False
        return found or None

    def step(self, scheduler, output, began: int) -> None:
        """After schedule() gave `output`; it was called at `began`, of time.perf_counter_ns()."""
        numbers, requests = self._numbers, scheduler.requests
        scheduled = output.num_scheduled_tokens
        for request_id in output.finished_req_ids:
            self._finish(request_id)
        if len(numbers) != len(requests):
            self._find_others(requests)
        for request_id in output.preempted_req_ids or ():
            if (number := numbers.get(request_id)) is not None:
                self._slots.preempt(number)
                self._watched.add(request_id)
        self._look(requests, scheduled)
        if len(scheduler.running) != len(scheduled):
            for request in scheduler.running:
                if request.request_id not in scheduled and request.request_id in numbers:
                    self._slots.skip(numbers[request.request_id])
                    self._watched.add(request.request_id)
        if scheduler.connector is not None:
            self._look_at_loads(requests)
        pool = scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        running = len(scheduler.running)
        self._slots.step(
            running, len(requests) - running, output.total_num_scheduled_tokens, time.perf_counter_ns() - began,
            pool.num_gpu_blocks - free, free,
        )  # fmt: skip

    def _look(self, requests, scheduled: dict[str, int]) -> None:
        self._steps += 1
        looked_at = scheduled if self._steps % _LOOK_AT_ALL_EVERY == 0 else self._watched & scheduled.keys()
        for request_id in list(looked_at):
            request, count = requests.get(request_id), scheduled[request_id]
            if request is None or request_id not in self._numbers:
                continue
            before = request.num_computed_tokens - count
            self._slots.scheduled(self._numbers[request_id], before, count, request.num_tokens)
            self._onboarding.discard(request_id)
            if request.num_tokens - before <= 1:
                self._watched.discard(request_id)

    def _find_others(self, requests) -> None:
        for request_id, request in requests.items():
            if request_id not in self._numbers:
                self._numbers[request_id] = self._slots.create(request_id, max(request.num_tokens, 1))
                self._watched.add(request_id)
        for request_id in [known for known in self._numbers if known not in requests]:
            self._finish(request_id)

    def _look_at_loads(self, requests) -> None:
        for request_id in self._watched:
            request = requests.get(request_id)
            if request is None or request_id in self._onboarding:
                continue
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._onboarding.add(request_id)
                self._slots.onboard(self._numbers[request_id], 1)

    def _finish(self, request_id: str) -> None:
        if (number := self._numbers.pop(request_id, None)) is not None:
            self._slots.finish(number)
        self._watched.discard(request_id)
        self._onboarding.discard(request_id)
