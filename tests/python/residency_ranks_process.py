# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an AsyncLLM of two ranks in processes of their own, with tiers, a store that engines share,
and sessions that are demoted by themselves.

    residency_ranks_process.py MODEL FOLDER

Prints what came of each turn and call.
"""

import asyncio
import dataclasses
import json
import os
import sys
from typing import ClassVar

from conftest import ENGINE
from connector_served import prompts
from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

PROMPT = prompts()[3]
MORE = " And then the clock went on, and the river with it, until the window was dark."
IDLE_SECONDS = 0.25


class CountedStats(StatLoggerBase):
    """What the engine core counts, as it tells its front end: nobody has to ask it."""

    counters: ClassVar[dict[str, int]] = {}
    changed = asyncio.Event()

    def __init__(self, vllm_config, engine_index: int = 0):
        pass

    def record(self, scheduler_stats, *_, **__):
        counted = getattr(scheduler_stats, "kv_connector_stats", None) or {}
        for name, more in counted.get("counters", {}).items():
            self.counters[name] = self.counters.get(name, 0) + more
        self.changed.set()

    def log_engine_initialized(self):
        pass

    @classmethod
    async def reach(cls, name: str, number: int) -> None:
        while cls.counters.get(name, 0) < number:
            cls.changed.clear()
            await asyncio.wait_for(cls.changed.wait(), timeout=600)


async def turn(engine: AsyncLLM, name: str, text: str, session: str | None) -> dict:
    sampling = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    async for output in engine.generate({"prompt": text}, sampling, name, session_id=session):
        last = output
    return {"tokens": list(last.outputs[0].token_ids), "cached": last.num_cached_tokens}


async def view(engine: AsyncLLM) -> dict:
    [known] = await engine.torpor.sessions.known()
    return dataclasses.asdict(known)


async def main(model: str, folder: str) -> dict:
    tiers = {
        "offload": "eager", "host_bytes": "4MiB", "disk_bytes": "16MiB", "disk_dir": f"{folder}/disk",
        "kv_store": f"file://{folder}/store", "kv_store_timeout_ms": 600_000, "session_idle_seconds": IDLE_SECONDS,
    }  # fmt: skip
    sizes = ENGINE | {"num_gpu_blocks_override": 64, "max_model_len": 512}
    arguments = AsyncEngineArgs(model=model, additional_config={"torpor": tiers}, tensor_parallel_size=2, **sizes)
    engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[CountedStats])
    try:
        plain = [await turn(engine, "plain", PROMPT, None), await turn(engine, "plain 2", PROMPT + MORE, None)]
        await engine.reset_prefix_cache(reset_connector=True)
        first = await turn(engine, "one", PROMPT, "agent")
        await CountedStats.reach("session_idle", 1)
        await CountedStats.reach("session_freed_blocks", 1)
        by_itself = await view(engine)
        result = {"plain": plain, "turns": [first], "by itself": by_itself}
        session = engine.torpor.sessions["agent"]
        result["remote"] = dataclasses.asdict(await session.demote(to="remote"))
        result["in the store"] = await view(engine)
        result["device"] = dataclasses.asdict(await session.prefetch(to="device"))
        result["turns"].append(await turn(engine, "two", PROMPT + MORE, "agent"))
        return result
    finally:
        engine.shutdown()


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    print("RESULT " + json.dumps(asyncio.run(main(*sys.argv[1:3]))), flush=True)
