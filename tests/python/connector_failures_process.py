# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: vLLM's scheduler with torpor's KV connector, without a model, and workers that are made up.

    connector_failures_process.py MODEL    prints what came of each of SCENARIOS

Each is a failure that other connectors had; what the workers say, and when, is the scenario's.
"""

import functools
import json
import os
import sys
import tempfile
import time
from collections import Counter

from connector_made_up import FAILED, PROMPT_BLOCKS, Damaging, Served, Workers, replay
from vllm.config import KVEventsConfig
from vllm.v1.core.block_pool import BlockPool


def store_waits_for_compute(model) -> dict:
    served = Served(model)
    served.ask(1000)
    served.workers.late = True  # the step that writes the blocks is not over
    served.step(3)
    early = sum(map(len, served.workers.blocks(replay.PlannedMoves.PUT)))
    served.workers.late = False
    served.finish()
    return {"early": early, "stored": served.result.stored_blocks}


def priorities_of_any_size(model) -> dict:
    """A client chooses its request's priority, and vLLM takes 64 bits of it."""
    served = Served(model)
    for first, priority in enumerate((-(1 << 63), -1, (1 << 63) - 1)):
        served.ask(1000 * (first + 1), priority=priority)
    served.finish()
    return {"stored": served.result.stored_blocks, "left": served.left()}


def lazy_priorities(model) -> dict:
    """Of blocks that are given up in one step, those of the more urgent request go first; of a shared one it is that of
    the most urgent request. `stored`: which request's they are."""
    served = with_events(model, "lazy", device_blocks=60)
    published = events_of(served)
    tokens = 8 * replay.BLOCK + 3
    urgency = {"later": (1000, 5), "first": (2000, -1)}
    prompts = {name: served.ask(first, tokens=tokens, priority=each) for name, (first, each) in urgency.items()}
    served.finish()
    served.ask(9000, tokens=replay.BLOCK)  # steps, in which they are offered
    served.finish()
    whose = {key: name for name, request in prompts.items() for key in keys_of(served, request)}
    stored = [whose[event.block_hashes[0]] for event in published() if event.block_hashes[0] in whose]
    return {"stored": stored, "left": served.left()}


def events_name_their_parents(model) -> dict:
    """Of each way of offloading: events of stored blocks by whether the parent that they tell is the block's."""
    result = {}
    for mode in ("eager", "lazy"):
        served = with_events(model, mode, device_blocks=60)
        published = events_of(served)
        requests = []
        for first in range(6):
            requests.append(served.ask(1000 * (first + 1), output_tokens=20))
            served.finish()
        parents = {}
        for request in requests:
            parents |= dict(zip(keys := keys_of(served, request), [None, *keys], strict=False))
        result[mode] = Counter(
            "right" if event.parent_block_hash == parents[event.block_hashes[0]]
            else "none" if event.parent_block_hash is None
            else "wrong"
            for event in published()
        )  # fmt: skip
    return result


def failures_of_the_block_pool_are_published(model) -> dict:
    """An engine whose pool raises where torpor gives blocks back: what its log says, and how many blocks are gone."""

    def raises(self, ordered_blocks):
        raise RuntimeError("not these")

    stock, BlockPool.free_blocks = BlockPool.free_blocks, raises
    try:
        served = Served(model)  # torpor's side has this method, vLLM's own calls the stock one
    finally:
        BlockPool.free_blocks = stock
    with tempfile.TemporaryFile() as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            served.ask(1000, output_tokens=1)
            served.finish()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        file.seek(0)
        return {"said": file.read().decode(), "left": served.left()}


def with_events(model, mode: str, **shape) -> Served:
    stock = replay.EngineArgs
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    replay.EngineArgs = functools.partial(stock, kv_events_config=events)
    try:
        return Served(model, offload=mode, **shape)
    finally:
        replay.EngineArgs = stock


def events_of(served: Served):
    """A function that gives what was told as stored until then."""
    published, take = [], served.side.take_events

    def taken():
        published.extend(taken_now := take())
        return taken_now

    served.side.take_events = taken

    def stored():
        taken()
        return [event for event in published if type(event).__name__ == "BlockStored"]

    return stored


def keys_of(served: Served, request) -> list:
    return [served.side._external(bytes(key)) for key in request.block_hashes]


def load_waits_for_readers(model) -> dict:
    """Under pressure: what a step loads into, no request reads in it; what it stores from, none writes in it."""
    served = Served(model, device_blocks=60)
    tables = served.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    found = {"read": 0, "written": 0, "loaded": 0}

    def watch():
        reading, writing = set(), set()
        for name, tokens in served.replay.planned.num_scheduled_tokens.items():
            table = [block.block_id for block in tables[name]]
            computed = served.scheduler.requests[name].num_computed_tokens
            reading.update(table)
            writing.update(table[(computed - tokens) // replay.BLOCK : -(-computed // replay.BLOCK)])
        into = served.workers.blocks(replay.PlannedMoves.GET)[-1]
        found["loaded"] += len(into)
        found["read"] += len(into & reading)
        found["written"] += len(served.workers.blocks(replay.PlannedMoves.PUT)[-1] & writing)

    served.workers.watch = watch
    for turn in range(40):
        served.ask(1000 + 20 * (turn % 7), output_tokens=20)
        served.step(3)
    served.finish()
    return found | {"left": served.left()}


def abort_of_never_scheduled_request(model) -> dict:
    from vllm.v1.request import RequestStatus

    served = Served(model, device_blocks=40)
    served.ask(1000)
    served.finish()
    served.forget_device()
    long = served.ask(5000, output_tokens=200, tokens=30 * replay.BLOCK)  # leaves no room
    served.step(2)
    asked = served.ask(1000)  # a hit that gets no blocks
    served.step(2)
    pinned = asked.num_computed_tokens == 0 and asked in served.scheduler.waiting
    never = served.ask(2000)
    for each in (never, asked, long):
        served.scheduler.finish_requests(each.request_id, RequestStatus.FINISHED_ABORTED)
    served.finish()
    return {"waited": pinned, "left": served.left()}


def external_hit_under_eviction_pressure(model) -> dict:
    found = []
    for window in (0, 3 * replay.BLOCK):
        served = Served(model, device_blocks=40 if window == 0 else 50, window=window)
        for turn in range(30):
            served.ask(1000 + 20 * (turn % 9), output_tokens=90)
            served.step(2)
        served.finish()
        counts = {"host_tokens": served.result.host_tokens, "preemptions": served.result.preemptions}
        found.append(counts | {"left": served.left()})
    return {"plain": found[0], "hybrid": found[1]}


def every_stored_block_is_found(model) -> dict:
    served = Served(model)
    prompts = [1000 + 20 * number for number in range(12)]
    for first in prompts:
        served.ask(first)
        served.finish()
    served.forget_device()
    before = served.result.host_tokens
    for first in prompts:
        served.ask(first)
        served.finish()
    found = (served.result.host_tokens - before) // replay.BLOCK
    return {"found": found, "prompt_blocks": PROMPT_BLOCKS * len(prompts)}


def new_weights_over_old_blocks(model) -> dict:
    """The engine keeps its own prefix cache over new weights. What stands on it is not for the new namespace; what is
    computed afresh is."""
    found = []
    for mode in ("eager", "lazy"):
        served = Served(model, offload=mode)
        served.ask(1000)
        served.step(2)
        running = served.ask(3000, output_tokens=60)  # in the middle
        served.step(3)
        served.side.new_weights()
        for first in (1000, 12000, 13000, 14000):  # while the others run, the first one's blocks are free
            served.ask(first)
            served.finish()
        stored = served.side.stats()["host_blocks"]
        served.forget_device()
        before = served.result.host_tokens
        for first in (1000, 3000):
            served.ask(first)
            served.finish()
        host_tokens = served.result.host_tokens - before
        for first in (5000, 6000, 7000, 8000, 9000, 10000):  # the pool is too small for all
            served.ask(first)
            served.finish()
        served.forget_device()
        served.ask(1000)
        served.finish()
        afresh = served.result.host_tokens - before - host_tokens
        found.append(
            {"begun": running.num_computed_tokens > 0, "stale": host_tokens, "afresh": afresh, "stored": stored}
        )
    return {"eager": found[0], "lazy": found[1]}


def ranks_agree_on_capacity(model) -> dict:
    served = Served(model, workers=Workers(50, 40), world=2)
    for turn in range(20):
        served.ask(1000 + 20 * turn)
        served.finish()
    slots = {slot for plan in served.workers.plans if plan for job in plan.jobs if job[1] == 0 for slot in job[3]}
    return {"largest_slot": max(slots), "blocks": served.side.stats()["host_blocks"], "left": served.left()}


def shared_prefix_does_not_queue_on_one_load(model) -> dict:
    served = Served(model)
    served.ask(1000)
    served.finish()
    served.forget_device()
    for _ in range(5):
        served.ask(1000)
    served.step()
    loading = served.side.core.loading
    took = served.result.steps
    served.finish()
    return {"loading": loading, "steps": served.result.steps - took, "left": served.left()}


def memory_flat_over_long_trace(model) -> dict:
    served = Served(model, device_blocks=200)
    prompts = [tuple(range(1000 + 20 * (number % 211), 1002 + 20 * (number % 211))) for number in range(4000)]
    resident = served.replay.run([replay.TraceRequest(ids, 250, 6) for ids in prompts], samples=20).resident
    return {"grown": max(resident[10:]) - resident[9], "left": served.left()}


def idle_worker_is_not_dead(model) -> dict:
    """It says nothing for a thousand steps in which it has something to do."""
    served = Served(model)
    served.ask(1000)
    served.workers.late = True
    served.step(1000)
    held = served.side.stats()
    served.workers.late = False
    served.finish()
    return {
        "under_way": served.side.busy(),
        "while_silent": held["host_blocks"],
        "after": served.side.stats()["host_blocks"],
    }


def tier_process_dies_under_live_views(model) -> dict:
    """One of two ranks says nothing any more: nothing of it is believed, and what is computed goes on."""
    served = Served(model, workers=Workers(400, 400), world=2)
    served.workers.silent = {1}
    for _ in range(2):
        served.ask(1000)
        served.step(40)
        served.forget_device()
    return {
        "found": served.result.host_tokens,
        "blocks": served.side.stats()["host_blocks"],
        "requests": len(served.scheduler.requests),
    }


def failed_copies_are_computed(model) -> dict:
    """Half of the stores fail on a rank: they are not found, and the others are."""

    class Failing(Workers):
        def report(self, rank, moves):
            if rank == 0 or all(kind != moves.PUT for _, kind, *_ in moves.jobs):
                return super().report(rank, moves)
            jobs, outcomes = b"", b""
            for number, kind, sources, _ in moves.jobs:
                count = len(sources) if kind == moves.PUT else 0
                jobs += self.DONE.pack(number, count, 1, 0)
                outcomes += bytes(FAILED if at % 2 else 0 for at in range(count))
            return self.REPORT.pack(self.MAGIC, self.VERSION, rank, len(moves.jobs), len(outcomes), 0) + jobs + outcomes

    served = Served(model, workers=Failing(400, 400), world=2)
    served.ask(1000)
    served.finish()
    return {"stored": served.result.stored_blocks, "blocks": served.side.stats()["host_blocks"], "left": served.left()}


def damaged_block_of_several_groups(model) -> dict:
    """One block of a load is damaged: what lies before it is loaded by another one, and only the rest is computed."""
    served = Served(model, workers=Damaging(), window=3 * replay.BLOCK)
    served.ask(1000)
    served.finish()
    served.forget_device()
    before = served.result.found_tokens
    served.ask(1000)
    served.finish()
    loads = [len(blocks) for blocks in served.workers.blocks(replay.PlannedMoves.GET) if blocks]
    return {"loads": loads, "found": (served.result.found_tokens - before) // replay.BLOCK, "left": served.left()}


def loads_that_all_fail_at_once(model) -> dict:
    """They fill the device; what is found of them after that, too. Some fail while others load, some together."""
    served = Served(model, device_blocks=150, workers=Damaging(), window=3 * replay.BLOCK)
    prompts = [1000 + 20 * number for number in range(12)]
    for first in prompts:
        served.ask(first)
        served.finish()
    served.forget_device()
    before = served.result.found_tokens
    for number, first in enumerate(prompts):
        served.ask(first)
        if number % 3 == 0:
            served.step()
    loading = 0
    while served.scheduler.has_requests() and served.result.steps < 2000:
        served.step()
        loading = max(loading, served.side.core.loading)
    found = (served.result.found_tokens - before) // replay.BLOCK
    return {"loading": loading, "requests": len(served.scheduler.requests), "found": found, "left": served.left()}


def waiting_request_is_asked_for_again(model) -> dict:
    """In each step: what it has it keeps, and it gets what is stored meanwhile."""
    served = Served(model)
    tokens = 40 * replay.BLOCK + 3  # in two steps
    served.ask(1000, tokens=tokens)
    found = []
    while served.side.stats()["host_blocks"] == 0:
        served.step()
    served.workers.late = True
    asked = replay.TraceRequest(tuple(range(1000, 1006)), tokens, 1)
    waiting = served.replay.request(1000, asked)
    for late in (True, True, False):
        served.workers.late = late
        served.step(3)
        found.append(served.side.core.match(waiting, 0) // replay.BLOCK)
    served.side.core.finished(waiting.request_id, served.side.steps, False)
    served.finish()
    return {"found": found, "left": served.left()}


def shared_blocks_are_stored_once(model) -> dict:
    """By two requests of one step, and by a third while the store is under way."""
    served = Served(model)
    served.ask(1000)
    served.ask(1000)
    served.step(2)
    served.workers.late = True
    served.ask(1000)
    served.step(3)
    served.workers.late = False
    served.finish()
    return {"stored": served.result.stored_blocks, "blocks": served.side.stats()["host_blocks"], "left": served.left()}


def device_then_host_then_computed(model) -> dict:
    """What the device has is not loaded, and neither is the block of the last token."""
    served = Served(model)
    whole, half = PROMPT_BLOCKS * replay.BLOCK, PROMPT_BLOCKS // 2 * replay.BLOCK + 3
    served.ask(1000, output_tokens=1, tokens=whole)
    served.finish()
    served.forget_device()
    loaded = []
    for tokens in (half, whole):
        before = served.result.loaded_blocks
        served.ask(1000, output_tokens=1, tokens=tokens)
        served.finish()
        loaded.append(served.result.loaded_blocks - before)
    return {"loaded": loaded, "stored": served.result.stored_blocks, "left": served.left()}


SCENARIOS = (
    store_waits_for_compute, priorities_of_any_size, lazy_priorities, events_name_their_parents,
    failures_of_the_block_pool_are_published, load_waits_for_readers, abort_of_never_scheduled_request,
    external_hit_under_eviction_pressure, every_stored_block_is_found, ranks_agree_on_capacity,
    new_weights_over_old_blocks, shared_prefix_does_not_queue_on_one_load, memory_flat_over_long_trace,
    idle_worker_is_not_dead, tier_process_dies_under_live_views, failed_copies_are_computed,
    damaged_block_of_several_groups, loads_that_all_fail_at_once, waiting_request_is_asked_for_again,
    shared_blocks_are_stored_once, device_then_host_then_computed,
)  # fmt: skip

if __name__ == "__main__":
    results = {}
    for scenario in SCENARIOS:
        if len(sys.argv) > 2 and scenario.__name__ not in sys.argv[2:]:
            continue
        began = time.monotonic()
        results[scenario.__name__] = scenario(sys.argv[1])
        print(f"{scenario.__name__}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    print("RESULT " + json.dumps(results), flush=True)
