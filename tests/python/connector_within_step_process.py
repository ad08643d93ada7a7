# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine with torpor's KV connector whose small loads end within their step.

connector_within_step_process.py MODEL FOLDER    prints what came of each of SCENARIOS
"""

import ctypes
import json
import mmap
import re
import sys
import time
from pathlib import Path

from conftest import InProcess, gpu_path
from connector_process import disturbed
from connector_served import BLOCKS, ENGINE, Served, prompts, worker_side
from zygote import MOST_SECONDS

BLOCK_BYTES = (64 if gpu_path.active() else 128) << 10  # of the tiny model of either path
BUDGET, HOST = 9, 100  # in blocks; a prompt has 4 to 8
BLOCK = 32


class Steps:
    """What the connector ordered in each step, while it is looked at."""

    def __init__(self, served: Served):
        self.served, self.seen = served, []

    def __enter__(self):
        connector = self.served.one.core.scheduler.connector
        stock = type(connector).build_connector_meta

        def build(output):
            orders = stock(connector, output)
            waits = orders.wait_seconds, self.served.side.busy()
            self.seen.append((dict(output.num_scheduled_tokens), list(orders.within_step), waits))
            return orders

        connector.build_connector_meta = build
        return self.seen

    def __exit__(self, *_):
        del self.served.one.core.scheduler.connector.build_connector_meta


def tokens_of(number: int, blocks: int, more: int = 5) -> list[int]:
    """A prompt of so many blocks, and some tokens more."""
    return [20 + (number * 977 + at * 131) % 480 for at in range(BLOCK * blocks + more)]


def has_name(request_id: str, name: str) -> bool:
    """Whether vLLM's own id is of the request that was asked under this name."""
    return request_id == name or request_id.startswith(f"{name}-")


def ask(served: Served, name: str, prompt: list[int], tokens: int = 6, number: int = 0) -> None:
    served.one.engine.add_request(name, {"prompt_token_ids": prompt}, served.params(number, tokens))


def forget_device(served: Served) -> None:
    assert served.one.core.scheduler.reset_prefix_cache()


def first_token(served: Served) -> dict:
    """Loads of two requests, of which only the first fits into the budget of the step: steps to each first token."""
    small, large = tokens_of(1, 6), tokens_of(2, 7)
    ask(served, "computed small", small)
    ask(served, "computed large", large)
    computed = served.answers()
    forget_device(served)
    before = served.side.stats()
    with Steps(served) as steps:
        ask(served, "small", small)
        ask(served, "large", large)
        answers = served.answers()
    first = {
        name: next(i for i, (scheduled, *_) in enumerate(steps, 1) if any(has_name(each, name) for each in scheduled))
        for name in ("small", "large")
    }
    after = served.side.stats()
    return {
        "steps": first,
        "within": [names for _, names, _ in steps if names],
        "counted": after["loads_within_step"] - before["loads_within_step"],
        "loaded": after["onboard_transferred"] - before.get("onboard_transferred", 0),
        "cached": [answers[name][1] for name in first],
        "same": all(answers[name][0] == computed[f"computed {name}"][0] for name in first),
        "left": [after[name] for name in ("held_blocks", "loading_requests", "jobs_under_way")],
    }


def waits(served: Served) -> dict:
    """Steps of a load that does not fit into the budget: those that compute nothing wait for it."""
    long = tokens_of(3, BUDGET + 3)
    ask(served, "computed long", long)
    computed = served.answers()
    forget_device(served)
    with Steps(served) as steps:
        ask(served, "long", long)
        answers = served.answers()
    idle = [wait for scheduled, _, wait in steps if not scheduled]
    return {
        "idle": len(idle),
        "waits": sorted({wait for wait, busy in idle if busy}),
        "others": sorted({wait for scheduled, _, (wait, busy) in steps if scheduled or not busy}),
        "within": [names for _, names, _ in steps if names],
        "same": answers["long"][0] == computed["computed long"][0],
    }


def identical(served: Served) -> dict:
    """Three times the same, of which the first computes everything."""
    before = served.side.stats()["loads_within_step"]
    texts = [text[: len(text) // 2] if gpu_path.active() else text for text in prompts()]  # it has fewer words
    rounds = [served.round(texts) for _ in range(3)]
    return {
        "tokens": [[tokens for tokens, _ in one] for one in rounds],
        "cached": [sum(cached for _, cached in one) for one in rounds],
        "counted": [served.cached, served.by_tier()],
        "within": served.side.stats()["loads_within_step"] - before,
        "stats": served.side.stats(),
    }


def damaged(served: Served) -> dict:
    """A block in host memory is damaged, of requests with and without a seed. The request computes. One with the same
    prompt and one that goes on behind it come in the same step. Others come in the next step, which may begin before
    that one has ended, also one that goes on otherwise, and in later ones. In some cases the first three are aborted
    behind the step, or while it runs, so nobody computes for them what they had."""
    result, core = [], served.one.core
    for number, abort in enumerate((None, None, "behind", "behind", "within", "within")):
        prompt = tokens_of(10 + number, 7)
        longer, other = (prompt[: 7 * BLOCK] + tokens_of(tail + number, 2) for tail in (30, 50))
        ask(served, "computed", prompt, number=number)
        [request] = core.scheduler.requests.values()
        expected = served.answers()["computed"][0]
        written = damage(served, list(request.block_hashes), at=1 + number)
        forget_device(served)
        before = served.side.stats()
        with Steps(served) as steps:
            ask(served, "first", prompt, number=number)
            ask(served, "beside", prompt, number=number)
            ask(served, "longer", longer, number=number)
            if abort == "within":
                core.aborts_queue.put(list(core.scheduler.requests))
            found = served.one.engine.step()
            ask(served, "in the next step", prompt, number=number)
            ask(served, "other in the next step", other, number=number)
            in_flight = bool(core.batch_queue)
            if in_flight:
                found += served.one.engine.step()
            if abort is not None:
                served.one.engine.abort_request(["first", "beside", "longer"])
            ask(served, "next", prompt, number=number)
            answers = served.answers()
        ask(served, "longer next", longer, number=number)
        ask(served, "other next", other, number=number)
        answers |= served.answers()
        forget_device(served)
        ask(served, "again", prompt, number=number)
        ask(served, "longer again", longer, number=number)
        ask(served, "other again", other, number=number)
        answers |= served.answers()
        after = served.side.stats()
        assert core.scheduler.reset_prefix_cache(reset_connector=True)
        ask(served, "longer", longer, number=number)
        ask(served, "other", other, number=number)
        computed = {name: tokens for name, (tokens, _) in served.answers().items()}
        result.append({
            "written": written,
            "within": [names for _, names, _ in steps if names],
            "in_flight": in_flight,
            "first": [output.request_id for output in found if output.outputs[0].token_ids],
            "damaged": after.get("onboard_damaged", 0) - before.get("onboard_damaged", 0),
            "differing": [
                name for name, (tokens, _) in answers.items() if tokens != computed.get(name.split()[0], expected)
            ],
            "answers": len(answers),
            "cached": answers["again"][1],
            "left": [after[name] for name in ("held_blocks", "loading_requests", "jobs_under_way")],
        })  # fmt: skip
    return {"each": result, "free": core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()}


def damage(served: Served, hashes: list, at: int) -> int:
    """Write large numbers over a part of each copy that host memory has of block `at` of a request. Return how many
    there are.

    There records begin with pages. What else has these bytes, and may be gone by now, is the allocator's of C.
    """
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    pool, runner = served.one.core.scheduler.kv_cache_manager.block_pool, served.one.runner
    block = pool.cached_block_hash_to_block.get_one_block(make_block_hash_with_group_id(hashes[at], 0)).block_id
    part = runner.kv_caches[0].select(0 if runner.kv_caches[0].shape[0] == BLOCKS else 1, block)
    while part.dim() > 1:
        part = part[0]
    pattern = ctypes.string_at(part.data_ptr(), part.numel() * part.element_size())
    device = [(each.data_ptr(), each.data_ptr() + each.numel() * each.element_size()) for each in runner.kv_caches]
    copies = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        begin, end = (int(each, 16) for each in span.split("-"))
        if rights.startswith("rw") and 1 << 20 <= end - begin < 1 << 31:
            memory = (ctypes.c_char * (end - begin)).from_address(begin)
            copies += [begin + match.start() for match in re.finditer(re.escape(pattern), memory)]
    pages = [address for address in copies if address % mmap.PAGESIZE == 0]
    copies = [address for address in pages if not any(low <= address < high for low, high in device)]
    for address in copies:
        ctypes.memset(address, 0x44, len(pattern))
    return len(copies)


def ahead(served: Served) -> dict:
    """A request waits while none is admitted: what only the disk has of it comes into host memory."""
    prompt, scheduler = tokens_of(50, 8), served.one.core.scheduler
    ask(served, "computed", prompt)
    expected = served.answers()["computed"][0]
    for other in range(HOST // 8 + 2):
        ask(served, f"other-{other}", tokens_of(60 + other, 8), tokens=1)
        served.answers()
    forget_device(served)
    before, tiers, most = served.side.stats(), served.by_tier(), scheduler.max_num_active_reqs
    scheduler.max_num_active_reqs = 0
    ask(served, "waits", prompt)
    end = time.monotonic() + MOST_SECONDS
    served.one.engine.step()
    while served.side.busy() and time.monotonic() < end:
        served.one.engine.step()
    came, computed = served.side.stats(), [request.num_computed_tokens for request in scheduler.requests.values()]
    scheduler.max_num_active_reqs = most
    answers = served.answers()
    after = served.side.stats()
    return {
        "came": came.get("prefetch_transferred", 0) - before.get("prefetch_transferred", 0),
        "computed": computed,
        "same": answers["waits"][0] == expected,
        "tiers": {tier: tokens - tiers[tier] for tier, tokens in served.by_tier().items()},
        "within": after["loads_within_step"] - before["loads_within_step"],
    }


SCENARIOS = (first_token, waits, identical, damaged, ahead, disturbed)


def main() -> None:
    model, folder = sys.argv[1:]
    torpor = {
        "offload": "eager",
        "host_bytes": HOST * BLOCK_BYTES,
        "disk_bytes": "64MiB",
        "sync_load_budget_bytes": BUDGET * BLOCK_BYTES,
        "advanced": {"policy_timeout_ms": 1000 * MOST_SECONDS},  # a slow machine leaves no block out
    }
    served = Served(InProcess(Path(model), Path(folder) / "checkpoints", torpor=torpor, **ENGINE))
    result = {scenario.__name__: scenario(served) for scenario in SCENARIOS}
    print(
        "RESULT " + json.dumps(result | {"block": worker_side().core.sizes()["block_bytes"] / BLOCK_BYTES}), flush=True
    )


if __name__ == "__main__":
    main()
