# SPDX-License-Identifier: Apache-2.0
"""Data parallel engines behind one AsyncLLM: each has requests of its own; they sleep and are checkpointed together."""

import asyncio
import json
import os

import pytest
import gpu_path
from conftest import ENGINE, long_on_gpu_path, without_weights
from grouped_models import experts
from requests_of_tests import REQUESTS
from test_other_processes import in_other_processes  # noqa: F401
from vllm import SamplingParams

NAMES = ["greedy", "seeded", "prefix-a", "penalties", "two", "long-seeded"]
TOKENS = (
    60 if gpu_path.active() else 150
)  # the engine cores run ahead of the readers, and must not be done before they sleep


def make(model, directory, **options):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(model), additional_config={"torpor": {"checkpoint_dir": str(directory)}}, disable_log_stats=True,
        data_parallel_size=2, **(ENGINE | options),
    )  # fmt: skip
    return AsyncLLM.from_engine_args(arguments)


async def read(stream, into: dict) -> None:
    async for output in stream:
        for choice in output.outputs:
            tokens, _ = into.get(choice.index, ([], ""))
            assert len(choice.token_ids) > len(tokens) or choice.finished(), "a token came twice"
            into[choice.index] = (list(choice.token_ids), choice.text)


def ask(engine, into: dict, only: int | None = None) -> list:
    """All requests, each on a rank of its own choice, or those of one rank; the choices of one prompt on both."""
    tasks = []
    for number, name in enumerate(NAMES):
        if only is not None and (number % 2 != only or name == "two"):
            continue
        prompt, params = REQUESTS[name]
        params = params.clone()
        params.max_tokens = TOKENS
        into[name] = {}
        rank = None if params.n > 1 else number % 2
        stream = engine.generate(prompt, params, name, data_parallel_rank=rank)
        tasks.append(asyncio.create_task(read(stream, into[name])))
    return tasks


async def some_tokens(into: dict, count: int = 4) -> None:
    while not all(choices and all(len(tokens) >= count for tokens, _ in choices.values()) for choices in into.values()):
        await asyncio.sleep(0.002)


def checkpoints(directory) -> dict[str, list[str]]:
    places = {"": directory} | {name: directory / name for name in ("rank-0-of-2", "rank-1-of-2")}
    return {n: sorted(e.name for e in p.glob("g-*")) for n, p in places.items() if p.is_dir()}


@pytest.mark.feature("data parallel ranks", "in process", "new process")
@pytest.mark.slow
@pytest.mark.gpu_path
@long_on_gpu_path
def test_all_ranks_sleep_or_none_and_a_checkpoint_is_of_all_of_them(
    in_other_processes, zygote, tiny_model, tmp_path, monkeypatch  # noqa: F811
):  # fmt: skip
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    asyncio.run(_all_or_none(zygote, tiny_model, tmp_path))


async def _all_or_none(zygote, model, directory) -> None:
    from torpor import errors
    from torpor.vllm import attach

    with zygote.spawning():
        engine = make(model, directory)
    expected: dict = {}
    await asyncio.gather(*ask(engine, expected))

    # To host, in the same process.
    answers: dict = {}
    readers = ask(engine, answers)
    await some_tokens(answers)
    report = await engine.sleep(level=1, preserve_state=True)
    assert report.changed and await engine.is_sleeping() and report.requests == 7
    assert len(report.ledgers) == 2 and all(ledger["device_physical_bytes"] == 0 for ledger in report.ledgers)
    frozen = json.dumps(answers)
    await asyncio.sleep(0.2)
    assert json.dumps(answers) == frozen, "a token came while the engines slept"
    assert await engine.wake_up()
    await asyncio.gather(*readers)
    assert answers == expected
    assert (await engine.torpor.state()).recomputed_tokens == 0

    # One of them cannot write its checkpoint: the other's goes again.
    os.rename(directory / "rank-1-of-2", directory / "aside") if (directory / "rank-1-of-2").exists() else None
    (directory / "rank-1-of-2").write_text("in the way")
    answers = {}
    readers = ask(engine, answers)
    await some_tokens(answers)
    for call in (engine.sleep(level=1, preserve_state=True, to="disk"), engine.checkpoint()):
        with pytest.raises(errors.Error, match="data parallel rank 1"):
            await call
        assert not any(checkpoints(directory).values()) and not await engine.is_sleeping()
    (directory / "rank-1-of-2").unlink()

    # A checkpoint while serving, then one of a sleep, and new engines.
    first = (await engine.checkpoint()).checkpoint
    assert first == str(directory / "g-000001")
    await asyncio.gather(*readers)
    assert answers == expected
    answers = {}
    readers = ask(engine, answers)
    endless = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
    readers.append(asyncio.create_task(read(engine.generate("Hi", endless, "endless", data_parallel_rank=1), {})))
    await some_tokens(answers)
    report = await engine.sleep(level=1, preserve_state=True, to="disk")
    assert checkpoints(directory) == {rank: ["g-000001", "g-000002"] for rank in ("", "rank-0-of-2", "rank-1-of-2")}
    assert report.checkpoint == str(directory / "g-000002")
    await asyncio.sleep(0.2)  # readers get what came before the sleep
    for reader in readers:
        reader.cancel()
    going_on = [name for name in NAMES if answers[name] != expected[name]]
    assert len(going_on) > 1, "the sleep came too late to show anything"
    engine.shutdown()

    with zygote.spawning():  # each fills its weights from its own checkpoint of the set
        if gpu_path.pretends_cuda():  # load_format="torpor" is refused there
            engine = make(model, directory)
        else:
            engine = make(without_weights(model, directory.parent / "bare"), directory, load_format="torpor")
    ours, others = directory / "rank-1-of-2" / "g-000002", directory / "rank-0-of-2" / "g-000002"
    os.rename(ours, directory / "aside")
    with pytest.raises(errors.NotFound, match=r"rank 1's checkpoint .* is missing"):
        await engine.wake_up(from_checkpoint=report.checkpoint)
    os.rename(others, ours)
    os.rename(directory / "aside", others)
    with pytest.raises(errors.Incompatible, match=r"rank 0's checkpoint .* not the one"):
        await engine.wake_up(from_checkpoint=report.checkpoint)
    os.rename(others, directory / "aside")
    os.rename(ours, others)
    os.rename(directory / "aside", ours)
    with pytest.raises(errors.Incompatible, match="one engine"):
        await engine.wake_up(from_checkpoint=others)
    os.rename(ours / "chunks-r0", directory / "aside")
    with pytest.raises(errors.Error, match="data parallel rank 1"):  # the other one had restored its requests
        await engine.wake_up(from_checkpoint=directory)
    os.rename(directory / "aside", ours / "chunks-r0")
    woken = await engine.wake_up(from_checkpoint=directory)
    assert woken.requests == report.requests and woken.failed_requests == []
    client = engine.engine_core
    assert sum(client.engine_inflight.values()) == report.requests == len(client.reqs_in_flight)
    await engine.abort("endless")  # goes to the engine that has it
    for name in going_on:
        await read(attach(engine, name), answers[name])
        assert answers[name] == expected[name], name
    for _ in range(20):  # long before it would have had its tokens
        if (left := (await engine.torpor.call("plan_sleep", {"level": 0}))["requests"]) == 0:
            break
        await asyncio.sleep(0.05)
    assert left == 0
    again: dict = {}
    await asyncio.gather(*ask(engine, again))
    assert again == expected
    assert sum(client.engine_inflight.values()) == 0 and not client.reqs_in_flight
    engine.shutdown()


# --- with experts -----------------------------------------------------------------------------------------------------

if gpu_path.active():  # vLLM's communicator for CPUs lacks what it needs; the GPU path has it

    @pytest.mark.feature("data parallel ranks with experts", "in process", "new process")
    @pytest.mark.slow
    @pytest.mark.gpu_path
    @pytest.mark.long
    def test_ranks_that_compute_for_each_other_stop_together(
        in_other_processes, zygote, tmp_path, monkeypatch
    ):  # fmt: skip
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        asyncio.run(_with_experts(zygote, experts(tmp_path / "model"), tmp_path / "store"))


async def _with_experts(zygote, model, directory) -> None:
    """As long as one rank has requests, the other one computes empty batches for it."""
    from torpor import errors
    from torpor.vllm import attach

    with zygote.spawning():
        engine = make(model, directory)
    expected: dict = {}
    await asyncio.gather(*ask(engine, expected))
    for only in (None, 0, 1):  # both have requests, or one of them
        answers: dict = {}
        readers = ask(engine, answers, only)
        await some_tokens(answers)
        report = await engine.sleep(level=1, preserve_state=True)
        assert report.changed and all(ledger["device_physical_bytes"] == 0 for ledger in report.ledgers)
        frozen = json.dumps(answers)
        await asyncio.sleep(0.2)
        assert json.dumps(answers) == frozen
        late: dict = {}
        later = ask(engine, late, 0) if only is None else []  # it comes while they sleep, and waits
        assert await engine.wake_up()
        await asyncio.gather(*readers, *later)
        assert answers == {name: expected[name] for name in answers}
        assert late == {name: expected[name] for name in late}
    assert (await engine.torpor.state()).recomputed_tokens == 0

    answers = {}
    readers = ask(engine, answers)
    await some_tokens(answers)
    directory.mkdir(exist_ok=True)
    (directory / "rank-1-of-2").write_text("in the way")
    with pytest.raises(errors.Error, match="data parallel rank 1"):
        await engine.sleep(level=1, preserve_state=True, to="disk")
    (directory / "rank-1-of-2").unlink()
    await engine.checkpoint()
    await asyncio.gather(*readers)  # they went on after both
    assert answers == expected
    assert (await engine.sleep(level=0)).changed and await engine.wake_up()
    for mode in ("keep", "abort"):  # without preserve_state: computed again, or ended
        answers = {}
        readers = ask(engine, answers)
        await some_tokens(answers)
        report = await engine.sleep(level=1, mode=mode)
        assert all(ledger["device_physical_bytes"] == 0 for ledger in report.ledgers)
        await asyncio.sleep(0.1)  # empty batches would need the memory that is gone
        assert await engine.wake_up()
        await asyncio.gather(*readers)
        assert mode == "abort" or answers == expected

    answers = {}
    readers = ask(engine, answers)
    await some_tokens(answers)
    report = await engine.sleep(level=1, preserve_state=True, to="disk")
    await asyncio.sleep(0.2)  # readers get what came before the sleep
    for reader in readers:
        reader.cancel()
    going_on = [name for name in NAMES if answers[name] != expected[name]]
    assert len(going_on) > 1, "the sleep came too late to show anything"
    engine.shutdown()
    with zygote.spawning():
        engine = make(model, directory)
    woken = await engine.wake_up(from_checkpoint=report.checkpoint)
    assert woken.requests == report.requests and woken.failed_requests == []
    for name in going_on:
        await read(attach(engine, name), answers[name])
        assert answers[name] == expected[name], name
    again: dict = {}
    await asyncio.gather(*ask(engine, again))
    assert again == expected
    engine.shutdown()


# --- without engines: what is asked of them, and in which order -------------------------------------------------------


@pytest.fixture(params=[False], ids=[""])
def ranks(request, tmp_path, monkeypatch):
    """Ranks over two such cores; what becomes of their set of checkpoints is in `ranks.sets`. True: with experts."""
    from types import SimpleNamespace

    from made_up_ranks import Client

    from torpor import _core
    from torpor.vllm.data_parallel import Ranks

    client = Client(tmp_path)
    config = SimpleNamespace(
        additional_config={"torpor": {"checkpoint_dir": str(tmp_path)}},
        parallel_config=SimpleNamespace(data_parallel_size=2),
        model_config=SimpleNamespace(is_moe=request.param),
    )
    made = Ranks(client, config)
    made.cores, made.sets = client.cores, []

    class Set:
        path = str(tmp_path / "g-000001")

        def keep(self):
            made.sets.append("kept")

        def withdraw(self):
            if (error := client.cores[0].errors.get("withdraw")) is not None:
                raise error
            made.sets.append("withdrawn")

    def commit_set(directory, paths, options):
        assert (directory, paths) == (str(tmp_path), [str(core.path) for core in client.cores])
        made.sets.append("committed")
        if (error := client.cores[0].errors.get("commit_set")) is not None:
            raise error
        return Set()

    monkeypatch.setattr(_core, "commit_set", commit_set)
    return made


TO_DISK = {"level": 1, "preserve_state": True, "to": "disk", "in_flight": "freeze", "on_save_error": "abort"}


def test_memory_goes_once_all_ranks_have_kept_theirs(ranks):
    report = asyncio.run(ranks.call("sleep", TO_DISK))
    assert [core.asked for core in ranks.cores] == [["sleep", ("end_sleep", True)]] * 2
    assert ranks.sets == ["committed", "kept"]
    assert report["checkpoint"].endswith("g-000001") and report["requests"] == 4 and report["freed_bytes"] == 14
    assert report["changed"] and len(report["ledgers"]) == 2


def test_one_that_cannot_keep_it_leaves_the_others_awake(ranks):
    from torpor import errors

    ranks.cores[1].errors["sleep"] = errors.NotEnoughRoom("the disk is full", "free some")
    with pytest.raises(errors.NotEnoughRoom, match="data parallel rank 1: the disk is full") as caught:
        asyncio.run(ranks.call("sleep", TO_DISK))
    assert not caught.value.state_changed
    assert [core.asked for core in ranks.cores] == [["sleep", ("end_sleep", False)], ["sleep"]] and ranks.sets == []


def test_a_set_that_cannot_be_written_leaves_all_awake(ranks):
    from torpor import errors

    ranks.cores[0].errors["commit_set"] = errors.FileError("no")
    with pytest.raises(errors.FileError):
        asyncio.run(ranks.call("sleep", TO_DISK))
    assert [core.asked for core in ranks.cores] == [["sleep", ("end_sleep", False)]] * 2


def test_one_that_cannot_write_the_set_discards_it_if_it_may(ranks):
    from torpor import errors

    ranks.cores[0].errors["commit_set"] = errors.FileError("the disk is full")
    report = asyncio.run(ranks.call("sleep", TO_DISK | {"on_save_error": "discard"}))
    assert [core.asked for core in ranks.cores] == [["sleep", ("end_sleep", True)]] * 2 and ranks.sets == ["committed"]
    assert report["changed"] and report["requests"] == 4 and report["note"].endswith("wake them: the disk is full")
    assert (report["to"], report["checkpoint"], report["checkpoint_bytes"]) == ("host", "", 0)
    assert asyncio.run(ranks.call("state", {}))["checkpoint"] == ""
    with pytest.raises(errors.FileError):
        asyncio.run(ranks.call("checkpoint", {"to": "disk"}))  # nothing would be left of it


def test_the_checkpoint_of_a_sleep_is_that_of_all_ranks(ranks, tmp_path):
    asyncio.run(ranks.call("sleep", TO_DISK))
    asyncio.run(ranks.call("checkpoint", {"to": "disk"}))
    assert asyncio.run(ranks.call("state", {}))["checkpoint"] == str(tmp_path / "g-000001")


def test_a_report_of_ranks_has_what_is_bound_on_each_and_the_longest_stop(ranks):
    for rank, core in enumerate(ranks.cores):
        core.reports["end_sleep", True] = {
            "bound_requests": [rank], "began": 5.0 - rank, "seconds": 1.0 + rank, "pause_seconds": 4.0 - rank,
            "preserve_state": rank == 0,
        }  # fmt: skip
    report = asyncio.run(ranks.call("checkpoint", {"to": "disk"}))
    assert (report["bound_requests"], report["began"], report["pause_seconds"]) == ([0, 1], 4.0, 4.0)
    assert not report["preserve_state"]


def test_ranks_look_at_their_directory_one_after_another(ranks):
    async def looks():
        ranks.cores[0].slow.clear()
        looking = asyncio.create_task(ranks.call("check_directory", {}))
        await asyncio.sleep(0.01)
        assert [core.asked for core in ranks.cores] == [["check_directory"], []]
        ranks.cores[0].slow.set()
        await looking

    asyncio.run(looks())
    assert ranks.cores[1].asked == ["check_directory"]


def test_a_wake_succeeds_whose_checkpoint_cannot_be_marked_and_failed_requests_do_not_run(
    ranks, tmp_path, monkeypatch
):  # fmt: skip
    from torpor import _core, errors
    from torpor.vllm import data_parallel

    members = [str(core.path) for core in ranks.cores]
    found = {"path": str(tmp_path / "g-000001"), "directory": str(tmp_path), "generation": 1, "members": members}
    monkeypatch.setattr(_core, "open_set", lambda *_: found)

    def busy(*_) -> None:
        raise errors.Busy("another process is using it")

    monkeypatch.setattr(_core, "set_woken_from", busy)
    said: list[str] = []
    monkeypatch.setattr(data_parallel.logger, "warning", lambda text, *values: said.append(text % values))
    for core, ids in zip(ranks.cores, ("ab", "cd"), strict=True):
        failed = [{"id": ids[1], "error": "no"}]
        core.reports["wake_up"] = {
            "outputs": {"requests": [{"id": each} for each in ids], "parents": []}, "failed_requests": failed,
        }  # fmt: skip
    client = ranks._client

    async def ends_at_once(*asked) -> list:
        if asked[0] == "end_hold":
            engine = client.reqs_in_flight.pop("c")
            client.engine_inflight[engine] -= 1
        return await stock(*asked)

    stock, ranks._ask = ranks._ask, ends_at_once
    asyncio.run(ranks.call("wake_up", {"from_checkpoint": found["path"], "hold": True, "on_restore_error": "abort"}))
    asyncio.run(ranks.call("end_hold", {"keep": True}))
    assert client.reqs_in_flight == {"a": b"\0\0"} and client.engine_inflight == {b"\0\0": 1, b"\1\0": 0}
    assert said == [f"all ranks go on from {found['path']}; after the wake: another process is using it"]


@pytest.mark.parametrize("kv", ["abort", "keep"])
def test_answers_that_one_rank_has_aborted_are_in_the_report_of_the_wake_that_succeeds(ranks, kv):
    from types import SimpleNamespace

    from torpor import errors
    from torpor.vllm import frontend

    def answered(name: str, tokens: list[int]) -> SimpleNamespace:
        return SimpleNamespace(
            external_req_id=name, request_index=0, prompt_token_ids=[1],
            detokenizer=SimpleNamespace(output_token_ids=tokens, num_output_tokens=lambda: len(tokens)),
        )  # fmt: skip

    async def nothing() -> None:
        pass

    states = {"a-1": answered("a", [2, 3]), "b-1": answered("b", [4])}
    engine = SimpleNamespace(
        engine_core=ranks._client, torpor_ranks=ranks, logger_manager=None,
        output_processor=SimpleNamespace(request_states=states),
        renderer=SimpleNamespace(mm_processor_cache=None, clear_mm_cache_async=nothing),
    )  # fmt: skip
    for core, sent in zip(ranks.cores, ({"a-1": 2}, {"b-1": 1}), strict=True):
        core.asleep, core.sent = True, sent
    side = frontend.AsyncSide(engine)
    ranks.cores[1].errors["wake_up"] = errors.NotEnoughRoom("no memory", "free some")
    with pytest.raises(errors.NotEnoughRoom):
        asyncio.run(frontend.wake_up(side, {"kv": "abort"}))
    del ranks.cores[1].errors["wake_up"], states["a-1"]
    states["new"], ranks.cores[0].sent = answered("new", []), {"new": 0}  # it runs on the rank that is awake
    report = asyncio.run(frontend.wake_up(side, {"kv": kv}))
    aborted = {each["request_id"]: each["token_ids"] for each in report.aborted}
    assert aborted == {"a": [2, 3]} | ({"b": [4]} if kv == "abort" else {})
    assert "aborted" not in asyncio.run(frontend.wake_up(side, {"kv": "keep"}))


def test_engines_that_stand_still_are_awake_if_one_of_them_is(ranks):
    ranks.cores[0].stands = {"engine": "asleep", "level": 1, "sent": {"a": 3}}
    ranks.cores[1].stands["sent"] = {"b": 1}
    assert asyncio.run(ranks.call("freeze", {})) == {"engine": "awake", "level": -1, "sent": {"a": 3, "b": 1}}
    ranks.cores[1].stands |= {"engine": "asleep", "level": 2}
    assert asyncio.run(ranks.call("freeze", {}))["engine"] == "asleep"


def test_one_that_cannot_let_go_of_its_memory_wakes_the_others(ranks):
    from torpor import errors

    ranks.cores[0].errors["end_sleep", True] = errors.DeviceError("broken")
    with pytest.raises(errors.DeviceError, match=r"data parallel rank 0: broken$") as caught:
        asyncio.run(ranks.call("sleep", TO_DISK))
    assert not caught.value.state_changed
    assert ranks.cores[1].asked == ["sleep", ("end_sleep", True), "wake_up"]
    assert ranks.cores[0].asked == ["sleep", ("end_sleep", True)] and ranks.sets == ["committed", "withdrawn"]


WITHOUT_WEIGHTS = {"level": 2, "preserve_state": False, "in_flight": "abort", "on_save_error": "abort"}


def test_one_that_sleeps_without_its_weights_is_not_woken_when_another_cannot_sleep(ranks):
    from torpor import errors

    ranks.cores[0].errors["end_sleep", True] = errors.DeviceError("broken", "look at it", native=3)
    ranks.cores[1].reports["end_sleep", True] = {"reload": ["weights"], "requests": 0}
    with pytest.raises(errors.DeviceError) as caught:
        asyncio.run(ranks.call("sleep", WITHOUT_WEIGHTS))
    assert ranks.cores[1].asked == ["sleep", ("end_sleep", True)]
    assert caught.value.what == "data parallel rank 0: broken; data parallel rank 1 sleeps without weights"
    assert caught.value.next_step == "look at it; call wake_up(tags=['weights']), load weights, then call wake_up()"
    assert caught.value.state_changed and caught.value.native == 3
    asyncio.run(ranks.call("wake_up", {}))
    assert not ranks.cores[1].others_wait
    ranks.cores[1].reports["end_sleep", True] = {"reload": ["weights"]}
    with pytest.raises(errors.DeviceError, match="; data parallel rank 1 has ended its requests"):
        asyncio.run(ranks.call("sleep", WITHOUT_WEIGHTS))
    asyncio.run(ranks.call("wake_up", {}))
    assert ranks.cores[1].others_wait


@pytest.mark.parametrize(
    ("report", "options", "said", "next_step"),
    [
        ({"reload": ["weights"]}, {}, "rank 1 woke without weights", "call wake_up(tags=['weights']),"),
        ({"fully_awake": False, "note": "waits"}, {}, "rank 1 is not fully awake (waits)", "call wake_up()"),
        (None, {}, "rank 1 was not woken (data parallel rank 1: no memory (free some))", "call wake_up()"),
        ({}, {"in_flight": "abort"}, "rank 1 has ended its requests", ""),
        ({}, {"in_flight": "recompute"}, "rank 1 computes its requests again", ""),
    ],
)  # fmt: skip
def test_a_sleep_that_one_cannot_do_says_what_is_not_as_before(ranks, report, options, said, next_step):
    from torpor import errors

    ranks.cores[0].errors["end_sleep", True] = errors.DeviceError("broken")
    if report is None:
        ranks.cores[1].errors["wake_up"] = errors.NotEnoughRoom("no memory", "free some")
    else:
        ranks.cores[1].reports["wake_up"] = report
    with pytest.raises(errors.DeviceError) as caught:
        asyncio.run(ranks.call("sleep", TO_DISK | ({"preserve_state": False} | options if options else {})))
    assert caught.value.what == f"data parallel rank 0: broken; data parallel {said}" and caught.value.state_changed
    assert caught.value.next_step.startswith(next_step) and bool(caught.value.next_step) == bool(next_step)
    assert ranks.cores[1].asked[-1] == "wake_up"


def test_a_checkpoint_that_one_cannot_end_wakes_nobody(ranks):
    from torpor import errors

    ranks.cores[0].errors["end_sleep", True] = errors.DeviceError("broken")
    with pytest.raises(errors.DeviceError, match=r"data parallel rank 0: broken$"):
        asyncio.run(ranks.call("checkpoint", {"to": "disk"}))
    assert ranks.cores[1].asked == ["checkpoint", ("end_sleep", True)] and ranks.sets == ["committed", "withdrawn"]


@pytest.mark.parametrize("method", ["sleep", "checkpoint"])
def test_a_set_that_cannot_be_removed_hides_no_error_and_leaves_no_rank_asleep(ranks, method, tmp_path):
    from torpor import errors

    ranks.cores[0].errors |= {
        ("end_sleep", True): errors.DeviceError("broken", native=3), "withdraw": errors.FileError("no such host"),
    }  # fmt: skip
    with pytest.raises(errors.DeviceError) as caught:
        asyncio.run(ranks.call(method, TO_DISK if method == "sleep" else {"to": "disk"}))
    left = f"its checkpoint may be left at {tmp_path}/g-000001"
    assert caught.value.what == f"data parallel rank 0: broken; {left}"
    assert caught.value.native == 3 and caught.value.state_changed
    assert ranks.cores[1].asked == [method, ("end_sleep", True), *(["wake_up"] if method == "sleep" else [])]


def test_a_sleep_whose_caller_is_cancelled_goes_to_its_end(ranks):
    async def cancelled():
        ranks.cores[1].slow.clear()
        task = asyncio.create_task(ranks.call("sleep", TO_DISK))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        later = asyncio.create_task(ranks.call("unfreeze", {}))  # as its caller does then
        await asyncio.sleep(0.01)
        ranks.cores[1].slow.set()
        await later

    asyncio.run(cancelled())
    assert [core.asked for core in ranks.cores] == [["sleep", ("end_sleep", True), "unfreeze"]] * 2


with_experts = pytest.mark.parametrize("ranks", [True], indirect=True, ids=["experts"])


@with_experts
def test_ranks_with_experts_stand_before_one_sleeps_and_go_on_when_none_does(ranks):
    for core in ranks.cores:
        core.quiet = True
    asyncio.run(ranks.call("freeze", {}))
    asyncio.run(ranks.call("sleep", TO_DISK))
    asyncio.run(ranks.call("wake_up", {}))
    assert [core.asked for core in ranks.cores] == [
        ["stop_ranks", "freeze", "is_quiet", "sleep", ("end_sleep", True), "is_quiet", "wake_up", "is_quiet"]
    ] * 2
    ranks.cores[0].quiet = False  # one of them is still asleep
    asyncio.run(ranks.call("wake_up", {}))
    assert all("restart_ranks" not in core.asked for core in ranks.cores)
    ranks.cores[1].quiet = False
    asyncio.run(ranks.call("wake_up", {}))
    assert [core.asked[-3:] for core in ranks.cores] == [["wake_up", "is_quiet", "restart_ranks"]] * 2
    asyncio.run(ranks.call("freeze", {}))
    assert [core.asked[-4:] for core in ranks.cores] == [["stop_ranks", "freeze", "is_quiet", "restart_ranks"]] * 2


@with_experts
def test_a_part_of_the_ranks_with_experts_does_not_wait_for_the_others_to_stand(ranks):
    from torpor import errors

    ranks._parallel.data_parallel_size = 4
    for method in ("freeze", "sleep"):
        with pytest.raises(errors.Unsupported, match="2 of 4 ranks"):
            asyncio.run(ranks.call(method, TO_DISK))
    assert all("stop_ranks" not in core.asked for core in ranks.cores)
    assert asyncio.run(ranks.call("is_quiet", {})) is not None  # nothing waits for them


@with_experts
def test_ranks_with_experts_go_on_when_one_cannot_sleep(ranks):
    from torpor import errors

    ranks.cores[1].errors["sleep"] = errors.NotEnoughRoom("the disk is full", "free some")
    with pytest.raises(errors.NotEnoughRoom):
        asyncio.run(ranks.call("sleep", TO_DISK))
    assert [core.asked for core in ranks.cores] == [
        ["stop_ranks", "sleep", ("end_sleep", False), "is_quiet", "restart_ranks"],
        ["stop_ranks", "sleep", "is_quiet", "restart_ranks"],
    ]  # fmt: skip
    asyncio.run(ranks.call("drain", {}))
    assert ranks.cores[0].asked[-1] == "drain"  # what only runs on needs no rank to stop


def test_a_wake_that_fails_on_one_rank_says_which_are_awake(ranks):
    from torpor import errors

    ranks.cores[1].errors["wake_up"] = errors.NotEnoughRoom("no memory", "free some")
    with pytest.raises(errors.NotEnoughRoom, match="data parallel rank 1: no memory; awake: 0") as caught:
        asyncio.run(ranks.call("wake_up", {}))
    assert caught.value.state_changed


def test_no_rank_runs_while_another_one_waits_for_its_weights(ranks):
    for requests in (2, 0):
        ranks.cores[0].requests, ranks.cores[1].requests = 0, requests
        for call in ("sleep", "wake_up"):
            asyncio.run(ranks.call(call, {}))
        assert [core.others_wait for core in ranks.cores] == [requests > 0] * 2


def test_without_a_whole_set_a_wake_is_refused_or_wakes_without_it(ranks, tmp_path):
    from torpor import errors

    options = {"from_checkpoint": str(tmp_path), "hold": True, "on_restore_error": "abort"}
    with pytest.raises(errors.NotFound, match="no checkpoint"):
        asyncio.run(ranks.call("wake_up", options))
    report = asyncio.run(ranks.call("wake_up", options | {"on_restore_error": "discard"}))
    assert report["fully_awake"] and not report["changed"] and "no checkpoint" in report["note"]
    assert [core.asked for core in ranks.cores] == [[], []]
