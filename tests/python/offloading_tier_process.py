# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine with vLLM's OffloadingConnector, which has a tier of torpor's.

    offloading_tier_process.py MODEL FOLDER TIER HOST_BYTES SCENARIO…

TIER: options of the tier, as JSON; null: an engine without a connector. Prints what each scenario got.
"""

import json
import resource
import signal
import sys
import time
from pathlib import Path

import offloading_on_cpu
from conftest import InProcess
from connector_served import ENGINE, answer_of, params, prompts, steps_of
from vllm.v1.request import RequestStatus
from zygote import MOST_SECONDS

TIER = {"type": "TorporTier", "module_path": "torpor.vllm.offloading_tier"}


def arguments(tier: dict, host_bytes: int) -> dict:
    """As docs/offloading.md has it."""
    tiers = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [TIER | tier]}
    return {
        "kv_offloading_size": host_bytes / 2**30,
        "kv_transfer_config": {"kv_connector_extra_config": tiers | {"offload_prompt_only": False}},
    }


class Offloading:
    def __init__(self, model: str, folder: Path, tier: dict | None, host_bytes: int):
        transfer = {}
        if tier is not None:
            offloading_on_cpu.install()
            transfer = arguments(tier, host_bytes)
        self.one = InProcess(Path(model), folder / "checkpoints", **(ENGINE | transfer))
        self.scheduler = self.one.core.scheduler
        side = self.scheduler.connector
        self.manager = None if side is None else side.connector_scheduler.manager
        self.tier = None if side is None else self.manager.secondary_tiers[0]
        self.rounds = 0

    def ask(self, texts: list[str]) -> list[str]:
        self.rounds += 1
        ids = [f"{self.rounds}-{number}" for number in range(len(texts))]
        for number, text in enumerate(texts):
            self.one.engine.add_request(ids[number], {"prompt": text}, params(number))
        return ids

    def answers(self) -> dict[str, tuple]:
        def waiting() -> dict[str, str]:
            return {r.request_id: r.status.name for r in self.scheduler.requests.values()}

        return {output.request_id: answer_of(output) for ended in steps_of(self.one, waiting) for output in ended}

    def settle(self) -> None:
        """All that is to be stored is stored; vLLM's connector hears of it in steps."""
        end = time.monotonic() + MOST_SECONDS
        while self.manager is not None and self.busy():
            assert time.monotonic() < end, self.manager._jobs
            self.one.engine.add_request(f"idle {time.monotonic()}", {"prompt_token_ids": [20, 21]}, params(0, 1))
            self.answers()

    def busy(self) -> bool:
        return bool(self.scheduler.connector.connector_scheduler._jobs) or self.manager.has_pending_work()

    def round(self, texts: list[str]) -> dict:
        """Answers of requests of which the device has nothing."""
        assert self.scheduler.reset_prefix_cache()
        ids = self.ask(texts)
        found = self.answers()
        self.settle()
        result = {"tokens": [found[i][0] for i in ids], "cached": sum(found[i][1] for i in ids)}
        return result | ({} if self.tier is None else {"stats": self.tier.stats()})


def first(engine: Offloading) -> dict:
    return engine.round(prompts())


def again(engine: Offloading) -> dict:
    return engine.round(prompts())


def until_all_is_stored(engine: Offloading) -> dict:
    """Three rounds, or more: what vLLM finds no room for on its way to the tier is offered again in a later one."""
    for number in range(30):
        result = engine.round(prompts())
        if number >= 2 and result["stats"]["blocks"] == 72:
            break
    return result


def others(engine: Offloading) -> dict:
    """Prompts that share no block with the first ones."""
    return engine.round([f"others: {text}" for text in prompts()])


def aborted(engine: Offloading) -> dict:
    """Requests that end while their blocks come from the tier; those beside them and those that follow go on."""
    assert engine.scheduler.reset_prefix_cache()
    ids = engine.ask(prompts())
    loading = (RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS)
    end = time.monotonic() + MOST_SECONDS
    while not engine.manager._jobs:
        assert time.monotonic() < end, "nothing is loaded"
        engine.one.engine.step()
    waiting = [r.request_id.rsplit("-", 1)[0] for r in engine.scheduler.requests.values() if r.status in loading]
    gone = waiting[::2]
    engine.one.engine.abort_request(gone)
    found = engine.answers()
    engine.settle()
    left = [i for i in ids if i in found]
    result = {"gone": len(gone), "tokens": {ids.index(i): found[i][0] for i in left}}
    return result | {"held": len(engine.scheduler.requests), "again": engine.round(prompts())}


def full(engine: Offloading) -> dict:
    """No file of this process may become longer than it is: writes of new segments fail."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        return {"others": others(engine), "again": engine.round(prompts())}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def reset(engine: Offloading) -> dict:
    """A reset with the connector, as a pause of vLLM does; what is found then is the tier's option."""
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.settle()
    return engine.round(prompts())


SCENARIOS = {each.__name__: each for each in (first, again, until_all_is_stored, others, aborted, full, reset)}


def main() -> None:
    model, folder, tier, host_bytes, *scenarios = sys.argv[1:]
    engine = Offloading(model, Path(folder), json.loads(tier), int(host_bytes))
    result = {"recovered": None if engine.tier is None else engine.tier.stats()["recovered_blocks"]}
    for name in scenarios:
        result[name] = SCENARIOS[name](engine)
    engine.one.core.shutdown()
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
