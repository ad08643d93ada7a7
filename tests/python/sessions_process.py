# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an AsyncLLM, or an LLM, with its engine core and ranks in other processes, whose requests
leave and come back while their readers wait. Prints what the readers got, with and without that."""

import asyncio
import json
import os
import sys
from pathlib import Path

from conftest import ENGINE
from requests_of_tests import REQUESTS, add_requests, answer, final, run

from torpor.errors import Error

NAMES = [name for name, (_, p) in REQUESTS.items() if p.temperature == 0 or p.seed is not None]
LEAVING = ["greedy", "two", "stops", "long"]


class Counts(dict):
    """Of each request, how many tokens its reader has."""

    def __init__(self):
        super().__init__()
        self.changed = asyncio.Event()

    async def reach(self, names: list[str], tokens: int) -> None:
        while any(self.get(name, 0) < tokens for name in names):
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), timeout=600)


async def read(engine, name: str, counts: Counts) -> list:
    prompt, params = REQUESTS[name]
    async for output in engine.generate(prompt, params.clone(), name):
        counts[name] = sum(len(choice.token_ids) for choice in output.outputs)
        counts.changed.set()
        last = output
    return answer(last)


async def once(engine, leaving: bool, to: str = "host") -> dict:
    """All requests at once. `leaving`: some are away until all others have ended, in host memory or on disk."""
    await engine.reset_prefix_cache()
    counts = Counts()
    readers = {name: asyncio.create_task(read(engine, name, counts)) for name in NAMES}
    await counts.reach(LEAVING, 2)
    if not leaving:
        return {name: await reader for name, reader in readers.items()}
    left = await engine.torpor.hibernate(LEAVING, to=to)
    others = {name: await reader for name, reader in readers.items() if name not in LEAVING}
    seen = dict(counts)
    held = (await engine.torpor.ledger())[0].arena_used_bytes
    assert await engine.torpor.hibernated() == [left] and left.requests == tuple(LEAVING)
    assert (held > 0, os.path.exists(left.path)) == (to == "host", to == "disk")
    assert not any(readers[name].done() for name in LEAVING)
    assert {name: counts[name] for name in LEAVING} == {name: seen[name] for name in LEAVING}
    await engine.torpor.resume(left.id)
    return {name: others.get(name) or await reader for name, reader in readers.items()}


async def cancelled(engine) -> dict:
    """A reader goes while its request is hibernated."""
    counts = Counts()
    reader = asyncio.create_task(read(engine, "greedy", counts))
    await counts.reach(["greedy"], 3)
    left = await engine.torpor.hibernate("greedy")
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    for _ in range(100_000):  # each asks the engine core
        if not await engine.torpor.hibernated():
            break
    try:
        await engine.torpor.resume(left.id)
        error = None
    except Error as problem:
        error = problem.code
    ledger = (await engine.torpor.ledger())[0]
    return {"error": error, "used": ledger.arena_used_bytes}


def blocking(model: Path) -> dict:
    """An LLM: its engine core takes steps while nobody calls step()."""
    from vllm import LLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    llm = LLM(str(model), additional_config={"torpor": {"sessions": True}}, **ENGINE)
    engine, result = llm.llm_engine, {}
    for way in ("plain", "away"):
        llm.reset_prefix_cache()
        add_requests(engine, NAMES)
        answers = run(engine, 4)
        if way == "away":
            left = llm.torpor.hibernate([name for name in LEAVING if not answers.get(name, [False])[0]])
            answers |= run(engine)
            assert {name for name in NAMES if not answers.get(name, [False])[0]} == set(left.requests) != set()
            llm.torpor.resume(left.id)
        result[way] = final(answers | run(engine))
    engine.engine_core.shutdown()
    return result


async def main(model: Path, ranks: int, directory: str) -> dict:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if ranks == 2:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    torpor = {"torpor": {"sessions": True, "checkpoint_dir": directory}}
    arguments = AsyncEngineArgs(
        model=str(model), additional_config=torpor, disable_log_stats=True, tensor_parallel_size=ranks, **ENGINE
    )
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        plain = await once(engine, leaving=False)
        away = await once(engine, leaving=True)
        on_disk = await once(engine, leaving=True, to="disk")
        images = os.listdir(os.path.join(directory, "images"))
        return {
            "plain": plain, "away": away, "on_disk": on_disk, "images": images, "cancelled": await cancelled(engine),
        }  # fmt: skip
    finally:
        engine.shutdown()


if __name__ == "__main__":
    model, ranks, directory = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    print("RESULT " + json.dumps(asyncio.run(main(model, ranks, directory)) if ranks else blocking(model)), flush=True)
