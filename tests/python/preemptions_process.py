# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine with few KV blocks, whose requests preempt each other. Prints what became of each
scenario."""

import json
import sys
import tempfile
from pathlib import Path

import scenarios
from conftest import InProcess
from requests_of_tests import run
from test_sessions import alike
from vllm import SamplingParams

BLOCKS = 17  # one of them is vLLM's own; each request needs up to 6 of 32 tokens


def params(number: int) -> SamplingParams:
    kind = {"temperature": 0} if number % 2 == 0 else {"temperature": 0.9, "seed": number}
    penalty = {"presence_penalty": 0.3} if number == 2 else {}
    return SamplingParams(max_tokens=90, ignore_eos=True, logprobs=2, **kind, **penalty)


REQUESTS = {
    f"r{number}": ({"prompt_token_ids": [20 + (number * 31 + 7 * i) % 900 for i in range(70 + number)]}, params(number))
    for number in range(5)
}


class Engine:
    def __init__(self, model: Path, directory: Path, torpor: dict):
        self.one = InProcess(
            model,
            directory,
            torpor=torpor,
            requests=REQUESTS,
            num_gpu_blocks_override=BLOCKS,
            max_num_seqs=8,
            max_model_len=256,
        )
        self.core = self.one.core
        self._watch()
        self.times = self.scheduled = 0
        self.expected: dict = {}
        for name in REQUESTS:
            self.expected |= self.one.finish(self.one.begin(0, [name]))
        assert self.times == 0

    def preempted(self) -> dict:
        return self.one.llm.torpor.call("state")["preempted"]

    def begin(self, steps: int) -> dict:
        self.before, self.times, self.scheduled = self.preempted(), 0, 0
        return self.one.begin(steps)

    def _watch(self) -> None:
        """Count what the scheduler does. A scheduler with attributes of its own could not be put into a checkpoint."""
        of, engine = type(self.core.scheduler), self
        preempt, schedule = of._preempt_request, of.schedule

        def counted(*args, **kwargs):
            engine.times += 1
            return preempt(*args, **kwargs)

        def added(*args, **kwargs):
            output = schedule(*args, **kwargs)
            engine.scheduled += output.total_num_scheduled_tokens
            return output

        of._preempt_request, of.schedule = counted, added

    def end(self, answers: dict) -> dict:
        found = self.one.finish(answers)
        after = self.preempted()
        while self.core.scheduler.has_requests():
            self.one.engine.step()
        return {
            "same": {name: alike(found.get(name), self.expected[name]) for name in REQUESTS},
            "preempted": self.times,
            "counts": {name: count - self.before.get(name, 0) for name, count in after.items()},
            # Tokens that were computed more than once.
            "again": self.scheduled - sum(len(REQUESTS[name][0]["prompt_token_ids"]) + 89 for name in REQUESTS),
            "images": self.one.llm.torpor.call("images"),
            "used": self.used(),
        }

    def used(self) -> int:
        """Bytes of host memory of images."""
        [ledger] = self.one.llm.torpor.ledger()
        return ledger.arena_used_bytes - sum(tag.backup_host_bytes for tag in ledger.tags.values())

    def until_one_is_away(self) -> dict:
        answers: dict = {}
        while not self.one.llm.torpor.call("images"):
            answers |= run(self.one.engine, 1)
        return answers

    # --- scenarios ---

    def preempt(self) -> dict:
        return self.end(self.begin(0))

    def are_aborted(self) -> dict:
        self.begin(0)
        answers = self.until_one_is_away()
        [image] = self.one.llm.torpor.call("images")
        [gone] = image["requests"]
        self.one.engine.abort_request([gone.rsplit("-", 1)[0]])
        return self.end(answers) | {"gone": gone.rsplit("-", 1)[0]}

    def get_new_weights(self) -> dict:
        answers = self.begin(0)
        answers |= self.until_one_is_away()
        self.one.llm.reset_prefix_cache()  # the KV of before is not used again
        return self.end(answers)

    def lose_their_kv_and_are_hibernated(self) -> dict:
        """The scheduler has looked at the request since its KV may be used no more, and has no blocks for it."""
        answers = self.begin(0)
        answers |= self.until_one_is_away()
        [image] = self.one.llm.torpor.call("images")
        [away] = image["requests"]
        self.core.reset_prefix_cache()
        answers |= run(self.one.engine, 1)
        waits = away in self.core.scheduler.connector.admissions.requests
        left = self.one.llm.torpor.hibernate(away.rsplit("-", 1)[0])
        self.one.llm.torpor.resume(left.id)
        return self.end(answers) | {"waits": waits}

    def are_aborted_by_a_sleep(self) -> dict:
        """Return the bytes used in host memory during such a sleep, without a preempted request and with one."""
        asleep = []
        for waits in (False, True):
            self.begin(0)
            answers = self.until_one_is_away() if waits else {}
            self.one.llm.sleep(level=1, mode="abort")
            [ledger] = self.one.llm.torpor.ledger()
            asleep.append(ledger.arena_used_bytes)
            self.one.llm.wake_up()
            self.one.engine.abort_request(list(REQUESTS))  # vLLM does not tell the front end of a core in its process
        return self.end(answers) | {"asleep": asleep}

    def sleep(self) -> dict:
        answers = self.begin(0)
        answers |= self.until_one_is_away()
        self.one.llm.sleep(level=1, preserve_state=True)
        self.one.llm.wake_up()
        return self.end(answers)

    def go_to_disk(self) -> dict:
        answers = self.begin(0)
        answers |= self.until_one_is_away()
        report = self.one.llm.sleep(level=1, preserve_state=True, to="disk")
        self.one.llm.wake_up()
        return self.end(answers) | {"requests": report.requests}

    def are_hibernated(self) -> dict:
        answers = self.begin(0)
        answers |= self.until_one_is_away()
        [image] = self.one.llm.torpor.call("images")
        [away] = image["requests"]
        left = self.one.llm.torpor.hibernate(away.rsplit("-", 1)[0])
        answers |= run(self.one.engine, 3)
        self.one.llm.torpor.resume(left.id)
        return self.end(answers)


def main(model: Path, torpor: dict, names: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        return scenarios.play(Engine(model, Path(directory), torpor), names)


if __name__ == "__main__":
    words = [json.loads(word) for word in sys.argv[2:]]
    print("RESULT " + json.dumps(main(Path(sys.argv[1]), *words)), flush=True)
