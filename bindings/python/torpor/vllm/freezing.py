# SPDX-License-Identifier: Apache-2.0
"""A freeze is no pause: what vLLM's pauses mean while torpor has the scheduler stand still.

vLLM takes an engine without a step to do for idle: it then completes pauses and clears caches. An engine that torpor
has frozen for a checkpoint, or put to sleep, has no step to do either, and its requests have not ended. So the pause
state stays vLLM's alone, a freeze is `Scheduler.torpor_frozen`, and here is what vLLM's engine core asks meanwhile.
Called in the engine core's thread, between steps.
"""

from __future__ import annotations

from vllm.v1.core.sched.interface import PauseState

from torpor.vllm.connector_options import ADMIT_CLASS


def is_frozen(core) -> bool:
    return getattr(core.scheduler, "torpor_frozen", False)


def is_idle(core) -> bool:
    """Whether all that a pause waits for has ended, as vLLM would say it if the engine were not frozen.

    Ids of finished requests, which the next step hands over, are not waited for: there may be none for hours. Beside a
    KV connector they are, because its transfers may still hold blocks; that of the option sessions has none.
    """
    if core.batch_queue:
        return False
    scheduler = core.scheduler
    transfers = scheduler.connector is not None and type(scheduler.connector).__name__ != ADMIT_CLASS
    return _unfinished_requests(core, scheduler) == 0 and not (transfers and scheduler.has_finished_requests())


def _unfinished_requests(core, scheduler) -> int:
    """Count them under the pause that vLLM's users have set: for ranks in stop_ranks() torpor has set another one."""
    state = scheduler.pause_state
    scheduler._pause_state = core.torpor_side.hooks.wanted_pause
    try:
        return scheduler.get_num_unfinished_requests()
    finally:
        scheduler._pause_state = state


def notify_idle_state_callbacks(core, stock) -> None:
    """EngineCoreProc._notify_idle_state_callbacks(): those of pauses wait for requests, not for a freeze."""
    if not is_frozen(core) or is_idle(core):
        stock()
    else:
        core.torpor_side.hooks.notify_stopped()


def pause_complete(core, stock) -> bool:
    """EngineCoreProc._pause_complete(), just after the pause state was set. Frozen ranks do not ask each other: their
    step would be taken by an engine that is asleep."""
    if not is_frozen(core):
        return stock()
    core.torpor_side.hooks.wanted_pause = core.scheduler.pause_state
    return is_idle(core)


def is_scheduler_paused(core, stock) -> bool:
    """EngineCore.is_scheduler_paused(): asleep, too, but not for the moment of a checkpoint."""
    side = getattr(core, "torpor_side", None)
    if side is None:
        return stock()
    return side.hooks.wanted_pause is not PauseState.UNPAUSED or side.controller.is_sleeping()
