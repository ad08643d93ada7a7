# SPDX-License-Identifier: Apache-2.0
"""torpor's part of a scheduler: a mixin in front of the class that vLLM would take, where torpor holds the memory.

choose() names the class in `scheduler_config.scheduler_cls`. Other engines keep their scheduler as it is.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

from torpor.vllm import call_hooks, connector_adapters, grammar, plugin
from torpor.vllm.connector_failed import can_take_back, take_back_failed
from torpor.vllm.connector_sleep import free_for_others, let_those_with_blocks_go_first, side_of
from torpor.vllm.mixed_in import Stock
from torpor.vllm.named_mixins import NamedMixins, resolved
from torpor.vllm.recorded_inputs import RecordedInputs
from torpor.vllm.sessions import admissions_of
from torpor.vllm.slots import Slots, is_torpors, stands

logger = logging.getLogger("vllm.torpor")

_STOCK = {"Scheduler": "vllm.v1.core.sched.scheduler", "AsyncScheduler": "vllm.v1.core.sched.async_scheduler"}


class SchedulerMixin(Stock):
    """Counts steps and recomputed tokens, and can be frozen: vLLM's own pause runs a step that reorders the batch."""

    torpor_base: type  # the scheduler without torpor
    torpor_frozen = False
    torpor_updates_weights = False  # requests wait until the weights are whole (weight_updates.py)
    torpor_collects = False  # takes steps that compute nothing, for a KV connector that is not torpor's
    torpor_steps = 0
    torpor_unproven = 0  # KV blocks that a copy may still write into
    torpor_slots = None  # not asked for yet; False: nobody listens
    torpor_deferred = None  # the DeferredBlocks of a post-copy wake, until all blocks have arrived
    torpor_sessions = None  # Sessions, once a request was hibernated
    torpor_preemptions: Any = None  # Preemptions, with the option offload_preempted
    torpor_schedules = False  # a step is being made up
    torpor_gate = None  # says whether a step may be taken
    torpor_console = None  # path of its socket
    torpor_inputs: RecordedInputs | None = None  # with the option record_inputs

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.torpor_slots is None:  # not asked for yet
            call_hooks.register_named(self.vllm_config)
            Slots.of(self)  # it can be looked at, and stopped, before its first step
            self.torpor_inputs = RecordedInputs.of(self)
        if (side := side_of(self)) is not None:
            side.loads_within_step = can_take_back(self)

    def has_requests(self) -> bool:
        if self.torpor_collects:
            return True
        if self.torpor_frozen or self.torpor_updates_weights or (self.torpor_gate is not None and stands(self)):
            return False
        return super().has_requests()

    def add_request(self, request) -> None:
        grammar.remember_beginning(request)
        super().add_request(request)
        if self.torpor_inputs is not None:
            self.torpor_inputs.add(request, self.torpor_steps)

    def _update_request_as_session(self, session, update) -> None:
        """Give a prompt in pieces its next piece. Its history stays if its KV was dropped: before 0.33, vLLM keeps only
        tokens that have KV."""
        computed = session.num_computed_tokens
        session.num_computed_tokens = max(computed, session.num_tokens - 1)  # the last token is dropped, as always
        super()._update_request_as_session(session, update)
        session.num_computed_tokens = computed

    def finish_requests(self, request_ids, finished_status):
        """Finish these requests, hibernated ones too."""
        gone: list = [] if self.torpor_sessions is None else self.torpor_sessions.end(request_ids)
        if self.torpor_inputs is not None:
            self.torpor_inputs.abort(request_ids, self.torpor_steps)
        ended = super().finish_requests(request_ids, finished_status) + gone
        if self.torpor_inputs is not None:
            self.torpor_inputs.look()
        return ended

    def _handle_blocked_waiting_request(self, request) -> bool:
        """Say whether vLLM may admit this request in the present step: not one that a breakpoint holds."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        if request.num_computed_tokens == 0 and not call_hooks.admits(request.request_id):
            return False
        return not self.torpor_slots or self.torpor_slots.may_admit(request)

    def update_from_output(self, scheduler_output, model_runner_output, *args, **kwargs):
        """Take the outputs of a step. Requests whose load failed within it begin again."""
        connector_adapters.before_outputs(self, scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)
        if (side := side_of(self)) is not None and side.bad_blocks:
            take_back_failed(self, side)
        if self.torpor_inputs is not None:
            self.torpor_inputs.look()
        return outputs

    def _preempt_request(self, request, *args, **kwargs) -> None:
        """Preempt a request. One that has to go for want of blocks keeps its KV in host memory, where that is on."""
        offloads = self.torpor_preemptions is not None and self.torpor_schedules  # else its KV is not to be used again
        computed = self.torpor_preemptions.offload(request) if offloads else 0
        super()._preempt_request(request, *args, **kwargs)
        if computed > 0:
            self.torpor_preemptions.expect(request, computed)

    def schedule(self, *args, **kwargs):
        self.torpor_steps += 1
        slots = self.torpor_slots if self.torpor_slots is not None else Slots.of(self)
        began = time.perf_counter_ns() if slots else 0
        if self.torpor_deferred is not None:
            self.torpor_deferred.poll()
        torpors = is_torpors(self.connector)
        if torpors or admissions_of(self) is not None:  # another's stand where vLLM puts them
            let_those_with_blocks_go_first(self)
            connector_adapters.before_schedule(self)
        self.torpor_schedules = True
        try:
            output = call_hooks.around(call_hooks.STEP, None, super().schedule, *args, **kwargs)
        finally:
            self.torpor_schedules = False
        count_recomputed(self, output.num_scheduled_tokens)
        if torpors and not output.num_scheduled_tokens:
            free_for_others(self)
        if slots:
            slots.step(self, output, began)
        return output


def watch_recomputation(scheduler) -> None:
    """From now on counts every token position that is scheduled although its KV exists at this moment."""
    scheduler.torpor_computed = {
        request_id: request.num_computed_tokens for request_id, request in scheduler.requests.items()
    }
    scheduler.torpor_recomputed = 0


def count_recomputed(scheduler, scheduled: dict[str, int]) -> None:
    """Called after each Scheduler.schedule() with its num_scheduled_tokens."""
    computed = getattr(scheduler, "torpor_computed", None)
    if not computed:
        return
    for request_id, count in scheduled.items():
        if (reached := computed.get(request_id)) is not None:
            start = scheduler.requests[request_id].num_computed_tokens - count
            scheduler.torpor_recomputed += max(0, min(count, reached - start))


_MADE = NamedMixins(__name__, SchedulerMixin, _STOCK)
over = _MADE.over


def __getattr__(name: str) -> type:
    made = _MADE.find(name)
    plugin.require()
    if name in _STOCK:
        _say_it_is_vllms(name)
    return made


def choose(vllm_config) -> None:
    """Puts the mixin in front of this engine's scheduler. Doing it again, as a copy of the configuration does, changes
    nothing."""
    scheduling = vllm_config.scheduler_config
    given = scheduling.scheduler_cls
    if given is None or given in map(_MADE.short, _STOCK):
        scheduling.scheduler_cls = _MADE.short("AsyncScheduler" if scheduling.async_scheduling else "Scheduler")
    elif not _MADE.has(given):
        scheduling.scheduler_cls = _MADE.named(resolved(given))


def is_foreign(scheduler_cls: str | type | None) -> bool:
    """Whether it names a scheduler that is no subclass of vLLM's: torpor leaves such an engine alone."""
    if scheduler_cls is None or _MADE.has(scheduler_cls):
        return False
    from vllm.v1.core.sched.scheduler import Scheduler

    try:
        found = resolved(scheduler_cls)
    except (ImportError, AttributeError, ValueError):
        return True  # vLLM will say so
    foreign = not (isinstance(found, type) and issubclass(found, Scheduler))
    if foreign:
        _say_foreign(found)
    return foreign


@functools.cache
def _say_it_is_vllms(name: str) -> None:
    logger.info("the custom scheduler class that vLLM names is its own %s, with torpor's part in front", name)


@functools.cache
def _say_foreign(cls) -> None:
    name = f"{cls.__module__}.{cls.__qualname__}" if isinstance(cls, type) else repr(cls)
    logger.warning("torpor leaves this engine alone: its scheduler %s is no subclass of vLLM's Scheduler", name)
