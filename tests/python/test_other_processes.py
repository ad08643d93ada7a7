# SPDX-License-Identifier: Apache-2.0
"""Engine cores in other processes: LLM as it is by default, AsyncLLM with streaming readers, tensor parallel 2.

In tools/dev proof the first engine is started as vLLM does it, with a new interpreter; all other processes come from
the zygote (zygote.py), which saves the imports.
"""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import gpu_path
import vllm
from conftest import ENGINE, IN_PROOF, long_on_gpu_path, result_of, tags, without_weights
from inspector import look
from requests_of_tests import REQUESTS, add_requests, final, run
from suspend import suspend
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

import torpor.console
from torpor.errors import Aborted
from torpor.vllm import attach, frontend


HERE = Path(__file__).parent
LONG = 250  # tokens: the engine core runs ahead of its reader, and must not be done before it sleeps


@pytest.fixture
def in_other_processes(monkeypatch):
    vllm.envs.disable_envs_cache()  # an engine in this process has switched it on
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def start(model, directory, **options):
    from vllm import LLM

    return LLM(
        str(model),
        additional_config={"torpor": {"checkpoint_dir": str(directory), "retain_checkpoints": 100}},
        **(ENGINE | options),
    )


def stop(llm) -> None:
    llm.llm_engine.engine_core.shutdown()


def written(answers: dict) -> dict:
    """Tokens and text of finished answers. Log probabilities are left out: prompts arrive at other moments in each run,
    are cut into other chunks, and their last digits differ, with a sleep or without."""
    return {
        name: [completion[1:4] for completion in completions] for name, (_, completions, _) in final(answers).items()
    }


@contextlib.contextmanager
def _interrupted(engine):
    """By Ctrl-C, while the engine core has been told to stand still and has not answered."""
    (core,) = engine.engine_core.resources.engine_manager.processes

    def interrupt(*_) -> None:
        os.kill(core.pid, signal.SIGCONT)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    suspend(core.pid)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_an_engine_does_not_stand_still_for_a_sleep_that_was_interrupted(interruption):
    asked = []

    class Side:
        async def call(self, method: str, options: dict | None = None):
            asked.append(method)
            if method == "freeze":
                raise interruption

        async def clear_caches(self) -> None:
            pass

        def frozen_alone(self):
            return contextlib.nullcontext()

        def serves_meanwhile(self) -> bool:
            return True

        engine = SimpleNamespace(logger_manager=None)

    for method in (frontend.sleep(Side(), "abort", {"level": 1, "preserve_state": True}),
                   frontend.while_frozen(Side(), "checkpoint", {})):  # fmt: skip
        with pytest.raises(interruption):
            frontend.finish(method)
    assert asked == ["freeze", "unfreeze"] * 2


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_an_engine_does_not_hold_what_a_wake_restored_that_was_interrupted(interruption):
    asked = []

    class Side:
        async def call(self, method: str, options: dict | None = None):
            asked.append(method)
            if method == "wake_up":
                raise interruption

    with pytest.raises(interruption):
        frontend.finish(frontend._wake_up(Side(), {"from_checkpoint": "g-000001", "hold": True}))
    assert asked == ["wake_up", "end_hold"]


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_a_request_is_aborted_if_its_attached_reader_goes_away(how):
    collector = RequestOutputCollector(RequestOutputKind.CUMULATIVE, "known")
    aborted = []

    class Engine:
        torpor_collectors = {"known": collector}  # noqa: RUF012
        output_processor = SimpleNamespace(request_states={
            "known-1": SimpleNamespace(queue=collector, parent_req=None, request_id="known-1"),
            "0_several-2": SimpleNamespace(queue=collector, parent_req=SimpleNamespace(request_id="several-2")),
            "other-3": SimpleNamespace(queue=None),
        })  # fmt: skip

        async def abort(self, requests, internal=False):
            aborted.append((sorted(requests), internal))

    async def scene():
        stream = attach(Engine(), "known")
        collector.put(SimpleNamespace(finished=False))
        await anext(stream)
        if how == "closed":
            await stream.aclose()
            return
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    asyncio.run(scene())
    assert aborted == [(["known-1", "several-2"], True)]


@pytest.mark.longer
@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(1, marks=pytest.mark.long),
        pytest.param(2, marks=[pytest.mark.gpu_path, *(() if gpu_path.active() else [pytest.mark.long])]),
    ],
)
def test_sleeps_and_wakes_with_engine_and_workers_in_other_processes(
    in_other_processes, zygote, tiny_model, tmp_path, events_dir, monkeypatch, ranks
):  # fmt: skip
    if ranks == 2:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        monkeypatch.setenv("TORPOR_EVENTS_DIR", events_dir)
        monkeypatch.setenv("TORPOR_CONSOLE", "control")
    names = [
        name for name in REQUESTS if name not in ("unseeded", "bias", "prefix-b")
    ]  # their draws depend on the timing of arrivals
    with contextlib.nullcontext() if IN_PROOF and ranks == 1 else zygote.spawning():
        llm = start(tiny_model, tmp_path, tensor_parallel_size=ranks)
    try:
        add_requests(llm.llm_engine, names, LONG)
        expected = written(run(llm.llm_engine))
        assert set(expected) == set(names)
        llm.reset_prefix_cache()
        with _stopped_once(events_dir) if ranks == 2 else contextlib.nullcontext():
            add_requests(llm.llm_engine, names, LONG)
        answers = {}
        for to in ("host", "disk"):
            answers |= run(llm.llm_engine, 6)
            seen = []
            report = llm.sleep(level=1, preserve_state=True, to=to, progress=seen.append)
            assert report.changed and report.requests > 0 and len(report.ledgers) == ranks
            assert seen[-1].bytes_done == seen[-1].bytes_total == report.saved_bytes > 0
            assert all(ledger["device_physical_bytes"] == 0 for ledger in report.ledgers)
            answers |= run(llm.llm_engine, 1)  # what had arrived before it slept; the next one finds nothing
            assert run(llm.llm_engine, 1) == {}
            delivered = dict(answers)
            if ranks == 2 and to == "host":
                _ranks_asked(report, look("console", events_dir)["processes"])
            assert llm.wake_up()
        path = report.checkpoint
        assert written(answers | run(llm.llm_engine)) == expected
        assert llm.llm_engine.torpor.state().recomputed_tokens == 0
        if ranks == 1:  # vLLM's mode "wait": what runs ends before the sleep, what is queued runs after the wake
            llm.reset_prefix_cache()
            add_requests(llm.llm_engine, names, LONG)
            answers = run(llm.llm_engine, 10)
            with _interrupted(llm.llm_engine), pytest.raises(KeyboardInterrupt):
                llm.sleep(level=1, preserve_state=True)
            assert not llm.is_sleeping()
            answers |= run(llm.llm_engine, 10)
            report = llm.sleep(mode="wait")
            assert report.changed and llm.is_sleeping()
            answers |= run(llm.llm_engine, 1)  # what ended before it slept
            assert final(answers)
            assert llm.wake_up()
            assert written(answers | run(llm.llm_engine)) == expected
    finally:
        stop(llm)
    with zygote.spawning():
        how = {}
        if (
            ranks == 2 and not gpu_path.pretends_cuda()
        ):  # each rank fills its own weights from the checkpoint; not a GPU's
            tiny_model = without_weights(tiny_model, tmp_path / "model")
            how = {"load_format": "torpor"}
        llm = start(tiny_model, tmp_path, tensor_parallel_size=ranks, **how)
    try:
        report = llm.wake_up(from_checkpoint=path)
        assert report.requests > 0 and report.failed_requests == []
        assert written(delivered | run(llm.llm_engine)) == expected
        assert llm.llm_engine.torpor.state().recomputed_tokens == 0
    finally:
        stop(llm)


@pytest.mark.slow
@pytest.mark.long
def test_workers_that_refuse_a_call_leave_their_engine_as_it_was(
    in_other_processes, zygote, tiny_model, tmp_path, monkeypatch
):  # fmt: skip
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    names = ["greedy", "seeded"]
    with zygote.spawning():
        llm = start(tiny_model, tmp_path, tensor_parallel_size=2)
    try:
        add_requests(llm.llm_engine, names, LONG)
        expected = written(run(llm.llm_engine))
        llm.reset_prefix_cache()
        add_requests(llm.llm_engine, names, LONG)
        answers = run(llm.llm_engine, 6)
        llm.sleep(level=1, preserve_state=True)
        for _ in range(2):
            with pytest.raises(Exception, match="the weights are detached"):
                llm.collective_rpc("reload_weights")
        with pytest.raises(Exception, match="Worker failed with error"):
            llm.collective_rpc("no_such_method")
        assert llm.wake_up()
        assert written(answers | run(llm.llm_engine)) == expected
    finally:
        stop(llm)


@contextlib.contextmanager
def _stopped_once(events_dir):
    """A console stops the engine behind a request that decodes, lets it take a step, and lets it go."""
    with torpor.console.connect(events_dir) as engine:
        engine.add_breakpoint(type="slot", to="decoding", once=True, lease=300)
        yield
        began = time.monotonic()
        while not engine.stops()["stops"]:
            assert time.monotonic() - began < 300
            time.sleep(0.01)
        assert "decoding" in {slot["state"] for slot in engine.slots()["slots"]}
        assert all(slot["waiting_for"] == "the engine: stopped by a breakpoint" for slot in engine.slots()["slots"])
        engine.step()
        engine.resume()


def _ranks_asked(report, processes: list[dict]) -> None:
    """Each rank its copies and its memory, which the sleep's report adds up; the engine core the sleep."""
    ranks = [process for process in processes if process["memory"]]
    assert len(ranks) == len(report.ledgers) == 2
    saved = [sum(copy["bytes"] for copy in rank["copies"] if copy["job"] == "save") for rank in ranks]
    assert min(saved) > 0 and sum(saved) == report.saved_bytes
    assert all(memory["device_bytes"] == 0 for rank in ranks for memory in rank["memory"])
    [core] = [process for process in processes if process["operations"]]
    assert [operation["state"] for operation in core["operations"]] == ["done"] and core["engine"] == "asleep"


@pytest.mark.slow
@pytest.mark.gpu_path
@long_on_gpu_path
@pytest.mark.long
def test_streaming_readers_stay_connected_over_a_sleep_and_take_up_their_answers_after_a_restart(
    in_other_processes, zygote, tiny_model, tmp_path
):  # fmt: skip
    asyncio.run(_streaming(zygote, tiny_model, tmp_path))


async def _streaming(zygote, model, directory) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from torpor.errors import NotFound

    names = ["greedy", "seeded", "prefix-a", "stops", "long"]

    def make():
        torpor = {"torpor": {"checkpoint_dir": str(directory)}}
        options = ENGINE | {"worker_extension_cls": "deferred_by_hand.DeferredByHand"}
        arguments = AsyncEngineArgs(model=str(model), additional_config=torpor, disable_log_stats=True, **options)
        return AsyncLLM.from_engine_args(arguments)

    async def read(stream, into):
        async for output in stream:
            assert len(output.outputs[0].token_ids) > len(into[0]) or output.finished, "a token came twice"
            into[0], into[1] = list(output.outputs[0].token_ids), output.outputs[0].text

    async def ask(engine, into):
        tasks = []
        for name in names:
            prompt, params = REQUESTS[name]
            params = params.clone()
            params.max_tokens = LONG
            into[name] = [[], ""]
            tasks.append(asyncio.create_task(read(engine.generate(prompt, params, name), into[name])))
        return tasks

    async def some_tokens(into, count=8):
        while len(into["greedy"][0]) < count:
            await asyncio.sleep(0.002)

    with zygote.spawning():
        engine = make()
    expected: dict = {}
    await asyncio.gather(*await ask(engine, expected))

    async def ended(engine, name):
        into = [[], ""]
        await read(engine.generate(*REQUESTS[name], f"{name}-{len(answers)}"), into)
        return into

    answers: dict = {}
    of_cached = await ended(engine, "long-seeded")  # its blocks stay cached
    readers = await ask(engine, answers)
    await some_tokens(answers)
    with mock.patch.object(frontend, "call_async", wraps=frontend.call_async) as calls:
        report = await engine.sleep(level=1, preserve_state=True)
    assert [call.args[1] for call in calls.call_args_list] == ["freeze", "sleep"], "each more keeps its clients waiting"
    assert report.changed and await engine.is_sleeping()
    frozen = json.dumps(answers)
    await asyncio.sleep(0.2)
    assert json.dumps(answers) == frozen, "a token came while the engine slept"
    woken = await engine.wake_up(early=True)
    assert woken and woken.deferred_blocks > 8
    await some_tokens(answers, len(answers["greedy"][0]) + 4)
    assert (await engine.torpor.state()).deferred.pending == woken.deferred_blocks
    await engine.sleep(level=1, preserve_state=True)  # waits for what is left
    again = await engine.wake_up(early=True)
    assert again.deferred_blocks >= woken.deferred_blocks
    assert await ended(engine, "long-seeded") == of_cached
    late = (await engine.torpor.state()).deferred
    assert 4 < late.arrived < again.deferred_blocks and late.unreadable == 0 < late.pending
    so_far = len(answers["greedy"][0])
    given_up = asyncio.create_task(engine.checkpoint())
    await asyncio.sleep(0)  # its first order is sent
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    with pytest.raises(Aborted):
        await engine.checkpoint(progress=lambda progress: False)
    seen: list = []
    while_serving = await engine.checkpoint(progress=seen.append)  # the others are gone
    assert seen[-1].phase == "verify" and seen[-1].bytes_done == seen[-1].bytes_total >= while_serving.saved_bytes > 0
    assert while_serving.requests > 0 and Path(while_serving.checkpoint).is_dir()
    assert len(answers["greedy"][0]) > so_far, "it stood still until the checkpoint was written"
    report = await engine.sleep(level=1, preserve_state=True, to="disk")
    assert report.requests > 0 and report.checkpoint != while_serving.checkpoint
    path = report.checkpoint
    for reader in readers:
        reader.cancel()
    delivered = {name: list(value) for name, value in answers.items()}
    engine.shutdown()

    with zygote.spawning():
        engine = make()
    waking = asyncio.create_task(engine.wake_up(from_checkpoint=path))
    await asyncio.sleep(0)  # its order is sent
    waking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waking
    report = await engine.wake_up(from_checkpoint=path)  # what the cancelled one restored is gone
    assert report.requests == len([n for n in names if delivered[n] != expected[n]])
    for name in names:
        if delivered[name] == expected[name]:
            continue
        again = delivered[name]
        await read(attach(engine, name), again)
        assert again == expected[name], name
    with pytest.raises(NotFound, match="greedy"):
        await anext(attach(engine, "greedy"))

    answers = {}
    readers = await ask(engine, answers)
    await some_tokens(answers)
    await engine.sleep(level=0)
    async with engine.updating_weights(version="17"):
        await engine.collective_rpc("reload_weights")
    report = await engine.wake_up(kv="abort")
    await asyncio.gather(*readers)
    aborted = {each["request_id"]: each["token_ids"] for each in report.aborted}
    assert "greedy" in aborted and aborted == {name: answers[name][0] for name in aborted}
    assert await engine.get_weight_version() == "17" and not engine.output_processor.request_states
    engine.shutdown()


@pytest.mark.slow
def test_killed_while_it_falls_asleep_and_while_it_wakes_a_whole_checkpoint_is_left(zygote, tiny_model, tmp_path):
    """SIGKILL at some moments of a second sleep, and of a wake: the first checkpoint or the second can be woken.

    And the killed one's last words say what it was doing.
    """
    events = tempfile.TemporaryDirectory(dir="/dev/shm")

    def child(*arguments):
        return zygote.run(
            [HERE / "killed_process.py", tiny_model, *arguments],
            timeout=600,
            env=os.environ | {"TORPOR_EVENTS_DIR": events.name},
        )

    left_by = {"save": "g-000001", "verify": "g-000002", "restore": "g-000001"}
    for phase in left_by:
        done = child(phase, tmp_path / phase)
        assert done.returncode == -9, done.stdout[-2000:] + done.stderr[-2000:]
    _last_words_are_of(left_by, look("console", events.name)["processes"])
    done = child("wake", *(tmp_path / phase for phase in left_by))
    events.cleanup()
    assert result_of(done) == [{"identical": True, "checkpoint": name} for name in left_by.values()]


def _last_words_are_of(phases, processes: list[dict]) -> None:
    assert len(processes) == len(phases) and not any(
        process["alive"] or process["lost_events"] for process in processes
    )
    running = {}
    for process in processes:
        first, last = process["operations"][0], process["operations"][-1]
        assert (first["operation"], first["state"]) == ("sleep", "done")
        [phase] = [phase["phase"] for phase in last["phases"] if phase["state"] == "running"]
        assert last["state"] == "running" and last["operation"] == ("wake" if phase == "restore" else "sleep")
        running[phase] = process
        assert {tag["tag"] for rank in process["memory"] for tag in rank["tags"]} == tags("", "").keys()
    assert running.keys() == phases.keys()
    # The copies of the one that slept once are what the phase says.
    [saved] = [p["bytes"] for p in running["restore"]["operations"][0]["phases"] if p["phase"] == "save"]
    assert saved > 0 and saved == sum(copy["bytes"] for copy in running["restore"]["copies"] if copy["job"] == "save")
    assert any(slot["state"] == "decoding" for slot in running["save"]["slots"])
