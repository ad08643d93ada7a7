# SPDX-License-Identifier: Apache-2.0
"""A pause that users of vLLM asked for lasts over sleeps, with what it says to new requests, and into a new process."""

from types import SimpleNamespace

import pytest
from requests_of_tests import REQUESTS, run
from vllm.v1.core.sched.interface import PauseState

from torpor import errors

PAUSED, RUNS = ("PAUSED_NEW", True), ("UNPAUSED", False)


@pytest.fixture
def core(one):
    """With what engine cores in their own processes have from vLLM 0.33 on: whether new requests are turned away."""
    one.core.reject_new_requests = False
    yield one.core
    one.core.resume_scheduler()
    del one.core.reject_new_requests


def pause(core):
    """As pause_generation(mode="wait") does; what runs goes on."""
    core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    core.reject_new_requests = True


def resume(core):
    core.resume_scheduler()
    core.reject_new_requests = False


def seen(core) -> tuple[str, bool]:
    return core.scheduler.pause_state.name, core.reject_new_requests


def test_it_lasts_over_a_sleep_in_host_memory(one, core):
    answers = one.begin(20)
    pause(core)
    one.llm.sleep(level=1, preserve_state=True)
    assert core.reject_new_requests
    answers |= one.stopped()
    one.llm.wake_up()
    assert seen(core) == PAUSED
    resume(core)
    assert one.finish(answers) == one.expected


def test_it_travels_with_a_sleep_to_disk(one, core):
    answers = one.begin(20)
    pause(core)
    report = one.llm.sleep(level=1, preserve_state=True, to="disk")
    answers |= one.stopped()
    one.llm.wake_up()
    resume(core)
    run(one.engine)
    one.llm.reset_prefix_cache()
    one.llm.torpor.call("wake_up", {"from_checkpoint": report.checkpoint, "hold": True})
    one.llm.torpor.call("end_hold", {"keep": False})  # it was not to be
    assert seen(core) == RUNS
    assert one.llm.wake_up(from_checkpoint=report.checkpoint).paused
    assert seen(core) == PAUSED
    resume(core)
    assert one.finish(answers) == one.expected


def test_a_request_that_came_to_a_checkpoint_which_is_not_woken_after_all_runs(one):
    """Another rank has failed, or the call was cancelled."""
    answers = one.begin(20, ["greedy", "seeded"])
    path = one.llm.checkpoint().checkpoint
    one.finish(answers)
    one.llm.reset_prefix_cache()
    one.llm.torpor.call("wake_up", {"from_checkpoint": path, "hold": True})
    prompt, params = REQUESTS["short"]
    one.engine.add_request("came", prompt, params)
    one.llm.torpor.call("end_hold", {"keep": False})
    assert one.finish({}) == {"came": one.expected["short"]}


def test_a_checkpoint_of_an_engine_that_goes_on_has_none(one, core):
    answers = one.begin(20)
    pause(core)
    report = one.llm.checkpoint()
    assert seen(core) == PAUSED
    resume(core)
    run(one.engine)
    one.llm.reset_prefix_cache()
    assert not one.llm.wake_up(from_checkpoint=report.checkpoint).paused
    assert seen(core) == RUNS
    assert one.finish(answers) == one.expected


def test_a_wake_that_ends_it_lets_new_requests_in(one, core):
    one.begin(20, ("greedy", "short"))
    core.pause_scheduler("keep", False)
    core.reject_new_requests = True
    one.llm.release_kv_cache_memory()
    one.llm.wake_up(tags=["kv_cache"])
    assert seen(core) == RUNS
    run(one.engine)


def test_a_sleep_that_keeps_no_requests_ends_it_as_vllms_does(one, core):
    one.begin(20, ("greedy", "short"))
    core.pause_scheduler("keep", False)
    core.reject_new_requests = True
    with pytest.raises(errors.InvalidArgument):
        one.llm.sleep(level=1, tags=["wieghts"])
    assert seen(core) == ("PAUSED_ALL", True)
    one.llm.sleep(level=0)
    one.llm.wake_up()
    assert seen(core) == ("PAUSED_ALL", True)
    one.llm.sleep(level=1)
    assert seen(core) == RUNS  # a request that comes while it sleeps waits for the wake
    one.llm.wake_up()
    assert seen(core) == RUNS and not one.llm.is_sleeping()


def test_a_wake_of_an_engine_that_is_only_paused_ends_it_as_vllms_does(one, core):
    answers = one.begin(20)
    core.pause_scheduler("keep", False)
    core.reject_new_requests = True
    assert one.llm.is_sleeping() and one.llm.wake_up()
    assert seen(core) == RUNS and not one.llm.is_sleeping()
    assert one.finish(answers) == one.expected


def put_to_sleep(llm):
    llm.sleep(1)


def put_to_sleep_and_wake_weights(llm):
    llm.sleep(1)
    assert not llm.wake_up(tags=["weights"])


def release(llm):
    llm.llm_engine.step()  # which hands over the ids of finished requests
    llm.llm_engine.engine_core.engine_core.pause_scheduler("keep", False)
    llm.release_kv_cache_memory()


@pytest.mark.parametrize("fall_asleep", [put_to_sleep, put_to_sleep_and_wake_weights, release])
def test_one_that_comes_while_no_request_is_kept_ends_with_the_wake(one, core, fall_asleep):
    fall_asleep(one.llm)
    pause(core)
    assert one.llm.wake_up(tags=["kv_cache"] if fall_asleep is put_to_sleep_and_wake_weights else None)
    assert seen(core) == RUNS and not one.llm.is_sleeping()


def test_one_that_outlasts_a_wake_ends_with_the_next(one, core):
    for options in ({"level": 0}, {"level": 1, "preserve_state": True}):
        pause(core)
        one.llm.sleep(**options)
        assert one.llm.wake_up() and seen(core) == PAUSED
        assert one.llm.wake_up() and seen(core) == RUNS


def test_a_wake_of_an_engine_that_waits_for_its_requests_begins_no_other(one, core):
    pause(core)
    one.llm.torpor.call("drain", {"level": 1, "in_flight": "abort"})
    try:
        one.llm.wake_up()
        assert one.core.torpor_side.hooks.wanted_pause is PauseState.UNPAUSED
        assert core.scheduler.pause_state is PauseState.PAUSED_NEW
    finally:
        one.llm.torpor.call("end_drain", {})
    assert seen(core) == RUNS


def test_ranks_of_which_one_fails_to_sleep_stay_paused():
    from torpor.vllm.engine_core import EngineSide

    done = []
    side = EngineSide.__new__(EngineSide)
    executor = SimpleNamespace(sleeping_tags=set())
    side.hooks = SimpleNamespace(
        core=SimpleNamespace(model_executor=executor), is_quiet=False, end_pause=lambda: done.append("ended")
    )
    side.controller = SimpleNamespace(
        sleep=lambda options: {"held": True, "changed": False},
        end_sleep=lambda keep: {"changed": keep},
        state=lambda: {"tags": {}},
    )
    asked = {"level": 1, "preserve_state": False, "in_flight": "abort"}
    for keep in (False, True):
        side.sleep(asked)
        assert not done
        side.end_sleep({"keep": keep})
    assert done == ["ended"]


@pytest.mark.parametrize("slept", [False, True])
def test_a_checkpoint_of_ranks_says_how_long_they_stopped_and_ends_nothing(slept):
    from torpor.vllm.engine_core import EngineSide

    side = EngineSide.__new__(EngineSide)
    executor = SimpleNamespace(sleeping_tags=set())
    side.hooks = SimpleNamespace(core=SimpleNamespace(model_executor=executor), is_quiet=False)  # no request ends
    report = {"changed": True}
    side._held_sleep = {"level": 0, "preserve_state": False, "in_flight": "abort"} if slept else None

    def keeps(*_) -> dict:
        side.hooks.bound = [{"id": "odd", "error": "no"}]
        return {"held": True, "changed": False}

    def ends(keep: bool) -> dict:
        side.hooks.pause_seconds = 2.5
        return dict(report)

    side.controller = SimpleNamespace(checkpoint=keeps, end_sleep=ends, state=lambda: {"tags": {}})
    side.checkpoint({"outputs": None, "data_parallel": (0, 2)})
    report = side.end_sleep({"keep": True})
    assert report["bound_requests"] == [{"id": "odd", "error": "no"}] and report["began"] > 0
    assert report["pause_seconds"] == 2.5


def test_ranks_that_stood_together_turn_new_requests_away_as_before():
    from torpor.vllm.hooks import VllmHooks

    class Core(SimpleNamespace):
        def pause_scheduler(self, mode, clear_cache):
            self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            self._idle_state_callbacks.append(lambda core: None)

        def resume_scheduler(self):
            self.scheduler.set_pause_state(PauseState.UNPAUSED)
            self.reject_new_requests = False

    scheduler = SimpleNamespace(pause_state=PauseState.PAUSED_NEW, torpor_frozen=False, connector=None)
    scheduler.set_pause_state = lambda state: setattr(scheduler, "pause_state", state)
    core = Core(scheduler=scheduler, reject_new_requests=True, _idle_state_callbacks=[])
    hooks = VllmHooks(core)
    hooks.stop_ranks()
    hooks.restart_ranks()
    assert seen(core) == PAUSED and not scheduler.torpor_frozen


@pytest.mark.parametrize("wanted", [PauseState.UNPAUSED, PauseState.PAUSED_ALL])
def test_one_that_comes_while_a_sleep_waits_for_requests_outlasts_that(one, core, wanted):
    hooks = one.core.torpor_side.hooks
    if wanted is PauseState.UNPAUSED:
        pause(core)
    one.llm.torpor.call("drain", {"level": 1, "in_flight": "abort"})
    try:
        if wanted is PauseState.UNPAUSED:
            core.resume_scheduler()
        else:
            core.pause_scheduler("keep", False)
        assert hooks.wanted_pause is wanted
        begins_none = PauseState.PAUSED_NEW if wanted is PauseState.UNPAUSED else wanted
        assert core.scheduler.pause_state is begins_none
    finally:
        one.llm.torpor.call("end_drain", {})
    assert core.scheduler.pause_state is wanted
