# SPDX-License-Identifier: Apache-2.0
"""A process of the tests whose requests leave it for the disk, and one that takes them. Prints what was answered.

write MODEL DIRECTORY       some requests go to disk in mid-answer, then this process is killed
take PATH MODEL DIRECTORY   an engine that runs the others takes them
move MODEL DIRECTORY        two AsyncLLM: a request moves, with the engine core that it was in killed or not
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from conftest import ENGINE, InProcess
from requests_of_tests import REQUESTS, run

NAMES = [name for name, (_, p) in REQUESTS.items() if p.temperature == 0 or p.seed is not None]
LEAVING = ["greedy", "two", "stops", "long"]
OTHERS = [name for name in NAMES if name not in LEAVING]


def report(result: dict) -> None:
    print("RESULT " + json.dumps(result), flush=True)


def write(model: Path, directory: Path) -> None:
    one = InProcess(model, directory, torpor={"sessions": True}, num_gpu_blocks_override=200)
    answers = one.begin(9, NAMES)
    left = one.llm.torpor.hibernate(LEAVING, to="disk")
    report({"path": left.path, "given": {name: value for name, value in answers.items() if name in LEAVING}})
    os.kill(os.getpid(), signal.SIGKILL)


def take(path: str, model: Path, directory: Path) -> None:
    one = InProcess(model, directory, torpor={"sessions": True}, num_gpu_blocks_override=200)
    expected = one.finish(one.begin(0, NAMES))
    answers = one.begin(6, OTHERS)
    came = one.llm.torpor.resume(path)
    answers |= run(one.engine, 1)
    loaded = {i.rsplit("-", 1)[0]: r.num_computed_tokens for i, r in one.core.scheduler.requests.items()}
    answers |= run(one.engine)
    report({
        "requests": came.requests, "left": os.path.exists(path), "loaded": loaded, "answers": one.finish(answers),
        "expected": expected,
    })  # fmt: skip


async def read(stream, tokens: list[int]) -> str:
    """Collect the tokens of a stream; return how it ended."""
    async for output in stream:
        tokens[:] = output.outputs[0].token_ids
    return output.outputs[0].finish_reason


async def reach(tokens: list[int], count: int) -> None:
    while len(tokens) < count:
        await asyncio.sleep(0)


def engine_of(model: Path, directory: Path):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    torpor = {"torpor": {"sessions": True, "checkpoint_dir": str(directory)}}
    arguments = AsyncEngineArgs(model=str(model), additional_config=torpor, disable_log_stats=True, **ENGINE)
    return AsyncLLM.from_engine_args(arguments)


async def move(model: Path, directory: Path) -> None:
    from torpor.vllm import attach

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    prompt, params = REQUESTS["greedy"]
    source, target = engine_of(model, directory), engine_of(model, directory)
    result: dict = {}
    try:
        plain: list[int] = []
        await read(source.generate(prompt, params.clone(), "plain"), plain)
        result["plain"] = plain

        async def start(name: str) -> tuple[list[int], asyncio.Task]:
            tokens: list[int] = []
            task = asyncio.create_task(read(source.generate(prompt, params.clone(), name), tokens))
            await reach(tokens, 4)
            return tokens, task

        beside: list[int] = []
        other = asyncio.create_task(read(target.generate(prompt, params.clone(), "beside"), beside))
        tokens, reader = await start("moved")
        moved = await source.torpor.move("moved", target)
        went_on: list[int] = []
        end = await read(attach(target, "moved"), went_on)
        result["moved"] = {
            "requests": moved.requests, "reader": await reader, "given": list(tokens), "tokens": went_on, "end": end,
        }  # fmt: skip
        await other
        result["beside"] = beside

        tokens, reader = await start("orphan")
        left = await source.torpor.hibernate("orphan", to="disk")
        core = source.engine_core.resources.engine_manager.processes[0]
        os.kill(core.pid, signal.SIGKILL)
        await target.torpor.resume(left.path)
        went_on = []
        end = await read(attach(target, "orphan"), went_on)
        result["killed"] = {"tokens": went_on, "end": end, "left": os.path.exists(left.path)}
        await asyncio.gather(reader, return_exceptions=True)
    finally:
        source.shutdown()
        target.shutdown()
    report(result)


if __name__ == "__main__":
    word, *rest = sys.argv[1:]
    if word == "write":
        write(Path(rest[0]), Path(rest[1]))
    elif word == "take":
        take(rest[0], Path(rest[1]), Path(rest[2]))
    else:
        asyncio.run(move(Path(rest[0]), Path(rest[1])))
