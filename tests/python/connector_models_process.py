# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine of a model of features.py with a KV connector, torpor's or one of vLLM's own.

    connector_models_process.py CONNECTOR FEATURE MODEL FOLDER OPTIONS SCENARIO…

CONNECTOR: none, torpor, Simple or Offloading. OPTIONS: torpor's, as JSON. Prints what came of each scenario; "killed"
ends the process as kill -9 does.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from conftest import ENGINE as SHAPE
from conftest import InProcess
from connector_process import aborted_while_loading, disturbed, kv_bytes, slept
from connector_served import ENGINE, Served, prompts
from connector_within_step_process import damaged
from features import FEATURES
from vllm import SamplingParams
from zygote import MOST_SECONDS

HOST_BYTES = 64 << 20
ENGINE_BLOCK = SHAPE["block_size"]  # tokens


PIPELINE = "pipeline"  # of two stages, each in a process of its own


def greedy(_: int, tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


class Peer(Served):
    """An engine with a connector of vLLM's own, or with none."""

    def __init__(self, one: InProcess, name: str):
        self.one, self.params, self.name = one, greedy, name
        self.rounds = self.cached = 0

    def stuck(self) -> str:
        return str({r.request_id: r.status.name for r in self.one.core.scheduler.requests.values()})

    def busy(self) -> bool:
        connector = self.one.core.scheduler.connector
        if self.name == "Simple":
            return connector.scheduler_manager.has_pending_stores()
        if self.name == "Offloading":
            side = connector.connector_scheduler
            return bool(side._jobs) or side.manager.has_pending_work()
        return False

    def flush(self) -> None:
        """All that is to be stored is stored; these connectors hear of it in steps that compute."""
        end = time.monotonic() + MOST_SECONDS
        while self.busy():
            assert time.monotonic() < end, self.stuck()
            self.one.engine.add_request(f"idle {time.monotonic()}", {"prompt_token_ids": [20, 21]}, greedy(0, 1))
            while self.one.engine.has_unfinished_requests():
                self.one.engine.step()


def count_preemptions(scheduler) -> list:
    stock, seen = scheduler._preempt_request, []

    def preempt(request, *args, **kwargs):
        seen.append(request.request_id)
        return stock(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    return seen


def rounds(served: Served) -> dict:
    """Three times the same prompts, of which the device has nothing at the beginning of each."""
    tokens, cached = [], []
    for _ in range(3):
        assert served.one.core.scheduler.reset_prefix_cache()
        one = served.round(prompts())
        tokens.append([each for each, _ in one])
        cached.append(sum(each for _, each in one))
    return {"tokens": tokens, "cached": cached}


def pressed(served: Served) -> dict:
    """Answers that outgrow the device: requests are preempted, blocks are evicted and come back."""
    seen = count_preemptions(served.one.core.scheduler)
    try:
        found = [served.round(prompts()[:10], 100) for _ in range(2)]
    finally:
        del served.one.core.scheduler._preempt_request
    return {
        "tokens": [[tokens for tokens, _ in one] for one in found],
        "cached": [sum(cached for _, cached in one) for one in found],
        "preemptions": len(seen),
    }


def as_it_was(served: Served) -> dict:
    """Whether a full block changes after the step that filled it, and whether what is loaded later is what it had."""
    scheduler, runner = served.one.core.scheduler, served.one.runner
    pool = scheduler.kv_cache_manager.block_pool
    assert scheduler.reset_prefix_cache(reset_connector=True)
    kept, contents, result = {}, {}, {"changed": 0, "loaded": 0, "others": 0}

    def look() -> None:
        for block in pool.blocks:
            if (key := block._block_hash) is None:
                kept.pop(block.block_id, None)
                continue
            now, (before, content) = kv_bytes(runner, block.block_id), kept.get(block.block_id, (None, None))
            if before is not key:  # vLLM makes a new object for each content
                kept[block.block_id] = (key, now)
                contents.setdefault(bytes(key), []).append(now)
            elif not torch.equal(content, now):
                result["changed"] += 1

    served.ask(prompts(), 40)
    served.answers(look)
    result["contents"] = sum(map(len, contents.values()))
    for text in prompts():
        assert scheduler.reset_prefix_cache()
        [(_, cached)] = served.round([text])
        keys = list(pool.cached_block_hash_to_block._cache)[: cached // ENGINE_BLOCK]
        for key in keys:
            now = kv_bytes(runner, pool.cached_block_hash_to_block.get_one_block(key).block_id)
            found = any(torch.equal(now, each) for each in contents[bytes(key)])
            result["loaded" if found else "others"] += 1
    return result


def as_written(served: Served) -> dict:
    """Whether what is loaded has what the device had in the end. Between the one step that fills blocks and those that
    store them nobody but torpor waits for the device."""
    scheduler, runner, engine = served.one.core.scheduler, served.one.runner, served.one.engine
    pool = scheduler.kv_cache_manager.block_pool
    prompt = {"prompt_token_ids": [260 + number * 7 % 200 for number in range(4 * ENGINE_BLOCK)]}
    contents = []
    for number in range(2):
        assert scheduler.reset_prefix_cache(reset_connector=number == 0)
        engine.add_request(f"as written {number}", prompt, greedy(0, 1))
        [(_, cached)] = served.answers().values()
        served.one.core.model_executor.driver_worker.worker.synchronize_device()
        found = pool.cached_block_hash_to_block
        contents.append({bytes(key): kv_bytes(runner, found.get_one_block(key).block_id) for key in found._cache})
    [written, loaded] = [list(each.values())[: cached // ENGINE_BLOCK] for each in contents]
    return {"loaded": len(loaded), "same": [torch.equal(*each) for each in zip(written, loaded, strict=True)]}


def goes_on_otherwise(served: Served) -> dict:
    """Tokens of the cache for a prompt that parts from another one behind its second block, and for that one again."""
    scheduler, cached = served.one.core.scheduler, []
    for last in (300, 301, 300):
        prompt = {"prompt_token_ids": [260 + number * 7 % 200 for number in range(2 * ENGINE_BLOCK)] + [last] * 5}
        assert scheduler.reset_prefix_cache(reset_connector=not cached)
        served.one.engine.add_request(f"goes on {len(cached)}", prompt, greedy(0, 4))
        cached += [found for _, found in served.answers().values()]
    return {"cached": cached}


def slept_elsewhere(served: Served) -> dict:
    """A sleep while requests load, or have just loaded, with workers in other processes."""
    expected = [tokens for tokens, _ in served.round(prompts(), 16)]
    engine, result = served.one.engine, {}
    for way, options in (("preserve_state", {"preserve_state": True}), ("recompute", {"mode": "keep"})):
        assert served.one.core.scheduler.reset_prefix_cache()
        ids, answers = served.ask(prompts(), 16), {}
        loading = 0
        while loading == 0 and engine.has_unfinished_requests():
            answers |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
            loading = served.side.core.loading
        before = served.side.stats()["host_blocks"]
        served.one.llm.sleep(level=1, **options)
        after = served.side.stats()
        answers |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
        served.one.llm.wake_up()
        found = answers | {i: tokens for i, (tokens, _) in served.answers().items()}
        result[way] = {
            "loading": loading,
            "differing": [i for number, i in enumerate(ids) if found.get(i) != expected[number]],
            "kept": after["host_blocks"] >= before > 0,
            "moving": after["loading_requests"] + after["jobs_under_way"] + after["held_blocks"],
        }
    return result


def left_on_disk(served: Served) -> dict:
    """For an engine that finds it. What was left out because the disk was slow is offered when it is computed again."""
    before = served.side.stats()["demote_transferred"]
    served.one.core.scheduler.reset_prefix_cache(reset_connector=True)
    for _ in range(10):
        if served.side.stats()["demote_transferred"] > before + 60:
            break
        served.one.core.scheduler.reset_prefix_cache()
        served.round(prompts())
    return {"blocks": served.side.stats()["demote_transferred"] - before}


def stats(served: Served) -> dict:
    return served.side.stats()


SCENARIOS = {
    each.__name__: each
    for each in (
        rounds, pressed, as_it_was, as_written, goes_on_otherwise, slept, slept_elsewhere, aborted_while_loading,
        disturbed, damaged, left_on_disk, stats,
    )
}  # fmt: skip


def make(connector: str, feature: str, model: Path, folder: Path, options: dict) -> Served:
    if feature == PIPELINE:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
        engine = ENGINE | {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    else:
        engine = ENGINE | FEATURES[feature].options(model)
    if connector == "torpor":
        torpor = {"offload": "eager", "host_bytes": HOST_BYTES, "advanced": {"policy_timeout_ms": 1000 * MOST_SECONDS}}
        served = Served(InProcess(model, folder, torpor=torpor | options, **engine), greedy)
    else:
        if connector != "none":
            import peers_on_cpu

            engine["kv_transfer_config"] = peers_on_cpu.transfers(connector, HOST_BYTES)
        served = Peer(InProcess(model, folder, **engine), connector)
    if feature == PIPELINE:  # see pipeline_process.py
        served.one.core.collective_rpc(lambda worker: worker.model_runner.profile_run())
    return served


def kill(served: Served) -> None:
    """End this process, and those of its workers, as kill -9 does."""
    for worker in getattr(served.one.core.model_executor, "workers", ()):
        worker.proc.kill()
        worker.proc.join()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    connector, feature, model, folder, options, *scenarios = sys.argv[1:]
    served = make(connector, feature, Path(model), Path(folder), json.loads(options))
    result = {name: SCENARIOS[name](served) for name in scenarios if name != "killed"}
    print("RESULT " + json.dumps(result), flush=True)
    if "killed" in scenarios:
        kill(served)


if __name__ == "__main__":
    main()
