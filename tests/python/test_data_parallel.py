"""Data parallel engines behind one AsyncLLM: each has requests of its own; they sleep and are checkpointed together."""

import asyncio
import json
import os

import pytest
import rig
from conftest import ENGINE
from requests_of_tests import REQUESTS
from test_other_processes import LONG, in_other_processes  # noqa: F401
from vllm import SamplingParams

NAMES = ["greedy", "seeded", "prefix-a", "penalties", "two", "long-seeded"]


def make(model, directory, **options):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(model), additional_config={"torpor": {"dir": str(directory)}}, disable_log_stats=True,
        data_parallel_size=2, **(ENGINE | options),
    )  # fmt: skip
    return AsyncLLM.from_engine_args(arguments)


async def read(stream, into: dict) -> None:
    async for output in stream:
        for choice in output.outputs:
            tokens, _ = into.get(choice.index, ([], ""))
            assert len(choice.token_ids) > len(tokens) or output.finished, "a token came twice"
            into[choice.index] = (list(choice.token_ids), choice.text)


def ask(engine, into: dict) -> list:
    """All requests, each on a rank of its own choice; the choices of one prompt on both."""
    tasks = []
    for number, name in enumerate(NAMES):
        prompt, params = REQUESTS[name]
        params = params.clone()
        params.max_tokens = LONG
        into[name] = {}
        rank = None if params.n > 1 else number % 2
        stream = engine.generate(prompt, params, name, data_parallel_rank=rank)
        tasks.append(asyncio.create_task(read(stream, into[name])))
    return tasks


async def some_tokens(into: dict, count: int = 8) -> None:
    while not all(choices and all(len(tokens) >= count for tokens, _ in choices.values()) for choices in into.values()):
        await asyncio.sleep(0.002)


def checkpoints(directory) -> dict[str, list[str]]:
    places = {"": directory} | {name: directory / name for name in ("rank-0-of-2", "rank-1-of-2")}
    return {n: sorted(e.name for e in p.glob("g-*")) for n, p in places.items() if p.is_dir()}


@pytest.mark.slow
@pytest.mark.rig
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
    assert (await engine.torpor("state"))["recomputed_tokens"] == 0

    # One of them cannot: none sleeps.
    answers = {}
    readers = ask(engine, answers)
    special = SamplingParams(max_tokens=LONG, temperature=0, ignore_eos=True, extra_args={"x": 1})
    readers.append(asyncio.create_task(read(engine.generate("a b", special, "special", data_parallel_rank=1), {})))
    await some_tokens(answers)
    with pytest.raises(errors.Unsupported, match="data parallel rank 1.*extra_args") as caught:
        await engine.sleep(level=1, preserve_state=True, to="disk")
    assert not caught.value.state_changed and not await engine.is_sleeping()
    assert not any(checkpoints(directory).values())
    await asyncio.gather(*readers)
    assert answers == expected

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
    await some_tokens(answers)
    report = await engine.sleep(level=1, preserve_state=True, to="disk")
    assert checkpoints(directory) == dict.fromkeys(("", "rank-0-of-2", "rank-1-of-2"), ["g-000001", "g-000002"])
    assert report.checkpoint == str(directory / "g-000002")
    for reader in readers:
        reader.cancel()
    engine.shutdown()

    with zygote.spawning():
        engine = make(model, directory)
    ours, others = directory / "rank-1-of-2" / "g-000002", directory / "rank-0-of-2" / "g-000002"
    os.rename(ours, directory / "aside")
    with pytest.raises(errors.NotFound, match="rank 1's checkpoint .* is missing"):
        await engine.wake_up(from_checkpoint=report.checkpoint)
    os.rename(others, ours)
    os.rename(directory / "aside", others)
    with pytest.raises(errors.Incompatible, match="rank 0's checkpoint .* not the one"):
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
    ranks = {name: client.core_engines.index(e) for name, e in client.reqs_in_flight.items()}
    assert sorted(ranks.values()) == sorted(client.core_engines.index(e) for e in client.reqs_in_flight.values())
    assert sum(client.engine_inflight.values()) == report.requests
    await engine.abort("long-seeded")  # goes to the engine that has it
    assert (await engine.torpor("plan_sleep", {"level": 0}))["requests"] <= report.requests - 1
    for name in NAMES[:-1]:
        await read(attach(engine, name), answers[name])
        assert answers[name] == expected[name], name
    again: dict = {}
    await asyncio.gather(*ask(engine, again))
    assert again == expected
    assert sum(client.engine_inflight.values()) == 0 and not client.reqs_in_flight
    engine.shutdown()
