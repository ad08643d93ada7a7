# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine whose KV vLLM has sized sleeps to disk, and others with more and with fewer blocks
wake from it, one after another. Prints a JSON object."""

import json
import os
import sys
from pathlib import Path

import psutil
from conftest import InProcess
from inspector import look
from requests_of_tests import REQUESTS, final, run

from torpor.errors import Incompatible

STEPS = 30  # until a request with a long prompt has ended: its blocks are cached
GIB = 1 << 30
# vLLM wants room for one request of the longest kind: these hold more together.
SHORTER = {name: request for name, request in REQUESTS.items() if name != "long"}
SHORTER["long-seeded"] = ("bar foo " * 60, REQUESTS["long-seeded"][1])
LONGEST = 384


class Engines:
    def __init__(self, model: str, directory: str):
        self._model, self._directory = Path(model), Path(directory)

    def make(self, kv_bytes: int, **options) -> InProcess:
        """vLLM gives KV what is left of a share of all memory when the process has what it has."""
        share = (psutil.Process().memory_info().rss + kv_bytes) / psutil.virtual_memory().total
        options |= {
            "gpu_memory_utilization": round(share, 4),
            "max_model_len": LONGEST,
            "torpor": {"incremental": True},
        }
        return InProcess(self._model, self._directory, requests=SHORTER, **options)


def blocks_of(one: InProcess) -> int:
    return one.core.scheduler.kv_cache_config.num_blocks


def goes_on(one: InProcess, path: str) -> dict:
    preempted = []
    cls = type(one.core.scheduler)  # on the class: fields of its own would be refused
    stock = cls._preempt_request
    cls._preempt_request = lambda self, request, *args, **kwargs: (
        preempted.append(request.request_id), stock(self, request, *args, **kwargs)
    )  # fmt: skip
    report = one.llm.wake_up(from_checkpoint=path)
    ids = [b.block_id for held in one.core.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
           .req_to_blocks.values() for b in held]  # fmt: skip
    result = {"blocks": blocks_of(one), "largest": max(ids), "dropped": report.dropped_blocks, "note": report.note}
    again = one.llm.sleep(level=1, preserve_state=True, to="disk")  # nothing was computed: the blocks are linked
    one.llm.wake_up()
    answers = run(one.engine)
    recomputed = one.llm.torpor.state().recomputed_tokens
    return result | {
        "answers": answers, "recomputed": recomputed, "preempted": preempted, "written": again.saved_bytes,
        "whole": look("verify", again.checkpoint)["whole"],
    }  # fmt: skip


def main() -> None:
    del os.environ["VLLM_CPU_KVCACHE_SPACE"]  # conftest.py has set it
    engines = Engines(*sys.argv[1:3])
    one = engines.make(GIB // 2)
    expected = one.expected
    answers = one.begin(STEPS)
    path = one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    delivered, saved = json.loads(json.dumps(answers)), blocks_of(one)
    one.llm.wake_up()
    run(one.engine)
    held = [block["id"] for block in look("blocks", path)["blocks"] if block["requests"]]
    cached = len(look("blocks", path)["blocks"]) - len(held)
    result = {"saved": saved, "held": held, "cached": cached}
    for name, engine in {
        "fewer": lambda: engines.make(GIB // 2, num_gpu_blocks_override=1 + len(held) + cached // 2),
        "more": lambda: engines.make(3 * GIB // 4),
    }.items():
        woken = goes_on(engine(), path)
        woken["same"] = final(delivered | json.loads(json.dumps(woken.pop("answers")))) == json.loads(
            json.dumps(expected)
        )
        result[name] = woken
    try:
        engines.make(GIB // 2, num_gpu_blocks_override=len(held)).llm.wake_up(from_checkpoint=path)
    except Incompatible as problem:
        result["too few"] = [problem.what, problem.next_step]
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
