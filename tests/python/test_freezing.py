# SPDX-License-Identifier: Apache-2.0
"""vLLM's pauses beside checkpoints, sleeps and wakes: a frozen engine is neither idle nor paused."""

import asyncio
import contextlib

import pytest
import gpu_path
import vllm
from conftest import ENGINE
from requests_of_tests import REQUESTS
from torpor.errors import Error
from torpor.vllm import freezing, frontend
from torpor.vllm.engine_core import EngineCoreMixin
from torpor.vllm.hooks import VllmHooks
from vllm.v1.core.sched.interface import PauseState

NAMES = ("greedy", "seeded", "prefix-a")
LONG = 60 if gpu_path.active() else 250  # tokens: the requests must not be done before the engine is frozen


@pytest.mark.gpu_path
@pytest.mark.parametrize("before", [True, False], ids=["before the sleep", "while asleep"])
def test_a_pause_lasts_over_a_sleep_until_it_is_ended(one, before):
    answers = one.begin(10)
    if before:
        one.core.pause_scheduler("keep", False)
        while one.core.batch_queue:
            one.engine.step()
    one.llm.sleep(level=1, preserve_state=True)
    if not before:
        answers |= one.stopped()
        one.core.pause_scheduler("keep", False)
    assert one.llm.wake_up()
    assert one.core.is_scheduler_paused() and one.engine.step() == []
    one.core.resume_scheduler()
    assert not one.core.is_scheduler_paused()
    assert one.finish(answers) == one.expected


def test_a_pause_that_is_ended_while_the_engine_sleeps_is_over_after_the_wake(one):
    answers = one.begin(10)
    one.core.pause_scheduler("keep", False)
    one.llm.sleep(level=1, preserve_state=True)
    one.core.resume_scheduler()
    assert one.llm.is_sleeping() and one.engine.step() == []
    assert one.llm.wake_up() and not one.llm.is_sleeping()
    assert one.finish(answers) == one.expected


def test_a_pause_that_clears_caches_while_the_engine_sleeps_has_its_requests_computed_again(one):
    names = ("greedy", "prefix-a", "long", "short")  # stock vLLM on the CPU cannot resume a seeded request in chunks
    answers = one.begin(10, names)
    one.llm.sleep(level=1, preserve_state=True)
    answers |= one.stopped()
    one.core.pause_scheduler("keep", True)
    one.llm.wake_up()
    one.core.resume_scheduler()
    finished = one.finish(answers)
    for name in names:
        assert finished[name][1][0][1] == one.expected[name][1][0][1], name


def test_no_engine_is_paused_by_a_checkpoint(one):
    answers = one.begin(10)
    one.llm.torpor.call("state")
    one.core.torpor_side.freeze({})  # as while a checkpoint is taken
    assert not one.core.is_scheduler_paused() and one.engine.step() == []
    with pytest.raises(RuntimeError, match="pause"):
        one.llm.release_kv_cache_memory()
    one.core.torpor_side.unfreeze({})
    assert one.finish(answers) == one.expected


class Rank:
    """An engine core that computes for others, as far as a stop of all of them is concerned."""

    def __init__(self, pause):
        self.pause_state = pause
        self.unfinished = 2
        self.called: list[str] = []
        self._idle_state_callbacks = [lambda _: self.called.append("pause")]
        self.batch_queue = self.connector = None
        self.torpor_frozen = False
        self.scheduler = self
        self.hooks = VllmHooks(self)
        self.torpor_side = self

    @property
    def _pause_state(self):
        return self.pause_state

    @_pause_state.setter
    def _pause_state(self, state):
        self.pause_state = state

    def set_pause_state(self, state) -> None:
        self.pause_state = state

    def get_num_unfinished_requests(self) -> int:
        return 0 if self.pause_state is PauseState.PAUSED_ALL else self.unfinished

    def pause_scheduler(self, _mode, _clear_cache) -> str:
        self.pause_state = PauseState.PAUSED_ALL
        self._idle_state_callbacks.append(lambda _: self.called.append("stand"))
        return "all stand"

    def resume_scheduler(self) -> None:
        self.pause_state = PauseState.UNPAUSED

    def is_taken_for_idle(self) -> list[str]:
        """By its loop, when no rank has a step to take. Returns whose callbacks have run."""

        def stock() -> None:
            while self._idle_state_callbacks:
                self._idle_state_callbacks.pop()(self)

        freezing.notify_idle_state_callbacks(self, stock)
        return self.called


def test_pauses_of_ranks_that_stand_together_wait_for_their_requests():
    rank = Rank(PauseState.PAUSED_NEW)
    assert rank.hooks.stop_ranks() == "all stand"
    assert rank.is_taken_for_idle() == ["stand"] and rank.is_taken_for_idle() == ["stand"]
    rank.unfinished = 0
    assert rank.is_taken_for_idle() == ["stand", "pause"]
    rank.hooks.restart_ranks()
    assert rank.pause_state is PauseState.PAUSED_NEW


def test_a_pause_of_ranks_that_stand_holds_when_they_go_on():
    rank = Rank(PauseState.UNPAUSED)
    rank.hooks.stop_ranks()
    rank.set_pause_state(PauseState.PAUSED_NEW)  # as vLLM's pause does first
    assert not freezing.pause_complete(rank, None) and rank.pause_state is PauseState.PAUSED_ALL
    rank.set_pause_state(PauseState.PAUSED_ALL)
    assert freezing.pause_complete(rank, None)
    rank.hooks.restart_ranks()
    assert rank.pause_state is PauseState.PAUSED_ALL


def test_a_pause_that_is_ended_while_ranks_stand_is_over_when_they_go_on():
    class Ended(EngineCoreMixin, Rank):
        pass

    rank = Ended(PauseState.PAUSED_NEW)
    rank.hooks.stop_ranks()
    rank.resume_scheduler()
    assert rank.pause_state is PauseState.PAUSED_ALL  # they stand all the same
    rank.hooks.restart_ranks()
    assert rank.pause_state is PauseState.UNPAUSED


def test_the_engine_is_asked_again_about_a_request_that_came_behind_the_freeze():
    class Side:
        """Of a front end that has a request of which the freeze said nothing."""

        asked = 0

        def behind(self, sent: dict[str, int]) -> list[str]:
            return [] if "late" in sent else ["late"]

        async def receive(self) -> None:
            await asyncio.sleep(0)

        async def call(self, what: str) -> dict[str, int]:
            assert what == "sent"
            self.asked += 1
            return {"late": 0} if self.asked == 2 else {}  # at first it is still on its way

    side = Side()
    asyncio.run(asyncio.wait_for(frontend.caught_up(side, {}), 5))
    assert side.asked == 2


class Engine:
    """An AsyncLLM whose engine core is in another process, and readers of it."""

    def __init__(self, model, directory, sessions: bool):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        torpor = {"torpor": {"checkpoint_dir": str(directory), "sessions": sessions}}
        arguments = AsyncEngineArgs(model=str(model), additional_config=torpor, disable_log_stats=True, **ENGINE)
        self.llm = AsyncLLM.from_engine_args(arguments)
        self.tokens: dict[str, list[int]] = {}
        self.number = 0

    def ask(self) -> list[asyncio.Task]:
        self.number += 1
        self.tokens = {name: [] for name in NAMES}
        return [asyncio.create_task(self._read(name)) for name in NAMES]

    async def _read(self, name: str) -> list[int]:
        prompt, params = REQUESTS[name]
        params = params.clone()
        params.max_tokens = LONG
        async for output in self.llm.generate(prompt, params, f"{name}-{self.number}"):
            self.tokens[name] = list(output.outputs[0].token_ids)
        return self.tokens[name]

    async def begun(self) -> list[asyncio.Task]:
        tasks = self.ask()
        while min(map(len, self.tokens.values())) < 8:
            await asyncio.sleep(0)
        return tasks

    async def pause(self, mode: str) -> asyncio.Task:
        """Of an engine that is not asleep: it has come to the engine core, which has not answered yet."""
        task = asyncio.create_task(self.paused(mode))
        while not await self.llm.is_paused():
            await asyncio.sleep(0)
        return task

    async def paused(self, mode: str, clear_cache: bool = True) -> dict[str, int]:
        """Tokens of each request that had not ended when the pause was over."""
        await self.llm.pause_generation(mode=mode, clear_cache=clear_cache)
        asleep = (await self.llm.torpor.state()).engine == "asleep"
        unfinished = (await self.llm.torpor.call("freeze"))["sent"]
        if not asleep:
            await self.llm.torpor.call("unfreeze")
        return unfinished


@pytest.mark.slow
@pytest.mark.gpu_path
@pytest.mark.parametrize("sessions", [False, True], ids=["alone", "with sessions"])
def test_a_pause_is_over_when_its_requests_have_ended_whatever_comes_in_between(
    zygote, tiny_model, tmp_path, monkeypatch, sessions
):
    vllm.envs.disable_envs_cache()  # an engine in this process has switched it on
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    asyncio.run(_pauses(zygote, tiny_model, tmp_path, sessions))


async def stood_still(llm) -> int:
    """Sleep beside checkpoints. Between its freeze and its sleep no other call may let the engine go on. Return how
    often that was looked at."""
    looked = 0
    stock = frontend.caught_up

    async def caught_up(side, sent) -> None:
        nonlocal looked
        if asyncio.current_task() is sleep:
            for _ in range(40):
                assert await side.call("is_quiet")
                looked += 1
                await asyncio.sleep(0.005)
        await stock(side, sent)

    async def checkpoints() -> None:
        while not sleep.done():
            await llm.checkpoint()

    frontend.caught_up = caught_up
    try:
        sleep = asyncio.create_task(llm.sleep(level=1, preserve_state=True))
        beside = asyncio.create_task(checkpoints())
        await sleep
    finally:
        frontend.caught_up = stock
        beside.cancel()
        with contextlib.suppress(asyncio.CancelledError, Error):  # of an engine that is asleep
            await beside
    return looked


async def waits_for_whole_weights(engine, expected: list) -> None:
    """An awake engine runs no request in an update of its weights, nor after one that has failed."""

    async def asked() -> list[asyncio.Task]:
        readers = engine.ask()
        for _ in range(50):
            await engine.llm.is_sleeping()  # the engine core answers between steps
        assert not any(engine.tokens.values())
        return readers

    async with engine.llm.updating_weights():
        readers = await asked()
    assert await asyncio.gather(*readers) == expected
    with contextlib.suppress(ZeroDivisionError):
        async with engine.llm.updating_weights():
            raise ZeroDivisionError
    readers = await asked()
    async with engine.llm.updating_weights():
        pass
    assert await asyncio.gather(*readers) == expected


async def comes_behind_the_freeze(engine) -> None:
    """A request is sent when the engine core has been asked to stand still, and has not answered yet."""
    stock, readers = frontend._freeze, []

    async def freeze(side, values):
        frozen = asyncio.create_task(stock(side, values))
        await asyncio.sleep(0)
        readers.extend(engine.ask())
        await asyncio.sleep(0)
        return await frozen

    frontend._freeze = freeze
    try:
        report = await engine.llm.checkpoint()
    finally:
        frontend._freeze = stock
    assert report.seconds < 20  # not as long as outputs are waited for
    await asyncio.gather(*readers)


async def _pauses(zygote, model, directory, sessions: bool) -> None:
    with zygote.spawning():
        engine = Engine(model, directory, sessions)
    llm = engine.llm
    expected = await asyncio.gather(*engine.ask())

    async def ends_whole(readers, paused) -> None:
        assert await paused == {}, "the pause was over before its requests were"
        assert await asyncio.gather(*readers) == expected and await llm.is_paused()
        await llm.resume_generation()
        assert not await llm.is_paused()

    readers = await engine.begun()
    paused = await engine.pause("wait")
    await llm.checkpoint()
    assert not paused.done() or all(reader.done() for reader in readers)
    await ends_whole(readers, paused)

    readers = await engine.begun()
    paused = await engine.pause("wait")
    await llm.sleep(level=1, preserve_state=True)
    during = asyncio.create_task(engine.paused("wait"))  # of an engine that is asleep already
    assert await llm.is_sleeping() and await llm.is_paused() and not paused.done()
    await llm.wake_up()
    assert await during == {}
    await ends_whole(readers, paused)

    readers = await engine.begun()
    await llm.sleep(level=1, preserve_state=True)
    kept = await engine.paused("keep", clear_cache=False)
    assert kept.keys() == llm.output_processor.request_states.keys()
    await llm.wake_up()
    assert await llm.is_paused() and not any(reader.done() for reader in readers)
    paused = asyncio.create_task(engine.paused("wait"))  # from here on they may end
    await ends_whole(readers, paused)

    await comes_behind_the_freeze(engine)
    await waits_for_whole_weights(engine, expected)

    readers = await engine.begun()
    assert await stood_still(llm) > 10
    await llm.wake_up()
    assert await asyncio.gather(*readers) == expected

    readers = await engine.begun()
    await llm.sleep(level=1, preserve_state=True)
    waits = asyncio.create_task(engine.paused("wait"))
    await llm.is_sleeping()  # the engine core has the pause
    assert await engine.paused("abort") == {}, "no request is left"
    assert await waits == {}
    await llm.wake_up()
    assert await llm.is_paused()
    for reader, whole in zip(readers, expected, strict=True):
        tokens = await reader
        assert tokens == whole[: len(tokens)] and len(tokens) < LONG
    await llm.resume_generation()
    assert await asyncio.gather(*engine.ask()) == expected
    llm.shutdown()
