# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine with torpor's KV connector, and a device pool that is far too small.

    connector_process.py MODE MODEL FOLDER    with MODE "eager" or "lazy"
    connector_process.py brief MODEL FOLDER   a few requests, for runners that take long
    connector_process.py groups MODEL FOLDER [OPTIONS]
        of a model with several KV groups; with a store on disk, and is killed. OPTIONS: of the engine, as JSON
    connector_process.py disk MODEL FOLDER [CHECKPOINT]
        serves with a store on disk, after it went on from the checkpoint; leaves one and is killed

Prints what came of each of SCENARIOS: answers, tokens that were not computed, counters.
"""

import atexit
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from conftest import InProcess
from connector_served import BLOCKS, ENGINE, GROUP_BLOCKS, Served, first_schedule, params, prompts, worker_side
from connector_events import published_blocks, events_of, types_of
from inspector import BINARY
from vllm.config import KVEventsConfig
from zygote import MOST_SECONDS

import torpor.console
from torpor.vllm import connector_scheduler


def identical(served: Served) -> dict:
    """Three times the same, of which the first computes everything."""
    rounds = [served.round(prompts()) for _ in range(3)]
    return {
        "tokens": [[tokens for tokens, _ in one] for one in rounds],
        "cached": [sum(cached for _, cached in one) for one in rounds],
        "counted": [served.cached, served.by_tier()],
        "stats": served.side.stats(),
    }


def loaded_is_what_prefill_writes(served: Served) -> dict:
    """Every block of a prompt whose blocks were loaded, beside the same blocks computed."""
    text, pool = prompts()[3], served.one.core.scheduler.kv_cache_manager.block_pool
    match = served.side.match

    def contents() -> list:
        [one] = served.round([text])
        keys = [key for key, _ in pool.cached_block_hash_to_block._cache.items()]
        blocks = {key: pool.cached_block_hash_to_block.get_one_block(key).block_id for key in keys}
        return one[1], {key: kv_bytes(served.one.runner, number) for key, number in blocks.items()}

    served.one.core.scheduler.reset_prefix_cache()
    cached, loaded = contents()
    served.one.core.scheduler.reset_prefix_cache()
    served.side.match = lambda request, computed: 0
    _, computed = contents()
    served.side.match = match
    both = loaded.keys() & computed.keys()
    differences = [float((loaded[key] - computed[key]).abs().max()) for key in both]
    largest = max(float(computed[key].abs().max()) for key in both)
    return {"cached": cached, "blocks": len(both), "difference": max(differences), "largest": largest}


def kv_bytes(runner, block: int):
    import torch

    layers = []
    for cache in runner.kv_caches:
        outer = 0 if cache.shape[0] == BLOCKS else 1
        layers.append(cache.select(outer, block).float().flatten().clone())
    return torch.cat(layers)


def only_what_is_written(served: Served) -> dict:
    """A step's report comes late: until then its blocks are neither stored nor held."""
    reported, late = served.side.reported, []
    served.one.core.scheduler.reset_prefix_cache(reset_connector=True)
    stored = served.side.stats()["host_blocks"]
    served.side.reported = late.append
    served.ask(prompts()[:1], 1)
    for _ in range(6):
        served.one.engine.step()
    before = served.side.stats()
    served.side.reported = reported
    for report in late:
        reported(report)
    served.answers()
    names = ("queued_blocks", "jobs_under_way", "held_blocks")

    def seen(stats: dict) -> list[int]:
        return [*(stats[name] for name in names), stats["host_blocks"] - stored]

    return {"before": seen(before), "after": seen(served.side.stats())}


def disturbed(served: Served) -> dict:
    """Aborts, preemptions and resets in the middle, while blocks move: the others' tokens are what they were.

    vLLM refuses a reset that would take blocks from steps in flight, or from requests that have loaded them, or load
    them: also from one that was aborted meanwhile.
    """
    expected = [tokens for tokens, _ in served.round(prompts(), 24)]
    made = random.Random(11)
    differing, aborted, resets = [], 0, []
    scheduler = served.one.core.scheduler
    for turn in range(4):
        ids = served.ask(prompts(), 24)
        gone = set()

        def disturb(ids=ids, gone=gone, turn=turn):
            what = made.random()
            if what < 0.08 and len(gone) < 4:
                gone.add(victim := made.choice(ids))
                served.one.engine.abort_request([victim])
            elif (
                what < 0.16
                and turn % 2
                and not served.one.core.batch_queue
                and not list(scheduler.kv_holding_waiting)
                and served.side.core.loading == 0
            ):
                scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=what < 0.1)
                resets.append(what)

        found = served.answers(disturb)
        aborted += len(gone - found.keys())
        differing += [i for number, i in enumerate(ids) if i in found and found[i][0] != expected[number]]
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    counts = {"aborted": aborted, "resets": len(resets), "free": free}
    return {"differing": differing, "stats": served.side.stats()} | counts


def aborted_while_loading(served: Served) -> dict:
    """Reports of the worker come late. Nothing of the requests stays held."""
    served.round(prompts())
    worker = worker_side()
    worker.look = lambda: None
    ids = served.ask(prompts())
    before = served.side.stats().get("onboard_transferred", 0)
    loading = 0
    for _ in range(3):
        served.one.engine.step()
        loading = max(loading, served.side.core.loading)
    served.one.engine.abort_request(ids)
    served.one.engine.step()
    held = len(served.one.core.scheduler.requests)
    del worker.look
    served.flush()
    end = time.monotonic() + MOST_SECONDS
    while served.one.core.scheduler.requests and time.monotonic() < end:
        served.one.engine.step()
        time.sleep(0.001)
    pool = served.one.core.scheduler.kv_cache_manager.block_pool
    return {
        "loading": loading,
        "held": held,
        "loaded": served.side.stats().get("onboard_transferred", 0) - before,
        "requests": len(served.one.core.scheduler.requests),
        "free": pool.get_num_free_blocks(),
        "still": served.side.core.loading,
    }


def published(served: Served) -> dict:
    """KV events: of each medium the same blocks, under the device's names."""
    scheduler, batches = served.one.core.scheduler, []
    scheduler.kv_event_publisher.publish = batches.append
    scheduler.reset_prefix_cache(reset_connector=True)
    served.round(prompts()[:3])
    events = [event for batch in batches for event in batch.events]
    stored = [event for event in events if type(event).__name__ == "BlockStored"]
    by_medium = {
        medium: sorted({str(key) for event in stored if event.medium == medium for key in event.block_hashes})
        for medium in ("GPU", "CPU", "STORAGE")
    }
    parents = {str(event.parent_block_hash) for event in stored if event.medium == "CPU" and event.parent_block_hash}
    cleared = sum(type(event).__name__ == "AllBlocksCleared" for event in events)
    return by_medium | {"parents": sorted(parents), "cleared": cleared}


def forgotten(served: Served) -> dict:
    """After a reset of the connector nothing is found, and then again what came since."""
    served.round(prompts())
    reset = served.one.core.scheduler.reset_prefix_cache(reset_connector=True)
    cached = [sum(cached for _, cached in served.round(prompts())) for _ in range(2)]
    return {"reset": reset, "cached": cached}


def slept(served: Served) -> dict:
    """In the middle, while requests wait for their blocks; with their state, and without."""
    expected = [tokens for tokens, _ in served.round(prompts(), 16)]
    engine, result = served.one.engine, {}
    for way in ("preserve_state", "recompute"):
        worker = worker_side()
        ids = served.ask(prompts(), 16)
        answers, loading = {}, 0

        def step(answers=answers):
            answers |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}

        for _ in range(6):
            step()
        worker.look = lambda: None  # reports come late
        for _ in range(60):
            step()
            loading = served.side.core.loading
            if loading > 0:
                break
        del worker.look
        before, space = served.side.stats()["host_blocks"], served.side.core.space
        options = {"preserve_state": True} if way == "preserve_state" else {"mode": "keep"}
        served.one.llm.sleep(level=1, **options)
        after = served.side.stats()
        step()
        scheduler = served.one.core.scheduler
        first = first_schedule(scheduler, served.side)
        served.one.llm.wake_up()
        without_blocks = [r.request_id for r in scheduler._inflight_prefills if r.num_computed_tokens == 0]
        found = answers | {i: tokens for i, (tokens, _) in served.answers().items()}
        result[way] = {
            "loading": loading,
            "reserved_in_vain": without_blocks,
            "first_schedule": first,
            "differing": [i for number, i in enumerate(ids) if i in found and found[i] != expected[number]],
            "finished": len(found),
            "kept": after["host_blocks"] >= before > 0 and served.side.core.space == space,
            "moving": after["loading_requests"] + after["jobs_under_way"] + after["held_blocks"],
            "recomputed": served.one.llm.torpor.state().recomputed_tokens,
        }
    result["cached"] = sum(cached for _, cached in served.round(prompts(), 16))
    return result


def brief(served: Served) -> dict:
    """With steps in flight: what is computed, what comes from host memory, and what a sleep in the middle leaves."""
    texts = prompts()[:6]
    cold, warm = served.round(texts, 4), served.round(texts, 4)
    ids = served.ask(texts, 4)
    answers = {
        o.request_id: list(o.outputs[0].token_ids) for _ in range(3) for o in served.one.engine.step() if o.finished
    }
    asleep = served.one.llm.sleep(level=1, preserve_state=True)
    moving = served.side.stats()
    answers |= {o.request_id: list(o.outputs[0].token_ids) for o in served.one.engine.step() if o.finished}
    served.one.llm.wake_up()
    answers |= {i: tokens for i, (tokens, _) in served.answers().items()}
    return {
        "tokens": [tokens for tokens, _ in cold],
        "warm": [tokens for tokens, _ in warm],
        "slept": [answers[i] for i in ids],
        "cached": [sum(cached for _, cached in one) for one in (cold, warm)],
        "moving": moving["jobs_under_way"] + moving["loading_requests"] + moving["held_blocks"],
        "taken_over": asleep.reused_bytes / worker_side().core.sizes()["block_bytes"],
        "in_flight": served.one.core.batch_queue is not None,
        "stats": served.side.stats(),
        "of_an_answer": blocks_of_an_answer(served),
    }


def blocks_of_an_answer(served: Served) -> int:
    """Of one that ends as soon as its third block is full: the last token is never computed."""
    before = served.side.stats()["host_blocks"]
    prompt = {"prompt_token_ids": [260 + number * 7 % 200 for number in range(90)]}
    served.one.engine.add_request("fills its third block", prompt, params(0, 7))
    served.answers()
    return served.side.stats()["host_blocks"] - before


def operated(served: Served, rings: str) -> dict:
    """Through its socket one request is held, then what goes to host memory; and blocks are dropped there."""
    texts, result = prompts()[:2], {}
    result["expected"] = [tokens for tokens, _ in served.round(texts)]
    with torpor.console.connect(rings) as engine:
        engine.add_breakpoint(type="request", request=f"{served.rounds + 1}-0*", alone=True, once=True, lease=300)
        held, other = served.ask(texts)
        answers = {}
        while other not in answers:
            answers |= {o.request_id: list(o.outputs[0].token_ids) for o in served.one.engine.step() if o.finished}
        result["stops"] = engine.stops()["stops"]
        result["first"] = list(answers) == [other]
        engine.resume()
        answers |= {i: tokens for i, (tokens, _) in served.answers().items()}
        result["tokens"] = [answers[held], answers[other]]
        # One transfer of a new prompt's blocks never goes: they stay on the device.
        before = served.side.stats()
        number = engine.add_breakpoint(type="candidate", to="promoted", way="offload", alone=True, lease=300)
        prompt = {"prompt_token_ids": [260 + number * 11 % 200 for number in range(70)]}
        served.one.engine.add_request("kept from host memory", prompt, params(0, 40))
        while not (queued := engine.stops()["stops"]):
            assert served.one.engine.has_unfinished_requests(), served.side.stats()
            served.one.engine.step()
        [name] = [slot["request"] for slot in engine.slots()["slots"]]
        candidates = engine.events(types="candidate", limit=10_000)["events"]
        last = [each for each in candidates if each["to"] == "queued"][-1]
        result["held_down"] = [
            queued[0]["cause"],
            served.side.stats()["offload_transferred"] - before["offload_transferred"],
        ]
        result["cancelled"] = engine.call("transfer.cancel", candidate=last["candidate"]) | {"of": last["blocks"]}
        result["absent"] = engine.call("block.drop", request=name, tier="host")
        engine.remove_breakpoint(number)
        served.answers()
        prompt = {"prompt_token_ids": [260 + number * 13 % 200 for number in range(70)]}
        served.one.engine.add_request("dropped from host memory", prompt, params(0, 160))
        before = served.side.stats()
        while served.side.stats()["offload_transferred"] < before["offload_transferred"] + 4:
            assert served.one.engine.has_unfinished_requests(), served.side.stats()
            served.one.engine.step()
        [name] = [slot["request"] for slot in engine.slots()["slots"]]
        blocks = served.side.stats()["host_blocks"]
        result["dropped"] = engine.call("block.drop", request=name, tier="host")
        result["fewer"] = blocks - served.side.stats()["host_blocks"]
        served.answers()
    return result


def several_groups(served: Served) -> dict:
    """A block is the same bytes for whichever group has it."""
    rounds = [served.round(prompts()) for _ in range(2)]
    config = served.one.runner.kv_cache_config
    result = {
        "tokens": [[tokens for tokens, _ in one] for one in rounds],
        "cached": [sum(cached for _, cached in one) for one in rounds],
        "by_tier": served.by_tier(),
        "stats": served.side.stats(),
        "bytes": (worker_side().core.sizes()["block_bytes"], config.kv_cache_tensors[0].size // config.num_blocks),
    }
    if result["stats"]["recovered_blocks"] == 0:
        result |= {scenario.__name__: scenario(served) for scenario in (slept, disturbed, aborted_while_loading)}
    return result | {"left": served.side.stats()}


def measured(served: Served) -> dict:
    """What LLM.get_metrics() has of all that was told, each step telling at once."""
    waits = connector_scheduler._STATS_SECONDS, connector_scheduler._LAST_STATS_SECONDS
    connector_scheduler._STATS_SECONDS = connector_scheduler._LAST_STATS_SECONDS = 0.0
    for _ in range(2):
        served.round(prompts())
    connector_scheduler._STATS_SECONDS, connector_scheduler._LAST_STATS_SECONDS = waits
    metrics = [dataclasses.asdict(metric) for metric in served.one.llm.get_metrics()]
    return {
        "published": dict(served.side._counted),
        "cached": served.cached,
        "sizes": worker_side().core.sizes(),
        "torpor": [metric for metric in metrics if metric["name"].startswith("torpor_offload_")],
        "vllm": sum(metric["name"].startswith("vllm:") for metric in metrics),
    }


SCENARIOS = (
    identical, measured, slept, loaded_is_what_prefill_writes, only_what_is_written,
    disturbed, aborted_while_loading, published, forgotten,
)  # fmt: skip


def served_from_disk(served: Served) -> dict:
    """The first round needs what an earlier process left there, if it did."""
    before = served.by_tier(), served.cached
    [answers, again] = [served.round(prompts()) for _ in range(2)]
    for _ in range(10):  # what was left out because the disk was slow is offered when it is computed again
        if served.side.stats()["disk_blocks"] > 50:
            break
        served.one.core.scheduler.reset_prefix_cache()
        again = served.round(prompts())
    return {
        "tokens": [tokens for tokens, _ in answers],
        "again": [tokens for tokens, _ in again],
        "cached": sum(cached for _, cached in answers),
        "by_tier": {tier: tokens - before[0][tier] for tier, tokens in served.by_tier().items()},
        "of_all": served.cached - before[1],
        "stats": served.side.stats(),
    }


def left_asleep(served: Served) -> dict:
    """Requests in the middle, asleep on disk, for another process."""
    ids = served.ask(prompts()[:5], 24)
    answers = {}
    for _ in range(10):
        answers |= {o.request_id: list(o.outputs[0].token_ids) for o in served.one.engine.step() if o.finished}
    path = served.one.llm.sleep(level=1, preserve_state=True, to="disk").checkpoint
    answers |= {o.request_id: list(o.outputs[0].token_ids) for o in served.one.engine.step() if o.finished}
    served.one.llm.wake_up()
    whole = answers | {i: tokens for i, (tokens, _) in served.answers().items()}
    return {"checkpoint": str(path), "expected": [whole[i] for i in ids], "given": {i: answers.get(i) for i in ids}}


def gone_on(served: Served, checkpoint: str) -> dict:
    report = served.one.llm.wake_up(from_checkpoint=checkpoint)
    return {
        "failed": report.failed_requests,
        "answers": {i: tokens for i, (tokens, _) in served.answers().items()},
        "stats": served.side.stats(),
        "recomputed": served.one.llm.torpor.state().recomputed_tokens,
    }


def new_weights(served: Served) -> dict:
    """The same ones, loaded again: for all that is known they are others."""
    before = served.side.core.space
    served.one.core.collective_rpc("reload_weights")
    served.round(prompts()[:1])
    return {"before": before, "after": served.side.core.space, "blocks": served.side.stats()["disk_blocks"]}


def scaled(worker, by: float) -> list:
    """The weights of one norm times `by`, as a checkpoint has them."""
    name = "model.layers.0.input_layernorm.weight"
    return [(name, worker.model_runner.model.get_parameter(name).detach() * by)]


def load_scaled(worker, by: float) -> None:
    worker.model_runner.model.load_weights(iter(scaled(worker, by)))


def write_scaled(worker, by: float) -> None:
    """As a trainer does that calls nothing of vLLM's."""
    [(name, tensor)] = scaled(worker, by)
    worker.model_runner.model.get_parameter(name).data.copy_(tensor)


def written_weights(served: Served) -> dict:
    """Other weights by each way, then a reset of vLLM's own cache alone. By way: the cached tokens of the first round
    of requests, and whether these got the tokens that they get without any cache."""
    found, texts, llm = {}, prompts()[:4], served.one.llm
    worker = served.one.core.model_executor.driver_worker.worker
    ways = {
        "loaded by a call of the workers": lambda: llm.collective_rpc(load_scaled, args=(3.0,)),
        "loaded in the engine's process": lambda: load_scaled(worker, 0.5),
        "written": lambda: llm.collective_rpc(write_scaled, args=(3.0,)),
    }

    def first_round(write) -> dict:
        before = served.side.core.space
        write()
        assert llm.reset_prefix_cache()
        first = served.round(texts)
        spaces = served.side.core.space - before
        assert llm.reset_prefix_cache(reset_connector=True)
        fresh = served.round(texts)
        right = [tokens for tokens, _ in first] == [tokens for tokens, _ in fresh]
        return {"cached": [cached for _, cached in first], "right": right, "spaces": spaces}

    served.round(texts)
    for way, write in ways.items():
        found[way] = first_round(write)
    with llm.updating_weights(version="2"):
        llm.collective_rpc(write_scaled, args=(0.5,))
    llm.reset_prefix_cache()
    before = served.side.core.space, served.side.stats()["offload_transferred"]
    served.round(texts)
    stored = served.side.stats()["offload_transferred"] - before[1]
    found["updating_weights"] = {"spaces": served.side.core.space - before[0], "stored": stored}
    llm.collective_rpc(lambda worker: None)  # whoever reads it does not know that it writes nothing
    llm.reset_prefix_cache()
    llm.torpor.ledger()  # an order
    found["proven"] = worker.torpor_memory.rank_memory.proven_digest("weights") is not None
    return found


def reset_after_reload(served: Served) -> dict:
    """The first process stores KV of weights that were written unseen, loads the right ones, and resets all caches. A
    second one finds what was stored from then on."""
    texts, llm, side = prompts()[:4], served.one.llm, served.side
    found: dict = {"recovered": side.stats()["recovered_blocks"]}
    if not found["recovered"]:
        llm.collective_rpc(write_scaled, args=(3.0,))
        found["wrong"] = served.round(texts)
        llm.collective_rpc("reload_weights")
        assert llm.reset_prefix_cache(reset_connector=True)
    found["first"] = served.round(texts)
    worker_side().wait()  # for what is on its way to disk
    assert llm.reset_prefix_cache(reset_connector=bool(found["recovered"]))
    found["again"] = served.round(texts)
    return found


def main() -> None:
    mode, model, folder = sys.argv[1:4]
    offload = {"offload": mode, "host_bytes": "64MiB", "sync_load_budget_bytes": 0}  # requests wait for their loads
    if mode == "lazy":  # and packed there
        offload |= {"host_compression": "bf16"}
        ENGINE["dtype"] = "bfloat16"
    if mode == "disk":  # host memory has fewer blocks than the device
        offload = {"offload": "eager", "host_bytes": "2MiB", "disk_bytes": "256MiB", "sync_load_budget_bytes": "64MiB"}
    if mode in ("weights", "weights_disk"):
        offload = {"offload": "eager", "host_bytes": "64MiB"}
        offload |= {"disk_bytes": "64MiB"} if mode == "weights_disk" else {}
    if mode == "reset":
        offload = {"offload": "eager", "host_bytes": "64MiB", "disk_bytes": "64MiB", "kv_store": f"file://{folder}/kv"}
    if mode in ("eager", "lazy"):
        ENGINE["disable_log_stats"] = False
    if mode in ("eager", "lazy", "disk"):
        ENGINE["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    if mode == "groups":
        offload = {"offload": "eager", "host_bytes": "64MiB", "disk_bytes": "64MiB"}
        ENGINE["num_gpu_blocks_override"] = GROUP_BLOCKS
        ENGINE.update(json.loads(sys.argv[4]) if len(sys.argv) > 4 else {})
    if mode == "brief":
        offload |= {"offload": "eager", "events_keys": True, "console": "control"}
        ENGINE["num_gpu_blocks_override"] = 20
    if mode in ("brief", "disk"):
        rings = tempfile.mkdtemp(dir="/dev/shm")
        atexit.register(shutil.rmtree, rings, ignore_errors=True)
        offload |= {"events_dir": rings}
    offload |= {"advanced": {"policy_timeout_ms": 1000 * MOST_SECONDS}}  # a slow machine leaves no block out
    served = Served(InProcess(Path(model), Path(folder) / "checkpoints", torpor=offload, **ENGINE))
    if mode == "brief":
        with torpor.console.connect(rings) as engine:  # before its first step
            at_once = len(engine.hello()["methods"])
        result = (
            {"at_once": at_once} | brief(served) | {"published": events_of(rings), "operated": operated(served, rings)}
        )
        print("RESULT " + json.dumps(result | {"types": types_of(rings)}), flush=True)
        if keep := os.environ.get("KEEP_EVENTS"):
            subprocess.run([BINARY, "record", rings, "-o", keep, "--for", "0.1s"], check=True, capture_output=True)
        return
    if mode in ("weights", "weights_disk"):
        print("RESULT " + json.dumps(written_weights(served)), flush=True)
        return
    if mode == "reset":
        print("RESULT " + json.dumps(reset_after_reload(served)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "groups":
        print("RESULT " + json.dumps(several_groups(served)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "disk":
        woken = gone_on(served, sys.argv[4]) if len(sys.argv) > 4 else None
        # With a reset of the connector: what is stored from then on is found by the next process all the same.
        first = (
            {"published": published(served)} if woken is None and not served.side.stats()["recovered_blocks"] else {}
        )
        result = first | served_from_disk(served)
        result["blocks"] = published_blocks(rings)
        result |= {"woken": woken, "asleep": left_asleep(served), "new": new_weights(served)}
        shutil.rmtree(rings)
        print("RESULT " + json.dumps(result), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    result = {scenario.__name__: scenario(served) for scenario in SCENARIOS}
    sizes = worker_side().core.sizes()
    print(
        "RESULT " + json.dumps(result | {"room": sizes["host_slots"] * sizes["block_bytes"] / (64 << 20)}), flush=True
    )


if __name__ == "__main__":
    main()
