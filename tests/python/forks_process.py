# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an AsyncLLM, or an LLM, with its engine core and ranks in other processes, whose requests are
forked while they run. Prints what the readers of parents and children got, and what came without a fork."""

import asyncio
import json
import os
import sys
from pathlib import Path

from conftest import ENGINE
from requests_of_tests import REQUESTS, add_requests, answer, final, run
from sessions_process import Counts, read

import torpor.vllm
from torpor.errors import Error

NAMES = ["greedy", "seeded", "prefix-a", "stops", "long-seeded"]
PARENTS = ["greedy", "seeded", "prefix-a"]
CHILDREN = 3


async def child(engine, name: str) -> list:
    async for output in torpor.vllm.attach(engine, name):
        last = output
    return answer(last)


async def once(engine, forks: bool) -> dict:
    await engine.reset_prefix_cache()
    counts = Counts()
    readers = {name: asyncio.create_task(read(engine, name, counts)) for name in NAMES}
    await counts.reach(PARENTS, 3)
    if not forks:
        return {name: await reader for name, reader in readers.items()}
    made = await asyncio.gather(*(engine.torpor.fork(name, CHILDREN, action=f"of-{name}") for name in PARENTS))
    assert made[0] == await engine.torpor.fork(PARENTS[0], CHILDREN, action=f"of-{PARENTS[0]}")
    streams = {name: asyncio.create_task(child(engine, name)) for each in made for name in each.children}
    answers = {name: await reader for name, reader in readers.items()}
    of_children = {each.parent: [await streams[name] for name in each.children] for each in made}
    return answers | {"children": of_children, "shared": [each.shared_blocks for each in made]}


async def gone(engine) -> dict:
    """The caller of a fork is cancelled, the parent aborted; then its blocks are those of nobody."""
    await engine.reset_prefix_cache()
    counts = Counts()
    reader = asyncio.create_task(read(engine, "greedy", counts))
    await counts.reach(["greedy"], 3)
    call = asyncio.create_task(engine.torpor.fork("greedy", 2))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    left = sorted(state.external_req_id for state in engine.output_processor.request_states.values())
    made = await engine.torpor.fork("greedy", 2)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await engine.abort(made.children[0])
    last = await child(engine, made.children[1])
    try:
        await engine.torpor.fork("greedy", 1)
        error = None
    except Error as problem:
        error = problem.code
    freed = False
    for _ in range(1000):  # the engine core hears of aborts a step later
        freed = freed or await engine.reset_prefix_cache()  # only if no block is used
    return {"left": left, "last": last, "error": error, "freed": freed}


def blocking(model: Path) -> dict:
    """An LLM: its engine core takes steps while nobody calls step()."""
    from vllm import LLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    llm = LLM(str(model), additional_config={"torpor": {"sessions": True}}, **ENGINE)
    engine, result = llm.llm_engine, {}
    add_requests(engine, NAMES)
    result["plain"] = final(run(engine))
    llm.reset_prefix_cache()
    add_requests(engine, NAMES)
    answers = run(engine, 4)
    made = [llm.torpor.fork(name, CHILDREN) for name in PARENTS if not answers.get(name, [False])[0]]
    answers |= run(engine)
    result["children"] = {each.parent: [answers.pop(name) for name in each.children] for each in made}
    result["forked"] = answers
    engine.engine_core.shutdown()
    return result


async def main(model: Path, ranks: int) -> dict:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if ranks == 2:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    torpor_options = {"torpor": {"sessions": True}}
    arguments = AsyncEngineArgs(
        model=str(model), additional_config=torpor_options, disable_log_stats=True, tensor_parallel_size=ranks, **ENGINE
    )
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        plain = await once(engine, forks=False)
        forked = await once(engine, forks=True)
        children, shared = forked.pop("children"), forked.pop("shared")
        return {
            "plain": plain, "forked": forked, "children": children, "shared": shared, "gone": await gone(engine)
        }  # fmt: skip
    finally:
        engine.shutdown()


if __name__ == "__main__":
    model, ranks = Path(sys.argv[1]), int(sys.argv[2])
    assert set(NAMES) <= REQUESTS.keys()
    print("RESULT " + json.dumps(asyncio.run(main(model, ranks)) if ranks else blocking(model)), flush=True)
