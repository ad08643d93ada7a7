# SPDX-License-Identifier: Apache-2.0
"""Two engines in processes of their own, one of which computes prompts for the other: NIXL carries the KV over.

This process has the consumer, its child the producer. It prints what became of each scenario.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path

from conftest import InProcess
from ports import free_port
from requests_of_tests import final, run
from vllm import SamplingParams

from torpor import errors

LEASE_SECONDS = 6  # for which the producer keeps what the consumer has not pulled
PROMPTS = {"first": 100, "second": 75, "third": 130}  # length in tokens; blocks have 32
ASK = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


def prompt(name: str) -> dict:
    return {"prompt_token_ids": [20 + (len(name) + 3) * at % 97 for at in range(PROMPTS[name])]}


def params(tokens: int, transfer: dict | None = None) -> SamplingParams:
    extra = {} if transfer is None else {"kv_transfer_params": transfer}
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra)


def refused(call) -> str:
    try:
        call()
    except errors.Error as problem:
        assert not problem.state_changed
        return f"{type(problem).__name__}: {problem.what}"
    return ""


class Side:
    """An engine at one end of the transfers."""

    def __init__(self, role: str, model: Path, directory: Path, **more):
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        transfer = {
            "kv_connector": "NixlConnector", "kv_role": f"kv_{role}", "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
        }  # fmt: skip
        self.one = InProcess(model, directory / role, kv_transfer_config=transfer, max_model_len=256, **more)
        self.llm, self.engine, self.core = self.one.llm, self.one.engine, self.one.core

    def idle_step(self) -> None:
        _, executed = self.core.step_fn()
        self.core.post_step(executed)


class Producer(Side):
    def prefill(self, name: str) -> dict:
        """Compute a prompt. Return what the consumer needs to pull its blocks."""
        self.engine.add_request(name, prompt(name), params(1, ASK))
        outputs = []
        while not outputs:
            outputs = self.engine.step()
        return outputs[0].kv_transfer_params

    def finish_sends(self) -> None:
        while self.core.scheduler.has_requests():
            self.idle_step()

    def use_all_blocks(self) -> None:
        """Compute other prompts in every block that is free."""
        for step in range(50, 54):
            given = {"prompt_token_ids": [20 + step * at % 97 for at in range(130)]}
            self.engine.add_request(f"other-{step}", given, params(2))
        run(self.engine)

    def refuses_to_sleep(self) -> str:
        return refused(lambda: self.llm.sleep(level=1, preserve_state=True, timeout=0.3))

    def sleep_and_wake(self) -> int:
        kept = self.llm.sleep(level=1, preserve_state=True).kept_blocks
        assert self.llm.wake_up().fully_awake
        return kept

    def serve(self, connection) -> None:
        with contextlib.suppress(EOFError):
            while True:
                name, *arguments = connection.recv()
                try:
                    connection.send(("ok", getattr(self, name)(*arguments)))
                except BaseException:
                    connection.send(("failed", traceback.format_exc()))


def produce(connection, others, model: Path, directory: Path) -> None:
    others.close()  # so that it ends with the consumer
    Producer("producer", model, directory, num_gpu_blocks_override=12).serve(connection)


class Pair:
    def __init__(self, model: Path, directory: Path):
        processes = multiprocessing.get_context("fork")
        self._connection, theirs = processes.Pipe()
        words = (theirs, self._connection, model, directory)
        processes.Process(target=produce, args=words, daemon=True).start()
        theirs.close()
        self.consumer = Side("consumer", model, directory)
        self.expected = {name: self.finish(self.pull(name))[name] for name in PROMPTS}

    def producer(self, name: str, *arguments):
        self._connection.send((name, *arguments))
        outcome, value = self._connection.recv()
        assert outcome == "ok", value
        return value

    def pull(self, name: str, steps: int = 0) -> dict:
        """Answers so far of a request whose prompt the producer has computed."""
        engine = self.consumer.engine
        engine.add_request(name, prompt(name), params(24, self.producer("prefill", name)))
        return run(engine, steps)

    def finish(self, answers: dict) -> dict:
        found = final(answers | run(self.consumer.engine))
        self.producer("finish_sends")
        self.consumer.one.llm.reset_prefix_cache()
        return found

    # --- scenarios ---

    def consumer_sleeps(self) -> dict:
        """One request runs, and the KV of another one is on its way."""
        scheduler = self.consumer.core.scheduler
        answers = self.pull("first")
        while not scheduler.running:
            answers |= run(self.consumer.engine, 1)
        answers |= self.pull("second", 1)
        waiting = sum(request.status.name == "WAITING_FOR_REMOTE_KVS" for request in scheduler.requests.values())
        kept = self.consumer.llm.sleep(level=1, preserve_state=True).kept_blocks
        answers |= self.consumer.one.stopped()
        assert self.consumer.llm.wake_up().fully_awake
        same = self.finish(answers) == {name: self.expected[name] for name in ("first", "second")}
        after = self.finish(self.pull("third")) == {"third": self.expected["third"]}
        return {
            "waiting": waiting, "kept": kept, "same": same, "after": after, "recomputed": scheduler.torpor_recomputed,
        }  # fmt: skip

    def sleeps_longer_than_the_lease(self) -> dict:
        """A request waits in the queue over a sleep. When it runs, the producer has no KV of it any more."""
        self.pull("third")
        self.consumer.llm.sleep(level=1, preserve_state=True)
        self.producer("finish_sends")  # its lease has ended
        self.producer("use_all_blocks")
        assert self.consumer.llm.wake_up().fully_awake
        return {"same": self.finish({}) == {"third": self.expected["third"]}}

    def producer_is_refused(self) -> dict:
        """Nobody has pulled yet what it holds."""
        transfer = self.producer("prefill", "first")
        why = self.producer("refuses_to_sleep")
        self.consumer.engine.add_request("first", prompt("first"), params(24, transfer))
        return {"why": why, "same": self.finish({}) == {"first": self.expected["first"]}}

    def producer_sleeps(self) -> dict:
        kept = self.producer("sleep_and_wake")
        return {"kept": kept, "same": {name: self.finish(self.pull(name))[name] for name in PROMPTS} == self.expected}


def main() -> None:
    pair = Pair(Path(sys.argv[1]), Path(sys.argv[2]))
    print("RESULT " + json.dumps({name: getattr(pair, name)() for name in sys.argv[3:]}), flush=True)


if __name__ == "__main__":
    main()
