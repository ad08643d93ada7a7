# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine of a model with several KV groups, with torpor's KV connector or one of vLLM's.

    hybrid_process.py MODEL FOLDER CONNECTOR HOST_BYTES OPTIONS

CONNECTOR: none, torpor, Simple, Offloading. OPTIONS: of the engine, as JSON. Before each round the device forgets its
prefixes: what is cached comes from the connector, or from requests of the same round. Prints the lengths of all
prompts; by round each request's tokens, and how many of its prompt were cached; and how many preemptions there were.
"""

import json
import sys
import time
from pathlib import Path

import offloading_on_cpu
from conftest import InProcess
from connector_served import ENGINE, answer_of, params, prompts, steps_of
from zygote import MOST_SECONDS

ROUNDS = 3


def arguments(connector: str, host_bytes: int) -> dict:
    def of_vllm(name: str, **extra) -> dict:
        config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return {"kv_transfer_config": config}

    if connector == "torpor":
        # A slow machine leaves no block out: the policy may take its time, and each block is held at once. One that
        # waits for its store job is not held, and a full device uses it again first.
        at_once = {"min_batch_size": 1, "on_deck_batches": 64, "max_concurrent_transfers": 64}
        patient = at_once | {"policy_timeout_ms": 1000 * MOST_SECONDS}
        return {"torpor": {"offload": "eager", "host_bytes": host_bytes, "advanced": patient}}
    if connector == "Simple":
        offloading_on_cpu.install_simple()
        return of_vllm("SimpleCPUOffloadConnector", cpu_bytes_to_use=host_bytes)
    if connector == "Offloading":
        offloading_on_cpu.install()
        return of_vllm("OffloadingConnector", cpu_bytes_to_use=host_bytes, offload_prompt_only=False)
    return {}


def is_busy(connector: str, side) -> bool:
    """Return whether something is to be stored or on its way."""
    if connector == "torpor":
        return side.scheduler.busy()
    if connector == "Simple":
        manager = side.scheduler_manager
        return bool(manager._store_event_to_blocks or manager._pending_finished_stores)
    return bool(side.connector_scheduler._jobs) if connector == "Offloading" else False


class Asked:
    def __init__(self, one: InProcess, connector: str):
        self.one, self.connector = one, connector
        self.scheduler = one.core.scheduler
        self.rounds = self.preemptions = 0
        self.lengths: dict[str, int] = {}
        stock = self.scheduler._preempt_request

        def preempt(*args, **kwargs):
            self.preemptions += 1
            return stock(*args, **kwargs)

        self.scheduler._preempt_request = preempt

    def answers(self) -> dict[str, tuple]:
        def waiting() -> dict[str, str]:
            return {r.request_id: r.status.name for r in self.scheduler.requests.values()}

        found = {}
        for ended in steps_of(self.one, waiting):
            for output in ended:
                self.lengths[output.request_id] = len(output.prompt_token_ids)
                found[output.request_id] = answer_of(output)
        return found

    def settle(self) -> None:
        """Take steps until all is stored; vLLM's connectors hear of it in steps, and vLLM hands over the last request's
        states in the step after it."""
        end = time.monotonic() + MOST_SECONDS
        while True:
            self.one.engine.add_request(f"idle {time.monotonic()}", {"prompt_token_ids": [20, 21]}, params(0, 1))
            self.answers()
            if not is_busy(self.connector, self.scheduler.connector):
                return
            assert time.monotonic() < end, "the connector has always something to do"

    def round(self, texts: list[str], tokens: int) -> list[tuple]:
        assert self.scheduler.reset_prefix_cache()
        self.rounds += 1
        ids = [f"{self.rounds}-{number}" for number in range(len(texts))]
        # What came last comes first: where there is room for a part, it is what the next round finds.
        order = range(len(texts)) if self.rounds % 2 else reversed(range(len(texts)))
        for number in order:
            self.one.engine.add_request(ids[number], {"prompt": texts[number]}, params(number, tokens))
        found = self.answers()
        self.settle()
        return [found[i] for i in ids]


def asleep_in_the_last_block(asked: Asked) -> dict:
    """A prompt's last block was stored while it was not full; the answer goes on to fill it, and a sleep is between.
    `slots`: those of host memory that the sleep takes for the request's blocks of full attention."""
    slots = []
    prompt = {"prompt_token_ids": [260 + number * 7 % 200 for number in range(52)]}

    def ask(name: str, steps: int) -> list[int]:
        asked.one.engine.add_request(name, prompt, params(0, 11))
        outputs = [output for _ in range(steps) for output in asked.one.engine.step()]
        if steps:
            assert not outputs[-1].finished and len(outputs[-1].outputs[0].token_ids) > 4
            asked.one.llm.sleep(level=1, preserve_state=True)
            [request] = asked.scheduler.requests
            table = asked.scheduler.kv_cache_manager.coordinator.single_type_managers[2].req_to_blocks[request]
            side = asked.scheduler.connector.scheduler
            slots.extend(side.host_slots([block.block_id for block in table], False))
            asked.one.llm.wake_up()
        [(tokens, _)] = asked.answers().values()
        return tokens

    return {"slept": ask("slept", 9), "whole": ask("whole", 0), "slots": slots}


def main() -> None:
    model, folder, connector, host_bytes, options = sys.argv[1:6]
    given = ENGINE | {"num_gpu_blocks_override": 120} | arguments(connector, int(host_bytes)) | json.loads(options)
    asked = Asked(InProcess(Path(model), Path(folder) / "checkpoints", **given), connector)
    texts = prompts()
    texts += [f"{text} and so on" for text in texts[:5]]  # they continue earlier ones
    rounds = [asked.round(texts, 12) for _ in range(ROUNDS)]
    result = {
        "lengths": [asked.lengths[f"1-{number}"] for number in range(len(texts))],
        "tokens": [[tokens for tokens, _ in one] for one in rounds],
        "cached": [[cached for _, cached in one] for one in rounds],
        "preemptions": asked.preemptions,
        "block_tokens": [group.kv_cache_spec.block_size for group in asked.scheduler.kv_cache_config.kv_cache_groups],
        "stats": asked.scheduler.connector.scheduler.stats() if connector == "torpor" else {},
    }
    if connector == "torpor":
        result |= asleep_in_the_last_block(asked)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
