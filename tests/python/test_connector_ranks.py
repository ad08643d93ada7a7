# SPDX-License-Identifier: Apache-2.0
"""The KV connector in data parallel engines: each rank has tiers of its own, and a directory of its own on disk."""

import asyncio
import os
import time
from pathlib import Path

import gpu_path
import pytest
from conftest import ENGINE as SHAPE
from connector_served import BLOCKS, CONVERSATIONS, prompts
from grouped_models import experts
from prometheus_client import REGISTRY
from test_connector import damage
from test_other_processes import in_other_processes  # noqa: F401
from vllm import SamplingParams
from zygote import MOST_SECONDS

from torpor.vllm.connector_options import ConnectorOptions, directory_of_rank

BLOCK = SHAPE["block_size"]  # tokens
RANKS = 2
TORPOR = {
    "offload": "eager",
    "host_bytes": "64MiB",
    "disk_bytes": "256MiB",
    "advanced": {"policy_timeout_ms": 1000 * MOST_SECONDS},  # a slow machine leaves no block out
}


def start(zygote, model, directory, torpor: dict, **options):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(model), additional_config={"torpor": {"checkpoint_dir": str(directory)} | torpor},
        data_parallel_size=RANKS, num_gpu_blocks_override=BLOCKS,
        **(SHAPE | {"max_model_len": 512, "disable_log_stats": True} | options),
    )  # fmt: skip
    with zygote.spawning():
        return AsyncLLM.from_engine_args(arguments)


async def ask(engine, name: str, prompt: str, rank: int, tokens: int) -> tuple[list[int], int]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    async for output in engine.generate(prompt, params, name, data_parallel_rank=rank):
        if output.finished:
            return list(output.outputs[0].token_ids), output.num_cached_tokens
    raise AssertionError(f"{name} did not end")


async def serve(engine, name: str, swapped: bool = False, tokens: int = 100) -> dict:
    """All prompts, each on its rank, or on the other one. The device has nothing of them at the beginning."""
    assert await engine.reset_prefix_cache()
    found = await asyncio.gather(*(
        ask(engine, f"{name} {number}", prompt, (number + swapped) % RANKS, tokens)
        for number, prompt in enumerate(prompts())
    ))  # fmt: skip
    cached = [sum(each for number, (_, each) in enumerate(found) if number % RANKS == rank) for rank in range(RANKS)]
    return {"tokens": [tokens for tokens, _ in found], "cached": cached}


async def abort_while_blocks_come(engine) -> None:
    assert await engine.reset_prefix_cache()
    names = [f"aborted {number}" for number in range(CONVERSATIONS)]
    asking = [
        asyncio.create_task(ask(engine, name, prompt, number % RANKS, 100))
        for number, (name, prompt) in enumerate(zip(names, prompts(), strict=True))
    ]
    for name in names:
        await asyncio.sleep(0.01)
        await engine.abort(name)
    await asyncio.gather(*asking)
    deadline = time.monotonic() + MOST_SECONDS
    while not await engine.reset_prefix_cache():  # what is loaded for an aborted request is freed when it has come
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def preemptions() -> float:
    """Return how many requests were preempted on all ranks, as the front end of this process has it."""
    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "vllm:num_preemptions_total"
    )


async def killed(engine) -> None:
    for process in engine.engine_core.resources.engine_manager.processes:
        process.kill()
        await asyncio.to_thread(process.join)
    engine.shutdown()
    for collector in list(REGISTRY._collector_to_names):  # so that another engine of this process can have its own
        if getattr(collector, "_name", "").startswith(("vllm:", "torpor_")):
            REGISTRY.unregister(collector)


@pytest.fixture
def model(request, tiny_model, tmp_path) -> Path:
    """Ranks with experts compute for each other. vLLM's communicator for CPUs lacks what they need; the GPU path has
    it."""
    return experts(tmp_path / "model") if gpu_path.active() else tiny_model


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.gpu_path
def test_each_rank_finds_its_own_blocks_again_after_a_kill(
    in_other_processes, zygote, model, tmp_path, monkeypatch  # noqa: F811
):  # fmt: skip
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    directory = tmp_path / "checkpoints"

    async def before() -> list[dict]:
        engine = start(zygote, model, directory, TORPOR, disable_log_stats=False)
        results = [await serve(engine, "cold")]
        assert preemptions() > 0
        assert (await engine.sleep(level=1, preserve_state=True)).changed  # what moves has ended
        assert await engine.wake_up()
        await abort_while_blocks_come(engine)
        results += [await serve(engine, "warm"), await serve(engine, "elsewhere", swapped=True)]
        assert (await engine.sleep(level=1, preserve_state=True)).changed
        await killed(engine)
        return results

    async def after() -> list[dict]:
        engine = start(zygote, model, directory, TORPOR)
        results = [await serve(engine, "found")]
        engine.shutdown()
        return results

    cold, warm, elsewhere = asyncio.run(before())
    assert cold["cached"] == elsewhere["cached"] == [0, 0]  # the other rank has none of them
    assert min(warm["cached"]) > CONVERSATIONS // RANKS * BLOCK
    stores = [directory / "offload/store/r0", directory / "offload/dp1/store/r0"]
    assert all(list(store.glob("seg-*")) for store in stores)
    (tmp_path / "second/checkpoints/offload").mkdir(parents=True)
    os.symlink(directory / "offload/dp1/store", tmp_path / "second/checkpoints/offload/store")
    assert damage(tmp_path / "second", every=60) > 1  # of the second rank
    [found] = asyncio.run(after())
    assert cold["tokens"] == warm["tokens"] == elsewhere["tokens"] == found["tokens"]
    assert found["cached"][0] > CONVERSATIONS // RANKS * BLOCK and found["cached"][1] < warm["cached"][1]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.gpu_path
@pytest.mark.parametrize("peer", ["Simple", "Offloading"])
def test_beside_vllms_own_connectors(
    in_other_processes, zygote, model, tmp_path, monkeypatch, peer  # noqa: F811
):  # fmt: skip
    """On the same requests: the same tokens, and as many or more of them from the cache."""
    from peers_on_cpu import transfers

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")

    async def rounds(torpor: dict, **options) -> list[dict]:
        engine = start(zygote, model, tmp_path / "checkpoints", torpor, **options)
        results = [await serve(engine, str(number)) for number in range(3)]
        engine.shutdown()
        return results

    ours = asyncio.run(rounds({name: value for name, value in TORPOR.items() if name != "disk_bytes"}))
    theirs = asyncio.run(rounds({}, kv_transfer_config=transfers(peer)))
    assert all(each["tokens"] == ours[0]["tokens"] for each in ours + theirs)
    assert sum(ours[-1]["cached"]) >= sum(theirs[-1]["cached"]) > 0


def test_each_data_parallel_rank_has_a_directory_of_its_own():
    assert [directory_of_rank("/kv", rank) for rank in range(3)] == ["/kv", "/kv/dp1", "/kv/dp2"]
    assert directory_of_rank(None, 1) is None

    class Parallel:
        data_parallel_index = 3

    given = {"host_bytes": 1 << 20, "disk_bytes": "1GiB", "disk_dir": "/kv"}
    assert ConnectorOptions.of(given).of_rank(Parallel).disk_folder == "/kv/dp3"
    assert ConnectorOptions.of({"host_bytes": 1 << 20}).of_rank(Parallel).disk_folder is None
