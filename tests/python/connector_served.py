# SPDX-License-Identifier: Apache-2.0
"""One engine with torpor's KV connector in this process, and requests that are asked of it again and again."""

import random
import time
from collections.abc import Callable, Iterator

from conftest import InProcess
from vllm import RequestOutput, SamplingParams
from zygote import MOST_SECONDS

from torpor.vllm.connector_sleep import side_of

BLOCKS = 40  # on the device; a request has 4 to 8
GROUP_BLOCKS = 90  # of three groups
ENGINE = {"num_gpu_blocks_override": BLOCKS, "max_model_len": 512}
CONVERSATIONS = 14


def prompts() -> list[str]:
    words = ["sea", "clock", "letter", "stone", "window", "garden", "river", "story"]
    made = random.Random(5)
    return [" ".join(made.choice(words) for _ in range(made.randint(60, 110))) for _ in range(CONVERSATIONS)]


def params(number: int, tokens: int = 8) -> SamplingParams:
    more = {"temperature": 0} if number % 2 == 0 else {"temperature": 1.0, "seed": number}
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **more)


def steps_of(one: InProcess, stuck: Callable[[], object]) -> Iterator[list[RequestOutput]]:
    """Take steps until no request is left, and yield after each one the requests that ended in it.

    stuck: returns what to say if that takes too long.
    """
    end = time.monotonic() + MOST_SECONDS
    while one.engine.has_unfinished_requests():
        assert time.monotonic() < end, stuck()
        yield [output for output in one.engine.step() if output.finished]


def answer_of(output: RequestOutput) -> tuple[list[int], int]:
    """Return its tokens, and how many of the prompt were not computed."""
    return list(output.outputs[0].token_ids), output.num_cached_tokens


class Served:
    """One engine; each round asks the same again."""

    def __init__(self, one: InProcess, params=params):
        self.one = one
        self.params = params
        self.side = side_of(one.core.scheduler)
        self.rounds = 0
        self.cached = 0  # of all prompts, as vLLM says it

    def ask(self, texts: list[str], tokens: int = 8) -> list[str]:
        self.rounds += 1
        ids = [f"{self.rounds}-{number}" for number in range(len(texts))]
        for number, text in enumerate(texts):
            self.one.engine.add_request(ids[number], {"prompt": text}, self.params(number, tokens))
        return ids

    def answers(self, while_running=lambda: None) -> dict[str, tuple]:
        """By id: tokens, and how many of the prompt were not computed."""
        found = {}
        for ended in steps_of(self.one, self.stuck):
            for output in ended:
                found[output.request_id] = answer_of(output)
                self.cached += output.num_cached_tokens
            while_running()
        self.flush()
        return found

    def by_tier(self) -> dict[str, int]:
        """Tokens that were cached, as the connector has counted them."""
        stats = self.side.stats()
        return {tier: stats[f"cached_{tier}_tokens"] for tier in ("device", "host", "disk", "kv_store", "other")}

    def stuck(self) -> str:
        """Who has which blocks."""
        scheduler = self.one.core.scheduler
        names = ("running", "waiting", "kv_holding_waiting")
        queues = {
            name: [(r.request_id, r.status.name, r.num_computed_tokens) for r in getattr(scheduler, name)]
            for name in names
        }
        held = [block.block_id for block in scheduler.kv_cache_manager.block_pool.blocks if block.ref_cnt > 0]
        room = {
            "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "kept for": [(r.request_id, scheduler._request_remaining_blocks(r)) for r in scheduler._inflight_prefills],
        }
        return f"no request ends: {queues}, held blocks {held}, {room}, {self.side.stats()}"

    def flush(self) -> None:
        """What is to be stored is stored. An engine in this process takes no step by itself."""
        end = time.monotonic() + MOST_SECONDS
        while self.side.busy():
            assert time.monotonic() < end, self.side.stats()
            self.one.engine.step()
            time.sleep(0.001)
        self.side.core.check()

    def round(self, texts: list[str], tokens: int = 8) -> list:
        ids = self.ask(texts, tokens)
        found = self.answers()
        return [found[i] for i in ids]


def worker_side():
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker


def first_schedule(scheduler, side) -> list[int]:
    """Gets, when it was: the tokens that its next step schedules, and the requests that load then."""
    stock, seen = scheduler.schedule, []

    def schedule(*args, **kwargs):
        del scheduler.schedule
        output = stock(*args, **kwargs)
        seen.extend((output.total_num_scheduled_tokens, side.core.loading))
        return output

    scheduler.schedule = schedule
    return seen
