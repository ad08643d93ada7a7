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


async def read(engine, name: str, counts: dict[str, int]) -> list:
    prompt, params = REQUESTS[name]
    async for output in engine.generate(prompt, params.clone(), name):
        counts[name] = sum(len(choice.token_ids) for choice in output.outputs)
        last = output
    return answer(last)


async def until(condition) -> None:
    for _ in range(20000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise TimeoutError("it did not come about")


async def once(engine, leaving: bool) -> dict:
    """All requests at once. `leaving`: some are away until all others have ended."""
    await engine.reset_prefix_cache()
    counts: dict[str, int] = {}
    readers = {name: asyncio.create_task(read(engine, name, counts)) for name in NAMES}
    await until(lambda: all(counts.get(name, 0) >= 2 for name in LEAVING))
    if not leaving:
        return {name: await reader for name, reader in readers.items()}
    left = await engine.torpor.hibernate(LEAVING)
    others = {name: await reader for name, reader in readers.items() if name not in LEAVING}
    seen = dict(counts)
    held = (await engine.torpor.ledger())[0].arena_used_bytes
    assert await engine.torpor.hibernated() == [left] and left.requests == tuple(LEAVING)
    assert held > 0 and not any(readers[name].done() for name in LEAVING)
    assert {name: counts[name] for name in LEAVING} == {name: seen[name] for name in LEAVING}
    await engine.torpor.resume(left.id)
    return {name: others.get(name) or await reader for name, reader in readers.items()}


async def cancelled(engine) -> dict:
    """A reader goes while its request is hibernated."""
    counts: dict[str, int] = {}
    reader = asyncio.create_task(read(engine, "greedy", counts))
    await until(lambda: counts.get("greedy", 0) >= 3)
    left = await engine.torpor.hibernate("greedy")
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    for _ in range(1000):
        if not await engine.torpor.hibernated():
            break
        await asyncio.sleep(0.002)
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


async def main(model: Path, ranks: int) -> dict:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if ranks == 2:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    torpor = {"torpor": {"sessions": True}}
    arguments = AsyncEngineArgs(
        model=str(model), additional_config=torpor, disable_log_stats=True, tensor_parallel_size=ranks, **ENGINE
    )
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        plain = await once(engine, leaving=False)
        away = await once(engine, leaving=True)
        return {"plain": plain, "away": away, "cancelled": await cancelled(engine)}
    finally:
        engine.shutdown()


if __name__ == "__main__":
    model, ranks = Path(sys.argv[1]), int(sys.argv[2])
    print("RESULT " + json.dumps(asyncio.run(main(model, ranks)) if ranks else blocking(model)), flush=True)
