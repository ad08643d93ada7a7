# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: requests of a trace, scaled down, on an engine whose device pool is far too small.

    connector_trace_process.py MODE MODEL FOLDER REQUESTS MOST_BLOCKS COMPUTED

MODE "without": no connector and room for all; "with": with torpor's, disturbed, killed at the end; "after": another
process on what that one left; "faults": there is less host memory than was asked for, the disk is full for a while, and
then gone; "full": it is full from before the start to the end; "disk_only": no host memory. "without" leaves the KV of
each block in the file COMPUTED; the others compare each block that is loaded with what was computed there.
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
from contextlib import contextmanager, nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/bench"))
import connector_replay as replay
from conftest import InProcess
from vllm import SamplingParams
from zygote import MOST_SECONDS

REQUESTS, MOST_BLOCKS, COMPUTED = int(sys.argv[4]), int(sys.argv[5]), Path(sys.argv[6])  # blocks: of a prompt
AT_ONCE, ANSWER, ASKED_AGAIN = 12, 6, 6
BLOCK, BLOCKS = 32, 60
VOCABULARY, SPECIAL = 2048, 20
SIZES = {  # in blocks
    "with": {"host_bytes": 64, "disk_bytes": 512},
    "disk_only": {"disk_bytes": 512},
    "faults": {"host_bytes": 80, "disk_bytes": 512, "arena_budget_bytes": 72},
}
GROUP = bytes(4)  # behind a block's hash, in the name that vLLM's prefix cache has for it


def block_bytes(model: Path) -> int:
    """Of keys and values in float32, all layers."""
    config = json.loads((model / "config.json").read_text())
    return 8 * BLOCK * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]


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


def kv_of(runner, block: int):
    """What the device has there, of all layers."""
    import torch

    blocks = runner.kv_cache_config.num_blocks
    layers = [cache.select(0 if cache.shape[0] == blocks else 1, block) for cache in runner.kv_caches]
    return torch.cat([layer.float().flatten() for layer in layers])


def leave_computed(one: InProcess) -> None:
    import torch

    pool = one.core.scheduler.kv_cache_manager.block_pool
    names = list(pool.cached_block_hash_to_block._cache)
    blocks = {bytes(name): pool.cached_block_hash_to_block.get_one_block(name).block_id for name in names}
    torch.save({name: kv_of(one.runner, block) for name, block in blocks.items()}, COMPUTED)


class Checker:
    """Compares each block, when its load is over or before a step computes with it, with what prefill wrote for the
    same tokens in another process."""

    def __init__(self, one: InProcess):
        import torch
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.computed, self.loading = torch.load(COMPUTED), {}
        self.compared, self.unknown, self.difference = 0, 0, 0.0
        self.apart = float("inf")  # of a block from one that was computed for other tokens: the least
        self.other = None  # name and content of the block before
        side, self.worker, self.runner = (
            one.core.scheduler.connector.scheduler,
            get_kv_transfer_group().worker,
            one.runner,
        )
        manager = one.core.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        match, allocated, look = side.match, side.allocated, self.worker.look
        at = 0

        def matched(request, computed):
            nonlocal at
            at = computed // BLOCK
            return match(request, computed)

        def begun(request, external):
            allocated(request, external)
            if external:
                table = manager.req_to_blocks[request.request_id]
                self.loading[request.request_id] = [
                    (bytes(request.block_hashes[i]) + GROUP, table[i].block_id)
                    for i in range(at, at + external // BLOCK)
                ]

        def looked():
            before = set(self.worker._finished)
            look()
            for request_id in self.worker._finished - before:
                self.compare(self.loading.pop(request_id))

        def begun_step(orders):
            begin(orders)
            for request_id in orders.within_step:
                self.compare(self.loading.pop(request_id))

        begin = self.worker.begin
        side.match, side.allocated, self.worker.look, self.worker.begin = matched, begun, looked, begun_step

    def compare(self, blocks: list) -> None:
        for name, block in blocks:
            if block in self.worker._bad_blocks:
                continue
            expected = self.computed.get(name)
            if expected is None:
                self.unknown += 1
                continue
            found, largest = kv_of(self.runner, block), expected.abs().max()
            self.difference = max(self.difference, float((found - expected).abs().max() / largest))
            if self.other is not None and self.other[0] != name:
                self.apart = min(self.apart, float((found - self.other[1]).abs().max() / largest))
            self.other = (name, expected)
            self.compared += 1

    def result(self) -> dict:
        return {"compared": self.compared, "unknown": self.unknown, "difference": self.difference, "apart": self.apart}


class Load:
    """AT_ONCE requests at a time, in order, and what happens meanwhile."""

    def __init__(self, one: InProcess, mode: str, folder: Path, model: Path):
        self.one, self.mode, self.folder, self.model = one, mode, folder, model
        self.random = random.Random(3)
        self.aborted: set[str] = set()
        self.resets = self.connector_resets = self.preempted = 0

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
        return {
            "answers": answers,
            "cached": cached,
            "prompt_tokens": sum(map(len, asked)),
            "aborted": sorted(self.aborted),
        }

    def ask_again(self) -> dict:
        """The last requests once more, when nothing of them is in the device's prefix cache. Their answers."""
        engine, asked, answers = self.one.engine, prompts(), {}
        assert self.scheduler.reset_prefix_cache()
        for number in range(REQUESTS - ASKED_AGAIN, REQUESTS):
            engine.add_request(f"again-{number}", {"prompt_token_ids": asked[number]}, params(number))
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    answers[output.request_id.removeprefix("again-")] = list(output.outputs[0].token_ids)
        return answers

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
        moving = (
            list(self.scheduler.kv_holding_waiting) or self.scheduler.connector.scheduler.core.loading
        )  # of one aborted
        if draw > 0.985 and self.mode in ("with", "disk_only") and not moving:
            both = draw > 0.993  # what is stored from then on is found by the next process all the same
            self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=both)
            self.resets += 1
            self.connector_resets += both
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
        end = time.monotonic() + MOST_SECONDS
        while side.busy():
            assert time.monotonic() < end, side.stats()
            self.one.engine.step()
            time.sleep(0.001)
        side.core.check()
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return side.stats() | {
            "free": free,
            "resets": self.resets,
            "connector_resets": self.connector_resets,
            "preempted": self.preempted,
        }


@contextmanager
def disk_full_from_the_start():
    """From before the store on disk is opened, when vLLM has written what it must. What is printed is a file, too."""
    from torpor.vllm.connector_worker import WorkerSide

    stock, unlimited = WorkerSide.prepare, resource.RLIM_INFINITY

    def prepare(side):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited))
        return stock(side)

    WorkerSide.prepare = prepare
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))


def served(load: Load) -> dict:
    checker = Checker(load.one) if load.mode != "without" else None
    result = load.run()
    if checker is None:
        leave_computed(load.one)
        return result
    load.settle()
    result["again"] = load.ask_again()
    result["stats"] = load.settle()
    result["checked"] = checker.result()
    result["block_bytes"] = block_bytes(load.model)
    result["host_slots"] = checker.worker.core.sizes()["host_slots"]
    [ledger] = load.one.llm.torpor.call("ledger")
    result["arena"] = {name: ledger[f"arena_{name}_bytes"] for name in ("held", "used")}
    return result


def main() -> None:
    mode, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    engine = {"block_size": BLOCK, "max_model_len": 512, "num_gpu_blocks_override": BLOCKS}
    sizes = SIZES.get(mode, SIZES["with"])
    offload = {"offload": "eager"} | {name: blocks * block_bytes(Path(model)) for name, blocks in sizes.items()}
    if mode == "without":
        engine["num_gpu_blocks_override"], offload = 4000, {}
    with disk_full_from_the_start() if mode == "full" else nullcontext():
        load = Load(InProcess(Path(model), folder / "checkpoints", torpor=offload, **engine), mode, folder, Path(model))
        result = served(load)
    print("RESULT " + json.dumps(result), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
