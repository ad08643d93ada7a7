# SPDX-License-Identifier: Apache-2.0
"""The requests of vLLM's scheduler as slots, told as events: what `torpor events`, `record` and `console` show.

Looked at after each Scheduler.schedule(), from its output; what is found and loaded below the device is told by
torpor's connector, from its hooks, in whose order it happens. What only decodes is not looked at: a step in which
nothing else happens costs a few comparisons, however many requests there are. Without the option events_dir: one.
"""

from __future__ import annotations

import logging
import time

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from torpor import _core
from torpor.errors import Error
from torpor.vllm.connector_options import CLASS, all_ours
from torpor.vllm.options import Options

_LOOK_AT_ALL_EVERY = 64  # steps
_STANDING_SECONDS = 0.002  # between looks whether an engine that was stopped may go on

logger = logging.getLogger("vllm.torpor")


def begin_events(vllm_config, role: str, rank: int = 0) -> bool:
    """Whether this process tells events. A directory that is of no use is said once, and the engine serves on."""
    options = Options.of(vllm_config)
    if (directory := options.events_dir) is None:
        return False
    try:
        _core.begin_events(directory, role, rank, options.events_blocks)
    except Error as problem:
        logger.warning("torpor tells no events: %s", problem)
        return False
    return True


def begin_control(scheduler) -> None:
    """Whoever may connect can now look at this engine, and stop it. A socket that cannot be made is said once."""
    vllm_config = scheduler.vllm_config
    if (mode := Options.of(vllm_config).console) == "off":
        return
    transfers = vllm_config.kv_transfer_config
    # Other engines wait for this one; other connectors' peers wait for what its steps renew.
    alone = vllm_config.parallel_config.data_parallel_size == 1 and (transfers is None or all_ours(transfers))
    operates = mode == "control" and alone
    if mode == "control" and not alone:
        logger.warning("torpor's console only looks: this engine is not alone, and must not stand still")
    try:
        scheduler.torpor_console = _core.begin_control(operates, Options.of(vllm_config).recordings_dir or "")
    except Error as problem:
        logger.warning("torpor has no console: %s", problem)
        return
    if operates:
        scheduler.torpor_gate = _core.may_step


def stands(scheduler) -> bool:
    """Whether no step is to be taken now, because somebody looks at the engine as it is.

    Not while vLLM itself is paused, or waits for its requests to end so that it can be: that goes on.
    """
    if scheduler.torpor_gate() or scheduler.pause_state is not PauseState.UNPAUSED:
        return False
    time.sleep(_STANDING_SECONDS)  # who asks will ask again at once
    return True


def has_work(core, stock_has_work) -> bool:
    """EngineCoreProc.has_work(). A stopped engine waits for the end of that, or for a message, in its own loop."""
    scheduler = core.scheduler
    if not hasattr(scheduler, "torpor_slots"):  # torpor has no part in it (scheduler.py)
        return stock_has_work()
    if scheduler.torpor_slots is None:
        Slots.of(scheduler)  # before the first step: it can be looked at, and stopped
    while not stock_has_work():
        if (gate := scheduler.torpor_gate) is None:
            return False
        scheduler.torpor_gate = None  # is there anything to do at all? Else a stop that has just ended would be missed
        try:
            if not stock_has_work():
                return False
        finally:
            scheduler.torpor_gate = gate
        if not core.is_running():
            _core.end_stops()  # it ends, and nobody keeps it from that
        elif not core.input_queue.empty():
            return False
    return True


def is_torpors(connector) -> bool:
    return type(connector).__name__ == CLASS


class Slots:
    """Of one scheduler."""

    def __init__(self, block_tokens: int = 0, keys: bool = False):
        """`block_tokens`: where a request's blocks follow from its tokens; 0: they do not. `keys`: of blocks, too."""
        self._slots = _core.Slots()
        self._block_tokens = block_tokens
        self._keyed: dict[str, tuple] | None = {} if keys else None  # of each request: it, and how many keys were told
        self._driven = False
        self._numbers: dict[str, int] = {}
        self._watched: set[str] = set()  # what may be something else than decoding in the next step
        self._onboarding: set[str] = set()
        self._steps = 0
        self._holds = False  # a request, in the step that is being made

    @staticmethod
    def of(scheduler) -> Slots | None:
        """None: nobody listens."""
        found = scheduler.torpor_slots
        if found is None:
            found = False
            if begin_events(scheduler.vllm_config, "core"):
                groups = scheduler.kv_cache_config.kv_cache_groups
                block_tokens = groups[0].kv_cache_spec.block_size if len(groups) == 1 else 0
                found = Slots(block_tokens, Options.of(scheduler.vllm_config).events_keys)
                found._drive(scheduler.connector)
            scheduler.torpor_slots = found
            if found:
                begin_control(scheduler)
        return found or None

    # --- driven: hooks of torpor's connector, before the step in which they are seen

    def _drive(self, connector) -> None:
        side = getattr(connector, "scheduler", None) if is_torpors(connector) else None
        self._driven = side is not None
        if side is not None:
            side.slots = self

    def know(self, request) -> None:
        if request.request_id not in self._numbers:
            self._create(request)

    def staged(self, request, blocks: int) -> None:
        """So many blocks were found for it and are kept; 0: none are, or not any more."""
        self._slots.stage(self._numbers[request.request_id], blocks)

    def loading(self, request_id: str, blocks: int) -> None:
        if (number := self._numbers.get(request_id)) is not None:
            self._slots.onboard(number, blocks)
            self._onboarding.add(request_id)

    # --- asked, in each schedule(), of every request that would be admitted next

    def may_admit(self, request) -> bool:
        """False: a breakpoint holds it; ask again in the next step. A request that has tokens is never held."""
        if request.num_computed_tokens > 0:
            return True
        self.know(request)
        admitted = self._slots.may_admit(self._numbers[request.request_id])
        self._holds = self._holds or not admitted
        return admitted

    # --- observed

    def step(self, scheduler, output, began: int) -> None:
        """After schedule() gave `output`; it was called at `began`, of time.perf_counter_ns()."""
        numbers, requests = self._numbers, scheduler.requests
        scheduled = output.num_scheduled_tokens
        for request_id in output.finished_req_ids:
            self._finish(request_id, request_id in requests)
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
        if self._holds and output.total_num_scheduled_tokens == 0:
            time.sleep(_STANDING_SECONDS)  # who steps an engine with requests does so again at once
        self._holds = False

    def _look(self, requests, scheduled: dict[str, int]) -> None:
        self._steps += 1
        looked_at = scheduled if self._steps % _LOOK_AT_ALL_EVERY == 0 else self._watched & scheduled.keys()
        for request_id in list(looked_at):
            request, count = requests.get(request_id), scheduled[request_id]
            if request is None or request_id not in self._numbers:
                continue
            before = request.num_computed_tokens - count
            blocks = -(-request.num_computed_tokens // self._block_tokens) if self._block_tokens else 0
            self._slots.scheduled(self._numbers[request_id], before, count, request.num_tokens, blocks)
            self._onboarding.discard(request_id)
            if request.num_tokens - before <= 1:
                self._watched.discard(request_id)

    def _find_others(self, requests) -> None:
        for request_id, request in requests.items():
            if request_id not in self._numbers:
                self._create(request)
        for request_id in [known for known in self._numbers if known not in requests]:
            self._finish(request_id)

    def _create(self, request) -> int:
        number = self._numbers[request.request_id] = self._slots.create(request.request_id, max(request.num_tokens, 1))
        self._watched.add(request.request_id)
        if self._keyed is not None:
            keys = list(request.block_hashes)
            self._slots.keys(number, keys, 0, False)
            self._keyed[request.request_id] = request, len(keys)
        return number

    def _look_at_loads(self, requests) -> None:
        for request_id in self._watched:
            request = requests.get(request_id)
            if request is None:
                continue
            loads = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            if loads and request_id not in self._onboarding and not self._driven:
                self._onboarding.add(request_id)
                self._slots.onboard(self._numbers[request_id], 1)  # nobody says how many
            elif not loads and request_id in self._onboarding and request.num_computed_tokens == 0:
                self._onboarding.discard(request_id)
                self._slots.onboard_failed(self._numbers[request_id])

    def _finish(self, request_id: str, held: bool = False) -> None:
        """`held`: its load is still writing into its blocks, and it ends with that."""
        if held:
            if (number := self._numbers.get(request_id)) is not None:
                self._slots.finish(number, True)
        elif (number := self._numbers.pop(request_id, None)) is not None:
            if self._keyed is not None:
                request, published = self._keyed.pop(request_id)
                self._slots.keys(number, list(request.block_hashes[published:]), published, True)
            self._slots.finish(number)
        self._watched.discard(request_id)
        self._onboarding.discard(request_id)
