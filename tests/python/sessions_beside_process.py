# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: an engine with sessions and other KV connectors, whose requests leave and come back.

Prints what became of each scenario.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path

import offloading_on_cpu
import scenarios
from conftest import InProcess
from requests_of_tests import REQUESTS, run
from scripted_connector import LEDGER
from test_sessions import alike
from vllm.v1.request import RequestStatus

from torpor.errors import Error
from torpor.vllm import connector_sleep

NAMES = ["greedy", "seeded", "two", "stops", "long-seeded"]
LEAVE = ["greedy", "long-seeded", "two"]


class Engine:
    def __init__(self, model: Path, directory: Path, torpor: dict, transfer: dict | None):
        if "OffloadingConnector" in json.dumps(transfer):
            offloading_on_cpu.install()
        options = {} if transfer is None else {"kv_transfer_config": transfer}
        self.one = InProcess(model, directory, torpor={"sessions": True} | torpor, **options)
        self.torpor, self.core = self.one.llm.torpor, self.one.core
        self.expected = self.one.finish(self.one.begin(0, NAMES))

    def connectors(self) -> list[str]:
        connector = self.core.scheduler.connector
        return [type(each).__name__ for each in getattr(connector, "sub_connectors", [connector])]

    def same(self, answers: dict) -> bool:
        finished = self.one.finish(answers)
        assert not self.torpor.hibernated() and not self.core.scheduler.requests.keys() & set(NAMES)
        differ = [name for name in self.expected if not alike(finished.get(name), self.expected[name])]
        assert not differ, f"{differ}: {[(finished.get(each), self.expected[each]) for each in differ]}"
        return finished.keys() == self.expected.keys()

    # --- scenarios ---

    def leaves_and_comes_back(self) -> dict:
        of = []
        for steps in (2, 7):
            answers = self.one.begin(steps, NAMES)
            left = self.torpor.hibernate(LEAVE)
            answers |= run(self.one.engine)  # the others to their ends
            resumed = self.torpor.resume(left.id)
            of.append([left.tokens > 0, not resumed.recomputed, self.same(answers)])
        return {"of": of}

    def comes_back_at_once(self) -> dict:
        answers = self.one.begin(5, NAMES)
        for _ in range(3):
            left = self.torpor.hibernate(LEAVE)
            self.torpor.resume(left.id)
            while any(each.status is RequestStatus.WAITING_FOR_REMOTE_KVS for each in self._requests()):
                answers |= run(self.one.engine, 1)
            answers |= run(self.one.engine, 1)
        return {"same": self.same(answers)}

    def comes_back_during_transfers_of_others(self) -> dict:
        answers = self.one.begin(5, NAMES)
        left = self.torpor.hibernate(["greedy", "two"])
        LEDGER.held = True
        try:
            answers |= run(self.one.engine)  # the others to their ends: the scripted connector sends their KV
            held = any(each.is_finished() for each in self._requests())
            self.torpor.resume(left.id)
        finally:
            LEDGER.held = False
        return {"held": held, "same": self.same(answers)}

    def _requests(self) -> list:
        return list(self.core.scheduler.requests.values())

    def goes_to_disk(self) -> dict:
        answers = self.one.begin(6, NAMES)
        left = self.torpor.hibernate(LEAVE, to="disk")
        answers |= run(self.one.engine, 3)
        self.torpor.resume(left.path)
        return {"stored": left.path != "", "same": self.same(answers)}

    def forks(self) -> dict:
        answers = self.one.begin(6, NAMES)
        forked = self.torpor.fork("greedy", 2)
        found = self.one.finish(answers)
        same = all(alike(found[child], self.expected["greedy"]) for child in forked.children)
        return {"children": len(forked.children), "same": same}

    def loses_its_kv_before_children_run(self) -> dict:
        """As pause_generation(mode="keep") does. What torpor's connector moves then has ended first."""
        answers = self.one.begin(6, NAMES)
        forked = self.torpor.fork("greedy", 2)
        reset = self.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        pool = self.core.scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        found = self.one.finish(answers)
        same = all(alike(found[child], self.expected["greedy"]) for child in forked.children)
        return {"reset": reset, "free": free, "same": same}

    def sessions_of_what_is_never_looked_up(self) -> dict:
        """Of each session, how many bytes torpor's tiers know of it, and whether they can be demoted."""
        if connector_sleep.side_of(self.core.scheduler) is None:
            return {}
        _, greedy = REQUESTS["greedy"]
        for name in ("resumed", "forked", "logprobs"):
            params = copy.copy(greedy)
            params.prompt_logprobs = 1 if name == "logprobs" else None
            prompt = {"prompt_token_ids": [len(name) + 3 * i for i in range(100)]}
            self.one.engine.add_request(name, prompt, params, session_id=name)
        run(self.one.engine, 4)
        left = self.torpor.hibernate("resumed")
        self.torpor.fork("forked", 1)
        self.one.engine.abort_request(["forked"])
        self.torpor.resume(left.id)
        run(self.one.engine)
        known = {each.id: each.bytes for each in self.torpor.sessions.known()}
        names = ("resumed", "forked", "logprobs")
        return {name: [known.get(name, 0) > 0, self.torpor.sessions[name].demote().outcome] for name in names}

    def is_reset_during_a_prefetch(self) -> dict:
        """Nobody but a session's load has blocks of the device then. Of torpor's connector alone."""
        if (side := connector_sleep.side_of(self.core.scheduler)) is None:
            return {}
        prompt, params = REQUESTS["prefix-a"]
        self.one.engine.add_request("asked", prompt, params, session_id="agent")
        run(self.one.engine)
        self.torpor.sessions["agent"].demote(to="host")
        begun = side.core.session_call({"verb": "prefetch", "session": "agent", "tenant": "", "to": "device"})
        reset = self.core.reset_prefix_cache()
        answer = side.core.session_answer("", begun["action_id"])
        return {"begun": not begun["done"], "reset": reset, "outcome": answer["outcome"]}

    def ends_while_away(self) -> dict:
        answers = self.one.begin(6, NAMES)
        self.torpor.hibernate(LEAVE)
        self.one.engine.abort_request(LEAVE)
        rest = self.one.finish(answers)
        kept = {name: self.expected[name] for name in NAMES if name not in LEAVE}
        same = all(alike(rest[name], value) for name, value in kept.items())
        return {"same": same, "images": len(self.torpor.hibernated())}


def main(model: Path, torpor: dict, transfer: dict | None) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine(model, Path(directory), torpor, transfer)
        result: dict = {"connectors": engine.connectors()}
        names = (
            "leaves_and_comes_back", "comes_back_at_once", "comes_back_during_transfers_of_others", "goes_to_disk",
            "forks", "loses_its_kv_before_children_run", "is_reset_during_a_prefetch",
            "sessions_of_what_is_never_looked_up", "ends_while_away",
        )  # fmt: skip
        result |= scenarios.play(engine, names)
        try:
            engine.one.llm.sleep(level=1, preserve_state=True)
            result["sleep"] = "slept"
            engine.one.llm.wake_up()
        except Error as problem:
            result["sleep"] = str(problem)
        result["counts"] = offloading_on_cpu.COUNTS
        return result


if __name__ == "__main__":
    assert set(NAMES) <= set(REQUESTS)
    words = [json.loads(word) for word in sys.argv[2:]]
    print("RESULT " + json.dumps(main(Path(sys.argv[1]), *words)), flush=True)
