# SPDX-License-Identifier: Apache-2.0
"""The connector and a sleep: before it transfers end, over it the tiers stay, after it their blocks are found again."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from torpor import _core
from torpor.errors import TimedOut
from torpor.vllm import connector_options, worker_answers

logger = logging.getLogger("vllm.torpor")


def side_of(scheduler):
    """SchedulerSide, where torpor's connector is switched on, perhaps inside vLLM's MultiConnector; else None."""
    connector = getattr(scheduler, "connector", None)
    for each in connector_options.members(connector):
        if type(each).__name__ == connector_options.CLASS:
            return each.scheduler
    return None


def notice_new_weights(core, declared: bool = False, by_content: bool = False) -> None:
    """Ask the workers whether weights were written. If so, no request finds KV of the old ones from now on: the report
    of a step would come too late for the first requests.

    `declared`: the user says so. `by_content`: look at the weights themselves where they may have been written unseen.
    """
    side = side_of(getattr(core, "scheduler", None))
    if side is None or side.core is None or side.begins_namespace():
        return
    looks = by_content and side.weights_maybe_written and not side.kept
    try:
        worker_answers.check_answered(core)
        changed = declared or any(core.collective_rpc("torpor_weights_changed", args=(looks,)))
    except Exception as problem:
        logger.warning("KV of earlier weights is not used: it is not known whether they were written: %s", problem)
        changed = True
    if changed:
        side.new_weights()
    elif looks:  # all ranks have just hashed them
        side.weights_maybe_written = core.torpor_weights_maybe_written = False


def is_alone(scheduler) -> bool:
    """Whether torpor's connector is the engine's only one."""
    return type(scheduler.connector).__name__ == connector_options.CLASS


def brings_kv(scheduler) -> bool:
    """Whether a connector of torpor brings KV of requests: TorporConnector, or TorporAdmit of the option sessions."""
    names = (connector_options.CLASS, connector_options.ADMIT_CLASS)
    return any(type(each).__name__ in names for each in connector_options.members(scheduler.connector))


def finish_transfers(core, side, deadline: float | None = None, everything: bool = False) -> None:
    """Copies from and to the device end, also those that are queued. Requests that waited for their blocks have them.

    Blocks go on from host memory to disk and the remote store meanwhile, or later: nobody waits for a slow store.
    `everything`: they too are there afterwards, and safe. Raises TimedOut at `deadline`, of the monotonic clock.
    """
    aggregator = core.model_executor.kv_output_aggregator
    began = False
    while side.has_rest(everything):
        _core.end_stops()  # a console may hold one of them
        if deadline is not None and time.monotonic() >= deadline:
            where = "to disk or a store" if everything else "from or to the device"
            raise TimedOut(f"KV blocks are still on their way {where}", "give the call a longer timeout")
        began = True
        moved = core.collective_rpc("torpor_transfer", args=(side.rest(everything),))
        outputs = [ModelRunnerOutput.with_kv_conn_output_only(each) for each in moved]
        merged = aggregator.aggregate(outputs) if len(outputs) > 1 else outputs[0]
        deliver(core, core.scheduler.update_from_output(SchedulerOutput.make_empty(), merged))
    if began and everything:
        core.collective_rpc("torpor_sync_blocks")
    settle(core.scheduler)
    core.scheduler.kv_cache_manager.take_boundary_state_offloads()  # the tiers have the states that they loaded


@contextmanager
def tiers_kept(scheduler):
    """While vLLM drops the KV of the device, and its requests are computed again."""
    if side_of(scheduler) is not None:
        take_back_loaded(scheduler)
    with resets_ignored(scheduler):
        yield


@contextmanager
def resets_ignored(scheduler):
    """While other connectors forget what they have: torpor's tiers know of which weights their blocks are."""
    side = side_of(scheduler)
    if side is not None:
        side.kept = True
    try:
        yield
    finally:
        if side is not None:
            side.kept = False


def take_back_loaded(scheduler) -> None:
    """Free the KV of requests that have it without running: a connector has loaded it, or the next piece of a prompt is
    waited for. They are computed again."""
    # vLLM takes back the blocks of running requests only. It keeps blocks free for prefills in flight, which these are
    # not any more.
    holding = [request for request in scheduler.kv_holding_waiting if request.num_computed_tokens > 0]
    take_back(scheduler, holding)


def take_back_waiting(scheduler) -> None:
    """Free the KV of requests that have it, do not run, and whose load is not in flight, as vLLM does with that of
    running ones when it resets its prefix cache. They are computed again."""
    settle(scheduler)
    waits = RequestStatus.WAITING_FOR_REMOTE_KVS
    take_back(scheduler, [r for r in scheduler.kv_holding_waiting if r.num_computed_tokens > 0 and r.status != waits])


def settle(scheduler) -> None:
    """Let requests whose KV has arrived wait for their turn from now on."""
    for request in list(scheduler.kv_holding_waiting):
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            scheduler._handle_blocked_waiting_request(request)


def take_back(scheduler, holding: list) -> None:
    """Free the KV of these requests, which stand among those that hold some without running."""
    scheduler.kv_holding_waiting.remove_requests(holding)
    for request in reversed(holding):
        scheduler.kv_cache_manager.free(request)
        scheduler._inflight_prefills.discard(request)
        request.num_computed_tokens = 0
        scheduler.waiting.prepend_request(request)


def free_for_others(scheduler) -> None:
    """Let the last request that has loaded give its blocks back, if nothing else can free any; it loads again later.

    Called after a Scheduler.schedule() that gave no request a token. Of a request with a sliding window vLLM counts too
    few blocks that it still needs, and lets more loads begin than there is room for. When they have ended, no request
    has the blocks for its next step, and none runs that would free some.
    """
    side = side_of(scheduler)
    if side is None or side.busy() or scheduler.running or scheduler.pause_state is not PauseState.UNPAUSED:
        return
    over = scheduler.finished_recving_kv_req_ids
    ready = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
    holding = [request for request in scheduler.kv_holding_waiting if request.num_computed_tokens > 0]
    if len(holding) < 2 or not all(r.status in ready or r.request_id in over for r in holding):
        return
    last = holding[-1]
    over.discard(last.request_id)
    scheduler.failed_recving_kv_req_ids.discard(last.request_id)
    last.status = RequestStatus.PREEMPTED if last.num_preemptions else RequestStatus.WAITING
    take_back(scheduler, [last])


def let_those_with_blocks_go_first(scheduler) -> None:
    """Called before each Scheduler.schedule(). A request whose KV could not be loaded holds no blocks any more, and yet
    may stand among those that do, and vLLM keeps room for it as for a load under way. Where the others hold all the
    room, or enough loads failed, nothing would ever run."""
    ready = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
    if failed := [r for r in scheduler.kv_holding_waiting if r.num_computed_tokens == 0 and r.status in ready]:
        scheduler.kv_holding_waiting.remove_requests(failed)
        for request in reversed(failed):
            scheduler.waiting.prepend_request(request)
    # In either queue: vLLM moves those for which it has no answer of the connector yet.
    if without_blocks := [r for r in scheduler._inflight_prefills if r.num_computed_tokens == 0 and r.status in ready]:
        scheduler._inflight_prefills.difference_update(without_blocks)


def announce_requests(scheduler) -> None:
    if (side := side_of(scheduler)) is not None:
        for request in scheduler.requests.values():
            side.know(request)


def forget_requests(scheduler) -> None:
    if (side := side_of(scheduler)) is not None:
        for request in scheduler.requests.values():
            side.finished(request)


def deliver(core, outputs: dict | None) -> None:
    """Outputs of a step that nobody asked for, on their way to the front ends as if the engine had taken it itself."""
    for client, output in (outputs or {}).items():
        if hasattr(core, "output_queue"):  # of a core in its own process
            core.output_queue.put_nowait((client, output))
        else:
            core.torpor_outputs = [*getattr(core, "torpor_outputs", ()), output]
