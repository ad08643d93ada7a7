"""A process of the tests: requests of a trace, scaled down, on an engine whose device pool is far too small.

    connector_trace_process.py MODE MODEL FOLDER REQUESTS

MODE "without": no connector and room for all; "with": with torpor's, disturbed, killed at the end; "after": another process
on what that one left; "faults": the disk is full for a while, and then gone; "disk_only": no host memory.
Prints the tokens of each answer, how many of the prompts' were not computed, and counters.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/bench"))
import connector_replay as replay  # noqa: E402
from conftest import InProcess  # noqa: E402
from vllm import SamplingParams  # noqa: E402

REQUESTS = int(sys.argv[4])
AT_ONCE, ANSWER = 12, 6
BLOCK, BLOCKS, MOST_BLOCKS = 32, 60, 14  # of a prompt: as many as the trace has hashes, at most
VOCABULARY, SPECIAL = 2048, 20
SIZES = {
    "with": {"host_bytes": "8MiB", "disk_bytes": "64MiB"},
    "disk_only": {"disk_bytes": "64MiB"},
}


def prompts() -> list[list[int]]:
    made = []
    for each in replay.make_trace(REQUESTS):
        ids = each.prompt[:MOST_BLOCKS]
        tokens = [(7919 * i + 104729 * at + 17) % (VOCABULARY - SPECIAL) + SPECIAL for i in ids for at in range(BLOCK)]
        made.append(tokens[: len(tokens) - each.prompt_tokens % BLOCK])
    return made


def params(number: int) -> SamplingParams:
    more = {"temperature": 0} if number % 2 == 0 else {"temperature": 1.0, "seed": number}
    return SamplingParams(max_tokens=ANSWER, ignore_eos=True, **more)


class Load:
    """AT_ONCE requests at a time, in order, and what happens meanwhile."""

    def __init__(self, one: InProcess, mode: str, folder: Path):
        self.one, self.mode, self.folder = one, mode, folder
        self.random = random.Random(3)
        self.aborted: set[str] = set()
        self.resets = self.preempted = 0

    def run(self) -> dict:
        engine, asked, running = self.one.engine, prompts(), set()
        answers, cached = {}, 0
        for number in range(REQUESTS + AT_ONCE):
            if number < REQUESTS:
                engine.add_request(str(number), {"prompt_token_ids": asked[number]}, params(number))
                running.add(str(number))
            while len(running) >= AT_ONCE or (number >= REQUESTS and running):
                for output in engine.step():
                    if output.finished:
                        running.discard(output.request_id)
                        answers[output.request_id] = list(output.outputs[0].token_ids)
                        cached += output.num_cached_tokens or 0
                running -= self.disturb(number, running)
        return {"answers": answers, "cached": cached, "prompt_tokens": sum(map(len, asked)), "aborted": sorted(self.aborted)}

    def disturb(self, number: int, running: set[str]) -> set[str]:
        if self.mode == "without":
            return set()
        self.preempted = max(self.preempted, *(r.num_preemptions for r in self.scheduler.requests.values()), 0)
        if self.mode == "faults":
            self.break_disk(number)
        draw = self.random.random()
        if draw < 0.01 and len(self.aborted) < 12 and running:
            victim = self.random.choice(sorted(running))
            self.one.engine.abort_request([victim])
            self.aborted.add(victim)
            return {victim}
        if draw > 0.985 and self.mode in ("with", "disk_only") and not list(self.scheduler.kv_holding_waiting):
            # What is stored after a reset of the connector is found by this process only.
            both = self.mode == "disk_only" and draw > 0.995
            self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=both)
            self.resets += 1
        return set()

    def break_disk(self, number: int) -> None:
        full = REQUESTS // 4 <= number < REQUESTS // 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if full else resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if number >= 3 * REQUESTS // 4:
            shutil.rmtree(self.folder / "checkpoints/offload/store", ignore_errors=True)

    @property
    def scheduler(self):
        return self.one.core.scheduler

    def settle(self) -> dict:
        side = self.scheduler.connector.scheduler
        end = time.monotonic() + 20
        while side.busy():
            assert time.monotonic() < end, side.stats()
            self.one.engine.step()
            time.sleep(0.001)
        side.core.check()
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return side.stats() | {"free": free, "resets": self.resets, "preempted": self.preempted}


def main() -> None:
    mode, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    engine = {"block_size": BLOCK, "max_model_len": 512, "num_gpu_blocks_override": BLOCKS}
    offload = {"offload": "eager"} | SIZES.get(mode, SIZES["with"])
    if mode == "without":
        engine["num_gpu_blocks_override"], offload = 4000, {}
    load = Load(InProcess(Path(model), folder / "checkpoints", torpor=offload, **engine), mode, folder)
    result = load.run()
    if mode != "without":
        result["stats"] = load.settle()
        [ledger] = load.one.llm.torpor("ledger")
        result["arena"] = {name: ledger[f"arena_{name}_bytes"] for name in ("held", "used")}
    print("RESULT " + json.dumps(result), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
